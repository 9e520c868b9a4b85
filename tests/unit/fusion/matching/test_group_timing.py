"""Steps are timed on copies: whoever asks is left as he was."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune import TrainTask
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.group.multi_step_unit import GroupRound
from hydra_tune.fusion.matching.fusion_key import fusion_key
from hydra_tune.fusion.matching.group_size_chooser import GroupSizeChooser
from hydra_tune.fusion.matching.group_timing import FusionBenchmark
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary

pytestmark = pytest.mark.timeout(120)

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 4


class Net(nn.Module):
    """Draws numbers and counts batches."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x):
        return self.inner(x)


def task(**changes):
    arguments = {
        "model": Net,
        "optimizer": partial(SGD, lr=0.1, momentum=0.9),
        "train": lambda: [(X[:8], Y[:8]), (X[8:], Y[8:])],
        "loss": functional.cross_entropy,
        "scheduler": partial(lr_scheduler.ExponentialLR, gamma=0.9),
        "epochs": 400,
    }
    return TrainTask(**(arguments | changes))


class Asking:
    """A trial that is about to train, and whoever times steps of it."""

    def __init__(self, described):
        self.device = CpuDevice(0, 1 << 30)
        self.library = PlanLibrary(ShardPlanConstraints(budget_bytes=1 << 30, buffer_fraction=0.0, alignment=64))
        self.member = MemberTrial(described, self.library, self.device)
        self.module, self.optimizer = self.member.built()
        with self.member.peek() as first_batches:
            self.wanted = first_batches["train"]

    def __enter__(self):
        self._threads = torch.get_num_threads()
        return self

    def __exit__(self, *error):
        torch.set_num_threads(self._threads)
        self.member.close(keep=False)
        self.device.close()

    @property
    def bench(self):
        return FusionBenchmark(self.member.task, self.module, self.wanted.batch, self.library, self.device)

    def choose(self, chooser, num_steps, most=16):
        key = fusion_key(self.member.task, self.module, self.optimizer)
        return chooser.choose(key, self.member, self.wanted, self.device, num_steps, most)

    def looks_like(self):
        """All that a trial could tell: weights, buffers, gradients, optimizer, streams, and its data."""
        state = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        grads = [None if p.grad is None else p.grad.clone() for p in self.module.parameters()]
        streams, feed = self.member.streams.state(), self.member._feed.states()
        tensors = [*state.values(), *grads, torch.get_rng_state(), X.clone(), streams.pop("torch")]
        return [None if tensor is None else tensor.tolist() for tensor in tensors], repr(
            (self.optimizer.state_dict(), streams, feed)
        )


def test_whoever_asks_is_left_as_he_was():
    with Asking(task()) as asking:
        before = asking.looks_like()
        bench = asking.bench
        assert bench.alone() > 0
        assert bench.together(3, GroupPlanFactory(asking.library)) > 0
        assert bench.drawing() > 0
        assert asking.looks_like() == before
        assert asking.member.progress.steps == 0
        assert asking.optimizer.param_groups[0]["lr"] == 0.1


def test_what_the_users_code_counts_is_put_back():
    counts, optimizers = {"passes": 0, "steps": 0, "rates": 0}, []

    def train():
        counts["passes"] += 1
        return [(X[:8], Y[:8])] * 40

    def after_step(module, optimizer, step):
        counts["steps"] += 1

    def scheduler(optimizer):
        counts["rates"] += 1
        return lr_scheduler.ExponentialLR(optimizer, gamma=0.9)

    def optimizer(parameters):
        optimizers.append(SGD(parameters, lr=0.1))
        return optimizers[-1]

    with Asking(task(train=train, after_step=after_step, scheduler=scheduler, optimizer=optimizer)) as asking:
        before, own = dict(counts), list(optimizers)
        asking.bench.alone()
        asking.bench.together(2, GroupPlanFactory(asking.library))
        asking.bench.drawing()
    assert counts == before
    assert optimizers == own


