"""Jobs that are computed together are to their driver what they are alone: reports, answers, ends and results."""

import logging
import re
import signal
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.devices.cpu import CpuDevice
from hydra_tune.errors import ConfigError, HydraTuneError, UnfusableError
from hydra_tune.fusion.group.group_trial import GroupTrial
from hydra_tune.fusion.matching import group_size_chooser, group_size_policy
from hydra_tune.observe.event_log.reader import read_log
from hydra_tune.observe.event_log.run_figures import run_figures
from hydra_tune.observe.event_log.run_state import read_run_state
from hydra_tune.observe.trace.chrome_trace import trace_events
from hydra_tune.pool.fusion.group_jobs import GroupJobLauncher
from hydra_tune.pool.job import OVER, Failed, Finished, Reported
from hydra_tune.pool.runtime.job_state import granted_bytes
from hydra_tune.pool.runtime.option_checks import check_compiler_acts
from hydra_tune.schedule import Scheduler
from hydra_tune.shard.partition import trial_step
from tests.support.together import together
from tests.unit.pool.tasks import PATIENCE_SECONDS, Held, against_plain, running, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("captured_once")]

_GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(24, 8, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (24,), generator=_GENERATOR)
SLOW = partial(AdamW, lr=1e-3)


def net(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4)).double()


def task(seed=0, **changes):
    arguments = {
        "model": net,
        "optimizer": partial(AdamW, lr=1e-2 / (seed + 1)),
        "train": TensorDataset(X, Y),
        "validate": TensorDataset(X[:12], Y[:12]),
        "batch_size": 8,
        "loss": functional.cross_entropy,
        "epochs": 3,
        "seed": seed,
    }
    return TrainTask(**(arguments | changes))


@pytest.fixture
def sizes(monkeypatch):
    """Members of the groups that are made."""
    found = []
    init = GroupTrial.__init__

    def counted(self, seats, *arguments, **keywords):
        found.append(len(seats))
        init(self, seats, *arguments, **keywords)

    monkeypatch.setattr(GroupTrial, "__init__", counted)
    return found


def assert_as_plain(result, described):
    plain = train_plain(described)
    assert result.status == plain.status == "completed"
    assert [h["val_loss"] for h in result.history] == pytest.approx([h["val_loss"] for h in plain.history], rel=1e-9)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    own, other = result.optimizer_state_dict(), plain.optimizer_state_dict()
    assert own["param_groups"] == other["param_groups"]
    assert own["state"].keys() == other["state"].keys()


def dropping(p):
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, 4)).double()


def scaled(width, scale):
    return nn.Sequential(nn.Linear(8, width), nn.ELU(scale), nn.Linear(width, 4)).double()


@pytest.mark.cases(1 / 3)
def test_trials_that_drop_with_other_probabilities_are_one_group_and_those_with_other_numbers_are_not(sizes):
    tasks = [task(seed, model=partial(dropping, p)) for seed, p in enumerate([0.0, 0.2, 0.5])]
    tasks += [task(seed, model=partial(scaled, 16, scale)) for seed, scale in enumerate([0.5, 1.5])]
    with running(fusion="on") as pool:
        results = pool.run(tasks)
    assert sizes == [3]
    for result, described in zip(results, tasks, strict=True):
        assert_as_plain(result, described)


def noisy(outputs, targets):
    return functional.cross_entropy(functional.dropout(outputs, 0.5), targets)


@pytest.mark.cases(1 / 3)
def test_trials_with_other_losses_are_one_group_and_one_whose_loss_draws_is_not(sizes):
    losses = [functional.cross_entropy, partial(functional.cross_entropy, label_smoothing=0.2), noisy]
    tasks = [task(seed, loss=loss) for seed, loss in enumerate(losses)]
    with running(fusion="on") as pool:
        results = pool.run(tasks)
    assert sizes == [2]
    for result, described in zip(results, tasks, strict=True):
        assert_as_plain(result, described)


