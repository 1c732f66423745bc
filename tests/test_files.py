"""Files: what a reader says of each that it cannot use, and that no writer leaves half of one."""

import errno
import os

import pytest

from rlcourse import files
from rlcourse.files import check_apart, read_json, read_lines, try_file, try_folder, write_text

BROKEN = {
    "empty": (b"", "is empty"),
    "binary": (b"\x80\x02}q\x00", "is not UTF-8 text"),
    "a key twice": (b'{"a": {"b": 1, "b": 2}}', "is an object with the key 'b' twice"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "a list": (b"[1]", "holds a JSON list"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.json"


@pytest.mark.parametrize(("content", "complaint"), BROKEN.values(), ids=BROKEN)
def test_a_json_file_that_cannot_be_used_is_named_with_what_to_do(content, complaint, path):
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_json(path, "start a new run")
    assert str(caught.value).startswith(f"{path} {complaint}") and str(caught.value).endswith(": start a new run.")


def test_a_last_line_that_a_kill_cut_short_is_left_out(path):
    for rest in ('{"step": 2, "rew', "\udc80".encode("utf-8", "surrogatepass"), "\0\0\0"):
        path.write_bytes(b'{"step": 1}\n' + (rest if isinstance(rest, bytes) else rest.encode()))
        assert read_lines(path) == [{"step": 1}]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("", "is empty"), ("3", "is not a JSON object"), ("\x80", "is not UTF-8 text")],
)
def test_any_other_line_that_is_broken_is_named(line, complaint, path):
    path.write_bytes(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"^{path}, line 2 {complaint}: take that line out, or start a new run\.$"):
        read_lines(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(path, monkeypatch):
    write_text(path, "old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "replace", full)
        write_text(path, "new")
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_an_input_is_not_written_over_by_whatever_name(tmp_path):
    data, other = tmp_path / "data.writing", tmp_path / "other"
    data.mkdir()
    (data / "x").write_text("mine")
    (tmp_path / "link").symlink_to(data / "x")
    os.link(data / "x", other)
    for output in (data / "x", tmp_path / "link", other, tmp_path / "data"):
        with pytest.raises(ValueError, match=rf"^Writing {output} would overwrite {data / 'x'}, which is read: choose"):
            check_apart(output, "choose another", data / "x")
    check_apart(tmp_path / "new", "choose another", data / "x", tmp_path / "missing")


def test_a_disk_without_room_is_found_before_anything_is_made(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"MB are free, .* MB are needed\): choose another\.$"):
        try_folder(tmp_path / "a" / "b", "choose another", needs_bytes=10**18)
    assert not any(tmp_path.iterdir())

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", full)
    with pytest.raises(OSError, match=r"\(No space left on device\): choose another\.$"):
        try_folder(tmp_path / "a" / "b", "choose another")
    assert not any(tmp_path.iterdir())


def test_a_file_is_tried_and_left_as_it_was(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "full").write_text("mine")
    with pytest.raises(ValueError, match=r"would overwrite .*full, which is read: name another"):
        try_file(tmp_path / "full", "name another", tmp_path / "missing", tmp_path / "full")
    for name in ("empty", "full", "new"):
        try_file(tmp_path / name, "name another")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"empty": "", "full": "mine"}
    with pytest.raises(OSError, match=r"cannot be written \(Is a directory\): name another\.$"):
        try_file(tmp_path, "name another")
    try_file(files.Path(os.devnull), "name another")
