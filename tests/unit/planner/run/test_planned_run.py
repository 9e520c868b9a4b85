"""Planned pairs give the bits of the unplanned run, in the memory they were planned for."""

import functools
import gc

import pytest
import torch

from benchmarks.mutwo_least import least
from hydra_tune.planner.cost.latency import times_of
from hydra_tune.planner.cost.peak_memory import followed, peak_of, simulated
from hydra_tune.planner.ir.lowering import lowered, start_bytes
from hydra_tune.planner.ir.plan_state import ScheduleSegment, undecided
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from hydra_tune.planner.profile.profiler import GraphMeasurements, array_of, copied_at
from hydra_tune.planner.run.copy_engine import ThreadCopyEngine
from hydra_tune.planner.run.runner import MergedGraphRunner
from hydra_tune.planner.search.portfolio import Planner, limit_for
from tests.support.tracker import StorageTracker
from tests.unit.planner.made import MODELS, run_unplanned, sub_array

CPU = torch.device("cpu")
STEPS = 3


@functools.cache
def array(name, **options):
    """With times that are the same on every machine: each operator as many as the bytes that it touches."""
    step = sub_array(name, **options).step
    seen = step.seen
    seconds = {
        n.name: 1e-6 + 1e-9 * sum(map(seen.sizes.get, (*seen.reads[n.name], *seen.makes[n.name]))) for n in step.ops
    }
    return copied_at(array_of(name, step, GraphMeasurements(seconds)), 3e8, 1e-6)


@functools.cache
def unplanned(name, seed, **options):
    made = sub_array(name, seed=seed, **options)
    losses = [run_unplanned(made, number) for number in range(STEPS)]
    return losses, [tensor.clone() for tensor in made.everything()]


def pair_of(names, seeds=(1, 2), **options):
    return [sub_array(name, seed=seed, **options) for name, seed in zip(names, seeds, strict=False)]


def started(schedule, pair):
    def draw(side, number):
        return pair[side].step.noise[number].draw(pair[side].generators, CPU)

    return MergedGraphRunner(schedule, [one.step for one in pair], CPU, [one.arguments for one in pair], draw)


def limited(names, share, policy=None, **options):
    """A plan within a share of the memory that an unplanned run needs beside its static tensors; options are of sub-arrays."""
    arrays = tuple(array(name, **options) for name in names)
    whole = undecided(arrays, 1 << 60)
    rest = peak_of(whole)[1].peak_bytes - whole.static_bytes
    schedule, _ = planned(undecided(arrays, whole.static_bytes + int(share * rest)), policy)
    return schedule


def assert_same_as_unplanned(schedule, names, steps=(STEPS, STEPS), **options):
    pair = pair_of(names, **options)
    run = started(schedule, pair)
    losses = {}
    try:
        run.run(steps, lambda side, number, found: losses.update({(side, number): found.clone()}))
    finally:
        run.close()
    for side, (name, made) in enumerate(zip(names, pair, strict=True)):
        expected, state = unplanned(name, side + 1, **options)
        for number in range(steps[side]):
            assert torch.equal(losses[side, number], expected[number])
        if steps[side] == STEPS:
            assert all(torch.equal(a, b) for a, b in zip(made.everything(), state, strict=True))
    return run.merged


NOT_MET = {("dlrm", 0.4): 0.56}
"""Where no plan is within a limit, the smallest that one is."""
SHARES = [
    pytest.param(name, share, marks=[] if (name, share) in {("cnn", 0.4), ("dlrm", 0.6)} else pytest.mark.slow)
    for name in MODELS
    for share in (1.0, 0.8, 0.6, 0.4)
]


@pytest.mark.parametrize(("name", "share"), SHARES)
def test_results_are_the_unplanned_runs_bit_for_bit(name, share):
    schedule = limited((name, name), share)
    verify_schedule(schedule)
    assert_same_as_unplanned(schedule, (name, name))


