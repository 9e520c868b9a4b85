"""What befalls a group is not the end of its members: a device without memory, and one that is lost."""

from contextlib import ExitStack

import pytest
from torch.nn import functional
from torch.utils.data import TensorDataset

from hydra_tune.fusion.matching import group_size_chooser
from hydra_tune.pool.fusion import group_jobs
from hydra_tune.pool.fusion.group_jobs import GroupJobLauncher
from hydra_tune.pool.job import OVER, Reported
from tests.support.losable import losable
from tests.support.shortage import Shortage
from tests.support.together import together
from tests.unit.pool.fusion.test_fused_pool import X, Y, assert_as_plain, sizes, task  # noqa: F401 - a fixture
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]


def trained(pool, tasks, at_first=None):
    """Train to the end; what was reported, by job."""
    events = pool.events()
    with together():
        jobs = [pool.submit(one, f"trial {number}", events) for number, one in enumerate(tasks)]
    reports = {job: [] for job in jobs}
    while any(job.state not in OVER for job in jobs):
        event = events.get(0.1)
        if isinstance(event, Reported):
            reports[event.job].append(event.step)
            if at_first is not None:
                at_first()
                at_first = None
            event.job.proceed()
    return [job.result(PATIENCE_SECONDS) for job in jobs], list(reports.values())


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("unit", [8, 9], ids=["where it can be undone", "within a step"])
@pytest.mark.parametrize("times", [2, 4])
def test_a_group_that_has_no_memory_goes_on_in_smaller_ones(sizes, caplog, unit, times):  # noqa: F811
    """Two runs of a unit fail the group; four fail a group of half its size as well."""
    shortage = Shortage()
    tasks = [task(seed) for seed in range(4)]
    with running(fusion="on", instrument=shortage) as pool:
        shortage.arm(unit, 1, times)
        results, reports = trained(pool, tasks)
    assert shortage.num_raised > 1
    assert "ran out of memory, and its trials go on in groups of 2 at most" in caplog.text
    assert sizes[0] == 4
    assert max(sizes[1:]) <= 2
    assert reports == [[0, 1, 2]] * 4
    for result, one in zip(results, tasks, strict=True):
        if result.error is not None:
            raise result.error
        assert_as_plain(result, one)


@pytest.mark.parametrize("saves", [False, True])
def test_members_of_a_group_whose_device_is_lost_begin_again(sizes, monkeypatch, tmp_path, saves):  # noqa: F811
    """Together again, on the other device; nothing is reported twice."""
    opened = losable(monkeypatch)
    tasks = [task(seed, epochs=4) for seed in range(3)]
    until_all_begin_again, again, carry_anew = ExitStack(), [], GroupJobLauncher.carry_anew

    def counted(self, entry):
        carry_anew(self, entry)
        again.append(entry)
        if len(again) == len(tasks):
            until_all_begin_again.close()

    monkeypatch.setattr(GroupJobLauncher, "carry_anew", counted)
    with running(
        fusion="on", devices="cpu:2", max_retries=1, **({"checkpoint_dir": tmp_path} if saves else {})
    ) as pool:

        def lose():
            busy = max(pool.stats().devices.items(), key=lambda item: item[1].units)[0]
            until_all_begin_again.enter_context(together())
            opened[int(busy.removeprefix("cpu:"))].lose_at(3)

        results, reports = trained(pool, tasks, lose)
    assert sizes == [3, 3]
    assert reports == [[0, 1, 2, 3]] * 3
    for result, one in zip(results, tasks, strict=True):
        if result.error is not None:
            raise result.error
        assert result.retries == 1
        assert_as_plain(result, one)


