"""The real scheduler on a virtual clock.

The simulator plays the pool: hands the same events to the same `Scheduler`, carries out its commands, and lets the time
of units and loads pass. Simulation and run share one state machine.

People import `simulate` from `hydra_tune.simulate`, and `hydra-tune simulate` (`cli/commands/simulate.py`) calls
`simulate` once a `Scenario` has been made of its options or of a profile. `RepetitionSkipper` (`repeats.py`) moves the
simulator on over repeated steps. The module must not read a clock, import the pool, or choose a unit by itself.

Note: order. Events of one moment run in the order in which they were entered; trials that arrive together are told together. A
trial's step and position change before the scheduler is told, because the predictions and the places read both. Each duration
is rounded to the grid (`grid.py`).
"""

import heapq
import math
from collections import deque

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import (
    Admit,
    Command,
    DeviceAdded,
    DeviceLost,
    DeviceSlowed,
    EndBurst,
    Event,
    JobAdmitted,
    JobResumed,
    JobStopped,
    JobSubmitted,
    Policy,
    Run,
    Scheduler,
    ShardMoved,
    Unit,
    UnitFinished,
    make_policy,
    makespan_bound,
)
from hydra_tune.simulate.engine.entities import (
    ABSENT,
    Entry,
    SimulatedDeviceState,
    SimulatedJobState,
    SimulationEventKind,
)
from hydra_tune.simulate.engine.grid import TimeGrid
from hydra_tune.simulate.engine.lookahead import Lookahead, SimulatedPrefetcher
from hydra_tune.simulate.engine.repeats import RepetitionSkipper
from hydra_tune.simulate.engine.transfers import ShardTransferSimulator, SimulationTimeline
from hydra_tune.simulate.model import Scenario
from hydra_tune.simulate.outcome import DeviceOutcome, SimulationResult

_MOST_SECONDS = 1e250  # sums and quotients of larger floats soon overflow to infinity
_PRECISION = 1e-3  # greatest relative error of a step's rounded time


def simulate(
    scenario: Scenario,
    policy: str | Policy = "lrtf",
    *,
    lookahead: Lookahead | None = None,
    timeline: int = 0,
    skip_repeats: bool = True,
) -> SimulationResult:
    """Run a scenario to its end.

    Args:
        scenario: trials, devices, links and faults.
        policy: the deciding policy, by name or as an object.
        lookahead: decides what to prefetch; default the policy.
        timeline: number of the timeline's first bars to keep.
        skip_repeats: skip exact repetitions instead of simulating them unit by unit. Changes no figure but
            `units_skipped`.

    Raises:
        ConfigError: an unknown policy, or times so long that shorter ones vanish by rounding.
    """
    return Simulator(scenario, policy, lookahead=lookahead, timeline=timeline, skip_repeats=skip_repeats).run()


def _grid(scenario: Scenario) -> TimeGrid:
    """Choose a grid for all of the scenario's times that keeps every step's length to within a thousandth.

    Raises:
        ConfigError: no such grid exists, because the scenario is so much longer than one of its steps.
    """
    try:
        longest = scenario.longest_possible_seconds()
    except OverflowError:
        # A byte or step count of the scenario is an int beyond the range of floats.
        longest = math.inf
    if longest < _MOST_SECONDS:
        grid = TimeGrid(longest)
        # By step, because thousands of trials may share one.
        rounded = {trial.step: sum(grid.round(unit.seconds) for unit in trial.step) for trial in scenario.trials}
        if all(abs(rounded[trial.step] / trial.step_seconds - 1) < _PRECISION for trial in scenario.trials):
            return grid
    shortest = min(trial.step_seconds for trial in scenario.trials)
    raise ConfigError(
        f"a scenario of up to {longest:.3g} s is too long for steps of {shortest:.3g} s: their times cannot be added "
        "exactly; take fewer steps, earlier arrivals and faults, or devices that are not as slow"
    )