@pytest.mark.cases(1 / 3)
def test_trials_of_one_architecture_are_one_group_and_the_rest_runs_as_ever(sizes):
    """Two architectures, one trial that cannot be fused, and one that nobody is like."""
    tasks = [task(seed) for seed in range(5)]
    tasks += [task(5, model=partial(net, 24)), task(6, model=partial(net, 24))]
    tasks += [task(7, accumulate=2), task(8, model=partial(net, 32)), task(9, optimizer=partial(SGD, lr=0.1))]
    with running(fusion="on", max_concurrent=3) as pool:
        results = pool.run(tasks)
    assert sorted(sizes) == [2, 5]
    for result, described in zip(results, tasks, strict=True):
        assert_as_plain(result, described)
        assert result.units_run
        assert result.compute_seconds


def hooked():
    made = net()
    made[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    return made


def watched():
    made = net()
    made[3].register_full_backward_hook(lambda *_: None)
    return made


def lazy():
    return nn.Sequential(nn.LazyLinear(16, dtype=torch.float64), nn.ReLU(), nn.Linear(16, 4, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    ("model", "why"),
    [(hooked, r"has a gradient hook \(register_hook\)"), (watched, "has a backward hook"), (lazy, "is lazy")],
)
def test_what_no_graph_would_have_runs_as_the_users_own_code(sizes, caplog, model, why):
    tasks = [task(seed, model=model) for seed in range(2)]
    with caplog.at_level("INFO", logger="hydra_tune.fusion"), running(fusion="on", num_shards=None) as pool:
        results = pool.run(tasks)
    assert sizes == []
    assert re.search(f"is not fused: .*{why}", caplog.text)
    for one, result in zip(tasks, results, strict=True):
        assert not against_plain(one, result)


class Branches(nn.Sequential):
    def forward(self, x):
        return super().forward(x if self[0].weight.sum() > 0 else -x)


def branching():
    return Branches(nn.Linear(8, 4).double())


ALONE = {
    "one trial": ([{}], "no other trial waits to be fused"),
    "other options": ([{}, {"accumulate": 2, "optimizer": SGD}], r"job [01] differs in optimizer= and accumulate="),
    "other numbers": ([{"model": partial(scaled, 16, scale)} for scale in (0.5, 1.5)], "elu.* with other arguments"),
    "no graph": ([{"model": branching}] * 2, r"its model runs whole \(.*data-dependent.*\): there is no graph"),
}


@pytest.mark.parametrize("name", ALONE)
def test_each_trial_that_is_not_fused_has_a_reason_in_the_log(sizes, caplog, name):
    changes, why = ALONE[name]
    tasks = [task(seed, **own) for seed, own in enumerate(changes)]
    with caplog.at_level("INFO", logger="hydra_tune.fusion"), running(fusion="on") as pool:
        pool.run(tasks)
    reasons = [record.message for record in caplog.records if "is not fused: " in record.message]
    assert sizes == []
    assert len(reasons) == len(tasks)
    assert re.search(why, reasons[0]), reasons


def test_a_group_has_no_more_members_than_it_may_have(sizes):
    """No unit runs before all groups are there: a trial that is prepared later may join a group whose members have ended."""
    held = Held()
    with running(fusion="on", fusion_size=3, instrument=held, max_concurrent=7) as pool:
        with together():
            jobs = [pool.submit(task(seed, epochs=1)) for seed in range(7)]
        until(lambda: all(job.state == "running" for job in jobs))
        assert sizes == [3, 3]
        held.go()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert [result.status for result in results] == ["completed"] * 7
    assert max(result.group_size for result in results) == 3


@pytest.mark.cases(1 / 3)
def test_groups_are_as_large_as_a_device_has_room_for_and_spill_like_any_trial(sizes):
    """Two groups in several shards take turns on a device that has no room for both, nor for all members in one."""
    tasks = [task(seed, model=partial(net, 512 if seed % 2 else 256), optimizer=SLOW) for seed in range(8)]
    with running(fusion="on", fusion_size=4, device_memory="700KiB", num_shards=2) as pool:
        results = pool.run(tasks)
        device = pool.stats().devices["cpu:0"]
    assert sorted(sizes)[-2:] == [
        3,
        4,
    ]  # and one beside, if the group of three has ended before the fourth could join it
    assert device.bytes_out_by_kind["parameters"] > 0
    for result, described in zip(results, tasks, strict=True):
        assert_as_plain(result, described)


def test_members_report_and_are_answered_one_by_one(sizes):
    """One goes on, one is pruned at its second report, one is cancelled, one fails."""

    class Broken(TensorDataset):
        reads = 0

        def __getitem__(self, index):
            type(self).reads += 1
            if type(self).reads > 30:
                raise RuntimeError("unreadable")
            return super().__getitem__(index)

    tasks = [task(0), task(1), task(2, epochs=9), task(3, train=Broken(X, Y))]
    with running(fusion="on") as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(one, f"trial {number}", events) for number, one in enumerate(tasks)]
        reports = [0] * len(jobs)
        over = {}
        while len(over) < len(jobs):
            event = events.get(PATIENCE_SECONDS)
            index = jobs.index(event.job)
            if isinstance(event, Finished | Failed):
                over[index] = event
                continue
            assert isinstance(event, Reported)
            assert event.step == reports[index]
            assert event.job.state == "waiting"
            assert event.job.progress.epoch == event.step
            reports[index] += 1
            if index == 1 and event.step == 1:
                event.job.prune()
            elif index == 2 and event.step == 0:
                event.job.cancel()
            else:
                event.job.proceed()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert sizes == [4]
    assert [result.status for result in results] == ["completed", "pruned", "cancelled", "failed"]
    assert reports == [3, 2, 1, 1]
    assert_as_plain(results[0], tasks[0])
    assert results[1].units_saved > 0
    assert "unreadable" in str(results[3].error)
    assert isinstance(over[3], Failed)
    with pytest.raises(HydraTuneError, match="keeps no weights"):
        results[1].module()


def test_all_members_of_a_group_may_be_cancelled_at_any_time(sizes):
    with running(fusion="on") as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(task(seed, epochs=100_000), None, events) for seed in range(3)]
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        for job in jobs:
            job.cancel()
        assert [job.result(PATIENCE_SECONDS).status for job in jobs] == ["cancelled"] * 3
    assert sizes == [3]


