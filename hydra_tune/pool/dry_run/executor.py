"""Rehearsal of the steps of several trials on several devices: places and moves of all blocks, without training.

Scheduler, pagers, prefetch and steps are the same code as in a run. The devices copy nothing. On a virtual clock, units
and copies take their measured times (`train/timing/step_timing.py`), so a unit waits for copies as in a run. Without
measured times, a unit takes its pilot's estimate, and a copy beside a unit ends with the unit. `report.py` runs a
`PoolRehearsal`, or two of different lengths, once the plans of all forecast tasks are made.

Note: `_tell` and `_shard_moves` repeat the order of `JobDispatcher` (`pool/runtime/dispatcher.py`), and `_RehearsedTrial`
repeats parts of `JobState` (`pool/runtime/job_state.py`), so a change there needs the same change here. One thread runs
the rehearsal. The rehearsal must not touch a running job.
"""

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hydra_tune.devices.weightless import WeightlessDevice
from hydra_tune.errors import HydraTuneError
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.prefetch import BlockPrefetcher, UnitMemoryNeeds
from hydra_tune.pool.devices.next_units import NextUnitPredictor, unit_of
from hydra_tune.pool.dry_run.plan_failures import RehearsalError
from hydra_tune.schedule import (
    Admit,
    Command,
    DeviceAdded,
    Event,
    JobAdmitted,
    JobStopped,
    JobSubmitted,
    Policy,
    Run,
    Scheduler,
    ShardMoved,
    Unit,
    UnitFinished,
)
from hydra_tune.shard.fake.fake_world import RehearsalFakeMode
from hydra_tune.train.loop.batch_units import PendingUnit
from hydra_tune.train.timing.fake_trial import TrialRehearsal

_LEAST_SECONDS = 1e-6  # the least time of a unit, for units of unknown time

Moved = dict[tuple[str, str, str], int]
"""Bytes by device, way ("in", "out" or "across") and kind."""


class _RehearsedTrial:
    """A rehearsed trial, the counterpart of the pool's `JobState`."""

    is_spread = False  # a rehearsed trial never runs batches side by side

    def __init__(self, key: str, rehearsal: TrialRehearsal, num_steps: int, on_step: Callable[[], None]) -> None:
        self.key = key
        self._units = rehearsal.steps(num_steps)
        self._on_step = on_step
        self.step_seconds = rehearsal.times.total
        self._num_steps = num_steps
        self._knows_length = rehearsal.knows_length
        self._steps_done = 0
        self._left_seconds = self.step_seconds  # of the present step, still to come
        self._pace = rehearsal.pace
        self._alike: Counter[tuple[str, int]] = Counter()  # units of the present step, by kind and shard
        self.step_ends: list[float] = []
        self.units_per_step = 0
        self.pending: PendingUnit | None = None
        self.places: dict[int, str | None] = {}
        self._told: dict[int, str | None] = {}

    def advance(self) -> PendingUnit | None:
        """Advance to the next unit; return None after the last unit."""
        self.pending = next(self._units, None)
        # `TrialRehearsal.steps` yields None after each step, and `next` gives None once more when nothing is left.
        while self.pending is None and self._steps_done < self._num_steps:
            self._steps_done += 1
            self._left_seconds = self.step_seconds
            self.units_per_step = self._alike.total()
            self._alike.clear()
            self._on_step()
            self.pending = next(self._units, None)
        return self.pending

    def run(
        self, stand: "_RehearsedDevice", needs: Callable[["_RehearsedTrial", PendingUnit, str], list[UnitMemoryNeeds]]
    ) -> float:
        """Run the due unit, and the updates of the same shard right after; return the seconds for the scheduler."""
        shard, seconds = self._unit().shard, 0.0
        while True:
            unit = self._unit()
            self.pending = None
            if stand.prefetch is not None:
                stand.prefetch.asks = partial(needs, self, unit, stand.device.name)
            stand.run(unit, self._seconds(unit))
            self._alike[unit.key] += 1
            seconds += max(unit.seconds, _LEAST_SECONDS)
            self._left_seconds = max(0.0, self._left_seconds - unit.seconds)
            steps_done = self._steps_done
            following = self.advance()
            self.step_ends += [stand.device.now] * (self._steps_done - steps_done)
            if following is None or (following.kind, following.shard) != ("update", shard):
                return seconds

    def _seconds(self, unit: PendingUnit) -> float:
        """Seconds of a unit on the device, without waits for copies."""
        measured_seconds = None if self._pace is None else self._pace.seconds.get((*unit.key, self._alike[unit.key]))
        return max(unit.seconds if measured_seconds is None else measured_seconds, _LEAST_SECONDS)

    def _unit(self) -> PendingUnit:
        assert self.pending is not None
        return self.pending

    @property
    def goes_on(self) -> bool:
        """Return True: a trial without a further unit is recognized by the lack of a due unit."""
        return True

    @property
    def remaining_seconds(self) -> float:
        """Seconds of compute still to come; without a known length, estimated as in a run."""
        steps = self._num_steps - self._steps_done if self._knows_length else max(1, self._steps_done)
        return self._left_seconds + max(0, steps - 1) * self.step_seconds

    @property
    def unit(self) -> Unit | None:
        return None if self.pending is None else unit_of(self.pending)

    def news(self) -> tuple[int, str | None] | None:
        """Return shard and place of the next unit if unknown to the scheduler."""
        if self.pending is None:
            return None
        shard = self.pending.shard
        place = self.places.get(shard)
        if self._told.get(shard) == place:
            return None
        self._told[shard] = place
        return shard, place


