"""`PoolRecorder`: records the events, decisions and units of a running pool, for `hydra_tune.simulate.recorded.recording`.

`ExecutorSettings.open_pool` (`settings.py`) makes the recorder if the executor has `record=True`. `JobDispatcher`
(`dispatcher.py`) then records each decision and each release of an ended job's memory, and `Worker` (`worker.py`) the work
for each command. `Pool.recording` (`pool/pool.py`) returns the recording on request. The recorder keeps numbers, names, and
the scheduler's events and commands, and must keep no block or trial alive.

Note: locks. The recorder has no lock of its own: `decided` and `recording` run under the pool's lock, `turn` and `release` on
any thread without a lock.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra_tune.devices.device import Device
from hydra_tune.observe.trace.turns import BlockFacts, WorkerTurn, in_turn
from hydra_tune.schedule import Command, Event
from hydra_tune.schedule.journal import SchedulerDecision
from hydra_tune.simulate.recorded.recording import RecordedDevice, Recording


class PoolRecorder:
    """The recording of a pool, from its beginning."""

    def __init__(self, devices: Sequence[Device], policy: str, max_concurrent: int, admission: str) -> None:
        self._devices = tuple(RecordedDevice(name=device.name, budget_bytes=device.budget_bytes) for device in devices)
        self._policy, self._max_concurrent, self._admission = policy, max_concurrent, admission
        self._decisions: list[SchedulerDecision] = []
        self._turns: list[WorkerTurn] = []
        self._releases: dict[str, WorkerTurn] = {}
        self._facts: dict[int, BlockFacts] = {}

    def decided(self, at_ns: int, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Record a decision, by the clock of `time.perf_counter_ns`. Under the pool's lock, in order."""
        self._decisions.append(SchedulerDecision(at_ns, tuple(events), tuple(commands)))

    @contextmanager
    def turn(self, job: str, device: str) -> Iterator[WorkerTurn]:
        """Record a worker's work for a single command."""
        turn = WorkerTurn(job, device, self._facts)
        # Without a lock: `append` is atomic, and only the order within a job and within a device counts, which have one
        # thread at a time.
        self._turns.append(turn)
        with in_turn(turn):
            yield turn

    @contextmanager
    def release(self, job: str) -> Iterator[None]:
        """Record the release of an ended job's memory, on any thread."""
        turn = self._releases[job] = WorkerTurn(job, "", self._facts)
        with in_turn(turn):
            yield

    def recording(self) -> Recording:
        """Return the recording so far. Under the pool's lock."""
        turns = tuple(turn.so_far() for turn in list(self._turns))
        releases = {job: turn.so_far() for job, turn in dict(self._releases).items()}
        return Recording(
            policy=self._policy,
            max_concurrent=self._max_concurrent,
            admission=self._admission,
            devices=self._devices,
            decisions=tuple(self._decisions),
            turns=turns,
            releases=releases,
            # Last: a turn notes the facts of a block before an action on the block.
            blocks=dict(self._facts),
        )
