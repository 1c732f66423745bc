"""The cells of a notebook as statements of Python: what only IPython understands is taken out, or its Python kept."""

import ast
import re

KEPT = ("%%time", "%%capture", "%%prun", "%%debug")  # cell magics whose cell runs in the notebook's own names
LINE = re.compile(
    r"^(?P<indent>\s*)(?P<name>[A-Za-z_][\w.,\s\[\]\"']*=(?!=)\s*)?(?P<mark>[%!?])(?P<rest>.*)$", re.DOTALL
)
TIMED = re.compile(r"^(time|prun)\s+(?!-)(?P<code>\S.*)$", re.DOTALL)
HELP = re.compile(r"^(?P<indent>\s*)[^#\n]*\?{1,2}\s*(#.*)?$")


def statements(source: str) -> tuple[list[ast.stmt], list[str]]:
    """A cell's statements, and the IPython lines of it that are left out. Raises SyntaxError for what is neither."""
    source, skipped = without_cell_magic(source)
    while True:
        try:
            return ast.parse(source).body, skipped
        except SyntaxError as error:
            lines = source.split("\n")
            number = (error.lineno or 0) - 1
            mended = python_of(lines, number) if 0 <= number < len(lines) else None
            if mended is None:
                raise
            first, last, line = mended
            skipped.append(lines[first].strip())
            lines[first : last + 1] = [line] + [""] * (last - first)  # all others keep their numbers
            source = "\n".join(lines)


def without_cell_magic(source: str) -> tuple[str, list[str]]:
    """A cell without its `%%` line; nothing of it where its text is no Python, or runs in names of its own."""
    lines = source.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    if not lines[first].startswith("%%"):
        return source, []
    kept = lines[first].split()[0] in KEPT
    return ("\n" * (first + 1) + "\n".join(lines[first + 1 :]) if kept else ""), [lines[first].strip()]


def python_of(lines: list[str], number: int) -> tuple[int, int, str] | None:
    """(first line, last line, what stands there in Python) of the IPython command on a line; None if it has none."""
    last = number
    while lines[last].endswith("\\") and last + 1 < len(lines):
        last += 1
    text = "\n".join(lines[number : last + 1])
    found = LINE.match(text)
    if found is None:
        asked = HELP.match(text)
        return (number, last, asked["indent"] + "pass") if asked else None
    indent, name = found["indent"], found["name"] or ""
    timed = TIMED.match(found["rest"]) if found["mark"] == "%" else None
    if timed:
        return number, last, f"{indent}{name}{timed['code']}"
    return number, last, f"{indent}{name}[]" if name else f"{indent}pass"
