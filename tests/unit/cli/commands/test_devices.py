"""`hydra-tune devices` says what there is, as a table and as JSON."""

import io
import json

import pytest
from click.testing import CliRunner
from rich.console import Console

from hydra_tune.cli import main
from hydra_tune.cli.commands.devices import print_survey
from hydra_tune.devices.hardware.link import LinkRates
from hydra_tune.devices.hardware.survey import DeviceSurvey, PeerPath, SurveyedDevice


def ask(*arguments, **environment):
    return CliRunner().invoke(main, ["devices", *arguments], env=environment, catch_exceptions=False)


def test_the_table_is_readable_at_80_columns():
    done = ask("--devices", "cpu:2", "--device-memory", "4MiB", COLUMNS="80")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:2] == ["device", "model"]
    row = next(line for line in lines if line.startswith("cpu:1"))
    assert " 4.0 MiB " in row
    assert row.count("B/s") == 2


def test_without_measuring_there_are_no_rates():
    found = json.loads(ask("--devices", "cpu:2", "--device-memory", "4MiB", "--no-measure", "--json").stdout)
    assert [(device["name"], device["budget_bytes"], device["rates"]) for device in found["devices"]] == [
        ("cpu:0", 4 << 20, None),
        ("cpu:1", 4 << 20, None),
    ]
    assert all(found["notes"])


def test_json_has_the_rates():
    found = json.loads(ask("--devices", "cpu:1", "--device-memory", "4MiB", "--json").stdout)
    assert set(found["devices"][0]["rates"]) == {"to_device", "to_host", "both_ways"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--devices", "tpu"], "devices must be 'auto'"), (["--devices", "cpu:2", "--device-memory", "1PB"], "must be")],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    done = ask(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(("width", "num_rates"), [(80, 2), (160, 3)])
def test_gpus_fit_with_nothing_cut(width, num_rates):
    gpu = SurveyedDevice(
        name="cuda:0", model="NVIDIA H100 [80GB] HBM3", free_bytes=79 << 30, total_bytes=80 << 30, budget_bytes=72 << 30,
        compute_capability="9.0", rates=LinkRates(to_device=5.4e10, to_host=5.5e10, both_ways=1.1e11),
    )  # fmt: skip
    crossings = (
        PeerPath(source="cuda:0", target="cuda:1", is_direct=True, bytes_per_second=3.5e11),
        PeerPath(source="cuda:1", target="cuda:0", is_direct=False, bytes_per_second=None),
    )
    found = DeviceSurvey(devices=(gpu,), crossings=crossings, driver="570.1", notes=())
    console = Console(file=io.StringIO(), width=width)
    print_survey(console, found.to_json())
    text = console.file.getvalue()
    for part in ("H100", "[80GB]", "HBM3", "79.0 GiB", "80.0 GiB", "72.0 GiB", "9.0", "50.3 GiB/s", "driver 570.1"):
        assert part in text
    assert "cuda:0 cuda:1               yes 326.0 GiB/s" in text
    assert "no, over the host" in text
    assert max(map(len, text.splitlines())) <= width
    assert next(line for line in text.splitlines() if "H100" in line).count("GiB/s") == num_rates