def test_a_job_that_is_cancelled_before_its_turn_is_in_no_group(sizes):
    with running(fusion="on", max_concurrent=1) as pool:
        first = pool.submit(task(0, epochs=100_000, model=partial(net, 24)))
        later = [pool.submit(task(seed)) for seed in range(3)]
        later[1].cancel()
        first.cancel()
        assert [job.result(PATIENCE_SECONDS).status for job in later] == ["completed", "cancelled", "completed"]
    assert sizes == [2]


def test_a_shutdown_ends_the_members(sizes):
    with running(fusion="on") as pool:
        events = pool.events()
        jobs = [pool.submit(task(seed), None, events) for seed in range(3)]
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
    assert [job.result(PATIENCE_SECONDS).status for job in jobs] == ["cancelled"] * 3


def test_a_task_that_cannot_be_built_fails_alone(sizes):
    def broken():
        raise RuntimeError("no model")

    with running(fusion="on") as pool:
        results = pool.run([task(0), task(1, model=broken), task(2)], on_error="return")
    assert [result.status for result in results] == ["completed", "failed", "completed"]
    assert sizes == [2]


def ends(pool, jobs, events, *, pruned_at):
    while not all(job.state in OVER for job in jobs):
        event = events.get(PATIENCE_SECONDS)
        if isinstance(event, Reported):
            (event.job.prune if event.step == pruned_at else event.job.proceed)()
    return [job.result() for job in jobs]


