"""`HydraExecutor(isolate=True)`: a trial that ends its process, and what is there and what is not across two processes."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hydra_tune import Failed, Finished, HydraExecutor, LoopTask, Reported, TrainTask, TrialsFailed, train_plain
from hydra_tune.checkpoint.tensors import load_tensors
from hydra_tune.errors import ConfigError, DeviceLostError, HydraTuneError, TrialCrashedError
from tests.integration.test_elastic import TIGHT, long
from tests.parity.exact import differences, without_seconds
from tests.support.crashing import BAD, EPOCHS, NUM_TRIALS, Net, X, Y, task_of
from tests.support.forked import ROOT, Forked, forked, run_code
from tests.support.losable import MESSAGE, fail_with_all, losable, lose_all
from tests.unit.pool.tasks import against_plain, one_batch

SECONDS = 120
OPTIONS = {"devices": "cpu:1", "device_memory": "4MiB", "max_concurrent": 3, "isolate": True}


@pytest.fixture(scope="module")
def plain():
    """What each trial comes to in a plain loop."""
    return [train_plain(task_of(number)) for number in range(NUM_TRIALS)]


def assert_as_plain(plain, result):
    assert result.status == "completed", result.error
    assert list(differences(plain.state_dict(), result.state_dict())) == []
    assert list(differences(plain.optimizer_state_dict(), result.optimizer_state_dict())) == []
    assert list(differences(without_seconds(plain.history), without_seconds(result.history))) == []
    assert type(result.module()) is Net
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in result.module().parameters())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("way", "how", "saves", "devices"),
    [
        ("fault", "SIGSEGV; it was in string_at (", True, 2),
        ("fault", "SIGSEGV; it was in string_at (", False, 1),
        ("exit", "exit code 0, out of order (os._exit, or a library's exit)", True, 1),
        ("lose", f"the loss of its last device, cpu:0 (RuntimeError: {MESSAGE})", True, 1),
        ("lose otherwise", f"the loss of its last device, cpu:0 (RuntimeError: {MESSAGE})", False, 1),
        ("lose", f"the loss of all its devices, cpu:0, cpu:1 (RuntimeError: {MESSAGE})", True, 2),
    ],
)
def test_a_trial_that_ends_its_process_fails_alone(tmp_path, monkeypatch, plain, way, how, saves, devices):
    folder = {"checkpoint_dir": tmp_path / "saved"} if saves else {}
    losable(monkeypatch)
    # A lost device is nothing to try again within the process.
    with HydraExecutor(**OPTIONS | {"devices": f"cpu:{devices}", "max_retries": 0}, **folder) as pool:
        with pytest.raises(TrialsFailed) as caught:
            pool.run([task_of(number, way) for number in range(NUM_TRIALS)])
        results = caught.value.results
    for number in set(range(NUM_TRIALS)) - {BAD}:
        assert_as_plain(plain[number], results[number])
    error = results[BAD].error
    assert isinstance(error, TrialCrashedError)
    assert (error.name, error.crashes) == (f"job {BAD}", 2)
    assert error.how.startswith(how)
    assert str(error).startswith(f"job {BAD} has ended the pool's process 2 times while it ran, the last time by {how}")


@pytest.mark.cases(1 / 3)
def test_devices_that_are_lost_later_are_lost_by_the_same_trial(tmp_path, monkeypatch, plain, caplog):
    """The trial at fault is over when the last device is lost, under another trial."""
    losable(monkeypatch)
    with HydraExecutor(**OPTIONS | {"devices": "cpu:2"}, checkpoint_dir=tmp_path) as pool:
        jobs = [
            pool.submit(task_of(number, "lose own"), max_retries=int(number != BAD)) for number in range(NUM_TRIALS)
        ]
        results = [job.result() for job in jobs]
    for number in set(range(NUM_TRIALS)) - {BAD}:
        assert_as_plain(plain[number], results[number])
    assert isinstance(results[BAD].error, DeviceLostError)
    how = "was ended by the loss of all its devices, cpu:0, cpu:1 ("
    assert re.findall(f"{re.escape(how)}.* while (.*) was at work", caplog.text) == [f"job {BAD}"]


GIVES_UP = """
import os
import threading

