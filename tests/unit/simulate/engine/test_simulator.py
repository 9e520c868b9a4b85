"""What simulations come to, by hand and by rule; each figure is one that can be worked out on paper."""

import dataclasses
import itertools
import math
import random
from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import LRTFPaper, ShardedLRTF, Unit, make_policy
from hydra_tune.simulate import Outage, Scenario, SimulatedDevice, SimulatedTrial, Slowdown, simulate, training_step
from hydra_tune.simulate.engine.repeats import REMAINING_MATTERS
from hydra_tune.simulate.workload import RandomWorkload, equal_devices, stop_early


def trial(name="a", *, shards=2, seconds=1.0, steps=1, size=0, **more):
    step = tuple(Unit(kind="backward", shard=shard, seconds=seconds) for shard in range(shards))
    return SimulatedTrial(name=name, step=step, shard_bytes=(size,) * shards, steps=steps, **more)


ONE_DEVICE = (SimulatedDevice(name="d0"),)


def play(*trials, devices=ONE_DEVICE, policy="lrtf", timeline=1000, skip_repeats=True, **more):
    scenario = Scenario(trials=trials, devices=tuple(devices), **more)
    return simulate(scenario, policy, timeline=timeline, skip_repeats=skip_repeats)


def bars(result):
    return [(bar.device, bar.job, bar.kind, bar.shard, bar.start_seconds, bar.end_seconds) for bar in result.timeline]


def test_one_trial_on_one_device_takes_the_sum_of_its_units():
    result = play(trial(steps=3))
    assert (result.makespan_seconds, result.units_run, result.utilisation, result.bound_seconds) == (6, 6, 1, 6)


def test_a_second_device_does_not_make_one_trial_faster():
    result = play(trial(steps=3), devices=equal_devices(2))
    assert (result.makespan_seconds, result.utilisation) == (6, 0.5)


def test_more_trials_than_devices_share_them():
    result = play(*(trial(str(number), steps=10) for number in range(3)), devices=equal_devices(2), policy="lrtf_paper")
    assert result.makespan_seconds == result.bound_seconds == 30


def test_loads_hide_behind_the_running_unit():
    link = SimulatedDevice(name="d0", memory_bytes=20, bandwidth=10)
    hidden = play(trial(shards=3, size=10, seconds=2), devices=[link])
    assert bars(hidden) == [
        ("d0", "a", "load", 0, 0, 1),
        ("d0", "a", "backward", 0, 1, 3),
        ("d0", "a", "load", 1, 1, 2),
        ("d0", "a", "backward", 1, 3, 5),
        ("d0", "a", "load", 2, 3, 4),
        ("d0", "a", "backward", 2, 5, 7),
    ]
    assert (hidden.devices[0].stall_seconds, hidden.devices[0].loads, hidden.devices[0].bytes_in) == (1, 3, 30)


def test_without_overlap_every_load_waits_for_the_device():
    link = SimulatedDevice(name="d0", memory_bytes=20, bandwidth=10)
    result = play(trial(shards=3, size=10, seconds=2), devices=[link], overlap=False)
    assert (result.makespan_seconds, result.devices[0].stall_seconds) == (9, 3)


def test_a_buffer_that_does_not_fit_beside_the_running_shard_is_not_filled():
    link = SimulatedDevice(name="d0", memory_bytes=10, bandwidth=10)
    assert play(trial(shards=3, size=10, seconds=2), devices=[link]).makespan_seconds == 9


def test_a_link_sends_one_shard_after_another():
    trials = RandomWorkload(num_trials=12, spread=2, steps=100, shard_bytes=8).trials(0)
    result = play(*trials, devices=equal_devices(4, memory_bytes=24, bandwidth=64))
    loads = defaultdict(list)
    for bar in result.timeline:
        if bar.kind == "load":
            loads[bar.device].append(bar)  # in the order in which they were asked for
    assert len(loads) == 4
    for row in loads.values():
        assert all(before.end_seconds <= after.start_seconds for before, after in itertools.pairwise(row))
        assert all(bar.end_seconds - bar.start_seconds == 0.125 for bar in row)


