"""Standard output holds what was asked for: the live view, lines, or one JSON object and nothing else."""

import io
import json
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout

import pytest

from hydra_tune.cli.display.output import SweepOutput
from hydra_tune.cli.sweep_file.options import DisplayOptions
from hydra_tune.observe.live.snapshot import SweepView, TrialView

VIEW = SweepView(
    name="vit",
    metric="val_loss",
    goal="minimize",
    status="completed",
    trials=(TrialView(number=0, state="completed", value=0.5),),
)


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def a_capable_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


def say(line):
    sys.stdout.write(line + "\n")


def test_json_is_alone_on_standard_output(capsys):
    output = SweepOutput(DisplayOptions(as_json=True))
    with output.quiet():
        say("while importing")
        with output.showing(lambda: VIEW):
            say("while building")
            output.log("trial 0  completed")
    output.report(VIEW)
    out, err = capsys.readouterr()
    assert json.loads(out)["best"]["value"] == 0.5
    assert err == "while importing\nwhile building\ntrial 0  completed\n"


PRINTING = """
import subprocess, sys
from hydra_tune.cli.display.output import SweepOutput
from hydra_tune.cli.sweep_file.options import DisplayOptions
from tests.unit.cli.display.test_output import VIEW

output = SweepOutput(DisplayOptions(as_json=True))
with output.quiet(), output.showing(lambda: VIEW):
    # As a loader worker does, which has a `sys.stdout` of its own.
    subprocess.run([sys.executable, "-c", "print('in a worker')"], check=True)
    sys.__stdout__.write("past sys.stdout\\n")
output.report(VIEW)
"""


def test_json_is_alone_also_where_other_processes_print():
    run = subprocess.run([sys.executable, "-c", PRINTING], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["best"]["value"] == 0.5
    assert sorted(run.stderr.splitlines()) == ["in a worker", "past sys.stdout"]


class RawWrites(io.RawIOBase):
    def __init__(self):
        self.writes = []

    def writable(self):
        return True

    def write(self, data):
        self.writes.append(bytes(data))
        return len(data)


def test_a_line_is_one_write_also_without_buffers():
    """A trial may end the process at any moment, and what is written next would go on behind half a line."""
    raw = RawWrites()
    with redirect_stdout(io.TextIOWrapper(raw, write_through=True)):
        output = SweepOutput(DisplayOptions(live=False, as_json=False))
        output.log("trial 0  completed")
        assert [data for data in raw.writes if data] == [b"trial 0  completed\n"]


def test_without_a_terminal_there_are_lines(capsys):
    output = SweepOutput(DisplayOptions())
    with output.showing(lambda: VIEW):
        say("while building")
        output.log("trial 0  completed")
    assert capsys.readouterr().out == "while building\ntrial 0  completed\n"


@pytest.mark.parametrize(("live", "term"), [(False, "xterm"), (True, "dumb")])
def test_a_terminal_without_the_live_view_has_lines(monkeypatch, live, term):
    monkeypatch.setenv("TERM", term)
    with redirect_stdout(Screen()) as terminal:
        output = SweepOutput(DisplayOptions(live=live))
        with output.showing(lambda: VIEW):
            output.log("trial 0  completed")
    assert terminal.getvalue() == "trial 0  completed\n"


def fill_and_fail():
    threads = [threading.Thread(target=say, args=(f"thread {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stderr.write("\r10%\r20%\nno end of line")
    raise KeyError


def test_what_is_printed_during_the_live_view_comes_after_it():
    with redirect_stdout(Screen()) as terminal, redirect_stderr(io.StringIO()) as errors:
        output = SweepOutput(DisplayOptions())
        with pytest.raises(KeyError), output.showing(lambda: VIEW):
            fill_and_fail()
        assert sys.stdout is terminal
    lines = errors.getvalue().splitlines()
    assert lines[-2:] == ["20%", "no end of line"]
    assert sorted(lines[:-2]) == [f"thread {n}" for n in range(8)]
    assert terminal.getvalue().count("\x1b[?1049l") == 1