def test_all_that_a_user_reads_of_fused_trials_tells_of_the_trials_and_not_of_their_carriers(sizes, tmp_path):
    """Of a pruned pair, of a completed pair that nobody drives, and of a trial that runs alone."""
    path = tmp_path / "run.jsonl"
    with running(fusion="on", event_log=path) as pool:
        events = pool.events()
        driven = [pool.submit(task(seed, epochs=4), name=f"trial {seed}", events=events) for seed in range(2)]
        results = ends(pool, driven, events, pruned_at=1)
        results += pool.run([task(2, epochs=2), task(3, epochs=2), task(4, epochs=2, model=partial(net, 8))])
        stats = pool.stats()
    assert sizes == [2, 2]
    statuses = [result.status for result in results]
    assert statuses == ["pruned"] * 2 + ["completed"] * 3
    assert {result.units_saved for result in results[:2]} == {results[0].units_run}, "pruned half-way"
    log = read_log(path)
    figures = run_figures(log)
    for counted in (stats, figures):
        assert counted.units_run == sum(result.units_run for result in results)
        assert counted.units_saved == sum(result.units_saved for result in results)
    assert stats.units_run == sum(device.units for device in stats.devices.values())
    assert figures.trials == {"pruned": 2, "completed": 3}
    views = read_run_state(path).trials
    assert list(views) == ["trial 0", "trial 1", "job 2", "job 3", "job 4"]
    assert [view.state for view in views.values()] == statuses
    assert [(view.step, view.metrics) for view in views.values()] == [(1, result.metrics) for result in results]
    trace = list(trace_events(log))
    stories = {event["id2"]["local"]: event["name"] for event in reversed(trace) if event["ph"] == "b"}
    shown = [
        (stories[event["id2"]["local"]], event["name"])
        for event in trace
        if event["ph"] == "n" and event["name"] in OVER
    ]
    told = [(f"{number}:{name}", status) for number, (name, status) in enumerate(zip(NAMES, statuses, strict=True))]
    assert [end for end in shown if not end[0].startswith("carrier")] == told
    computing = {unit.job for unit in log.units}
    assert len(computing) == 3
    assert {story for story in stories.values() if story.startswith("carrier")} == computing
    states = {event["name"] for event in trace if event["ph"] == "b" and stories[event["id2"]["local"]] == "0:trial 0"}
    assert states == {"0:trial 0", "queued", "preparing", "running", "waiting", "ending"}


NAMES = ["trial 0", "trial 1", "job", "job", "job"]


@pytest.mark.cases(1 / 3)
def test_auto_fuses_what_gains_and_the_numbers_are_those_of_a_group_that_nobody_has_timed(
    sizes, caplog, monkeypatch, tmp_path
):
    monkeypatch.setattr(group_size_policy, "COST_SHARE", 1e6)  # however slow the machine is, they are timed
    monkeypatch.setattr(group_size_policy, "LEAST_GAIN", 1.0)  # they gain twice and more; what is timed may be off
    tasks = [task(seed, epochs=40) for seed in range(8)]
    with running(fusion="on") as pool:
        expected = pool.run(tasks)
    sizes.clear()
    path = tmp_path / "run.jsonl"
    with running(fusion="auto", event_log=path) as pool, caplog.at_level("INFO", "hydra_tune.fusion"):
        found = pool.run(tasks)
    (chosen,) = run_figures(read_log(path)).fusion
    assert (chosen["size"], chosen["trials"]) == (8, 8)
    assert chosen["why"] in caplog.text
    assert chosen["alone_seconds"] > 0 < chosen["group_seconds"]["8"]
    assert "8 of 8 are computed together" in caplog.text
    assert sizes[-1] == 8  # after those that were timed
    assert {result.group_size for result in found} == {8}
    for one, other in zip(found, expected, strict=True):
        assert [h["val_loss"] for h in one.history] == [h["val_loss"] for h in other.history]
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.cases(1 / 3)
def test_auto_times_steps_and_leaves_the_users_counters_as_they_were(monkeypatch):
    monkeypatch.setattr(group_size_policy, "LEAST_GAIN", 1e6)
    monkeypatch.setattr(group_size_policy, "COST_SHARE", 1e6)

    def counting(seed):
        weights = [1.0]

        def train():
            weights[0] *= 0.9
            return [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:])]

        return task(seed, train=train, loss=lambda out, y: weights[0] * functional.cross_entropy(out, y), epochs=60)

    with running(fusion="auto") as pool:
        results = pool.run([counting(seed) for seed in range(3)])
    for seed, result in enumerate(results):
        assert_as_plain(result, counting(seed))


