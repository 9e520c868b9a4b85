"""The picture of a timeline."""

import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.observe.trace.gantt import colours_of
from hydra_tune.simulate import Scenario, SimulatedDevice, SimulatedTrial, simulate, training_step
from hydra_tune.simulate.plot import plot_timeline


def play(num_trials, timeline):
    trials = tuple(
        SimulatedTrial(name=f"trial{number}", step=training_step([1.0, 1.0], [2.0, 2.0]), shard_bytes=(0, 0), steps=2)
        for number in range(num_trials)
    )
    return simulate(Scenario(trials=trials, devices=(SimulatedDevice(name="device0"),)), timeline=timeline)


def test_trials_have_colours_of_their_own():
    colours = colours_of(bar.job for bar in play(12, 1000).timeline)
    assert len(colours) == len(set(colours.values())) == 12
    assert len(set(colours_of(map(str, range(300))).values())) == 300


def test_without_a_timeline_there_is_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="timeline=2000"):
        plot_timeline(play(1, 0), tmp_path / "x.png")
    plot_timeline(play(1, 100), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def title(monkeypatch, result):
    """The title of the picture of a simulation, which is not drawn."""
    charts = []
    monkeypatch.setattr("hydra_tune.simulate.plot.draw", lambda chart, _: charts.append(chart))
    plot_timeline(result, None)
    return charts[0].title


def test_the_title_says_which_part_of_the_simulation_the_picture_shows(monkeypatch):
    """On one device two trials take 20 seconds."""
    assert title(monkeypatch, play(2, 1000)) == "lrtf: makespan 20.00 s, utilisation 100.0%"
    cut = title(monkeypatch, play(2, 3))
    assert cut.startswith("lrtf: makespan 20.00 s, utilisation 100.0% (shown: the first ")
    shown = float(cut.removesuffix(" s)").rpartition(" ")[2])
    assert 0 < shown == max(bar.end_seconds for bar in play(2, 3).timeline) < 20


def test_the_title_says_how_many_of_many_devices_the_picture_shows(monkeypatch):
    trial = SimulatedTrial(name="trial", step=training_step([1.0], [2.0]), shard_bytes=(0,), steps=2)
    devices = tuple(SimulatedDevice(name=f"device{number}") for number in range(70))
    result = simulate(Scenario(trials=(trial,), devices=devices), timeline=1000)
    assert title(monkeypatch, result).endswith("(shown: 64 of 70 devices)")
