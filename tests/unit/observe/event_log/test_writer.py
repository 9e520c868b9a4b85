"""The log is whole whatever happens to it, and whatever happens to it, nobody who tells it something is hurt."""

import io
import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log import writer
from hydra_tune.observe.event_log.line_format import EventLogFormatter
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.observe.event_log.run_figures import run_figures
from hydra_tune.observe.event_log.writer import EventLog, check_log_path
from hydra_tune.observe.trace.run_table import print_run

FACTS = {"hydra_tune": "0.1.0", "policy": "lrtf", "admission": "eager", "max_concurrent": 2}
PATIENCE_SECONDS = 60


def made(path, **options):
    return EventLog(path, [("cpu:0", 100)], FACTS, **options)


def tell_unit(log, number=0):
    now = time.perf_counter_ns()
    log.unit("cpu:0", "0:a", "forward", number, now - 3, now - 2, now, is_failed=False)


def wait_until(condition):
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def content(path):
    """A log removes the file of its predecessor before it opens its own."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def test_everything_that_is_told_can_be_read_back(tmp_path):
    began_ns = time.perf_counter_ns()
    log, path = made(tmp_path / "new" / "folder" / "run.jsonl"), tmp_path / "new" / "folder" / "run.jsonl"
    log.at_work("cpu:0")
    log.job("0:a", "submitted", priority=1)
    log.owns("0:a", 17)
    start = time.perf_counter_ns()
    log.unit("cpu:0", "0:a", 'odd "kind"', 3, start, start + 1, start + 5, is_failed=True)
    log.copied("cpu:0", "in", 17, "parameters", 3, 64, "waited", start, start + 9)
    log.copied("cpu:0", "out", None, "inputs", None, 32, "background", start, start + 9)
    log.waited("cpu:0", start, start + 2)
    log.saved("cpu:0", 5, 6)
    log.saved("cpu:0", 0, 0)
    log.stored("read", 8, start, start + 4)
    log.job("0:a", "report", metrics={"val_loss": float("nan"), "val_acc": 0.5}, waits=False)
    log.job("0:a", "over", status="completed", units_saved=0)
    log.close()
    assert all(json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    found = read_log(path)
    assert (found.budgets, found.policy, found.lost, found.is_cut) == ({"cpu:0": 100}, "lrtf", 0, False)
    (unit,) = found.units
    assert (unit.device, unit.job, unit.kind, unit.shard, unit.is_failed) == ("cpu:0", "0:a", 'odd "kind"', 3, True)
    assert (unit.ready_ns - unit.start_ns, unit.end_ns - unit.start_ns) == (1, 5)
    mine, others = found.copies
    assert (mine.job, mine.shard, mine.nbytes, mine.by, mine.end_ns - mine.start_ns) == ("0:a", 3, 64, "cpu:0", 9)
    assert (others.job, others.shard, others.by, others.is_in_background) == (None, None, None, True)
    assert [wait.by for wait in found.waits] == ["cpu:0"]
    assert [(one.bytes_in, one.bytes_out) for one in found.saved] == [(5, 6)]
    assert [(use.what, use.nbytes) for use in found.disk] == [("read", 8)]
    assert [event.what for event in found.jobs] == ["submitted", "report", "over"]
    assert abs(found.jobs[0].at_ns) <= time.perf_counter_ns() - began_ns
    assert found.jobs[1].more["metrics"] == {"val_loss": "nan", "val_acc": 0.5}
    assert found.end_ns is not None
    assert found.cpu_seconds > 0


def test_there_is_no_file_until_there_is_a_job(tmp_path):
    log = made(tmp_path / "run.jsonl")
    log.at_work("cpu:0")
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_told_is_in_the_file_soon_and_not_only_at_the_end(tmp_path):
    log = made(tmp_path / "run.jsonl")
    log.job("0:a", "submitted")
    tell_unit(log)
    wait_until(lambda: b'"unit"' in content(tmp_path / "run.jsonl"))
    assert read_log(tmp_path / "run.jsonl").end_ns is None
    log.close()
    assert read_log(tmp_path / "run.jsonl").end_ns is not None


def test_a_log_that_is_still_open_does_not_write_into_its_successor(tmp_path):
    path = tmp_path / "run.jsonl"
    first, second = made(path), made(path)
    first.job("0:first", "submitted")
    wait_until(path.exists)
    second.job("0:second", "submitted")
    tell_unit(second)
    wait_until(lambda: b"0:second" in content(path))
    first.job("0:first", "over", status="completed", units_saved=0)
    first.close()
    second.job("0:second", "over", status="completed", units_saved=0)
    second.close()
    assert [(event.job, event.what) for event in read_log(path).jobs] == [
        ("0:second", "submitted"),
        ("0:second", "over"),
    ]


def test_many_threads_lose_nothing_and_keep_their_order(tmp_path):
    log = made(tmp_path / "run.jsonl")
    log.job("0:a", "submitted")

    def work(number):
        for shard in range(500):
            now = time.perf_counter_ns()
            log.unit("cpu:0", f"{number}:a", "forward", shard, now, now, now, is_failed=False)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    found = read_log(tmp_path / "run.jsonl")
    for number in range(4):
        assert [unit.shard for unit in found.units if unit.job == f"{number}:a"] == list(range(500))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
def test_a_full_disk_ends_the_log_with_one_warning_and_hurts_nobody(caplog):
    log = made(Path("/dev/full"))
    log.job("0:a", "submitted")
    wait_until(lambda: caplog.records)
    for number in range(1000):
        tell_unit(log, number)
    assert len(log._buffer) == 0, "nothing is kept that nobody will write"
    log.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert "/dev/full ends here, and training goes on without it: [Errno 28] No space left on device" in message
    assert "give the next run another event_log" in message


def test_a_write_that_is_cut_short_leaves_whole_lines(tmp_path, monkeypatch, caplog):
    real, left = os.write, [400]

    def write(descriptor, data):
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        count = real(descriptor, bytes(data[: left[0]]))
        left[0] -= count
        return count

    monkeypatch.setattr(writer.os, "write", write)
    log = made(tmp_path / "run.jsonl")
    log.job("0:a", "submitted")
    for number in range(20):
        tell_unit(log, number)
    log.close()
    assert (tmp_path / "run.jsonl").read_bytes().endswith(b"}\n")
    found = read_log(tmp_path / "run.jsonl")
    assert 0 < len(found.units) < 20
    assert (found.is_cut, found.end_ns) == (False, None)
    assert len(caplog.records) == 1


def test_the_file_does_not_grow_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writer, "_MOST_BYTES", 20_000)
    log = made(tmp_path / "run.jsonl")
    log.job("0:a", "submitted")
    for number in range(200):
        tell_unit(log, number)
        if number % 20 == 0:
            log._awake.set()
            wait_until(lambda: not log._buffer)
    log.close()
    assert 10_000 < (tmp_path / "run.jsonl").stat().st_size <= 20_000
    assert "it would be larger than 19.5 KiB" in caplog.records[0].getMessage()
    assert read_log(tmp_path / "run.jsonl").end_ns is None


def lasting(log, units):
    """Units one after the other, with a report after every fiftieth, each written before the next."""
    log.job("0:a", "submitted")
    for number in range(units):
        tell_unit(log, number)
        log.waited("cpu:0", 0, 1)
        if number % 50 == 0:
            log.job("0:a", "report", step=number, metrics={"val_loss": 0.5}, waits=False)
            log._awake.set()
            wait_until(lambda: not log._buffer)
    log.job("0:a", "over", status="completed", units_saved=0, error=None)


def test_beyond_its_limit_details_are_counted_by_kind_and_what_becomes_of_jobs_is_written(tmp_path, caplog):
    caplog.set_level(logging.INFO, writer.__name__)
    log, path = made(tmp_path / "run.jsonl", limit_bytes=40_000), tmp_path / "run.jsonl"
    lasting(log, 1000)
    log.close()
    found = read_log(path)
    assert 35_000 < path.stat().st_size <= 40_000
    assert log.written_bytes == path.stat().st_size
    assert [event.more["step"] for event in found.jobs if event.what == "report"] == list(range(0, 1000, 50))
    assert found.jobs[-1].what == "over"
    assert [unit.shard for unit in found.units] == list(range(len(found.units))), "the beginning, without gaps"
    assert 0 < len(found.units) < 600
    assert found.dropped == dict(log.dropped)
    assert found.dropped == {"unit": 1000 - len(found.units), "wait": 1000 - len(found.waits)}
    assert found.end_ns is not None
    assert 0 <= found.dropped_from_ns <= found.end_ns
    size, left_out = writer.format_bytes(path.stat().st_size), writer.in_words(found.dropped)
    assert caplog.messages == [f"the event log {path} has {size}; beyond its limit: {left_out}"]
    assert writer.in_words({"wait": 2, "unit": 12345}) == "12,345 units, 2 waits left out"


def test_a_log_within_its_limit_leaves_nothing_out_and_its_size_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, writer.__name__)
    log, path = made(tmp_path / "run.jsonl", limit_bytes=5_000_000), tmp_path / "run.jsonl"
    lasting(log, 100)
    log.close()
    found = read_log(path)
    assert (len(found.units), found.dropped, found.dropped_from_ns) == (100, {}, None)
    assert caplog.messages == [f"the event log {path} has {writer.format_bytes(path.stat().st_size)}"]


def test_reports_go_beyond_the_limit_rather_than_be_lost(tmp_path):
    log = made(tmp_path / "run.jsonl", limit_bytes=2_000)
    log.job("0:a", "submitted")
    tell_unit(log)
    for step in range(100):
        log.job("0:a", "report", step=step, metrics={"val_loss": 0.5}, waits=False)
    log.close()
    assert len([event for event in read_log(tmp_path / "run.jsonl").jobs if event.what == "report"]) == 100


def test_figures_of_a_log_at_its_limit_say_up_to_when_they_are(tmp_path):
    log = made(tmp_path / "run.jsonl", limit_bytes=20_000)
    lasting(log, 1000)
    log.close()
    figures = run_figures(read_log(tmp_path / "run.jsonl"))
    assert not figures.is_whole
    assert figures.trials == {"completed": 1}
    console = Console(file=io.StringIO(), width=300)
    print_run(console, figures)
    assert "the log reached its limit after " in console.file.getvalue()
    assert f"({writer.in_words(figures.dropped)}); raise event_log_limit to log more" in console.file.getvalue()


def test_what_there_is_no_room_for_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_PERIOD_SECONDS", PATIENCE_SECONDS)
    reached, opened = threading.Event(), threading.Event()

    class Stuck(EventLog):
        def _write(self, descriptor, lines):
            reached.set()
            assert opened.wait(PATIENCE_SECONDS)
            super()._write(descriptor, lines)

    monkeypatch.setattr(writer, "_MOST_RECORDS", 10)
    log = Stuck(tmp_path / "run.jsonl", [("cpu:0", 100)], FACTS)
    log.job("0:a", "submitted")
    assert reached.wait(PATIENCE_SECONDS)
    for number in range(50):
        tell_unit(log, number)
    assert len(log._buffer) == 10
    opened.set()
    log.close()
    found = read_log(tmp_path / "run.jsonl")
    assert (len(found.units), found.lost) == (9, 41)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "must be the path of a file, such as 'run.jsonl', not ''"),
        (3, "must be the path of a file, such as 'run.jsonl', not 3"),
        (".", "is a folder; give a file in it, such as '.*run.jsonl'"),
        ("file/run.jsonl", "cannot be made: '.*file' is a file; give another path"),
        ("a" * 300, "cannot be reached: File name too long; give another path"),
        ("a\0b", "cannot be reached: .*embedded null .*; give another path"),
    ],
)
def test_places_that_cannot_be_are_refused(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"event_log.*{message}"):
        check_log_path(path)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_log_path("~/runs/run.jsonl") == tmp_path / "runs" / "run.jsonl"


def test_a_place_that_is_not_ours_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(writer.os, "access", lambda *_: False)  # whoever runs the tests may be root
    with pytest.raises(ConfigError, match=r"--log '.*x/run.jsonl' cannot be written by this user; give a path"):
        check_log_path(tmp_path / "x" / "run.jsonl", what="--log")


def test_lines_do_not_keep_what_is_no_longer_so():
    lines = EventLogFormatter()

    def copied(owner):
        return json.loads(lines.made(("copy", "cpu:0", "in", owner, "parameters", 0, 8, "waited", 1, 0, 1)))["job"]

    assert copied(7) is None
    lines.owns("0:a", 7)
    assert copied(7) == copied(7) == "0:a"
    lines.made(("job", "0:a", "over", 5, {}))
    assert copied(7) is None
    lines.owns("1:b", 7)
    assert copied(7) == "1:b"


def test_lines_of_copies_have_the_job_and_the_worker_of_their_time(monkeypatch):
    lines = EventLogFormatter()
    lines.owns("0:a", 7)
    quote = lines._quote

    def copied():
        line = json.loads(lines.made(("copy", "cpu:0", "in", 7, "parameters", 0, 8, "waited", 1, 0, 1)))
        return line["job"], line["by"]

    def quote_while_another_job_takes_over(text):
        if text == "cpu:0":
            lines.owns("1:b", 7)
            lines.workers[1] = "cpu:0"
        return quote(text)

    monkeypatch.setattr(lines, "_quote", quote_while_another_job_takes_over)
    assert copied() == ("0:a", None)
    monkeypatch.undo()
    assert copied() == ("1:b", "cpu:0")
