"""The tables of `hydra-tune plan` show every figure whole, however narrow the terminal."""

import io
import re

import pytest
import torch
from rich.console import Console

from hydra_tune.cli.dry_run.plan_table import ConfigurationForecast, print_planned
from hydra_tune.quantities import format_bytes, format_bytes_up
from tests.integration.test_forecast import noisy
from tests.unit.pool.tasks import running


@pytest.fixture(scope="module")
def forecast():
    """Bytes of more kinds than 80 columns have room for."""
    with running(device_memory="260KiB", buffer_fraction=0.0) as pool:
        made = pool.plan([noisy(5, activations="keep", accumulate=2, max_grad_norm=1.0, optimizer=torch.optim.AdamW)])
    assert len(made.bytes_by_kind) >= 6
    return made


def printed(forecast, width):
    stream = io.StringIO()
    planned = [ConfigurationForecast(number=number, params={"lr": 0.1}, forecast=forecast) for number in (0, 111)]
    print_planned(Console(file=stream, width=width), planned)
    return stream.getvalue().split("trial 111: ")[1].splitlines()[1:]


def tables(lines):
    """First word of the table and heading, then cell by trial; columns are apart by their right ends."""
    found = {}
    for index, line in enumerate(lines):
        if not line.startswith(("trial", "moved")):
            continue
        names = [(match.group(), match.end()) for match in re.finditer(r"least budget|over \|W\||\S+", line)]
        for row in lines[index + 1 : index + 3]:
            start = 0
            for name, end in names:
                cell, start = row[start:end].strip(), end
                found.setdefault((line[:5], name), []).append(cell)
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_figure_is_cut(forecast, width):
    lines = printed(forecast, width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    found = tables(lines)
    (trial,) = forecast.trials
    for kind, nbytes in forecast.bytes_by_kind.items():
        assert found["moved", kind] == [format_bytes(nbytes)] * 2
    assert found["trial", "least budget"] == [format_bytes_up(trial.smallest_budget_bytes)] * 2
    assert found["trial", "|W|"] == [format_bytes(trial.parameter_bytes)] * 2
    assert found["moved", "over |W|"] == [f"{forecast.parameter_traffic:.2f}"] * 2
    assert set(found["trial", "trial"]) == {"0", "111"}


def test_a_wide_terminal_has_two_tables_and_a_narrow_one_more(forecast):
    starts = [sum(line.startswith(("trial", "moved")) for line in printed(forecast, width)) for width in (200, 60, 30)]
    assert starts[0] == 2
    assert starts[0] < starts[1] < starts[2]
