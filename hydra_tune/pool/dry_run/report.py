"""Forecast of tasks before training: device memory, and traffic between devices and host.

Each task's model is built, captured and cut as in the pool. Where model and step are small enough, the plan is also
checked, and on CPU devices some steps are timed (`train/timing/step_timing.py`). Then the scheduler and the pagers of a
run rehearse some steps on tensors without bytes (`train/timing/fake_trial.py`), and the forecast counts the bytes moved
and taken. `Pool.plan` (`pool/pool.py`) makes the forecast when a program calls `HydraExecutor.plan`;
`cli/dry_run/planning.py` asks for a forecast of each configuration of `hydra-tune plan`, and
`cli/dry_run/plan_table.py` and `cli/dry_run/plan_figures.py` print the `PoolForecast`. The module must not touch a
running job.

Note: a forecast runs on one thread of its own with one intra-op thread, like a worker's, and must leave the caller's
torch settings and the state of the tasks' Python as found (`Pool.plan`).
"""

import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import Device
from hydra_tune.devices.hardware.link import LinkCostModel
from hydra_tune.devices.single_thread import SingleThreadExecutor
from hydra_tune.devices.weightless import WeightlessDevice
from hydra_tune.errors import ConfigError, HydraTuneError
from hydra_tune.memory.block import BlockKind
from hydra_tune.pool.dry_run.executor import Moved, PoolRehearsal
from hydra_tune.pool.dry_run.fusion_report import FusionForecast, FusionOf, refused
from hydra_tune.pool.dry_run.plan_failures import RehearsalError, failure_of
from hydra_tune.quantities import format_bytes
from hydra_tune.schedule import Policy
from hydra_tune.shard.capture.fingerprint import architecture_key, optimizer_key
from hydra_tune.shard.capture.meta_models import BuildLimitError, BuildLimitTracker, LargeTensorFakeMode
from hydra_tune.shard.execute.eager_plan import uncaptured
from hydra_tune.shard.fake.fake_world import RehearsalFakeMode
from hydra_tune.shard.partition.gradient_rules import GradientRules
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.shard.partition.plan_cache import PlanLibrary, PreparedPlan
from hydra_tune.task import TrainTask
from hydra_tune.train.parallel.cost_model import CHOSEN_WAYS, ONE_DEVICE, PIPELINED
from hydra_tune.train.single_trial import SingleTrial
from hydra_tune.train.timing.fake_trial import TrialRehearsal
from hydra_tune.train.timing.step_timing import timed_steps

