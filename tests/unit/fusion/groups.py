"""What the tests of groups share: tasks in float64, and a group run without a pool."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from hydra_tune import TrainTask, train_plain
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.fusion.group.group_trial import GroupTrial
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.group.slot import GroupSlot
from hydra_tune.fusion.matching.fusion_key import fusion_key
from hydra_tune.memory.pager import Pager
from hydra_tune.shard.partition.budget import ShardPlanConstraints
from hydra_tune.shard.partition.plan_cache import PlanLibrary
from hydra_tune.train.loop.batch_units import PendingUnit, run_unit
from hydra_tune.train.trial import PendingReport
from tests.parity.models import CNN, GPT2, MLP, ViT, build

EPOCHS = {"mlp": 10, "cnn": 10, "vit": 5, "gpt2": 10}  # of 50 steps
KINDS = {"mlp": MLP, "cnn": CNN, "vit": ViT, "gpt2": partial(GPT2, attention_dropout=0.2)}


class Double(nn.Module):
    """A model in float64, on data in float32."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind().double()

    def forward(self, x):
        return self.inner(x.double() if x.is_floating_point() else x)


def double_task(name: str, **changes: Any) -> TrainTask:
    """One of the parity tasks in float64, with 50 steps and a schedule that steps after each of them."""
    arguments = {
        "model": partial(Double, KINDS[name]),
        "epochs": EPOCHS[name],
        "report_every": "epoch",
        "scheduler": partial(lr_scheduler.ExponentialLR, gamma=0.98),
        "scheduler_interval": "step",
    }
    return build(name, **(arguments | changes))


class Run:
    """A group run to its end on one device, answering reports by `answer(seat, step)`: None to go on.

    Also its desk: those of `later` come at the first moment at which there is a place for them and so many units have run.
    `most_kinds` is the largest number of kinds of batches that members wanted at once.
    """

    def __init__(
        self,
        tasks,
        *,
        num_shards=None,
        answer=None,
        before=None,
        waits=True,
        later=(),
        most=None,
        seats=None,
        back=None,
        device=None,
    ):
        self.device = device or CpuDevice(0, 1 << 30)
        budget = ShardPlanConstraints(
            budget_bytes=1 << 30, buffer_fraction=0.0, alignment=self.device.alignment, num_shards=num_shards
        )
        self.library = library = PlanLibrary(budget)
        self.pager = Pager(self.device, None)
        members = [MemberTrial(task, library, self.device) for task in tasks]
        self.keys = [fusion_key(member.task, *member.built()) for member in members]
        for member in members:
            member.identify()
        self.seats = seats or [GroupSlot(member, waits=waits) for member in members]
        self.waits = waits
        self.later = list(later)
        self.gone: list[GroupSlot] = []
        self.back = back
        self.all_ended: list[GroupSlot] = []
        self.units: list[str] = []
        self.sizes: list[int] = []
        self.most_kinds = 0
        self.trial = GroupTrial(list(self.seats), GroupPlanFactory(library), library, self.device, self, most=most)
        choose = self.trial.buckets.next
        self.trial.buckets.next = lambda kinds: self._choose(choose, kinds)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            while (step := self.trial.advance()) is not None:
                if isinstance(step, PendingReport):
                    self._answer(answer)
                    continue
                assert isinstance(step, PendingUnit)
                if before is not None:
                    before(self, step)
                self.units.append(step.kind)
                self.sizes.append(len(self.trial.seats))
                self.trial.finished(step, run_unit(step, self.device, self.pager, None))
        finally:
            torch.set_num_threads(threads)
            self.trial.close(keep=False)
            self.device.close()

    # Its desk.

    def ended(self, seat):
        self.all_ended.append(seat)

    def reported(self, seat):
        """Answered when the group waits."""

    def left(self, seat):
        self.gone.append(seat)

    def waiting(self):
        due = sum(at <= len(self.units) for at, _ in self.later)
        return due + (self.back is not None and bool(self.gone) and self.back <= len(self.units))

    def joining(self, free, *, ends):
        coming = []
        if self.back is not None and self.gone and (ends or self.back <= len(self.units)) and free:
            seat = self.gone.pop()
            seat.is_paused = False
            coming.append(seat)
        while self.later and len(coming) < free and (ends or self.later[0][0] <= len(self.units)):
            seat = GroupSlot(MemberTrial(self.later.pop(0)[1], self.library, self.device), waits=self.waits)
            self.seats.append(seat)
            coming.append(seat)
        return coming

    def make_ready(self, size):
        self.trial.make_ready(size)
        return True

    def _choose(self, choose, kinds):
        self.most_kinds = max(self.most_kinds, len(kinds))
        return choose(kinds)

    def _answer(self, answer):
        for index, seat in enumerate(self.seats):
            if seat.is_waiting:
                seat.stop = None if answer is None else answer(index, seat.wants.step)
                seat.is_answered = True

    def weights(self, index):
        return {name: tensor.detach() for name, tensor in self.seats[index].module.state_dict().items()}


def assert_as_plain(run, index, task, rtol=1e-9, report=None):
    """A member's history, weights, buffers and optimizer state are those of the plain loop."""
    plain = train_plain(task, report)
    seat = run.seats[index]
    assert seat.status == plain.status
    assert len(seat.member.history) == len(plain.history)
    for found, expected in zip(seat.member.history, plain.history, strict=True):
        for name in expected.keys() - {"seconds"}:
            assert abs(found[name] - expected[name]) <= rtol * max(abs(expected[name]), 1e-3), name
    if seat.status != "completed":
        return
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(run.weights(index)[name], expected, rtol=rtol, atol=rtol * 1e-3)
    own, other = seat.optimizer.state_dict(), plain.optimizer_state_dict()
    assert own["param_groups"] == other["param_groups"]
    assert own["state"].keys() == other["state"].keys()
    for key, entries in other["state"].items():
        for name, value in entries.items():
            torch.testing.assert_close(own["state"][key][name], value, rtol=1e-8, atol=1e-12)