class _RehearsedDevice:
    def __init__(self, device: WeightlessDevice, pager: Pager, *, sends_ahead: bool) -> None:
        self.device, self.pager = device, pager
        self.prefetch = BlockPrefetcher(pager) if sends_ahead else None
        self._due = 0.0  # compute seconds of the unit, until compute begins
        pager.begins = self._compute

    def run(self, unit: PendingUnit, seconds: float) -> None:
        """Run a unit that takes `seconds` of compute once its blocks are resident."""
        self._due = seconds
        unit.run(self.device, self.pager)
        self._pass()  # a unit without blocks never calls `begins`, so its time passes here
        self.device.moment += 1

    def _compute(self) -> None:
        if self.prefetch is not None:
            self.prefetch.begin()
        self._pass()

    def _pass(self) -> None:
        self.device.now += self._due
        self._due = 0.0


class PoolRehearsal:
    """Rehearses a number of steps of each trial.

    Args:
        trials: rehearsals by trial name, in the order of submission.
        sends_ahead: whether a device prefetches blocks of the next unit during compute.

    Attributes:
        seconds: virtual time of the last unit's end.
        deciding_seconds: CPU seconds of the scheduler and of the choice of blocks to prefetch.
        marks: cumulative bytes moved at the end of each step of any trial.
    """

    def __init__(
        self,
        trials: Mapping[str, TrialRehearsal],
        devices: Sequence[WeightlessDevice],
        policy: Policy,
        *,
        max_concurrent: int,
        admission: str,
        num_steps: int,
        sends_ahead: bool,
        stage: RehearsalFakeMode,
    ) -> None:
        self._stage = stage
        self.pagers = {device.name: Pager(device) for device in devices}
        self.seconds = 0.0
        self.deciding_seconds = 0.0
        self.num_units = 0
        self._stands = {
            device.name: _RehearsedDevice(device, self.pagers[device.name], sends_ahead=sends_ahead)
            for device in devices
        }
        self._scheduler = Scheduler(policy=policy, max_concurrent=max_concurrent, admission=admission)
        self.marks: list[Moved] = []
        self._players = {name: _RehearsedTrial(name, trial, num_steps, self._mark) for name, trial in trials.items()}
        # A lock for form: the rehearsal has one thread.
        self._next = NextUnitPredictor(policy, self._scheduler, self._stands, self._players, threading.Condition())
        self._moves: deque[tuple[str, int, str | None]] = deque()
        self._ends: list[tuple[float, int, UnitFinished]] = []
        self._num_ends = 0
        for name, trial in trials.items():
            trial.state.watch(lambda shard, place, name=name: self._moves.append((name, shard, place)))  # type: ignore[misc]

    def run(self) -> None:
        """Run all units."""
        with self._stage:
            self._run_all()

    def _run_all(self) -> None:
        self._tell(*(DeviceAdded(device=name) for name in self._stands))
        self._tell(*(JobSubmitted(job=name) for name in self._players))
        # Discrete events: the earliest end of a unit comes first, so decisions are made in the order of virtual time.
        while self._ends:
            self.seconds, _, finished = heapq.heappop(self._ends)
            self._tell(finished)
            if finished.unit is None:
                self._tell(JobStopped(job=finished.job))
        self.deciding_seconds += self._next.seconds

    @property
    def step_ends(self) -> dict[str, list[float]]:
        """Virtual times at which the steps of each trial ended."""
        return {name: player.step_ends for name, player in self._players.items()}

    @property
    def moved(self) -> Moved:
        """Cumulative bytes moved so far."""
        return {
            (name, way, kind.value): count
            for name, pager in self.pagers.items()
            for way, counts in (("in", pager.bytes_in), ("out", pager.bytes_out), ("across", pager.bytes_across))
            for kind, count in counts.items()
        }

    @property
    def units_per_step(self) -> dict[str, int]:
        """Units of each trial's last finished step."""
        return {name: player.units_per_step for name, player in self._players.items()}

    def _mark(self) -> None:
        self.marks.append(self.moved)

    def _tell(self, *events: Event) -> None:
        start = time.thread_time()
        moves = self._shard_moves(events)
        commands = self._scheduler.handle(*moves, *events)
        self._next.decided((*moves, *events), commands)
        self.deciding_seconds += time.thread_time() - start
        for command in commands:
            self._carry_out(command)

    def _shard_moves(self, events: Sequence[Event]) -> list[ShardMoved]:
        """Return the moves that the pool would tell the scheduler, about units that may be assigned now."""
        jobs_to_check: dict[str, None] = {}
        while self._moves:
            name, shard, place = self._moves.popleft()
            jobs_to_check[name] = None
            self._players[name].places[shard] = place
        jobs_to_check |= dict.fromkeys(event.job for event in events if isinstance(event, UnitFinished))
        updates = [(name, self._players[name].news()) for name in jobs_to_check]
        return [ShardMoved(job=name, shard=news[0], device=news[1]) for name, news in updates if news is not None]

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Admit):
            self._admit(command.job)
        elif isinstance(command, Run):
            self._run(command.job, command.device)

    def _admit(self, name: str) -> None:
        player = self._players[name]
        player.advance()
        unit = player.unit
        assert unit is not None, "a step has a unit"
        self._tell(
            JobAdmitted(
                job=name, unit=unit, remaining_seconds=player.remaining_seconds, step_seconds=player.step_seconds
            )
        )

    def _run(self, name: str, device: str) -> None:
        player, stand = self._players[name], self._stands[device]
        # The clock of an idle device stands still until the device's next unit begins.
        stand.device.now = max(stand.device.now, self.seconds)
        self._stage.begin_unit()
        # The unit runs at once; on the virtual clock it ends later, as the event below.
        try:
            seconds = player.run(stand, self._next.needs)
        except HydraTuneError:
            raise
        except Exception as error:
            raise RehearsalError(
                f"{name} cannot be planned: its code reads values of its tensors, which have only sizes here "
                f"({type(error).__name__}: {error}); train some steps of it, and look at stats()",
                name=name,
            ) from error
        self._num_ends += 1
        self.num_units = sum(stand.device.moment for stand in self._stands.values())
        finished = UnitFinished(
            job=name,
            device=device,
            seconds=seconds,
            unit=player.unit,
            remaining_seconds=player.remaining_seconds,
            step_seconds=player.step_seconds,
        )
        # The number breaks ties in the order of the starts; events themselves cannot be compared.
        heapq.heappush(self._ends, (stand.device.now, self._num_ends, finished))