from hydra_tune.supervision.marks import at_work, here
from hydra_tune.supervision.supervisor import supervise


def run(beginning):
    if beginning.aside:
        print(beginning.aside["trial 1"].how)
        return 0
    with at_work("trial 1"):
        here().give_up("the loss of its last device", None)
        thread = threading.Thread(target=os.abort)
        thread.start()
        thread.join()


print(supervise(run, print))
"""


def test_an_abort_while_a_process_ends_for_want_of_a_device_is_nobody_elses():
    done = forked(run_code, GIVES_UP)
    text = "the pool's process was ended by the loss of its last device while trial 1 was at work"
    assert done.stdout.splitlines() == [text, f"{text}, as before; it is set aside", "the loss of its last device", "0"]


def losing_batches():
    """The device is lost between two units, and the next call to it sees that, whoever calls."""
    for number in range(12):
        if number == 8:
            lose_all()
        yield from one_batch()


@pytest.mark.cases(1 / 3)
def test_a_loss_between_two_units_is_seen_under_the_trial_that_ran_there(monkeypatch, caplog):
    losable(monkeypatch)
    tasks = [long(0), long(1, train=losing_batches), long(2)]
    # The device's next unit is always another trial's.
    with HydraExecutor(**OPTIONS | TIGHT | {"max_retries": 0, "policy": "round_robin"}) as pool:
        results = pool.run(tasks, on_error="return")
    assert [against_plain(tasks[number], results[number]) for number in (0, 2)] == [[], []]
    assert isinstance(results[1].error, TrialCrashedError)
    # Another trial may be in preparation, and is then named beside it; none is ever named alone.
    assert not re.search("while job [02] was at work", caplog.text), caplog.text


@pytest.mark.cases(1 / 3)
def test_a_loss_while_a_trial_is_prepared_is_that_trials(monkeypatch, caplog):
    losable(monkeypatch)
    tasks = [long(0), long(1, model=fail_with_all), long(2)]
    with HydraExecutor(**OPTIONS | {"max_retries": 0}) as pool:
        results = pool.run(tasks, on_error="return")
    assert [against_plain(tasks[number], results[number]) for number in (0, 2)] == [[], []]
    assert isinstance(results[1].error, TrialCrashedError)
    assert not re.search("while job [02] was at work", caplog.text), caplog.text


@pytest.mark.cases(1 / 3)
def test_a_process_that_is_killed_from_outside_is_begun_again(tmp_path, plain, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children(recursive=True))
    with HydraExecutor(**OPTIONS, checkpoint_dir=tmp_path / "saved") as pool:
        jobs = [pool.submit(task_of(number, "wait")) for number in range(NUM_TRIALS)]
        while not Path("there").exists():
            assert jobs[BAD].state != "failed"
        supervisor, child = set(psutil.Process().children(recursive=True)) - before
        if supervisor.ppid() != os.getpid():
            supervisor, child = child, supervisor
        child.kill()
        child.wait()
        Path("go").touch()
        for number, job in enumerate(jobs):
            assert_as_plain(plain[number], job.result())
    assert not supervisor.is_running()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_the_end_of_the_supervisor_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children())
    with HydraExecutor(**OPTIONS) as pool:
        job = pool.submit(task_of(BAD, "wait"))
        (supervisor,) = set(psutil.Process().children()) - before
        supervisor.kill()
        assert str(job.result().error).startswith("the process that supervises the pool's process was ended by SIGKILL")


MATCH = r"made after the first run\(\) or submit\(\) .*<lambda> was made after the pool.* make it before"


def test_lambdas_closures_and_local_classes_reach_the_process(plain):
    class Local(Net):
        def __init__(self, _share):
            super().__init__()
            self.touch = lambda: 1

    rate = 1e-3
    task = replace(task_of(0), model=lambda: Local(0.1), optimizer=lambda given: torch.optim.AdamW(given, lr=rate))
    with HydraExecutor(**OPTIONS) as pool:
        result = pool.run(task)
        assert list(differences(plain[0].state_dict(), result.state_dict())) == []
        assert type(result.module()) is Local
        assert result.module().touch() == 1
        # Made when the process was there already: by functions of a module it is sent, and by a closure it cannot be.
        assert_as_plain(plain[1], pool.run(task_of(1)))
        with pytest.raises(
            ConfigError,
            match=r"made after the first run\(\) or submit\(\) .*<lambda> was made after the pool.* make it before",
        ):
            pool.run(replace(task_of(2), model=lambda: torch.nn.Sequential(Net())))


class Closed(nn.Module):
    """Cannot be pickled; training makes a buffer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.register_buffer("seen", None)
        self.touch = lambda x: x

    def forward(self, x):
        self.seen = x.mean(0)
        return self.touch(self.net(x))


