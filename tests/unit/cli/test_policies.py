"""Wherever a policy is named, it may be an installed package's, and a name that is none is told with the nearest."""

import json

import pytest
from click.testing import CliRunner

from hydra_tune.cli import main
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.errors import SweepFileError
from tests.support.installed import install_policies

GOOD = "task: train:build\nmetric: {name: val_loss}\nrun_cap: 1\n"
SIMULATE = ["simulate", "--trials", "2", "--devices", "1"]


@pytest.fixture(autouse=True)
def house(tmp_path, monkeypatch):
    install_policies(tmp_path, monkeypatch, {"house": "House", "gone": "Gone"})


@pytest.fixture
def space(tmp_path):
    def write(policy):
        path = tmp_path / "space.yaml"
        path.write_text(f"{GOOD}hydra: {{policy: {policy}}}\n")
        return path

    return write


def test_an_installed_policy_in_a_sweep_file_and_on_the_command_line(space):
    assert read_sweep_file(space("house")).engine == {"policy": "house"}
    done = CliRunner().invoke(main, [*SIMULATE, "--policy", "house", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["units_run"] > 0


def test_an_unknown_policy_in_a_sweep_file(space):
    with pytest.raises(
        SweepFileError, match=r"yaml:4:17: hydra\.policy: .* 'gone', not 'hose'; did you mean 'house'\?"
    ):
        read_sweep_file(space("hose"))


@pytest.mark.parametrize("command", ["sweep", "simulate"])
@pytest.mark.parametrize(("policy", "hint"), [("lrft", "did you mean 'lrtf'?"), ("hose", "did you mean 'house'?")])
def test_an_unknown_policy_on_the_command_line(space, command, policy, hint):
    arguments = SIMULATE if command == "simulate" else ["sweep", str(space("fifo"))]
    done = CliRunner().invoke(main, [*arguments, "--policy", policy])
    assert done.exit_code == 2
    assert f"not {policy!r}; " in " ".join(done.stderr.split())
    assert hint in " ".join(done.stderr.split())


def test_an_installed_policy_that_is_broken_is_named():
    done = CliRunner().invoke(main, [*SIMULATE, "--policy", "gone"])
    assert done.exit_code == 2
    assert "policy 'gone': the entry point 'gone' (house_policies:Gone) cannot be loaded: AttributeError" in done.stderr


def test_an_unknown_admission_on_the_command_line(space):
    done = CliRunner().invoke(main, ["sweep", str(space("fifo")), "--admission", "late"])
    assert done.exit_code == 2
    assert "'late' is not one of 'auto', 'eager', 'staggered'" in done.stderr
