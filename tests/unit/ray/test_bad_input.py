"""What is refused before there is a Ray cluster, by name."""

import subprocess
import sys
import threading

import pytest

pytest.importorskip("ray")

import hydra_tune_ray
from hydra_tune.errors import ConfigError
from hydra_tune_ray import installed
from hydra_tune_ray.build_adapter import built
from hydra_tune_ray.pickling import pickled

NO_RAY = """
import importlib.metadata, sys

real = importlib.metadata.version

def version(name):
    if name == "ray":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)

importlib.metadata.version = version
sys.modules["ray"] = None
import hydra_tune_ray
"""


def test_without_ray_the_extra_is_named():
    run = subprocess.run([sys.executable, "-c", NO_RAY], capture_output=True, text=True, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1
    assert last == (
        "hydra_tune_ray.errors.RayVersionError: hydra_tune_ray needs Ray, which is not installed: pip install 'hydra-tune[ray]'"
    )


@pytest.mark.parametrize("found", ["2.55.1", "2.61.0", "3.0.0.dev0", "1.13.0"])
def test_versions_that_were_not_tested_are_refused(monkeypatch, found):
    monkeypatch.setattr(installed, "version", lambda name: found)
    with pytest.raises(
        hydra_tune_ray.RayVersionError, match=rf"Ray {found} is installed, and .* 2\.56 up to, .* 2\.61"
    ):
        installed.check_ray()


@pytest.mark.parametrize("found", ["2.56.0", "2.60.0", "2.60.1.post2"])
def test_versions_that_were_tested_are_taken(monkeypatch, found):
    monkeypatch.setattr(installed, "version", lambda name: found)
    installed.check_ray()


def test_the_object_that_does_not_pickle_is_named():
    guard = threading.Lock()

    def build(config):
        return guard, config

    with pytest.raises(
        hydra_tune_ray.BuildPickleError, match=r"build cannot be pickled.*'guard', a _thread\.lock, in .*build"
    ):
        pickled(build, "build")


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (3, {}, r"build must be a function that returns a TrainTask, not 3"),
        (dict, {"lease_seconds": 0}, r"lease_seconds must be a number of seconds above 0, not 0"),
        (dict, {"checkpoint_dir": "x"}, r"pools take no checkpoint_dir: .*storage_path"),
        (dict, {"idle_seconds": -1}, r"idle_seconds must be a number of seconds above 0, not -1"),
        (dict, {"detached": True}, r"detached pools .* idle_seconds"),
        (dict, {"instrument": threading.Lock()}, r"instrument cannot be pickled.*a _thread\.lock"),
    ],
)
def test_options_that_make_no_sense(build, options, message):
    with pytest.raises(ConfigError, match=message):
        hydra_tune_ray.trainable(build, **options)


def test_a_callback_is_for_what_trainable_has_made():
    with pytest.raises(ConfigError, match=r"dict.* was not made by hydra_tune_ray\.trainable"):
        hydra_tune_ray.PoolCallback(dict)


def by_config(config):
    return config["lr"], dict(config)


def by_names(*, lr, width=3):
    return lr, width


def by_positions(lr, width):
    return lr, width


def by_one_name(lr):
    return lr


def by_trial(trial):
    return trial.suggest_float("lr", 0, 1, log=True), trial.suggest_int("width", 1, 4), trial.params


def test_one_build_serves_ray_optuna_and_sweep_files():
    drawn = {"lr": 0.5, "width": 2}
    assert built(by_config, drawn) == (0.5, drawn)
    assert built(by_names, drawn) == (0.5, 2)
    assert built(by_positions, drawn) == (0.5, 2)
    assert built(by_one_name, {"lr": 0.5}) == 0.5
    assert built(by_trial, drawn) == (0.5, 2, drawn)
    with pytest.raises(KeyError, match=r"build asks for 'width', and param_space has 'lr'; add it there"):
        built(by_trial, {"lr": 0.5})
