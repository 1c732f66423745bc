"""A text that cheats is refused by name before it runs, and a right one is not."""

import pytest
from cheats import CHEATS
from texts import POINTWISE, ROW_KERNELS, pointwise_cpp, pointwise_cuda, pointwise_cute, pointwise_triton

from rlcourse.tasks.kernelbench import rules

NAMED = {name: cheat for name, cheat in CHEATS.items() if cheat.rule}


@pytest.mark.parametrize("name", NAMED)
def test_a_cheat_that_its_text_betrays_is_refused_by_name(name):
    reason, sentence = rules.check(NAMED[name].text)
    assert reason == NAMED[name].rule, sentence


@pytest.mark.parametrize("name", [name for name in CHEATS if name not in NAMED])
def test_other_cheats_are_left_to_measuring(name):
    assert rules.check(CHEATS[name].text) is None


def test_right_kernels_in_every_language_break_no_rule():
    _, triton, c = POINTWISE["gelu"]
    texts = [pointwise_triton(triton), pointwise_cpp(c), pointwise_cuda(c), pointwise_cute("x * 2")]
    assert {rules.check(text) for text in [*texts, *ROW_KERNELS.values()]} == {None}


def test_words_in_comments_break_no_rule_and_words_split_by_them_do():
    assert rules.check(pointwise_cuda("x", before="// no cublas, no system( here")) is None
    assert rules.check(pointwise_cuda("x", before="cudaStream\\\\\nCreate(0);"))[0] == "stream"


HIDDEN = [
    r'const char* a = "/*"; cudaStreamCreate(0); const char* b = "*/";',
    r'const char* a = "//"; cudaStreamCreate(0);',
    r'const char* a = "\\"; /* " */ cudaStreamCreate(0);',
    r"""char a = '"'; /* " */ cudaStreamCreate(0); char b = '"';""",
    r"""int a = 1'0; const char* b = "'/*"; cudaStreamCreate(0); const char* c = "*/";""",
    r"""auto a = u8'"'; /* " */ cudaStreamCreate(0); // " """,
    "/* // */ cudaStreamCreate(0);",
    "// /*\ncudaStreamCreate(0);",
    "cudaStream\\ \nCreate(0);",
]


WAYS_TO_HIDE = [('auto a = R"(//)";', "compiler"), ("#define JOIN(a, b) a%:%:b", "python")]


@pytest.mark.parametrize(("text", "reason"), [(text, "stream") for text in HIDDEN] + WAYS_TO_HIDE)
def test_a_word_is_not_hidden_by_what_only_looks_like_a_comment(text, reason):
    with pytest.raises(rules.Broken) as broken:
        rules.cpp(text)
    assert broken.value.args[0] == reason


@pytest.mark.parametrize(
    "text", ['/* "of" cublas */', "// it's \"cublas", '"// no comment" // cublas', "1'000; // cublas\n'a'; 2'000"]
)
def test_a_comment_beside_strings_is_a_comment(text):
    rules.cpp(text)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ('extra_cflags=["-O3", "-march=native"]', True),
        ('extra_cflags=["-O3 -fplugin=x.so"]', False),
        ('extra_cflags=["-DJOIN=a"]', False),
        ('extra_cflags=[flag for flag in ("-O3",)]', False),
        ('extra_ldflags=["-lcublas"]', False),
    ],
)
def test_a_compiler_takes_flags_of_speed_alone(given, allowed):
    found = rules.check(pointwise_cpp("x").replace('extra_cflags=["-O1"]', given))
    assert found is None if allowed else found[0] == "compiler"


def test_a_compiler_takes_flags_by_their_names_alone():
    named = 'name="honest", cpp_sources=source, functions=["run"]'
    code = pointwise_cpp("x").replace(named, '"honest", source, [], ["run"], ["-fplugin=x.so"]')
    assert rules.check(code)[0] == "compiler"
