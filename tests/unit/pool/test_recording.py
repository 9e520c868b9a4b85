"""A recorded run: it says what happened, the scheduler was pure, and the simulator makes the same of it."""

import json
import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import pytest

from hydra_tune import HydraExecutor, Reported
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.devices.device import DeviceCopyRoute
from hydra_tune.errors import ConfigError, HydraTuneError, ScheduleError
from hydra_tune.memory.pager import Pager
from hydra_tune.pool.runtime.worker import Worker
from hydra_tune.schedule import (
    POLICIES,
    EndBurst,
    JobAdmitted,
    JobResumed,
    LRTFPaper,
    Run,
    Unit,
    UnitFinished,
    make_policy,
)
from hydra_tune.schedule.journal import SchedulerDecision
from hydra_tune.schedule.machine import Scheduler
from hydra_tune.simulate import simulate
from hydra_tune.simulate.profile import parse_profile, recorded_profile
from hydra_tune.simulate.recorded.recording import read_recording
from hydra_tune.simulate.recorded.replay import replay
from hydra_tune.simulate.recorded.script import scripts_of
from hydra_tune.train.loop import burst
from tests.unit.pool.tasks import PATIENCE_SECONDS, Held, X, against_plain, running, task, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]
TIGHT = {"num_shards": 3, "device_memory": "8KiB", "link_bandwidth": "20MB/s"}


@pytest.fixture
def between_turns(monkeypatch):
    """Held by a worker while it has a turn, so that two devices have theirs in turn; who holds it comes between two turns."""
    lock, run = threading.Lock(), Worker._run

    def alone(*arguments):
        with lock:
            return run(*arguments)

    monkeypatch.setattr(Worker, "_run", alone)
    return lock


def record(
    policy="lrtf",
    devices="cpu:2",
    answering: AbstractContextManager = nullcontext(),  # noqa: B008
    held=None,
    *,
    staggered=False,
    priorities=(0, 0, 0),
    **options,
):
    """Three trials of different lengths; the fifth report is answered by pruning.

    Args:
        staggered, priorities: how the trials are submitted.
        held: lets units begin once all trials are prepared; None: they begin as soon as they may.
    """
    if held is not None:
        options["instrument"] = held
    with running(**({"devices": devices, "policy": policy, "num_shards": 3, "record": True} | options)) as pool:
        stream, reports = pool.events(), 0
        jobs = [
            pool.submit(
                task(epochs=epochs, validate=task().train), events=stream, staggered=staggered, priority=priority
            )
            for epochs, priority in zip((2, 4, 3), priorities, strict=True)
        ]
        if held is not None:
            until(lambda: not any(job.state in ("queued", "preparing") for job in jobs))
            held.go()
        left = len(jobs)
        while left:
            event = stream.get(PATIENCE_SECONDS)
            assert event is not None
            if not isinstance(event, Reported):
                left -= 1
                continue
            reports += 1
            with answering:
                if reports == 5:
                    event.job.prune()
                else:
                    event.job.proceed()
    for job in jobs:
        assert job.result().error is None
    return pool


def decide_again(recording, policy):
    """Commands of a new scheduler at the recorded events."""
    scheduler = Scheduler(policy=make_policy(policy), max_concurrent=recording.max_concurrent)
    return [tuple(scheduler.handle(*decision.events)) for decision in recording.decisions]


def on_ledger(recording, copies):
    """Bytes of copies as the ledger counts them, and so the simulator: a block's are rounded up."""
    return sum(recording.blocks[copy.block].nbytes for copy in copies)


@pytest.mark.cases(1)
@pytest.mark.parametrize("policy", [*POLICIES, LRTFPaper(idle_only=True)], ids=str)
def test_the_same_events_give_the_same_commands(policy):
    recording = record(policy).recording()
    assert recording.num_runs > 60
    assert decide_again(recording, policy) == [decision.commands for decision in recording.decisions]


def test_the_scheduler_is_told_that_trials_of_one_plan_are_alike():
    told = [event for decision in record().recording().decisions for event in decision.events]
    kinds = {event.alike for event in told if isinstance(event, JobAdmitted | UnitFinished)}
    assert len(kinds) == 1
    assert None not in kinds


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        pytest.param(policy, options, marks=[pytest.mark.slow] * ((row + column) % 2 > 0), id=f"{policy}-{name}")
        for row, policy in enumerate(("lrtf", "lrtf_paper", "fair"))
        for column, (name, options) in enumerate((("tight", TIGHT), ("ample", {})))
    ],
)
def test_one_device_is_replayed_to_the_nanosecond(policy, options, between_turns):
    """With one device no two workers race for a block, so everything follows from what was measured.

    But for a pruned job's bytes, which the driver's thread gives back: here between turns. Beside one, a recording does not say
    whether they were there before the turn looked for room.
    """
    played = replay(record(policy, "cpu:1", between_turns, **options).recording())
    assert played.simulated_orders == played.recorded_orders
    assert played.is_same_order
    assert played.num_agreeing == len(played.recorded_orders)
    assert played.simulated_seconds == played.recorded_seconds > 0
    told = [[decision.events for decision in each] for each in (played.simulated, played.recorded)]
    assert told[0] == told[1]


