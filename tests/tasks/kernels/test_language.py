"""What the compiler of the tile language accepts and refuses."""

import random

import pytest

from rlcourse.tasks.kernels import language
from rlcourse.tasks.kernels.language import CompileError, compile_program, eager, parse, read_computation, write

CHAIN = read_computation("a = add u v ; b = relu a ; y = mul b w")
JOIN = read_computation("a = add u v ; b = add w x ; y = mul a b")
SOFTMAX = read_computation("a = rowmax u ; b = sub u a ; c = exp b ; d = rowsum c ; y = div c d")
WIDE = read_computation("a = exp u ; b = exp v ; y = mul u v")
SHARE = read_computation("a = rowsum u ; b = mul v w ; y = add b a")


def compiled(text, computation=CHAIN, **options):
    return compile_program(parse(text), computation, **options)


def test_reductions_and_what_follows_from_them_alone_are_narrow():
    norm = read_computation("a = square u ; b = rowsum a ; c = sqrt b ; d = max c b ; y = div u d")
    assert norm.narrow == {"b", "c", "d"}
    assert CHAIN.narrow == frozenset()


def test_eager_is_a_launch_for_each_line_with_everything_put():
    assert write(eager(CHAIN)) == "a = add u v end put ; b = relu a end put ; y = mul b w end put ;"
    launches = [(launch.loads, launch.stores) for launch in compiled(write(eager(CHAIN)))]
    assert launches == [(("u", "v"), ("a",)), (("a",), ("b",)), (("b", "w"), ("y",))]


def test_a_launch_loads_each_input_once_and_stores_what_is_put():
    (launch,) = compiled("a = add u v keep ; b = relu a put ; y = mul b w end put ;")
    assert (launch.loads, launch.stores) == (("u", "v", "w"), ("b", "y"))
    (launch,) = compiled("a = add u u keep ; y = mul a u put ;", read_computation("a = add u u ; y = mul a u"))
    assert launch.loads == ("u",)


def test_programs_are_parsed_as_they_are_written():
    rng = random.Random(0)
    for _ in range(200):
        program = []
        for name in rng.sample(language.NAMES, 4):
            op, count = rng.choice([("add", 2), ("rowmax", 1), ("exp", 1)])
            line = language.Line(name, op, tuple(rng.choices(language.NAMES, k=count)))
            program.append(language.Statement(line, *(rng.random() < 0.5 for _ in range(3))))
        assert parse(write(program)) == program


@pytest.mark.parametrize("text", ["a = add u v ; a = neg u ; y = neg a", "y = neg b", "a = neg u", "y = neg u put"])
def test_what_is_no_computation_is_refused(text):
    with pytest.raises(CompileError):
        read_computation(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a = add u v put ; b", "does not end in ';'"),
        ("g = add u v put ;", "begins with NAME ="),
        ("side side a = add u v put ;", "begins with NAME ="),
        ("a = plus u v put ;", "no such operation"),
        ("a = add u z put ;", "add takes 2 operands"),
        ("a = add u v end ;", "after the operands"),
        ("a = add u v put keep ;", "after the operands"),
    ],
)
def test_what_is_no_program_is_refused(text, complaint):
    with pytest.raises(CompileError, match=complaint):
        parse(text)


REFUSED = [
    # an operand that is no input of this computation, or computed later
    (CHAIN, "a = add u x put ; b = relu a put ; y = mul b w put ;", "x is neither in memory nor in a register"),
    (CHAIN, "b = relu a put ; a = add u v put ; y = mul b w put ;", "a is neither"),
    # a kept value is lost when its launch ends
    (CHAIN, "a = add u v end keep ; b = relu a put ; y = mul b w put ;", "a is neither"),
    (CHAIN, "a = add u v put ; a = add u v put ; b = relu a put ; y = mul b w put ;", "a is computed twice"),
    (CHAIN, "u = add u v put ; b = relu u put ; y = mul b w put ;", "u is not a value of the computation"),
    (CHAIN, "a = add u v keep ; b = relu a keep ; y = mul b w keep ;", "y is never put"),
    (CHAIN, "a = add u v keep ; side b = relu a put ; y = mul b w put ;", "'side' stands inside"),
    # When b is added, a is still needed, though it is put: with w and x these are three.
    (JOIN, "a = add u v put ; b = add w x keep ; y = mul a b put ;", "out of registers at b"),
    # A result that nobody reads needs a place too.
    (WIDE, "a = add u v put ; b = exp v put ; y = mul u v put ;", "out of registers at a"),
    # `a` is one number per row in the computation; a program that computes a matrix under this name pays for it.
    (SHARE, "a = relu u keep ; b = mul v w keep ; y = add b a put ;", "out of registers at b"),
]


@pytest.mark.parametrize(("computation", "text", "complaint"), REFUSED)
def test_a_program_that_cannot_run_is_refused(computation, text, complaint):
    with pytest.raises(CompileError, match=complaint):
        compiled(text, computation)


def test_a_launch_holds_two_matrices_and_any_number_of_row_values():
    assert len(compiled("a = add u v end put ; b = add w x keep ; y = mul a b put ;", JOIN)) == 2
    assert compiled("a = exp u end put ; b = exp v end put ; y = mul u v put ;", WIDE)
    one_launch = "a = rowmax u keep ; b = sub u a keep ; c = exp b keep ; d = rowsum c keep ; y = div c d put ;"
    assert len(compiled(one_launch, SOFTMAX)) == 1
    (launch,) = compiled("b = mul v w keep ; a = rowsum u keep ; y = add b a put ;", SHARE)
    assert launch.narrow == {"a"}


def test_a_result_takes_the_place_of_an_operand_that_is_read_for_the_last_time():
    computation = read_computation("a = relu u ; b = relu v ; y = mul a b")
    assert compiled("a = relu u keep ; b = relu v keep ; y = mul a b put ;", computation)
    both = read_computation("a = add u v ; b = mul a u ; y = sub b v")  # v is needed to the end, u until b
    with pytest.raises(CompileError, match="out of registers at a"):
        compiled("a = add u v keep ; b = mul a u keep ; y = sub b v put ;", both)
