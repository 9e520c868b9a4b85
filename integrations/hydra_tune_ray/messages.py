"""Messages between trials, pools and the directory.

Messages hold plain values, or references to files in Ray's object store, so that a trial's process needs no torch, and a
pool needs no Ray Tune. `TrialClient` (`client.py`) and `NodePool` (`node/node_pool.py`) exchange messages at a trial's begin,
at each report, at a save and at the end. `PoolTrainable` (`trainable.py`) makes each `BeginRequest`, and `NodePool` and
`LeasedTrialTable` (`node/trial_leases.py`) make the answers. `node/heartbeat.py` sends a pool's load to `PoolDirectory`
(`node/pool_directory.py`), `node/local_socket.py` carries reports to the trials of one node, and `Pools` (`pools.py`) returns
`PoolFigures`.

Note: each change of a message here needs a higher `PROTOCOL` (`version.py`), because pools may be older than a driver.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra_tune_ray.node.nodes import DeviceNode

Files = Mapping[str, bytes]
"""Contents of a checkpoint folder by file name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTicket:
    """Address of a trial that waits at a report: a substitute for the checkpoint, as long as the trial waits.

    Attributes:
        pool: the name of the pool that holds the trial.
        key: of the trial in the pool.
        number: of the report, from 1.
        config: digest of the config that the trial was built from.
    """

    pool: str
    key: str
    number: int
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRequest:
    """Request to train a trial.

    Attributes:
        trial_id: Ray's id of the trial.
        key: of this attempt at the trial; every attempt has a new key.
        name: for messages.
        build: the pickled function that builds the task.
        config: Ray's sample of the search space.
        files: checkpoint to resume from, or a reference to the checkpoint in Ray's object store; None: start from
            scratch.
        is_changed: whether the checkpoint is of another config.
        number: reports made before this attempt.
        lease_seconds: seconds that the trial lives without a sign of its client.
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
class BeginReply:
    """Confirmation that a trial is in a pool.

    Attributes:
        line: path of a socket on the pool's node, as of `hydra_tune_ray.node.local_socket`; empty without a socket.
    """

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOutcome:
    """A trial has reported and waits for the answer.

    Attributes:
        number: of the report, from 1.
        step: as of `hydra_tune.Reported`.
        metrics: likewise.
        is_last: whether the report is the last planned report, and no training follows; `stop=` of the task may end the trial
            after any report.
    """

    number: int
    step: int
    metrics: dict[str, float]
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOutcome:
    """A trial has ended.

    Attributes:
        status: as of `hydra_tune.Result`; or "unknown" from a pool that does not know the trial.
        error: of a failed trial, as text.
        metrics: of the last report.
    """

    status: str
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingOutcome:
    """No news within the time limit of an answer; the client asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOutcome:
    """A trial continues in another pool.

    Attributes:
        pool: the name of the new pool.
        files: as of `BeginRequest`: state to resume from; None: the trial starts from scratch.
    """

    pool: str
    files: Any


Outcome = ReportOutcome | EndOutcome | WaitingOutcome | MoveOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoadReport:
    """Remaining work of a pool.

    Attributes:
        node: the pool's node.
        trials: seconds of compute that each trial still needs, by key; None where not known yet.
        started: keys of the trials with state, movable only at a report.
        leaving: trials about to move but still here, by key: name of the target pool, and seconds as in `trials`.
        epochs: epochs that each trial, leaving or not, still has to run, by key, with the fraction of the present
            epoch; only where known, as for each trial with seconds.
    """

    node: DeviceNode
    trials: Mapping[str, float | None] = field(default_factory=dict)
    started: frozenset[str] = frozenset()
    leaving: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """Figures of a pool.

    Attributes:
        name: of the pool.
        node_id: of the pool's node.
        pid: of the pool's process.
        trials: names of the trials held now.
        devices: names of the pool's devices.
        busy_seconds: compute time of all devices together, in seconds.
        units_run: shard units run.
        moved: number of trials handed to other pools.
        width: trials in flight that keep the devices busy, as of `HydraExecutor`.
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
