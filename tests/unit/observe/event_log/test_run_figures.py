"""What a log says of a run, on logs made by hand: times are in milliseconds here."""

import json
from io import StringIO

import pytest
from rich.console import Console

from hydra_tune.observe.event_log.line_format import FORMAT, KEY
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.observe.event_log.run_figures import computing, run_figures
from hydra_tune.observe.trace.run_table import print_run

HEADER = {
    KEY: FORMAT,
    "started_at": "2026-01-01T00:00:00+00:00",
    "hydra_tune": "0.1.0",
    "policy": "lrtf",
    "admission": "eager",
    "max_concurrent": 4,
    "devices": [{"name": "cpu:0", "budget_bytes": 100}, {"name": "cpu:1", "budget_bytes": 100}],
}
MS = 1_000_000


def unit(start, ready, end, device="cpu:0"):
    times = {"start_ns": start * MS, "ready_ns": ready * MS, "end_ns": end * MS}
    return {"event": "unit", "device": device, "job": "0:a", "kind": "forward", "shard": 0, **times}


def copy(start, end, what="in", how="background", by=None, device="cpu:0", kind="parameters", nbytes=10):
    facts = {"device": device, "what": what, "job": "0:a", "kind": kind, "shard": 0, "bytes": nbytes}
    return {"event": "copy", **facts, "how": how, "by": by, "start_ns": start * MS, "end_ns": end * MS}


def wait(start, end, device="cpu:0", by="cpu:0"):
    return {"event": "wait", "device": device, "by": by, "start_ns": start * MS, "end_ns": end * MS}


def over(job, status, units_saved=0):
    return {"event": "job", "job": job, "what": "over", "at_ns": 0, "status": status, "units_saved": units_saved}


@pytest.fixture
def log(tmp_path):
    def made(*events):
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, *events)))
        return read_log(path)

    return made


def device_of(found, name="cpu:0"):
    (figures,) = [device for device in run_figures(found).devices if device.name == name]
    return figures


def test_overlap_is_what_lies_under_compute_of_the_same_device(log):
    found = log(
        unit(0, 10, 30),
        unit(40, 40, 60),
        copy(5, 15),  # half of it before the unit computes
        copy(28, 42, "out"),  # two under the first unit, ten in the gap, two under the second
        copy(30, 40),  # all in the gap
        copy(45, 55),  # all under compute
        unit(0, 0, 100, device="cpu:1"),  # another device's compute hides nothing here
    )
    figures = device_of(found)
    assert figures.copying_seconds == pytest.approx(0.010 + 0.014 + 0.010 + 0.010)
    assert figures.under_compute_seconds == pytest.approx(0.005 + 0.004 + 0.010)
    assert figures.overlap == pytest.approx(19 / 44)
    assert run_figures(found).overlap == pytest.approx(19 / 44)
    assert device_of(found, "cpu:1").overlap == 0.0


def test_copies_beside_each_other_count_each_on_its_own(log):
    figures = device_of(log(unit(0, 0, 20), copy(0, 20), copy(10, 30, "out")))
    assert (figures.copying_seconds, figures.under_compute_seconds) == pytest.approx((0.040, 0.030))


def test_a_device_does_not_compute_while_its_worker_waits(log):
    found = log(
        unit(0, 10, 100),
        copy(20, 30, how="waited", by="cpu:0"),  # more room was needed in mid-unit
        copy(28, 35, "out", how="waited", by="cpu:0", device="cpu:1"),  # fetched from over there
        wait(50, 60),
        copy(70, 80, "out", how="waited", by="cpu:1"),  # another device's worker took it: nobody here waited
        copy(85, 90, "out", how="waited", by=None),  # a trial's memory given back
    )
    ms = [(start / MS, end / MS) for start, end in computing(found, "cpu:0")]
    assert ms == [(10, 20), (35, 50), (60, 100)]
    figures = device_of(found)
    assert figures.computing_seconds == pytest.approx(0.065)
    assert figures.utilisation == pytest.approx(0.65)
    assert figures.busy_seconds == pytest.approx(0.100)
    assert figures.under_compute_seconds == pytest.approx(0.015), "by others' hands, under compute here"
    assert figures.waiting_seconds == pytest.approx(0.010 + 0.010 + 0.010 + 0.005), "as pool.stats(): whoever waits"


