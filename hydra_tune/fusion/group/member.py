"""`MemberTrial`: a trial inside a fused group; its training loop asks the group to compute every batch.

A member runs the loop of `SingleTrial` with its own data, random streams, schedule, history and reports. The loop
yields requests (`MemberBatchRequest`, `PartialStepRequest`) instead of units. A member outside any group (`is_fused` False)
runs like an ordinary trial. `GroupMatcher` (`pool/fusion/group_matcher.py`) builds a member when a job of a `FusedPool` is
prepared, and `FusionBenchmark` (`fusion/matching/group_timing.py`) for timed steps; `FusedJob` (`pool/fusion/fused_job.py`)
keeps a job's member. `GroupTrial` (`group_trial.py`) has the requests of its members computed together. `GroupSlot` (`slot.py`)
runs a member to its next request, `SlotTable` (`slot_table.py`) sets `fetch`, and the makers of plans
(`fusion/compile/group_plan_cache.py`, `fusion/compile/batched_plan_cache.py`, `fusion/runtime/planned_group_size.py`,
`GroupMatcher`) look at first batches with `peek`. A member must not know the other members.

Note: ownership. While a member is in a group, the group's stack holds the present weights and optimizer state, and the
member's own module and optimizer are stale until `fetch`. Rates, random streams, loss scale and history stay the
member's own: the member's scheduler goes on writing to the member's own optimizer, where the group reads the rates.

Note: threads. In a group, the thread that advances the group runs the member's code. Another thread may take a snapshot while
the group waits, so that no unit of the group runs.

Note: random numbers. A look at data or a capture must leave the member's streams and feed where they were (`peek`).

Note: code of the user's. `begin_to_build`, and `peek` where the data run the user's code, keep other trials out for a
limited time (`GATE.alone`), so that the changes found in Python are the member's own.
"""

import math
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from hydra_tune.errors import BadLossError, CaptureError, TaskError, UnfusableError
from hydra_tune.shard.capture import batch as batches
from hydra_tune.shard.capture.batch import BatchLeaves
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.capture.fingerprint import architecture_key
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.shard.python_state.opened_files import FileHolder
from hydra_tune.shard.python_state.state_guard import (
    PythonStateGuard,
    PythonStateUndo,
    functions_between_steps,
    reached,
)
from hydra_tune.task import Batch
from hydra_tune.train.building import in_training_mode
from hydra_tune.train.checkpoint.snapshot import TrialStateSnapshot
from hydra_tune.train.checkpoint.trial_checkpoint import DataPosition
from hydra_tune.train.data.handles import no_batch, num_samples, on_host, refuse_empty
from hydra_tune.train.data.index_gather import UngatheredBatches
from hydra_tune.train.loop.gradient_rules import GradientProcessor
from hydra_tune.train.mean import EvaluationResults
from hydra_tune.train.rng.rng_streams import RandomStreams
from hydra_tune.train.single_trial import SingleTrial
from hydra_tune.train.timing.unit_times import UnitTimes
from hydra_tune.train.trial import PendingReport


