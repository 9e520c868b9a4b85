"""Two groups that a device has no room for side by side make their steps in turn, with the bits of each group alone."""

import functools
import logging
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.runtime import plan_autotuner
from hydra_tune.fusion.runtime.paired_unit import PairStepRunner
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.pool.job import OVER, Reported
from tests.unit.pool.fusion.test_planned_steps import CNN, Noisy, X, Y, bits, task
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]

MEMORY = "280KiB"  # one trial needs 142 as it is, and a planned group of four 295
SGD = (partial(torch.optim.SGD, momentum=0.9),)


@pytest.fixture
def segments(monkeypatch):
    """What was run of the two groups: whose backward, with whose forward."""
    found = []
    run = PairStepRunner.run

    def noted(self, backward, forward):
        found.append((backward, forward))
        return run(self, backward, forward)

    monkeypatch.setattr(PairStepRunner, "run", noted)
    return found


def pool_of(**options):
    return running(**({"fusion": "on", "fusion_size": 4, "fusion_planner": "on", "device_memory": MEMORY} | options))


def tasks_of(optimizer=None, epochs=(2, 2, 2, 2)):
    """Of trials 0 and 1, which are the first group, and 2 and 3."""
    own = {} if optimizer is None else {"optimizer": partial(*optimizer, lr=1e-2)}
    return [task(seed, epochs=count, **own) for seed, count in enumerate(epochs)]


def kept(size, tasks):
    """The same groups where everything is kept, one after the other: so short ones would else be over as others come."""
    results = []
    with running(fusion="on", fusion_size=size, fusion_planner="off") as pool:
        for first in range(0, len(tasks), size):
            results += pool.run(tasks[first : first + size])
    assert {result.group_size for result in results} == {size}
    return [bits(result) for result in results]


@functools.cache
def roomy(optimizer=None, epochs=(2, 2, 2, 2)):
    return kept(2, tasks_of(optimizer, epochs))


# The first group's second step is its last of this kind of batch; the third, smaller batch of an epoch is a unit of its own.
EPOCH = [(None, 0), (0, 1), (1, 0), (0, 1), (1, None), (None, 0), (0, 1), (1, None)]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "memory"), [(None, MEMORY), pytest.param(SGD, "255KiB", marks=pytest.mark.slow)])
def test_two_groups_in_turn_have_the_bits_of_each_alone_in_the_memory_there_is(segments, optimizer, memory, caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    with pool_of(device_memory=memory) as pool:
        results = pool.run(tasks_of(optimizer))
        device = pool.stats().devices["cpu:0"]
    assert [result.error for result in results] == [None] * 4
    assert {result.group_size for result in results} == {2}
    assert segments == EPOCH * 2
    assert [bits(result) for result in results] == roomy(optimizer)
    assert 0.5 * device.budget_bytes < device.peak_bytes <= device.budget_bytes
    assert "predicted: two in turn (2 + 2" in caplog.text


@pytest.mark.slow
def test_behind_a_link_steps_are_planned_with_the_link_and_have_the_same_bits(segments, monkeypatch):
    planned, steps = StepPlanner.planned, []

    def noted(self, *stacks):
        steps.append(planned(self, *stacks))
        return steps[-1]

    monkeypatch.setattr(StepPlanner, "planned", noted)
    with pool_of(link_bandwidth="20MB/s") as pool:
        results = pool.run(tasks_of())
    assert segments == EPOCH * 2
    assert [bits(result) for result in results] == roomy()
    arrays = [array for step in steps for array in step.part.schedule.arrays]
    copies = [(array.maps[name].num_bytes, seconds) for array in arrays for name, seconds in array.in_seconds.items()]
    assert copies
    assert all(seconds >= num_bytes / 20e6 for num_bytes, seconds in copies)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [(3, 3, 1, 1), (1, 1, 3, 3), (3, 1, 2, 3)])