def test_what_a_worker_loads_itself_never_lies_under_its_own_compute(log):
    assert device_of(log(unit(0, 0, 50), copy(10, 20, how="waited", by="cpu:0"))).overlap == 0.0


def test_units_bytes_and_ends(log):
    found = log(
        unit(0, 0, 40),
        unit(10, 10, 80, device="cpu:1"),
        copy(1, 2, nbytes=7),
        copy(2, 3, how="vain", nbytes=5),
        copy(3, 4, how="late", by="cpu:0", nbytes=3, kind="optimizer"),
        copy(4, 5, how="waited", by="cpu:0", nbytes=2),
        copy(5, 6, "out", nbytes=1, device="cpu:1"),
        copy(6, 7, "across", how="waited", by="cpu:1", nbytes=11, device="cpu:1"),
        {"event": "saved", "device": "cpu:1", "bytes_in": 4, "bytes_out": 6, "at_ns": 0},
        {"event": "disk", "what": "write", "bytes": 9, "start_ns": 0, "end_ns": 2 * MS},
        {"event": "job", "job": "2:c", "what": "submitted", "at_ns": 0, "priority": 0},
        over("0:a", "completed"),
        over("1:b", "pruned", units_saved=12),
    )
    assert run_figures(found).fusion == ()
    figures, here, there = run_figures(found), device_of(found), device_of(found, "cpu:1")
    assert (figures.units_run, figures.units_saved) == (2, 12)
    assert figures.trials == {"completed": 1, "pruned": 1, "unknown": 1}
    assert figures.makespan_seconds == pytest.approx(0.080)
    assert here.bytes_in_by_kind == {"parameters": 14, "optimizer": 3}
    assert (here.bytes_ahead, here.bytes_in_vain) == (15, 5)
    assert there.bytes_out_by_kind == {"parameters": 1, "activations": 6}
    assert there.bytes_in_by_kind == {"activations": 4}
    assert there.bytes_across_by_kind == {"parameters": 11}
    assert (figures.disk_written_bytes, figures.disk_read_bytes, figures.disk_seconds) == (9, 0, pytest.approx(0.002))
    assert not figures.is_whole
    assert json.loads(json.dumps(figures.to_json()))["devices"][0]["units"] == 1


def test_what_fusion_chose_is_shown_with_its_numbers(log):
    chosen = {"size": 8, "trials": 9, "why": "8 of 9 are computed together", "group_seconds": {"8": 0.001}}
    alone = {"size": 1, "trials": 3, "why": "computed together they would not gain 1.2x"}
    events = [
        {"event": "job", "job": job, "what": "fusion", "at_ns": 0, **facts}
        for job, facts in (("0:a", chosen), ("1:b", alone), ("2:c", alone))
    ]
    figures = run_figures(log(unit(0, 0, 40), *events))
    assert [choice["size"] for choice in figures.fusion] == [8, 1, 1]
    assert figures.to_json()["fusion"][0] == {"job": "0:a", **chosen}
    console = Console(file=StringIO(), width=120)
    print_run(console, figures)
    shown = [line for line in console.file.getvalue().splitlines() if line.startswith("fusion")]
    assert shown == [f"fusion       {choice['why']}" for choice in (chosen, alone)]


def test_what_was_planned_and_what_it_took_is_shown(log):
    plan = {"trials": 4, "told": ["fits (1): 2.7 ms", "two in turn (2 + 2): 5.7 ms, which is chosen"], "ways": []}
    measured = {"told": ["a step of 2 and 2 in turn takes 6.1 ms, where 5.7 ms were predicted"], "is_replanned": False}
    events = [
        {"event": "job", "job": "0:a", "what": what, "at_ns": 0, **facts}
        for what, facts in (("plan", plan), ("measured", measured), ("plan", plan))
    ]
    figures = run_figures(log(unit(0, 0, 40), *events))
    assert figures.to_json()["plans"][1] == {"job": "0:a", "what": "measured", **measured}
    console = Console(file=StringIO(), width=120)
    print_run(console, figures)
    shown = [line for line in console.file.getvalue().splitlines() if line.startswith(("plan", "measured"))]
    assert shown == [f"plan         {line}" for line in plan["told"]] + [f"measured     {measured['told'][0]}"]
