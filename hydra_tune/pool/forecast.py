"""What tasks would ask of devices and move between them and the host, before anything is trained.

Each task's model is built, captured, cut and checked as the pool would, and a few of its steps are timed (`train/timing.py`).
Then some steps are rehearsed on tensors without bytes (`train/rehearsal.py`), by the scheduler and the pagers of a run, and
what they have moved and taken is counted.
"""

import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device
from hydra_tune.devices.link import Link
from hydra_tune.devices.weightless import WeightlessDevice
from hydra_tune.errors import ConfigError, HydraTuneError
from hydra_tune.memory.block import Kind
from hydra_tune.pool.fusion_forecast import FusionForecast, FusionOf, refused
from hydra_tune.pool.plan_failures import RehearsedError, failure_of
from hydra_tune.pool.rehearsal import Moved, Play
from hydra_tune.quantities import format_bytes
from hydra_tune.schedule import Policy
from hydra_tune.shard.fingerprint import architecture_key, optimizer_key
from hydra_tune.shard.library import PlanLibrary, Prepared
from hydra_tune.shard.plan import Plan
from hydra_tune.shard.rules import GradientRules
from hydra_tune.shard.stage import Stage
from hydra_tune.shard.unbuilt import BuildLimit, TooLargeError, Unbuilt
from hydra_tune.shard.whole import uncaptured
from hydra_tune.task import TrainTask
from hydra_tune.train.rehearsal import Rehearsal
from hydra_tune.train.timing import timed_steps
from hydra_tune.train.trial import Trial

_WARM_STEPS = 2  # the first makes optimizer state, the second is the first that loads it
_STEPS_ALONE = 1  # they repeat to the byte
_STEPS_TOGETHER = 8  # trials take turns of some steps
_MOST_BUILT_BYTES = 256 << 20  # of a model, to be built for real
_MOST_CHECKED_BYTES = 1 << 30  # that a step may need on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialForecast:
    """One task.

    Attributes:
        name: of the task.
        num_shards: shards that its model is cut into.
        is_whole: whether it cannot be cut, and runs the user's own code.
        runs_own_code: whether it runs the user's own code uncaptured, because it fits its device.
        why: why it goes this way.
        units_per_step: shard units of an optimizer step.
        together: batches of a step that go through each shard together; 1: one after the other.
        activations: what is done with the activations of each shard but the last until its backward: "keep", "spill" or
            "recompute".
        parameter_bytes: of all its parameters.
        unit_bytes: the most that one of its units needs on a device at once.
        smallest_budget_bytes: memory of a device with which it could still be cut, to a per mille.
        architecture: equal numbers stand for equal models and steps, widths and depths included, among all that the pool has
            planned; None where that cannot be told.
        step_seconds: from the end of an optimizer step to the end of the next one, with all that the pool does meanwhile: the
            mean of its steps beside the others. 0 where it is not known: not checked, or on a GPU.
        is_checked: whether its plan has been compared with a step of the model, as every plan is before training; not so
            where the model or its step is too large for that.
        split_batches: pieces that each batch is cut into.
        split: where the task leaves that number to the pool, what was chosen and why; else None.
        cut: where `num_shards` is "tuned" and there was a choice, what was chosen and why; else None.
        optimizer_placement: where its updates are made: "device" or "host".
        placement: where `optimizer_placement` is "auto", why they are made there; else None.
        fusion: with which others it could be computed together.
    """

    name: str
    num_shards: int
    is_whole: bool
    runs_own_code: bool
    why: str
    units_per_step: int
    together: int
    activations: tuple[str, ...]
    parameter_bytes: int
    unit_bytes: int
    smallest_budget_bytes: int
    architecture: int | None
    step_seconds: float
    is_checked: bool
    split_batches: int
    split: str | None
    cut: str | None
    optimizer_placement: str
    placement: str | None
    fusion: FusionForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForecast:
    """One device.

    Attributes:
        budget_bytes: memory it may use.
        peak_bytes: the most of it that is taken.
        bytes_in, bytes_out: loaded from the host and spilled to it in one optimizer step of a trial (the mean, if there are
            several), by kind.
        bytes_across: taken over from other devices in such a step, by kind.
    """

    budget_bytes: int
    peak_bytes: int
    bytes_in: dict[str, float]
    bytes_out: dict[str, float]
    bytes_across: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What tasks would do together.

    Attributes:
        trials: in the order of the tasks, without those in `failed`.
        devices: by name.
        failed: trials that cannot be planned, by name, and why; the others are planned as if they were not there.
    """

    trials: tuple[TrialForecast, ...]
    devices: dict[str, DeviceForecast]
    failed: dict[str, HydraTuneError] = field(default_factory=dict)

    @property
    def bytes_in(self) -> dict[str, float]:
        """Loaded in one optimizer step of a trial, by all devices, by kind."""
        return _sum([device.bytes_in for device in self.devices.values()])

    @property
    def bytes_out(self) -> dict[str, float]:
        """Spilled in one optimizer step of a trial, by all devices, by kind."""
        return _sum([device.bytes_out for device in self.devices.values()])

    @property
    def bytes_across(self) -> dict[str, float]:
        """Copied from device to device in one optimizer step of a trial, by kind."""
        return _sum([device.bytes_across for device in self.devices.values()])

    @property
    def bytes_by_kind(self) -> dict[str, float]:
        """All three together."""
        return _sum([self.bytes_in, self.bytes_out, self.bytes_across])

    @property
    def parameter_traffic(self) -> float:
        """Bytes of parameters that a step moves, every way, over the bytes of all parameters."""
        mean = sum(trial.parameter_bytes for trial in self.trials) / len(self.trials)
        return self.bytes_by_kind.get(Kind.PARAMETERS.value, 0.0) / mean

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`."""
        return asdict(replace(self, failed={})) | {
            "failed": {name: str(error) for name, error in self.failed.items()},
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bytes_across": self.bytes_across,
            "parameter_traffic": self.parameter_traffic,
        }


