"""Planned steps that prove slower than groups that need no plan are given up for these, at a step's end, with the same bits."""

import functools
import logging
import re
import time

import pytest

from hydra_tune.fusion.group import membership
from hydra_tune.fusion.group.member import MemberTrial
from hydra_tune.fusion.group.multi_step_unit import GroupRound
from hydra_tune.fusion.matching.group_timing import FusionBenchmark
from hydra_tune.fusion.runtime import plan_autotuner, planned_group_size, planned_size_search
from hydra_tune.fusion.runtime.paired_unit import PairStepRunner
from hydra_tune.fusion.runtime.plan_report import PlannedSizeOption
from hydra_tune.fusion.runtime.planned_unit import GroupStepRunner
from hydra_tune.fusion.runtime.step_planner import StepPlanner
from hydra_tune.planner.run.interpreter import MergedGraphInterpreter
from hydra_tune.pool.job import OVER, Reported
from hydra_tune.pool.runtime import settings
from tests.support.stand_in_gpu import StandInGpu
from tests.support.together import together
from tests.unit.pool.fusion.test_planned_steps import bits, task
from tests.unit.pool.tasks import PATIENCE_SECONDS, running

pytestmark = pytest.mark.usefixtures("captured_once")

TRIALS = {"group": 4, "pair": 8}
BYTES = {("group", False): 390 << 10, ("pair", False): 412 << 10, ("group", True): 430 << 10, ("pair", True): 450 << 10}
EPOCHS, HELD_EPOCH = 14, 8
SLOW_SECONDS = 0.02
GIVEN_UP = re.compile(
    r"planned steps of [\d +]+ prove slower and are given up: one takes ([\d.]+) ms for each trial, and one without a plan, "
    r"of (\d), ([\d.]+) ms"
)


def tasks_of(kind, epochs=EPOCHS):
    return [task(seed, epochs=epochs) for seed in range(TRIALS[kind])]


@functools.cache
def roomy(kind, is_gpu=False):
    """The same trials where everything is kept; in groups of four and of two they come to the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        if is_gpu:
            patch.setattr(settings, "open_devices", lambda *_: [StandInGpu(0, 64 << 20)])
        with running(fusion="on", fusion_size=4, fusion_planner="off") as pool:
            results = pool.run(tasks_of(kind))
    assert {result.group_size for result in results} == {4}
    return [bits(result) for result in results]


@pytest.fixture
def kind(request):
    """One group of four, or two of four in turn; two trials fit as they are."""
    return request.param


@pytest.fixture(autouse=True)
def chosen(kind, monkeypatch):
    """Plans are preferred to what fits, and few steps of them are timed; all parts but the wanted one prove slow."""
    tried = planned_group_size._tried

    def only(planner, stacks):
        sizes = tuple(one.updates.count for one in stacks)
        if sizes == ((4,) if kind == "group" else (4, 4)):
            return tried(planner, stacks)
        return PlannedSizeOption(name="", sizes=sizes, seconds=1e9, peak_bytes=1, operator_seconds=(1e-6,) * len(sizes))

    monkeypatch.setattr(planned_group_size, "_tried", only)
    monkeypatch.setattr(planned_size_search, "COST_SHARE", float("inf"))
    monkeypatch.setattr(StepPlanner, "kept_seconds", lambda _self, _stack: 10.0)
    monkeypatch.setattr(plan_autotuner, "_WARM_UPS", 0)
    monkeypatch.setattr(plan_autotuner, "_TURNS", 1)


@pytest.fixture
def slow(monkeypatch):
    """Merged graphs take longer than was predicted."""
    run = MergedGraphInterpreter.run

    def slowly(self, given):
        until = time.thread_time() + SLOW_SECONDS
        while time.thread_time() < until:
            pass
        return run(self, given)

    monkeypatch.setattr(MergedGraphInterpreter, "run", slowly)


@pytest.fixture
def steps(monkeypatch):
    """Kinds of training steps in the order in which they were made."""
    found = []

    def noted(owner, name, what):
        original = getattr(owner, name)

        def run(self, *given, **named):
            found.append(what)
            return original(self, *given, **named)

        monkeypatch.setattr(owner, name, run)

    noted(GroupStepRunner, "backward", "planned")
    noted(PairStepRunner, "run", "planned")
    noted(GroupRound, "_trained", "unplanned")
    return found


@pytest.fixture
def steps_of_members(monkeypatch):
    """Steps that each trial's member had made when it was closed; of trials that begin again there is more than one."""
    found, close = {}, MemberTrial.close

    def closed(self, *, keep):
        if self.task.epochs == EPOCHS:  # and it is not one of those that are only timed
            found[self] = self.progress.steps
        close(self, keep=keep)

    monkeypatch.setattr(MemberTrial, "close", closed)
    return found


def pool_of(kind, is_gpu, monkeypatch, **options):
    nbytes = BYTES[kind, is_gpu]
    size = TRIALS[kind]
    if is_gpu:
        monkeypatch.setattr(settings, "open_devices", lambda *_: [StandInGpu(0, nbytes)])
    return running(
        **({"fusion": "on", "fusion_size": size, "fusion_planner": "auto", "device_memory": nbytes} | options)
    )


