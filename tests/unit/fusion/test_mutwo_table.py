"""Rows of μ-TWO's comparison outlast a run that is cut off, and are told against the two that they are compared with."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SETTING = {"device": "cpu", "steps": 10}


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("mutwo_table")
    sys.modules.pop("mutwo_table", None)


def row_of(table, trials=4, *, has_hfta=True):
    hfta = table.Ran("fits, one after another", [[2], [2]], 0.009, 0.012, 0.013, 1 << 20)
    own = table.Ran("interleaved", [[2, 2]], 0.010, 0.008, 0.016, 2 << 20)
    ran = [hfta, own] if has_hfta else [own]
    names = {one.name: number for number, one in enumerate(ran)} | {"swaps alone": len(ran) - 1}
    asked = table.Row("vit", trials, 2.0, None, demand=2.0, limit_bytes=3 << 20, kept=2, held=4)
    asked.ran, asked.names, asked.chosen = ran, names, len(ran) - 1
    return asked


def test_a_row_tells_speedups_over_both_and_hours_of_ten_thousand_iterations(table):
    cells = dict(zip(table.HEADS, row_of(table).cells(), strict=True))
    assert (cells["limit"], cells["at once: kept / planned"]) == ("3 MiB", "2 / 4")
    assert (cells["as HFTA"], cells["full fusion"]) == ("12.0 ms", "does not fit")
    assert cells["chosen"] == "8.0 ms (interleaved, 2+2)"
    assert (cells["over HFTA"], cells["over full fusion"], cells["chosen / fastest"]) == ("1.50", "-", "1.00")
    assert cells["predicted / measured (by the clock)"] == "1.25 (0.62)"
    assert cells["hours of 10,000: HFTA / full fusion / chosen"] == "0.033 / - / 0.022"


def test_a_demand_that_no_plan_meets_is_named_beside_the_one_that_was_compared(table):
    row = row_of(table, has_hfta=False)
    row.demand, row.wanted_demand, row.why = 2.9, 6.0, "no plan needs as little"
    cells = dict(zip(table.HEADS, row.cells(), strict=True))
    assert (cells["demand"], cells["as HFTA"], cells["over HFTA"]) == ("2.9 (for 6)", "does not fit", "-")
    found = table.Table(SETTING)
    found.add(row)
    assert "* vit, 4 trials, 6: no plan needs as little" in found.markdown()


def test_rows_are_kept_as_they_come_and_not_run_again(table, tmp_path):
    as_json, as_markdown = tmp_path / "rows" / "found.json", tmp_path / "found.md"
    before = table.Table(SETTING, as_json, as_markdown)
    before.add(row_of(table, 2))
    before.add(row_of(table, 4))
    after = table.Table(SETTING, as_json, as_markdown)
    assert after.rows == before.rows
    assert [after.has(table.Row("vit", trials, 2.0, None)) for trials in (2, 4, 8)] == [True, True, False]
    after.add(row_of(table, 8))
    assert len(json.loads(as_json.read_text())["rows"]) == 3
    lines = [line for line in as_markdown.read_text().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {len(table.HEADS) + 1}
    assert len(lines) == 2 + 3


def test_rows_that_were_measured_otherwise_are_not_mixed_with_new_ones(table, tmp_path):
    table.Table(SETTING, tmp_path / "found.json").add(row_of(table))
    with pytest.raises(SystemExit, match=r"found\.json has rows of .*'steps': 10.* give another file"):
        table.Table(SETTING | {"steps": 3}, tmp_path / "found.json")
    assert len(table.Table(SETTING, tmp_path / "found.json").rows) == 1


def test_what_is_not_planned_is_a_row_with_its_reason(table):
    row = table.Row("dlrm", 2, 6.0, None, why="not planned: it draws numbers")
    assert row.cells() == ["dlrm", "2", "6", *["-"] * (len(table.HEADS) - 3)]
