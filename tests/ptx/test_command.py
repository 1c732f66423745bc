"""The command, and the examples of the README."""

import re
from pathlib import Path

import numpy as np
import pytest

import ptx_interpreter
from ptx_interpreter import parse
from ptx_interpreter.__main__ import main

README = (Path(ptx_interpreter.__file__).parent / "README.md").read_text()
BLOCKS = {language: text for language, text in re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)}
COMMAND = BLOCKS["console"].split()[2:]


@pytest.fixture(autouse=True)
def example(tmp_path, monkeypatch):
    """A folder with the README's kernel and array."""
    monkeypatch.chdir(tmp_path)
    Path("double.ptx").write_text(BLOCKS["ptx"])
    np.save("x.npy", np.arange(32, dtype=np.float32))


def test_without_a_grid_it_counts_instructions(capsys):
    file = Path(__file__).with_name("product.ptx")
    main([str(file)])
    printed, text = capsys.readouterr().out, file.read_text()
    numbers = {opcode: int(number) for number, opcode in re.findall(r"^ +(\d+)  ([\w.:]+)$", printed, re.M)}
    assert sum(numbers.values()) == len(parse(text)[0].instructions)
    assert "64 × 1 × 1" in printed and "shared        0 B, more at launch" in printed


def test_the_readme_is_right(capsys):
    main(COMMAND)
    printed = capsys.readouterr().out
    assert "read 128 bytes of x" in printed and re.search(r"1  add.f32\n(.*\n)+y = \[ 0\. +2\. +4\.", printed)
    with pytest.raises(SystemExit, match=re.escape(BLOCKS["text"].rstrip())):
        main([word.replace("32", "64") if "=" not in word else word for word in COMMAND])
    exec(BLOCKS["python"], {})
    assert re.match(r"\[ 0\. +2\. +4\.", capsys.readouterr().out)


def test_numbers_are_packed_as_their_parameters_ask(capsys):
    body = "ld.param.f32 %f, [a]; ld.param.s32 %r, [b]; ld.param.u64 %l, [y]; st.global.f32 [%l], %f; "
    Path("two.ptx").write_text(
        ".entry two(.param .f32 a, .param .u64 y, .param .s32 b) { .reg .f32 %f; .reg .b32 %r, %t; "
        f".reg .pred %p; .reg .b64 %l; mov.u32 %t, %tid.x; setp.ne.u32 %p, %t, 0; @%p ret; {body}"
        "st.global.s32 [%l+4], %r; ret; }"
    )
    main(["two.ptx", "--grid", "1,1", "a=0.5", "y=int32:1,2", "b=-3"])
    assert re.search(rf"y = \[\[{np.float32(0.5).view(np.int32)} +-3\]\]", capsys.readouterr().out)


@pytest.mark.parametrize(
    "words", [["x=x.npy"], ["x=1", "y=many"], ["x=1", "y=no:1"], ["x=no.npy", "y=1"], ["x=1", "y=1", "--kernel=half"]]
)
def test_what_it_cannot_run_it_refuses_in_a_sentence(words):
    with pytest.raises(SystemExit, match=r"takes 2 arguments|'many'|'no'|no.npy|double"):
        main(["double.ptx", "--grid", "1", *words])
