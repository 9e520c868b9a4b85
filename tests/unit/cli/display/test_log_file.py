"""Where a sweep's event log goes."""

import re

import pytest
from click.testing import CliRunner

from hydra_tune.cli import main
from hydra_tune.cli.display.log_file import log_path
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import ConfigError
from hydra_tune.observe.event_log import writer


def spec(file="sweeps/space.yaml", name=None):
    return SweepSpec(file=file, task="train:build", metric="val_loss", run_cap=1, name=name)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("sweep", "name"), [(spec(), "space"), (spec(name="my sweep/../x"), "my-sweep-..-x"), (spec(name="/"), "sweep")]
)
def test_a_run_has_a_file_of_its_own_in_a_folder_for_runs(folder, sweep, name):
    path = log_path(sweep, None, no_log=False)
    assert re.fullmatch(rf"runs/{re.escape(name)}-[0-9]{{8}}-[0-9]{{6}}-[0-9]+\.jsonl", path.as_posix())
    assert list(folder.iterdir()) == [], "nothing is made yet"


def test_another_file_or_none_may_be_asked_for(folder):
    assert log_path(spec(), "a/b.jsonl", no_log=False) == folder / "a" / "b.jsonl"
    assert log_path(spec(), None, no_log=True) is None
    with pytest.raises(ConfigError, match="--log x and --no-log contradict each other"):
        log_path(spec(), "x", no_log=True)
    with pytest.raises(ConfigError, match=r"--log '.*' is a folder; give a file in it"):
        log_path(spec(), ".", no_log=False)


def test_where_the_folder_cannot_be_written_the_sweep_goes_without_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(writer.os, "access", lambda *_: False)
    assert log_path(spec(), None, no_log=False) is None
    assert "no event log is written: event_log " in capsys.readouterr().err


def test_a_file_that_cannot_be_is_code_2_before_anything_runs(folder):
    (folder / "space.yaml").write_text("task: train:build\nmetric: {name: val_loss}\nrun_cap: 1\n")
    result = CliRunner().invoke(main, ["sweep", "space.yaml", "--log", "."])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--log" in result.stderr
    assert "is a folder" in result.stderr
