"""The paper's Figures 3 and 9 of sub-arrays that can be counted on fingers, and as they are drawn."""

import io
import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from hydra_tune.cli.dry_run.plan_figures import figure_lines, print_figures
from hydra_tune.planner.cost.latency import times_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.profile.profiler import copied_at
from hydra_tune.planner.search.figures import figures_of
from hydra_tune.planner.search.portfolio import MARGIN
from tests.unit.planner.hand import chain


def array(size):
    return chain(6, num_bytes=100 * size, copy=0.5, static=50 * size)


def figures(num_trials=4, device_bytes=1500, of=array):
    return figures_of(of, num_trials, device_bytes, is_duplex=True)


def test_maps_lie_idle_from_their_last_use_in_the_forward_to_the_first_in_the_backward():
    found = {one.name: one for one in figures().maps}
    assert [one.name for one in figures().maps] == [f"z{i}" for i in range(6)]
    assert found["z0"].inactive_seconds == 10.0  # z2 to z5 and the loss, and g, g4 to g1
    assert (found["z0"].in_seconds, found["z0"].out_seconds, found["z0"].num_bytes) == (0.5, 0.0, 100)
    assert found["z1"].recompute_seconds == 1.0


def test_the_curve_rises_in_the_forward_and_falls_in_the_backward():
    curve = figures().curve
    forward = [one.num_bytes for one in curve if not one.is_backward]
    backward = [one.num_bytes for one in curve if one.is_backward]
    assert forward == [150, 250, 350, 450, 550, 650, 650]
    assert backward == [650, 550, 450, 350, 250, 150]
    assert [one.seconds for one in curve] == [float(second) for second in range(1, 14)]


def test_the_fused_peak_grows_with_the_number_of_trials():
    assert [(one.num_trials, one.static_bytes, one.peak_bytes) for one in figures().peaks] == [
        (count, 50 * count, 650 * count) for count in (1, 2, 3, 4)
    ]
    assert [one.num_trials for one in figures(9, 100_000).peaks] == [1, 2, 4, 8, 9]


def test_each_system_says_where_its_time_goes():
    found = figures()
    assert {"HFTA", "Capuchin on HFTA", "μ-TWO"} <= {one.stands_for for one in found.systems}
    for one in found.systems:
        assert one.seconds == pytest.approx(one.compute_seconds + one.recompute_seconds + one.stall_seconds)
        assert one.overlapped_seconds <= one.copy_seconds
        assert sum(map(sum, one.sub_arrays)) == 4
        assert one.fits == (one.peak_bytes <= int(1500 * (1 - MARGIN)))
    fused = next(one for one in found.systems if one.name == "full fusion")
    assert fused.compute_seconds == times_of(undecided((array(4),), 1 << 40), is_duplex=True).seconds
    assert fused.recompute_seconds or fused.copy_seconds
    assert [one.is_chosen for one in found.systems] == [True] + [False] * (len(found.systems) - 1)


def test_where_all_fit_they_are_compared_in_less():
    found = figures(device_bytes=100_000)
    assert found.fits
    assert found.limit_bytes * (1 - MARGIN) == pytest.approx(200 + 0.6 * 2400, abs=2)
    assert not figures().fits
    assert figures().limit_bytes == 1500


def test_nothing_is_chosen_where_nothing_fits():
    found = figures(device_bytes=200)
    assert not any(one.is_chosen or one.fits for one in found.systems)


def test_all_of_it_is_plain_data():
    unswappable = replace(array(1), in_seconds={}, out_seconds={})
    found = figures(1, 500, of=lambda _: unswappable)
    text = json.dumps(asdict(found), allow_nan=False)
    assert json.loads(text)["maps"][0]["in_seconds"] is None


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("num_trials", [1, 4])
def test_no_line_is_wider_than_the_terminal(width, num_trials):
    lines = figure_lines(figures(num_trials, 9000, of=lambda size: copied_at(array(size), 1e3)), width)
    end = next(at for at, line in enumerate(lines) if "milliseconds of a step of all" in line)
    assert max(map(len, lines[:end])) <= max(width, 72)  # words
    assert max(map(len, lines)) <= max(width, 80)
    assert any("█" in line for line in lines)


def test_a_curve_is_as_high_as_what_it_shows():
    lines = figure_lines(figures(), 80)
    top = next(line for line in lines if line.strip().startswith("600 B │"))
    assert top.count("█") < lines[lines.index(top) + 7].count("█")
    begin = next(at for at, line in enumerate(lines) if "by trials fused" in line) + 2
    bars = [line.count("█") for line in lines[begin : begin + 4]]
    assert bars == sorted(set(bars))


def test_terminals_of_ascii_alone_are_given_that():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_figures(Console(file=stream, width=80), [(0, _forecast(figures=figures())), (3, _forecast(why="it is so"))])
    stream.flush()
    shown = stream.buffer.getvalue().decode("ascii")
    assert "#" in shown
    assert "trial 3 cannot be planned in less memory: it is so" in shown


class _Fusion:
    def __init__(self, figures, why):
        self.figures, self.why_no_figures = figures, why


class _Trial:
    def __init__(self, fusion):
        self.fusion = fusion


class _Forecast:
    def __init__(self, trial):
        self.trials = (trial,)


def _forecast(figures=None, why=None):
    return _Forecast(_Trial(_Fusion(figures, why)))