@dataclass(frozen=True, slots=True)
class MemberBatchRequest:
    """Batches that a member wants computed, for training steps or for metrics.

    Attributes:
        mode: "train" or "evaluate".
        drawn: a batch as drawn from the member's data, or picks not yet gathered.
        leaves: the batch's tensors; for picks, the geometry of each batch.
        places: numbers of the member's Python state, in words, that are inputs of the graph.
    """

    mode: str
    drawn: Batch | UngatheredBatches
    leaves: BatchLeaves
    num_samples: int
    places: tuple[str, ...] = ()
    numbers: tuple[int | float, ...] = ()

    @classmethod
    def of(cls, mode: str, drawn: Batch | UngatheredBatches) -> Self:
        """Return the request for a drawn batch or picks."""
        if isinstance(drawn, UngatheredBatches):
            return cls(mode, drawn, drawn.source.leaves(drawn.size), drawn.size)
        drawn = on_host(drawn)
        return cls(mode, drawn, batches.flatten(drawn), num_samples(drawn))

    def __len__(self) -> int:
        return len(self.drawn) if isinstance(self.drawn, UngatheredBatches) else 1

    @property
    def batch(self) -> Batch:
        """The first batch, as the member's data loader returns it, or with room for the inputs of numbers."""
        batch = self.drawn.batch() if isinstance(self.drawn, UngatheredBatches) else self.drawn
        return batches.NumberedBatch.of(batch, self.places) if self.places else batch

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the first batch."""
        is_plain = not self.places and not isinstance(self.drawn, UngatheredBatches)
        return self.leaves.tensors if is_plain else batches.flatten(self.batch).tensors

    def part(self, begin: int, end: int | None = None) -> "MemberBatchRequest | None":
        """Return the batches from `begin` up to `end`; None if there are none."""
        if not isinstance(self.drawn, UngatheredBatches):
            return self if begin == 0 else None
        if begin >= len(self.drawn):
            return None
        part = self.drawn.part(begin, end)
        return self if part is self.drawn else replace(self, drawn=part)


class PartialStepRequest:
    """Request of a member whose data ends inside a step: run the step on the batches collected so far."""


class MemberTrial(SingleTrial):
    """A trial that may be a member of a fused group.

    Attributes:
        is_fused: whether a group computes the batches; otherwise the member runs as a `SingleTrial`.
        architecture: identifies trials that share a plan; None until `identify`.
        results: losses or metrics of the computed batches, for a leading part of the request.
        fetch: copies the member's part of the group's state to the member's own module and optimizer; None outside a
            group. No unit of the group may run meanwhile.
    """

    is_fused = False
    architecture: Hashable | None = None
    results: Sequence[Any] = ()
    fetch: Callable[[], None] | None = None
    _python_states: Mapping[str, PythonStateGuard] = MappingProxyType({})
    _looked_at: tuple[str, int] | None = None
    _building: PythonStateUndo | None = None
    inputs: Mapping[str, frozenset[str]] = MappingProxyType({})

    def identify(self, inputs: Mapping[str, frozenset[str]] = MappingProxyType({})) -> None:
        """Note the architecture, and the Python state of the steps that plans of this architecture repeat.

        Args:
            inputs: by mode, numbers of the state, in words, that are inputs of the graphs instead.

        Raises:
            UnfusableError: the model or the step has no architecture key, or holds too much state.
        """
        module, optimizer = self.built()
        self._check_reach(module, optimizer)
        self.inputs = dict(inputs)
        self.architecture = architecture_key(self.task, module)
        if self.architecture is None:
            raise UnfusableError("its model or step holds a value that cannot be compared with those of other trials")
        modes = ("train",) if self.task.validate is None else ("train", "evaluate")
        try:
            self._python_states = {
                mode: PythonStateGuard(self.task, module, mode, inputs=sorted(inputs.get(mode, ()))) for mode in modes
            }
            digests = tuple(state.digest for state in self._python_states.values())
            self.architecture = (self.architecture, digests)
        except (CaptureError, TaskError) as error:
            raise UnfusableError(str(error)) from error

    def _check_reach(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Refuse functions that hold the model or the optimizer: a group stacks the members' tensors elsewhere."""
        task = self.task
        if task.after_step is not None:
            raise UnfusableError(
                "its after_step= gets the model after each step, whose weights a group keeps elsewhere"
            )
        if self._scheduler_writes:
            raise UnfusableError(
                "its scheduler= may write parameters or the optimizer's state, which a group keeps elsewhere"
            )
        steps = {"loss=": task.loss, "step=": task.step, "evaluate=": task.evaluate}
        optimizing = [optimizer, optimizer.param_groups, optimizer.state]
        model = [*module.modules(), *module.parameters()]
        name = reached(functions_between_steps(task), [*model, *optimizing]) or reached(steps, optimizing)
        if name is not None:
            raise UnfusableError(f"its {name} holds the model or the optimizer, whose tensors a group keeps elsewhere")

    def changed_state(self, mode: str) -> str | None:
        """Name a value that the step of a mode reads and that has changed since `identify`; None if there is none."""
        state = self._python_states.get(mode)
        # The member's own data and scheduler do not reach the model's modules (`identify`), so between two reports nothing
        # does; a dict or a list of a module may be theirs as well.
        moment = (mode, len(self.history))
        is_same_moment, self._looked_at = moment == self._looked_at, moment
        return None if state is None else state.change(beside_model=is_same_moment)

    def watch(self, mode: str, files: Sequence[FileHolder]) -> None:
        """Look at the files that the captured step of a mode has read wherever its Python state is looked at."""
        if mode in self._python_states:
            self._python_states[mode].watch(files)

    def compare(self, library: PlanLibrary, prepared: PreparedPlan, request: MemberBatchRequest) -> bool:
        """Compare the member's own plan with the eager step once more; return whether there was a comparison.

        Raises:
            CaptureError: the plan gives other numbers than the eager step.
        """
        state, module = self._python_states.get(request.mode), self.built()[0]
        # After a change that the guard sees, the plan serves no more.
        if state is None or state.change() is not None:
            return False
        request = self.numbered(request)
        batch = request.batch
        if prepared.numbers is not None:
            if not prepared.numbers.hold(request.numbers):
                return False
            prepared.numbers.fill(batch.inputs, request.numbers)
        if not prepared.serves(batches.flatten(batch).tensors):  # a generator may have filled the batch's memory anew
            return False
        with self.streams.everything():
            library.check_again(prepared, self.task, module, batch)
        module.train()
        return True

    def changed_numbers(self, mode: str) -> set[str]:
        """Return the numbers, in words, that have changed since `identify`; none if anything else has changed as well."""
        return self._python_states[mode].changed_numbers()

    def numbered(self, request: MemberBatchRequest) -> MemberBatchRequest:
        """Return a request with the present numbers that are inputs of the graph."""
        state = self._python_states.get(request.mode)
        numbers = () if state is None else state.numbers()
        if state is None or numbers is None or request.places == state.inputs:
            return replace(request, numbers=numbers or ())
        signature: Any = request.leaves.signature[0] if request.places else request.leaves.signature  # type: ignore[index]
        leaves = replace(request.leaves, signature=(signature, state.inputs) if state.inputs else signature)
        return replace(request, leaves=leaves, places=state.inputs, numbers=numbers)

    def go_on(self) -> MemberBatchRequest | PartialStepRequest | PendingReport | None:
        """Run the trial's own code up to its next request; return None at its end."""
        request: Any = self.advance()
        self._adopt_saved()  # the group stacks restored optimizer state from the member's own optimizer
        assert request is None or isinstance(request, MemberBatchRequest | PartialStepRequest | PendingReport)
        return request

    def built(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the trial's module and optimizer; on the first call, check the data and build both, in training mode."""
        if self.module is None or self.optimizer is None:
            for handle in (self.task.train, self.task.validate):
                self._feed.check(handle)
            module, _ = self._build()
            in_training_mode(module)
        return self._objects

    def begin_to_build(self) -> None:
        """Build the module and optimizer so that `discard` can undo what the user's code has counted in Python."""
        with GATE.alone() as is_alone:
            self._building = PythonStateUndo.of_tasks(self.task)
            try:
                self.built()
            finally:
                self._building.note_changes(is_alone=is_alone())

    def discard(self) -> None:
        """Close a trial that has only been built, and that will be built anew."""
        self.close(keep=False)
        if self._building is not None:
            _undo(self._building)

    def snapshot(self) -> TrialStateSnapshot:
        """As of `Trial`; first copies the member's state out of the group."""
        if self.fetch is not None:
            self.fetch()
        return super().snapshot()

    @contextmanager
    def peek(self) -> Iterator[dict[str, MemberBatchRequest]]:
        """Context with the first training batch, and the first validation batch if any, without advancing the data.

        The end of the context restores the counts that the data keep in Python, as a step inside may read the counts. Other
        trials may count in the same dictionary or in the environment, so data that run the user's code give their batches while
        nobody else computes, for a limited time: the changes found are then this trial's own.

        Raises:
            UnfusableError: the data may come from an iterator, which would be advanced.
        """
        noted = self._noted_data()  # this first note only tells whether code of the user's would run
        try:
            with GATE.alone() if noted.runs_own_code else nullcontext(lambda: True) as is_alone:
                noted = self._noted_data()
                try:
                    requests = {"train": self._peeked("train", self.task.train)}
                    if self.task.validate is not None:
                        requests["evaluate"] = self._peeked("evaluate", self.task.validate)
                finally:
                    noted.note_changes(is_alone=is_alone())
            yield requests
        finally:
            _undo(noted)

    @property
    def streams(self) -> RandomStreams:
        """The trial's random streams."""
        return self._streams

    @property
    def gradient_rules(self) -> GradientProcessor:
        """The trial's own gradient rules, which hold the trial's loss scale inside a group too."""
        return self._gradients

    def runs_at(self, times: UnitTimes, mode: str) -> None:
        """Set the expected times of the group's units, for `remaining_seconds`."""
        if mode == "train":
            self.unit_times = times
        else:
            self._evaluation_times = times

    def _noted_data(self) -> PythonStateUndo:
        task = self.task
        handles = {"train=": task.train, "validate=": task.validate, "loss_weight=": task.loss_weight}
        noted = PythonStateUndo(handles, task)
        if noted.iterators:
            raise UnfusableError(
                f"{noted.iterators[0]} is an iterator, which cannot be put back after a look at the first batch"
            )
        return noted

    def _peeked(self, mode: str, handle: Any) -> MemberBatchRequest:
        data_state = self._data_state()
        draws = self._draw(mode)
        try:
            batch = next(draws, None)
        finally:
            draws.close()
        # Drawing a batch has advanced the streams and the feed. Both go
        # back, so the real epoch draws the same numbers as an unfused trial.
        self._restore_data(data_state)
        if batch is None:
            raise no_batch("train" if mode == "train" else "validate", handle, 0)
        _refuse_empty(batch, "train" if mode == "train" else "validate", 0, 0 if mode == "train" else None)
        return MemberBatchRequest.of(mode, batch)

    def _build(self, building: AbstractContextManager[object] | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.module is not None and self.optimizer is not None:
            return self.module, self.optimizer
        return super()._build(building)

    def _choose_way(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Generator[Any, None, None]:
        if not self.is_fused:
            yield from super()._choose_way(module, optimizer)

    def _train_epoch(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, place: DataPosition
    ) -> Generator[Any, None, int]:
        if not self.is_fused:
            return (yield from super()._train_epoch(module, optimizer, place))
        count, pending = place.batches, 0
        self._feed.gives_picks = self._takes_picks
        for drawn in self._draw_pass(count):
            _refuse_empty(drawn, "train", count, place.epoch)
            request: MemberBatchRequest | None = MemberBatchRequest.of("train", drawn)
            while request is not None:
                yield request.part(0, self._batches_alone)
                losses = self.results  # keep a reference: an evaluation below replaces the attribute
                samples = request.num_samples
                for number, loss in enumerate(losses):
                    count += 1
                    if not math.isfinite(loss):
                        raise BadLossError(f"the training loss is {loss}")
                    self._add_loss(loss, samples)
                    if number < len(losses) - 1:
                        self.progress.steps += 1  # only the last step of a round can have more to do (`_batches_alone`)
                pending = (pending + 1) % self.task.accumulate
                if not pending:
                    yield from self._after_step(place.epoch, count)
                request = request.part(len(losses))
        if not count:
            raise no_batch("train", self.task.train, place.epoch)
        if pending:
            yield PartialStepRequest()
            yield from self._after_step(place.epoch, count)
        return count

    def _evaluate(self) -> Generator[Any, None, EvaluationResults]:
        if not self.is_fused:
            return (yield from super()._evaluate())
        evaluated, count = EvaluationResults(self.task), 0
        self._feed.gives_picks = self._takes_picks
        for drawn in self._draw("evaluate"):
            _refuse_empty(drawn, "validate", count)
            request: MemberBatchRequest | None = MemberBatchRequest.of("evaluate", drawn)
            while request is not None:
                yield request
                samples = request.num_samples
                for values in self.results:
                    evaluated.add(values, samples)
                count += len(self.results)
                self.progress.evaluated_batches += len(self.results)
                request = request.part(len(self.results))
        self._evaluated(count)
        return evaluated

    @property
    def _takes_picks(self) -> bool:
        """Whether the group gathers the batches of all members at once; batches to be weighed are gathered before."""
        return self.task.loss_weight is None

    @property
    def _batches_alone(self) -> int | None:
        """Number of batches up to the next step with extra work after it (scheduler, report, checkpoint).

        None: no limit.
        """
        task = self.task
        # `GroupExecutor.accumulated` takes a single batch of each member at a time.
        if task.accumulate > 1:
            return 1
        # The scheduler has to run before the next step.
        if self._scheduler is not None and task.scheduler_interval == "step":
            return 1
        every = [] if task.report_every == "epoch" else [task.report_every]
        if self._keeper is not None and self._keeper.every_steps is not None:
            every.append(self._keeper.every_steps)
        return min((count - self.progress.steps % count for count in every), default=None)


def _undo(noted: PythonStateUndo) -> None:
    with ExitStack() as alone:
        if noted.has_changes:
            alone.enter_context(GATE.left())
            alone.enter_context(GATE.exclusive())
        noted.undo_changes()


def _refuse_empty(drawn: Batch | UngatheredBatches, name: str, number: int, epoch: int | None = None) -> None:
    """As `refuse_empty`; picks always have samples."""
    if not isinstance(drawn, UngatheredBatches):
        refuse_empty(drawn, name, number, epoch)
