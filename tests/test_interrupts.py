"""What stops a run from outside, and what is left then: signals, closed terminals and pipes, another process."""
# ruff: noqa: F811 (fixtures of toy.py)

import errno
import os
import re
import shlex
import signal
import sys
from io import StringIO

import pytest
from toy import TOY, assert_same_run, at_step, end_of, folder, fork, lines, options, tiny, use_the_toy, whole_run  # noqa: F401
from typer.testing import CliRunner

from rlcourse import cli, cli_shared, interrupts
from rlcourse import train as trainer
from rlcourse.checkpoint import latest_checkpoint
from rlcourse.config import make_config
from rlcourse.train import resume, train


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    use_the_toy(monkeypatch)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(number, code, whole_run, tiny, tmp_path, monkeypatch):
    """SIGTERM, too, as rented machines send it before they stop."""
    arguments = ["train", *options(tiny)]
    monkeypatch.setattr(sys, "argv", ["rlcourse", *arguments])
    original = trainer.train_step

    def interrupted(*arguments):
        if arguments[-1] == 3:
            signal.raise_signal(number)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", interrupted)
        result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code and "Traceback" not in result.output
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    said = re.search(r"Stopped at step (\d+)\. Go on with: (rlcourse train .*--resume)", result.output)
    step, command = said.groups()
    assert step == "4" and latest_checkpoint(tmp_path / "run").name == "step-000004"
    assert [line["step"] for line in lines(tmp_path / "run")["metrics"]] == [1, 2, 3, 4]
    assert not (tmp_path / "run" / "summary.json").exists()
    result = CliRunner().invoke(cli.app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert_same_run(tmp_path / "run", whole_run)  # the validation that was still due included


def test_a_closed_terminal_finishes_the_step_saves_and_can_be_gone_on_from(whole_run, tiny, tmp_path, monkeypatch):
    original, keep = trainer.train_step, trainer.save

    def signalled(function):  # a terminal hangs up more than once
        def call(*arguments):
            if arguments[-1] == 3 or function is keep:
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGHUP)
            return function(*arguments)

        return call

    def gone(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    arguments = ["train", *options(tiny), "--save-every=0"]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", signalled(original))
        patch.setattr(trainer, "save", signalled(keep))
        patch.setattr(interrupts.tqdm, "write", gone)
        done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 128 + signal.SIGHUP and "Traceback" not in done.output
    assert latest_checkpoint(tmp_path / "run").name == "step-000004"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    resume(name="run", output=str(tmp_path), save_every=3)
    assert_same_run(tmp_path / "run", whole_run)


@pytest.mark.parametrize("watched", [True, False])
def test_a_progress_bar_is_for_a_terminal(watched, monkeypatch):
    monkeypatch.setattr(sys, "stderr", file := StringIO())
    file.isatty = lambda: watched
    with interrupts.progress_bar("train", 3) as bar:
        bar.update()
    assert ("train" in file.getvalue()) == watched


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.StopAfterStep(None, None), cli_shared.silence():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_in_use_is_left_to_its_process(tiny, tmp_path, monkeypatch):
    config, (ours, theirs) = make_config(**tiny), os.pipe()

    def waits():
        os.write(theirs, b"x")
        signal.pause()

    with monkeypatch.context() as patch:
        patch.setattr(trainer.RunFolder, "log_step", at_step(1, waits))
        child = fork(lambda: train(config))
    assert os.read(ours, 1) == b"x"
    try:
        with pytest.raises(ValueError, match=r"Another process is training in .*/run: wait until it has ended"):
            resume(name="run", output=str(tmp_path))
    finally:
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="was stopped before its first checkpoint"):  # so the lock is free
        resume(name="run", output=str(tmp_path))


def test_sigterm_while_a_run_is_prepared_leaves_its_name_free(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "policy_of_run", lambda *_: signal.raise_signal(signal.SIGTERM))
    arguments = options(tiny)
    assert CliRunner().invoke(cli.app, ["train", *arguments]).exit_code == 143
    assert not (tmp_path / "run").exists()