_WARM_STEPS = 2  # the first step creates optimizer state, the second is the first to load the state
_STEPS_ALONE = 1  # the traffic of a lone trial's steps repeats to the byte
_STEPS_TOGETHER = 8  # steps of each trial: trials alternate every few steps
_MOST_BUILT_BYTES = 256 << 20  # the largest model that is built with real tensors
_MOST_CHECKED_BYTES = 1 << 30  # the most host memory for checking a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialForecast:
    """Forecast of a task.

    Attributes:
        name: name of the task.
        num_shards: number of the model's shards.
        is_whole: whether the model cannot be cut, and runs the user's own code.
        runs_own_code: whether the task runs the user's own code uncaptured, because the model fits its device.
        why: the reason for the chosen way.
        units_per_step: shard units per optimizer step.
        together: batches of a step that pass through each shard together; 1: batches in sequence.
        activations: treatment of each shard's activations until the shard's backward, without the last shard: "keep",
            "spill" or "recompute".
        parameter_bytes: bytes of all parameters.
        unit_bytes: the most device memory in bytes that a unit needs.
        smallest_budget_bytes: the smallest device budget in bytes for which the model can still be cut, to a per mille.
        architecture: equal numbers stand for equal models and steps, widths and depths included, among all tasks
            planned by the pool; None where equality cannot be told.
        step_seconds: mean seconds from the end of an optimizer step to the end of the next step of the task, beside the
            other tasks and with all overheads of the pool. 0 where unknown: on an unchecked plan, on
            a GPU, or where the data has no whole step.
        is_checked: whether the plan has been compared with a step of the model, as for every plan before training;
            False where the model or the step is too large.
        split_batches: number of pieces of each batch.
        split: where the task leaves `split_batches` to the pool, the choice and the reason; else None.
        cut: where `num_shards` is "tuned" and there was a choice, the choice and the reason; else None.
        optimizer_placement: where updates are computed: "device" or "host".
        placement: where `optimizer_placement` is "auto", the reason for the choice; else None.
        parallel: how several batches of a step would use devices that have nothing else to do; None for steps of one
            batch, or a single device. All other figures are of a step on one device.
        fusion: the other tasks that could share a fused group.
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
    parallel: str | None
    fusion: FusionForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceForecast:
    """Forecast of a device.

    Attributes:
        budget_bytes: memory budget in bytes.
        peak_bytes: the most of the budget in use, in bytes.
        bytes_in, bytes_out: bytes loaded from the host and spilled to the host per optimizer step of a trial (the mean
            over several trials), by kind.
        bytes_across: bytes taken over from other devices per such step, by kind.
    """

    budget_bytes: int
    peak_bytes: int
    bytes_in: dict[str, float]
    bytes_out: dict[str, float]
    bytes_across: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolForecast:
    """Forecast of a joint run of tasks.

    Attributes:
        trials: forecasts in the order of the tasks, without the tasks in `failed`.
        devices: forecasts by device name.
        failed: errors of tasks that cannot be planned, by name; the forecast of the others ignores failed tasks.
    """

    trials: tuple[TrialForecast, ...]
    devices: dict[str, DeviceForecast]
    failed: dict[str, HydraTuneError] = field(default_factory=dict)

    @property
    def bytes_in(self) -> dict[str, float]:
        """Bytes loaded per optimizer step of a trial, over all devices, by kind."""
        return _sum([device.bytes_in for device in self.devices.values()])

    @property
    def bytes_out(self) -> dict[str, float]:
        """Bytes spilled per optimizer step of a trial, over all devices, by kind."""
        return _sum([device.bytes_out for device in self.devices.values()])

    @property
    def bytes_across(self) -> dict[str, float]:
        """Bytes copied between devices per optimizer step of a trial, by kind."""
        return _sum([device.bytes_across for device in self.devices.values()])

    @property
    def bytes_by_kind(self) -> dict[str, float]:
        """Sum of `bytes_in`, `bytes_out` and `bytes_across`, by kind."""
        return _sum([self.bytes_in, self.bytes_out, self.bytes_across])

    @property
    def parameter_traffic(self) -> float:
        """Bytes of parameters moved per step, in all directions, over a trial's mean parameter bytes."""
        mean = sum(trial.parameter_bytes for trial in self.trials) / len(self.trials)
        return self.bytes_by_kind.get(BlockKind.PARAMETERS.value, 0.0) / mean

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
    known: "dict[Hashable, CachedForecast]",
    fusion_of: FusionOf,
    devices: Sequence[Device],
    policy: Policy,
    *,
    max_concurrent: int,
    admission: str,
    sends_ahead: bool,
) -> PoolForecast:
    """Plan tasks, and rehearse the tasks together; see `HydraExecutor.plan`.

    Args:
        tasks: tasks by name.
        library: plan library of the pool.
        architectures: numbers of the known architectures; new architectures are added.
        known: forecasts of lone tasks with unchecked plans; new forecasts are added.
        fusion_of: returns the possible fused groups of a task.
        devices: devices of the run. The rehearsal computes nothing; timed steps run on a new CPU device like the first,
            and timed groups on the first device.
        policy: policy of the pool; the arguments below are the pool's, too.
        max_concurrent: number of trials admitted at the same time.
        admission: order of admission.
        sends_ahead: whether a device prefetches blocks of the next unit during compute.

    Raises:
        HydraTuneError: no task can be planned; the error of the first task.
    """
    remaining, failed = dict(tasks), dict[str, HydraTuneError]()
    # On a thread with a single intra-op thread, like a worker's: other numbers of threads change times and last bits.
    with SingleThreadExecutor("hydra-plan", partial(torch.set_num_threads, 1)) as thread:
        # A task whose rehearsal fails has taken part in the traffic of all others, so the remaining tasks are planned and
        # rehearsed again. A task whose plan fails takes no part.
        while remaining:
            builder = _ForecastBuilder(library, architectures, known, fusion_of, devices, sends_ahead=sends_ahead)
            failing = thread.submit(partial(builder.cast, remaining)).result()
            was_alone = len(remaining) == 1
            failed |= failing
            remaining = {name: task for name, task in remaining.items() if name not in failing}
            if len(remaining) == 1 and not was_alone:
                continue  # a task left alone is rehearsed over another number of steps, so it is planned once more
            if remaining:
                rehearse = partial(builder.perform, policy, max_concurrent=max_concurrent, admission=admission)
                try:
                    joint_forecast: PoolForecast = thread.submit(rehearse).result()
                except RehearsalError as error:
                    failed[error.name] = error
                    del remaining[error.name]
                else:
                    return replace(joint_forecast, failed={name: failed[name] for name in tasks if name in failed})
    raise failed[next(iter(tasks))]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedForecast:
    """Forecast of a lone task, valid for all tasks with the same plan.

    Attributes:
        prepared: the plan; kept alive because keys contain the plan's id.
    """

    prepared: PreparedPlan
    found: PoolForecast


