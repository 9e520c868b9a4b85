"""The documentation's sweep file is one, and every key, distribution and option is documented."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from hydra_tune.cli.commands.best import best
from hydra_tune.cli.commands.devices import devices
from hydra_tune.cli.commands.plan import plan
from hydra_tune.cli.commands.simulate import simulate_command
from hydra_tune.cli.commands.sweep import sweep
from hydra_tune.cli.commands.trace import trace
from hydra_tune.cli.sweep_file.distributions import DISTRIBUTIONS
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.cli.sweep_file.sweep_model import PRUNING, HydraSection, SweepFileDocument
from hydra_tune.devices.hardware.link import LinkRates
from hydra_tune.devices.hardware.survey import DeviceSurvey, PeerPath, SurveyedDevice
from hydra_tune.observe.event_log.run_figures import DeviceFigures, RunFigures
from hydra_tune.observe.live.snapshot import SweepView
from hydra_tune.observe.live.summary import to_json
from hydra_tune.simulate import DeviceOutcome, Interval, SimulationResult
from hydra_tune.simulate.profile import (
    _ProfileDevice,
    _ProfileDocument,
    _ProfileOutage,
    _ProfileShard,
    _ProfileSlowdown,
    _ProfileTrial,
)

DOCS = Path(__file__).parents[3] / "docs"
FILE = (DOCS / "sweep-file.md").read_text(encoding="utf-8")
CLI = (DOCS / "cli.md").read_text(encoding="utf-8")


def test_the_example_is_a_sweep_file(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", FILE, re.DOTALL)[1])
    spec = read_sweep_file(path)
    assert (spec.task, spec.run_cap, len(spec.parameters)) == ("train:build", 64, 5)


@pytest.mark.parametrize("key", [*SweepFileDocument.model_fields, *HydraSection.model_fields, *DISTRIBUTIONS, *PRUNING])
def test_every_key_and_distribution_is_documented(key):
    assert f"`{key}`" in FILE or f"`{key}." in FILE


@pytest.mark.parametrize("kind", PRUNING)
def test_the_defaults_of_early_termination_are_the_documented_ones(kind):
    line = next(line for line in FILE.splitlines() if line.startswith(f"| `{kind}` |"))
    for name, field in PRUNING[kind].model_fields.items():
        if name != "type":
            assert f"`{name}`" in line if field.default is None else f"`{name}: {field.default}`" in line


@pytest.mark.parametrize(
    "option",
    [
        name
        for command in (sweep, plan, devices, best, simulate_command, trace)
        for option in command.params
        for name in option.opts
        if name.startswith("--")
    ],
)
def test_every_option_is_documented(option):
    assert f"`{option}" in CLI


def test_every_key_of_the_json_is_documented():
    view = SweepView(name="vit", metric="val_loss", goal="minimize", status="completed")
    assert [key for key in to_json(view) if f"`{key}`" not in CLI] == []


def test_every_key_of_a_simulation_is_documented():
    parts = [field.name for part in (SimulationResult, DeviceOutcome, Interval) for field in fields(part)]
    keys = [*parts, "bytes_moved", "loads_per_unit"]
    assert [key for key in keys if f"`{key}`" not in CLI] == []


def test_every_key_of_a_survey_is_documented():
    keys = [field.name for part in (DeviceSurvey, SurveyedDevice, PeerPath, LinkRates) for field in fields(part)]
    assert [key for key in keys if f"`{key}`" not in CLI] == []


def test_every_key_of_a_trace_is_documented():
    keys = [field.name for part in (RunFigures, DeviceFigures) for field in fields(part)]
    assert [key for key in keys if f"`{key}`" not in CLI] == []


@pytest.mark.parametrize(
    "part", [_ProfileDocument, _ProfileTrial, _ProfileShard, _ProfileDevice, _ProfileSlowdown, _ProfileOutage]
)
def test_every_key_of_a_profile_is_documented(part):
    page = (DOCS / "scheduling.md").read_text(encoding="utf-8")
    assert [key for key in part.model_fields if f"`{key}`" not in page and f'"{key}"' not in page] == []