@pytest.mark.parametrize("staggered", [True, False])
def test_a_staggered_run_is_replayed_as_such(staggered):
    """As an option of the pool, or of its jobs."""
    admission = "auto" if staggered else "staggered"
    recording = record("lrtf", "cpu:1", admission=admission, max_concurrent=3, staggered=staggered).recording()
    assert recording.admission == admission
    assert recorded_profile(recording)["admission"] == "staggered"
    played = replay(recording)
    assert played.simulated_orders == played.recorded_orders


def test_two_devices_are_replayed_in_order_where_nothing_has_to_leave():
    played = replay(record(max_concurrent=3).recording())
    assert played.simulated_orders == played.recorded_orders
    assert played.simulated_seconds == pytest.approx(played.recorded_seconds, rel=1e-6)


def test_what_one_device_takes_over_from_another_is_in_the_recording_and_in_the_replay(between_turns):
    """A job that goes on where it had not been: its values and what it has changed come from the other device."""
    pool = record("round_robin", "cpu:2", between_turns, Held())
    recording, devices = pool.recording(), pool.stats().devices.values()
    taken = [copy for turn in recording.turns for copy in turn.copies if copy.what == "across"]
    assert sum(copy.nbytes for copy in taken) == sum(device.bytes_across for device in devices) > 0
    home = {a.blocks[0] for turn in recording.turns for a in turn.actions if a.what == "home"}
    assert {copy.block for turn in recording.turns for copy in turn.copies if copy.what == "out"} <= home, "at the end"
    played = replay(recording)
    assert played.simulated_orders == played.recorded_orders
    assert played.simulated_seconds == pytest.approx(played.recorded_seconds, rel=1e-6)
    assert played.bytes_across == on_ledger(recording, taken) >= sum(copy.nbytes for copy in taken)
    assert played.to_json()["bytes_across"] == played.bytes_across
    assert replay(recording, "fair").bytes_across > 0
    named = {bar["name"].split()[0] for bar in recording.to_json()["traceEvents"] if bar["name"].startswith("take")}
    assert named == {"take"}


@pytest.mark.parametrize("reach", [DeviceCopyRoute.NONE, DeviceCopyRoute.NEAR])
def test_blocks_take_the_way_in_the_replay_that_they_took_in_the_run(monkeypatch, reach):
    monkeypatch.setattr(CpuDevice, "reach", lambda *_: reach)
    pool = record("round_robin", held=Held())
    recording, played = pool.recording(), replay(pool.recording())
    taken = [copy for turn in recording.turns for copy in turn.copies if copy.what == "across"]
    written = [copy.nbytes for turn in recording.turns for copy in turn.copies if copy.what == "out"]
    assert bool(taken) == (reach is DeviceCopyRoute.NEAR)
    assert played.simulated_orders == played.recorded_orders
    assert played.bytes_across == on_ledger(recording, taken)
    assert played.bytes_out >= sum(written)


def test_two_devices_that_have_turns_one_after_the_other_are_replayed_as_such_in_little_memory(between_turns):
    """Nothing goes at once on both but copies in the background, and here there are none."""
    played = replay(record("lrtf", "cpu:2", between_turns, Held(), **TIGHT, buffer_fraction=0).recording())
    assert played.simulated_orders == played.recorded_orders
    assert played.simulated_seconds == pytest.approx(played.recorded_seconds, rel=1e-6)
    assert played.bytes_out > 0


def test_two_devices_that_race_for_memory_do_the_same_in_the_replay_in_some_order():
    """Which blocks leave depends on which thread comes first, and a copy that the run has not made takes another time."""
    played = replay(record(**TIGHT, held=Held()).recording())
    assert sorted(order[:2] for order in played.simulated_orders) == sorted(o[:2] for o in played.recorded_orders)
    assert played.simulated_seconds > 0


