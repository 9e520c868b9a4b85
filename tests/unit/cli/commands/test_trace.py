"""`hydra-tune trace`: what it prints and writes, and what it says of files that are no logs."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hydra_tune.cli import main
from tests.unit.observe.event_log.test_run_figures import HEADER
from tests.unit.observe.trace.test_chrome_trace import EVENTS


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        "".join(
            json.dumps(line) + "\n"
            for line in (HEADER, *EVENTS, {"event": "end", "at_ns": 40_000_000, "cpu_seconds": 0.1})
        )
    )
    return path


def call(*arguments):
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def test_it_prints_the_figures_and_writes_the_trace_beside_the_log(log):
    result = call(log)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "cpu:0 10.0% 5 ms 4 ms 30 ms 10.0% 1" in lines
    assert "cpu:1 0.0% 0 ms 3 ms 5 ms 0.0% 0" in lines
    assert "parameters 30 B 20 B 20 B" in lines
    assert "trials 1 pruned, 1 unknown" in lines
    assert "makespan 10 ms" in lines
    assert "units 1 run, 4 saved by pruning (80%)" in lines
    assert "disk 0 B read, 9 B written, busy for 30 ms" in lines
    trace = log.parent / "run.trace.json"
    assert f"trace {trace}, for ui.perfetto.dev or chrome://tracing" in lines
    assert json.loads(trace.read_text())["traceEvents"]
    assert "the log ends before the run" not in result.output


def test_the_json_says_what_the_tables_say(log, tmp_path):
    result = call(log, "--json", "--out", tmp_path / "x.json")
    data = json.loads(result.stdout)
    assert (data["units_run"], data["units_saved"], data["is_whole"]) == (1, 4, True)
    assert data["overlap"] == pytest.approx(3 / 35)
    assert (tmp_path / "x.json").exists()
    assert not (tmp_path / "run.trace.json").exists()


def test_a_full_disk_is_named(log):
    result = call(log, "--out", "/dev/full")
    assert result.exit_code == 1
    assert result.stderr == "cannot write /dev/full: No space left on device; give another place with --out or --plot\n"


def test_a_log_that_was_cut_is_shown_with_a_word(log):
    log.write_bytes(log.read_bytes()[:-10])
    result = call(log)
    assert result.exit_code == 0
    assert "the log ends before the run: the run goes on, was killed, or could write no more" in " ".join(
        result.output.split()
    )


def test_a_log_that_has_lost_events_says_how_many(log):
    log.write_text(log.read_text() + json.dumps({"event": "lost", "records": 7, "at_ns": 0}) + "\n")
    assert "had no room for 7 events" in call(log).output


def test_a_picture_is_drawn(log, tmp_path):
    pytest.importorskip("matplotlib")
    whole, part = tmp_path / "x.png", tmp_path / "y.png"
    assert call(log, "--plot", whole).exit_code == 0
    assert call(log, "--plot", part, "--from", 0.006, "--to", 0.009).exit_code == 0
    assert whole.read_bytes().startswith(b"\x89PNG")
    assert whole.read_bytes() != part.read_bytes()
    empty = call(log, "--plot", part, "--from", 5)
    assert empty.exit_code == 2
    assert "nothing ran between 5 and 0.01 seconds; units ran from 0.005 to 0.010" in empty.stderr


def test_without_matplotlib_a_picture_is_refused_with_what_helps(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = call(log, "--plot", log.parent / "x.png")
    assert result.exit_code == 2
    assert result.stderr == "a plot needs matplotlib; install it with: pip install matplotlib\n"
    assert call(log).exit_code == 0, "everything else goes without"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl"], "it is not there; hydra-tune sweep writes one to runs/"),
        ([__file__], "is not an event log"),
        ([], "Missing argument 'LOG'"),
        (["LOG", "--from", "1"], "give --plot FILE as well"),
    ],
)
def test_what_makes_no_sense_is_code_2_with_what_helps(log, arguments, message):
    result = call(*(log if one == "LOG" else one for one in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (log.parent / "run.trace.json").exists()


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_a_place_that_cannot_be_written_is_code_1(log, option):
    if option == "--plot":
        pytest.importorskip("matplotlib")
    result = call(log, option, log.parent / "none" / "x")
    assert result.exit_code == 1
    assert "No such file or directory; give another place with --out or --plot" in result.stderr


def test_it_needs_no_torch(log):
    code = f"import sys\nsys.modules['torch'] = None\nfrom hydra_tune.cli import main\nmain(['trace', {str(log)!r}])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "makespan" in done.stdout
