"""The files of a run, read and written.

A reader refuses a file that it can't use, in one sentence that names it and ends in the caller's `remedy`, such as
"start a new run": FileNotFoundError if there's no file, ValueError otherwise. A writer never leaves half a file: it
writes to `NAME.writing` and renames.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def read_bytes(path: Path, remedy: str) -> bytes:
    try:
        if path.exists() and not path.is_file():  # a device or a pipe may never end
            raise ValueError(f"{path} is not a regular file: {remedy}.")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"There is no file {path}: {remedy}.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({reason(error)}): {remedy}.") from None


def of_json(content: bytes) -> Any:
    """The value that this JSON holds. Raises ValueError, with words that go on from "it is", for other text, and for an
    object with a key twice, of which Python would drop the first."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(value := dict(pairs)) < len(pairs):
            raise KeyError(Counter(name for name, _ in pairs).most_common(1)[0][0])
        return value

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=once)
    except KeyError as twice:
        raise ValueError(f"an object with the key {twice} twice") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except (ValueError, RecursionError):  # not JSON, nested too deeply, or a number that is too long for Python
        raise ValueError("not JSON" if content.strip() else "empty") from None


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    content = read_bytes(path, remedy)
    try:
        value = of_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is {error}: {remedy}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object: {remedy}.")
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none if there is no such file. A last line that a kill cut short is skipped;
    any other that isn't an object raises ValueError."""
    if not path.exists():
        return []
    values, lines = [], read_bytes(path, "move it away, or start a new run").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            values.append(of_json(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number} is {error}: take that line out, or start a new run.") from None
        if not isinstance(values[-1], dict):
            raise ValueError(f"{path}, line {number} is not a JSON object: take that line out, or start a new run.")
    return values


def aside_of(path: Path) -> Path:
    return path.with_name(path.name + ".writing")


def write_text(path: Path, text: str) -> None:
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a link or a device, like /dev/stdout, stays one
        path.write_text(text, encoding="utf-8")
        return
    aside = aside_of(path)
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, renamed to `folder` at the end. That must be empty, or not there."""
    aside = aside_of(folder)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        yield aside
        if folder.exists():
            folder.rmdir()
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def append_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def try_folder(folder: Path, remedy: str, needs_bytes: int = 0) -> None:
    """Make the folder and write to it, so that nothing is computed for a place that can't take it. Raises OSError, with
    everything left as it was, if it can't be written to or has less room than `needs_bytes`."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
        free = shutil.disk_usage(folder).free
        if free >= needs_bytes:
            return
        why = f"{free / 1e6:,.1f} MB are free, {needs_bytes / 1e6:,.1f} MB are needed"
    except (FileExistsError, NotADirectoryError):
        why = "a file is in its place"
    except OSError as error:
        why = reason(error)
    for made in missing:
        with suppress(OSError):
            made.rmdir()
    raise OSError(f"Results cannot be written to {folder} ({why}): {remedy}.")


def try_empty_folder(folder: Path, remedy: str, *inputs: Path) -> None:
    """As `try_folder`. Raises ValueError for a file or a folder that isn't empty, too, and as `check_apart` does."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: {remedy}.")
    check_apart(folder, remedy, *inputs)
    try_folder(folder, remedy)


def check_apart(output: Path, remedy: str, *inputs: Path) -> None:
    """Raise ValueError if writing the output would change an input: `new_folder` deletes what is in its way aside."""
    written = [place for place in (output, aside_of(output)) if place.exists()]
    for path in (path.expanduser().resolve() for path in inputs if path.expanduser().exists()):
        if any(place.samefile(above) for place in written for above in (path, *path.parents)):
            raise ValueError(f"Writing {output} would overwrite {path}, which is read: {remedy}.")


def try_file(path: Path, remedy: str, *inputs: Path) -> None:
    """Raise OSError if `write_text` can't write the file, ValueError as `check_apart` does. Its content is left
    alone."""
    check_apart(path, remedy, *inputs)
    if path.is_dir():
        raise OSError(f"{path} cannot be written (Is a directory): {remedy}.")
    if not path.exists() or path.is_file():  # and no device, whose folder is not ours
        try_folder(path.parent, remedy)


def digest_of(parts: Iterable[Any]) -> str:
    """The same for the same parts in the same order."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(repr(part).encode("utf-8", "surrogatepass") + b"\n")
    return found.hexdigest()


def reason(error: OSError) -> str:
    """What the system says, without number and path."""
    return error.strerror or str(error) or type(error).__name__