def test_the_shard_used_longest_ago_leaves_first():
    # Two shards fit. F0 F1 F2 B2 B1 B0: 2 displaces 0; 1 is still there; 0 must come again.
    step = [Unit(kind="forward", shard=shard, seconds=1) for shard in range(3)]
    step += [Unit(kind="backward", shard=shard, seconds=1) for shard in (2, 1, 0)]
    there_and_back = SimulatedTrial(name="a", step=tuple(step), shard_bytes=(1, 1, 1), steps=1)
    result = play(there_and_back, devices=[SimulatedDevice(name="d0", memory_bytes=2, bandwidth=1)], overlap=False)
    assert [bar.shard for bar in result.timeline if bar.kind == "load"] == [0, 1, 2, 0]
    # Shard 2 leaves, changed by its backward, when shard 0 comes; the forward units changed nothing.
    assert (result.devices[0].bytes_in, result.devices[0].bytes_out) == (4, 1)


def test_a_faster_device_takes_less_time_and_a_fault_more():
    fast = [SimulatedDevice(name="d0", speed=2)]
    assert play(trial(steps=4), devices=fast).makespan_seconds == 4
    slowed = Slowdown(device="d0", at_seconds=1.25, factor=0.25)
    result = play(trial(steps=4), devices=fast, slowdowns=(slowed,))
    assert (result.makespan_seconds, result.bound_seconds) == (3 * 0.5 + 5 * 2, None)


def test_a_device_that_is_lost_takes_its_unit_with_it():
    """The unit of d0, begun at 2, ends with the device at 2.5 and runs again when d1 is free, its shard brought anew."""
    pair = [trial(name, shards=1, size=10, steps=3) for name in "ab"]
    devices = [SimulatedDevice(name=f"d{number}", bandwidth=10) for number in range(2)]
    result = play(*pair, devices=devices, outages=(Outage(device="d0", at_seconds=2.5),))
    assert [bar[1:] for bar in bars(result) if bar[0] == "d0"] == [
        ("a", "load", 0, 0, 1),
        ("a", "backward", 0, 1, 2),
        ("a", "lost", 0, 2, 2.5),
    ]
    assert result.units_run == 6
    assert [device.units for device in result.devices] == [1, 5]
    # d1 has b and then a, or a in between: five units, and a's shard, which comes while it computes.
    assert (result.makespan_seconds, result.first_loads, result.devices[1].loads) == (6, 2, 2)
    assert result.bound_seconds is None


def test_a_device_that_comes_back_works_again():
    outage = Outage(device="d0", at_seconds=1.5, until_seconds=10)
    result = play(trial(steps=2), outages=(outage,))
    assert result.makespan_seconds == 10 + 3
    assert [bar[2:] for bar in bars(result)][:2] == [("backward", 0, 0, 1), ("lost", 1, 1, 1.5)]


@pytest.mark.parametrize("order", [1, -1])
def test_a_device_may_leave_at_the_moment_of_its_return(order):
    outages = (Outage(device="d1", at_seconds=1, until_seconds=5), Outage(device="d1", at_seconds=5))[::order]
    devices = [SimulatedDevice(name=name) for name in ("d0", "d1")]
    result = play(trial(steps=4), trial("b", steps=4), devices=devices, outages=outages)
    assert max(bar[-1] for bar in bars(result) if bar[0] == "d1") <= 5


def test_the_scheduler_knows_where_shards_are_after_a_loss():
    """Also that a shard is on the very device that it was lost with."""
    policy = Noting("lrtf")
    outage = Outage(device="d0", at_seconds=1.5, until_seconds=10)
    play(trial(shards=1, steps=4), outages=(outage,), policy=policy)
    assert [views["a"].shard_device for _, views in policy.shown] == [None, "d0", None, "d0", "d0"]
    assert [views["a"].last_device for _, views in policy.shown] == [None, "d0", None, "d0", "d0"]


def test_the_scheduler_knows_how_fast_devices_are():
    """A lone trial goes to the faster device, though that comes second, and away from it when it becomes slow."""
    devices = [SimulatedDevice(name="slow", speed=0.5), SimulatedDevice(name="fast")]
    assert play(trial(steps=4), devices=devices).makespan_seconds == 8
    slowed = Slowdown(device="fast", at_seconds=3.5, factor=0.25)
    result = play(trial(steps=4), devices=devices, slowdowns=(slowed,))
    assert result.makespan_seconds == 4 + 4 * 2
    # A fault before the device is there is known when it joins.
    late = [SimulatedDevice(name="a", speed=0.5), SimulatedDevice(name="b", joins_seconds=1)]
    early = Slowdown(device="b", at_seconds=0.5, factor=0.25)
    assert play(trial(steps=1), devices=late, slowdowns=(early,)).makespan_seconds == 4


