"""The benchmarks of fused steps run, also those for GPUs; calling again stands for a CUDA graph."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("gpu_fusion")
    for name in ("gpu_fusion", "gpu_models", "side_by_side"):
        sys.modules.pop(name, None)


class Again:
    """Stands for a recorded step, and for who records it."""

    def __init__(self):
        self.replays = 0

    def record(self, run):
        self.run, self.outputs, self.nbytes = run, run(), 0
        return self

    def replay(self):
        self.replays += 1
        for target, made in zip(self.outputs, self.run(), strict=True):
            target.copy_(made)

    def drop(self):
        self.run = None


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("has_processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stacked_and_recorded_steps_and_processes_are_a_table(benchmark, tmp_path, monkeypatch, has_processes):
    again = Again()
    if not has_processes:
        monkeypatch.setattr(benchmark, "process_rows", lambda *_given: None)
    table = benchmark.main(["tiny", "--device", "cpu", "--quick", "--counts", "2", "--out", str(tmp_path)], again)
    (row,) = table.rows
    assert (row.model, row.members, table.missing) == ("tiny", 2, [])
    assert min(row.one_by_one, row.stacked, row.graphed, *[row.processes] * has_processes) > 0
    assert again.replays
    assert again.run is None, "the recording has been given up"
    found = json.loads((tmp_path / "gpu_fusion.json").read_text())
    assert found["rows"] == [row.__dict__]
    assert found["device"] == "cpu"
    lines = (tmp_path / "gpu_fusion.md").read_text().splitlines()
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    processes = f"{row.processes:.4g}" if has_processes else "-"
    assert lines[-1].startswith(f"| tiny | 2 | {row.one_by_one:.4g} | {processes} | {row.stacked:.4g} |")


def test_stacked_steps_are_those_of_the_models_alone(benchmark):
    """What is timed trains: every member's own weights move, by its own rate, from its own seed."""
    stack = benchmark.Stack("tiny", 2, "cpu")
    weight = stack._state["1.weight"]
    before = weight.detach().clone()
    assert not before[0].equal(before[1])
    stack.step()
    moved = (weight.detach() - before).abs().amax(dim=(1, 2))
    torch.testing.assert_close(moved, torch.tensor([1e-4, 5e-5]), rtol=0.05, atol=0)


@pytest.mark.cases(1 / 3)
def test_a_row_that_fails_is_missing_and_the_others_are_not(benchmark, monkeypatch):
    class Fails(benchmark.Stack):
        def __init__(self, name, count, device):
            if count == 3:
                raise torch.OutOfMemoryError("no room for 3\nof many lines")
            super().__init__(name, count, device)

    class CannotRecord:
        def record(self, run):
            raise RuntimeError("operation not permitted")

    monkeypatch.setattr(benchmark, "Stack", Fails)
    monkeypatch.setattr(benchmark, "process_rows", lambda *_given: None)
    table = benchmark.main(["tiny", "--device", "cpu", "--quick", "--counts", "3", "2"], CannotRecord())
    assert [row.stacked is None for row in table.rows] == [True, False]
    assert table.missing == [
        "tiny, 3 stacked: OutOfMemoryError: no room for 3",
        "tiny, 2 graphed: RuntimeError: operation not permitted",
    ]


def test_what_there_is_no_time_for_is_said_to_be_missing(benchmark, tmp_path):
    table = benchmark.main(["tiny", "--device", "cpu", "--minutes", "0", "--out", str(tmp_path)])
    assert [row.members for row in table.rows] == [1, 2, 4, 8, 16, 32, 64]
    assert len(table.missing) == 14
    text = (tmp_path / "gpu_fusion.md").read_text()
    assert "* not measured: tiny, 64 stacked: no time was left" in text
    assert "* not measured: tiny, 64 processes: no time was left" in text


def test_a_row_is_begun_only_if_one_like_the_last_would_be_done_in_time(benchmark, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now[0])
    clock = benchmark.Clock(1.0)

    def takes(seconds):
        now[0] += seconds

    assert clock.has_time_for("stacked")
    clock.timed("stacked", lambda: takes(10))
    assert clock.has_time_for("stacked")
    clock.timed("stacked", lambda: takes(25))
    assert not clock.has_time_for("stacked"), "25 s are left, and the last took as many"
    assert clock.has_time_for("processes")
    now[0] = 45
    assert not clock.has_time_for("processes"), "a first one may take 20"


def test_processes_that_fail_or_are_late_are_told_and_leave_none_behind(benchmark):
    side_by_side = sys.modules["side_by_side"]
    failing = side_by_side.Processes("cpu", 0.1)
    failing._command = [sys.executable, "-c", "raise SystemExit('no memory on the device')"]
    with pytest.raises(RuntimeError, match="no memory on the device"):
        failing.rate("tiny", 2, 60)
    assert len(failing) == 0
    late = side_by_side.Processes("cpu", 0.1)
    late._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(side_by_side.TooSlowError, match="2 processes were not done in time"):
        late.rate("tiny", 2, 0.2)
    assert len(late) == 0


def test_no_more_processes_are_started_than_the_host_has_memory_for(benchmark, monkeypatch):
    side_by_side = sys.modules["side_by_side"]
    processes = side_by_side.Processes("cpu", 0.1)
    processes._command = [sys.executable, "-c", "[print(line.strip() and 1, flush=True) for line in iter(input, '')]"]
    assert processes.rate("tiny", 1, 60) == 1.0
    free = type("Free", (), {"available": 1 << 20})
    monkeypatch.setattr(side_by_side.psutil, "virtual_memory", lambda: free)
    with pytest.raises(side_by_side.NoRoomError, match="2 processes of"):
        processes.rate("tiny", 2, 60)
    assert processes.rate("tiny", 1, 60) == 1.0
    processes.close()


def test_fused_steps_on_a_cpu_are_timed(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fusion = importlib.import_module("fusion")
    monkeypatch.setattr(fusion, "ROUNDS", 1)
    monkeypatch.setattr(fusion, "STEPS", 1)
    monkeypatch.setattr(sys, "argv", ["fusion.py", "mlp"])
    threads = torch.get_num_threads()
    try:
        fusion.main()
    finally:
        torch.set_num_threads(threads)
        sys.modules.pop("fusion")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [("mlp", "SGD"), ("mlp", "AdamW")]
    assert all(float(row[4]) > 0 and float(row[6]) > 0 for row in rows), "both steps have been timed"


@pytest.mark.slow
def test_it_runs_to_its_end_as_a_program(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu_fusion.py"), "--device", "cpu", "--quick", "cnn"]
    subprocess.run([*command, "--out", str(tmp_path)], check=True)
    rows = json.loads((tmp_path / "gpu_fusion.json").read_text())["rows"]
    assert [(row["model"], row["members"]) for row in rows] == [("cnn", 1), ("cnn", 2)]
    assert all(min(row["one_by_one"], row["processes"], row["stacked"]) > 0 for row in rows)


@pytest.mark.slow
def test_plans_are_compared_to_the_end():
    wanted = ["dlrm", "--count", "2", "--demand", "1.5", "--warm-up", "1", "--steps", "2"]
    command = [sys.executable, str(BENCHMARKS / "mutwo.py"), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (chosen,) = (line for line in done.stdout.splitlines() if "(chosen)" in line)
    predicted, measured, ratio = map(float, chosen.split("(chosen)")[1].split()[:3])
    assert min(predicted, measured, ratio) > 0
