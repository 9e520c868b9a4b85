"""`benchmarks/gpu.py`: a call that was killed goes on, a part that fails stops no other and says why."""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
REHEARSED = ["tests", "parity/own code", "spill", "fusion", "planner", "pool"]
PATIENCE_SECONDS = 60
HANGS = """
import pathlib, threading
pathlib.Path("{folder}/events.jsonl").write_text('{"event": "last"}\\n')
def waits_for_ever():
    print('row: {"outcome": "bitwise"}', flush=True)
    threading.Event().wait()
waits_for_ever()
"""


@pytest.fixture
def gpu(monkeypatch):
    """The script, which changes its own process: put back here."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    handler = signal.getsignal(signal.SIGTERM)
    yield importlib.import_module("gpu")
    signal.signal(signal.SIGTERM, handler)
    for name in ("gpu", "gpu_tables"):
        sys.modules.pop(name, None)


def call(out, *arguments):
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--minutes", "60", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def found(out):
    return json.loads((out / "gpu.json").read_text())["parts"]


def begun(lines):
    return [line.partition(":")[0] for line in lines if ": begun" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_that_was_killed_goes_on_with_what_is_left(tmp_path):
    with call(tmp_path, "--rehearse") as process:
        for line in process.stdout:
            if line.startswith("parity/own code: begun"):
                process.kill()
    assert process.returncode == -signal.SIGKILL
    assert found(tmp_path)["tests"]["status"] == "passed"
    assert found(tmp_path).get("parity/own code", {"status": "running"})["status"] == "running"
    with call(tmp_path, "--rehearse") as process:
        lines = list(process.stdout)
    parts = found(tmp_path)
    assert process.returncode == 0, parts
    assert begun(lines) == REHEARSED[1:]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(REHEARSED, "passed")
    assert [row["outcome"] for row in parts["parity/own code"]["rows"]] == ["bitwise", "bitwise"]
    assert [row["arm"] for row in parts["spill"]["rows"]] == ["resident", "0.1 GiB"]
    assert [(row["model"], row["members"]) for row in parts["fusion"]["rows"]] == [("tiny", "2")]
    assert parts["fusion"]["rows"][0]["processes"] != "-", "of one row the last line counts"
    assert [row["model"] for row in parts["planner"]["rows"]] == ["dlrm"]
    alone, pool = parts["pool"]["rows"]
    assert alone["loss of the first"] == pool["loss of the first"]
    page = (tmp_path / "gpu.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("## ")] == [
        f"## {name}: passed" for name in REHEARSED
    ]


def test_a_part_that_fails_stops_no_other_and_leaves_why(gpu, tmp_path, monkeypatch, capsys):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho it stands for a GPU\n")
    (tools / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    fails = gpu.Part("fails", ("-c", "raise ValueError('its own')"), 60.0)
    monkeypatch.setattr(gpu, "gpu_parts", lambda: [fails, gpu.Part("passes", ("-c", "pass"), 60.0)])
    assert gpu.main(["--out", str(tmp_path)]) == 1
    assert begun(capsys.readouterr().out.splitlines()) == ["fails", "passes"]
    part = found(tmp_path)["fails"]
    assert (part["status"], part["exit"], part["rows"]) == ("failed", 1, [])
    assert part["output"].endswith("ValueError: its own\n")
    assert part["nvidia_smi"] == "it stands for a GPU"
    assert part["events"] == "no pool has written any"
    assert found(tmp_path)["passes"]["status"] == "passed"
    page = (tmp_path / "gpu.md").read_text()
    assert "## fails: failed" in page
    assert "ValueError: its own" in page
    assert gpu.main(["--out", str(tmp_path)]) == 1, "neither is due once more"
    assert begun(capsys.readouterr().out.splitlines()) == []
    assert gpu.main(["--out", str(tmp_path), "--only", "passes", "--again"]) == 0
    assert begun(capsys.readouterr().out.splitlines()) == ["passes"]


def test_a_part_at_its_limit_says_where_it_was_and_the_last_events_of_its_pool(gpu, tmp_path, monkeypatch):
    """It is there once it hangs."""
    output, results = tmp_path / "hangs" / "output.txt", gpu.Results(tmp_path, "here")

    def monotonic():
        return 10.0 if output.exists() and b"row: " in output.read_bytes() else 0.0

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    gpu.run([gpu.Part("hangs", ("-c", HANGS), 5.0)], tmp_path, results)
    part = found(tmp_path)["hangs"]
    assert part["status"] == "at its limit"
    assert part["exit"] == -signal.SIGABRT
    assert "in waits_for_ever" in part["output"]
    assert part["events"] == '{"event": "last"}\n'
    assert part["rows"] == [{"outcome": "bitwise"}]
    assert "1 bitwise" in (tmp_path / "gpu.md").read_text()


def test_what_it_has_started_ends_with_a_part(gpu, tmp_path):
    waits = "import threading; threading.Event().wait()"
    starts = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {waits!r}]).pid)"
    gpu.run([gpu.Part("starts", ("-c", starts), 60.0)], tmp_path, gpu.Results(tmp_path, "here"))
    started = int((tmp_path / "starts" / "output.txt").read_text())
    try:
        process = os.pidfd_open(started)
    except ProcessLookupError:
        return
    assert select.select([process], [], [], PATIENCE_SECONDS)[0], "it lives"
    os.close(process)


def test_no_part_is_begun_that_may_not_be_over_in_time(gpu, tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path), "--rehearse", "--minutes", "10", "--only", "spill", "fusion"]) == 3
    assert capsys.readouterr().out == "left for another call: spill, fusion\n"
    assert not (tmp_path / "gpu.json").exists()


def test_three_calls_are_enough_on_eight_cores_even_if_all_parts_need_their_limits(gpu, monkeypatch):
    monkeypatch.setattr(gpu, "MOST_TOGETHER", 7)
    seconds, calls, due = 60 * gpu.MINUTES - gpu.AT_THE_END_SECONDS, [0.0], list(gpu.gpu_parts())
    while due:
        together = gpu.first_of(due)
        del due[: len(together)]
        limit = max(part.seconds for part in together)
        if calls[-1] + limit > seconds:
            calls.append(0.0)
        calls[-1] += limit
    assert len(calls) == 3
    assert max(calls) <= seconds


def test_parts_that_measure_nothing_run_side_by_side(gpu, tmp_path, monkeypatch):
    """Each waits for the other to begin."""
    monkeypatch.setattr(gpu, "MOST_TOGETHER", 2)
    meets = """