def test_what_was_sent_ahead_is_sent_in_the_replay_unless_the_policy_is_another():
    recording = record(**TIGHT, devices="cpu:1").recording()
    sent = [copy for turn in recording.turns for copy in turn.sent]
    assert {copy.what for copy in sent} == {"in", "out"}
    assert all(0 < copy.began_ns <= copy.ended_ns for copy in sent)
    assert not replay(recording).leaves_out_ahead
    played = replay(recording, "fair")
    assert played.leaves_out_ahead
    assert played.to_json()["leaves_out_ahead"]
    assert sorted(order[1] for order in played.simulated_orders) == sorted(order[1] for order in played.recorded_orders)
    nothing = record(**TIGHT, devices="cpu:1", buffer_fraction=0).recording()
    assert not any(turn.sent for turn in nothing.turns)
    assert not replay(nothing, "fair").leaves_out_ahead


def test_a_recording_taken_within_a_turn_stays_as_it_was():
    """Workers go on with their turns, and with the copies in the background that the turns have begun."""
    taken = []

    @contextmanager
    def taking():
        if len(taken) < 20:
            recording = pool.recording()
            taken.append((recording, json.dumps(recording.to_json())))
        yield

    with running(devices="cpu:1", record=True, instrument=taking, **TIGHT) as pool:
        assert pool.run(task(epochs=3)).error is None
        assert len(taken) == 20
        assert [json.dumps(recording.to_json()) for recording, _ in taken] == [text for _, text in taken]
        sent = [[copy for turn in one.turns for copy in turn.sent] for one in (taken[-1][0], pool.recording())]
    assert set(sent[0]) < set(sent[1])


@pytest.mark.parametrize("device_memory", [None, "24KiB"])
def test_what_was_sent_from_one_device_to_another_is_so_in_the_replay(device_memory, between_turns):
    pool = record("round_robin", "cpu:2", between_turns, Held(), link_bandwidth="20MB/s", device_memory=device_memory)
    recording = pool.recording()
    ahead = [copy for turn in recording.turns for copy in turn.sent if copy.what == "across"]
    waited = [copy for turn in recording.turns for copy in turn.copies if copy.what == "across"]
    assert ahead
    played = replay(recording)
    assert sorted(order[:2] for order in played.simulated_orders) == sorted(o[:2] for o in played.recorded_orders)
    assert played.bytes_across > 0
    # In 24 KiB room depends on the threads that copy: one that the machine held up for a moment has other blocks leave.
    if device_memory is None:
        assert played.simulated_seconds == pytest.approx(played.recorded_seconds, rel=0.05)
        assert played.bytes_across == pytest.approx(on_ledger(recording, [*ahead, *waited]), rel=0.2)
    assert sorted(order[1] for order in replay(recording, "fair").simulated_orders) == sorted(
        o[1] for o in played.recorded_orders
    )


def test_another_policy_may_be_tried():
    recording = record("lrtf", held=Held()).recording()
    played = replay(recording, "lpt")
    assert (played.policy, played.recorded_policy) == ("lpt", "lrtf")
    assert sorted(order[1] for order in played.simulated_orders) == sorted(order[1] for order in played.recorded_orders)
    assert not played.is_same_order
    assert 0 < played.num_agreeing < len(played.recorded_orders)
    assert played.to_json()["agreeing"] == played.num_agreeing
    with pytest.raises(ScheduleError):
        decide_again(recording, "lpt")


def test_bytes_are_those_that_the_pool_counted(between_turns, monkeypatch):
    """But for copies that are called off before a slow thread has begun them, which the pool does not count."""
    called_off, call_off = [], Pager.call_off

    def noted(self, block):
        is_off = call_off(self, block)
        called_off.append(block.size * is_off)
        return is_off

    monkeypatch.setattr(Pager, "call_off", noted)
    pool = record("lrtf", "cpu:1", between_turns, **TIGHT)
    recording, (device,) = pool.recording(), pool.stats().devices.values()
    loaded = [a for turn in recording.turns for a in turn.actions if a.what in ("in", "ahead")]
    assert sum(action.nbytes for action in loaded) == device.bytes_in + sum(called_off)
    nbytes = sum(recording.blocks[number].nbytes for action in loaded for number in action.blocks)
    assert replay(recording).bytes_in == nbytes >= device.bytes_in


def test_loads_are_no_part_of_the_seconds_that_the_scheduler_is_told():
    scripts = scripts_of(record(**TIGHT).recording()).scripts
    parts = [part for script in scripts.values() for part in script.parts if isinstance(part.end, UnitFinished)]
    assert sum(part.compute_ns < part.ended_ns - part.began_ns for part in parts) > 30, "many have loads"
    assert all(part.end.seconds * 1e9 <= part.compute_ns for part in parts)


