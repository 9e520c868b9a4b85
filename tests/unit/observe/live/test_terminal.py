"""The live view fits its terminal, whatever the terminal's size, and gives it back."""

import contextlib
import io
import logging
import threading
from collections import deque
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from hydra_tune.observe.live.paint import AlternateScreen
from hydra_tune.observe.live.printed import CapturedOutputStream, kept
from hydra_tune.observe.live.rows import ScreenCell, one_line
from hydra_tune.observe.live.screen import sweep_lines
from hydra_tune.observe.live.snapshot import SweepView, TrialView
from hydra_tune.observe.live.terminal import LiveView


def drawn(view, *, width=80, height=24, recent=(), **how):
    lines = sweep_lines(view, recent, width, height, **how)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def test_the_header_counts_and_names_the_best(view):
    lines = drawn(view)
    assert lines[0] == "vit  1m32s"
    assert lines[1] == "4/20 trials  ━━━──────────  2 done  1 pruned  1 failed  4 in flight"
    assert lines[2] == "best val_acc 0.97 in trial 1: lr=0.001235 width=128 act=relu"


def test_the_makespan_is_held_against_its_bound(view):
    lines = drawn(replace(view, makespan_seconds=130.0, bound_seconds=100.0))
    assert lines[0] == "vit  1m32s of about 2m10s, at least 1m40s of it units"


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
    counts = "0 ended  0 done  0 pruned  0 failed  0 in flight"
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
    with pytest.raises(AttributeError), LiveView(console, lambda: broken, deque()):
        pytest.fail("the view was not drawn on entry")
    assert_given_back(console.file.getvalue())


def test_a_view_that_fails_later_gives_the_terminal_back_and_the_block_goes_on(view, caplog):
    console = terminal()
    views, may_fail = iter([view]), threading.Event()

    def seen():
        found = next(views, None)
        if found is None:
            assert may_fail.wait(60)
        return found or replace(view, trials=(None,))

    with LiveView(console, seen, deque()):
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "hydra-view")
        may_fail.set()
        thread.join(60)
        assert_given_back(console.file.getvalue())
    assert not thread.is_alive()
    assert "the live view ends here, and training goes on without it" in caplog.text


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_the_thread_ends_with_the_block(view, error):
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), LiveView(terminal(), lambda: view, deque()):
        assert any(thread.name == "hydra-view" for thread in threading.enumerate())
        if error is not None:
            raise error
    assert not any(thread.name == "hydra-view" for thread in threading.enumerate())


def painted(size, *pictures, **console):
    """What is sent to a terminal for each of some pictures, lists of lines."""
    made = Console(file=io.StringIO(), force_terminal=True, legacy_windows=False, **console)
    screen = AlternateScreen(made)
    screen.open()
    sent = []
    for lines in pictures:
        before = len(made.file.getvalue())
        screen.paint([one_line([ScreenCell(line, "bold red")], size[0]) for line in lines], size)
        sent.append(made.file.getvalue()[before:])
    screen.close()
    return sent


def test_only_what_has_changed_is_sent():
    first, second, third, fourth = painted((10, 5), ["ab", "cd"], ["ab", "xy"], ["ab", "xy"], ["ab"])
    assert "ab" in first
    assert "cd" in first
    assert "\x1b[2;1H" in second
    assert "xy" in second
    assert "ab" not in second
    assert third == ""
    assert fourth == "\x1b[2;1H\x1b[J"


def test_a_full_line_is_not_erased_behind():
    (sent,) = painted((4, 1), ["abcd"])
    assert "\x1b[K" not in sent  # it would take the last character, on which the cursor still stands
    assert "\x1b[K" in painted((5, 1), ["abcd"])[0]


def test_colours_are_left_out_where_nobody_wants_them(monkeypatch):
    assert "31m" in painted((4, 1), ["ab"], color_system="standard")[0]
    monkeypatch.setenv("NO_COLOR", "1")
    (sent,) = painted((4, 1), ["ab"], color_system="standard")
    assert "31m" not in sent
    assert "ab" in sent


def test_a_terminal_without_unicode_gets_none(view):
    lines = drawn(view, is_ascii=True, recent=["größer"])
    assert "".join(lines).isascii()
    assert any("#####" in line for line in lines)


def test_wide_names_keep_columns_in_line(view):
    wide = TrialView(number=4, state="running", name="試行四", params={"名": "値"}, value=0.5, epoch=1, epochs=8)
    narrow = replace(wide, number=5, name="abc")
    lines = sweep_lines(replace(view, trials=(wide, narrow)), (), 80, 24)
    rows = ["".join(segment.text for segment in line) for line in lines if any("running" in s.text for s in line)]
    assert {cell_len(row) for row in rows} == {80}
    assert len({cell_len(row.split("running")[0]) for row in rows}) == 1


def test_control_characters_do_not_move_the_cursor(view):
    trial = TrialView(number=0, state="running", params={"act": "a\nb\x1b[2Jc\t"})
    lines = sweep_lines(replace(view, name="x\ry", trials=(trial,)), ["p\x1b[1Aq"], 80, 24)
    assert all(segment.text.isprintable() for line in lines for segment in line)


def test_parameters_that_differ_come_first(view):
    trials = tuple(
        TrialView(number=n, state="running", params={"epochs": 8, "width": 64, "lr": n / 10}) for n in range(2)
    )
    assert any(line.endswith("lr=0.1 epochs=8 width=64") for line in drawn(replace(view, trials=trials), width=160))


def test_a_progress_bar_without_a_newline_is_kept_in_its_last_state_alone():
    recent, output = deque(), io.StringIO()
    printed = CapturedOutputStream(recent)
    for text in ("1%\r", "2%", "\r", "\nnext\n"):
        printed.write(text)
    assert list(recent) == ["2%", "next"]
    for number in range(100):
        printed.write(f"\r{number}%")
    printed.replay(output)
    assert output.getvalue() == "2%\nnext\n99%\n"


def test_a_log_handler_made_during_a_view_writes_to_standard_error_after_it(monkeypatch, capsys):
    logger = logging.getLogger("hydra_tune.tests.printed")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [])
    with kept(deque()):
        logger.addHandler(logging.StreamHandler())
        logger.warning("during the view")
    logger.warning("after the view")
    assert capsys.readouterr().err == "during the view\nafter the view\n"
    with kept(recent := deque()):
        logger.warning("during the next view")
    assert list(recent) == ["during the next view"]
