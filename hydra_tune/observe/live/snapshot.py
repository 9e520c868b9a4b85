"""A sweep at one moment, in plain values, for the terminal view, the summary and the JSON report.

`SweepProgressTracker` (`cli/display/board.py`) makes a snapshot each time the display of `hydra-tune sweep` asks, and for the
report; `SweepMonitor` (`pool/views/live_snapshot.py`) does so for `HydraExecutor.live`. `pool/devices/utilization.py` makes the
`DeviceView`s. `read_run_state` (`observe/event_log/run_state.py`) and `integrations/hydra_tune_optuna/study_reader.py` make a
`TrialView` of a log or a study, and `SweepRunRecord` (`cli/inspect/sweep_run_record.py`) ranks such trials as a `SweepView`.
The live views draw the snapshots, and `summary.py` writes the JSON report. Neither the snapshots nor their readers hold a job,
a task or a tensor. The module must not import torch, so that `hydra-tune list` answers at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

ENDED: frozenset[str] = frozenset({"completed", "pruned", "cancelled", "failed"})
LEFT = "interrupted"
"""State of a trial that a later run of the sweep resumes."""
Goal = Literal["minimize", "maximize"]
Status = Literal["running", "stopping", "completed", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """One trial.

    Args:
        number: the tuner's number, from 0.
        state: a job's state; `cancelled` for a trial stopped by a signal, `interrupted` for a trial left to a later
            run.
        value: the metric as last reported; None before the first report.
        epoch: present or last epoch, from 1; 0 before the first; None where not known.
        num_steps: optimizer steps planned; None where the data has no length.
        remaining_seconds: time left, as the pool estimates.
        one_shard_bytes: device memory in bytes that the trial would take in a single shard; 0 where not known.
        optimizer_placement: place of the updates, "device" or "host"; None where not known.
        group_size: size of the trial's fused group; 1: not fused, or not known.
        units_saved: shard units never run, because the trial was pruned or cancelled; 0 where not known.
        error: the error of a failed trial, on one line.
        earlier: whether the trial ended before this run, in a study that is continued.
        name: display name; None: derived from the number.
        metrics: all metrics as last reported; empty where not known.
        is_feasible: whether the trial violates no constraints; a trial that does is not the best.
    """

    number: int
    state: str
    params: Mapping[str, Any] = field(default_factory=dict)
    value: float | None = None
    epoch: int | None = None
    epochs: int | None = None
    step: int = 0
    num_steps: int | None = None
    remaining_seconds: float | None = None
    num_shards: int = 0
    one_shard_bytes: int = 0
    optimizer_placement: str | None = None
    group_size: int = 1
    units_run: int = 0
    units_saved: int = 0
    error: str | None = None
    earlier: bool = False
    name: str | None = None
    values: tuple[float, ...] = ()
    compute_seconds: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    is_feasible: bool = True

    @property
    def is_over(self) -> bool:
        """Whether the trial has ended, in whichever way."""
        return self.state in ENDED

    @property
    def share_done(self) -> float:
        """Share of the trial that has run, from 0 to 1."""
        return min(1.0, self.step / self.num_steps) if self.num_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One device.

    Args:
        busy_share: share of the time in which a unit ran, from 0 to 1: recent in a live view, overall in a summary.
        peak_bytes: most bytes on the device at any time.
        bytes_in_per_second, bytes_out_per_second: recent in a live view, overall in a summary; "in" includes other
            devices, "out" only goes to the host.
    """

    name: str
    busy_share: float
    resident_bytes: int
    peak_bytes: int
    budget_bytes: int
    bytes_in_by_kind: Mapping[str, int] = field(default_factory=dict)
    bytes_out_by_kind: Mapping[str, int] = field(default_factory=dict)
    bytes_across_by_kind: Mapping[str, int] = field(default_factory=dict)
    units: int = 0
    loads_under_way: int = 0
    bytes_in_per_second: float = 0.0
    bytes_out_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """A whole sweep.

    Args:
        num_planned: trials planned for the study; None: no limit.
        units_saved: shard units never run, because their trial was pruned; in `HydraExecutor.live` also cancelled.
        event_log_bytes: size of the file; None where not known.
        event_log_dropped: records left out of the file because of its limit, by kind.
        weights: files of the kept weights, by trial, the best first.
        makespan_seconds: expected total time, as far as known; after the end, the actual time.
        bound_seconds: lower bound on the time of every schedule of the sweep's units on these devices.
        next_step: advice on how to go on, after an interruption or where all planned trials were there already; None:
            no advice.
    """

    # Below this time a sweep is mostly imports, captures and first batches, and the bound covers none of these.
    SHORT_SECONDS: ClassVar[float] = 60.0

    name: str
    metric: str
    goal: Goal
    status: Status
    trials: tuple[TrialView, ...] = ()
    devices: tuple[DeviceView, ...] = ()
    num_planned: int | None = None
    elapsed_seconds: float = 0.0
    units_run: int = 0
    units_saved: int = 0
    scheduler_seconds: float = 0.0
    study: str | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()
    event_log: str | None = None
    event_log_bytes: int | None = None
    event_log_dropped: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[int, str] = field(default_factory=dict)
    makespan_seconds: float | None = None
    bound_seconds: float | None = None
    next_step: str | None = None

    def count(self, state: str) -> int:
        """Number of trials in `state`."""
        return sum(trial.state == state for trial in self.trials)

    @property
    def ranked(self) -> tuple[TrialView, ...]:
        """Completed trials, best first, then pruned trials, best first; trials without a value, or with NaN, are left out.

        Trials that violate constraints come after others of their state.
        """
        sign = -1.0 if self.goal == "maximize" else 1.0
        valued = [t for t in self.trials if t.value is not None and not math.isnan(t.value)]
        ended = [t for t in valued if t.state in {"completed", "pruned"}]
        return tuple(
            sorted(ended, key=lambda t: (t.state != "completed", not t.is_feasible, sign * (t.value or 0.0), t.number))
        )

    @property
    def unfinished(self) -> tuple[TrialView, ...]:
        """Trials that were running when the sweep ended, best first; trials without a value come last."""
        sign = -1.0 if self.goal == "maximize" else 1.0
        unfinished = [t for t in self.trials if t.state in {LEFT, "cancelled"}]
        return tuple(
            sorted(
                unfinished,
                key=lambda t: (t.value is None or math.isnan(t.value), sign * (t.value or 0.0), t.number),
            )
        )

    @property
    def best_unfinished(self) -> TrialView | None:
        """Trial with the best last report among those not completed, pruned or failed; None without any."""
        sign = -1.0 if self.goal == "maximize" else 1.0
        valued = [t for t in self.trials if t.value is not None and not math.isnan(t.value)]
        unfinished = [t for t in valued if t.state not in {"completed", "pruned", "failed"}]
        return min(unfinished, key=lambda t: (sign * (t.value or 0.0), t.number), default=None)

    @property
    def best(self) -> TrialView | None:
        """The best completed trial that violates no constraints; None without such a trial."""
        ranked = self.ranked
        return ranked[0] if ranked and ranked[0].state == "completed" and ranked[0].is_feasible else None
