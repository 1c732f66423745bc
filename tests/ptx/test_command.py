"""The command, and the examples of the README."""

import re
from pathlib import Path

import numpy as np
import pytest
from real_kernels import text_of

import ptx_interpreter
from ptx_interpreter import parse
from ptx_interpreter.__main__ import main

README = (Path(ptx_interpreter.__file__).parent / "README.md").read_text()


@pytest.fixture
def example(tmp_path, monkeypatch):
    """A folder with the README's kernel and an array."""
    monkeypatch.chdir(tmp_path)
    Path("double.ptx").write_text(block("ptx"))
    np.save("x.npy", np.arange(32, dtype=np.float32))


def block(language: str) -> str:
    return re.search(rf"^```{language}\n(.*?)^```", README, re.M | re.S)[1]


def test_without_a_grid_it_counts_instructions_by_kind(capsys):
    main([str(Path(__file__).parent / "kernels" / "product.ptx")])
    numbers = {group: int(number) for number, group in re.findall(r"^ +(\d+)  (.*)$", capsys.readouterr().out, re.M)}
    text = text_of("product")
    assert sum(numbers.values()) == len(parse(text)[0].instructions)
    assert numbers["matrix products"] == text.count("mma.sync") + text.count("ldmatrix.")
    assert numbers["asynchronous copies"] == text.count("cp.async")


def test_the_readme_runs_its_kernel_and_finds_the_mistake(example, capsys):
    words = block("console").split()[2:]
    main(words)
    printed = capsys.readouterr().out
    assert "read 128 bytes of x" in printed and "wrote 128 bytes of y" in printed
    assert re.search(r"y = \[ 0\. +2\. +4\.", printed) and "       1  add.f32" in printed
    with pytest.raises(SystemExit) as stopped:
        main([word.replace("32", "64") if "=" not in word else word for word in words])
    assert str(stopped.value) == block("text").rstrip()


def test_the_readme_shows_how_to_call_it(example, capsys):
    exec(block("python"), {})
    assert "62." in capsys.readouterr().out


def test_numbers_are_packed_as_their_parameters_ask(example, capsys):
    body = "ld.param.f32 %f, [a]; ld.param.s32 %r, [b]; ld.param.u64 %l, [y]; st.global.f32 [%l], %f; st.global.s32"
    Path("two.ptx").write_text(
        ".entry two(.param .f32 a, .param .u64 y, .param .s32 b) { .reg .f32 %f; .reg .b32 %r, %t; .reg .pred %p; "
        f".reg .b64 %l; mov.u32 %t, %tid.x; setp.ne.u32 %p, %t, 0; @%p ret; {body} [%l+4], %r; ret; }}"
    )
    main(["two.ptx", "--grid", "1,1", "a=0.5", "y=int32:1,2", "b=-3"])
    assert f"y = [[{np.float32(0.5).view(np.int32)} " in (printed := capsys.readouterr().out) and "-3]]" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x=x.npy"], "double takes 2 arguments, not 1"),
        (["x=x.npy", "y=many"], "many"),
        (["x=x.npy", "y=float32:32", "--kernel", "half"], "double"),
        (["x=missing.npy", "y=float32:32"], "missing.npy"),
    ],
)
def test_what_it_cannot_run_it_refuses_in_a_sentence(words, says, example):
    with pytest.raises(SystemExit, match=says):
        main(["double.ptx", "--grid", "1", *words])