@pytest.mark.cases(1 / 3)
def test_auto_leaves_trials_alone_that_gain_too_little_with_the_bits_of_the_plain_loop(sizes, monkeypatch):
    """Groups are timed, and none is good enough."""
    monkeypatch.setattr(group_size_policy, "LEAST_GAIN", 1e6)
    monkeypatch.setattr(group_size_policy, "COST_SHARE", 1e6)  # however slow the machine is, they are timed
    tasks = [task(seed, epochs=40) for seed in range(4)]
    with running(fusion="auto") as pool:
        found = pool.run(tasks)
    assert sizes
    assert {result.group_size for result in found} == {1}
    for result, described in zip(found, tasks, strict=True):
        plain = train_plain(described)
        torch.testing.assert_close(result.state_dict(), plain.state_dict(), rtol=0, atol=0)
        assert [h["val_loss"] for h in result.history] == [h["val_loss"] for h in plain.history]


@pytest.mark.cases(1 / 3)
def test_auto_captures_nothing_more_where_there_are_too_few_steps_to_find_out(monkeypatch, captured_once):
    """Trials of one family and of different dropout, which would have to be compared; waits until all are there."""
    captured = []
    capture = trial_step.capture
    monkeypatch.setattr(trial_step, "capture", lambda *given, **named: captured.append(1) or capture(*given, **named))
    described = [task(seed, model=partial(dropping, p=0.1 * seed)) for seed in range(1, 4)]
    counts = {}
    for fusion in ("off", "auto"):
        captured.clear()
        captured_once.clear()
        with running(fusion=fusion) as pool:
            results = pool.run(described)
        assert {result.group_size for result in results} == {1}
        for one, result in zip(described, results, strict=True):
            assert against_plain(one, result) == []
        counts[fusion] = len(captured)
    assert counts["auto"] == counts["off"] > 0


def test_auto_leaves_trials_alone_whose_steps_are_arithmetic(caplog, monkeypatch):
    monkeypatch.setattr(group_size_policy, "LEAST_GAIN", 4.0)  # they gain nothing; what is timed may be off by half

    def wide():
        return nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))

    data = TensorDataset(torch.randn(512, 8), torch.arange(512) % 4)
    changes = {
        "model": wide,
        "train": data,
        "validate": None,
        "batch_size": 256,
        "epochs": 10_000,
        "metric": "train_loss",
    }
    with running(fusion="auto") as pool, caplog.at_level("INFO", "hydra_tune.fusion"):
        with together():
            jobs = [pool.submit(task(seed, optimizer=partial(SGD, lr=1e-3), **changes)) for seed in range(4)]
        until(lambda: jobs[0].progress.step)
        for job in jobs:
            job.cancel()
    assert "would not gain" in caplog.text
    assert "trials are fused" not in caplog.text


