"""The live view fits its terminal, whatever the terminal's size, and gives it back."""

import io
from collections import deque
from dataclasses import replace

import pytest
from rich.console import Console

from hydra_tune.observe.screen import SweepScreen
from hydra_tune.observe.snapshot import SweepView, TrialView
from hydra_tune.observe.terminal import LiveView


def drawn(view, *, width=80, height=24, recent=()):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)
    options = console.options.update(width=width, height=height)
    lines = console.render_lines(SweepScreen(view, recent), options.update(height=None), pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_the_header_counts_and_names_the_best(view):
    lines = drawn(view)
    assert lines[0] == "vit  1m32s"
    assert lines[1] == "4/20 trials  ━━━──────────  2 done  1 pruned  1 failed  4 in flight"
    assert lines[2] == "best val_acc 0.97 in trial 1: lr=0.001235 width=128 act=relu"


def test_the_makespan_is_held_against_its_bound(view):
    lines = drawn(replace(view, makespan_seconds=130.0, bound_seconds=100.0))
    assert lines[0] == "vit  1m32s of about 2m10s, 1.30 x the lower bound 1m40s"


def test_trials_have_state_progress_metric_and_eta(view):
    running = next(line for line in drawn(view) if " 4 running" in line)
    assert running.split()[0:2] == ["4", "running"]
    assert running.split()[3:] == ["3/8", "0.5", "1m15s", "lr=0.001235", "width=128", "act=relu"] or (
        running.endswith("…") and running.split()[3:6] == ["3/8", "0.5", "1m15s"]
    )
    assert not any(" 0 completed" in line or " 2 pruned" in line for line in drawn(view))


def test_devices_have_use_and_bytes(view):
    line = next(line for line in drawn(view) if line.startswith("cpu:0"))
    assert "93%" in line
    assert "3.0 MiB / 5.0 MiB" in line


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("height", [1, 2, 5, 8, 12, 24, 60])
def test_nothing_is_wider_or_higher_than_the_terminal(view, width, height):
    many = replace(view, trials=view.trials + tuple(TrialView(number=n, state="running") for n in range(10, 50)))
    lines = drawn(many, width=width, height=height, recent=["x" * 300] * 100)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 2)


def test_trials_that_do_not_fit_are_counted(view):
    many = replace(view, trials=tuple(TrialView(number=n, state="running") for n in range(50)))
    lines = drawn(many, height=24)
    shown = sum(" running" in line and not line.startswith("...") for line in lines)
    assert f"... and {50 - shown} more: {50 - shown} running" in lines
    assert shown >= 10


def test_before_the_first_trial_there_is_something_to_read():
    empty = SweepView(name="vit", metric="val_loss", goal="minimize", status="running")
    counts = "0 trials  0 done  0 pruned  0 failed  0 in flight"
    assert drawn(empty) == ["vit  0.0s", counts, "no trial has completed yet"]


def test_markup_in_names_is_text(view):
    trial = TrialView(number=0, state="running", params={"act": "[red]x[/]"})
    lines = drawn(replace(view, name="[bold]a", trials=(trial,)), recent=["[/nope]"])
    assert lines[0].startswith("[bold]a")
    assert any("act=[red]x[/]" in line for line in lines)
    assert "[/nope]" in lines


def test_stopping_is_said(view):
    assert "stopping as soon as the running units end ..." in drawn(replace(view, status="stopping"))


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=24, legacy_windows=False)


def assert_given_back(text):
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_the_terminal_is_given_back_whatever_happens(view, error):
    console = terminal()
    with pytest.raises(error), LiveView(console, lambda: view, deque()):
        raise error
    assert_given_back(console.file.getvalue())


def test_the_terminal_is_given_back_when_drawing_fails(view):
    console = terminal()
    broken = replace(view, trials=(None,))
    views = iter([view])
    with pytest.raises(AttributeError), LiveView(console, lambda: next(views, broken), deque()):
        pytest.fail("the view was not drawn on entry")
    assert_given_back(console.file.getvalue())
