"""Trials that wait are divided as the portfolio divides them, into three groups and more, and train as they do unfused."""

import logging
import re
from collections import Counter
from dataclasses import replace

import pytest

from hydra_tune.fusion.runtime import planned_size_search
from hydra_tune.planner.profile.profiler import SubArrayProfiler
from tests.unit.pool.fusion.test_planned_steps import task
from tests.unit.pool.tasks import running

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("captured_once")]

TRIALS, MEMORY = 7, "280KiB"  # one trial needs 142 KiB as it is, and a planned group of four 295


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Each operator takes as long as any other, and so long that no measured step proves slower, which would end its plan."""
    measured = SubArrayProfiler.array

    def array(self, name, step, device):
        found = measured(self, name, step, device)
        return replace(
            found,
            forward=tuple(replace(one, seconds=0.1) for one in found.forward),
            backward=tuple(replace(one, seconds=0.1) for one in found.backward),
            in_seconds=dict.fromkeys(found.in_seconds, 1e-3),
            out_seconds=dict.fromkeys(found.out_seconds, 1e-3),
            at_once=frozenset(),
            hand_seconds=1e-4,
        )

    monkeypatch.setattr(SubArrayProfiler, "array", array)
    monkeypatch.setattr(planned_size_search, "COST_SHARE", float("inf"))


@pytest.mark.slow
def test_the_pool_trains_the_three_groups_that_the_portfolio_names(caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    tasks = [task(seed) for seed in range(TRIALS)]
    with running(fusion="on", fusion_size=TRIALS, fusion_planner="auto", device_memory=MEMORY) as pool:
        figures = pool.plan(tasks, profile=True).trials[0].fusion.figures
        results = pool.run(tasks)
        device = pool.stats().devices["cpu:0"]
    best = next(system for system in figures.systems if system.is_chosen)
    sizes = Counter(size for part in best.sub_arrays for size in part)
    assert figures.num_trials == TRIALS
    assert sizes.total() >= 3
    (told,) = [line for line in caplog.messages if line.startswith("predicted: jobs of")]
    named = Counter[int]()
    for count, part in re.findall(r"(\d+) x \((.*?)\)", told):
        named.update({size: int(count) * part.split(" + ").count(str(size)) for size in map(int, part.split(" + "))})
    assert named.total() == sizes.total()
    assert [result.error for result in results] == [None] * TRIALS
    trained = Counter(result.group_size for result in results)
    # The last trials of a partition may be ready at different times, and then run by themselves.
    by_plan = Counter({size: size * count for size, count in named.items()})
    assert trained[max(named)] == by_plan[max(named)]
    assert set(trained) <= {1, *named}
    assert trained.total() - trained[1] >= TRIALS - 2
    assert device.peak_bytes <= device.budget_bytes
    with running(fusion="off") as pool:
        alone = pool.run(tasks)
    for one, other in zip(results, alone, strict=True):
        assert one.history[-1]["val_loss"] == pytest.approx(other.history[-1]["val_loss"], rel=1e-4)