def test_one_that_was_taken_and_is_left_again_can_be_pruned_meanwhile(monkeypatch):
    """The first two are fused, and the third is told to end while steps are timed."""
    with running(fusion="auto") as pool:

        def choose(self, *_):
            jobs[2].prune()
            return group_size_chooser.GroupSizeChoice(size=2, why="so it is said")

        monkeypatch.setattr(group_size_chooser.GroupSizeChooser, "choose", choose)
        monkeypatch.setattr(group_size_chooser, "_LEAST_STEPS", 0)
        events = pool.events()
        with together():
            jobs = [pool.submit(task(seed), None, events) for seed in range(3)]
        while any(job.state not in OVER for job in jobs):
            event = events.get(PATIENCE_SECONDS)
            assert event is not None
            event.job.proceed()
    assert [job.result().status for job in jobs] == ["completed", "completed", "pruned"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fusion": "always"}, "'off', 'on' or 'auto', not 'always'"),
        ({"fusion": True}, "fusion"),
        ({"fusion": "on", "fusion_size": 1}, "fusion_size"),
        ({"fusion_size": 8}, "fusion_size=8 does nothing with fusion='off'; give fusion='auto' or 'on', or leave"),
        ({"fusion": "off", "fusion_planner": "off"}, "fusion_planner='off' does nothing with fusion='off'"),
        ({"fusion_compile": "inductor"}, "fusion_compile='inductor' does nothing with fusion='off'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        HydraExecutor(**options)


def test_a_compiler_that_no_device_of_the_pool_uses_is_refused():
    with pytest.raises(ConfigError, match="fusion_compile='cudagraphs' records steps on GPUs, and all devices of this"):
        HydraExecutor("cpu:1", "64MiB", fusion="on", fusion_compile="cudagraphs").submit(task())
    gpu = SimpleNamespace(is_host=False)
    with pytest.raises(ConfigError, match="fusion_compile='inductor' compiles steps for CPU devices, and all devices"):
        check_compiler_acts("inductor", [gpu])
    check_compiler_acts("cudagraphs", [gpu])


@pytest.mark.cases(1 / 3)
def test_a_trial_that_comes_late_has_the_place_of_one_that_is_over(sizes):
    """A driver that submits another one whenever one ends: one group, whose members are those of plain loops."""
    tasks = [task(seed, epochs=2 + seed % 3) for seed in range(10)]
    with running(fusion="on", fusion_size=4) as pool:
        events = pool.events()
        left = list(tasks)
        with together():
            jobs = [pool.submit(left.pop(0), None, events) for _ in range(4)]
        results = {}
        while len(results) < len(tasks):
            event = events.get(PATIENCE_SECONDS)
            assert event is not None
            if isinstance(event, Reported):
                event.job.proceed()
                continue
            results[event.job.key] = event.result
            if left:
                jobs.append(pool.submit(left.pop(0), None, events))
                # Nobody is answered meanwhile: the group must not end before one has joined it that is slow to be built.
                until(lambda: jobs[-1].state not in ("queued", "preparing"))
    assert sizes == [4]
    for job, described in zip(jobs, tasks, strict=True):
        assert_as_plain(results[job.key], described)


def test_a_trial_for_which_there_is_no_place_has_one_made(sizes):
    """A group of two on the only device, which wait at a report; those that come later grow it as far as it may."""
    tasks = [task(seed, epochs=4) for seed in range(2)] + [task(seed) for seed in range(2, 4)]
    with running(fusion="on", fusion_size=4, max_concurrent=1) as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(one, None, events) for one in tasks[:2]]
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        with together():
            jobs += [pool.submit(one) for one in tasks[2:]]
        late = [job.result(PATIENCE_SECONDS) for job in jobs[2:]]
        assert {result.group_size for result in late} == {4}
        for job in jobs[:2]:
            job.proceed()
        while any(job.state not in OVER for job in jobs):
            event = events.get(0.1)
            if isinstance(event, Reported):
                event.job.proceed()
        results = [job.result(PATIENCE_SECONDS) for job in jobs]
    assert sizes == [2]
    for result, described in zip(results, tasks, strict=True):
        assert_as_plain(result, described)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (UnfusableError, "no plan of a larger group fits a device"),
        (RuntimeError, "no plan of a larger group can be made"),
    ],
)
def test_a_group_that_cannot_grow_gives_host_memory_back(sizes, monkeypatch, caplog, error, why):
    caplog.set_level(logging.INFO, "hydra_tune.pool.fusion.live_group")
    granted = []

    def refuse(trial, size):
        granted.append(granted_bytes(pool._pool._core.records.values()))
        raise error(f"none of {size}")

    monkeypatch.setattr(GroupTrial, "make_ready", refuse)
    tasks = [task(seed, epochs=4) for seed in range(2)] + [task(2)]
    with running(fusion="on", fusion_size=4, max_concurrent=1) as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(one, None, events) for one in tasks[:2]]
        for _ in jobs:
            assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        before = granted_bytes(pool._pool._core.records.values())
        jobs.append(pool.submit(tasks[2], None, events))
        until(lambda: f"takes no more members: {why}: none of" in caplog.text)
        assert granted[0] > before
        assert granted_bytes(pool._pool._core.records.values()) <= before
        for job in jobs[:2]:
            job.proceed()
        while any(job.state not in OVER for job in jobs):
            event = events.get(0.1)
            if isinstance(event, Reported):
                event.job.proceed()
    assert sizes == [2, 1]