def test_a_group_that_cannot_be_made_fails_all_whom_it_was_made_for(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no group today")

    with running(fusion="on", fusion_size=3) as pool:
        monkeypatch.setattr(group_jobs, "GroupTrial", broken)
        with together():
            jobs = [pool.submit(task(seed)) for seed in range(3)]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
        monkeypatch.undo()
        assert [result.status for result in results] == ["failed"] * 3
        assert {str(result.error) for result in results} == {"no group today"}
        assert_as_plain(pool.submit(task(7)).result(PATIENCE_SECONDS), task(7))


def test_trials_whose_timing_breaks_are_left_to_themselves(monkeypatch):
    """What is raised fails the one that looked; those that it had taken run."""
    asked = []

    def choose(*_):
        asked.append(1)
        raise RuntimeError("the log is full")

    monkeypatch.setattr(group_size_chooser, "_LEAST_STEPS", 0)
    with running(fusion="auto", max_concurrent=1) as pool:
        monkeypatch.setattr(group_size_chooser.GroupSizeChooser, "choose", choose)
        with together():
            jobs = [pool.submit(task(seed)) for seed in range(3)]
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert 1 <= len(asked) <= 2  # the last has nobody left to look for
    statuses = [result.status for result in results]
    assert statuses.count("failed") == len(asked)
    assert statuses.count("completed") == 3 - len(asked)


def square_error(scores, classes):
    return functional.mse_loss(scores, functional.one_hot(classes, 4).to(scores.dtype))


@pytest.mark.parametrize(
    ("loss", "label", "of_all", "alone"),
    [
        (functional.cross_entropy, 9, "IndexError: Target 9 is out of bounds.", "Target 9 is out of bounds"),
        (
            square_error,
            9,
            "RuntimeError: index 9 is out of bounds for",
            "Class values must be smaller than num_classes",
        ),
        (square_error, -1, "RuntimeError: index -1 is out of bounds for", "Class values must be non-negative"),
    ],
)
def test_a_member_that_fails_the_step_of_all_fails_alone(sizes, caplog, loss, label, of_all, alone):  # noqa: F811
    """The others begin again by themselves; nothing is reported twice."""
    wrong = Y.clone()
    wrong[5] = label
    tasks = [task(seed, loss=loss, train=TensorDataset(X, wrong if seed == 1 else Y)) for seed in range(3)]
    with running(fusion="on") as pool:
        results, reports = trained(pool, tasks)
    assert sizes[0] == 3
    assert f"a step of 3 trials together failed ({of_all}" in caplog.text
    assert results[1].status == "failed"
    assert alone in str(results[1].error)
    assert [reports[0], reports[2]] == [[0, 1, 2]] * 2
    for number in (0, 2):
        assert_as_plain(results[number], tasks[number])


def test_trials_after_a_failed_step_are_told_of_the_step(sizes, caplog):  # noqa: F811
    wrong = Y.clone()
    wrong[5] = 9
    with caplog.at_level("INFO", logger="hydra_tune.fusion"), running(fusion="on") as pool:
        trained(pool, [task(seed, train=TensorDataset(X, wrong)) for seed in range(2)])
        caplog.clear()
        trained(pool, [task(seed) for seed in range(2)])
    reasons = [record.message for record in caplog.records if "is not fused: " in record.message]
    assert sizes == [2]
    assert len(reasons) == 2
    for reason in reasons:
        assert "a step of 2 trials together failed (IndexError: Target 9 is out of bounds.)" in reason


def test_a_member_that_comes_to_a_batch_without_samples_fails_alone(sizes):  # noqa: F811
    seconds = [(X, Y), (X[:0], Y[:0])]
    tasks = [
        task(seed, epochs=2, train=lambda second=second: [(X, Y), second], validate=None, batch_size=None)
        for seed, second in enumerate(seconds)
    ]
    with running(fusion="on") as pool:
        (whole, empty), _ = trained(pool, tasks)
    assert sizes[0] == 2
    assert whole.status == "completed"
    assert empty.status == "failed"
    assert "train yielded a batch of 0 samples (number 1 in epoch 0" in str(empty.error)
