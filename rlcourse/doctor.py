"""What this machine is, which presets fit it, and what is missing with the command that mends it. Nothing here uses the
network, or raises because a library is missing."""

import importlib.util
import platform
import shutil
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from rlcourse.cli_tables import print_table
from rlcourse.measure import machine
from rlcourse.measure.machine import format_bytes
from rlcourse.paths import data_folder

REINSTALL = 'python -m pip install -e "."'
OPTIONAL = {  # module, what it is for, and what to install
    "tensorboard": ("tensorboard", "for --log-to tensorboard", "tensorboard"),
    "wandb": ("wandb", "for --log-to wandb", "wandb"),
    "vLLM": ("vllm", "for --engine vllm on a GPU", "'rlcourse[vllm]'"),
    "CuTe DSL": ("cutlass", "for lessons 08 to 10, and to sample faster on an H100", "'rlcourse[kernels]'"),
    "math-verify": ("math_verify", "for --task math", "'rlcourse[math]'"),
}
SHIPPED = "minigsm/model/model.safetensors", "minigsm/test.jsonl", "kernels/model/model.safetensors", "kernels/test.txt"
Found = tuple[str, bool, str, str]  # name, whether it's here, detail, and the command that brings it


def gather() -> dict[str, Any]:
    """The facts: 'machine'; 'checks', one {name, ok, required, detail, mend} for each thing that was looked for, with
    the command that helps in mend, '' if ok; 'presets', see `preset_facts`."""
    try:
        gpus, error = machine.gpus(), ""
    except Exception as exception:  # a half-installed torch fails in many ways, and each is worth reporting
        gpus, error = [], f"{type(exception).__name__}: {exception}".split("\n")[0]
    facts = {"system": f"{platform.system()} {platform.release()} ({platform.machine()})", "gpus": gpus}
    facts |= {"cpu": machine.cpu_model(), "cores": machine.cpu_cores(), "memory_bytes": machine.memory_bytes()}
    facts |= {"driver": machine.driver(), "versions": machine.versions()}
    usable = not error and facts["versions"].get("transformers", "") is not None
    of_kinds = {True: required_checks(facts["versions"], error), False: optional_checks(gpus, facts["driver"])}
    checks = [
        {"name": name, "ok": ok, "required": required, "detail": detail, "mend": "" if ok else mend}
        for required, found in of_kinds.items()
        for name, ok, detail, mend in found
    ]
    return {"machine": facts, "checks": checks, "presets": preset_facts(facts) if usable else []}


def required_checks(versions: dict[str, str | None], torch_error: str) -> Iterator[Found]:
    """The libraries, models and problems of every run on a CPU."""
    missing = [name for name, version in versions.items() if version is None]
    libraries = "missing: " + ", ".join(missing) if missing else "all installed"
    yield "libraries", not missing, libraries, REINSTALL
    yield "torch works", not torch_error, torch_error or "imports", f"{REINSTALL} --force-reinstall"
    try:
        lost = [file for file in SHIPPED if not (data_folder() / file).is_file()]
    except FileNotFoundError:
        lost = SHIPPED
    yield "models and problems", not lost, f"data has no {', '.join(lost)}" if lost else "here", "git checkout -- data"


def optional_checks(gpus: list[dict[str, Any]], driver: str | None) -> Iterator[Found]:
    """What only some presets and options ask for. A driver without a usable torch is a wrong build of torch."""
    found, mend = "none: the laptop preset runs on the CPU", ""
    if gpus:
        found = f"{len(gpus)} x {gpus[0]['name']}"
    elif driver:
        found = "the driver is here, but torch cannot use a GPU"
        mend = "python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
    yield "GPU", bool(gpus), found, mend
    compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    install = {"Linux": "sudo apt-get install g++", "Darwin": "xcode-select --install"}
    install = install.get(platform.system(), "install the Visual Studio build tools with C++")
    yield "C++ compiler", compiler, "for --compile on a CPU", install
    for name, (module, detail, package) in OPTIONAL.items():
        yield name, importlib.util.find_spec(module) is not None, detail, f"python -m pip install {package}"


def preset_facts(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """One {preset, device, needs_bytes, has_bytes, fits} for each preset: the most memory that it needs on its device,
    and what that has; None if unknown."""
    from rlcourse import memory
    from rlcourse.config import PRESETS, make_config
    from rlcourse.measure import shapes

    rows = []
    for preset in PRESETS:
        config = make_config(preset)
        device = "cuda" if config.dtype == "bfloat16" else "cpu"
        has = max((g["memory_bytes"] for g in facts["gpus"]), default=0) if device == "cuda" else facts["memory_bytes"]
        try:
            shape, exact = shapes.model_shape(config.model), memory.has_exact_pass(config, device)
            needs = memory.estimate(config, shape, device, exact=exact).peak
        except (FileNotFoundError, ValueError):  # the embedded model is missing or broken
            needs = None
        fits = None if None in (needs, has) else needs <= has
        rows.append({"preset": preset, "device": device, "needs_bytes": needs, "has_bytes": has, "fits": fits})
    return rows


def print_report(facts: dict[str, Any], console: Console | None = None) -> None:
    """The facts as three tables: the machine, what is here and what is missing, the presets."""
    console, this = console or Console(), facts["machine"]

    def size(count: int | None) -> str:
        return "unknown" if count is None else format_bytes(count) if count else "none"

    table = Table(title="This machine", show_header=False)
    table.add_row("system", this["system"])
    table.add_row("processor", f"{this['cpu']}, {this['cores']} cores, {size(this['memory_bytes'])} of memory")
    for gpu in this["gpus"]:
        table.add_row("GPU", f"{gpu['name']}, {size(gpu['memory_bytes'])}, capability {gpu['capability']}")
    if this["driver"]:
        table.add_row("NVIDIA driver", this["driver"])
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in this["versions"].items()))
    print_table(table, console)

    table = Table("", "what", "found", title="What is here")
    for item in facts["checks"]:
        mark = "[green]yes[/green]" if item["ok"] else "[red]no[/red]" if item["required"] else "[yellow]no[/yellow]"
        table.add_row(mark, item["name"], item["detail"])
    print_table(table, console)
    commands = [(item["name"], item["mend"]) for item in facts["checks"] if item["mend"]]
    if commands:
        console.print("What is not here, and the command that brings it:")
    for name, command in commands:  # outside the table, which would cut them off
        console.print(f"  {name}:\n    {command}", soft_wrap=True, markup=False, highlight=False)
    console.print()

    table = Table("preset", "device", "needs at most", "this machine has", "fits", title="Presets")
    for row in facts["presets"]:
        fits = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "unknown"}[row["fits"]]
        table.add_row(row["preset"], row["device"], size(row["needs_bytes"]), size(row["has_bytes"]), fits)
    if facts["presets"]:
        print_table(table, console)
