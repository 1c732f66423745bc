"""What the compiler of the tile language accepts and refuses."""

import random

import pytest

from rlcourse.tasks.kernels.language import (
    INPUTS,
    NAMES,
    CompileError,
    Computation,
    Line,
    Statement,
    compile_program,
    eager,
    parse,
    read_computation,
    write,
)

CHAIN = read_computation("a = add u v ; b = relu a ; y = mul b w")


def compiled(text, computation=CHAIN, **options):
    return compile_program(parse(text), computation, **options)


def refused(text, computation=CHAIN, **options):
    with pytest.raises(CompileError) as error:
        compiled(text, computation, **options)
    return str(error.value)


def test_a_computation_is_read_as_it_is_written():
    assert CHAIN.lines == (Line("a", "add", ("u", "v")), Line("b", "relu", ("a",)), Line("y", "mul", ("b", "w")))
    assert str(CHAIN) == "a = add u v ; b = relu a ; y = mul b w"
    assert CHAIN.inputs == ("u", "v", "w")
    assert read_computation("y = sub x u").inputs == ("u", "x")


def test_reductions_and_what_follows_from_them_alone_are_narrow():
    norm = read_computation("a = square u ; b = rowsum a ; c = sqrt b ; d = max c b ; y = div u d")
    assert norm.narrow == {"b", "c", "d"}
    assert CHAIN.narrow == frozenset()


def test_eager_is_a_launch_for_each_line_with_everything_put():
    assert write(eager(CHAIN)) == "a = add u v end put ; b = relu a end put ; y = mul b w end put ;"
    launches = compiled(write(eager(CHAIN)))
    assert [(launch.loads, launch.stores) for launch in launches] == [
        (("u", "v"), ("a",)),
        (("a",), ("b",)),
        (("b", "w"), ("y",)),
    ]


def test_one_launch_loads_the_inputs_and_stores_what_is_put():
    (launch,) = compiled("a = add u v keep ; b = relu a put ; y = mul b w end put ;")
    assert launch.loads == ("u", "v", "w")
    assert launch.stores == ("b", "y")


def test_a_value_is_loaded_once_a_launch():
    (launch,) = compiled("a = add u u keep ; y = mul a u put ;", read_computation("a = add u u ; y = mul a u"))
    assert launch.loads == ("u",)


def test_the_last_statement_ends_its_launch_with_or_without_saying_so():
    assert compiled("a = add u v keep ; b = relu a keep ; y = mul b w put ;") != []
    assert len(compiled("a = add u v end put ; b = relu a keep ; y = mul b w put ;")) == 2


def test_programs_are_parsed_as_they_are_written():
    rng = random.Random(0)
    for _ in range(200):
        program = []
        for name in rng.sample(NAMES, 4):
            op, count = rng.choice([("add", 2), ("rowmax", 1), ("exp", 1)])
            line = Line(name, op, tuple(rng.choices(NAMES, k=count)))
            program.append(Statement(line, *(rng.random() < 0.5 for _ in range(3))))
        assert parse(write(program)) == program


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "does not end in ';'"),
        ("   ", "does not end in ';'"),
        ("a = add u v put", "does not end in ';'"),
        ("a = add u v put ; b", "does not end in ';'"),
        (";", "begins with NAME ="),
        ("a = add u v put ; ;", "begins with NAME ="),
        ("g = add u v put ;", "begins with NAME ="),
        ("a add u v put ;", "begins with NAME ="),
        ("put ;", "begins with NAME ="),
        ("side ;", "begins with NAME ="),
        ("side side a = add u v put ;", "begins with NAME ="),
        ("a = ;", "no such operation"),
        ("a = plus u v put ;", "no such operation"),
        ("a = add u put ;", "add takes 2 operands"),
        ("a = add u", "does not end in ';'"),
        ("a = add u ;", "add takes 2 operands"),
        ("a = relu put ;", "relu takes 1 operand"),
        ("a = relu end put ;", "relu takes 1 operand"),
        ("a = relu u v put ;", "after the operands"),
        ("a = add u v ;", "after the operands"),
        ("a = add u v end ;", "after the operands"),
        ("a = add u v put end ;", "after the operands"),
        ("a = add u v put keep ;", "after the operands"),
        ("a = add u v end end put ;", "after the operands"),
        ("a = add u z put ;", "add takes 2 operands"),
    ],
)
def test_what_is_no_program_is_refused(text, complaint):
    with pytest.raises(CompileError, match=complaint):
        parse(text)


def test_an_operand_that_was_never_computed_is_refused():
    assert refused("b = relu a put ; y = mul b w put ;") == "a is neither in memory nor in a register"
    assert "x is neither" in refused("a = add u x put ; b = relu a put ; y = mul b w put ;")  # no input of this one


