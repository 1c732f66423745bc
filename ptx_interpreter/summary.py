"""What a kernel consists of: registers, memory, and instructions by group."""

from collections import Counter

from ptx_interpreter.floats import FLOATS
from ptx_interpreter.parse import Entry, Instruction
from ptx_interpreter.warp import TOGETHER

GROUPS = {
    "matrix products": {"mma", "wgmma", "ldmatrix", "stmatrix"},
    "shuffles and votes": TOGETHER - {"mma", "ldmatrix", "stmatrix"},
    "atomics and fences": {"atom", "red", "fence", "membar"},
    "asynchronous copies": {"cp"},
    "barriers": {"bar", "barrier", "mbarrier"},
    "branches and exits": {"bra", "ret", "exit", "trap", "call"},
    "conversions": {"cvt"},
    "comparisons and selections": {"setp", "selp", "slct", "set"},
    "moves": {"mov", "cvta"},
    "special functions": {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div"},
    "fused multiply-adds": {"fma"},
}


def group_of(instruction: Instruction) -> str:
    """The group of an instruction, e.g. "loads, global"."""
    name, modifiers = instruction.name, instruction.modifiers
    if name in ("ld", "st"):
        spaces = (m.split("::")[0] for m in modifiers)
        space = next((m for m in spaces if m in ("global", "shared", "param", "local")), "generic")
        return f"{'stores' if name == 'st' else 'loads'}, {space}"
    floating = bool(modifiers) and modifiers[-1] in FLOATS
    if name == "div" and not floating:
        return "integer arithmetic"
    found = next((group for group, names in GROUPS.items() if name in names), None)
    return found or ("other floating-point arithmetic" if floating else "integer arithmetic")


def summary(entry: Entry) -> str:
    """A kernel in a few lines; instructions are counted in the text, not as executed."""
    registers = Counter(entry.registers.values())
    groups = Counter(group_of(instruction) for instruction in entry.instructions)
    block = " × ".join(map(str, entry.threads)) if entry.threads else "of any size"
    dynamic = ", more at launch" if entry.dynamic else ""
    lines = [
        f"entry {entry.name}",
        f"  threads       {block}",
        f"  parameters    {', '.join(f'{p.size} B at {p.offset}' for p in entry.params) or 'none'}",
        f"  registers     {', '.join(f'{n} .{kind}' for kind, n in registers.items())} (before allocation)",
        f"  shared        {entry.shared} B{dynamic}",
        f"  local         {entry.local} B" + (" (slow: it is in global memory)" if entry.local else ""),
        f"  instructions  {len(entry.instructions)}",
    ]
    return "\n".join(lines + [f"    {number:6d}  {group}" for group, number in groups.most_common()])
