"""The documentation's sweep file is one, and every command, key, distribution and message in the reference is the code's."""

import inspect
import json
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from hydra_tune.cli import main
from hydra_tune.cli.inspect.run_output import to_json as run_to_json
from hydra_tune.cli.inspect.sweep_run_record import RunPhase, SweepRunRecord
from hydra_tune.cli.sweep_file.distributions import DISTRIBUTIONS
from hydra_tune.cli.sweep_file.reader import read_sweep_file
from hydra_tune.cli.sweep_file.sweep_model import PRUNING, HydraSection, SweepFileDocument
from hydra_tune.devices.hardware.link import LinkRates
from hydra_tune.devices.hardware.survey import DeviceSurvey, PeerPath, SurveyedDevice
from hydra_tune.observe.event_log.line_format import EventLogFormatter
from hydra_tune.observe.event_log.run_figures import DeviceFigures, RunFigures
from hydra_tune.observe.live.snapshot import DeviceView, SweepView, TrialView
from hydra_tune.observe.live.summary import to_json
from hydra_tune.planner.search.figures import ComparedSystem, FusedPeak, IdleFeatureMap, MemoryCurvePoint, StepFigures
from hydra_tune.pool.dry_run.fusion_report import FusionForecast
from hydra_tune.pool.dry_run.report import DeviceForecast, PoolForecast, TrialForecast
from hydra_tune.pool.views.job_logging import _NAMES
from hydra_tune.schedule import Event
from hydra_tune.simulate import DeviceOutcome, Interval, SimulationResult
from hydra_tune.simulate.profile import (
    _ProfileDevice,
    _ProfileDocument,
    _ProfileOutage,
    _ProfileShard,
    _ProfileSlowdown,
    _ProfileTrial,
    _ProfileUnit,
    read_profile,
)
from hydra_tune.simulate.recorded.replay import ReplayComparison

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "docs" / "reference"
CLI, EVENTS, FILE, JSON, MODELS, PROFILE = (
    (REFERENCE / f"{name}.md").read_text(encoding="utf-8")
    for name in ("cli", "events", "sweep-file", "json", "models", "profile")
)


def section(page, heading):
    """Text of a page from a heading up to the next one of the same level."""
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)[1]


def undocumented(keys, text):
    return [key for key in keys if f"`{key}`" not in text]


def names_of(*parts):
    return [field.name for part in parts for field in fields(part)]