class Simulator:
    """One simulation. Arguments as of `simulate`."""

    def __init__(
        self,
        scenario: Scenario,
        policy: str | Policy,
        *,
        lookahead: Lookahead | None,
        timeline: int,
        skip_repeats: bool,
    ) -> None:
        policy_object = make_policy(policy)
        self.policy_name = policy if isinstance(policy, str) else type(policy).__name__
        self.scenario = scenario
        self.grid = _grid(scenario)
        ordered = sorted(scenario.trials, key=lambda trial: trial.arrival_seconds)
        self.jobs = [
            SimulatedJobState(number, trial, self.grid, reports_wait=scenario.answer_seconds > 0)
            for number, trial in enumerate(ordered)
        ]
        self.devices = [SimulatedDeviceState(number, device) for number, device in enumerate(scenario.devices)]
        self.timeline = SimulationTimeline(timeline)
        self.transfers = ShardTransferSimulator(
            scenario, self.devices, self.jobs, self.grid, self.timeline, self._moved
        )
        self._scheduler = Scheduler(
            policy=policy_object, max_concurrent=scenario.max_concurrent or len(self.jobs), admission=scenario.admission
        )
        self._numbers = {job.name: job for job in self.jobs}
        self._ahead: SimulatedPrefetcher | None = None
        if scenario.overlap and any(device.bandwidth is not None for device in scenario.devices):
            self._ahead = SimulatedPrefetcher(
                lookahead or policy_object, self._scheduler, self.devices, self._numbers, self.transfers
            )
        self._repeats = RepetitionSkipper(self, policy_object, lookahead) if skip_repeats else None
        self._device_numbers = {device.name: device for device in self.devices}
        self._commands: deque[Command] = deque()
        self._num_entries = 0
        self._preparer_free = 0.0
        self.heap: list[Entry] = []
        self.alive: dict[int, SimulatedJobState] = {}
        self.now = 0.0
        self.offset = 0.0  # added to every remaining time told to the scheduler; see `repeats.py`
        self.units_skipped = 0
        self.finished_seconds: dict[str, float] = {}

    def run(self) -> SimulationResult:
        """Advance the clock until no event is left."""
        self._begin()
        # Locals for speed: the loop runs once for every event.
        heap, repeats, last_of_course = self.heap, self._repeats, SimulationEventKind.UNIT_STARTS
        handlers = (  # in the order of `SimulationEventKind`
            self._unit_ends,
            self._unit_starts,
            self._arrives,
            self._device_joins,
            self._device_slows,
            self._device_leaves,
            self._prepared,
            self._answered,
        )
        while heap:
            self.now, _, kind, number, value = heapq.heappop(heap)
            handlers[kind](number, value)
            if self._commands:
                self._carry_out()
            if repeats is not None and (repeats.wants_look or kind > last_of_course):
                repeats.look(kind)
        return self._outcome()

    def _begin(self) -> None:
        # Devices before trials: a trial that arrives at the same moment finds the devices there.
        for device, described in zip(self.devices, self.scenario.devices, strict=True):
            self._at(self.grid.round(described.joins_seconds), SimulationEventKind.DEVICE_JOINS, device.number)
        for fault in self.scenario.slowdowns:
            device = self._device_numbers[fault.device]
            speed = self.scenario.devices[device.number].speed * fault.factor
            self._at(self.grid.round(fault.at_seconds), SimulationEventKind.DEVICE_SLOWS, device.number, speed)
        # In the order of time: a device that leaves at the moment of its return joins first.
        for outage in sorted(self.scenario.outages, key=lambda outage: outage.at_seconds):
            number = self._device_numbers[outage.device].number
            self._at(self.grid.round(outage.at_seconds), SimulationEventKind.DEVICE_LEAVES, number)
            if outage.until_seconds is not None:
                self._at(self.grid.round(outage.until_seconds), SimulationEventKind.DEVICE_JOINS, number)
        for job in self.jobs:
            self._at(self.grid.round(job.trial.arrival_seconds), SimulationEventKind.ARRIVES, job.number)

    def _at(self, time: float, what: SimulationEventKind, number: int, value: float = 0.0) -> None:
        self._num_entries += 1
        # The running number keeps events of one moment in order, so every simulation is deterministic.
        heapq.heappush(self.heap, (time, self._num_entries, what, number, value))

    # Events of the clock.

    def _device_joins(self, number: int, _: float) -> None:
        device = self.devices[number]
        device.is_there = True
        if self._ahead is not None:
            self._ahead.set_speed(device.name, device.speed)
        self._tell(DeviceAdded(device=device.name, speed=device.speed))
        self._notice_front()

    def _device_slows(self, number: int, speed: float) -> None:
        device = self.devices[number]
        device.speed = speed
        if not device.is_there:
            return  # the device will be added with this speed
        if self._ahead is not None:
            self._ahead.set_speed(device.name, speed)
        self._tell(DeviceSlowed(device=device.name, speed=speed))

    def _device_leaves(self, number: int, _: float) -> None:
        device = self.devices[number]
        job = device.job
        if self._ahead is not None:
            # Before the device is lost, so that the job of its buffer is a candidate for other buffers again.
            self._ahead.unclaim_device(device.name)
            self._ahead.set_speed(device.name, 0.0)
        self.transfers.lose(device, self.now)
        # Units of the lost device never end: drop their events.
        self.heap[:] = [
            entry for entry in self.heap if entry[2] > SimulationEventKind.UNIT_STARTS or entry[3] != number
        ]
        heapq.heapify(self.heap)
        for other in self.alive.values():
            if other.last_device == number:
                other.last_device = ABSENT
            # The scheduler learns of the loss by DeviceLost.
            other.told = [ABSENT if place == number else place for place in other.told]
        # The unit that was cut off runs again.
        if job is not None:
            job.is_ready = True
        self._tell(DeviceLost(device=device.name))
        self._notice_front()
        self._notice(*self.alive.values())

    def _arrives(self, number: int, _: float) -> None:
        heap, now, jobs = self.heap, self.now, [self.jobs[number]]
        # Trials that arrive together are told together, so that the scheduler admits by priority, not by number.
        while heap and heap[0][0] == now and heap[0][2] is SimulationEventKind.ARRIVES:
            jobs.append(self.jobs[heapq.heappop(heap)[3]])
        self._tell(*[JobSubmitted(job=job.name, priority=job.trial.priority) for job in jobs])

    def _prepared(self, number: int, _: float) -> None:
        self._begin_jobs(self.jobs[number])

    def _begin_jobs(self, *jobs: SimulatedJobState) -> None:
        events = []
        for job in jobs:
            self.alive[job.number] = job
            job.is_ready = True
            events.append(
                JobAdmitted(
                    job=job.name,
                    unit=job.units[job.position],
                    remaining_seconds=job.remaining_seconds() + self.offset,
                    step_seconds=job.step_seconds,
                )
            )
        self._tell(*events)
        self._notice(*jobs)

    def _answered(self, number: int, _: float) -> None:
        job = self.jobs[number]
        if job.step >= job.steps_run:
            self._tell(JobStopped(job=job.name))
            return
        self._announce(job, job.shards[job.position])
        job.is_ready = True
        remaining = job.remaining_seconds() + self.offset
        self._tell(JobResumed(job=job.name, unit=job.units[job.position], remaining_seconds=remaining))
        self._notice(job)

    def _unit_starts(self, number: int, _: float) -> None:
        if self._ahead is not None:
            self._ahead.buffer_next(self.devices[number], self.now, self.offset)

    def _unit_ends(self, number: int, seconds: float) -> None:
        device = self.devices[number]
        job = device.job
        assert job is not None
        device.units += job.steps_under_way
        device.busy_seconds += seconds
        device.job = None
        job.last_device = number
        following: Unit | None
        position = job.position + 1
        # Position and step change before the scheduler is told, because the prediction and the places read them in its
        # answer.
        if position == len(job.units):
            job.position = 0
            job.advance(job.steps_under_way)
            following = self._step_ends(job)
        else:
            job.position = position
            following = job.units[position]
        if following is not None:
            shard = following.shard
            # Told before the event that makes the job eligible, so that the policy sees the shard's place.
            if job.places[shard] != job.told[shard]:
                self._announce(job, shard)
            job.is_ready = True
        self._tell(
            UnitFinished(
                job.name,
                device.name,
                seconds,
                following,
                job.planned_seconds - job.prefix[job.position] + self.offset,
                job.step_seconds,
            )
        )
        if self._ahead is not None:
            self._ahead.notice(job.name)

    def _step_ends(self, job: SimulatedJobState) -> Unit | None:
        """Return the first unit of the next step; None at the end, or while a report waits for its answer."""
        if self._repeats is not None:
            self._repeats.step_ended(job)
        if job.step < job.milestone:
            return job.units[0]
        trial, answer = job.trial, self.grid.round(self.scenario.answer_seconds)
        if not job.is_true and job.step == trial.corrected_after_steps:
            job.correct()
        at_report = trial.report_steps is not None and job.step % trial.report_steps == 0
        is_over = job.step >= job.steps_run
        if not is_over:
            job.next_milestone()
        # After the last planned step the trial ends without waiting for an answer.
        if at_report and answer > 0 and job.step < trial.steps:
            self._at(self.now + answer, SimulationEventKind.ANSWERED, job.number)
            return None
        if is_over:
            self._tell(JobStopped(job=job.name))
            return None
        return job.units[0]

    # Commands of the scheduler.

    def _tell(self, *events: Event) -> None:
        commands = self._scheduler.handle(*events)
        if not commands:
            return
        self._commands += commands
        if self._ahead is not None:
            for command in commands:
                if type(command) is Run:  # from this moment on the job cannot be prefetched any more
                    self._ahead.notice(command.job)
                else:
                    self._ahead.notice_front()

    def _carry_out(self) -> None:
        commands = self._commands
        while commands:
            # Gathered, so that jobs admitted together are announced to the scheduler at once.
            admitted: list[SimulatedJobState] = []
            while commands:
                command = commands.popleft()
                if type(command) is Run:
                    self._run(self._numbers[command.job], self._device_numbers[command.device])
                elif type(command) is Admit:
                    admitted.append(self._numbers[command.job])
                elif type(command) is EndBurst:
                    self._end_burst(self._numbers[command.job], self._device_numbers[command.device])
                else:
                    self._release(self._numbers[command.job])
            if admitted:
                self._prepare(admitted)

    def _prepare(self, jobs: list[SimulatedJobState]) -> None:
        seconds = self.grid.round(self.scenario.prepare_seconds)
        if seconds == 0:
            self._begin_jobs(*jobs)
            return
        for job in jobs:
            self._preparer_free = max(self.now, self._preparer_free) + seconds
            self._at(self._preparer_free, SimulationEventKind.PREPARED, job.number)

    def _release(self, job: SimulatedJobState) -> None:
        self.transfers.drop(job)
        job.is_ready = False
        if self._ahead is not None:
            self._ahead.notice(job.name)
            self._ahead.unclaim(job.name)
        del self.alive[job.number]
        self.finished_seconds[job.name] = self.now

    def _run(self, job: SimulatedJobState, device: SimulatedDeviceState) -> None:
        now, shard = self.now, job.shards[job.position]
        job.is_ready = False
        device.job = job
        if self._ahead is not None:
            # After the view is gone: an unclaimed job that still has a view would return to the selection.
            self._ahead.unclaim(job.name)
        start = self.transfers.bring(device, job, shard, now)
        if job.last_device not in (device.number, ABSENT) and job.trial.boundary_bytes:
            start = max(start, self.transfers.bring_boundary(device, job, now))
        if job.changes[job.position]:
            device.dirty.add((job.number, shard))
        durations = job.durations.get(device.speed) or job.seconds_on(device.speed, self.grid)
        seconds = durations[job.position]
        if job.trial.burst_steps > 1:
            job.burst_step_seconds = seconds
            job.steps_under_way = min(job.trial.burst_steps, job.next_stop() - job.step)
            seconds *= job.steps_under_way
        device.started = start
        self._at(start + seconds, SimulationEventKind.UNIT_ENDS, device.number, seconds)
        if not self.timeline.is_full:
            self.timeline.add(device.name, job.name, job.units[job.position].kind, shard, start, start + seconds)
        if start > now:
            device.stall_seconds += start - now
            # Double buffering begins with the compute: until then the link brings the unit's own bytes.
            self._at(start, SimulationEventKind.UNIT_STARTS, device.number)
        elif self._ahead is not None:
            self._ahead.buffer_next(device, now, self.offset)

    def _end_burst(self, job: SimulatedJobState, device: SimulatedDeviceState) -> None:
        """End a device's burst with the running step, or with its first step."""
        seconds = job.burst_step_seconds
        # At least one step, even if the burst still waits for its bytes.
        num_steps = max(1, math.ceil((self.now - device.started) / seconds))
        if num_steps >= job.steps_under_way:
            return
        job.steps_under_way = num_steps
        # The end of the whole burst on the clock is replaced by the earlier end.
        number, end = device.number, device.started + num_steps * seconds
        self.heap[:] = [
            entry for entry in self.heap if entry[2] is not SimulationEventKind.UNIT_ENDS or entry[3] != number
        ]
        heapq.heapify(self.heap)
        self._at(end, SimulationEventKind.UNIT_ENDS, number, num_steps * seconds)
        self.timeline.shorten(device.name, end)

    # Double buffering.

    def claimed_by(self, job: SimulatedJobState) -> str | None:
        """Name of the device whose buffer is claimed for a job, or None."""
        return None if self._ahead is None else self._ahead.claimed_by(job.name)

    def _notice(self, *jobs: SimulatedJobState) -> None:
        if self._ahead is not None:
            for job in jobs:
                self._ahead.notice(job.name)

    def _notice_front(self) -> None:
        if self._ahead is not None:
            self._ahead.notice_front()

    # Places known to the scheduler: the place of each job's next unit, as told by the pool.

    def _moved(self, job: SimulatedJobState, shard: int) -> None:
        if job.is_ready and job.shards[job.position] == shard:
            self._announce(job, shard)

    def _announce(self, job: SimulatedJobState, shard: int) -> None:
        place = job.places[shard]
        if job.told[shard] != place:
            job.told[shard] = place
            name = None if place == ABSENT else self.devices[place].name
            self._tell(ShardMoved(job=job.name, shard=shard, device=name))
            if self._ahead is not None:
                self._ahead.notice(job.name)

    def _outcome(self) -> SimulationResult:
        # The makespan ends with the last trial, not with a later fault or device.
        span = self.now if not self.finished_seconds else max(self.finished_seconds.values())
        devices = tuple(
            DeviceOutcome(
                name=device.name,
                units=device.units,
                busy_seconds=device.busy_seconds,
                stall_seconds=device.stall_seconds,
                utilisation=device.busy_seconds / span,
                loads=device.loads,
                bytes_in=device.bytes_in,
                bytes_out=device.bytes_out,
            )
            for device in self.devices
        )
        return SimulationResult(
            policy=self.policy_name,
            makespan_seconds=span,
            bound_seconds=self._bound(),
            utilisation=sum(device.busy_seconds for device in self.devices) / (span * len(self.devices)),
            units_run=sum(device.units for device in self.devices),
            units_saved=sum((job.trial.steps - job.steps_run) * len(job.units) for job in self.jobs),
            units_skipped=self.units_skipped,
            first_loads=self.transfers.first_loads,
            network_bytes=self.transfers.network_bytes,
            devices=devices,
            finished_seconds=self.finished_seconds,
            timeline=tuple(self.timeline.bars),
        )

    def _bound(self) -> float | None:
        speeds = {device.speed for device in self.scenario.devices}
        # The bound holds only for identical devices.
        if len(speeds) > 1 or self.scenario.slowdowns or self.scenario.outages:
            return None
        return makespan_bound((job.true_seconds() for job in self.jobs), len(self.devices)) / speeds.pop()
