"""Members of groups are saved, gone on with, cloned and begun from others' weights as trials of their own."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, AdamW, lr_scheduler

from hydra_tune.pool.job import OVER, Reported
from tests.support.together import together
from tests.unit.pool.fusion.test_fused_pool import assert_as_plain, sizes, task  # noqa: F401 - a fixture
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]


def described(seed, **changes):
    schedule = partial(lr_scheduler.ExponentialLR, gamma=0.9)
    optimizer = partial(AdamW, lr=1e-2) if seed % 2 else partial(AdamW, lr=3e-3, weight_decay=0.1)
    return task(seed, **({"epochs": 4, "scheduler": schedule, "optimizer": optimizer, "report_every": 2} | changes))


def answer(events, until, may_go_on=lambda _job: True):
    """Answer reports until that is so; some are not answered."""
    while not until():
        event = events.get(0.05)
        if isinstance(event, Reported) and may_go_on(event.job):
            event.job.proceed()


def stopped(folder, tasks, *, epochs, **options):
    """Train a search in a pool, and stop it in the middle; who is there first waits for the others at a report."""

    def is_there(job):
        return job.progress.epoch >= epochs

    with running(checkpoint_dir=folder, **options) as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(one, f"trial {number}", events) for number, one in enumerate(tasks)]
        answer(events, lambda: all(map(is_there, jobs)), lambda job: not is_there(job))
        pool.suspend(jobs)
        assert {job.result(PATIENCE_SECONDS).status for job in jobs} == {"cancelled"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("first", "then"), [("on", "on"), ("on", "off"), ("off", "on")])
def test_a_search_that_was_stopped_goes_on_fused_or_not(tmp_path, sizes, first, then):  # noqa: F811
    tasks = [described(seed) for seed in range(3)]
    stopped(tmp_path, tasks, epochs=2, fusion=first)
    with running(checkpoint_dir=tmp_path, fusion=then) as pool:
        found = [pool.find_checkpoint(f"trial {number}") for number in range(len(tasks))]
        assert all(0 < one.steps < 12 for one in found)
        with together():
            jobs = [pool.submit(one, f"trial {n}", resume_from=found[n].path) for n, one in enumerate(tasks)]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert sizes == [3] * [first, then].count("on")
    for result, one in zip(results, tasks, strict=True):
        if result.error is not None:
            raise result.error
        assert result.checkpoint is not None
        assert_as_plain(result, one)


@pytest.mark.cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_member_is_saved_at_any_step_and_goes_on_among_others(tmp_path, sizes, accumulate):  # noqa: F811
    """Within an epoch, beside one that begins there and one that goes on elsewhere; momentum is of one only."""
    made = partial(described, accumulate=accumulate)
    tasks = [made(0, optimizer=partial(SGD, lr=0.05, momentum=0.9)), made(1, optimizer=partial(SGD, lr=0.05))]
    with running(checkpoint_dir=tmp_path, checkpoint_every=1, fusion="on") as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(one, f"trial {number}", events) for number, one in enumerate(tasks)]
        answer(events, lambda: jobs[0].progress.step >= 5 - accumulate)
        paths = [job.checkpoint(PATIENCE_SECONDS) for job in jobs]
        for job in jobs:
            job.cancel()
    late = made(2, optimizer=partial(SGD, lr=0.1, momentum=0.5), epochs=2)
    with running(fusion="on") as pool:
        with together():
            again = [pool.submit(one, resume_from=path) for one, path in zip(tasks, paths, strict=True)]
            again.append(pool.submit(late))
        results = [job.result(PATIENCE_SECONDS) for job in again]
    assert sizes == [2, 3]
    for result, one in zip(results, [*tasks, late], strict=True):
        assert_as_plain(result, one)


@pytest.mark.cases(1 / 3)
def test_a_member_that_waits_at_a_report_is_saved_while_others_go_on_and_while_all_wait(tmp_path):
    tasks = [described(seed, report_every="epoch" if seed else 2) for seed in range(2)]
    with running(checkpoint_dir=tmp_path, fusion="on") as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(one, f"trial {number}", events) for number, one in enumerate(tasks)]
        first = events.get(PATIENCE_SECONDS)
        assert first.job is jobs[0]
        assert jobs[0].checkpoint(PATIENCE_SECONDS) is not None
        assert events.get(PATIENCE_SECONDS).job is jobs[1]
        assert jobs[1].checkpoint(PATIENCE_SECONDS) is not None
        clone = pool.clone(jobs[0], {"epochs": 5}, "clone")
        for job in jobs:
            job.proceed()
        answer(events, lambda: all(job.state in OVER for job in jobs))
        for job, one in zip(jobs, tasks, strict=True):
            assert_as_plain(job.result(), one)
        assert_as_plain(clone.result(PATIENCE_SECONDS), described(0, report_every=2, epochs=5))


def test_a_member_that_waits_is_saved_to_any_folder_without_others_being_kept(tmp_path, sizes):  # noqa: F811
    tasks = [described(seed) for seed in range(2)]
    with running(fusion="on") as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(one, events=events) for one in tasks]
        waiting = {events.get(PATIENCE_SECONDS).job.key for _ in jobs}
        assert waiting == {job.key for job in jobs}
        path = pool.save_to(jobs[0], tmp_path / "saved")
        for job in jobs:
            job.cancel()
    assert sizes == [2]
    with running() as pool:
        again = pool.submit(tasks[0], resume_from=path)
        assert again.result(PATIENCE_SECONDS).status == "completed"
        assert_as_plain(again.result(), tasks[0])


def test_one_begins_among_others_with_the_weights_of_a_member(tmp_path, sizes):  # noqa: F811
    with running(checkpoint_dir=tmp_path, fusion="on") as pool:
        with together():
            jobs = [pool.submit(described(seed), f"trial {seed}") for seed in range(2)]
        first = [job.result(PATIENCE_SECONDS) for job in jobs]
        with together():
            warm = [pool.submit(described(seed, epochs=1), warm_start=first[0].checkpoint) for seed in (5, 6)]
        fused = [job.result(PATIENCE_SECONDS) for job in warm]
    with running(checkpoint_dir=tmp_path) as pool:
        alone = pool.submit(described(5, epochs=1), warm_start=first[0].checkpoint).result(PATIENCE_SECONDS)
    assert sizes == [2, 2]
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(fused[0].state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
