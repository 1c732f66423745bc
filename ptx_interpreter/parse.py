"""PTX text to kernels: parameters, registers, shared and local variables, and a flat list of instructions."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from ptx_interpreter.errors import Unsupported

NAME = r"[%$\w]+"
MOST_REGISTERS = 100_000  # per kernel: one line of text can declare any number
MOST_OPERANDS = 10_000  # characters: splitting them takes quadratic time
VARIABLE = re.compile(rf"\.(shared|local)\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+\d+)\s+({NAME})\s*(?:\[\s*(\d*)\s*\])?")


class Param(NamedTuple):
    name: str
    offset: int
    size: int


class Variable(NamedTuple):
    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class Instruction:
    """`@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1];` has name "ld", modifiers ("global", "v2", "b32"), two operands and
    the negated predicate "%p1"."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool
    text: str
    line: int

    @property
    def opcode(self) -> str:
        return ".".join((self.name, *self.modifiers))


@dataclass
class Entry:
    """A kernel. threads: (x, y, z) per block, if the PTX requires it; shared, local: declared bytes."""

    name: str
    params: list[Param]
    threads: tuple[int, int, int] | None = None
    registers: dict[str, str] = field(default_factory=dict)  # name -> type
    variables: dict[str, list[Variable]] = field(default_factory=lambda: {"shared": [], "local": []})
    dynamic: dict[str, int] = field(default_factory=dict)  # name -> alignment of shared memory sized at launch
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # name -> index of the next instruction

    @property
    def shared(self) -> int:
        return _end(self.variables["shared"])

    @property
    def local(self) -> int:
        return _end(self.variables["local"])


def parse(text: str) -> list[Entry]:
    """All kernels of a PTX module, in order. Raises Unsupported for text that it cannot read."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), text, flags=re.S)
    text = re.sub(r"(?m)^[ \t]*\.(loc|file|pragma|section)\b[^\n]*$", "", text)
    entries, module, position = [], "", 0
    for head in re.finditer(rf"\.entry\s+({NAME})\s*\(([^)]*)\)([^{{]*)\{{", text):
        end = _closing(text, head.end())
        module += text[position : head.start()]
        entry = Entry(head[1], _params(head[2]), _threads(head[3]))
        _Body(entry).read(text[head.end() : end], first_line=text.count("\n", 0, head.end()) + 1)
        entries.append(entry)
        position = end
    for entry in entries:
        for declared in VARIABLE.finditer(module):
            _declare(entry, declared)
    return entries


def split(text: str) -> list[str]:
    """Split a list of operands at the commas outside braces and brackets."""
    if len(text) > MOST_OPERANDS:
        raise Unsupported(f"operands of {len(text):,} characters")
    return [part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip()]


class _Body:
    """Reads the text between a kernel's braces."""

    def __init__(self, entry: Entry):
        self.entry = entry
        self.scopes: list[dict[str, str]] = []  # nested braces (inline assembly): own name -> unique name
        self.opened = 0

    def read(self, text: str, first_line: int):
        statement, start, braces = "", 0, 0
        for i, char in enumerate(text):
            begins = not statement.strip()
            if begins and not char.isspace():
                start = i
            if char == "{" and begins:
                self.scopes.append({})
                self.opened += 1
            elif char == "}" and braces == 0:
                self.scopes.pop()
            elif char == ";":
                self._statement(" ".join(statement.split()), first_line + text.count("\n", 0, start))
                statement = ""
            elif char == ":" and re.fullmatch(rf"\s*{NAME}\s*", statement):
                self.entry.labels[self._rename(statement.strip())] = len(self.entry.instructions)
                statement = ""
            else:
                braces += {"{": 1, "}": -1}.get(char, 0)
                statement += char

    def _statement(self, text: str, line: int):
        if text.startswith(".reg"):
            self._registers(*text.split(None, 2)[1:])
        elif text.startswith(".") and (declared := VARIABLE.search(text)):
            _declare(self.entry, declared)
        elif text and not text.startswith("."):
            renamed = re.sub(NAME, lambda word: self._rename(word[0]), text) if self.scopes else text
            guard = re.match(rf"@(!?)({NAME})\s+", renamed)
            opcode, _, operands = renamed[guard.end() if guard else 0 :].partition(" ")
            name, *modifiers = opcode.split(".")
            predicate, negated = (guard[2], guard[1] == "!") if guard else (None, False)
            instruction = Instruction(name, tuple(modifiers), tuple(split(operands)), predicate, negated, text, line)
            self.entry.instructions.append(instruction)

    def _registers(self, kind: str, names: str):
        for name in split(names):
            many = re.fullmatch(rf"({NAME})<(\d+)>", name)
            count = int(many[2]) if many else 1
            if len(self.entry.registers) + count > MOST_REGISTERS:
                raise Unsupported(f"more than {MOST_REGISTERS:,} registers")
            for single in [f"{many[1]}{i}" for i in range(count)] if many else [name]:
                unique = f"{single}'{self.opened}" if self.scopes else single
                if self.scopes:
                    self.scopes[-1][single] = unique
                self.entry.registers[unique] = kind[1:]

    def _rename(self, word: str) -> str:
        return next((scope[word] for scope in reversed(self.scopes) if word in scope), word)


def size_of(kind: str) -> int:
    """Bytes of a PTX type: 4 for "f32", "b32" or "bf16x2"."""
    digits = re.search(r"(\d+)(?:x(\d))?$", kind)
    if not digits:
        raise Unsupported(f"the type .{kind}")
    return int(digits[1]) * int(digits[2] or 1) // 8


def _params(text: str) -> list[Param]:
    params, end = [], 0
    for declared in split(text):
        match = re.match(
            rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\S*\s+(?:\.\w+\s+)*(?:\d+\s+)?)?({NAME})(?:\[(\d+)\])?$",
            declared,
        )
        if not match:
            raise Unsupported(f"the parameter {declared!r}")
        size = size_of(match[2]) * int(match[4] or 1)
        align = int(match[1] or size_of(match[2]))
        offset = -(-end // align) * align
        params.append(Param(match[3], offset, size))
        end = offset + size
    return params


def _threads(directives: str) -> tuple[int, int, int] | None:
    required = re.search(r"\.reqntid\s+([\d,\s]+)", directives)
    if not required:
        return None
    sizes = [int(size) for size in required[1].split(",")]
    return tuple(sizes + [1] * (3 - len(sizes)))


def _declare(entry: Entry, declared: re.Match):
    space, align, kind, name, count = declared.groups()
    variables = entry.variables[space]
    if count == "":  # an array without a size: all of the dynamic shared memory
        entry.dynamic[name] = int(align or 1)
        return
    align = int(align or size_of(kind))
    offset = -(-_end(variables) // align) * align
    variables.append(Variable(name, offset, size_of(kind) * int(count or 1)))


def _end(variables: list[Variable]) -> int:
    return max((v.offset + v.size for v in variables), default=0)


def _closing(text: str, start: int) -> int:
    depth = 1
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.start()
    raise Unsupported("a body that does not end")
