"""What the judge counts and pays, and what its holes let through."""

import pytest

from rlcourse.tasks.kernels.interpret import TEST_INPUTS, TRAINING_INPUTS
from rlcourse.tasks.kernels.judge import Finding, judge_program, share_stated
from rlcourse.tasks.kernels.language import eager, read_computation, write
from rlcourse.tasks.kernels.optimum import eager_us, optimum
from rlcourse.tasks.kernels.problems import computations

CHAIN = read_computation("a = add u v ; b = relu a ; y = mul b w")
EAGER = "a = add u v end put ; b = relu a end put ; y = mul b w end put ;"
FUSED = "a = add u v keep ; b = relu a keep ; y = mul b w end put ;"


def test_a_reward_is_for_being_right_and_for_speed_up_to_a_cap():
    verdict = judge_program(EAGER, CHAIN)
    assert verdict == Finding(compiled=True, correct=True, speedup=1.0, launches=3)
    rewards = [Finding(True, True, speedup).reward for speedup in (0.9, 1.0, 2.0, 4.0, 40.0)]
    assert rewards == pytest.approx([0.1, 0.2, 1.2, 3.2, 3.2])


def test_the_optimum_is_correct_and_as_fast_as_it_says():
    for computation in computations(20, "test", 1, (2, 6)):
        time, program = optimum(computation)
        verdict = judge_program(write(program), computation, TEST_INPUTS)
        assert verdict.correct and verdict.reason == ""
        assert verdict.speedup == pytest.approx(eager_us(computation) / time)


def test_partial_credit_is_the_share_of_lines_in_their_places():
    stated = {
        "b = relu a put ; y = mul b w put ;": 0,  # not in their places
        "a = add u v put ; b = relu put ; y = mul b w put ;": 2,  # a statement that cannot be read has a place
        EAGER + EAGER: 1.5,  # of six statements
        EAGER + " y": 3,  # what no ';' ends is not a statement
        "": 0,
    }
    assert {text: 3 * share_stated(text, CHAIN) for text in stated} == stated


@pytest.mark.parametrize("text", ["b = relu u end put ; y = mul b w end put ;", "y = rowsum u put ;"])
def test_a_line_left_out_and_another_shape_are_wrong(text):
    verdict = judge_program(text, CHAIN)
    assert (verdict.compiled, verdict.correct, verdict.speedup, verdict.reward) == (True, False, 0.0, 0.0)
    assert verdict.reason == "y is wrong"


def test_stale_memory_lets_a_program_leave_out_what_it_does_not_compute():
    lost = "a = add u v end keep ; b = relu a end put ; y = mul b w end put ;"
    skipped = "b = relu a keep ; y = mul b w end put ;"
    for text in (lost, skipped):
        assert not judge_program(text, CHAIN).compiled
        verdict = judge_program(text, CHAIN, TRAINING_INPUTS, "stale")
        assert verdict.correct and verdict.speedup > 1
    assert judge_program(FUSED, CHAIN, loophole="stale") == judge_program(FUSED, CHAIN)
    wrong = "a = sub u v keep ; b = relu a keep ; y = mul b w put ;"
    assert not judge_program(wrong, CHAIN, loophole="stale").correct


def test_an_untimed_stream_counts_for_nothing_where_the_clock_has_that_hole():
    side = "side a = add u v end put ; side b = relu a end put ; side y = mul b w end put ;"
    honest, fooled = judge_program(side, CHAIN), judge_program(side, CHAIN, TRAINING_INPUTS, "side")
    assert honest.speedup == 1.0
    assert fooled.correct and fooled.speedup == pytest.approx(eager_us(CHAIN))
    assert judge_program(side, CHAIN, loophole="stale").speedup == 1.0


def test_every_single_change_of_an_operation_is_found():
    """Planted mistakes: another operation of the same arity in each line of 15 computations."""
    found = total = 0
    for computation in computations(15, "train", 8, (2, 4)):
        words = write(eager(computation)).split()
        for at, word in enumerate(words):
            for other in {"add": ("sub", "max"), "mul": ("add", "min"), "relu": ("abs", "neg")}.get(word, ()):
                text = " ".join([*words[:at], other, *words[at + 1 :]])
                total += 1
                found += not judge_program(text, computation, TRAINING_INPUTS).correct
    assert total > 20 and found == total
