"""Numbers in the prose of a lesson that nobody types: the build asks the lesson's kernel for them.

In a Markdown cell of a master, `{{ 100 * gain:.0f }}` stands for what that Python gives at that place of the notebook,
formatted as an f-string does. `{{ assert late < early }}` stands behind a sentence, shows nothing, and stops the build
when the sentence is no longer true. What a record or a config says is `{{ load_curve("grpo")["date"] }}` or
`{{ make_config("h200").logprob_chunk }}`: such a reference needs no kernel, so the tests evaluate it again.
"""

import ast
import builtins
import json
import re

REFERENCE = re.compile(r"\{\{\s+(.+?)\s+\}\}", re.DOTALL)  # with spaces inside: LaTeX may write {{k}}
ASSERTION = "assert "


def references(text: str) -> list[str]:
    """What stands between `{{` and `}}` in a text, on one line each."""
    return [" ".join(inside.split()) for inside in REFERENCE.findall(text)]


def fill(text: str, values: dict[str, str]) -> str:
    """The text with each reference replaced by its value. Raises KeyError for one that has none."""
    text = re.sub(r"\s*\{\{\s+assert\s.+?\s\}\}", "", text, flags=re.DOTALL)
    return REFERENCE.sub(lambda match: values[" ".join(match[1].split())], text)


def probe(text: str, enforce: bool) -> str:
    """Code that evaluates a text's references in the lesson's kernel and prints {reference: value} as JSON.

    enforce: whether an assertion must hold; in the smoke profile, where runs are tiny, it need only be evaluated.
    """
    lines, shown = [], []
    for reference in references(text):
        if reference.startswith(ASSERTION):
            condition = reference.removeprefix(ASSERTION)
            said = f"The text says what is no longer so: {condition}"
            lines.append(f"if not ({condition}) and {enforce}: raise AssertionError({said!r})")
        else:
            shown.append(f"{reference!r}: f'''{{{reference}}}'''")
    return "\n".join([*lines, f"print(__import__('json').dumps({{{', '.join(shown)}}}))"])


def read_values(printed: list[str]) -> dict[str, str]:
    """What all probes of a notebook printed, in one. Raises ValueError for a reference with two values: a reader of the
    master could not tell which is meant where."""
    values: dict[str, str] = {}
    for text in printed:
        for reference, value in json.loads(text).items():
            if values.setdefault(reference, value) != value:
                raise ValueError(f"{{{{ {reference} }}}} is {values[reference]}, later {value}: use two names.")
    return values


def without_kernel(reference: str, names: dict) -> str | None:
    """The value of a reference that needs only `names` and Python's builtins; None for one that needs the kernel."""
    code = f"f'''{{{reference}}}'''"
    tree = ast.parse(code, mode="eval")
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - bound
    needed = used - set(dir(builtins))
    return eval(code, dict(names)) if needed and needed <= names.keys() else None


def outdated(values: dict[str, str], names: dict) -> dict[str, str]:
    """Those of `values` that need no kernel and are another value now."""
    now = {reference: without_kernel(reference, names) for reference in values}
    return {reference: value for reference, value in values.items() if now[reference] not in (None, value)}
