"""Ctrl-C and the terminal: the sweep ends in order, the terminal is as it was, nothing is left running."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from itertools import dropwhile

import optuna
import pytest
from optuna.trial import TrialState

from tests.support.cli_project import Project

SECONDS = 120
HOME = "\x1b[1;1H"  # a picture begins


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    # Without Ctrl-C these trials would take hours.
    project.change("width: {values: [8, 16]}", "width: {values: [8, 16]}\n  epochs: {value: 1000000}")
    project.change("hydra: {", "hydra: {storage: sqlite:///trials.db, study: first, ")
    return project


HANGING = """
task: model:hangs
metric: {name: val_loss}
name: first
method: grid
parameters: {lr: {values: [0.01, 1.0]}}
hydra: {devices: "cpu:1", device_memory: 4MiB, max_concurrent: 2, storage: "sqlite:///trials.db"}
"""


def trials_of(folder):
    return optuna.load_study(study_name="first", storage=f"sqlite:///{folder / 'trials.db'}").trials


def assert_all_told(folder):
    trials = trials_of(folder)
    assert trials
    assert {trial.state for trial in trials} == {TrialState.FAIL}


def assert_nothing_left(group):
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_without_a_terminal(project, number):
    with project.start() as process:
        for _ in range(4):  # as many as are in flight
            assert process.stdout.readline() == "building\n"
        process.send_signal(number)
        printed, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert (
        f"{number.name}: the sweep ends when its running units have ended, in 30 s at most; a second signal ends it at once; "
        "the work of running trials is lost, because there is no checkpoint_dir in hydra:" in errors
    )
    assert len(re.findall(r"^trial \d+  cancelled", printed, re.MULTILINE)) == 4
    assert "no trial completed" in printed
    assert re.search(r"^sweep model:build: interrupted after ", printed, re.MULTILINE)
    assert_all_told(project.folder)
    assert_nothing_left(process.pid)


@pytest.mark.slow
@pytest.mark.parametrize("saves", [False, True], ids=["without checkpoints", "with checkpoints"])
@pytest.mark.parametrize("ends", ["the second signal", "the time that is given"])
def test_code_that_hangs_does_not_keep_the_process(project, saves, ends):
    project.write(HANGING)
    options = ["--stop-seconds", "600" if ends == "the second signal" else "2"]
    with project.start(*options, *(["--checkpoint-dir", "saved"] if saves else [])) as process:
        for line in process.stdout:
            if line == "hanging\n":
                break
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith("SIGTERM: the sweep ends when")
        if ends == "the second signal":
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == (130 if ends == "the second signal" else 143), errors
    told = "ended at once by SIGINT" if ends == "the second signal" else "not over 2 s after SIGTERM, and ended now"
    assert f"sweep first: {told}" in errors
    assert ("--resume" in errors) == saves
    if not saves:
        assert_all_told(project.folder)
    else:
        assert TrialState.FAIL not in {trial.state for trial in trials_of(project.folder)}
    assert_nothing_left(process.pid)


class Terminal:
    """A pseudo-terminal with a process in it, which lives no longer than the block."""

    def __init__(self, project):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(project.folder)
            command = project.command()
            os.execve(command[0], command, project.environment(TERM="xterm-256color"))
        self.seen = ""
        self.has_ended = False
        self.resize(24, 80)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Where the test fails: the sweep would go on for hours, and later tests would take it for a process of theirs.
        if not self.has_ended:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.file)

    def status(self):
        """Wait for the process; returns its exit code."""
        _, status = os.waitpid(self.pid, 0)
        self.has_ended = True
        return os.waitstatus_to_exitcode(status)

    def resize(self, lines, columns):
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, until):
        """Read until `until(what was seen)`, or the end."""
        deadline = time.monotonic() + SECONDS
        while not until(self.seen):
            assert time.monotonic() < deadline, self.seen[-2000:]
            if not select.select([self.file], [], [], 1.0)[0]:
                continue
            try:
                self.seen += os.read(self.file, 1 << 16).decode(errors="replace")
            except OSError:  # Linux says so when the other end is closed
                return

    def pictures_since(self, at):
        """The pictures that were seen whole since then: of each, the numbers and texts of the lines that it has sent."""
        pictures = []
        for picture in self.seen[at:].split(HOME)[1:-1]:
            pieces = re.split(r"\x1b\[([0-9]+);1H", HOME + picture)
            texts = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in pieces[2::2]]
            pictures.append(list(zip(map(int, pieces[1::2]), texts, strict=True)))
        return pictures


def fits(picture, lines, columns):
    return all(number <= lines and len(text) <= columns for number, text in picture)


def is_full(picture, lines):
    """Whether a picture sends all lines, and not only those that differ from the picture before."""
    return [number for number, _ in picture][:lines] == list(range(1, lines + 1))


@pytest.mark.slow
def test_the_live_view_survives_a_resize_and_gives_the_terminal_back(project):
    with Terminal(project) as terminal:
        terminal.read(lambda seen: "running" in seen and "cpu:1" in seen)
        assert "\x1b[?1049h" in terminal.seen
        terminal.resize(10, 44)
        at = len(terminal.seen)

        def resized():
            """All pictures from the first on that fills the new size: others may have been on their way before."""
            found = terminal.pictures_since(at)
            return list(dropwhile(lambda picture: not (is_full(picture, 9) and fits(picture, 10, 44)), found))

        def goes_on():
            """Whether the view shows what is new, and sooner or later a trial that does not wait for its turn or an answer."""
            pictures = resized()
            return len(pictures) > 4 and any("running" in text for picture in pictures for _, text in picture)

        terminal.read(lambda _: goes_on())
        assert goes_on()
        assert all(fits(picture, 10, 44) for picture in resized())
        os.write(terminal.file, b"\x03")
        terminal.read(lambda _: False)
        assert terminal.status() == 130, terminal.seen[-2000:]
    assert terminal.seen.count("\x1b[?1049h") == terminal.seen.count("\x1b[?1049l") == 1
    assert terminal.seen.rfind("\x1b[?25h") > terminal.seen.rfind("\x1b[?25l")
    after = terminal.seen.rpartition("\x1b[?1049l")[2]
    assert "no trial completed" in after
    assert "building" in after  # what the user's code printed is not lost with the screen
    assert_all_told(project.folder)
    assert_nothing_left(terminal.pid)


@pytest.mark.slow
def test_a_process_that_is_ended_at_once_gives_the_terminal_back(project):
    project.write(HANGING.replace("values: [0.01, 1.0]", "values: [1.0]"))
    with Terminal(project) as terminal:
        terminal.read(lambda seen: "hanging" in seen)
        os.write(terminal.file, b"\x03")
        terminal.read(lambda seen: "stopping as soon as" in seen)
        os.write(terminal.file, b"\x03")
        terminal.read(lambda _: False)
        assert terminal.status() == 130
    assert terminal.seen.rfind("\x1b[?25h") > terminal.seen.rfind("\x1b[?25l")
    assert "ended at once by SIGINT, the second signal" in terminal.seen.rpartition("\x1b[?1049l")[2]
    assert_all_told(project.folder)
    assert_nothing_left(terminal.pid)