def test_trials_of_a_higher_priority_run_first():
    low, high = trial("low", steps=5), trial("high", steps=2, priority=1)
    assert play(low, high).finished_seconds == {"high": 4, "low": 14}


def test_trials_that_arrive_together_are_known_together():
    """Otherwise the first to be submitted would have the device before the longest is known."""
    result = play(trial("short", steps=1), trial("long", steps=5), policy="lpt")
    assert result.finished_seconds == {"long": 10, "short": 12}


class Noting:
    """A policy of one method that notes what it is shown."""

    def __init__(self, kind):
        self.policy, self.shown = make_policy(kind), []

    def choose(self, device, candidates):
        self.shown.append((device, {view.job: view for view in candidates}))
        return self.policy.choose(device, candidates)


@pytest.mark.parametrize("kind", ["lrtf", "srtf", "round_robin", "fair", "lpt"])
def test_what_is_sent_ahead_is_chosen_from_what_the_scheduler_will_be_shown(kind):
    """Also of the trial that runs: its time done, its turn and its place are as they will be."""
    policy, ahead = Noting(kind), Noting(kind)
    trials = [
        SimulatedTrial(
            name=f"t{number}",
            step=training_step([0.3 + 0.1 * number] * 3, [0.7] * 3),
            shard_bytes=(1,) * 3,
            steps=6,
            priority=number % 2,
        )
        for number in range(5)
    ]
    devices = equal_devices(2, memory_bytes=4, bandwidth=5.0, speeds=(1.0, 0.5))
    scenario = Scenario(trials=tuple(trials), devices=devices)
    simulate(scenario, policy, lookahead=ahead)
    told = {view._replace(shard_device=None) for _, views in policy.shown for view in views.values()}
    foreseen = [view._replace(shard_device=None) for _, views in ahead.shown for view in views.values()]
    assert len(foreseen) > 100
    assert all(any(_alike(view, other) for other in told) for view in foreseen)
    assert {view.priority for view in foreseen} == {0, 1}
    assert any(view.done_seconds and view.turn and view.last_device for view in foreseen)


def _alike(view, other):
    return view._replace(done_seconds=0.0) == other._replace(done_seconds=0.0) and view.done_seconds == pytest.approx(
        other.done_seconds
    )


def test_staggered_the_oldest_end_first_and_the_others_fill_their_waits():
    three = [trial(name, steps=2, report_steps=1) for name in "abc"]
    assert play(*three, policy="lrtf_paper").finished_seconds == {"a": 10, "b": 11, "c": 12}
    assert play(*three, policy="lrtf_paper", admission="staggered").finished_seconds == {"a": 4, "b": 8, "c": 12}
    # b has a unit while a waits for its answer, and a goes on when that unit is over.
    waits = play(*three[:2], admission="staggered", answer_seconds=1)
    assert [bar[1] for bar in bars(waits)] == ["a", "a", "b", "a", "a", "b", "b", "b"]


def shown_ahead(arrivals, joins, **more):
    """Which trials of two steps of three units are shown, device by device, when it is asked what to send ahead."""
    trials = [
        SimulatedTrial(
            name=name,
            step=training_step([1.0] * 2, [1.0] * 2),
            shard_bytes=(1, 1),
            steps=2,
            arrival_seconds=seconds,
            priority=int(name == "e"),
        )
        for name, seconds in arrivals.items()
    ]
    devices = [
        SimulatedDevice(name=name, memory_bytes=2, bandwidth=2.0, joins_seconds=seconds)
        for name, seconds in joins.items()
    ]
    shown = defaultdict(list)

    class Ahead:
        def choose(self, device, candidates):
            shown[device].append("".join(sorted(view.job for view in candidates)))
            return ShardedLRTF().choose(device, candidates)

    simulate(Scenario(trials=tuple(trials), devices=tuple(devices), **more), lookahead=Ahead())
    return {device: [kind for kind, _ in itertools.groupby(kinds)] for device, kinds in shown.items()}


