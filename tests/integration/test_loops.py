"""Loops of the user's own as trials: the bits of the same function called outside of a pool, and every way to end."""

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune import Failed, Finished, HydraExecutor, LoopTask, Reported, TrialsFailed, train_plain
from hydra_tune.checkpoint.folder import generations
from hydra_tune.checkpoint.tensors import load_tensors
from hydra_tune.errors import (
    BudgetError,
    ConfigError,
    HydraTuneError,
    LoaderWorkerError,
    LoopEnded,
    MetricError,
    OutOfMemoryError,
    TaskError,
)
from tests.parity.exact import differences

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]
INPUTS = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
CLASSES = INPUTS[:, :3].argmax(dim=1)
PATIENCE_SECONDS = 60


def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))


def train(loop, width=16, lr=0.01, steps=12, ends=None):
    """Draw from all streams; report every third step. `ends` is called after each step, with their number."""
    model = net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
    loop.register(model, optimizer, schedule, steps=steps)
    for number in range(loop.start_step, steps):
        rows = torch.randperm(len(INPUTS))[:24]
        inputs = INPUTS[rows].to(loop.device) * (1 + random.random()) + float(np.random.rand())  # noqa: NPY002 - the stream of the process
        loss = cross_entropy(model(inputs), CLASSES[rows].to(loop.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if number % 3 == 2:
            loop.report({"value": loss.item(), "lr": schedule.get_last_lr()[0]}, step=number)
        if ends is not None:
            ends(number)
        loop.step()


def without_seconds(history):
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in history]


def check_same(result, plain):
    assert result.status == plain.status == "completed", result.error
    assert without_seconds(result.history) == without_seconds(plain.history)
    assert list(differences(plain.state_dict(), result.state_dict())) == []


def loop_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hydra-loop")]


@pytest.mark.parametrize(
    "options",
    [
        {"devices": "cpu:2"},
        # Room for one trial at a time, and a link, over which the other trial's state is copied.
        {"devices": "cpu:1", "device_memory": "520KiB", "link_bandwidth": "1GB/s", "max_concurrent": 2},
    ],
    ids=["side by side", "spilled in between"],
)
def test_numbers_are_those_of_a_plain_call(options, monkeypatch):
    """Two trials at once, which share the devices step by step."""
    monkeypatch.setattr("hydra_tune.train.loop.burst.BURST_SECONDS", 0.0)
    tasks = [LoopTask(partial(train, width=width, lr=lr), seed=3) for width, lr in ((600, 0.01), (700, 0.003))]
    with HydraExecutor(**options) as pool:
        results = pool.run(tasks)
        device = pool.stats().devices["cpu:0"]
    for result, task in zip(results, tasks, strict=True):
        check_same(result, train_plain(task))
        assert (result.num_shards, result.units_run) == (1, 12)
    assert device.peak_bytes <= device.budget_bytes
    if "link_bandwidth" in options:
        assert sum(device.bytes_out_by_kind.values()) > 0
    assert loop_threads() == []


def test_several_modules_and_optimizers_and_a_loop_that_steps_where_it_likes():
    """One step of each of two models in turn, and validation without gradients in a unit of its own."""

    def duel(loop):
        first, second = net(16), nn.Linear(3, 1)
        optimizers = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(second.parameters())
        loop.register(first, second, *optimizers)
        for number in range(8):
            rows = torch.randperm(len(INPUTS))[:24]
            score = second(first(INPUTS[rows])).mean()
            (score if number % 2 else -score).backward()
            optimizers[number % 2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loop.step()
        first.eval()
        with torch.no_grad():
            loop.report(second(first(INPUTS)).mean())

    task = LoopTask(duel)
    with HydraExecutor(devices="cpu:1", max_concurrent=2) as pool:
        results, plain = pool.run([task, LoopTask(duel, seed=1)]), train_plain(task)
    check_same(results[0], plain)
    assert isinstance(results[0].module(), nn.ModuleList)
    assert results[0].metrics != results[1].metrics


def test_a_driver_prunes_and_the_loop_ends_at_its_mark():
    """The pruned loop sees the exception, and nothing after its mark runs; the other goes on."""
    ended, seen = threading.Event(), []

    def fn(loop):
        try:
            train(loop, ends=seen.append)
        except LoopEnded:
            ended.set()
            raise

    with HydraExecutor(devices="cpu:1", max_concurrent=2) as pool:
        events = pool.events()
        pruned, other = pool.loop(fn, events=events), pool.loop(train, events=events)
        steps = []
        while not isinstance(event := events.get(PATIENCE_SECONDS), Finished | Failed) or event.job is pruned:
            assert event is not None
            if isinstance(event, Reported):
                steps += [event.step] if event.job is pruned else []
                event.job.prune() if event.job is pruned and event.step == 5 else event.job.proceed()
        assert (pruned.result().status, other.result().status) == ("pruned", "completed")
        assert (steps, seen) == ([2, 5], [0, 1, 2, 3, 4, 5])
        assert pruned.result().metrics.keys() == {"value", "lr"}
        assert ended.wait(PATIENCE_SECONDS)
        plain = train_plain(LoopTask(fn), report=lambda step, metrics: step < 5)
        assert (plain.status, len(plain.history)) == ("pruned", 2)
    assert loop_threads() == []


def test_an_error_fails_its_trial_alone_with_the_line_that_raised_it():
    def ends(number):
        if number == 4:
            raise ZeroDivisionError("fifth")

    with HydraExecutor(devices="cpu:1", max_concurrent=2) as pool:
        failed, good = pool.run([LoopTask(partial(train, ends=ends)), LoopTask(train)], on_error="return")
    assert (failed.status, good.status) == ("failed", "completed")
    assert isinstance(failed.error, ZeroDivisionError)
    assert "in ends" in "".join(traceback.format_tb(failed.error.__traceback__))
    assert loop_threads() == []


def test_a_pool_that_closes_leaves_no_thread_of_a_waiting_loop_behind():
    """Two loops at least wait at their reports."""
    cleaned = []

    def fn(loop):
        try:
            train(loop)
        finally:
            cleaned.append(threading.current_thread().name)

    with HydraExecutor(devices="cpu:1", max_concurrent=2) as pool:
        events = pool.events()
        jobs = [pool.loop(fn, name=name, events=events) for name in ("a", "b", "c")]
        assert events.get(PATIENCE_SECONDS) is not None
        assert events.get(PATIENCE_SECONDS) is not None
        begun = loop_threads()
        assert len(begun) >= 2
    assert {job.result().status for job in jobs} == {"cancelled"}
    assert loop_threads() == []
    assert set(begun) <= set(cleaned)


def test_a_loop_may_swallow_its_end_but_not_go_on():
    marks = []

    def stubborn(loop):
        loop.register(nn.Linear(2, 2))
        loop.report(1.0)
        for _ in range(3):
            try:
                loop.step()
            except LoopEnded:
                marks.append("ended")

    with HydraExecutor(devices="cpu:1") as pool:
        events = pool.events()
        job = pool.loop(stubborn, events=events)
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        job.prune()
        assert job.result(PATIENCE_SECONDS).status == "pruned"
    assert marks == ["ended"] * 3
    assert loop_threads() == []


def test_state_and_steps_too_large_are_refused_by_name_with_needed_and_given():
    def large_state(loop):
        loop.register(model := net(60_000), torch.optim.AdamW(model.parameters()))

    def large_step(loop):
        loop.register(nn.Linear(8, 1))
        torch.zeros(600_000)

    def large_kept(loop):
        loop.register(nn.Linear(8, 1))
        kept = []
        for _ in range(2):
            kept.append(torch.zeros(150_000))
            loop.step()

    tasks = [LoopTask(large_state), LoopTask(large_step), LoopTask(large_kept), LoopTask(train)]
    with HydraExecutor(devices="cpu:1", device_memory="1MiB") as pool:
        state, step, kept, fits = pool.run(tasks, on_error="return")
    assert isinstance(state.error, BudgetError)
    assert "needs 16.9 MiB on a device" in str(state.error)
    assert "has a budget of 1.0 MiB" in str(state.error)
    for result, needed in ((step, "2.3 MiB"), (kept, "1.1 MiB")):
        assert isinstance(result.error, BudgetError), result.error
        assert f"needs {needed} at once, but device cpu:0 has a budget of 1.0 MiB" in str(result.error)
    assert fits.status == "completed"


def test_memory_that_runs_out_between_two_marks_fails_the_loop_by_name():
    def shortage(loop):
        loop.register(nn.Linear(8, 1))
        loop.step()
        raise torch.OutOfMemoryError("no more")

    with HydraExecutor(devices="cpu:1") as pool:
        failed, good = pool.run([LoopTask(shortage), LoopTask(train)], on_error="return")
    assert isinstance(failed.error, OutOfMemoryError)
    assert "in a step of the own code of trial 'job 0'" in str(failed.error)
    assert good.status == "completed"


def no_register(loop):
    loop.step()


def early_report(loop):
    loop.report(1.0)


def returns_early(loop):
    del loop


def returns_value(loop):
    loop.register(nn.Linear(2, 2))
    return 0.5


def no_model(loop):
    loop.register(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def other_parameters(loop):
    loop.register(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))


def no_state(loop):
    loop.register(nn.Linear(2, 2), 3)


def registers_twice(loop):
    loop.register(nn.Linear(2, 2))
    loop.register(nn.Linear(2, 2))


def device_early(loop):
    nn.Linear(2, 2).to(loop.device)


def other_metric(loop):
    loop.register(nn.Linear(2, 2))
    loop.report({"vale": 1.0})


def same_step(loop):
    loop.register(nn.Linear(2, 2))
    loop.report(1.0)
    loop.report(1.0)


def own_name(loop):
    loop.register(nn.Linear(2, 2))
    loop.report({"value": 1.0, "step": 800})


def other_thread(loop):
    errors = []

    def call():
        try:
            loop.step()
        except TaskError as error:
            errors.append(error)

    loop.register(nn.Linear(2, 2))
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise errors[0]


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        (no_register, TaskError, "loop.step() needs loop.register(model, optimizer) first"),
        (early_report, TaskError, "loop.report() needs loop.register(model, optimizer) first"),
        (device_early, TaskError, "loop.device needs loop.register(model, optimizer) first"),
        (returns_early, TaskError, "the loop has ended without loop.register()"),
        (returns_value, TaskError, "the loop returned float, which nobody reads"),
        (no_model, TaskError, "needs the model that is trained, and got SGD"),
        (
            other_parameters,
            TaskError,
            "SGD holds a tensor of shape (2, 3) that is not a parameter of a registered module",
        ),
        (no_state, TaskError, "objects with state_dict() and load_state_dict(), not int"),
        (registers_twice, TaskError, "called once"),
        (other_metric, MetricError, "did you mean 'vale'?"),
        (same_step, MetricError, "above that of the report before, 1, not 1"),
        (own_name, MetricError, "no metric named 'step'"),
        (other_thread, TaskError, "another thread has called it"),
    ],
)
def test_mistakes_fail_by_name_in_a_pool_as_in_a_plain_call(fn, kind, words):
    with HydraExecutor(devices="cpu:1") as pool, pytest.raises(TrialsFailed) as failed:
        pool.run(LoopTask(fn))
    assert isinstance(failed.value.results[0].error, kind)
    assert words in str(failed.value.results[0].error)
    with pytest.raises(kind) as plain:
        train_plain(LoopTask(fn))
    assert words in str(plain.value)
    assert loop_threads() == []


