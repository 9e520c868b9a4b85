"""What the tests of the cutting layers share: a task around a model, and everything the library makes of it, step by step."""

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune.shard.analysis.graph_analysis import GraphAnalysis, analyse
from hydra_tune.shard.capture.batch import flatten
from hydra_tune.shard.capture.step_capture import CapturedStepGraph, StateSpec, capture, named_state, state_specs
from hydra_tune.shard.cost.pilot import ShardPilot
from hydra_tune.shard.cost.update_pilot import optimizer_pilot
from hydra_tune.shard.partition.partitioner import NumShards, ShardPartitioner, _DoesNotFitError
from hydra_tune.shard.partition.plan import ShardPlan, build_plan
from hydra_tune.task import TrainTask
from hydra_tune.train.data.handles import make_loader
from tests.parity.models import build

SGD = partial(torch.optim.SGD, lr=0.1)


def vectors(rows: int = 4, width: int = 8) -> tuple[Tensor, Tensor]:
    """A batch of inputs and targets of the same width."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def task_of(model: nn.Module, **changes: Any) -> TrainTask:
    """A task that "builds" this very model; regression with SGD unless said otherwise."""
    arguments: dict[str, Any] = {
        "model": lambda: model,
        "optimizer": SGD,
        "train": lambda: [vectors()],
        "loss": functional.mse_loss,
    }
    if "step" in changes:
        del arguments["loss"]
    return TrainTask(**(arguments | changes))


def first_batch(task: TrainTask) -> Any:
    """A batch of the task's own data."""
    with seeded(0):
        return next(iter(make_loader(task.train, task.batch_size, shuffle=True)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's default generator seeded, and put back afterwards."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A captured step and what is known of it."""

    task: TrainTask
    model: nn.Module
    batch: Any
    captured: CapturedStepGraph
    specs: dict[str, StateSpec]
    analysis: GraphAnalysis
    pilot: ShardPilot

    @property
    def end(self) -> int:
        """Position after the last node."""
        return len(self.captured.nodes)

    @property
    def state(self) -> dict[str, Tensor]:
        """The model's parameters and buffers."""
        return dict(named_state(self.model))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The batch's tensors."""
        return flatten(self.batch).tensors

    def plan(self, *cuts: int) -> ShardPlan:
        """The step cut at these positions."""
        return build_plan(self.captured, self.analysis, self.pilot, [0, *cuts, self.end])

    def spread(self, num_shards: int) -> list[int]:
        """Allowed cuts at about equal distance."""
        return self.partition(1 << 40, num_shards)[1:-1]

    def partition(
        self, budget_bytes: int, num_shards: NumShards = None, *, buffer_bytes: int = 0, boundaries: Sequence[int] = ()
    ) -> list[int]:
        """Where the partitioner cuts."""
        return self.partitioner(budget_bytes, buffer_bytes).partition(num_shards, boundaries)

    def partitioner(
        self, budget_bytes: int, buffer_bytes: int = 0, kind: type[ShardPartitioner] = ShardPartitioner
    ) -> ShardPartitioner:
        """A partitioner of this step."""
        return kind(self.pilot, self.analysis, self.end, budget_bytes=budget_bytes, buffer_bytes=buffer_bytes)

    def position(self, operator: str, occurrence: int = 0) -> int:
        """Position of a node by its operator, e.g. "aten.add_.Tensor"."""
        found = [i for i, node in enumerate(self.captured.nodes) if str(node.target) == operator]
        return found[occurrence]


class Bisection(ShardPartitioner):
    """Measures each candidate as a whole, and bisects."""

    def __init__(self, pilot: ShardPilot, *args: Any, **options: Any) -> None:
        super().__init__(pilot, *args, **options)
        self.args, self.pilot = args, pilot

    def _cost(self, first, last):
        return self.pilot.cost(first, last)

    def _furthest(self, first, cuts):
        low, high = -1, len(cuts) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(first, cuts[middle]) else (low, middle - 1)
        return cuts[low] if low >= 0 else None

    def _would_do(self, budget_bytes, num_shards, boundaries):
        buffer_bytes = budget_bytes - budget_bytes * self._capacity // self._budget
        smaller = Bisection(self.pilot, *self.args, budget_bytes=budget_bytes, buffer_bytes=buffer_bytes)
        with suppress(_DoesNotFitError):
            smaller._partition(num_shards, boundaries)
            return True
        return False


@functools.cache
def parity_bench(name: str, mode: str = "train") -> Bench:
    """One of the parity models, made once; for tests that leave it as it is but for its buffers."""
    return bench(build(name), mode=mode)


def bench(task: TrainTask, batch: Any = None, *, mode: str = "train", alignment: int = 1) -> Bench:
    """Capture, analyse and pilot a task's step."""
    batch = first_batch(task) if batch is None else batch
    model = task.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # export's advice, which the library silences too
        captured = capture(task, model, batch, mode)
    return analysed(task, model, batch, captured, alignment)


def analysed(task: TrainTask, model: nn.Module, batch: Any, captured: CapturedStepGraph, alignment: int = 1) -> Bench:
    """What follows from a captured step."""
    specs = state_specs(model)
    tensors = flatten(batch).tensors
    analysis = analyse(captured, specs, tensors)
    optimizer = task.optimizer(list(model.parameters()))
    update = optimizer_pilot(optimizer, dict(model.named_parameters()), specs, alignment=alignment)
    pilot = ShardPilot(
        captured, analysis, specs, tensors, update=update if captured.mode == "train" else None, alignment=alignment
    )
    return Bench(task=task, model=model, batch=batch, captured=captured, specs=specs, analysis=analysis, pilot=pilot)