@dataclass(slots=True, kw_only=True)
class _ForecastTrial:
    """A single trial: planning results, and rehearsals that each run once."""

    task: TrainTask
    rehearsals: list[TrialRehearsal]
    prepared: PreparedPlan
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
    link: LinkCostModel | None = None


class _ForecastBuilder:
    def __init__(
        self,
        library: PlanLibrary,
        architectures: dict[Hashable, int],
        known: dict[Hashable, CachedForecast],
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
        self._stage = RehearsalFakeMode()
        self._parts: dict[str, _ForecastTrial] = {}
        self._lengths = [_WARM_STEPS + _STEPS_ALONE]

    def cast(self, tasks: Mapping[str, TrainTask]) -> dict[str, HydraTuneError]:
        """Make the plans; return the errors of unplannable tasks, by name."""
        failed = {}
        if len(tasks) > 1:
            self._lengths = [_WARM_STEPS, _WARM_STEPS + _STEPS_TOGETHER]
        for name, task in tasks.items():
            try:
                self._parts[name] = self._part(name, task)
            except Exception as error:  # noqa: BLE001 - the task's own code may raise anything
                failed[name] = failure_of(name, error)
        return failed

    def _part(self, name: str, task: TrainTask) -> _ForecastTrial:
        part, no_group = self._planned(name, task), refused(task)
        return part if no_group is None else replace(part, fusion=no_group)

    def _planned(self, name: str, task: TrainTask) -> _ForecastTrial:
        if task.compile is not None:
            # Compiled code cannot be rehearsed. A compiled task is cut and updated like an uncompiled task, and keeps
            # no activations.
            task = replace(task, compile=None, activations="recompute")
        try:
            return self._timed(self._built(task, BuildLimitTracker(_MOST_BUILT_BYTES)))
        except BuildLimitError:
            pass  # too large for real tensors: built once more below, on tensors without bytes
        try:
            return self._built(task, LargeTensorFakeMode())
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"{name} cannot be planned: its model is too large to be built for that (more than "
                f"{format_bytes(_MOST_BUILT_BYTES)}), and its factories read values of large tensors, which have only sizes "
                f"here ({type(error).__name__}: {error}); leave out the reads, or train some steps of it, and look at stats()"
            ) from error

    def _built(self, task: TrainTask, building: AbstractContextManager[object]) -> "_ForecastTrial":
        trial = SingleTrial(task, self._library, self._host)
        try:
            cached_plan, leaves = trial.prepare(building)
            task, module, optimizer = trial.task, trial.module, trial.optimizer
            assert module is not None
            assert optimizer is not None
            knows_length = trial.progress.num_steps is not None
            device = WeightlessDevice(self._host)
            prepared = cached_plan.prepared
            likeness = _likeness(task, prepared, optimizer, knows_length=knows_length)
            with self._stage:
                rehearsals = [
                    TrialRehearsal(
                        *(task, module, optimizer, cached_plan, leaves, device),
                        knows_length=knows_length,
                        counts_draws=self._library.budget.counts_draws,
                    )
                    for _ in ([] if self._is_known(likeness) else self._lengths)
                ]
            runs_own_code, way_why = _way(task, module, optimizer, self._library, prepared)
            key = architecture_key(task, module)
            numbers = self._architectures
            return _ForecastTrial(
                task=task,
                rehearsals=rehearsals,
                prepared=prepared,
                key=likeness,
                smallest_budget_bytes=prepared.smallest_budget(),
                is_checked=prepared.is_checked,
                architecture=None if key is None else numbers.setdefault(key, len(numbers)),
                pieces_why=trial.pieces_why,
                why=prepared.why,
                runs_own_code=runs_own_code,
                way_why=way_why,
                placement_why=prepared.placement_why,
                fusion=self._fusion_of(task, (module, optimizer), prepared, leaves, self._library, self._host),
            )
        finally:
            trial.close(keep=False)

    def _timed(self, part: "_ForecastTrial") -> "_ForecastTrial":
        """Add measured step times where the host can measure steps."""
        host = self._host
        # A plan is unchecked because its model or step is too large to run here; and a GPU's times are not the host's.
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
    def _link(self) -> LinkCostModel | None:
        """Mean measured copy times over all trials; None if any trial has no timing."""
        links = [part.link for part in self._parts.values() if part.link is not None]
        if len(links) < len(self._parts):
            return None
        return LinkCostModel(
            bytes_per_second=statistics.fmean(link.bytes_per_second for link in links),
            seconds_per_block=statistics.fmean(link.seconds_per_block for link in links),
        )

    def perform(self, policy: Policy, *, max_concurrent: int, admission: str) -> PoolForecast:
        name, part = next(iter(self._parts.items()))
        if not self._is_known(part.key):
            result = self._performed(policy, max_concurrent=max_concurrent, admission=admission)
            if len(self._parts) > 1 or part.is_checked:
                return result
            self._known[part.key] = CachedForecast(prepared=part.prepared, found=result)
        result = self._known[part.key].found
        (trial,) = result.trials
        return replace(
            result,
            trials=(
                replace(trial, name=name, architecture=part.architecture, split=part.pieces_why, fusion=part.fusion),
            ),
        )

    def _is_known(self, key: Hashable) -> bool:
        """Return whether there is a single task, and the task or an equivalent task has been rehearsed before."""
        return len(self._lengths) == 1 and key in self._known

    def _performed(self, policy: Policy, *, max_concurrent: int, admission: str) -> PoolForecast:
        plays = []
        for number, length in enumerate(self._lengths):
            play = PoolRehearsal(
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
            # The difference of two whole runs of different lengths: the costs of a trial's beginning and end cancel
            # out.
            before, after, count = plays[0].moved, last.moved, _STEPS_TOGETHER * len(self._parts)
        return PoolForecast(
            trials=tuple(self._trial(name, part, last, self._devices) for name, part in self._parts.items()),
            devices={device.name: _of_device(device, last, before, after, count) for device in self._devices},
        )

    @staticmethod
    def _trial(name: str, part: _ForecastTrial, play: PoolRehearsal, devices: Sequence[Device]) -> TrialForecast:
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
            parallel=_parallel(part, rehearsal, devices),
            fusion=part.fusion,
        )


