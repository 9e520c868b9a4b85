"""What trials and pools say to each other: plain values, so that neither has to import what the other needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra_tune_ray.nodes import DeviceNode

Files = Mapping[str, bytes]
"""A folder of a trial's checkpoint, by the names of its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Where a trial waits at a report: as good as its weights, as long as it does.

    Attributes:
        pool: the name of the pool that has it.
        key: of the trial there.
        number: of the report, from 1.
        config: a digest of what it was built from.
    """

    pool: str
    key: str
    number: int
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """A trial for a pool.

    Attributes:
        trial_id: Ray's.
        key: of this attempt at the trial; another attempt has another.
        name: for messages.
        build: what makes its task, pickled.
        config: what Ray has drawn.
        files: the checkpoint that it goes on from, or a reference to that in Ray's object store; None: it begins.
        is_changed: whether the checkpoint is of another config.
        number: reports that were made before.
        lease_seconds: how long it lives without a sign of whoever has asked for it.
    """

    trial_id: str
    key: str
    name: str
    build: bytes
    config: Mapping[str, Any]
    files: Any = None
    is_changed: bool = False
    number: int = 0
    lease_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A trial is in a pool.

    Attributes:
        line: path of a socket on the pool's node, as of `hydra_tune_ray.line`; empty: there is none.
    """

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A trial has reported and waits.

    Attributes:
        number: of the report, from 1.
        step: as of `hydra_tune.Reported`.
        metrics: likewise.
        is_last: whether the trial does nothing after it.
    """

    number: int
    step: int
    metrics: dict[str, float]
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A trial has ended.

    Attributes:
        status: as of `hydra_tune.Result`; or "unknown" where the pool has never heard of it.
        error: what it has failed with, as text.
        metrics: of its last report.
    """

    status: str
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Nothing has happened in the time that an answer may take; ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A trial is to go on in another pool.

    Attributes:
        pool: the name of that.
        files: as of `Begin`: the state that it goes on from; None: as it was begun.
    """

    pool: str
    files: Any


Outcome = Report | Over | Waiting | Moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a pool has to do.

    Attributes:
        node: where it is.
        trials: seconds of compute that each trial still has to come, by key; None where that is not known yet.
        started: keys of those that have a state, which move only at a report.
        leaving: trials that are to leave and have not yet, by key: the name of the pool they go to, and seconds as in `trials`.
        epochs: that each of all these still has to come, by key, with the part of the present one; where that is known.
    """

    node: DeviceNode
    trials: Mapping[str, float | None] = field(default_factory=dict)
    started: frozenset[str] = frozenset()
    leaving: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """What a pool has done.

    Attributes:
        name: of the pool.
        node_id: where it is.
        pid: of its process.
        trials: names of the trials that it has now.
        devices: names of its devices.
        busy_seconds: time that its devices computed, together.
        units_run: shard units run.
        moved: trials that it has given to other pools.
        width: trials in flight that keep its devices busy, as of `HydraExecutor`.
    """

    name: str
    node_id: str
    pid: int
    trials: tuple[str, ...]
    devices: tuple[str, ...]
    busy_seconds: float
    units_run: int
    moved: int
    width: int = 0