def test_staggered_what_is_sent_ahead_is_of_the_front():
    """A trial of the front follows itself; only behind its last unit are the others asked, and none of them before."""
    arrivals = {"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0, "e": 11.25}
    assert shown_ahead(arrivals, {"d0": 0.0, "d1": 4.25}, admission="staggered") == {
        "d0": ["a", "cd", "c", "e"],  # behind the last unit of a, whose front has b, which runs; then c is of the front
        "d1": ["b", "d"],
    }
    lost = Outage(device="d1", at_seconds=2.75)
    arrivals = dict.fromkeys("abc", 0.0)
    assert shown_ahead(arrivals, {"d0": 0.0, "d1": 0.0}, admission="staggered", outages=(lost,)) == {
        "d0": ["a", "bc", "b", "c"],  # b, whose unit was lost, is not of the front of one device until a is over
        "d1": ["b"],
    }


def test_what_is_bound_early_is_what_is_sent_ahead():
    """Every shard that was sent ahead for a bound trial is used: sent when needed, the same ones come, only later."""
    trials = RandomWorkload(num_trials=4, num_shards=3, spread=2, steps=20, shard_bytes=1).trials(0)
    scenario = Scenario(trials=trials, devices=equal_devices(1, memory_bytes=2, bandwidth=10.0))
    ahead = simulate(scenario, LRTFPaper(idle_only=True))
    waiting = simulate(dataclasses.replace(scenario, overlap=False), LRTFPaper(idle_only=True))
    assert ahead.devices[0].loads == waiting.devices[0].loads
    assert ahead.makespan_seconds < 0.9 * waiting.makespan_seconds


def test_a_device_that_joins_later_works_from_then_on():
    late = SimulatedDevice(name="d1", joins_seconds=4)
    pair = [trial(name, steps=4) for name in "ab"]
    result = play(*pair, devices=[SimulatedDevice(name="d0"), late], policy="lrtf_paper")
    assert result.makespan_seconds == 10  # when it joins, each trial has run two of its eight units
    assert min(bar.start_seconds for bar in result.timeline if bar.device == "d1") == 4


def test_an_early_stop_saves_units():
    result = play(trial(steps=10, report_steps=2, stop_after_reports=3))
    assert (result.units_run, result.units_saved, result.makespan_seconds) == (12, 8, 12)


def test_a_trial_that_waits_for_an_answer_lets_others_run():
    pair = [trial(name, steps=2, report_steps=1) for name in "ab"]
    alone = play(pair[0], answer_seconds=3)
    assert alone.makespan_seconds == 2 + 3 + 2
    assert play(*pair, answer_seconds=2, policy="fifo").makespan_seconds == 8


def test_arrival_preparation_and_admission_take_their_time():
    assert play(trial(arrival_seconds=5)).makespan_seconds == 7
    assert play(trial("a"), trial("b"), devices=equal_devices(2), prepare_seconds=3).makespan_seconds == 3 + 3 + 2
    assert play(trial("a"), trial("b"), devices=equal_devices(2), max_concurrent=1).makespan_seconds == 4


def test_nodes_share_a_link_and_pay_for_the_network():
    two = [SimulatedDevice(name=f"d{number}", bandwidth=10) for number in range(2)]
    pair = [trial(name, shards=1, size=10) for name in "ab"]
    assert play(*pair, devices=two).makespan_seconds == 2
    assert play(*pair, devices=two, node_bandwidth=10).makespan_seconds == 3
    # The first node is slow, so the second trial's shard moves when the second node joins.
    apart = [SimulatedDevice(name="d0", bandwidth=10, node="x")]
    apart.append(SimulatedDevice(name="d1", bandwidth=10, node="y", joins_seconds=3.5))
    pair = [trial(name, shards=1, size=10, steps=3) for name in "ab"]
    result = play(*pair, devices=apart, network_bandwidth=5)
    assert result.network_bytes == 10


def test_a_node_with_bandwidth_to_spare_delays_nothing():
    """Not even where values at a boundary queue behind a shard on a device's own link, while others load."""
    two = [SimulatedDevice(name=f"d{number}", bandwidth=10, memory_bytes=100) for number in range(2)]
    step = (Unit(kind="backward", shard=1, seconds=1.0), Unit(kind="backward", shard=0, seconds=1.0))
    three = [
        SimulatedTrial(name=name, step=step, steps=20, shard_bytes=(100, 100), boundary_bytes=10) for name in "abc"
    ]
    plain = play(*three, devices=two, overlap=False)
    assert play(*three, devices=two, overlap=False, node_bandwidth=1e9).makespan_seconds == pytest.approx(
        plain.makespan_seconds, rel=1e-6
    )


def test_values_at_a_boundary_follow_a_trial_to_another_device():
    def moving(boundary_bytes):
        pair = [trial(name, shards=1, size=10, steps=3, boundary_bytes=boundary_bytes) for name in "ab"]
        late = SimulatedDevice(name="d1", bandwidth=10, joins_seconds=3.5)
        return play(*pair, devices=[SimulatedDevice(name="d0", bandwidth=10), late], policy="lrtf_paper")

    without, with_values = moving(0), moving(5)
    # One trial moves once: its shard takes a second to come, its values half a second more.
    assert with_values.devices[1].bytes_in == without.devices[1].bytes_in + 5
    assert with_values.devices[1].stall_seconds == without.devices[1].stall_seconds + 0.5 == 1.5


def test_wrong_estimates_mislead_until_they_are_corrected():
    """The long trial has its first step alone. Then it is thought short, unless it was corrected by that step."""

    def work(**more):
        shorts = [trial(f"short{number}", steps=9, arrival_seconds=2) for number in range(2)]
        trials = [trial("long", steps=20, **more), *shorts]
        return play(*trials, devices=equal_devices(2), policy="lrtf_paper").makespan_seconds

    assert work() == work(estimate_factor=0.25, corrected_after_steps=1) == 40
    assert work(estimate_factor=0.25) > 45


def test_the_same_seed_gives_the_same_figures_and_another_seed_others():
    def figures(seed):
        trials = RandomWorkload(
            num_trials=5, spread=2, steps=4, epochs=3, arrival_gap_seconds=1, estimate_error=2
        ).trials(seed)
        return play(*stop_early(trials, (0.6, 0.2), seed), devices=equal_devices(2))

    assert figures(1) == figures(1)
    assert figures(1).makespan_seconds != figures(2).makespan_seconds


def test_survival_prunes_the_shares_it_names():
    trials = stop_early(RandomWorkload(num_trials=10, steps=2, epochs=4).trials(0), (1, 0.5, 0.2), 0)
    assert sorted(trial.stop_after_reports or 99 for trial in trials) == [2] * 5 + [3] * 3 + [99] * 2


def test_a_step_of_the_engine():
    step = training_step([1, 1, 1], [2, 2, 3])
    assert [(unit.kind[0], unit.shard, unit.seconds) for unit in step] == [
        ("f", 0, 1),
        ("f", 1, 1),
        ("b", 2, 3),
        ("b", 1, 2),
        ("b", 0, 2),
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: trial(seconds=0.0), "seconds of its backward unit of shard 0 must be a finite number > 0, not 0.0"),
        (lambda: trial(seconds=-1.0), "must be a finite number > 0, not -1.0"),
        (lambda: trial(seconds=float("nan")), "must be a finite number > 0, not nan"),
        (lambda: trial(steps=0), "steps must be at least 1, not 0"),
        (lambda: trial(stop_after_reports=1), "give report_steps"),
        (lambda: trial(arrival_seconds=-1), "arrival_seconds must be a finite number >= 0"),
        (lambda: SimulatedDevice(name="d0", speed=0), "speed must be a finite number > 0, not 0"),
        (lambda: play(trial(), trial()), "'a' is there more than once"),
        (play, "at least one trial and one device"),
        (
            lambda: play(trial(), slowdowns=(Slowdown(device="d9", at_seconds=0, factor=1),)),
            "device 'd9'; there are d0",
        ),
        (lambda: Outage(device="d0", at_seconds=-1), "at_seconds must be a finite number >= 0"),
        (
            lambda: play(trial(), outages=(Outage(device="d9", at_seconds=0),)),
            "an outage names device 'd9'; there are d0",
        ),
        (lambda: play(trial(), outages=(Outage(device="d0", at_seconds=0),)), "every device is lost for ever"),
        (
            lambda: play(
                trial(),
                outages=(
                    Outage(device="d0", at_seconds=3, until_seconds=5),
                    Outage(device="d0", at_seconds=4, until_seconds=6),
                ),
            ),
            "is to be lost at 4 s, when it is not there; it is there again at 5 s",
        ),
        (
            lambda: play(trial(), outages=(Outage(device="d0", at_seconds=3), Outage(device="d0", at_seconds=4))),
            "is to be lost at 4 s, when it is not there; it is lost for ever before",
        ),
        (lambda: play(trial(size=11), devices=[SimulatedDevice(name="d0", memory_bytes=10)]), "raise its memory to"),
        (lambda: play(trial(), admission="stagered"), "not 'stagered'; did you mean 'staggered'?"),
        (lambda: play(trial(), admission="auto"), "admission must be 'eager' or 'staggered', not 'auto'"),
        (lambda: play(trial(), policy="fio"), "did you mean 'fifo'"),
        (lambda: stop_early([trial()], (0.5, 0.7), 0), "fall from 1 to 0"),
        (lambda: RandomWorkload(num_trials=1, spread=0.5), "spread must be a finite number >= 1"),
        (lambda: equal_devices(2, num_nodes=3), "2 devices on 3 nodes"),
        (lambda: training_step([1], []), "there are 1 and 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)


def scenarios(seed):
    """Any small scenario: its times are often commensurable, so that repeats come up, and often not."""
    draw = random.Random(seed)
    seconds = draw.choice([[1.0], [0.1, 0.2], [1.0, 1.5, 2.0], [0.3, 0.7, 1.1]])
    sizes = draw.choice([[0], [1], [1, 2]])
    equal = draw.random() < 0.6
    kinds = [(draw.randint(1, 3), draw.choice(seconds), draw.choice(sizes)) for _ in range(1 if equal else 4)]
    trials = []
    for number in range(draw.randint(1, 6)):
        shards, unit_seconds, size = draw.choice(kinds)
        step = training_step([unit_seconds] * shards, [2 * unit_seconds] * shards)
        bursts = random.Random(f"{seed}:{number}")  # so that the rest of a seed's scenario is as it was without bursts
        trials.append(
            SimulatedTrial(
                name=f"t{number}",
                step=step,
                burst_steps=bursts.choice([1, 3, 10]) if len(step) == 1 else 1,
                shard_bytes=(size,) * shards,
                steps=draw.choice([1, 7, 60]),
                report_steps=draw.choice([None, 3, 20]),
                arrival_seconds=draw.choice([0.0, 0.0, 3.3]),
                estimate_factor=draw.choice([1.0, 1.0, 0.5]),
                corrected_after_steps=draw.choice([None, 2]),
                boundary_bytes=draw.choice([0, 0, 1]),
            )
        )
    devices = tuple(
        SimulatedDevice(
            name=f"d{number}",
            speed=draw.choice([1.0, 1.0, 0.5]),
            memory_bytes=draw.choice([None, 2, 4, 9]),
            bandwidth=draw.choice([None, 1.0, 5.0]),
            node=draw.choice(["x", "y"]),
            joins_seconds=draw.choice([0.0, 0.0, 2.5]),
        )
        for number in range(draw.randint(1, 4))
    )
    faults = (Slowdown(device="d0", at_seconds=11.0, factor=0.5),) if draw.random() < 0.3 else ()
    lose = draw.random() < 0.3  # a device that never comes back needs another one
    until = 11.5 if len(devices) == 1 or draw.random() < 0.5 else None
    losses = (Outage(device="d0", at_seconds=9.0, until_seconds=until),) if lose else ()
    return Scenario(
        trials=stop_early(trials, draw.choice([(), (0.5,)]), seed),
        devices=devices,
        slowdowns=faults,
        outages=losses,
        max_concurrent=draw.choice([None, 1, 3]),
        overlap=draw.random() < 0.7,
        network_bandwidth=draw.choice([None, 2.0]),
        node_bandwidth=draw.choice([None, 4.0]),
        answer_seconds=draw.choice([0.0, 0.0, 0.4]),
        prepare_seconds=draw.choice([0.0, 0.0, 0.5]),
        admission=draw.choice(["eager", "staggered"]),
    )


@settings(max_examples=80, deadline=None)
@example(seed=192, policy="fifo")  # a skip to the very step before a milestone
@given(seed=st.integers(0, 10**9), policy=st.sampled_from(["lrtf", "fifo"]))
def test_skipping_repeats_changes_no_figure(seed, policy):
    scenario = scenarios(seed)
    plain = simulate(scenario, policy, skip_repeats=False)
    skipped = simulate(scenario, policy)
    assert dataclasses.replace(skipped, units_skipped=0) == plain


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("memory_bytes", "policy"),
    [
        (None, "lrtf"),
        (3, "fifo"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((None, "fifo"), (3, "lrtf"), (8, "lrtf"), (8, "fifo"))
        ),
    ],
)
def test_equal_trials_are_skipped_for_the_most_part(policy, memory_bytes):
    """Guards that the comparison above compares with something."""
    trials = RandomWorkload(num_trials=6, num_shards=4, steps=2000, shard_bytes=1).trials(0)
    devices = equal_devices(4, memory_bytes=memory_bytes, bandwidth=10.0)
    scenario = Scenario(trials=trials, devices=devices)
    skipped = simulate(scenario, policy)
    assert skipped.units_skipped > 0.8 * skipped.units_run
    assert dataclasses.replace(skipped, units_skipped=0) == simulate(scenario, policy, skip_repeats=False)


def test_a_policy_of_unknown_kind_is_played_unit_by_unit():
    class Mine(ShardedLRTF):
        pass

    assert Mine not in REMAINING_MATTERS
    scenario = Scenario(trials=(trial(steps=500),), devices=equal_devices(1))
    assert simulate(scenario, Mine()).units_skipped == 0
    assert simulate(scenario, ShardedLRTF()).units_skipped > 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), policy=st.sampled_from(["lrtf", "fifo"]))
