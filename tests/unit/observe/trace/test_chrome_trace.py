"""A log as a trace that Chrome's viewers can show: every bar in a row where nothing overlaps it, every story ended."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from hydra_tune.observe.event_log.reader import LoggedJobEvent, read_log
from hydra_tune.observe.trace.chrome_trace import stays, trace_events, write_trace
from tests.unit.observe.event_log.test_run_figures import HEADER, MS, copy, unit


def event(what, at, job="0:a", **more):
    return {"event": "job", "job": job, "what": what, "at_ns": at * MS, **more}


EVENTS = (
    event("submitted", 0, priority=0),
    event("preparing", 0),
    event("running", 5),
    unit(5, 8, 10),
    copy(6, 9, how="waited", by="cpu:0"),
    copy(6, 20),
    copy(8, 12, how="vain"),
    copy(10, 18, "out"),
    copy(9, 10, "out", how="waited", by=None),
    copy(1, 4, "across", how="waited", by="cpu:1", device="cpu:1"),
    copy(4, 6, "across", device="cpu:1"),
    event("report", 12, step=3, metrics={"val_loss": 0.5}, waits=True),
    event("resumed", 14),
    event("paused", 15),
    event("unpaused", 17),
    event("stopped", 18),
    event("over", 19, status="pruned", units_saved=4, error=None),
    event("submitted", 3, job="1:b", priority=0),
    {"event": "disk", "what": "write", "bytes": 9, "start_ns": 0, "end_ns": 30 * MS},
)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, *EVENTS)))
    return read_log(path)


@pytest.fixture
def events(log):
    return list(trace_events(log))


def rows(events):
    """Names of processes and threads, and the bars in each."""
    names = {
        (e["pid"], e["tid"] if e["name"] == "thread_name" else None): e["args"]["name"]
        for e in events
        if "_name" in e["name"]
    }
    found = defaultdict(list)
    for bar in events:
        if bar["ph"] == "X":
            found[names[bar["pid"], None], names[bar["pid"], bar["tid"]]].append(bar)
    return found


def test_each_device_has_its_rows(events):
    assert {place: len(bars) for place, bars in rows(events).items()} == {
        ("cpu:0", "units"): 2,  # one is what the unit waited for
        ("cpu:0", "loads"): 1,
        ("cpu:0", "loads ahead"): 1,
        ("cpu:0", "loads ahead (2)"): 1,
        ("cpu:0", "spills"): 1,
        ("cpu:0", "spills in the background"): 1,
        ("cpu:1", "from other devices"): 1,
        ("cpu:1", "from other devices ahead"): 1,
        ("disk", "write to disk"): 1,
    }


def test_units_come_first_in_perfetto_as_well(events):
    """It has threads go first that are numbered like their processes, whatever their places, and wants no number twice."""
    named = [event for event in events if event["name"] == "thread_name"]
    threads, processes = [event["tid"] for event in named], {event["pid"] for event in events}
    assert len(set(threads)) == len(threads) > len(processes)
    assert not processes & set(threads)
    places = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    firsts = [event["args"]["name"] for event in named if places.get(event["tid"]) == 1]
    assert firsts == ["units"] * 2


def test_bars_of_a_row_lie_apart_or_within_each_other(events):
    for bars in rows(events).values():
        spans = sorted((bar["ts"], -bar["dur"], bar["ts"] + bar["dur"]) for bar in bars)
        for (_, _, end), (start, _, inner) in pairwise(spans):
            assert start >= end or inner <= end


def test_a_bar_says_what_when_and_whose(events):
    (bar,) = rows(events)["cpu:0", "spills in the background"]
    assert (bar["ts"], bar["dur"], bar["name"]) == (10_000, 8_000, "spill 0:a parameters 0")
    assert bar["args"] == {"job": "0:a", "kind": "parameters", "shard": 0, "bytes": 10, "how": "background"}
    one, wait = rows(events)["cpu:0", "units"]
    assert (one["name"], one["ts"], one["dur"]) == ("F0 0:a", 5_000, 5_000)
    assert (wait["name"], wait["ts"], wait["dur"]) == ("waits for bytes", 5_000, 3_000)


def test_a_trial_is_a_story_with_its_states_reports_and_end(events):
    mine = [e for e in events if e["ph"] in "bne" and e["id2"] == {"local": 1}]
    assert mine[0]["ph"] == "b"
    assert (mine[0]["name"], mine[0]["ts"]) == ("0:a", 0)
    assert (mine[-1]["ph"], mine[-1]["name"], mine[-1]["ts"]) == ("e", "0:a", 19_000)
    assert {e["name"]: e["ts"] for e in mine if e["ph"] == "n"} == {"report 3": 12_000, "pruned": 19_000}
    assert next(e for e in mine if e["name"] == "report 3")["args"]["metrics"] == {"val_loss": 0.5}
    begun, ended = (Counter(e["name"] for e in mine if e["ph"] == phase) for phase in "be")
    assert begun == ended
    assert begun == Counter(["0:a", "preparing", "running", "running", "running", "waiting", "paused", "ending"])


def test_a_trial_whose_end_is_not_known_lasts_to_the_end_of_the_log(events):
    other = [e for e in events if e["ph"] in "be" and e["id2"] == {"local": 2}]
    assert [(e["name"], e["ph"], e["ts"]) for e in other] == [
        ("1:b", "b", 3_000),
        ("queued", "b", 3_000),
        ("queued", "e", 30_000),
        ("1:b", "e", 30_000),
    ]


def test_the_states_of_a_trial_follow_each_other_without_a_gap():
    story = [
        LoggedJobEvent("0:a", line["what"], line["at_ns"], line)
        for line in EVENTS
        if line.get("job") == "0:a" and line["event"] == "job"
    ]
    found = [(stay.state, stay.start_ns / MS, stay.end_ns / MS) for stay in stays("0:a", story, 19 * MS)]
    assert found == [
        ("preparing", 0, 5),
        ("running", 5, 12),
        ("waiting", 12, 14),
        ("running", 14, 15),
        ("paused", 15, 17),
        ("running", 17, 18),
        ("ending", 18, 19),
    ]


def test_the_file_is_json(log, events, tmp_path):
    write_trace(log, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == events