class Tagged(nn.Linear):
    """Neither pickled nor built anew, for its extra state cannot be sent."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.touch = lambda x: x

    def get_extra_state(self):
        return lambda: None

    def set_extra_state(self, state):
        self.state = state


def trained_in_a_loop(loop):
    torch.manual_seed(0)
    module = Closed()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loop.register(module, optimizer)
    for _ in range(3):
        loss = module(torch.ones(2, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.report(loss.item())
        loop.step()


CLOSED = TrainTask(
    model=Closed,
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    loss=nn.MSELoss(),
    train=lambda: [(torch.ones(2, 4), torch.ones(2, 3))],
)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (LoopTask(trained_in_a_loop), "a LoopTask has no model=.*"),
        (CLOSED, "what was trained does not fit the task's model: 'seen' of the file is not in the model.*"),
        (replace(CLOSED, model=partial(Tagged, 4, 3)), "its extra state cannot be sent either"),
    ],
    ids=["a loop", "a buffer that training makes", "an extra state"],
)
def test_a_completed_trial_whose_module_cannot_be_sent_keeps_its_weights(tmp_path, task, why, caplog):
    with HydraExecutor("cpu:1", device_memory="64MiB") as pool:
        expected = pool.run(task)
    with HydraExecutor(**OPTIONS) as pool:
        result = pool.run(task)
    assert (result.status, result.error, result.metrics) == ("completed", None, expected.metrics)
    named = (
        rf"the trained module could not be sent from the pool's process \(.*lambda.*\), .* build it again \(.*{why}\)"
    )
    with pytest.raises(HydraTuneError, match=named + r"; state_dict\(\) has its weights"):
        result.module()
    assert re.search(named + "; the result has its weights, but not the module", caplog.text)
    tensors = {name: kept for name, kept in expected.state_dict().items() if isinstance(kept, torch.Tensor)}
    assert list(differences(tensors, result.state_dict())) == []
    optimizer = expected.optimizer_state_dict()
    assert result.optimizer_state_dict()["param_groups"] == optimizer["param_groups"]
    assert list(differences(optimizer["state"], result.optimizer_state_dict()["state"])) == []
    result.save(tmp_path / "weights.safetensors")
    assert load_tensors(tmp_path / "weights.safetensors")[0].keys() == tensors.keys()


def test_names_that_are_no_texts_of_utf_8_hinder_nobody(plain):
    with HydraExecutor(**OPTIONS) as pool:
        jobs = [pool.submit(task_of(number), name) for number, name in enumerate((3, "caf\udce9", "good"))]
        for number, job in enumerate(jobs):
            assert_as_plain(plain[number], job.result())


def test_labels_that_cannot_be_sent_are_refused_and_leave_nothing_behind(plain):
    """After a crash the process is sent all its jobs again, and a refused one is none of them."""
    with HydraExecutor(**OPTIONS) as pool:
        jobs = {number: pool.submit(task_of(number, "fault")) for number in (0, BAD)}
        with pytest.raises(ConfigError, match="labels of a job must be plain values, which can be sent"):
            pool.submit(task_of(1), labels={"made by": lambda: None})
        assert isinstance(jobs[BAD].result().error, TrialCrashedError)
        assert_as_plain(plain[0], jobs[0].result())


def fails(_module, _batch):
    raise OddError("no such step", 3)


class OddError(Exception):
    """Cannot be pickled, for it wants two arguments."""

    def __init__(self, text, number):
        super().__init__(f"{text} {number}")


def test_a_trials_own_error_comes_back_with_its_traceback():
    with HydraExecutor(**OPTIONS) as pool:
        results = pool.run([task_of(0), replace(task_of(1), step=fails)], on_error="return")
    assert [result.status for result in results] == ["completed", "failed"]
    assert str(results[1].error) == "OddError: no such step 3"
    assert "in fails" in results[1].error.__notes__[0]


@pytest.mark.cases(1 / 3)
def test_reports_wait_for_their_answers_across_a_crash(tmp_path, plain):
    """The driver hears of each report once, and what it has pruned stays pruned."""
    told = []
    with HydraExecutor(**OPTIONS, checkpoint_dir=tmp_path / "saved") as pool:
        stream = pool.events()
        jobs = [pool.submit(task_of(number, "fault"), f"trial {number}", stream) for number in range(NUM_TRIALS)]
        ends = {}
        while len(ends) < NUM_TRIALS:
            event = stream.get()
            number = jobs.index(event.job)
            match event:
                case Reported():
                    assert event.job.state == "waiting"
                    told.append((number, event.step))
                    if number == 5 and event.step == 1:
                        event.job.prune()
                    else:
                        event.job.proceed()
                case Finished() | Failed():
                    ends[number] = event
    assert sorted(told) == sorted(
        (number, step) for number in range(NUM_TRIALS) for step in range({BAD: 1, 5: 2}.get(number, EPOCHS))
    )
    assert isinstance(ends[BAD].result.error, TrialCrashedError)
    assert (ends[5].result.status, len(ends[5].result.history)) == ("pruned", 2)
    for number in set(range(NUM_TRIALS)) - {BAD, 5}:
        assert_as_plain(plain[number], ends[number].result)


def test_jobs_are_saved_at_ctrl_c_and_go_on_in_another_executor(tmp_path, plain):
    tasks = [task_of(number) for number in range(NUM_TRIALS)]
    jobs, first = [], None
    with contextlib.suppress(KeyboardInterrupt), HydraExecutor(**OPTIONS, checkpoint_dir=tmp_path / "saved") as pool:
        stream = pool.events()
        jobs += [pool.submit(task, f"trial {number}", stream) for number, task in enumerate(tasks)]
        first = stream.get()
        raise KeyboardInterrupt
    assert isinstance(first, Reported)
    assert {job.state for job in jobs} == {"cancelled"}
    number = jobs.index(first.job)
    with HydraExecutor(**OPTIONS | {"isolate": False}, checkpoint_dir=tmp_path / "saved") as pool:
        found = pool.find_checkpoint(f"trial {number}")
        assert found.steps == 4
        assert_as_plain(plain[number], pool.submit(tasks[number], resume_from=found.path).result())


PROGRAM = """
from pathlib import Path

