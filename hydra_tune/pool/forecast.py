"""What tasks would ask of devices and move between them and the host, before anything is trained.

Each task's model is built, captured, cut and checked as the pool would. Then some steps are rehearsed on tensors without bytes
(`train/rehearsal.py`), by the scheduler and the pagers of a run, and what they have moved is counted.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hydra_tune.devices.device import Device
from hydra_tune.devices.weightless import WeightlessDevice
from hydra_tune.errors import ConfigError
from hydra_tune.memory.block import Kind
from hydra_tune.pool.rehearsal import Moved, Play
from hydra_tune.quantities import format_bytes
from hydra_tune.schedule import Policy
from hydra_tune.shard.fingerprint import architecture_key
from hydra_tune.shard.library import PlanLibrary
from hydra_tune.shard.stage import Stage
from hydra_tune.shard.unbuilt import BuildLimit, TooLargeError, Unbuilt
from hydra_tune.task import TrainTask
from hydra_tune.train.rehearsal import Rehearsal
from hydra_tune.train.trial import Trial

_WARM_STEPS = 2  # the first makes optimizer state, the second is the first that loads it
_STEPS_ALONE = 2
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
        units_per_step: shard units of an optimizer step.
        together: batches of a step that go through each shard together; 1: one after the other.
        activations: what is done with the activations of each shard but the last until its backward: "keep", "spill" or
            "recompute".
        parameter_bytes: of all its parameters.
        unit_bytes: the most that one of its units needs on a device at once.
        smallest_budget_bytes: memory of a device with which it could still be cut, to a per mille.
        architecture: equal numbers stand for equal models and steps, widths and depths included, among all that the pool has
            planned; None where that cannot be told.
        step_seconds: compute of an optimizer step on a core of the host; 0 where it is not known: whole, or not checked.
        is_checked: whether its plan has been compared with a step of the model, as every plan is before training; not so
            where the model or its step is too large for that.
        cut: where `num_shards` is "tuned" and there was a choice, what was chosen and why; else None.
        optimizer_placement: where its updates are made: "device" or "host".
        placement: where `optimizer_placement` is "auto", why they are made there; else None.
    """

    name: str
    num_shards: int
    is_whole: bool
    units_per_step: int
    together: int
    activations: tuple[str, ...]
    parameter_bytes: int
    unit_bytes: int
    smallest_budget_bytes: int
    architecture: int | None
    step_seconds: float
    is_checked: bool
    cut: str | None
    optimizer_placement: str
    placement: str | None


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
        trials: in the order of the tasks.
        devices: by name.
    """

    trials: tuple[TrialForecast, ...]
    devices: dict[str, DeviceForecast]

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
        return asdict(self) | {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "bytes_across": self.bytes_across,
            "parameter_traffic": self.parameter_traffic,
        }


def forecast(
    tasks: Mapping[str, TrainTask],
    library: PlanLibrary,
    architectures: dict[Hashable, int],
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
        devices: where they would run; nothing is done there.
        policy: as of the pool, and so all that follows.
        max_concurrent: trials in flight.
        admission: which of them go first.
        sends_ahead: whether what a device does next is sent to it while it computes.
    """
    with ThreadPoolExecutor(1, "hydra-plan", torch.set_num_threads, (1,)) as thread:
        company = _Company(library, architectures, devices)
        thread.submit(company.cast, tasks).result()
        return thread.submit(
            company.perform, policy, max_concurrent=max_concurrent, admission=admission, sends_ahead=sends_ahead
        ).result()


@dataclass(slots=True, kw_only=True)
class _Part:
    """One trial: what is known of it, and its rehearsals, each of which can be run once."""

    rehearsals: list[Rehearsal]
    smallest_budget_bytes: int
    is_checked: bool
    architecture: int | None
    why: str | None
    placement_why: str | None


class _Company:
    def __init__(self, library: PlanLibrary, architectures: dict[Hashable, int], devices: Sequence[Device]) -> None:
        self._architectures = architectures
        self._library = PlanLibrary(library.budget, most_checked_bytes=_MOST_CHECKED_BYTES, known=library)
        self._host = devices[0]
        self._devices = devices
        self._stage = Stage()
        self._parts: dict[str, _Part] = {}
        self._lengths = [_WARM_STEPS + _STEPS_ALONE]

    def cast(self, tasks: Mapping[str, TrainTask]) -> None:
        """Make the plans."""
        if len(tasks) > 1:
            self._lengths = [_WARM_STEPS, _WARM_STEPS + _STEPS_TOGETHER]
        for name, task in tasks.items():
            self._parts[name] = self._part(name, task)

    def _part(self, name: str, task: TrainTask) -> _Part:
        if task.compile is not None:
            # What a compiler makes cannot be rehearsed; it is cut and updated alike, and keeps nothing.
            task = replace(task, compile=None, activations="recompute")
        try:
            return self._built(task, BuildLimit(_MOST_BUILT_BYTES))
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
            module, optimizer = trial.module, trial.optimizer
            assert module is not None
            assert optimizer is not None
            knows_length = trial.progress.num_steps is not None
            device = WeightlessDevice(self._host)
            with self._stage:
                rehearsals = [
                    Rehearsal(task, module, optimizer, kept, leaves, device, knows_length=knows_length)
                    for _ in self._lengths
                ]
            prepared, key = kept.prepared, architecture_key(task, module)
            known = self._architectures
            return _Part(
                rehearsals=rehearsals,
                smallest_budget_bytes=prepared.smallest_budget(),
                is_checked=prepared.is_checked,
                architecture=None if key is None else known.setdefault(key, len(known)),
                why=prepared.why,
                placement_why=prepared.placement_why,
            )
        finally:
            trial.close(keep=False)

    def perform(self, policy: Policy, *, max_concurrent: int, admission: str, sends_ahead: bool) -> Forecast:
        """Rehearse, and say what was seen."""
        plays = []
        for number, length in enumerate(self._lengths):
            play = Play(
                {name: part.rehearsals[number] for name, part in self._parts.items()},
                [WeightlessDevice(device) for device in self._devices],
                policy,
                max_concurrent=max_concurrent,
                admission=admission,
                num_steps=length,
                sends_ahead=sends_ahead,
            )
            with self._stage:
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
            units_per_step=play.units_per_step[name],
            together=rehearsal.together,
            activations=tuple(shard.activations for shard in plan.shards[:-1]),
            parameter_bytes=rehearsal.parameter_bytes,
            unit_bytes=plan.peak_bytes,
            smallest_budget_bytes=part.smallest_budget_bytes,
            architecture=part.architecture,
            step_seconds=rehearsal.times.total if part.is_checked and not plan.eager else 0.0,
            is_checked=part.is_checked,
            cut=part.why,
            optimizer_placement=plan.optimizer_placement,
            placement=part.placement_why,
        )


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
