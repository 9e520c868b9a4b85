"""The documentation's sweep file is one, and every key, distribution and option is documented."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from hydra_tune.cli import main
from hydra_tune.cli.inspect.run_output import to_json as run_to_json
from hydra_tune.cli.inspect.sweep_run_record import SweepRunRecord
from hydra_tune.cli.sweep_file.distributions import DISTRIBUTIONS
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.cli.sweep_file.sweep_model import PRUNING, HydraSection, SweepFileDocument
from hydra_tune.devices.hardware.link import LinkRates
from hydra_tune.devices.hardware.survey import DeviceSurvey, PeerPath, SurveyedDevice
from hydra_tune.observe.event_log.run_figures import DeviceFigures, RunFigures
from hydra_tune.observe.live.snapshot import SweepView, TrialView
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
        for command in main.commands.values()
        for option in command.params
        for name in option.opts
        if name.startswith("--")
    ],
)
def test_every_option_is_documented(option):
    assert f"`{option}" in CLI


@pytest.mark.parametrize("command", main.commands)
def test_every_command_has_a_section(command):
    assert f"`hydra-tune {command}`" in CLI
    assert re.search(rf"^    hydra-tune {command}\b", CLI, re.MULTILINE)


def test_every_key_of_a_run_is_documented():
    run = SweepRunRecord(name="first", phase="idle", trials=(TrialView(number=0, state="completed"),))
    data = run_to_json(run)
    assert [key for key in (*data, *data["trials"][0]) if f"`{key}`" not in CLI] == []


@pytest.mark.parametrize("name", main.commands)
def test_help_texts_are_sentences(name):
    command = main.commands[name]
    helps = [option.help for option in command.params if option.opts[0].startswith("--")]
    for text in (command.get_short_help_str(limit=64), *helps):
        assert re.fullmatch(r"[A-Z].*[.](  \[.*\])?", text, re.DOTALL), text
        assert not text.endswith("..."), text


def test_the_shell_can_complete_commands_and_options():
    for words, expected in (("hydra-tune sta", "status"), ("hydra-tune show --t", "--top")):
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = CliRunner(env={"_HYDRA_TUNE_COMPLETE": "bash_complete", **environment}).invoke(
            main, prog_name="hydra-tune"
        )
        assert f"plain,{expected}\n" in done.output
    assert "_HYDRA_TUNE_COMPLETE=bash_source" in CLI


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