from hydra_tune import HydraExecutor
from tests.support.crashing import BAD, task_of

with HydraExecutor(devices="cpu:1", device_memory="4MiB", isolate=True) as pool:
    pool.run(task_of(BAD, "wait"))
"""


@pytest.mark.cases(1 / 3)
def test_no_process_outlives_a_program_that_is_killed(tmp_path):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [ROOT, *sys.path])))
    with Forked(run_code, PROGRAM, cwd=tmp_path, environment=environment) as program:
        while not (tmp_path / "there").exists():
            assert program.poll() is None, program.communicate()
        begun = psutil.Process(program.pid).children(recursive=True)
        assert len(begun) == 2
        program.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(begun, timeout=SECONDS)
    assert alive == []


class Noisy(Dataset):
    """Each sample is drawn in the worker."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return X[index] + torch.randn(8), Y[index]


@pytest.mark.cases(1 / 3)
def test_workers_of_loaders_belong_to_the_process():
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
    tasks = [replace(task_of(number, "fault"), train=loader) for number in (0, BAD)]
    before = set(psutil.Process().children(recursive=True))
    expected = train_plain(tasks[0])
    with HydraExecutor(**OPTIONS) as pool:
        results = pool.run(tasks, on_error="return")
    assert_as_plain(expected, results[0])
    assert isinstance(results[1].error, TrialCrashedError)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_shutdown_cancels_what_is_not_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = HydraExecutor(**OPTIONS)
    job = pool.submit(task_of(BAD, "wait"))
    waits = pool.submit(task_of(1), events=pool.events())
    while not Path("there").exists():
        assert job.state == "running"
    Path("go").touch()
    pool.shutdown()
    assert {job.state, waits.state} <= {"cancelled", "completed"}
    assert waits.state == "cancelled"
    with pytest.raises(HydraTuneError, match="the executor is shut down"):
        pool.submit(task_of(0))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"fusion": "on"}, "fusion does not go with isolate=True: trials that are computed together crash together"),
        ({"record": True}, "record does not go with isolate=True"),
        ({"instrument": threading.Lock}, "instrument does not go with isolate=True"),
        ({"plans_only": True}, "plans_only does not go with isolate=True"),
        ({"isolate": 3}, "isolate must be true or false, not 3"),
    ],
)
def test_options_that_do_not_go_with_it(options, named):
    with pytest.raises(ConfigError, match=named):
        HydraExecutor(**OPTIONS | options)


