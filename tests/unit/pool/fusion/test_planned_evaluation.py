"""A planned group has more members than a device can evaluate at once, and evaluates them one part after the other."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import train_plain
from hydra_tune.fusion.group.slot_table import SlotTable
from tests.unit.pool.fusion.test_planned_steps import CNN, X, Y, steps, task  # noqa: F401 - a fixture
from tests.unit.pool.tasks import running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]


def double():
    return CNN().double()


def tasks_of(**changes):
    data = TensorDataset(X.double(), Y)
    own = {"model": double, "train": data, "validate": DataLoader(data, batch_size=20)}
    return [task(seed, **own, **changes) for seed in range(4)]


@pytest.fixture
def parts(monkeypatch):
    """Slots that were evaluated at once."""
    found = []
    part = SlotTable.part

    def noted(self, slots):
        found.append(slots)
        return part(self, slots)

    monkeypatch.setattr(SlotTable, "part", noted)
    return found


def assert_as_plain(results, tasks):
    for result, described in zip(results, tasks, strict=True):
        assert result.error is None
        plain = train_plain(described)
        for mine, expected in zip(result.history, plain.history, strict=True):
            names = expected.keys() - {"seconds"}
            assert {name: mine[name] for name in names} == pytest.approx(
                {name: expected[name] for name in names}, rel=1e-9
            )
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_planned_group_evaluated_in_parts_has_the_metrics_of_the_plain_loop(steps, parts):  # noqa: F811
    tasks = tasks_of()
    with running(fusion="on", fusion_size=4, fusion_planner="on", device_memory="780KiB") as pool:
        results = pool.run(tasks)
        device = pool.stats().devices["cpu:0"]
    assert {result.group_size for result in results} == {4}
    assert set(steps) == {4}
    assert parts == [range(2), range(2, 4)] * 2  # an evaluation of one batch in each of two epochs
    assert device.peak_bytes <= device.budget_bytes
    assert_as_plain(results, tasks)


@pytest.mark.cases(1 / 3)
def test_a_group_without_a_plan_is_evaluated_in_parts_as_well(parts):
    optimizer = partial(torch.optim.SGD, lr=1e-2)
    tasks = tasks_of(optimizer=optimizer, batch_size=2)
    with running(fusion="on", fusion_planner="off", device_memory="450KiB") as pool:
        results = pool.run(tasks)
        device = pool.stats().devices["cpu:0"]
    assert {result.group_size for result in results} == {4}
    assert parts
    assert device.peak_bytes <= device.budget_bytes
    assert_as_plain(results, tasks)
