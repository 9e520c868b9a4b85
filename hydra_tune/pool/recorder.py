"""`Recorder`: keeps what a running pool is told, decides and does, for `hydra_tune.simulate.recording`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra_tune.devices.device import Device
from hydra_tune.observe.turns import BlockFacts, Turn, in_turn
from hydra_tune.schedule import Command, Event
from hydra_tune.schedule.journal import Decision
from hydra_tune.simulate.recording import RecordedDevice, Recording


class Recorder:
    """The record of one pool, from its beginning.

    Args:
        devices: the pool's.
        policy: name of the policy.
        max_concurrent: jobs admitted at once.
        admission: which of them come first.
    """

    def __init__(self, devices: Sequence[Device], policy: str, max_concurrent: int, admission: str) -> None:
        self._devices = tuple(RecordedDevice(name=device.name, budget_bytes=device.budget_bytes) for device in devices)
        self._policy, self._max_concurrent, self._admission = policy, max_concurrent, admission
        self._decisions: list[Decision] = []
        self._turns: list[Turn] = []
        self._releases: dict[str, Turn] = {}
        self._facts: dict[int, BlockFacts] = {}

    def decided(self, at_ns: int, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """The scheduler was told something, by the clock of `time.perf_counter_ns`. Under the pool's lock, in order."""
        self._decisions.append(Decision(at_ns, tuple(events), tuple(commands)))

    @contextmanager
    def turn(self, job: str, device: str) -> Iterator[Turn]:
        """Around what a worker does for one command."""
        turn = Turn(job, device, self._facts)
        self._turns.append(turn)  # a job's turns come one after another, each device's too
        with in_turn(turn):
            yield turn

    @contextmanager
    def release(self, job: str) -> Iterator[None]:
        """Around giving back the memory of a job that is over, on whichever thread."""
        turn = self._releases[job] = Turn(job, "", self._facts)
        with in_turn(turn):
            yield

    def recording(self) -> Recording:
        """What was recorded so far. Under the pool's lock."""
        for turn in self._turns:
            turn.settle()
        return Recording(
            policy=self._policy,
            max_concurrent=self._max_concurrent,
            admission=self._admission,
            devices=self._devices,
            decisions=tuple(self._decisions),
            turns=tuple(self._turns),
            releases=dict(self._releases),
            blocks=dict(self._facts),
        )