def forecast(
    tasks: Mapping[str, TrainTask],
    library: PlanLibrary,
    architectures: dict[Hashable, int],
    known: "dict[Hashable, Known]",
    fusion_of: FusionOf,
    devices: Sequence[Device],
    policy: Policy,
    *,
    max_concurrent: int,
    admission: str,
    sends_ahead: bool,
) -> Forecast:
    """Plan tasks, and rehearse them together; see `HydraExecutor.plan`.

    Args:
        tasks: by name.
        library: the pool's.
        architectures: the numbers of those that are known; takes new ones.
        known: what was found of tasks alone; takes what is found.
        fusion_of: says which could be computed together.
        devices: where they would run; nothing is done there.
        policy: as of the pool, and so all that follows.
        max_concurrent: trials in flight.
        admission: which of them go first.
        sends_ahead: whether what a device does next is sent to it while it computes.

    Raises:
        HydraTuneError: none of them can be planned; why the first cannot.
    """
    left, failed = dict(tasks), dict[str, HydraTuneError]()
    with ThreadPoolExecutor(1, "hydra-plan", torch.set_num_threads, (1,)) as thread:
        while left:
            company = _Company(library, architectures, known, fusion_of, devices, sends_ahead=sends_ahead)
            failing = thread.submit(company.cast, left).result()
            was_alone = len(left) == 1
            failed |= failing
            left = {name: task for name, task in left.items() if name not in failing}
            if len(left) == 1 and not was_alone:
                continue  # one that is alone is rehearsed otherwise
            if left:
                play = partial(company.perform, policy, max_concurrent=max_concurrent, admission=admission)
                try:
                    found: Forecast = thread.submit(play).result()
                except RehearsedError as error:
                    failed[error.name] = error
                    del left[error.name]
                else:
                    return replace(found, failed={name: failed[name] for name in tasks if name in failed})
    raise failed[next(iter(tasks))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What was found of a task alone, and so holds of all that have its plan.

    Attributes:
        prepared: the plan, which is kept for its identity.
        found: the forecast.
    """

    prepared: Prepared
    found: Forecast


@dataclass(slots=True, kw_only=True)
class _Part:
    """One trial: what is known of it, and its rehearsals, each of which can be run once."""

    task: TrainTask
    rehearsals: list[Rehearsal]
    prepared: Prepared
    key: Hashable
    smallest_budget_bytes: int
    is_checked: bool
    architecture: int | None
    pieces_why: str | None
    why: str | None
    placement_why: str | None
    runs_own_code: bool
    way_why: str
    fusion: FusionForecast
    link: Link | None = None


class _Company:
    def __init__(
        self,
        library: PlanLibrary,
        architectures: dict[Hashable, int],
        known: dict[Hashable, Known],
        fusion_of: FusionOf,
        devices: Sequence[Device],
        *,
        sends_ahead: bool,
    ) -> None:
        self._sends_ahead = sends_ahead
        self._architectures = architectures
        self._known = known
        self._fusion_of = fusion_of
        self._library = library.for_plans(_MOST_CHECKED_BYTES)
        self._host = devices[0]
        self._devices = devices
        self._stage = Stage()
        self._parts: dict[str, _Part] = {}
        self._lengths = [_WARM_STEPS + _STEPS_ALONE]

    def cast(self, tasks: Mapping[str, TrainTask]) -> dict[str, HydraTuneError]:
        """Make the plans; returns of which tasks there is none, and why."""
        failed = {}
        if len(tasks) > 1:
            self._lengths = [_WARM_STEPS, _WARM_STEPS + _STEPS_TOGETHER]
        for name, task in tasks.items():
            try:
                self._parts[name] = self._part(name, task)
            except Exception as error:  # noqa: BLE001 - the task's own code may raise anything
                failed[name] = failure_of(name, error)
        return failed

    def _part(self, name: str, task: TrainTask) -> _Part:
        part, no_group = self._planned(name, task), refused(task)
        return part if no_group is None else replace(part, fusion=no_group)

    def _planned(self, name: str, task: TrainTask) -> _Part:
        if task.compile is not None:
            # What a compiler makes cannot be rehearsed; it is cut and updated alike, and keeps nothing.
            task = replace(task, compile=None, activations="recompute")
        try:
            return self._timed(self._built(task, BuildLimit(_MOST_BUILT_BYTES)))
        except TooLargeError:
            pass
        try:
            return self._built(task, Unbuilt())
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"{name} cannot be planned: its model is too large to be built for that (more than "
                f"{format_bytes(_MOST_BUILT_BYTES)}), and its factories want more of large tensors than sizes "
                f"({type(error).__name__}: {error}); leave out what they read, or train some steps of it, and look at stats()"
            ) from error

    def _built(self, task: TrainTask, building: AbstractContextManager[object]) -> "_Part":
        trial = Trial(task, self._library, self._host)
        try:
            kept, leaves = trial.prepare(building)
            task, module, optimizer = trial.task, trial.module, trial.optimizer
            assert module is not None
            assert optimizer is not None
            knows_length = trial.progress.num_steps is not None
            device = WeightlessDevice(self._host)
            prepared = kept.prepared
            same = _likeness(task, prepared, optimizer, knows_length=knows_length)
            with self._stage:
                rehearsals = [
                    Rehearsal(
                        *(task, module, optimizer, kept, leaves, device),
                        knows_length=knows_length,
                        counts_draws=self._library.budget.counts_draws,
                    )
                    for _ in ([] if self._is_known(same) else self._lengths)
                ]
            runs_own_code, way_why = _way(task, module, optimizer, self._library, prepared)
            key = architecture_key(task, module)
            known = self._architectures
            return _Part(
                task=task,
                rehearsals=rehearsals,
                prepared=prepared,
                key=same,
                smallest_budget_bytes=prepared.smallest_budget(),
                is_checked=prepared.is_checked,
                architecture=None if key is None else known.setdefault(key, len(known)),
                pieces_why=trial.pieces_why,
                why=prepared.why,
                runs_own_code=runs_own_code,
                way_why=way_why,
                placement_why=prepared.placement_why,
                fusion=self._fusion_of(task, (module, optimizer), prepared, leaves, self._library, self._host),
            )
        finally:
            trial.close(keep=False)

    def _timed(self, part: "_Part") -> "_Part":
        """The same, with what its steps take, where that can be found out on the host."""
        host = self._host
        if not part.is_checked or not all(isinstance(device, CpuDevice) for device in self._devices):
            return part
        assert isinstance(host, CpuDevice)
        pace = timed_steps(part.task, self._library, host, sends_ahead=self._sends_ahead)
        if pace is not None:
            part.link = pace.link
            for rehearsal in part.rehearsals:
                rehearsal.keep_pace(pace)
        return part

    @property
    def _link(self) -> Link | None:
        """What copies were seen to take: the mean of all trials; None where one of them has not been timed."""
        links = [part.link for part in self._parts.values() if part.link is not None]
        if len(links) < len(self._parts):
            return None
        return Link(
            bytes_per_second=statistics.fmean(link.bytes_per_second for link in links),
            seconds_per_block=statistics.fmean(link.seconds_per_block for link in links),
        )

    def perform(self, policy: Policy, *, max_concurrent: int, admission: str) -> Forecast:
        """Rehearse, and say what was seen."""
        name, part = next(iter(self._parts.items()))
        if not self._is_known(part.key):
            found = self._performed(policy, max_concurrent=max_concurrent, admission=admission)
            if len(self._parts) > 1 or part.is_checked:
                return found
            self._known[part.key] = Known(prepared=part.prepared, found=found)
        found = self._known[part.key].found
        (trial,) = found.trials
        return replace(
            found,
            trials=(
                replace(trial, name=name, architecture=part.architecture, split=part.pieces_why, fusion=part.fusion),
            ),
        )

    def _is_known(self, key: Hashable) -> bool:
        """Whether there is one task, which has been rehearsed already, or one that is like it."""
        return len(self._lengths) == 1 and key in self._known

    def _performed(self, policy: Policy, *, max_concurrent: int, admission: str) -> Forecast:
        plays = []
        for number, length in enumerate(self._lengths):
            play = Play(
                {name: part.rehearsals[number] for name, part in self._parts.items()},
                [WeightlessDevice(device, self._link) for device in self._devices],
                policy,
                max_concurrent=max_concurrent,
                admission=admission,
                num_steps=length,
                sends_ahead=self._sends_ahead,
                stage=self._stage,
            )
            play.run()
            plays.append(play)
        last = plays[-1]
        if len(plays) == 1:
            before, after, count = last.marks[_WARM_STEPS - 1], last.marks[-1], _STEPS_ALONE
        else:
            # Whole runs of two lengths: what trials do at their beginnings and ends is in both.
            before, after, count = plays[0].moved, last.moved, _STEPS_TOGETHER * len(self._parts)
        return Forecast(
            trials=tuple(self._trial(name, part, last) for name, part in self._parts.items()),
            devices={device.name: _of_device(device, last, before, after, count) for device in self._devices},
        )

    @staticmethod
    def _trial(name: str, part: _Part, play: Play) -> TrialForecast:
        rehearsal = part.rehearsals[-1]
        plan = rehearsal.plan
        return TrialForecast(
            name=name,
            num_shards=len(plan.shards),
            is_whole=plan.eager,
            runs_own_code=part.runs_own_code,
            why=part.way_why,
            units_per_step=play.units_per_step[name],
            together=rehearsal.together,
            activations=tuple(shard.activations for shard in plan.shards[:-1]),
            parameter_bytes=rehearsal.parameter_bytes,
            unit_bytes=plan.peak_bytes,
            smallest_budget_bytes=part.smallest_budget_bytes,
            architecture=part.architecture,
            step_seconds=0.0 if part.link is None else _step_seconds(play, name),
            is_checked=part.is_checked,
            split_batches=part.task.num_pieces,
            split=part.pieces_why,
            cut=part.why,
            optimizer_placement=plan.optimizer_placement,
            placement=part.placement_why,
            fusion=part.fusion,
        )


def _likeness(task: TrainTask, prepared: Prepared, optimizer: torch.optim.Optimizer, *, knows_length: bool) -> Hashable:
    """Equal for tasks that rehearse alike: of one plan, but for rates and other numbers that move no bytes."""
    parts = (task.accumulate, task.num_pieces, repr(task.split_operators), knows_length)
    return (id(prepared), GradientRules.of(task), optimizer_key(optimizer), *parts)


def _way(
    task: TrainTask, module: nn.Module, optimizer: torch.optim.Optimizer, library: PlanLibrary, prepared: Prepared
) -> tuple[bool, str]:
    """Whether a task would run the user's own code uncaptured, and why, or why not."""
    found, plan, budget = uncaptured(task, module, optimizer, library.budget), prepared.plan, library.budget
    if not isinstance(found, Plan):
        return False, found
    if plan.eager:
        return True, f"it fits its device, and cannot be captured anyway ({plan.why_eager})"
    if len(plan.shards) > 1:
        return False, "its state fits its device, and its activations do not fit beside the state"
    needed = max(plan.peak_bytes, found.peak_bytes)
    return True, f"it fits its device: {format_bytes(needed)} of {format_bytes(budget.budget_bytes)}"


def _step_seconds(play: Play, name: str) -> float:
    """The mean of a trial's steps, and what the scheduler takes for one, as was seen in this very play."""
    ends = play.step_ends[name][_WARM_STEPS - 1 :]
    per_unit = play.deciding_seconds / play.num_units
    return (ends[-1] - ends[0]) / (len(ends) - 1) + play.units_per_step[name] * per_unit


def _of_device(device: Device, play: Play, before: Moved, after: Moved, count: int) -> DeviceForecast:
    def by_kind(way: str) -> dict[str, float]:
        found = {kind.value: (device.name, way, kind.value) for kind in Kind}
        moved = {kind: after.get(key, 0) - before.get(key, 0) for kind, key in found.items()}
        return {kind: nbytes / count for kind, nbytes in moved.items() if nbytes}

    return DeviceForecast(
        budget_bytes=device.budget_bytes,
        peak_bytes=play.pagers[device.name].ledger.peak_bytes,
        bytes_in=by_kind("in"),
        bytes_out=by_kind("out"),
        bytes_across=by_kind("across"),
    )


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for part in parts:
        for kind, nbytes in part.items():
            total[kind] += nbytes  # type: ignore[assignment]  # means are no whole numbers
    return {kind.value: total[kind.value] for kind in Kind if total[kind.value]}