import pathlib, sys, time
here, there = (pathlib.Path({out!r}) / name / "begun" for name in {names})
here.touch()
while not there.exists():
    time.sleep(0.01)
"""
    names = ["one", "other"]
    scripts = [meets.format(out=str(tmp_path), names=order) for order in (names, names[::-1])]
    parts = [gpu.Part(name, ("-c", code), 60.0, is_timed=False) for name, code in zip(names, scripts, strict=True)]
    monkeypatch.setattr(gpu, "gpu_parts", lambda: [*parts, gpu.Part("last", ("-c", "pass"), 60.0)])
    monkeypatch.setattr(gpu, "nvidia_smi", lambda *_: "it stands for a GPU")
    assert gpu.main(["--out", str(tmp_path)]) == 0
    assert list(found(tmp_path)) == ["one", "other", "last"]


def test_parts_are_chosen_by_name_or_group(gpu):
    parts = list(gpu.gpu_parts())
    names = [part.name for part in gpu.chosen(parts, ["tests", "parity/two shards"], ["tests/cuda", "tests/isolated"])]
    assert names == [
        *("tests/cuda_code+shared_base", "tests/cuda_graphs+groups+loops+own_code+own_functions"),
        *("tests/lightning+trainer", "tests/planned_groups", "tests/planned_pairs", "tests/python_state"),
        "parity/two shards",
    ]


def test_every_file_of_tests_for_gpus_is_in_one_part(gpu):
    named = [argument for part in gpu.gpu_parts() for argument in part.command if argument.startswith("tests/gpu/")]
    assert sorted(named) == sorted(f"tests/gpu/{path.name}" for path in Path(gpu.ROOT, "tests/gpu").glob("test_*.py"))


def test_a_part_that_is_not_there_is_refused(gpu):
    parts = list(gpu.gpu_parts())
    with pytest.raises(SystemExit, match="no part 'tets'"):
        gpu.chosen(parts, ["tets"], [])


def test_results_of_another_machine_are_not_mixed_in(gpu, tmp_path):
    gpu.Results(tmp_path, "one").write("part", status="passed", when="2026-01-01 00:00", rows=[])
    with pytest.raises(SystemExit, match="is of one, and this is other"):
        gpu.Results(tmp_path, "other")


def test_rows_are_those_for_programs_and_those_of_pytest(gpu, tmp_path):
    log = tmp_path / "output.txt"
    log.write_text(
        'row: {"id": "a", "n": 1}\nsomething\ntests/gpu/test_a.py::test_x[one group] PASSED   [ 50%]\n'
        'row: {"id": "a", "n": 2}\ntests/gpu/test_a.py::test_y FAILED\nrow: {"n": 3'
    )
    tests = [{"test": "test_x[one group]", "outcome": "passed"}, {"test": "test_y", "outcome": "failed"}]
    assert gpu.rows_of(log) == [{"n": 2}, *tests]


def test_the_docs_have_the_tables_of_what_was_found(gpu):
    """`python benchmarks/gpu_tables.py` writes them."""
    tables = sys.modules["gpu_tables"]
    pages = {page.name: page.read_text() for page in tables.RESULTS.glob("*.md")}
    assert [name for name, text in pages.items() if tables.rewritten(text, tables.known()) != text] == []
    named = {part for text in pages.values() for place in tables._PLACE.findall(text) for part in place[1].split()}
    assert named == {part.name.partition("/")[0] for part in gpu.gpu_parts()}


def test_a_place_in_a_page_gets_the_tables_of_its_parts(gpu):
    tables = sys.modules["gpu_tables"]
    page = "before\n<!-- gpu: pool tests -->\nold\n<!-- end of gpu -->\nafter\n"
    row, other = {"test": "x", "outcome": "passed"}, {"test": "y | z", "outcome": "failed"}
    parts = {
        "tests/a": {"status": "failed", "seconds": 3.5, "when": "2026-01-02 03:04", "rows": [row, row, other]},
        "pool": {"status": "passed", "seconds": 1.0, "when": "2026-01-02 05:06", "rows": [{"arm": "a"}, {"s": 2}]},
        "spill": {"status": "passed", "seconds": 1.0, "when": "2026-01-03 05:06", "rows": []},
    }
    assert tables.rewritten(page, {"machine": "a GPU", "parts": parts}) == (
        "before\n<!-- gpu: pool tests -->\n\na GPU; 2026-01-02. Command: `make gpu`.\n\n"
        "tests/a: failed, 3.5 s\n\n2 passed, 1 failed\n\n| test | outcome |\n| --- | --- |\n| y \\| z | failed |\n\n"
        "pool: passed, 1 s\n\n| arm | s |\n| --- | --- |\n| a |  |\n|  | 2 |\n\n<!-- end of gpu -->\nafter\n"
    )
    assert tables.NOT_RUN in tables.rewritten(page, None)
    assert tables.NOT_RUN in tables.rewritten(page, {"machine": "a GPU", "parts": {"spill": parts["spill"]}})
