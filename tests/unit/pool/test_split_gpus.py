"""Steps of models that draw are split on devices whose generator trials have in turn, as GPUs have.

Those devices are of `tests/support/stand_in_gpu.py`. There a trial draws from another stream than a plain loop on the host, so
the reference is the trial on one device, batch after batch.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.nn import functional

from hydra_tune.pool.runtime import settings
from hydra_tune.train.parallel import batch_grouping
from hydra_tune.train.parallel.cost_model import DATA_PARALLEL, GROUPED, ONE_DEVICE, PIPELINED
from tests.parity.exact import differences, without_seconds
from tests.parity.test_splitting import accumulating, noisy, normed_and_dropped
from tests.support.parallel import PARALLEL
from tests.support.stand_in_gpu import StandInGpu
from tests.unit.pool.tasks import PATIENCE_SECONDS, mlp, one_batch, running, task

TASKS = {
    "dropout": partial(accumulating, model=noisy),
    "clipped": partial(accumulating, model=noisy, max_grad_norm=0.1),
    "left over": partial(accumulating, accumulate=3, model=noisy),
    "pieces": partial(accumulating, accumulate=1, split_batches=3, model=noisy, report_every=2),
    "normed and dropped": partial(accumulating, model=normed_and_dropped),
}
POOLS = {DATA_PARALLEL: (2, 1), PIPELINED: (3, 3), GROUPED: (1, 3)}


def opening(monkeypatch, kinds):
    monkeypatch.setattr(settings, "open_devices", lambda *_: [kind(i, 64 << 20) for i, kind in enumerate(kinds)])


def trained(described, way, cut, **options):
    """What came of it, the ways in which its steps were split, and on how many devices."""
    with running(num_shards=cut, **options) as pool:
        result = pool.submit(replace(described, parallel=PARALLEL[way])).result(PATIENCE_SECONDS)
        stats = pool.stats()
    if result.error is not None:
        raise result.error
    found = {"history": without_seconds(result.history), "state": dict(result.state_dict())}
    return found, set(stats.steps_by_way), sum(device.units > 0 for device in stats.devices.values())


@cache
def in_order(name, cut):
    with pytest.MonkeyPatch.context() as patch:
        opening(patch, [StandInGpu])
        patch.setattr(batch_grouping, "is_worth_it", lambda _: False)
        found, ways, _ = trained(TASKS[name](), None, cut)
    assert ways == {ONE_DEVICE}
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("way", "name"),
    [(way, name) for way in POOLS for name in TASKS if (way, name) != (DATA_PARALLEL, "normed and dropped")],
)
def test_a_split_step_draws_what_it_draws_batch_after_batch(way, name, monkeypatch):
    count, cut = POOLS[way]
    opening(monkeypatch, [StandInGpu] * count)
    monkeypatch.setattr(batch_grouping, "is_worth_it", lambda plan: way == GROUPED and len(plan.shards) > 1)
    found, ways, used = trained(TASKS[name](), way, cut)
    assert way in ways
    assert used == count
    assert list(differences(in_order(name, cut), found)) == []


class OtherGpu(StandInGpu):
    """Draws other numbers, as a GPU with fewer multiprocessors does."""


def test_among_devices_of_several_kinds_they_run_in_order(monkeypatch):
    """How far a batch moves the stream depends on the kind."""
    opening(monkeypatch, [StandInGpu, OtherGpu])
    monkeypatch.setattr(batch_grouping, "is_worth_it", lambda plan: len(plan.shards) > 1)
    found, ways, _ = trained(TASKS["dropout"](), None, 3)
    assert ways <= {ONE_DEVICE}
    assert list(differences(in_order("dropout", 3), found)) == []


class Langevin(torch.optim.SGD):
    """Adds noise to what it has updated."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


def test_an_optimizer_that_draws_draws_from_the_trials_stream_on_the_device(monkeypatch):
    """Which begins at the trial's seed, as the stream on the host does that the model is built with."""
    opening(monkeypatch, [StandInGpu])
    described = task(train=one_batch, optimizer=partial(Langevin, lr=0.1), epochs=3)
    found, _, _ = trained(described, None, 1)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(described.seed)
        module = mlp()
        optimizer = Langevin(module.parameters(), lr=0.1)
        torch.manual_seed(described.seed)
        for _ in range(3):
            for inputs, labels in one_batch():
                functional.cross_entropy(module(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert list(differences(dict(module.state_dict()), found["state"])) == []