@pytest.mark.cases(1 / 3)
def test_one_that_comes_late_and_cannot_begin_fails_alone(sizes):
    class Broken(TensorDataset):
        def __getitem__(self, index):
            raise RuntimeError("unreadable")

    def broken():
        raise RuntimeError("no model")

    with running(fusion="on", fusion_size=4) as pool:
        events = pool.events()
        with together():
            first = [pool.submit(task(seed, epochs=4), None, events) for seed in range(3)]
        reports = [events.get(PATIENCE_SECONDS) for _ in first]
        first[0].cancel()
        late = [pool.submit(task(5, model=broken)), pool.submit(task(6, train=Broken(X, Y))), pool.submit(task(7))]
        assert [job.result(PATIENCE_SECONDS).status for job in late[:2]] == ["failed", "failed"]
        for report in reports:
            report.job.proceed()
        while any(job.state not in OVER for job in first):
            event = events.get(0.1)
            if isinstance(event, Reported):
                event.job.proceed()
        assert_as_plain(late[2].result(PATIENCE_SECONDS), task(7))
    assert [job.state for job in first] == ["cancelled", "completed", "completed"]
    for seed in (1, 2):
        assert_as_plain(first[seed].result(), task(seed, epochs=4))
    assert sizes == [3]


@pytest.mark.parametrize("others_end", [False, True])
def test_a_member_that_is_paused_leaves_its_place_and_goes_on_later(sizes, others_end):
    """Whether the group is still there then or not, the numbers are those of a trial that has never paused."""
    tasks = [task(seed, epochs=5, optimizer=partial(AdamW, lr=1e-2)) for seed in range(3)]
    with running(fusion="on", fusion_size=4) as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(one, None, events) for one in tasks]
        over, is_held = set(), False
        while len(over) < len(jobs):
            event = events.get(PATIENCE_SECONDS)
            assert event is not None
            if isinstance(event, Finished | Failed):
                over.add(event.job)
            elif (event.job, event.step, is_held) == (jobs[1], 1, False):
                is_held = True
                event.job.pause()
                event.job.proceed()
            else:
                assert not (event.job is jobs[1] and event.job.paused)
                event.job.proceed()
            if jobs[1].paused and (len(over) == 2 if others_end else jobs[0].progress.epoch > 2):
                jobs[1].unpause()
        for job, described in zip(jobs, tasks, strict=True):
            assert_as_plain(job.result(PATIENCE_SECONDS), described)


def test_ctrl_c_inside_the_decision_of_a_pause_breaks_nothing(monkeypatch):
    handle = Scheduler.handle

    def pressing(self, *events):
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        return handle(self, *events)

    with running(fusion="on") as pool:
        events = pool.events()
        job = pool.submit(task(), None, events)
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        for call in (job.pause, job.unpause):
            with monkeypatch.context() as patched:
                patched.setattr(Scheduler, "handle", pressing)
                with pytest.raises(KeyboardInterrupt):
                    call()
        job.proceed()
        while not isinstance(event := events.get(PATIENCE_SECONDS), Finished):
            assert isinstance(event, Reported)
            event.job.proceed()
        assert_as_plain(job.result(PATIENCE_SECONDS), task())


def test_an_unpause_while_a_new_carrier_is_submitted_is_the_last_word(monkeypatch):
    """The pause is read and passed on under one hold of the lock, so that the driver's later request comes later."""
    with running(fusion="on", fusion_size=4) as pool:
        job = pool.submit(task(epochs=100_000), "trial")
        until(lambda: job.state == "running")
        launcher, table = pool._fusion._carriers, pool._fusion._table
        entry, driver = table.entries[job.key], threading.Thread(target=job.unpause)
        carrier = entry.carrier
        job.pause()

        class Job(type(job)):
            @property
            def paused(self):
                was = super().paused
                if was and driver.ident is None:
                    driver.start()
                    driver.join(0.5)  # ends here only where the pause was read without the lock
                return was

        monkeypatch.setattr(job, "__class__", Job)
        monkeypatch.setattr(launcher, "carry", lambda entry: setattr(entry, "carrier", carrier))
        launcher.carry_anew(entry)
        driver.join(PATIENCE_SECONDS)
        assert not job.paused
        assert not carrier.paused
        job.cancel()
        assert job.result(PATIENCE_SECONDS).status == "cancelled"


