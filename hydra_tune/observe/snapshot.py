"""A sweep at one moment, in plain values: all that the terminal view, the summary and the JSON report read.

Whoever runs the sweep makes these; nothing here, and nothing that reads them, holds a job, a task or a tensor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

ENDED: frozenset[str] = frozenset({"completed", "pruned", "cancelled", "failed"})
LEFT = "interrupted"
"""The state of a trial that a later run of the sweep goes on with."""
Goal = Literal["minimize", "maximize"]
Status = Literal["running", "stopping", "completed", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """One trial.

    Args:
        number: the tuner's number, from 0.
        state: where it is: a job's state; `cancelled` for one that a signal stopped, `interrupted` if a later run goes on
            with it.
        params: what was drawn.
        value: the metric as last reported; None before the first report.
        epoch: the epoch it is in or ended in, from 1; 0 before the first; None where that is not known.
        epochs: epochs planned.
        step: optimizer steps done.
        num_steps: optimizer steps planned; None where the data has no length.
        remaining_seconds: time left, as the pool estimates it.
        num_shards: shards its model was cut into; 0 where that is not known.
        optimizer_placement: where its updates were made, "device" or "host"; None where that is not known.
        group_size: trials that it was computed together with, itself counted; 1: by itself, or not known.
        units_run: shard units run.
        units_saved: shard units never run, because it was pruned or cancelled; 0 where that is not known.
        error: what made it fail, on one line.
        earlier: it ended before this run, in a study that is continued.
        name: what it is called; None: by its number.
        values: the metric of its last reports, oldest first.
        compute_seconds: time that its units computed.
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
    optimizer_placement: str | None = None
    group_size: int = 1
    units_run: int = 0
    units_saved: int = 0
    error: str | None = None
    earlier: bool = False
    name: str | None = None
    values: tuple[float, ...] = ()
    compute_seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it has ended, in whichever way."""
        return self.state in ENDED

    @property
    def share_done(self) -> float:
        """How much of the trial has run, from 0 to 1."""
        return min(1.0, self.step / self.num_steps) if self.num_steps else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One device.

    Args:
        name: such as `cpu:0`.
        busy_share: share of the time in which a unit ran, from 0 to 1: lately in a live view, overall in a summary.
        resident_bytes: bytes on the device now.
        peak_bytes: the most bytes there were.
        budget_bytes: bytes there may be.
        bytes_in_by_kind: bytes loaded from the host.
        bytes_out_by_kind: bytes spilled to the host.
        bytes_across_by_kind: bytes taken over from another device.
        units: shard units it ran.
        loads_under_way: blocks on their way to it in the background.
        bytes_in_per_second, bytes_out_per_second: lately in a live view, overall in a summary; in from other devices
            too, out to the host alone.
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
        name: for people.
        metric: the name of what is optimized.
        goal: the direction.
        status: where the sweep is.
        trials: all of them, by number.
        devices: all of them, by name.
        num_planned: trials the study is to have; None: no limit.
        elapsed_seconds: since the sweep started.
        units_run: shard units run.
        units_saved: shard units never run, because their trial was pruned.
        scheduler_seconds: time spent on deciding what runs next.
        study: the study's name in its storage; None before it is open.
        error: why the sweep ended early.
        warnings: what is to be told about the sweep itself.
        event_log: the file for `hydra-tune trace`; None: there is none.
        event_log_bytes: its size; None where that is not known.
        event_log_dropped: what was left out of the file because of its limit, by kind.
        weights: the files of the weights that are kept, by trial, the best first.
        makespan_seconds: what it will have taken in the end, as far as can be told; once it has ended, what it took.
        bound_seconds: what no schedule of its units on these devices could have been below.
    """

    # Below, a sweep is mostly its beginning: imports, captures and first batches, of which the bound knows nothing.
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

    def count(self, state: str) -> int:
        """How many trials are in `state`."""
        return sum(trial.state == state for trial in self.trials)

    @property
    def ranked(self) -> tuple[TrialView, ...]:
        """Completed trials, best first, then pruned ones, best first; those without a value are left out."""
        sign = -1.0 if self.goal == "maximize" else 1.0
        valued = [t for t in self.trials if t.value is not None and not math.isnan(t.value)]
        ended = [t for t in valued if t.state in {"completed", "pruned"}]
        return tuple(sorted(ended, key=lambda t: (t.state != "completed", sign * (t.value or 0.0), t.number)))

    @property
    def best_unfinished(self) -> TrialView | None:
        """The trial whose last report is the best, of those that have neither completed nor been pruned; None without any."""
        sign = -1.0 if self.goal == "maximize" else 1.0
        valued = [t for t in self.trials if t.value is not None and not math.isnan(t.value)]
        others = [t for t in valued if t.state not in {"completed", "pruned", "failed"}]
        return min(others, key=lambda t: (sign * (t.value or 0.0), t.number), default=None)

    @property
    def best(self) -> TrialView | None:
        """The best completed trial."""
        ranked = self.ranked
        return ranked[0] if ranked and ranked[0].state == "completed" else None