def test_every_schedule_keeps_the_rules(seed, policy):
    """Each unit once and in order, one unit of a trial at a time, one unit on a device at a time, none too short."""
    scenario = scenarios(seed)
    result = simulate(scenario, policy, timeline=10**6)
    units = sorted((bar for bar in result.timeline if bar.kind != "load"), key=lambda bar: bar.start_seconds)
    by_job, by_device = defaultdict(list), defaultdict(list)
    for bar in units:
        by_job[bar.job].append(bar)
        by_device[bar.device].append(bar)
    for described in scenario.trials:
        expected = [(unit.kind, unit.shard) for unit in described.step] * described.steps_run
        run = [(bar.kind, bar.shard) for bar in by_job[described.name] if bar.kind != "lost"]
        fewest = math.ceil(len(expected) / described.burst_steps)
        assert fewest <= len(run) <= len(expected)
        assert run == expected[: len(run)]
        assert by_job[described.name][0].start_seconds >= described.arrival_seconds * (1 - 1e-9)
    for row in (*by_job.values(), *by_device.values()):
        assert all(before.end_seconds <= after.start_seconds for before, after in itertools.pairwise(row))
    assert result.makespan_seconds >= max(bar.end_seconds for bar in units)
    assert result.units_run == sum(described.steps_run * len(described.step) for described in scenario.trials)
    if result.bound_seconds is not None:
        assert result.makespan_seconds >= result.bound_seconds * (1 - 1e-9)


@pytest.mark.parametrize(
    ("trials", "more"),
    [
        ([trial(steps=10**17)], {}),
        ([trial(steps=10**400)], {}),
        ([trial(seconds=1e308)], {}),
        ([trial(arrival_seconds=1e300)], {}),
        ([trial()], {"devices": [SimulatedDevice(name="d0", speed=1e-308)]}),
        ([trial()], {"slowdowns": (Slowdown(device="d0", at_seconds=1, factor=1e-300),)}),
        ([trial()], {"outages": (Outage(device="d0", at_seconds=1e200, until_seconds=1.1e200),)}),
        ([trial("short", seconds=1e-20), trial("long")], {}),
    ],
)
def test_times_that_cannot_be_added_exactly_are_refused(trials, more):
    with pytest.raises(ConfigError, match="too long for steps of"):
        play(*trials, **more)


def test_a_run_of_three_thousand_years_is_simulated():
    assert play(trial(steps=10**11)).makespan_seconds == 2e11