def test_a_job_paused_while_its_carrier_forms_a_group_does_not_stop_the_others(monkeypatch):
    formed = GroupJobLauncher._formed
    paused = []

    def pausing(self, entry, *arguments):
        if not paused:
            paused.append(entry.job)
            entry.job.pause()
        return formed(self, entry, *arguments)

    monkeypatch.setattr(GroupJobLauncher, "_formed", pausing)
    with running(fusion="on", fusion_size=4) as pool:
        with together():
            jobs = [pool.submit(task(seed), None) for seed in range(3)]
        for job in jobs:
            until(lambda job=job: job in paused or job.state in OVER)
        [last] = paused
        assert last.state not in OVER
        last.unpause()
        for seed, job in enumerate(jobs):
            assert_as_plain(job.result(PATIENCE_SECONDS), task(seed))


def test_a_member_that_is_paused_may_be_cancelled(sizes):
    with running(fusion="on", fusion_size=4) as pool:
        events = pool.events()
        with together():
            jobs = [pool.submit(task(seed), None, events) for seed in range(3)]
        for _ in jobs:
            assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        jobs[1].pause()
        jobs[1].proceed()
        jobs[0].proceed()
        jobs[2].proceed()
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        jobs[1].cancel()
        result = jobs[1].result(PATIENCE_SECONDS)
        assert (result.status, len(result.history)) == ("cancelled", 1)
        assert result.units_saved > 0
        jobs[2].cancel()
        jobs[0].cancel()


def test_a_carrier_whose_job_has_another_one_carries_nobody():
    """One that is prepared late, after its job was sent back from a group that had ended: the job is the new carrier's."""
    device = CpuDevice(0, 1 << 26)
    with running(fusion="on") as pool:
        job = pool.submit(task(epochs=100_000), "trial")
        fusion = pool._fusion
        entry = fusion._table.entries[job.key]
        made = fusion._carriers.make(
            entry, object(), job.task, fusion._carriers._library, device, None, None, None, None
        )
        made.advance()
        assert made.outcome == "cancelled"
        job.cancel()
        assert job.result(PATIENCE_SECONDS).status == "cancelled"
    device.close()


def test_a_job_whose_carrier_ends_while_another_carrier_has_it_gets_a_new_one_when_put_back():
    """A third carrier had the turn, so the job's own did not wait for the one that had taken the job."""
    with running(fusion="on") as pool:
        with together():
            job = pool.submit(task(), "trial")
            carriers, entry = pool._fusion._carriers, pool._fusion._table.entries[job.key]
            carrier, entry.is_taken = entry.carrier, True
            assert not carriers._takes_turn(entry, entry.ticket, 0.0)
            carriers._finder._leave([entry])
            assert entry.carrier not in (None, carrier)
        assert_as_plain(job.result(PATIENCE_SECONDS), task())


def test_members_may_have_schedulers_of_different_kinds(sizes):
    schedulers = [partial(OneCycleLR, max_lr=0.2, total_steps=30), partial(StepLR, step_size=4)]
    for order in (schedulers, schedulers[::-1]):
        tasks = [
            task(seed, optimizer=partial(SGD, lr=0.1, momentum=0.9), scheduler=scheduler, scheduler_interval="step")
            for seed, scheduler in enumerate(order)
        ]
        with running(fusion="on", fusion_size=2) as pool:
            with together():
                jobs = [pool.submit(one, None) for one in tasks]
            for job, described in zip(jobs, tasks, strict=True):
                assert_as_plain(job.result(PATIENCE_SECONDS), described)
    assert sizes == [2, 2]


class ScalesSmallBatches(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale, self.layers = scale, net()

    def forward(self, x):
        return self.layers(x * self.scale if len(x) < 8 else x)


@pytest.mark.cases(1 / 3)
def test_trials_that_differ_in_a_later_kind_of_batch_go_on_by_themselves(sizes, caplog):
    """The first batches are alike, and fused; the last one of a pass is smaller, and a number differs there alone."""
    data = TensorDataset(X[:20], Y[:20])
    tasks = [task(seed, model=partial(ScalesSmallBatches, 0.5 + seed), train=data) for seed in range(2)]
    with running(fusion="on", fusion_size=2) as pool:
        with together():
            jobs = [pool.submit(one) for one in tasks]
        for job, described in zip(jobs, tasks, strict=True):
            assert_as_plain(job.result(PATIENCE_SECONDS), described)
    assert sizes[0] == 2
    assert "they cannot compute together" in caplog.text
    assert "the 2 trials go on by themselves" in caplog.text
