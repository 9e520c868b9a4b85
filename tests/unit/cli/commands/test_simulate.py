"""`hydra-tune simulate`: options, profiles, output and exit codes."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hydra_tune import HydraExecutor
from hydra_tune.cli import main
from tests.unit.pool.tasks import task

SHARD = {"forward_seconds": 1, "backward_seconds": 1, "bytes": 100}
PROFILE = {
    "trials": [{"name": "a", "count": 3, "steps": 5, "shards": [SHARD, SHARD]}],
    "devices": [{"name": f"gpu{number}", "memory_bytes": 250, "bandwidth": 100} for number in range(2)],
}


def call(*arguments):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return path


def figures(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_table_says_what_the_json_says():
    flags = ("--trials", 3, "--devices", 2, "--shards", 2, "--steps", 10)
    table = call(*flags)
    assert table.exit_code == 0
    assert "device0" in table.output
    assert "makespan" in table.output
    known = figures(*flags)
    assert f"{known['units_run']} run" in table.output
    assert known["units_run"] == 3 * 10 * 3
    assert known["makespan_seconds"] == pytest.approx(7.5, abs=0.5)


def test_a_profile_is_played_and_options_go_before_it(profile):
    assert len(figures(profile)["devices"]) == 2
    one = figures(profile, "--devices", 1, "--bandwidth", "200B/s", "--policy", "fifo")
    assert (len(one["devices"]), one["policy"]) == (1, "fifo")
    assert one["makespan_seconds"] == pytest.approx(45.5)
    assert figures(profile, "--no-overlap")["makespan_seconds"] > figures(profile)["makespan_seconds"]
    assert figures(profile, "--slow", "gpu0,0,0.5")["makespan_seconds"] > figures(profile)["makespan_seconds"]
    lost, back = (figures(profile, "--lose", fault)["makespan_seconds"] for fault in ("gpu0,1", "gpu0,1,2"))
    assert lost > back > figures(profile)["makespan_seconds"]
    assert figures(profile, "--admission", "staggered") != figures(profile)


def test_a_device_whose_name_has_a_comma_can_be_lost(profile):
    profile.write_text(profile.read_text().replace("gpu0", "gpu0,left"))
    lost, back = (figures(profile, "--lose", fault)["makespan_seconds"] for fault in ("gpu0,left,1", "gpu0,left,1,2"))
    assert lost > back > figures(profile)["makespan_seconds"]


def test_options_reach_the_simulation():
    flags = ("--trials", 8, "--devices", 4, "--steps", 5, "--shard-memory", "1GiB")
    plain = figures(*flags)
    assert figures(*flags, "--epochs", 4, "--survival", "0.5,0.25")["units_saved"] > 0
    assert figures(*flags, "--spread", 2, "--seed", 1) != figures(*flags, "--spread", 2, "--seed", 2)
    assert figures(*flags, "--speeds", "1,0.5")["bound_seconds"] is None
    tight = figures(*flags, "--bandwidth", "1GB/s", "--device-memory", "2GiB")
    assert tight["makespan_seconds"] > plain["makespan_seconds"]
    assert figures(*flags, "--max-concurrent", 1)["makespan_seconds"] > 2 * plain["makespan_seconds"]
    ends = figures(*flags, "--admission", "staggered")["finished_seconds"]
    assert min(ends.values()) < min(plain["finished_seconds"].values())
    apart = figures(
        *flags, "--bandwidth", "1GB/s", "--device-memory", "2GiB", "--nodes", 2, "--network-bandwidth", "1GB"
    )
    assert apart["makespan_seconds"] >= tight["makespan_seconds"]
    late = figures(*flags, "--arrival-gap", 100)
    assert late["makespan_seconds"] > plain["makespan_seconds"]
    assert figures(*flags, "--spread", 2, "--estimate-error", 9) != figures(*flags, "--spread", 2)
    assert len(figures(*flags, "--timeline", 7)["timeline"]) == 7


def test_the_optimum_of_the_same_units_is_found_and_compared_with(profile):
    """Three trials of 5 steps, each of 3 units of 1 s: 45 s of work for two devices, which end at whole seconds."""
    pytest.importorskip("ortools")
    free = json.loads(profile.read_text())
    for device in free["devices"]:
        del device["bandwidth"], device["memory_bytes"]
    profile.write_text(json.dumps(free))
    known = figures(profile, "--policy", "fifo", "--optimum", 20)
    assert known["optimum"] == {"makespan_seconds": 23.0, "bound_seconds": 23.0, "status": "optimal"}
    table = call(profile, "--policy", "fifo", "--optimum", 20)
    assert f"(proven); the makespan is {known['makespan_seconds'] / 23:.3f} of it" in table.output
    refused = call("--trials", 2, "--devices", 2, "--speeds", "1,0.5", "--optimum", 1)
    assert refused.exit_code == 2
    assert "--optimum is for devices of one speed without faults" in refused.output


def test_bursts_are_as_long_as_asked_for():
    flags = ("--trials", 2, "--devices", 1, "--shards", 1, "--steps", 10, "--policy", "round_robin", "--timeline", 3)
    plain, bursts = figures(*flags), figures(*flags, "--burst-seconds", 1.05)

    def bars(known):
        return [(bar["job"], bar["start_seconds"], bar["end_seconds"]) for bar in known["timeline"]]

    assert bars(plain) == [
        ("trial0", 0, pytest.approx(0.2)),
        ("trial1", pytest.approx(0.2), pytest.approx(0.4)),
        ("trial0", pytest.approx(0.4), pytest.approx(0.6)),
    ]
    assert bars(bursts) == [
        ("trial0", 0, pytest.approx(0.2)),
        ("trial1", pytest.approx(0.2), pytest.approx(1.2)),
        ("trial0", pytest.approx(1.2), pytest.approx(2.2)),
    ], "the first ends for the second, and each later one is of five whole steps of 0.2 s"
    assert bursts["units_run"] == plain["units_run"] == 20, "each step counts"
    assert bursts["makespan_seconds"] == pytest.approx(plain["makespan_seconds"]) == pytest.approx(4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", 2), "--trials and --devices are needed"),
        (("--trials", 2, "--devices", 0), "at least 1 device"),
        (("--trials", 10**20, "--devices", 1), "at most 10,000,000 shards of all trials together"),
        (("--trials", 1, "--devices", 10**20), "at most 10,000,000 devices, not 100,000,000,000,000,000,000"),
        (("--trials", 0, "--devices", 1), "num_trials must be at least 1, not 0"),
        (
            ("--trials", 2, "--devices", 2, "--forward-seconds", 0),
            "forward_seconds must be a finite number > 0, not 0.0",
        ),
        (
            ("--trials", 2, "--devices", 2, "--backward-seconds", -1),
            "backward_seconds must be a finite number > 0, not -1",
        ),
        (("--trials", 2, "--devices", 2, "--policy", "lrft"), "did you mean 'lrtf'?"),
        (("--trials", 2, "--devices", 2, "--slow", "device9,1,0.5"), "device 'device9'; there are device0, device1"),
        (("--trials", 2, "--devices", 2, "--slow", "device0,1"), "not like device0,60,0.5"),
        (("--trials", 2, "--devices", 2, "--slow", "device0,1,0"), "factor must be a finite number > 0"),
        (("--trials", 2, "--devices", 2, "--lose", "device9,1"), "an outage names device 'device9'"),
        (("--trials", 2, "--devices", 2, "--lose", "device0"), "not like device0,60 or device0,60,90"),
        (("--trials", 2, "--devices", 2, "--lose", "device0,3,2"), "until_seconds must be a finite number > 3"),
        (("--trials", 2, "--devices", 1, "--lose", "device0,3"), "every device is lost for ever"),
        (("--trials", 2, "--devices", 2, "--survival", "0.5,x"), "is not numbers such as 1,0.5"),
        (("--trials", 2, "--devices", 2, "--survival", "0.5,0.6"), "fall from 1 to 0"),
        (("--trials", 2, "--devices", 2, "--bandwidth", "fast"), "it must be a size"),
        (("--trials", 2, "--devices", 2, "--speeds", "0"), "speed must be a finite number > 0"),
        (("--trials", 2, "--devices", 2, "--max-concurrent", 0), "max_concurrent must be at least 1"),
        (("--trials", 2, "--devices", 2, "--burst-seconds", 1), "trials of 4 shards run no bursts; give num_shards=1"),
        (
            ("--trials", 2, "--devices", 2, "--shards", 1, "--burst-seconds", -1),
            "burst_seconds must be a finite number >= 0, not -1.0",
        ),
        (
            ("--trials", 2, "--devices", 2, "--shards", 1, "--burst-seconds", "nan"),
            "burst_seconds must be a finite number >= 0, not nan",
        ),
        (("missing.json",), "does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", 3), "--devices must be from 1 to 2, as many as"),
        (("--trials", 4), "--trials describes what PROFILE has"),
        (("--burst-seconds", 1), "--burst-seconds describes what PROFILE has"),
        (("--device-memory", "50B"), "raise its memory to at least 100B"),
    ],
)
def test_options_that_do_not_go_with_the_profile_are_refused(profile, arguments, message):
    result = call(profile, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a file whose reading fails")
@pytest.mark.parametrize("flags", [(), ("--replay",)])
def test_a_file_that_cannot_be_read_is_told_as_such(flags):
    result = call(*flags, "/proc/self/mem")
    assert result.exit_code == 2
    assert "cannot read /proc/self/mem: Input/output error" in result.stderr


def test_a_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    flags = ("--trials", 3, "--devices", 2, "--bandwidth", "1GB", "--shard-memory", "100MB")
    assert call(*flags, "--plot", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    missing = call(*flags, "--plot", tmp_path / "no" / "x.png")
    assert missing.exit_code == 1
    assert "cannot write" in missing.stderr


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    result = call("--trials", 1, "--devices", 1, "--plot", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "missing_module"),
    [
        (("--speeds", "1,0.5", "--optimum", 1), None),
        (("--slow", "device0,1,0.5", "--optimum", 1), None),
        (("--lose", "device0,1,2", "--optimum", 1), None),
        (("--steps", 100_000_000_000, "--optimum", 1), None),
        (("--optimum", 1), "ortools.sat.python.cp_model"),
        (("--plot", "x.png"), "matplotlib.figure"),
    ],
)
def test_refusals_come_before_the_simulation(arguments, missing_module, monkeypatch):
    def simulated(*_, **__):
        pytest.fail("the command simulated")

    monkeypatch.setattr("hydra_tune.cli.commands.simulate.simulate", simulated)
    if missing_module is not None:
        monkeypatch.setitem(sys.modules, missing_module, None)
    result = call("--trials", 2, "--devices", 2, *arguments)
    assert result.exit_code == 2, result.output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "run.json"
    with HydraExecutor(devices="cpu:1", num_shards=3, record=True) as pool:
        assert [result.status for result in pool.run([task(epochs=2), task(epochs=3)])] == ["completed"] * 2
    pool.recording().write(path)
    return path


def test_a_recorded_run_is_played_again(recorded):
    known = figures("--replay", recorded)
    assert known["same_order"]
    assert known["agreeing"] == known["commands"] > 50
    assert known["simulated_seconds"] == known["recorded_seconds"] > 0
    table = call("--replay", recorded)
    assert table.exit_code == 0
    assert f"all {known['commands']} commands in the run's order" in table.output
    assert "(1.000 of the run)" in table.output
    other = call("--replay", recorded, "--policy", "lpt")
    assert "lpt; the run's was lrtf" in other.output
    assert "until the first that differs" in other.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", 2), "--replay goes with --policy and --json alone, not with --devices"),
        (("--no-overlap",), "not with --no-overlap"),
        (("--policy", "lrft"), "did you mean 'lrtf'?"),
    ],
)
def test_options_that_do_not_go_with_a_recording_are_refused(recorded, arguments, message):
    result = call("--replay", recorded, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_profile_is_no_recording(profile):
    result = call("--replay", profile)
    assert result.exit_code == 2
    assert "is not a recording; hydra-tune sweep --timeline FILE writes one" in result.stderr


def without_a_run(data):
    ends = [events for _, events, _ in data["decisions"] if events and events[0]["is"] == "UnitFinished"]
    ends[3].insert(0, ends[3][0])


def with_a_block_that_fits_nowhere(data):
    data["blocks"][0][3] = 1 << 60


def with_a_text_for_a_time(data):
    data["turns"][0][2][0][1] = "soon"


def with_a_text_for_an_event(data):
    data["decisions"][0][1][0] = "JobSubmitted"


def without_an_end(data):
    del data["decisions"][-4:]


@pytest.mark.parametrize(
    "damage",
    [without_a_run, with_a_block_that_fits_nowhere, with_a_text_for_a_time, with_a_text_for_an_event, without_an_end],
)
def test_a_damaged_recording_is_refused(recorded, tmp_path, damage):
    content = json.loads(recorded.read_text())
    damage(content["hydra_tune"])
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps(content))
    result = call("--replay", damaged)
    assert result.exit_code == 2, result.output
    assert (
        "damaged recording" in result.stderr
        or "recording is damaged" in result.stderr
        or "record until" in result.stderr
    )


def test_neither_torch_nor_matplotlib_is_imported():
    program = (
        "import sys; from hydra_tune.cli import main\n"
        "main(['simulate', '--trials', '2', '--devices', '1', '--steps', '2', '--json'], standalone_mode=False)\n"
        "sys.exit(len({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