def _parallel(part: _ForecastTrial, rehearsal: TrialRehearsal, devices: Sequence[Device]) -> str | None:
    """Say how the batches of a step would use several devices that have nothing else to do."""
    choice, ways = part.task.parallel, rehearsal.parallel_ways()
    if len(devices) == 1 or rehearsal.num_parts == 1:
        return None
    chosen = CHOSEN_WAYS.get(choice)
    if choice == "none":
        why = "as parallel='none' has it"
    elif part.runs_own_code:
        why = "because the trial runs as it is; parallel='data' would capture the step"
    elif not ways or (chosen is not None and chosen not in ways):
        why = f"because batches that run {chosen or ' or '.join(CHOSEN_WAYS.values())} would not have the same bits"
        if chosen == PIPELINED and len(rehearsal.plan.shards) == 1:
            why = "because the model is one shard, and a pipeline needs two; give num_shards"
    elif chosen is None and part.link is not None:
        best, share = rehearsal.fastest_way(devices, part.link)
        if best != ONE_DEVICE:
            return f"batches of a step run {best} on idle devices, predicted to take {share:.2f} of one device's time"
        why = "which is predicted to be the fastest"
    else:
        condition = f"as parallel={choice!r} has it" if chosen else "where measured times show a gain"
        return f"batches of a step run {chosen or ' or '.join(ways)} on idle devices, {condition}"
    return f"batches of a step keep to one device, {why}"


