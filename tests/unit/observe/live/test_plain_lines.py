"""Where there is no terminal, lines: one for what happens, but not thousands."""

import queue
import time
from dataclasses import replace

import pytest

from hydra_tune.observe.live import plain_lines
from hydra_tune.observe.live.plain_lines import PlainView, RateLimit, progress_line


def test_a_line_says_how_things_stand(view):
    line = progress_line(replace(view, makespan_seconds=130.0))
    assert line == "1m32s of about 2m10s  4/20 trials  4 in flight  best val_acc 0.97 (trial 1)  devices 72%"


def test_too_many_lines_are_counted(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    say = RateLimit(lines.append)
    for number in range(80):
        say(f"line {number}")
    assert lines == [f"line {number}" for number in range(50)]
    now[0] = 1.0  # room for five more
    say("later")
    assert lines[50:] == ["... and 30 more lines, too many to print", "later"]
    say.flush()
    assert len(lines) == 52


def test_what_was_held_back_at_the_end_is_said(monkeypatch):
    lines = []
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    say = RateLimit(lines.append)
    for number in range(51):
        say(str(number))
    say.flush()
    say.flush()
    assert lines[50:] == ["... and 1 more line, too many to print"]


def test_lines_that_cannot_be_written_end_with_a_warning(caplog):
    tried = []

    def write(line):
        tried.append(line)
        raise BrokenPipeError(32, "Broken pipe")

    say = RateLimit(write)
    say("first")
    say("second")
    say.flush()
    assert tried == ["first"]
    assert [record.getMessage() for record in caplog.records] == [
        "no more lines can be printed, and training goes on without them: [Errno 32] Broken pipe"
    ]


@pytest.mark.cases(1 / 3)
def test_lines_come_until_the_block_is_left(view, monkeypatch):
    for period in ("_PERIOD_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(plain_lines, period, 0.01)
    lines = queue.SimpleQueue()
    with PlainView(lines.put, lambda: view):
        assert lines.get(timeout=60) == lines.get(timeout=60) == progress_line(view)
    while not lines.empty():
        lines.get()
    assert lines.empty()