def test_a_file_has_all_of_it_and_is_a_trace(tmp_path):
    recording, path = record(**TIGHT).recording(), tmp_path / "run.json"
    recording.write(path)
    assert read_recording(path) == recording
    bars = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    units = [bar for bar in bars if bar["args"]["kind"] in ("forward", "backward", "update", "evaluate")]
    assert len(units) == sum(len(turn.units) for turn in recording.turns)
    assert all(bar["dur"] > 0 and bar["ts"] >= 0 for bar in bars)
    loads = [bar for bar in bars if bar["name"].startswith("load")]
    assert {bar["args"]["kind"] for bar in loads} >= {"parameters", "optimizer"}
    assert {bar["tid"] % 2 for bar in units} == {0}
    assert {bar["tid"] % 2 for bar in loads} == {1}


def test_its_profile_is_one_that_the_simulator_plays():
    recording = record(max_concurrent=3, priorities=(0, 2, 1)).recording()
    scenario = parse_profile(recorded_profile(recording), source="it")
    assert [trial.priority for trial in scenario.trials] == [0, 2, 1]
    assert [trial.name for trial in scenario.trials] == ["0:job", "1:job", "2:job"]
    staggered = replace(recording, admission="staggered")
    assert (scenario.admission, recorded_profile(staggered)["admission"]) == ("eager", "staggered")
    computed = [part.compute_ns / 1e9 for script in scripts_of(recording).scripts.values() for part in script.parts]
    busy = sum(device.busy_seconds for device in simulate(scenario).devices)
    assert busy == pytest.approx(sum(computed), rel=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"hydra_tune_event_log":1}\n{"event":"end"}', "sweep --timeline FILE writes one, beside the event log that"),
        ("[]", "is not a recording"),
        ('{"traceEvents": []}', "hydra-tune sweep --timeline FILE writes one"),
        ('{"hydra_tune": {"format": 9}}', "format must be 2, not 9"),
        ('{"hydra_tune": {"format": 2}}', "is a damaged recording: KeyError"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recording(path)


def test_a_run_that_has_not_ended_is_not_replayed():
    with running(num_shards=3, record=True) as pool, pytest.raises(ConfigError, match="no jobs; record until shutdown"):
        replay(pool.recording())


def test_a_pool_records_only_if_asked():
    with running() as pool:
        assert pool.submit(task()).result(PATIENCE_SECONDS).status == "completed"
        with pytest.raises(HydraTuneError, match="record=True"):
            pool.recording()


@pytest.mark.cases(1 / 3)
def test_neither_recording_nor_slow_links_change_a_number():
    described = task(epochs=2)
    with running(**TIGHT, record=True, devices="cpu:2") as pool:
        results = [job.result(PATIENCE_SECONDS) for job in [pool.submit(described) for _ in range(2)]]
    for result in results:
        assert against_plain(described, result) == []


def test_a_failed_unit_is_part_of_the_run():
    def broken():
        yield X[:8], task().train.tensors[1][:8]
        raise RuntimeError("the data has ended badly")

    with running(num_shards=3, record=True) as pool:
        jobs = [pool.submit(task(train=broken)), pool.submit(task())]
        assert [job.result(PATIENCE_SECONDS).status for job in jobs] == ["failed", "completed"]
    played = replay(pool.recording())
    assert played.is_same_order
    assert any(isinstance(command, Run) for decision in played.simulated for command in decision.commands)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link_bandwidth": "fast"}, "link_bandwidth must be a size"),
        ({"link_bandwidth": 0}, "link_bandwidth must be more than 0 bytes"),
        ({"record": "yes"}, "record must be true or false, not 'yes'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        HydraExecutor(**options)


def test_bursts_that_ended_early_for_another_trial_are_played_again(monkeypatch):
    monkeypatch.setattr(burst, "BURST_SECONDS", 60.0)  # so that each ends for the other trial alone
    with running(devices="cpu:1", num_shards=None, record=True) as pool:
        jobs = [pool.submit(task(epochs=epochs)) for epochs in (60, 40)]
        for job in jobs:
            assert job.result(PATIENCE_SECONDS).status == "completed"
    recording = pool.recording()
    commands = [command for decision in recording.decisions for command in decision.commands]
    assert any(isinstance(command, EndBurst) for command in commands)
    played = replay(recording)
    assert played.simulated_orders == played.recorded_orders


def test_further_units_of_a_job_that_goes_on_are_written_and_read():
    units = [Unit(kind="forward", shard=0, seconds=float(number)) for number in range(3)]
    event = JobResumed(job="a", unit=units[0], remaining_seconds=None, others=tuple(units[1:]))
    decision = SchedulerDecision(5, (event,), ())
    assert SchedulerDecision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