def _likeness(
    task: TrainTask, prepared: PreparedPlan, optimizer: torch.optim.Optimizer, *, knows_length: bool
) -> Hashable:
    """Return a key, equal for tasks with the same rehearsal.

    Such tasks share a plan, and differ only in learning rates and other numbers that move no bytes.
    """
    parts = (task.accumulate, task.num_pieces, repr(task.split_operators), task.parallel, knows_length)
    return (id(prepared), GradientRules.of(task), optimizer_key(optimizer), *parts)


def _way(
    task: TrainTask, module: nn.Module, optimizer: torch.optim.Optimizer, library: PlanLibrary, prepared: PreparedPlan
) -> tuple[bool, str]:
    """Return whether a task would run the user's own code uncaptured, and the reason either way."""
    own_code, plan, budget = uncaptured(task, module, optimizer, library.budget), prepared.plan, library.budget
    if not isinstance(own_code, ShardPlan):
        return False, own_code
    if plan.eager:
        return True, f"it fits its device, and cannot be captured anyway ({plan.why_eager})"
    if len(plan.shards) > 1:
        return False, "its state fits its device, and its activations do not fit beside the state"
    needed = max(plan.peak_bytes, own_code.peak_bytes)
    return True, f"it fits its device: {format_bytes(needed)} of {format_bytes(budget.budget_bytes)}"


def _step_seconds(play: PoolRehearsal, name: str) -> float:
    """Mean seconds of a trial's steps in the rehearsal, plus the scheduler's own time per step."""
    ends = play.step_ends[name][_WARM_STEPS - 1 :]
    per_unit = play.deciding_seconds / play.num_units
    return (ends[-1] - ends[0]) / (len(ends) - 1) + play.units_per_step[name] * per_unit


def _of_device(device: Device, play: PoolRehearsal, before: Moved, after: Moved, count: int) -> DeviceForecast:
    def by_kind(way: str) -> dict[str, float]:
        keys = {kind.value: (device.name, way, kind.value) for kind in BlockKind}
        difference = {kind: after.get(key, 0) - before.get(key, 0) for kind, key in keys.items()}
        return {kind: nbytes / count for kind, nbytes in difference.items() if nbytes}

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
    return {kind.value: total[kind.value] for kind in BlockKind if total[kind.value]}