def test_a_task_and_a_pool_refuse_by_name_what_no_loop_can_have():
    for arguments, words in (
        ({"fn": 3}, "takes a function of the loop, not int"),
        ({"fn": train, "epochs": 3}, "takes no epochs="),
        ({"fn": train, "model": net}, "takes no model="),
        ({"fn": train, "steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"fn": train, "metric": ()}, "metric must be a name or a tuple of names"),
        ({"fn": train, "seed": -1}, "seed must be"),
    ):
        with pytest.raises(TaskError, match=words.replace("(", r"\(")):
            LoopTask(**arguments)
    for name, value in (("fusion", "on"), ("num_shards", 2), ("optimizer_placement", "host")):
        with HydraExecutor(devices="cpu:1", **{name: value}) as pool, pytest.raises(ConfigError, match=name):
            pool.loop(train)
    with HydraExecutor(devices="cpu:1") as pool:
        for method in (pool.plan, pool.profile):
            with pytest.raises(ConfigError, match="cannot tell of a LoopTask"):
                method([LoopTask(train)])


def test_an_optuna_study_searches_over_loops(tmp_path):
    """Values, prunes and steps are those of the reports; a second study over the same draws finds the same."""
    optuna = pytest.importorskip("hydra_tune_optuna")

    def build(trial):
        width = trial.suggest_int("width", 8, 32)
        return LoopTask(partial(train, width=width, lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True)))

    with HydraExecutor(devices="cpu:2", max_concurrent=2) as pool:
        study = optuna.create_study(
            sampler=optuna.samplers.RandomSampler(seed=1),
            pruner=optuna.pruners.ThresholdPruner(upper=0.5, n_warmup_steps=5),
            executor=pool,
        )
        study.optimize(build, n_trials=4)
    for trial in study.trials:
        plain = train_plain(
            build(optuna.trial.FixedTrial(trial.params)), lambda step, metrics: step < 5 or metrics["value"] <= 0.5
        )
        assert trial.state.name == {"completed": "COMPLETE", "pruned": "PRUNED"}[plain.status]
        assert trial.value == plain.metrics["value"]
        assert trial.intermediate_values == {entry["step"]: entry["value"] for entry in plain.history}
    assert {trial.state.name for trial in study.trials} >= {"PRUNED"}


PROGRAM = """
import sys
from functools import partial
from hydra_tune import HydraExecutor, LoopTask
from tests.integration.test_loops import train

def fn(loop, seed):
    train(loop, steps=400, ends=lambda number: say(f"{seed} {number}"))

def say(line):
    # In one call, or lines of several threads mix.
    sys.stdout.write(line + chr(10))
    sys.stdout.flush()

with HydraExecutor(devices="cpu:1", max_concurrent=2, checkpoint_dir=sys.argv[1], checkpoint_every=4) as pool:
    jobs = []
    for seed in (1, 2):
        found = pool.find_checkpoint(f"loop {seed}")
        options = {} if found is None else {"resume_from": found.path}
        jobs.append(pool.submit(LoopTask(partial(fn, seed=seed), seed=seed), f"loop {seed}", **options))
    for job in jobs:
        job.result().save(f"{sys.argv[2]}-{job.name}")
        say(f"history {job.result().history}")
"""


def run_program(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_loops_of_a_killed_process_go_on_to_the_same_numbers(tmp_path):
    process = run_program(tmp_path / "saved", tmp_path / "weights")
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("9\n") and any(generations(folder) for folder in (tmp_path / "saved").iterdir()):
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    process = run_program(tmp_path / "saved", tmp_path / "weights")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    began = [
        int(next(line for line in output.splitlines() if line.startswith(f"{seed} ")).split()[1]) for seed in (1, 2)
    ]
    assert 0 < max(began) < 399, began
    histories = [eval(line.removeprefix("history ")) for line in output.splitlines() if line.startswith("history")]
    for seed, history in zip((1, 2), histories, strict=True):
        plain = train_plain(LoopTask(partial(train, steps=400), seed=seed))
        assert list(differences(plain.state_dict(), load_tensors(tmp_path / f"weights-loop {seed}")[0])) == []
        assert without_seconds(history) == without_seconds(plain.history)


def test_a_loop_resumes_only_where_it_says(tmp_path):
    """Reports between are neither lost nor delivered twice."""

    def passes(loop):
        """Four passes over shuffled rows, of which only the beginnings can be resumed."""
        model = net(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop.register(model, optimizer, steps=16)
        begun.append(loop.start_step)
        for epoch in range(loop.start_step // 4, 4):
            for place, rows in enumerate(torch.randperm(96).split(24)):
                loss = cross_entropy(model(INPUTS[rows]), CLASSES[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if place == 3:
                    loop.report(loss.item(), epoch)
                if fails and (epoch, place) == (2, 1):
                    raise KeyError("a fault")
                loop.step(may_resume=place == 3)

    begun, fails = [], [True]
    task = LoopTask(passes)
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path, checkpoint_every=1) as pool:
        (failed,) = pool.run([task], on_error="return")
        assert isinstance(failed.error, KeyError)
        fails.clear()
        events = pool.events()
        job = pool.submit(task, resume_from=failed.checkpoint, events=events)
        steps = []
        while isinstance(event := events.get(PATIENCE_SECONDS), Reported):
            steps.append(event.step)
            job.proceed()
        resumed = job.result()
    # A checkpoint that is being written when the next is due is the last before the fault.
    assert (begun, steps) in (([0, 8], [2, 3]), ([0, 4], [1, 2, 3]))
    check_same(resumed, train_plain(task))


def test_a_suspended_loop_is_saved_at_its_mark_and_cloned(tmp_path):
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        events = pool.events()
        job = pool.loop(train, "loop", events=events)
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        clone = pool.clone(job)
        check_same(clone.result(PATIENCE_SECONDS), train_plain(LoopTask(train)))
        pool.suspend()
        assert job.result().status == "cancelled"
        resumed = pool.loop(train, "loop", resume_from=pool.find_checkpoint("loop").path)
        check_same(resumed.result(PATIENCE_SECONDS), train_plain(LoopTask(train)))


def test_a_loop_begins_again_after_a_fault_of_the_system(tmp_path):
    """From a mark behind a report, or without a folder from its beginning, in a new thread and with the same numbers."""
    # No plain list: a trial that begins again puts back what its functions keep in Python.
    faults, began = threading.Event(), queue.SimpleQueue()

    def fn(loop):
        def fault(number):
            if number == 7 and not faults.is_set():
                faults.set()
                raise LoaderWorkerError("a worker was killed")

        try:
            train(loop, ends=fault)
        finally:
            began.put(loop.start_step)

    for options in ({}, {"checkpoint_dir": tmp_path}):
        faults.clear()
        with HydraExecutor(devices="cpu:1", max_retries=1, **options) as pool:
            result = pool.run(LoopTask(fn))
        assert result.retries == 1
        # With a folder from a report: the mark of the last one, unless the one before is still being written then.
        assert (began.get(), began.get()) in ([(0, 3), (0, 6), (0, 7)] if options else [(0, 0)])
        check_same(result, train_plain(LoopTask(train)))
    assert loop_threads() == []


def test_autocast_keeps_its_last_digits_where_the_task_names_the_precision():
    def fn(loop):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        loop.register(layer, optimizer := torch.optim.SGD(layer.parameters(), lr=0.1))
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = layer.train()(INPUTS[:24].view(4, 6, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                loop.report(layer.eval()(INPUTS[:24].view(4, 6, 8)).float().std())
            loop.step()

    task = LoopTask(fn, precision="bfloat16")
    with HydraExecutor(devices="cpu:1") as pool:
        result = pool.run(task)
    check_same(result, train_plain(task))


def test_a_mode_of_the_loop_that_spans_steps_is_refused_by_name():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def within(loop):
        loop.register(model := net(4))
        for _ in range(3):
            with Mode():
                model(INPUTS)
            loop.step()

    def enters_later(loop):
        loop.register(model := net(4))
        with Mode():
            for _ in range(3):
                model(INPUTS)
                loop.step()

    with HydraExecutor(devices="cpu:1") as pool:
        good, refused = pool.run([LoopTask(within), LoopTask(enters_later)], on_error="return")
    assert good.status == "completed", good.error
    assert isinstance(refused.error, TaskError)
    assert "within a TorchDispatchMode" in str(refused.error)


def test_a_loop_does_not_wait_for_its_own_pool():
    def fn(loop):
        loop.register(nn.Linear(2, 2))
        pool.run(LoopTask(train))

    with HydraExecutor(devices="cpu:1") as pool, pytest.raises(TrialsFailed) as failed:
        pool.run(LoopTask(fn))
    assert isinstance(failed.value.results[0].error, HydraTuneError)
    assert "the pool would wait for itself" in str(failed.value.results[0].error)


def test_the_steps_to_come_are_known_and_a_loop_without_marks_is_named(caplog):
    def unmarked(loop):
        loop.register(nn.Linear(2, 2))

    with HydraExecutor(devices="cpu:1") as pool:
        events = pool.events()
        job = pool.loop(train, events=events)
        assert isinstance(events.get(PATIENCE_SECONDS), Reported)
        assert (job.progress.step, job.progress.num_steps) == (3, 12)
        assert job.progress.remaining_seconds > 0
        job.cancel()
        assert job.result(PATIENCE_SECONDS).status == "cancelled"
        pool.run(LoopTask(unmarked))
    assert "has never called loop.step()" in caplog.text


def test_loops_get_no_hint_that_they_might_be_fused(caplog, monkeypatch):
    monkeypatch.setattr("hydra_tune.pool.fusion.fusion_hint._LEAST_SECONDS", 0.0)
    with HydraExecutor(devices="cpu:1") as pool:
        pool.run([LoopTask(partial(train, steps=60), seed=seed) for seed in range(5)])
    assert "fusion=" not in caplog.text


def test_a_paused_loop_waits_at_its_mark():
    """And goes on to the same numbers; meanwhile another loop runs."""
    begun, seen = threading.Event(), []

    def ends(number):
        seen.append(number)
        begun.set()

    with HydraExecutor(devices="cpu:1", max_concurrent=2) as pool:
        job = pool.loop(partial(train, steps=3000, ends=ends))
        assert begun.wait(PATIENCE_SECONDS)
        job.pause()
        assert pool.run(LoopTask(train)).status == "completed"
        number = len(seen)
        assert pool.run(LoopTask(train)).status == "completed"
        assert len(seen) == number < 3000
        job.cancel()


def test_an_isolated_pool_runs_loops():
    with HydraExecutor(devices="cpu:1", isolate=True) as pool:
        check_same(pool.loop(train).result(), train_plain(LoopTask(train)))
