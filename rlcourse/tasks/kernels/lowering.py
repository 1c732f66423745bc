"""A program of the tile language as Triton source: a kernel per launch, an instance per row, a variable per register.
Both streams become one."""

from rlcourse.tasks.kernels.language import Computation, Launch, Line, Statement, compile_program

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
    kernels, first = [], computation.inputs[0]
    body = [f"rows, columns = {first}.shape", "block = triton.next_power_of_2(columns)"]
    for number, launch in enumerate(compile_program(program, computation)):
        moved = list(dict.fromkeys([*launch.loads, *launch.stores]))
        arguments = ", ".join(f"{name}_ptr" for name in moved) + ", columns, BLOCK: tl.constexpr"
        kernels.append(indented(f"@triton.jit\ndef kernel_{number}({arguments}):", statements_of(launch)) + "\n")
        for name in launch.stores:
            body.append(f"{name} = {first}.new_empty(rows, {'1' if name in launch.narrow else 'columns'})")
        body.append(f"kernel_{number}[(rows,)]({', '.join(moved)}, columns, BLOCK=block)")
    run = indented(f"def run({', '.join(computation.inputs)}):", [*body, "return y"])
    return "\n\n".join([HEAD, *kernels, run]) + "\n"


def statements_of(launch: Launch) -> list[str]:
    found, here = ["row = tl.program_id(0)", "column = tl.arange(0, BLOCK)"], set()
    rows = dict.fromkeys(launch.narrow, ("row", ""))  # where a tensor's row is, and the mask
    for line, keeps in ((statement.line, statement.keeps) for statement in launch.statements):
        for name in dict.fromkeys([*line.args, line.name]):
            place, mask = rows.get(name, ("row * columns + column", ", mask=column < columns"))
            if name == line.name:
                found.append(f"{name} = {expression(line, launch)}")
                found += [] if keeps else [f"tl.store({name}_ptr + {place}, {name}{mask})"]
            elif name not in here:
                found.append(f"{name} = tl.load({name}_ptr + {place}{mask})")
        here.update([*line.args, line.name])
    return found


def expression(line: Line, launch: Launch) -> str:
    if line.op not in REDUCED:
        return EXPRESSIONS[line.op].format(*line.args)
    (operand,) = line.args
    if operand in launch.narrow:  # the sum, and the largest, of one number
        return operand
    reduce, neutral = REDUCED[line.op]  # beyond the columns a block holds anything
    return f"{reduce}(tl.where(column < columns, {operand}, {neutral}), 0)"


def indented(head: str, body: list[str]) -> str:
    return "\n    ".join([head, *body])