def test_of_a_unit_of_several_steps_each_counts(monkeypatch):
    with Asking(task()) as asking:
        made, trained = [], GroupRound._trained
        monkeypatch.setattr(GroupRound, "_trained", lambda *given: made.append(1) or trained(*given))
        monkeypatch.setattr(FusionBenchmark, "now", lambda _: float(len(made)))
        assert asking.bench.together(2, GroupPlanFactory(asking.library)) == 1.0
        assert len(made) > 2


def test_steps_with_the_weights_of_their_batches_are_timed():
    def weighted(module, batch, total):
        x, y = batch
        return torch.nn.functional.cross_entropy(module(x), y, reduction="sum") / total

    with Asking(task(loss=None, step=weighted, loss_weight=lambda batch: len(batch[1]))) as asking:
        assert asking.bench.alone() > 0
        assert asking.bench.together(2, GroupPlanFactory(asking.library)) > 0


def test_a_loaders_own_processes_are_left_alone():
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, num_workers=1)
    with Asking(task()) as asking:
        bench = FusionBenchmark(task(train=loader), asking.module, asking.wanted.batch, asking.library, asking.device)
        assert bench.drawing() == 0.0


def test_few_steps_are_not_worth_finding_out(monkeypatch):
    monkeypatch.setattr(FusionBenchmark, "alone", lambda _: pytest.fail("a step was timed"))
    with Asking(task()) as asking:
        choice = asking.choose(GroupSizeChooser(asking.library), [20.0] * 10)
    assert choice.size == 1
    assert "200 optimizer steps" in choice.why


def test_what_is_known_is_not_timed_again_and_a_refusal_is_remembered(monkeypatch, caplog):
    timed = []
    monkeypatch.setattr(FusionBenchmark, "alone", lambda _: timed.append(1) or 1.0)
    monkeypatch.setattr(FusionBenchmark, "together", lambda _bench, count, _plans: timed.append(count) or float(count))
    with Asking(task()) as asking, caplog.at_level("INFO", "hydra_tune.fusion"):
        chooser = GroupSizeChooser(asking.library)
        for _ in range(2):
            choice = asking.choose(chooser, [10_000.0] * 12, most=8)
            assert choice.size == 1
        assert timed == [1, 8, 4]
        key = fusion_key(asking.member.task, asking.module, asking.optimizer)
        with pytest.raises(UnfusableError, match="found before"):
            chooser.refuse(key, 120_000, 8)
        chooser.refuse(key, 120_001, 8)
        chooser.refuse(key, 120_000, 9)  # more trials than were timed may gain
        chooser.refuse("another", 400, 8)
        with pytest.raises(UnfusableError, match="399 optimizer steps in all are too few"):
            chooser.refuse("another", 399, 8)
    assert "1.00 s alone" in caplog.text


def test_what_cannot_be_timed_is_not_fused(monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(FusionBenchmark, "alone", lambda _: 1.0)  # long enough on any machine for groups to be timed
    monkeypatch.setattr(FusionBenchmark, "together", broken)
    with Asking(task()) as asking, caplog.at_level("INFO", "hydra_tune.fusion"):
        choice = asking.choose(GroupSizeChooser(asking.library), [10_000.0] * 4)
    assert choice.size == 1
    assert "out of memory" in choice.why


def test_sizes_timed_before_a_failure_still_count(monkeypatch):
    timed = []

    def together(_bench, count, _plans):
        timed.append(count)
        if len(timed) > 1:
            raise RuntimeError("out of memory")
        return 0.1 * count

    monkeypatch.setattr(FusionBenchmark, "alone", lambda _: 1.0)
    monkeypatch.setattr(FusionBenchmark, "together", together)
    with Asking(task()) as asking:
        choice = asking.choose(GroupSizeChooser(asking.library), [250.0] * 64, most=64)
    assert timed == [32, 64]
    assert choice.size == 32