def test_the_example_is_a_sweep_file(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", FILE, re.DOTALL)[1])
    spec = read_sweep_file(path)
    assert (spec.task, spec.run_cap, len(spec.parameters)) == ("train:build", 64, 5)


@pytest.mark.parametrize("key", [*SweepFileDocument.model_fields, *HydraSection.model_fields, *DISTRIBUTIONS, *PRUNING])
def test_every_key_and_distribution_is_documented(key):
    assert re.search(rf"^\| `{key}[`.]", FILE, re.MULTILINE)


@pytest.mark.parametrize("kind", PRUNING)
def test_the_defaults_of_early_termination_are_the_documented_ones(kind):
    line = next(line for line in FILE.splitlines() if line.startswith(f"| `{kind}` |"))
    for name, field in PRUNING[kind].model_fields.items():
        if name != "type":
            assert f"`{name}`" in line if field.default is None else f"`{name}: {field.default}`" in line


@pytest.mark.parametrize("command", main.commands)
def test_every_command_has_a_section_with_its_options(command):
    """Sphinx writes the options there, as `tests/docs/test_reference.py` checks."""
    heading = next(line[3:] for line in CLI.splitlines() if re.match(rf"## .*\bhydra-tune {command}\b", line))
    directive = rf"^\.\. click:: (\S+)\n   :prog: hydra-tune {command}\n   :nested: none$"
    place = re.search(directive, section(CLI, heading), re.MULTILINE)[1]
    module, name = place.split(":")
    assert getattr(import_module(module), name) is main.commands[command]


@pytest.mark.parametrize("name", main.commands)
def test_help_texts_are_sentences(name):
    command = main.commands[name]
    helps = [option.help for option in command.params if option.opts[0].startswith("--")]
    for text in (command.get_short_help_str(limit=64), *helps):
        assert re.fullmatch(r"[A-Z].*[.](  \[.*\])?", text, re.DOTALL), text
        assert not text.endswith("..."), text


def test_the_help_of_sweep_has_every_exit_code_of_the_reference():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", section(CLI, "Exit codes"), re.MULTILINE)
    codes = re.findall(r"^  (\d+) ", main.commands["sweep"].epilog, re.MULTILINE)
    assert codes == [code for code, _ in rows]


def test_the_shell_can_complete_commands_and_options():
    for words, expected in (("hydra-tune sta", "status"), ("hydra-tune show --t", "--top")):
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = CliRunner(env={"_HYDRA_TUNE_COMPLETE": "bash_complete", **environment}).invoke(
            main, prog_name="hydra-tune"
        )
        assert f"plain,{expected}\n" in done.output
    assert "_HYDRA_TUNE_COMPLETE=bash_source" in CLI


def test_every_state_of_a_run_is_documented():
    assert undocumented(get_args(RunPhase), section(CLI, "hydra-tune list and hydra-tune status")) == []


def test_every_key_of_a_run_is_documented():
    run = SweepRunRecord(name="first", phase="idle", trials=(TrialView(number=0, state="completed"),))
    data = run_to_json(run)
    assert undocumented([*data, *data["trials"][0]], section(JSON, "list, status, show")) == []


def test_every_key_of_a_sweep_is_documented():
    device = DeviceView(name="cpu:0", busy_share=0.0, resident_bytes=0, peak_bytes=0, budget_bytes=1)
    view = SweepView(
        name="vit",
        metric="val_loss",
        goal="minimize",
        status="completed",
        trials=(TrialView(number=0, state="completed"),),
        devices=(device,),
    )
    data = to_json(view)
    keys = [*data, *data["trials"][0], *data["devices"]["cpu:0"], *data["counts"], *data["metric"]]
    assert undocumented(keys, section(JSON, "sweep")) == []


def test_every_key_of_a_plan_is_documented():
    named = {"name", "split", "cut", "placement", "parallel"}  # sentences of the lists `splits` and so on
    keys = {*names_of(TrialForecast, FusionForecast, DeviceForecast, PoolForecast)} - named
    keys |= {*names_of(StepFigures, IdleFeatureMap, MemoryCurvePoint, FusedPeak, ComparedSystem)}
    assert undocumented(sorted(keys), section(JSON, "plan")) == []


def test_every_key_of_a_simulation_is_documented():
    parts = names_of(SimulationResult, DeviceOutcome, Interval)
    keys = [*parts, "bytes_moved", "loads_per_unit", "reloads_per_unit", "optimum"]
    assert undocumented(keys, section(JSON, "simulate")) == []


def test_every_key_of_a_replay_is_documented():
    keys = re.findall(r'^ +"(\w+)":', inspect.getsource(ReplayComparison.to_json), re.MULTILINE)
    assert "same_order" in keys
    assert undocumented(keys, section(JSON, "simulate")) == []


def test_every_key_of_a_survey_is_documented():
    assert undocumented(names_of(DeviceSurvey, SurveyedDevice, PeerPath, LinkRates), section(JSON, "devices")) == []


def test_every_key_of_a_trace_is_documented():
    assert undocumented(names_of(RunFigures, DeviceFigures), section(JSON, "trace")) == []


def test_every_line_of_an_event_log_is_documented():
    lines = section(EVENTS, "Event log lines")
    assert undocumented([*EventLogFormatter()._makers, "lost", "dropped", "end", *_NAMES.values()], lines) == []
    assert {*_NAMES} <= {*get_args(Event)}


@pytest.mark.parametrize(
    "part",
    [_ProfileDocument, _ProfileTrial, _ProfileShard, _ProfileUnit, _ProfileDevice, _ProfileSlowdown, _ProfileOutage],
)
def test_every_key_of_a_profile_is_documented(part):
    assert undocumented(part.model_fields, PROFILE[PROFILE.index("## Top level") :]) == []


def test_the_example_is_a_profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(re.search(r"```json\n(.*?)```", PROFILE, re.DOTALL)[1])))
    scenario = read_profile(path)
    assert (len(scenario.trials), len(scenario.devices)) == (5, 2)


def source():
    """All code, with texts that go over several lines in one piece."""
    return re.sub(
        r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in sorted((ROOT / "hydra_tune").rglob("*.py")))
    )


def test_every_message_about_a_model_is_the_codes():
    code, messages = source(), []
    for heading, column in (("Whole", 0), ("Refused", 1), ("Fused", 1), ("Planned", 1)):
        for line in section(MODELS, heading).splitlines():
            if line.startswith("| ") and not line.startswith(("| model or step", "| trial |", "| message")):
                cell = re.split(r" \| ", line.strip("|"))[column]
                messages += [double or single for double, single in re.findall(r"``(.+?)``|`([^`]+)`", cell)]
    assert len(messages) > 30
    parts = [part.strip() for message in messages for part in message.split("...")]
    assert [part for part in parts if part not in code] == []