def test_a_kept_value_is_lost_when_its_launch_ends():
    assert "a is neither" in refused("a = add u v end keep ; b = relu a put ; y = mul b w put ;")
    assert "a is neither" in refused("b = relu a put ; a = add u v put ; y = mul b w put ;")


def test_a_value_that_was_put_is_there_in_every_later_launch():
    assert len(compiled("a = add u v end put ; b = relu a end put ; y = mul b w end put ;")) == 3


def test_names_are_computed_once():
    assert refused("a = add u v put ; a = add u v put ; b = relu a put ; y = mul b w put ;") == "a is computed twice"


def test_only_values_of_the_computation_are_computed():
    assert refused("c = add u v put ; b = relu c put ; y = mul b w put ;") == "c is not a value of the computation"
    assert refused("u = add u v put ; b = relu u put ; y = mul b w put ;") == "u is not a value of the computation"


def test_y_must_be_put():
    assert refused("a = add u v put ; b = relu a put ;") == "y is never put"
    assert refused("a = add u v keep ; b = relu a keep ; y = mul b w keep ;") == "y is never put"


def test_side_stands_at_the_beginning_of_a_launch():
    side, main = compiled("side a = add u v keep ; b = relu a end put ; y = mul b w put ;")
    assert side.side and not main.side
    assert "'side' stands inside" in refused("a = add u v keep ; side b = relu a put ; y = mul b w put ;")


JOIN = read_computation("a = add u v ; b = add w x ; y = mul a b")


def test_a_launch_holds_two_matrices():
    """When b is added, a is still needed: with w and x these are three."""
    assert refused("a = add u v keep ; b = add w x keep ; y = mul a b put ;", JOIN) == "out of registers at b"
    assert "out of registers" in refused(
        "a = add u v put ; b = add w x keep ; y = mul a b put ;", JOIN
    )  # held all the same
    assert len(compiled("a = add u v end put ; b = add w x keep ; y = mul a b put ;", JOIN)) == 2


def test_a_result_takes_the_place_of_an_operand_that_is_read_for_the_last_time():
    assert compiled(
        "a = relu u keep ; b = relu v keep ; y = mul a b put ;",
        read_computation("a = relu u ; b = relu v ; y = mul a b"),
    )
    both = read_computation("a = add u v ; b = mul a u ; y = sub b v")  # v is needed to the end, u until b
    assert "out of registers at a" in refused("a = add u v keep ; b = mul a u keep ; y = sub b v put ;", both)


def test_a_result_that_nobody_reads_needs_a_place_too():
    wide = read_computation("a = exp u ; b = exp v ; y = mul u v")
    assert refused("a = add u v put ; b = exp v put ; y = mul u v put ;", wide) == "out of registers at a"
    assert compiled("a = exp u end put ; b = exp v end put ; y = mul u v put ;", wide)


def test_a_number_of_a_row_needs_no_register():
    softmax = read_computation("a = rowmax u ; b = sub u a ; c = exp b ; d = rowsum c ; y = div c d")
    assert (
        len(
            compiled(
                "a = rowmax u keep ; b = sub u a keep ; c = exp b keep ; d = rowsum c keep ; y = div c d put ;", softmax
            )
        )
        == 1
    )


def test_what_is_narrow_is_decided_by_what_the_program_computes():
    """`a` is one number a row in the computation; a program that computes a matrix under this name pays for it."""
    computation = read_computation("a = rowsum u ; b = mul v w ; y = add b a")
    (launch,) = compiled("b = mul v w keep ; a = rowsum u keep ; y = add b a put ;", computation)
    assert launch.narrow == {"a"}
    assert "out of registers at b" in refused("a = relu u keep ; b = mul v w keep ; y = add b a put ;", computation)


def test_stale_memory_holds_every_value():
    assert refused("y = mul b w put ;") == "b is neither in memory nor in a register"
    (launch,) = compiled("y = mul b w put ;", stale=True)
    assert launch.loads == ("b", "w")


def test_no_text_raises_anything_but_a_compile_error():
    rng = random.Random(1)
    words = ["a", "y", "u", "=", "add", "relu", "put", "keep", "end", "side", ";", "=>", "1", "é"]
    for _ in range(3000):
        text = " ".join(rng.choices(words, k=rng.randint(0, 12)))
        try:
            compile_program(parse(text), CHAIN)
        except CompileError as error:
            assert str(error)


def test_inputs_are_no_results():
    assert not set(INPUTS) & {line.name for line in CHAIN.lines}
    assert isinstance(CHAIN, Computation)
