"""Counted times, by hand."""

import pytest

from rlcourse.tasks.kernels.clock import A10G, H200, Card, program_us
from rlcourse.tasks.kernels.language import compile_program, parse, read_computation

ROUND = Card("round", launch_us=10.0, bytes_per_us=4.0, operations_per_us=100.0, rows=10, columns=20)
# A matrix has 200 numbers, 800 bytes, 200 µs; a number a row 10, 40 bytes, 10 µs. An operation on a matrix: 2 µs.


def us(text, computation, card=ROUND):
    return program_us(compile_program(parse(text), read_computation(computation)), card)


CHAIN = "a = add u v ; b = relu a ; y = mul b w"


def test_eager_pays_for_each_launch_load_and_store():
    assert us("a = add u v end put ; b = relu a end put ; y = mul b w end put ;", CHAIN) == pytest.approx(
        3 * 10 + (2 + 1 + 2) * 200 + 3 * 200 + 3 * 2
    )


def test_joined_launches_save_the_start_and_the_reload_and_kept_values_the_store():
    joined = us("a = add u v put ; b = relu a put ; y = mul b w put ;", CHAIN)
    assert joined == pytest.approx(10 + 3 * 200 + 3 * 200 + 3 * 2)
    kept = us("a = add u v keep ; b = relu a keep ; y = mul b w put ;", CHAIN)
    assert kept == pytest.approx(10 + 3 * 200 + 1 * 200 + 3 * 2)


def test_a_number_a_row_moves_little_and_its_operation_counts_what_it_reads():
    share = "a = exp u ; b = rowsum a ; c = sqrt b ; y = div a c"
    assert us(
        "a = exp u end put ; b = rowsum a end put ; c = sqrt b end put ; y = div a c put ;", share
    ) == pytest.approx(4 * 10 + (200 + 200) + (200 + 10) + (10 + 10) + (200 + 10 + 200) + (2 + 2 + 0.1 + 2))


def test_cards_are_those_of_the_data_sheets():
    """A10G: 600 GB/s, 31.2 TFLOP/s. H200: 4.8 TB/s, 67 TFLOP/s. A matrix of 1024 x 1024 float32 is 4.19 MB."""
    text = "y = relu u put ;"
    assert us(text, "y = relu u", A10G) == pytest.approx(5 + 2 * 4.194304e6 / 600e9 * 1e6 + 1048576 / 31.2e12 * 1e6)
    assert us(text, "y = relu u", H200) == pytest.approx(5 + 2 * 4.194304e6 / 4.8e12 * 1e6 + 1048576 / 67e12 * 1e6)
