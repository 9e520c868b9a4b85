"""`hydra-tune plan`: shapes and bytes of configurations, and those that do not fit."""

import json
import sys
from textwrap import dedent

import pytest
from click.testing import CliRunner

from hydra_tune.cli import main
from hydra_tune.quantities import parse_bytes

pytestmark = pytest.mark.usefixtures("captured_once")

MODULE = "model_to_plan"
MODEL = """
from functools import partial

import torch
from torch import nn

from hydra_tune import TrainTask


def one(number):
    torch.manual_seed(number)
    for _ in range(20):  # a plan times some steps
        yield torch.randn(16, 32), torch.randn(16, 1)


def net(width):
    print("built")
    hidden = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), *hidden, nn.Linear(width, 1))


def build(lr, width):
    if width < 0:
        raise RuntimeError("no such width")
    return TrainTask(
        model=partial(net, width),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        loss=nn.functional.mse_loss,
        train=partial(one, 0),
    )


def from_trial(trial):
    return build(0.1, 8)
"""
SPACE = """
task: model_to_plan:build
metric: {name: train_loss}
parameters:
  lr: {distribution: log_uniform_values, min: 1e-5, max: 0.1}
  width: {values: [16, 256]}
hydra: {devices: "cpu:1", device_memory: 2000KiB}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / f"{MODULE}.py").write_text(MODEL)
    (tmp_path / "space.yaml").write_text(dedent(SPACE).lstrip())
    yield tmp_path
    sys.modules.pop(MODULE, None)


def run(folder, *arguments):
    return CliRunner().invoke(main, ["plan", str(folder / "space.yaml"), *arguments])


def change(folder, old, new):
    path = folder / "space.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.cases(1 / 3)
def test_tables_at_80_columns(folder):
    done = run(folder, "--trials", "2")
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if line != "built"]
    assert max(map(len, lines)) <= 80
    first, second = (next(i for i, line in enumerate(lines) if line.startswith(word)) for word in ("trial  ", "moved "))
    assert lines[0].startswith("devices: 1 of 2.0 MiB")
    assert lines[first].split() == [
        *("trial", "|W|", "shards", "units", "activations", "updates", "peak", "least", "budget", "step")
    ]
    shards = {line.split()[0]: line.split()[3] for line in lines[first + 1 : first + 3]}
    assert shards["0"] == "uncut"
    assert int(shards["1"]) > 1
    assert lines[second].split()[1:] == ["parameters", "optimizer", "activations", "inputs", "over", "|W|"]
    ways = [line for line in lines[second + 3 :] if line.startswith("runs ")]
    assert [way.split(", because")[0] for way in ways] == ["runs as it is", f"runs in {shards['1']} shards"]


def test_which_have_the_same_architecture(folder):
    done = run(folder, "--trials", "3", "--device-memory", "1GiB")
    assert done.exit_code == 0, done.output
    widths = [line.split("width=")[1] for line in done.stdout.splitlines() if "width=" in line]
    alike = [str(number) for number, width in enumerate(widths) if widths.count(width) > 1]
    assert len(set(widths)) == 2
    assert done.stdout.splitlines()[-1] == f"same architecture: {', '.join(alike)}"


@pytest.mark.cases(1 / 3)
def test_who_could_be_computed_together_is_said_with_what_it_gains_and_why_others_could_not(folder):
    model = folder / f"{MODULE}.py"
    changed = "train=partial(one, 0), split_batches=2 if width == 256 else 1,"
    model.write_text(model.read_text().replace("train=partial(one, 0),", changed))
    given = ("--trials", "4", "--device-memory", "1GiB")
    assert "together" not in run(folder, *given).stdout
    done = run(folder, *given, "--fuse", "on")
    assert done.exit_code == 0, done.output
    widths = [line.split("width=")[1] for line in done.stdout.splitlines() if "width=" in line]
    small, large = (", ".join(str(n) for n, w in enumerate(widths) if w == width) for width in ("16", "256"))
    assert small
    assert large
    lines = [line for line in done.stdout.splitlines() if line.startswith("c")]
    assert lines == [
        f"can be computed together, up to 16 at a time: {small}",
        f"computed by itself, for it has split_batches=2, and a group takes each batch whole: {large}",
    ]
    done = run(folder, *given, "--probe", "--json")
    assert done.exit_code == 0, done.stderr
    for trial in json.loads(done.stdout)["trials"]:
        fusion, is_small = trial["fusion"], trial["params"]["width"] == 16
        assert (fusion["group"] is not None) == is_small == (fusion["why_alone"] is None)
        assert bool(fusion["group_seconds"]) == (fusion["alone_seconds"] is not None) == is_small
        assert (fusion["size"] is not None) == is_small


def test_json_is_alone_on_standard_output_and_has_it_all(folder):
    done = run(folder, "--json", "--trials", "2", "--seed", "1")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert "built" in done.stderr
    trials = {trial["params"]["width"]: trial for trial in found["trials"]}
    assert set(trials) == {16, 256}
    assert (trials[16]["num_shards"], trials[16]["error"]) == (1, None)
    assert sum(trials[16]["bytes_out"].values()) == 0
    large = trials[256]
    assert large["num_shards"] > 1
    assert large["parameter_bytes"] == 4 * (32 * 256 + 256 + 3 * (256 * 256 + 256) + 256 + 16)
    assert large["bytes_in"]["optimizer"] > large["parameter_bytes"]
    assert large["smallest_budget_bytes"] < parse_bytes("2000KiB")
    (device,) = large["devices"].values()
    assert device["peak_bytes"] <= device["budget_bytes"] == parse_bytes("2000KiB")


@pytest.mark.cases(1 / 3)
def test_what_does_not_fit_says_how_much_would_do_and_the_others_are_planned(folder):
    done = run(folder, "--json", "--trials", "2", "--device-memory", "600KiB")
    assert done.exit_code == 1
    trials = {trial["params"]["width"]: trial for trial in json.loads(done.stdout)["trials"]}
    assert trials[16]["error"] is None
    assert "raise device_memory to at least" in trials[256]["error"]
    enough = trials[256]["smallest_budget_bytes"]
    assert enough > parse_bytes("600KiB")
    assert run(folder, "--trials", "2", "--device-memory", str(enough)).exit_code == 0


def test_a_task_that_cannot_be_made_is_told_and_the_others_are_planned(folder):
    change(folder, "[16, 256]", "[16, -1]")
    done = run(folder, "--trials", "2")
    assert done.exit_code == 1
    assert "cannot be trained: RuntimeError: no such width" in done.stdout
    assert "over |W|" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("cpu:1", "cuda:x", ":6:18: hydra.devices: "),
        ("build", "from_trial", "takes no argument"),
        ("parameters:\n  lr", "seed: 0\n#", "plan has no tuner; list them under parameters:"),
    ],
)
def test_what_makes_no_sense_is_code_2_with_its_place(folder, old, new, told):
    change(folder, old, new)
    if new.endswith("#"):
        change(folder, "  width: {values: [16, 256]}\n", "")
        change(folder, "build", "from_trial")
    done = run(folder)
    assert done.exit_code == 2, done.output
    assert told in done.stderr
    assert done.stdout == ""


def test_what_is_set_goes_before_what_the_file_fixes(folder):
    change(folder, "{distribution: log_uniform_values, min: 1e-5, max: 0.1}", "{value: 0.1}")
    done = run(folder, "--json", "--trials", "2", "--set", "lr=1e-3")
    assert done.exit_code == 0, done.stderr
    assert [trial["params"]["lr"] for trial in json.loads(done.stdout)["trials"]] == [1e-3, 1e-3]
    refused = run(folder, "--set", "width=16")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert ":5:3: parameters.width is searched, not fixed" in refused.stderr


@pytest.mark.cases(1 / 3)
def test_a_tuned_cut_is_shown_with_its_reason(folder):
    change(folder, 'devices: "cpu:1"', 'num_shards: tuned, devices: "cpu:1"')
    done = run(folder, "--trials", "2")
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stdout.splitlines() if " shards of up to " in line]
    assert line.startswith("trial 1: ")
    found = json.loads(run(folder, "--json", "--trials", "2").stdout)
    told = [(trial["params"]["width"], cut) for trial in found["trials"] for cut in trial.get("cuts", [])]
    assert [(width, f"trial 1: {cut}") for width, cut in told] == [(256, line)]


@pytest.mark.cases(1 / 3)
def test_a_number_of_pieces_that_was_chosen_is_shown_with_its_reason(folder):
    model = folder / f"{MODULE}.py"
    text = model.read_text().replace("train=partial", 'split_batches="auto", train=partial')
    model.write_text(text.replace("randn(16, ", "randn(2048, "))
    change(folder, "width: {values: [16, 256]}", "width: {value: 16}")
    change(folder, "2000KiB", "500KiB")
    done = run(folder, "--trials", "1")
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stdout.splitlines() if " pieces of each batch of 2048: " in line]
    assert line.endswith("; sums are rounded as with split_batches=" + line.split()[2])
    (trial,) = json.loads(run(folder, "--json", "--trials", "1").stdout)["trials"]
    assert [f"trial 0: {one}" for one in trial["splits"]] == [line]
    assert str(trial["split_batches"]) == line.split()[2]
    assert "split" not in trial


@pytest.mark.cases(1 / 3)
def test_all_of_a_grid_are_planned_and_said_once_what_is_the_same_in_all(folder):
    rates = ", ".join(f"0.{number}" for number in range(1, 10))
    change(folder, "lr: {distribution: log_uniform_values, min: 1e-5, max: 0.1}", f"lr: {{values: [{rates}]}}")
    change(folder, "parameters:", "method: grid\nparameters:")
    change(folder, "width: {values: [16, 256]}", "width: {value: 8}")
    done = run(folder)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    points = [f"trial {number}: lr=0.{number + 1}" for number in range(9)]
    assert [line for line in lines if line.startswith(("all:", "trial "))][:10] == ["all: width=8", *points]
    assert "same architecture: 0, 1, 2, 3, 4, 5, 6, 7, 8" in lines
    few = json.loads(run(folder, "--json", "--trials", "2").stdout)
    assert (len(few["trials"]), few["notes"]) == (2, [])


def test_gpus_that_are_not_here_are_stood_for_and_it_is_said(folder):
    change(folder, "cpu:1", "cuda:98,99")
    done = run(folder, "--json", "--trials", "1")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["notes"] == ["cuda:98,99: not here; 2 CPU devices of the same memory stand for them"]
    assert [device["budget_bytes"] for device in found["trials"][0]["devices"].values()] == [2000 << 10] * 2
    assert found["trials"][0]["shapes_only"] is False


@pytest.mark.cases(1 / 3)
def test_profile_shows_where_a_steps_memory_is_and_what_less_would_cost(folder):
    (folder / "space.yaml").write_text(SPACE.replace("values: [16, 256]", "value: 16"))
    given = ("--trials", "2", "--profile-trials", "3")
    shown = run(folder, *given).output
    assert shown.count("profile of trial 0, 1\n") == 1
    for part in ("how long feature maps lie idle", "memory over that step", "by trials fused", "full fusion", "HFTA"):
        assert part in shown
    done = run(folder, *given, "--json")
    assert done.exit_code == 0
    first, second = (trial["fusion"]["figures"] for trial in json.loads(done.stdout)["trials"])
    assert first == second
    assert [one["num_trials"] for one in first["peaks"]] == [1, 2, 3]
    peaks = [one["peak_bytes"] for one in first["peaks"]]
    assert peaks == sorted(peaks)
    assert peaks[0] == max(one["num_bytes"] for one in first["curve"])
    assert all(one["inactive_seconds"] >= 0 for one in first["maps"])
    assert sum(one["is_chosen"] for one in first["systems"]) <= 1


def test_a_model_that_cannot_be_planned_says_why(folder):
    (folder / "space.yaml").write_text(SPACE.replace("values: [16, 256]", "value: 256"))
    shown = run(folder, "--trials", "1", "--profile")
    assert shown.exit_code == 0
    assert "cannot be planned in less memory: its step is cut into" in shown.output