LINKS = [
    # Over a GPU's link copies of both directions go side by side.
    pytest.param("transformer", 5e7, 0.45, True, 1.1, id="duplex"),
    # Over the simulated link of a CPU device they do not.
    pytest.param("cnn", 2.5e8, 0.45, False, 1.01, id="half duplex"),
]


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(("name", "bytes_per_second", "share", "is_duplex", "gain"), LINKS)
def test_on_a_slow_link_an_interleaved_pair_is_faster_than_every_way_without(
    name, bytes_per_second, share, is_duplex, gain
):
    arrays = (copied_at(array(name), bytes_per_second, 1e-6),) * 2
    whole = undecided(arrays, 1 << 60)
    limit = whole.static_bytes + int(share * (peak_of(whole)[1].peak_bytes - whole.static_bytes))
    ways = Planner(array=lambda _: arrays[0], limit_bytes=limit_for(limit), is_duplex=is_duplex).ways((1, 1), arrays)
    waits = [AllowedPlanActions(interleaves=False, recomputes=again, is_duplex=is_duplex) for again in (True, False)]
    still = [planned(undecided(arrays, limit), policy)[0] for policy in waits]
    still += [ways[way].schedule for way in ("kept", "recomputations alone", "min-cut")]
    fitting = [one for one in still if peak_of(one)[1].peak_bytes <= limit]
    best = min((one for one in ways.values() if one.peak_bytes <= limit), key=lambda one: one.times.seconds)
    assert any(one.swaps for schedule in fitting for one in schedule.decisions), (
        "without interleaving, copies are waited for"
    )
    assert any(one.slots for one in best.schedule.decisions)
    assert gain * best.times.seconds < min(times_of(one, is_duplex=is_duplex).seconds for one in fitting)
    assert_same_as_unplanned(best.schedule, (name, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [AllowedPlanActions(swaps=False), AllowedPlanActions(recomputes=False), AllowedPlanActions(interleaves=False)],
)
def test_so_they_are_with_swaps_or_recomputations_alone(policy):
    assert_same_as_unplanned(limited(("resnet", "resnet"), 0.4, policy), ("resnet", "resnet"))


@pytest.mark.slow
def test_sub_arrays_of_different_architectures_make_a_pair():
    schedule = limited(("cnn", "transformer"), 0.6)
    assert_same_as_unplanned(schedule, ("cnn", "transformer"))


def test_one_sub_array_alone_swaps_and_recomputes_too():
    schedule = limited(("transformer",), 0.5)
    assert schedule.decisions[0].swaps or schedule.decisions[0].recomputes
    assert_same_as_unplanned(schedule, ("transformer",), (STEPS,))


def test_models_of_several_dtypes_are_planned():
    schedule = limited(("mixed", "mixed"), 0.5)
    assert any(one.swaps or one.recomputes for one in schedule.decisions)
    assert_same_as_unplanned(schedule, ("mixed", "mixed"))


@pytest.mark.parametrize(("share", "policy"), [(1.0, AllowedPlanActions()), (0.4, AllowedPlanActions(swaps=False))])
def test_buffers_that_the_forward_overwrites_are_overwritten_once(share, policy):
    """The backward reads them, and so do operators that are computed again."""
    schedule = limited(("counting", "counting"), share, policy)
    assert bool(schedule.decisions[0].recomputes) == (share < 1)
    assert_same_as_unplanned(schedule, ("counting", "counting"))


def test_one_goes_on_alone_when_its_partner_has_ended():
    schedule = limited(("cnn", "cnn"), 0.6)
    assert_same_as_unplanned(schedule, ("cnn", "cnn"), (1, STEPS))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "share"), SHARES)
def test_an_independent_tracker_finds_the_peak_that_was_planned(name, share):
    schedule = limited((name, name), share)
    measured, predicted = tracked(schedule, (name, name))
    assert measured <= predicted
    assert measured >= 0.9 * predicted
    is_met = predicted <= schedule.limit_bytes - schedule.static_bytes
    assert is_met == ((name, share) not in NOT_MET)
    if not is_met:
        assert predicted == least(array(name)).num_bytes  # and with another limit it is within that
        assert peak_of(limited((name, name), NOT_MET[name, share]))[1].peak_bytes == schedule.static_bytes + predicted


def tracked(schedule, names, **options):
    """Bytes of storages made beside the arguments, which are there all the time, and what was planned; the host's were taken
    before."""
    pair = pair_of(names, **options)
    run = started(schedule, pair)
    arguments = [made.arguments(0) for made in pair]
    run._arguments = [lambda _number, found=found: found for found in arguments]
    run.segment(ScheduleSegment(None, 0))
    run.segment(ScheduleSegment(0, 1))
    tracker = StorageTracker()
    gc.collect()
    gc.disable()
    try:
        with tracker() as mode:
            mode._account.follow([t for key, t in run._left.items() if not key.endswith("_on_host")])
            mode._account.follow([t for found in arguments for t in found.values()])
            for segment in (ScheduleSegment(1, 0), ScheduleSegment(0, 1)):
                run.segment(segment)
    finally:
        gc.enable()
        run.close()
    measured = tracker.peak_bytes[0] - schedule.static_bytes
    predicted = max(simulated(schedule, s).peak_bytes for s in schedule.segments) - schedule.static_bytes
    return measured, predicted


def test_what_is_predicted_is_what_the_instructions_say():
    schedule = limited(("cnn", "cnn"), 0.5)
    for segment in schedule.segments:
        found = followed(lowered(schedule, segment), start_bytes(schedule, segment))
        assert found.peak_bytes <= schedule.limit_bytes


def test_a_copy_that_fails_fails_whoever_waits_for_it():
    copies = ThreadCopyEngine({"a": 3})
    try:
        handle = copies.offload(torch.zeros(4), "a")
        with pytest.raises(RuntimeError, match="size"):
            copies.release(handle)
        assert copies.arrived(copies.prefetch(torch.tensor([7], dtype=torch.uint8))).tolist() == [7]
    finally:
        copies.close()
