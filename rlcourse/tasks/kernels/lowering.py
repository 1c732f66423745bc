"""A program of the tile language as Triton source: a kernel per launch, an instance per row, a variable per register.
Both streams become one."""

from rlcourse.tasks.kernels.language import REDUCTIONS, Computation, Launch, Line, Statement, compile_program

EXPRESSIONS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "max": "tl.maximum({0}, {1})",
    "min": "tl.minimum({0}, {1})", "relu": "tl.maximum({0}, 0.0)", "neg": "-{0}", "abs": "tl.abs({0})",
    "square": "{0} * {0}", "exp": "tl.exp({0})", "sigmoid": "tl.sigmoid({0})", "sqrt": "tl.sqrt({0})",
}  # fmt: skip
REDUCED = {"rowsum": ("tl.sum", "0.0"), "rowmax": ("tl.max", 'float("-inf")')}  # and what stands beyond the columns
HEAD = "import torch\nimport triton\nimport triton.language as tl\n"


def lower(program: list[Statement], computation: Computation) -> str:
    """Triton source with a function `run` of the computation's inputs, [rows, columns] float32, that returns y. Raises
    CompileError for a program that does not compile."""
    launches = compile_program(program, computation)
    kernels = [kernel_source(number, launch) for number, launch in enumerate(launches)]
    body = [f"rows, columns = {computation.inputs[0]}.shape", "block = triton.next_power_of_2(columns)"]
    for number, launch in enumerate(launches):
        for name in launch.stores:
            width = "1" if name in launch.narrow else "columns"
            body.append(f"{name} = {computation.inputs[0]}.new_empty(rows, {width})")
        body.append(f"kernel_{number}[(rows,)]({', '.join(moved(launch))}, columns, BLOCK=block)")
    run = indented(f"def run({', '.join(computation.inputs)}):", [*body, "return y"])
    return "\n\n".join([HEAD, *(f"{kernel}\n" for kernel in kernels), run]) + "\n"


def kernel_source(number: int, launch: Launch) -> str:
    body = ["row = tl.program_id(0)", "column = tl.arange(0, BLOCK)"]
    here: set[str] = set()
    for statement in launch.statements:
        line = statement.line
        body += [f"{name} = tl.load({address(name, launch)})" for name in dict.fromkeys(line.args) if name not in here]
        body.append(f"{line.name} = {expression(line, launch)}")
        here.update([*line.args, line.name])
        if not statement.keeps:
            where, *mask = address(line.name, launch).split(", ")
            body.append(f"tl.store({', '.join([where, line.name, *mask])})")
    pointers = ", ".join(f"{name}_ptr" for name in moved(launch))
    return indented(f"@triton.jit\ndef kernel_{number}({pointers}, columns, BLOCK: tl.constexpr):", body)


def moved(launch: Launch) -> list[str]:
    return list(dict.fromkeys([*launch.loads, *launch.stores]))


def address(name: str, launch: Launch) -> str:
    """Arguments of tl.load for this row of a tensor: pointers and, for a matrix, the mask."""
    if name in launch.narrow:
        return f"{name}_ptr + row"
    return f"{name}_ptr + row * columns + column, mask=column < columns"


def expression(line: Line, launch: Launch) -> str:
    if line.op not in REDUCTIONS:
        return EXPRESSIONS[line.op].format(*line.args)
    (operand,) = line.args
    if operand in launch.narrow:  # the sum, and the largest, of one number
        return operand
    reduce, neutral = REDUCED[line.op]  # beyond the columns a block holds anything
    return f"{reduce}(tl.where(column < columns, {operand}, {neutral}), 0)"


def indented(head: str, body: list[str]) -> str:
    return "\n    ".join([head, *body])