def test_what_is_not_there_is_refused_and_nothing_is_begun():
    with HydraExecutor(**OPTIONS) as pool:
        for ask in (pool.stats, lambda: pool.width, lambda: pool.plan([task_of(0)]), lambda: pool.add_device("cpu:3")):
            with pytest.raises(ConfigError, match="run, submit, loop, events, has_checkpoint, suspend and shutdown"):
                ask()
        job = pool.submit(task_of(0))
        for ask in (job.pause, job.checkpoint, lambda: job.progress, lambda: job.set_priority(1)):
            with pytest.raises(ConfigError, match="of job 'job 0': with isolate=True"):
                ask()
        assert job.result().status == "completed"


def test_a_pool_that_cannot_begin_says_so_at_the_first_task():
    with HydraExecutor(**OPTIONS | {"devices": "cuda:7"}) as pool, pytest.raises(ConfigError, match="cuda"):
        pool.submit(task_of(0))


def test_a_process_with_a_busy_thread_is_not_copied():
    is_over = threading.Event()

    def work():
        while not is_over.is_set():
            sum(range(1000))

    busy = threading.Thread(target=work)
    busy.start()
    try:
        with HydraExecutor(**OPTIONS) as pool, pytest.raises(ConfigError, match="whose other threads are idle"):
            pool.submit(task_of(0))
    finally:
        is_over.set()
        busy.join()


def crash_in_the_loop(given):
    ctypes.string_at(0)
    return torch.optim.SGD(given, lr=0.1)


def test_a_process_with_device_threads_of_autograd_is_not_copied():
    """CUDA builds of torch have such threads after a backward, and refuse every backward in a copy; here one has the name."""
    named, over = threading.Event(), threading.Event()

    def wait() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_autograd_0", 0, 0, 0)  # PR_SET_NAME
        named.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    named.wait()
    try:
        with HydraExecutor(**OPTIONS) as pool, pytest.raises(ConfigError, match="nothing has computed gradients"):
            pool.submit(task_of(0))
    finally:
        over.set()
        thread.join()


def test_a_crash_while_a_trial_is_prepared_is_that_trials(plain):
    bad = replace(task_of(2), optimizer=crash_in_the_loop)
    with HydraExecutor(**OPTIONS) as pool:
        results = pool.run([task_of(0), bad, task_of(1)], on_error="return")
    assert_as_plain(plain[0], results[0])
    assert_as_plain(plain[1], results[2])
    assert "it was in string_at (" in results[1].error.how
    assert "called by crash_in_the_loop (" in results[1].error.how
