"""Batches of an optimizer step side by side, on as many devices as offer to run units.

`ParallelStep` is the pool's view, for every way of splitting batches: `JobState` (`pool/runtime/job_state.py`) asks for
the units due at the start, and for the units due after each unit. `DataParallelStep` is the first way: each batch goes
through its units in order, from gradients of zero, on any free device. When a batch's backward is over and the gradients
of all earlier batches are summed, the batch's own gradients are added. So every sum is made in the order of the batches, as
in a plain loop, and the result has the same bits on one device and on many. The other ways, in `grouped_data_parallel.py`
and `pipeline_parallel.py`, derive from `QueuedParallelStep` (`ordered_queues.py`).

`OptimizerStep` (`train/loop/optimizer_step.py`) makes the `ParallelStep`, yields the step to the pool, and takes the sums
(`result`) or closes the step afterwards.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from hydra_tune.errors import BadLossError
from hydra_tune.memory.block import BlockTensorView
from hydra_tune.memory.block_release import drop
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.parallel.parallel_batch import ParallelBatch
from hydra_tune.train.state.replicas import ParameterReplicas

_DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelUnit:
    """A due unit.

    Attributes:
        rank: place of the batch within the parallel step; a batch has at most one unit due.
        near: the preferred device; None: any.
    """

    rank: int
    pending: PendingUnit
    near: str | None = None


class ParallelStep(ABC):
    """Batches under way side by side.

    `start` and `finished` may be called from any thread, and run `_first` and `_after` under the step's lock. `result` and
    `close` take no lock: no unit may be running.

    Args:
        lanes: the batches in order.
        earlier: sums of the step's earlier batches, by parameter name.
        width: largest number of batches under way at once.
        replicas: copies for the batches to read; closed with the step.
    """

    def __init__(
        self,
        lanes: Sequence[ParallelBatch],
        earlier: dict[str, BlockTensorView],
        width: int,
        replicas: ParameterReplicas,
    ) -> None:
        self._lanes = list(lanes)
        self._sum = dict(earlier)
        self._width = width
        self._replicas = replicas
        self._lock = threading.Lock()
        self._under_way = 0
        # No batch from this rank on runs any more: the batch of this rank has a bad loss, or no batch has the rank.
        self._end = len(self._lanes)
        self._error: BadLossError | None = None

    def start(self) -> list[ParallelUnit]:
        """Return the first units."""
        with self._lock:
            return self._counted(self._first())

    def finished(self, rank: int, device: str) -> tuple[list[ParallelUnit], bool]:
        """Record that a batch's unit has run on a device.

        Returns:
            The newly due units, in the subclass's order; and whether no unit is due or running any more, reported only once.
        """
        with self._lock:
            # Under the lock, because units of several batches end on several workers at once.
            self._under_way -= 1
            due_units = self._counted(self._after(rank, device))
            return due_units, not self._under_way

    def result(self) -> dict[str, BlockTensorView]:
        """Return the sums, by parameter name, once all batches have run.

        Raises:
            BadLossError: the error of the first batch with a loss that is not finite.
        """
        if self._error is not None:
            raise self._error
        sums, self._sum = self._sum, {}
        self.close()
        return sums

    def close(self) -> None:
        """Give up all values and copies; no unit of the step may be running."""
        for lane in self._lanes:
            lane.clear()
        for value in self._sum.values():
            drop(value.block)
        self._sum = {}
        self._replicas.close()

    def _counted(self, found: list[ParallelUnit]) -> list[ParallelUnit]:
        self._under_way += len(found)
        return found

    @abstractmethod
    def _first(self) -> list[ParallelUnit]:
        """Return the units due at the start."""

    @abstractmethod
    def _after(self, rank: int, device: str) -> list[ParallelUnit]:
        """Return the units due after a unit of the batch."""


class DataParallelStep(ParallelStep):
    """Whole batches, each preferably on one device; the gradients of `names` are summed batch by batch."""

    def __init__(
        self,
        lanes: Sequence[ParallelBatch],
        names: Sequence[str],
        earlier: dict[str, BlockTensorView],
        width: int,
        replicas: ParameterReplicas,
    ) -> None:
        super().__init__(lanes, earlier, width, replicas)
        self._names = list(names)
        self._programs = [self._program(rank) for rank in range(len(lanes))]
        self._started = 0
        self._summed = 0
        self._waiting: set[int] = set()

    def close(self) -> None:
        """Close the programs of all batches, then the step."""
        for program in self._programs:
            program.close()
        super().close()

    def _first(self) -> list[ParallelUnit]:
        due_units: list[ParallelUnit] = []
        # Counted from the last summed batch: until its turn, a finished batch keeps its gradients on the host.
        while self._started < min(self._end, self._summed + self._width):
            self._started += 1
            due_units += self._go_on(self._started - 1, None)
        return due_units

    def _after(self, rank: int, device: str) -> list[ParallelUnit]:
        own_units = self._go_on(rank, device)
        return [*own_units, *self._first()]

    def _program(self, rank: int) -> Generator[PendingUnit | None, None, None]:
        """Yield a batch's own units, then None once, then the units that add to the sums of earlier batches."""
        lane = self._lanes[rank]
        yield from lane.units(is_last=False)
        lane.check_draws()
        yield None
        yield from lane.sums(self._sum)
        self._sum = lane.give_away(self._names)
        lane.clear()

    def _go_on(self, rank: int, device: str | None) -> list[ParallelUnit]:
        """Advance a batch to its next unit or to the wait for earlier sums; a finished batch releases the next."""
        while rank < self._end:
            try:
                pending = next(self._programs[rank], _DONE)
            except BadLossError as error:
                self._end, self._error = rank, error
                break
            if isinstance(pending, PendingUnit):
                return [ParallelUnit(rank=rank, pending=pending, near=device)]
            if pending is None:
                # Only the oldest unsummed batch may add its gradients now.
                if rank > self._summed:
                    self._waiting.add(rank)
                    break
                continue
            # Sums are floating-point: adding strictly in the order of the batches keeps the bits of a plain loop.
            self._summed += 1
            rank, device = rank + 1, None
            if rank not in self._waiting:
                break
            self._waiting.discard(rank)
        return []
