"""Does the interpreter find broken kernels? Real PTX is broken on purpose, and must give an error or a wrong result."""

import re

import pytest
from real_kernels import CHECKS, text_of

from rlcourse.ptx import Misaligned, OutOfBounds, Race, Uninitialised

WRONG = AssertionError  # some numbers are wrong, or were not written
LOAD, STORE = r"(ld\.global\.v4\.b32[^;]*)\[(%rd\d+)\]", r"(st\.global\.v4\.b32\s+)\[(%rd\d+)\]"
BARRIER, PAIR = r"bar\.sync\s+0;", r"(cvt\.rn\.bf16x2\.f32\s+%r\d+), (%r\d+), (%r\d+)"
OPERANDS = r"\{(%r\d+), (%r\d+)\}(,\s*\{%r\d+, %r\d+, %r\d+, %r\d+\};)"
PLANTED = {  # kernel: (what is wrong, a regular expression, which of its matches, what that becomes, what finds it)
    "rms_norm": [
        ("a row too many written", r"setp\.le\.s32", 1, "setp.lt.s32", OutOfBounds),
        ("read 8 bytes aside", LOAD, 1, r"\1[\2+8]", Misaligned),
        ("read 16 bytes aside", LOAD, 0, r"\1[\2+16]", Uninitialised),
        ("written 16 bytes aside", STORE, 0, r"\1[\2+16]", (OutOfBounds, Race)),
        ("a shuffle with oneself", r"(shfl\.sync\.bfly[^;]*), 4, 31", 0, r"\1, 0, 31", WRONG),
    ],
    "product": [
        ("waited for too few groups", r"cp\.async\.wait_group\s+0", 0, "cp.async.wait_group 1", Uninitialised),
        ("a commit left out", r"cp\.async\.commit_group;", 0, "", Uninitialised),
        ("first barrier left out", BARRIER, 0, "", Race),
        ("rows read as columns", r"(ldmatrix\.sync\.aligned\.m8n8\.x4)\.shared", 1, r"\1.trans.shared", WRONG),
        ("operands exchanged", OPERANDS, 2, r"{\2, \1}\3", WRONG),
    ],
    "decode_attention": [
        ("no barrier before the count", BARRIER, 1, "", Race),
        ("a count that orders nothing", r"\.acq_rel\.add", 0, ".relaxed.add", Race),
        ("no clamp of the last tokens", r"min\.s32\s+(%r\d+), (%r\d+), %r63;", 0, r"mov.b32 \1, \2;", Uninitialised),
        ("no mask", "0fFF800000", 0, "0f00000000", WRONG),
        ("weights exchanged", PAIR, 0, r"\1, \3, \2", WRONG),
    ],
}
CASES = [(kernel, *planted) for kernel, bugs in PLANTED.items() for planted in bugs]


def broken(text: str, pattern: str, which: int, becomes: str) -> str:
    """The PTX with one match of the pattern replaced."""
    match = list(re.finditer(pattern, text))[which]
    return text[: match.start()] + match.expand(becomes) + text[match.end() :]


@pytest.mark.parametrize(
    ("kernel", "what", "pattern", "which", "becomes", "found"), CASES, ids=[f"{k}: {w}" for k, w, *_ in CASES]
)
def test_planted_bugs_are_found(kernel, what, pattern, which, becomes, found):
    with pytest.raises(found):
        CHECKS[kernel](broken(text_of(kernel), pattern, which, becomes))