def trained(pool, kind, caplog, answer=lambda _event, _is_given_up: True):
    """Train to the end; from some epoch on nobody is answered before the steps are given up.

    Args:
        answer: whether a report may be answered now, if that has been waited for.
    """
    events, waiting = pool.events(), []
    with together():
        jobs = [pool.submit(one, str(number), events) for number, one in enumerate(tasks_of(kind))]
    deadline = time.monotonic() + 4 * PATIENCE_SECONDS
    while not all(job.state in OVER for job in jobs):
        assert time.monotonic() < deadline, [job.state for job in jobs]
        event = events.get(0.05)
        waiting += [event] if isinstance(event, Reported) else []
        is_given_up = any(map(GIVEN_UP.fullmatch, caplog.messages))
        for one in [one for one in waiting if (is_given_up or one.step < HELD_EPOCH) and answer(one, is_given_up)]:
            waiting.remove(one)
            if one.job.state not in OVER:
                one.job.proceed()
    return [job.result() for job in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["group", pytest.param("pair", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("is_gpu", [False, pytest.param(True, id="stand-in gpu", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("slow")
def test_slower_steps_are_given_up_and_no_step_is_lost_or_made_twice(
    kind, is_gpu, steps, steps_of_members, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    monkeypatch.setattr(
        membership, "PATIENCE_SECONDS", float("inf")
    )  # or a slow driver's members go on without each other
    borrowed, together = [], FusionBenchmark.together

    def noted(*given):
        borrowed.append(pool._pool._borrowing.turn("cpu:0")._is_borrowed)
        return together(*given)

    monkeypatch.setattr(FusionBenchmark, "together", noted)
    with pool_of(kind, is_gpu, monkeypatch) as pool:
        results = trained(pool, kind, caplog)
        device = pool.stats().devices["cpu:0"]
    assert [result.error for result in results] == [None] * TRIALS[kind]
    assert list(steps_of_members.values()) == [3 * EPOCHS] * TRIALS[kind]
    each = {"group": 2, "pair": 8}[kind]  # of an epoch
    assert each <= steps.count("planned") <= each * (HELD_EPOCH + 1)
    assert [bits(result) for result in results] == roomy(kind, is_gpu)
    assert device.peak_bytes <= device.budget_bytes
    (line,) = [found for found in map(GIVEN_UP.fullmatch, caplog.messages) if found]
    planned, size, unplanned = line.groups()
    assert float(planned) > float(unplanned)
    assert int(size) == 2
    assert borrowed == [is_gpu], "a GPU computes nothing else meanwhile"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["group", "pair"], indirect=True)
@pytest.mark.usefixtures("slow")
def test_members_that_wait_for_an_answer_or_are_stopped_meanwhile_are_not_forgotten(
    kind, steps_of_members, monkeypatch, caplog
):
    """One is answered when others have gone on for a while, and one is pruned while they do."""
    caplog.set_level(logging.INFO, "hydra_tune.fusion")
    told = []

    def answer(event, is_given_up):
        told.append(event.step)
        if is_given_up and event.job.name == "2":
            event.job.prune()
        return event.job.name != "1" or event.step == 0 or max(told) > HELD_EPOCH + 1

    with pool_of(kind, False, monkeypatch) as pool:
        results = trained(pool, kind, caplog, answer)
    statuses = ["completed", "completed", "pruned"] + ["completed"] * (TRIALS[kind] - 3)
    assert [result.status for result in results] == statuses
    assert sorted(steps_of_members.values())[1:] == [3 * EPOCHS] * (TRIALS[kind] - 1)
    for number in (
        one for one in range(TRIALS[kind]) if one != 2
    ):  # some made steps by themselves, with other last digits
        history, expected = bits(results[number])[0], roomy(kind)[number][0]
        assert [one["step"] for one in history] == list(range(EPOCHS))
        for name in ("train_loss", "val_loss"):
            assert [one[name] for one in history] == pytest.approx([one[name] for one in expected], rel=1e-5)


@pytest.mark.parametrize(
    ("together", "told"),
    [
        pytest.param(lambda *_: 100.0, "planned steps of 4 go on: one takes", marks=pytest.mark.slow),
        pytest.param(lambda *_: 1 / 0, "steps that need no plan cannot be timed", marks=pytest.mark.slow),
    ],
    ids=["no faster", "not timed"],
)
@pytest.mark.parametrize("kind", ["group"], indirect=True)
@pytest.mark.usefixtures("slow")
def test_slower_steps_go_on_where_groups_without_a_plan_are_no_faster(kind, together, told, steps, monkeypatch, caplog):
    monkeypatch.setattr(FusionBenchmark, "together", together)
    with pool_of(kind, False, monkeypatch) as pool, caplog.at_level(logging.INFO, "hydra_tune.fusion"):
        results = pool.run(tasks_of(kind, epochs=6))
    assert [result.error for result in results] == [None] * 4
    assert steps.count("planned") == 12
    assert told in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["group"], indirect=True)
@pytest.mark.usefixtures("slow")
def test_steps_whose_planning_is_insisted_on_are_compared_with_nothing(kind, steps, monkeypatch):
    asked = []
    monkeypatch.setattr(FusionBenchmark, "together", lambda *_: asked.append("timed"))
    with pool_of(kind, False, monkeypatch, fusion_planner="on") as pool:
        results = pool.run(tasks_of(kind, epochs=6))
    assert [result.error for result in results] == [None] * 4
    assert steps.count("planned") == 12
    assert asked == []