def test_one_of_two_groups_goes_on_by_itself_when_the_other_has_ended(segments, epochs):
    with pool_of() as pool:
        results = pool.run(tasks_of(epochs=epochs))
        device = pool.stats().devices["cpu:0"]
    assert [result.error for result in results] == [None] * 4
    assert segments == EPOCH * min(max(epochs[:2]), max(epochs[2:]))
    assert [bits(result) for result in results] == roomy(epochs=epochs)
    assert device.peak_bytes <= device.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("pruned", [1, 3])
def test_a_pruned_member_and_one_that_takes_its_place_change_nobody_elses_bits(segments, pruned):
    def search(tasks, **options):
        with pool_of(**options) as pool:
            events = pool.events()
            jobs = [pool.submit(one, None, events) for one in tasks[:4]]
            while not all(job.state in OVER for job in jobs):
                event = events.get(PATIENCE_SECONDS)
                if isinstance(event, Reported) and event.job is jobs[pruned] and event.step == 1:
                    event.job.prune()
                    event.job.result(PATIENCE_SECONDS)  # or the next one may come before there is a place
                    jobs.append(pool.submit(tasks[4], None, events))
                elif isinstance(event, Reported):
                    event.job.proceed()
            return [job.result() for job in jobs]

    tasks = [*tasks_of(epochs=(20, 20, 20, 20)), task(4, epochs=18)]
    found = search(tasks)
    assert [result.status for result in found] == ["pruned" if n == pruned else "completed" for n in range(5)]
    assert len(segments) > len(EPOCH) * 10
    assert found[4].group_size == 2
    expected = search(tasks, device_memory=None, fusion_size=2, fusion_planner="off")
    others = [n for n in range(4) if n != pruned]
    assert [bits(found[n]) for n in others] == [bits(expected[n]) for n in others]
    assert found[4].history[-1]["val_loss"] == pytest.approx(expected[4].history[-1]["val_loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [(3,), (0, 1)])
def test_members_whose_loss_is_not_finite_fail_alone(segments, bad):
    tasks = [
        task(n, optimizer=partial(torch.optim.AdamW, lr=1e30)) if n in bad else one for n, one in enumerate(tasks_of())
    ]
    with pool_of() as pool:
        results = pool.run(tasks, on_error="return")
    assert [result.status for result in results] == ["failed" if n in bad else "completed" for n in range(4)]
    assert segments
    assert [bits(result) for n, result in enumerate(results) if n not in bad] == [
        one for n, one in enumerate(roomy()) if n not in bad
    ]


@pytest.mark.slow
def test_two_groups_in_turn_go_on_from_checkpoints(tmp_path, segments):
    tasks = tasks_of()
    with pool_of(checkpoint_dir=tmp_path) as pool:
        events = pool.events()
        jobs = [pool.submit(one, f"trial {number}", events) for number, one in enumerate(tasks)]
        waiting = [events.get(PATIENCE_SECONDS) for _ in jobs]
        assert all(isinstance(event, Reported) for event in waiting)
        pool.suspend(jobs)
    assert segments == EPOCH
    with pool_of(checkpoint_dir=tmp_path) as pool:
        paths = [pool.find_checkpoint(f"trial {number}").path for number in range(4)]
        again = [pool.submit(one, f"trial {n}", resume_from=paths[n]) for n, one in enumerate(tasks)]
        results = [job.result(PATIENCE_SECONDS) for job in again]
    assert segments == EPOCH * 2
    assert [bits(result) for result in results] == roomy()


@pytest.mark.slow
def test_groups_that_cannot_take_turns_make_their_steps_one_after_the_other(segments, monkeypatch, caplog):
    planned = StepPlanner.planned
    calls = []

    def refusing(self, *stacks):
        calls.append(len(stacks))
        if len(stacks) > 1 and calls.count(2) > 1:
            raise UnfusableError("as it happens")
        return planned(self, *stacks)

    monkeypatch.setattr(StepPlanner, "planned", refusing)
    with pool_of() as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run(tasks_of())
    assert [result.error for result in results] == [None] * 4
    assert segments == []
    assert "not in turn: as it happens" in caplog.text
    assert [bits(result) for result in results] == roomy()


@pytest.mark.slow
@pytest.mark.parametrize("memory", [MEMORY, "330KiB"])
def test_steps_that_take_other_than_predicted_are_planned_once_more_with_the_same_bits(monkeypatch, tmp_path, memory):
    """Two groups in turn, and one group whose steps are planned."""
    monkeypatch.setattr(plan_autotuner, "TOLERANCE", -1.0)
    monkeypatch.setattr(plan_autotuner, "_WARM_UPS", 0)
    monkeypatch.setattr(plan_autotuner, "_TURNS", 1)
    epochs = (12,) * 4
    with pool_of(device_memory=memory, event_log=tmp_path / "log.jsonl") as pool:
        results = pool.run(tasks_of(epochs=epochs))
        device = pool.stats().devices["cpu:0"]
    assert [result.error for result in results] == [None] * 4
    assert device.units == sum(result.units_run for result in results)
    is_pair = memory == MEMORY
    assert [bits(result) for result in results] == (roomy(epochs=epochs) if is_pair else roomy_group(epochs))
    assert device.peak_bytes <= device.budget_bytes
    events = [event for event in read_log(tmp_path / "log.jsonl").jobs if event.what in ("plan", "measured")]
    plan, *all_measured = (event.more for event in events)
    (chosen,) = [way for way in plan["ways"] if way["is_chosen"]]
    assert chosen["sizes"] == ([2, 2] if is_pair else [4])
    assert all_measured
    for found in all_measured:  # of each kind of batch
        assert found["sizes"] == chosen["sizes"]
        assert found["is_replanned"]
        assert [way["is_chosen"] for way in found["ways"]].count(True) == 1


@functools.cache
def roomy_group(epochs):
    """All four in one group where everything is kept."""
    with running(fusion="on", fusion_size=4, fusion_planner="off") as pool:
        return [bits(result) for result in pool.run(tasks_of(epochs=epochs))]


@pytest.mark.slow
def test_a_probe_shows_how_trials_beyond_the_room_would_be_computed_together():
    with pool_of() as pool:
        found = [
            trial.fusion
            for trial in pool.plan([task(0), task(4, max_grad_norm=1.0), task(5, model=Noisy)], probe=True).trials
        ]
    one, clipped, other, *_ = found
    assert one.planned is not None
    assert [way.name for way in one.planned.ways[:3]] == ["fits, one after another", "one group", "two in turn"]
    assert [way.sizes for way in one.planned.ways[:3]] == [(1,), (2,), (1, 1)]
    (four,) = (way for way in one.planned.ways if way.sizes == (4,))
    assert "no plan of 4 fused trials" in four.why_not
    assert sum(part.trials for part in one.planned.parts) == 4
    assert sum(part.seconds for part in one.planned.parts) < 4 * one.planned.ways[0].seconds_each
    assert clipped.planned is not None
    assert clipped.planned != one.planned  # its gradients are there together
    assert other.planned is None
    assert "other than those of dropout" in other.why_not_planned


def _double():
    return CNN().double()


@pytest.mark.slow
def test_in_float64_two_groups_in_turn_come_to_what_one_of_all_comes_to(segments):
    data = TensorDataset(X.double(), Y)
    own = {"model": _double, "train": data, "validate": data}
    tasks = [task(seed, **own) for seed in range(4)]
    with pool_of(device_memory="560KiB") as pool:
        found = pool.run(tasks)
    assert segments
    with running(fusion="on", fusion_size=4, fusion_planner="off") as pool:
        expected = pool.run(tasks)
    assert {result.group_size for result in expected} == {4}
    for one, other in zip(found, expected, strict=True):
        for name, tensor in other.state_dict().items():
            torch.testing.assert_close(one.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)
