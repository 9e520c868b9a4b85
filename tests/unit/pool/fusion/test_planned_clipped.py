"""Planned steps of groups whose members clip their gradients have the bits of the same groups where everything is kept."""

import functools
import logging
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from hydra_tune.fusion.runtime import planned_group_size
from hydra_tune.fusion.runtime.plan_report import PlannedSizeOption
from hydra_tune.pool.job import OVER, Reported
from tests.unit.planner.made import Transformer
from tests.unit.pool.fusion.test_planned_pairs import MEMORY as PAIR_MEMORY
from tests.unit.pool.fusion.test_planned_pairs import kept, segments
from tests.unit.pool.fusion.test_planned_steps import CNN, MEMORY, X, Y, bits, steps, task
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

__all__ = ["segments", "steps"]  # fixtures
pytestmark = pytest.mark.timeout(120)

LIMITS = (0.05, 0.5, None, 3.0)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def tasks_of(limits=LIMITS, **changes):
    return [task(seed, max_grad_norm=limit, **changes) for seed, limit in enumerate(limits)]


def planned(tasks, memory, **options):
    with running(fusion="on", fusion_size=4, fusion_planner="on", device_memory=memory, **options) as pool:
        results = pool.run(tasks)
        device = pool.stats().devices["cpu:0"]
    assert [result.error for result in results] == [None] * len(tasks)
    assert device.peak_bytes <= device.budget_bytes
    return results


@functools.cache
def roomy(size, optimizer=None, epochs=2):
    return kept(size, tasks_of(epochs=epochs, **({} if optimizer is None else {"optimizer": optimizer})))


TOKENS = TensorDataset(torch.randint(11, (24, 32), generator=torch.Generator().manual_seed(3)), torch.arange(24) % 4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("optimizer", [partial(torch.optim.AdamW, lr=1e-3), SGD])
def test_transformers_that_clip_have_the_bits_of_groups_that_have_room(steps, segments, monkeypatch, size, optimizer):
    """With gradients that lie otherwise than their parameters, and dropout: one group, and two in turn."""
    changes = {"model": Transformer, "train": TOKENS, "validate": None, "batch_size": 12, "optimizer": optimizer}
    tried = planned_group_size._tried

    def tried_as_wanted(planner, stacks):
        sizes = tuple(stack.updates.count for stack in stacks)
        wanted = sizes == ((4,) if size == 4 else (2, 2))
        return tried(planner, stacks) if wanted else PlannedSizeOption(name="", sizes=sizes, why_not="not wanted here")

    monkeypatch.setattr(planned_group_size, "_tried", tried_as_wanted)
    results = planned(tasks_of(**changes), "3MiB")
    assert {result.group_size for result in results} == {size}
    assert bool(segments) == (size == 2)
    assert bool(steps) == (size == 4)
    assert [bits(result) for result in results] == kept(size, tasks_of(**changes))


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize(
    ("optimizer", "epochs"), [(SGD, 1), *(pytest.param(one, 2, marks=pytest.mark.slow) for one in (None, SGD))]
)
def test_a_group_that_clips_has_the_bits_of_one_that_has_room(steps, optimizer, epochs, caplog):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    changes = {"epochs": epochs} if optimizer is None else {"epochs": epochs, "optimizer": optimizer}
    results = planned(tasks_of(**changes), MEMORY)
    assert {result.group_size for result in results} == {4}
    assert steps == [4] * 2 * epochs  # the last batches of epochs fit as they are
    assert [bits(result) for result in results] == roomy(4, optimizer, epochs)
    assert "predicted: one group (4, " in caplog.text


@pytest.mark.slow
def test_what_is_clipped_is_not_what_is_left(steps):
    """Or the tests here would show nothing: limits that differ give other bits, to the members that they are of."""
    with running(fusion="on", fusion_size=4, fusion_planner="off") as pool:
        others = pool.run(tasks_of((0.06, 0.5, None, 3.0)))
    same = [bits(one) == other for one, other in zip(others, roomy(4), strict=True)]
    assert same == [False, True, True, True]
    assert steps == []


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, SGD])
def test_two_groups_in_turn_that_clip_have_the_bits_of_each_alone(segments, optimizer):
    changes = {} if optimizer is None else {"optimizer": optimizer}
    results = planned(tasks_of(**changes), PAIR_MEMORY)
    assert {result.group_size for result in results} == {2}
    assert (0, 1) in segments
    assert (1, 0) in segments
    assert [bits(result) for result in results] == roomy(2, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [MEMORY, PAIR_MEMORY])
def test_a_member_that_clips_and_whose_loss_is_not_finite_fails_alone(memory):
    """Its norm is not finite either, and is of its own gradients only."""
    tasks = tasks_of()
    tasks[1] = task(1, max_grad_norm=0.5, optimizer=partial(torch.optim.AdamW, lr=1e30))
    with running(fusion="on", fusion_size=4, fusion_planner="on", device_memory=memory) as pool:
        results = pool.run(tasks, on_error="return")
    assert [result.status for result in results] == ["completed", "failed", "completed", "completed"]
    expected = roomy(4 if memory == MEMORY else 2)
    assert [bits(results[n]) for n in (0, 2, 3)] == [expected[n] for n in (0, 2, 3)]


@pytest.mark.slow
def test_who_takes_a_pruned_members_place_clips_to_its_own_norm(steps):
    def search(**options):
        tasks = [*tasks_of(epochs=20), task(4, max_grad_norm=0.02, epochs=18)]
        with running(**({"fusion": "on", "fusion_size": 4, "fusion_planner": "on"} | options)) as pool:
            events = pool.events()
            jobs = [pool.submit(one, None, events) for one in tasks[:4]]
            while not all(job.state in OVER for job in jobs):
                event = events.get(PATIENCE_SECONDS)
                if isinstance(event, Reported) and event.job is jobs[1] and event.step == 1:
                    event.job.prune()
                    event.job.result(PATIENCE_SECONDS)  # or the next one may come before there is a place
                    jobs.append(pool.submit(tasks[4], None, events))
                elif isinstance(event, Reported):
                    event.job.proceed()
            return [job.result() for job in jobs]

    found = search(device_memory=MEMORY)
    assert steps
    expected = search(fusion_planner="off")
    assert [one.status for one in found] == ["completed", "pruned", "completed", "completed", "completed"]
    assert found[4].group_size == 4
    assert [bits(found[n]) for n in (0, 2, 3)] == [bits(expected[n]) for n in (0, 2, 3)]
    with running(fusion="off") as pool:
        (alone,) = pool.run([task(4, max_grad_norm=0.02, epochs=18)])
    assert found[4].history[-1]["val_loss"] == pytest.approx(alone.history[-1]["val_loss"], rel=1e-3)


def _double():
    return CNN().double()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [partial(torch.optim.AdamW, lr=1e-3), SGD])
@pytest.mark.parametrize("memory", ["780KiB", "560KiB"])
def test_in_float64_members_that_clip_come_to_what_they_come_to_alone(steps, segments, memory, optimizer):
    data = TensorDataset(X.double(), Y)
    tasks = tasks_of(model=_double, train=data, validate=data, optimizer=optimizer)
    found = planned(tasks, memory)
    assert steps or segments
    with running(fusion="off") as pool:
        expected = pool.run(tasks)
    for one, other in zip(found, expected, strict=True):
        for name, tensor in other.state_dict().items():
            torch.testing.assert_close(one.state_dict()[name], tensor, rtol=1e-9, atol=1e-9)
