"""The example does what its README says: the budget cuts every model of the search, and the models learn digits."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from hydra_tune import HydraExecutor, Reported, train_plain
from hydra_tune.cli import main
from tests.support.gathered import gather

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    sys.modules.pop("digits", None)
    import digits  # noqa: PLC0415 - found through the path above

    yield digits
    sys.modules.pop("digits")


def space():
    return yaml.safe_load((EXAMPLE / "space.yaml").read_text())


def test_the_trials_of_the_small_space_are_computed_together(digits, tmp_path, monkeypatch):
    """A few of them, told to be."""
    monkeypatch.chdir(tmp_path)
    gather(monkeypatch, lambda count: count > 1)
    given = ["--fuse", "on", "--run-cap", "5", "--set", "epochs=2", "--json", "--no-log"]
    done = CliRunner().invoke(main, ["sweep", str(EXAMPLE / "mlp.yaml"), *given])
    assert done.exit_code == 0, done.output
    trials = json.loads(done.stdout)["trials"]
    assert len(trials) == 5
    assert max(trial["group_size"] for trial in trials) > 1
    assert max(trial["value"] for trial in trials) > 0.8


@pytest.mark.cases(1 / 3)
def test_the_models_learn(digits):
    assert train_plain(digits.build_cnn(epochs=4, channels=8)).metrics["val_acc"] > 0.8
    assert train_plain(digits.build_vit(epochs=4, width=48)).metrics["val_acc"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("pick", [min, max])
def test_the_budget_cuts_the_smallest_and_the_largest_model_into_at_least_four_shards(digits, pick):
    sweep = space()
    sizes = {name: pick(sweep["parameters"][name]["values"]) for name in ("width", "depth")}
    with HydraExecutor(devices="cpu:2", device_memory=sweep["hydra"]["device_memory"]) as pool:
        stream = pool.events()
        pool.submit(digits.build_vit(**sizes, epochs=1), events=stream)
        event = stream.get(120)
        assert isinstance(event, Reported), event.result.error
        assert event.job.progress.num_shards >= 4


def test_the_script_searches_what_the_file_says():
    script, sweep = (EXAMPLE / "sweep.py").read_text(), space()
    for name in ("width", "depth", "dropout"):
        assert f'suggest_categorical("{name}", {sweep["parameters"][name]["values"]})' in script
    assert f'device_memory="{sweep["hydra"]["device_memory"]}"' in script
    assert f"n_trials={sweep['run_cap']}" in script
