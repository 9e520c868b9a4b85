"""Worker processes of loaders: none hangs, none is left behind, and what goes wrong in one ends its trial alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hydra_tune import Failed, Finished, Reported
from hydra_tune.errors import TaskError
from hydra_tune.train.data import worker_server
from tests.support.feeds import Augmented, build
from tests.unit.pool.tasks import PATIENCE_SECONDS, X, Y, against_plain, running, short, task

pytestmark = pytest.mark.timeout(280)
ROOT = Path(__file__).parents[2]
SERVER = "hydra-workers"


def servers() -> list[int]:
    """Processes that fork workers."""
    return [process.pid for process in psutil.Process().children() if process.name() == SERVER]


def workers() -> list[psutil.Process]:
    """Living processes below this one, but for those that serve all: fork servers and the resource tracker."""
    servers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    below = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                command = " ".join([process.name(), *process.cmdline()])
                below[process] = command, process.ppid()
        except psutil.NoSuchProcess:
            continue
    direct = os.getpid()
    return [
        process
        for process, (command, parent) in below.items()
        if parent != direct or not (command.startswith(SERVER) or any(server in command for server in servers))
    ]


class Awaits(Dataset[Any]):
    """A dataset whose ninth sample waits for a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: int) -> Any:
        while index == 8 and not self.path.exists():
            time.sleep(0.01)
        return X[index], Y[index]

    def __len__(self) -> int:
        return 16


class WorkerError(Exception):
    pass


class Raises(Awaits):
    def __getitem__(self, index: int) -> Any:
        if index == 8:
            raise WorkerError(f"sample {index}")
        return X[index], Y[index]


class RaisesLikeALostWorker(Awaits):
    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError("rows.csv")


class Dies(Awaits):
    def __getitem__(self, index: int) -> Any:
        if index == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return X[index], Y[index]


def loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **({"batch_size": 8, "num_workers": 1} | options))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("end", "persistent"),
    [
        pytest.param(end, persistent, marks=[pytest.mark.slow] * (persistent != (row % 2 > 0)))
        for row, end in enumerate(("completed", "pruned", "cancelled", "failed"))
        for persistent in (False, True)
    ],
)
def test_no_worker_outlives_its_trial(end, persistent):
    train = DataLoader(Augmented(), 8, num_workers=2, persistent_workers=persistent)

    def loss(output, target):
        if end == "failed" and len(workers_seen) >= 2:
            raise WorkerError
        return torch.nn.functional.cross_entropy(output, target)

    workers_seen: list[Any] = []
    with running() as pool:
        stream = pool.events()
        job = pool.submit(build("generator", train=train, report_every=2, loss=loss, epochs=2), events=stream)
        while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
            workers_seen += workers()
            if end == "pruned":
                job.prune()
            elif end == "cancelled":
                job.cancel()
            else:
                job.proceed()
        assert isinstance(event, Finished | Failed)
        assert len(workers_seen) >= 2
        assert event.result.status == end
        assert workers() == []


def test_a_shutdown_ends_the_workers_of_trials_that_it_cancels():
    with running(devices="cpu:2") as pool:
        stream = pool.events()
        train = DataLoader(Augmented(), 8, num_workers=2, persistent_workers=True)
        pool.submit(build("generator", train=train, report_every=2), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        assert len(workers()) == 2
    assert workers() == []


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [
        (Raises, WorkerError, "sample 8"),
        (RaisesLikeALostWorker, FileNotFoundError, "rows.csv"),
        (Dies, TaskError, "exited unexpectedly.*num_workers=0"),
    ],
)
def test_a_worker_that_fails_ends_its_trial_alone_and_says_why(dataset, error, text, tmp_path, monkeypatch):
    looks_every_seconds = (0.2,)  # for workers that are lost; torch's own are 5
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", looks_every_seconds)
    with running(devices="cpu:2") as pool:
        other = pool.submit(task(epochs=4))
        result = pool.submit(short(train=loader(dataset(tmp_path)))).result(PATIENCE_SECONDS)
        assert result.status == "failed"
        with pytest.raises(error, match=text):
            raise result.error
        assert against_plain(other.task, other.result(PATIENCE_SECONDS)) == []
        assert workers() == []


def test_a_slow_worker_keeps_no_other_trial_waiting(tmp_path):
    """The other trial draws batches and dropout masks while one waits for its worker."""
    gate = tmp_path / "gate"
    with running(devices="cpu:2") as pool:
        stream = pool.events()
        slow = pool.submit(short(train=loader(Awaits(gate)), report_every=1, epochs=1), events=stream)
        other = pool.submit(build("generator", report_every=1), events=stream)
        waiting = [stream.get(PATIENCE_SECONDS).job for _ in range(2)]
        assert {job.name for job in waiting} == {slow.name, other.name}
        slow.proceed()
        other.proceed()
        while other.state not in ("completed", "failed"):
            event = stream.get(PATIENCE_SECONDS)
            assert event is not None, "the other trial waits too"
            event.job.proceed()
        gate.touch()
        while slow.state not in ("completed", "failed"):
            event = stream.get(PATIENCE_SECONDS)
            assert event is not None
            event.job.proceed()
        assert slow.result(0).status == "completed"


def test_workers_are_never_forked_from_the_pools_process_unless_the_user_says_so():
    for context, direct in ((None, False), ("fork", True)):
        train = DataLoader(Augmented(), 8, num_workers=1, multiprocessing_context=context)
        with running() as pool:
            stream = pool.events()
            job = pool.submit(build("generator", train=train, report_every=2, epochs=1), events=stream)
            assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
            assert [process.ppid() == os.getpid() for process in workers()] == [direct]
            job.cancel()
        assert train.worker_init_fn is None
        assert (train.multiprocessing_context is None) == (context is None)
        assert train._iterator is None


def test_ctrl_c_at_the_terminal_does_not_kill_the_workers():
    """It goes to all processes of the terminal; the pool is to end its trials in order."""
    with running() as pool:
        stream = pool.events()
        train = DataLoader(Augmented(), 8, num_workers=1, persistent_workers=True)
        job = pool.submit(build("generator", train=train, report_every=2, epochs=2), events=stream)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        for process in workers():
            process.send_signal(signal.SIGINT)
        job.proceed()
        while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
            job.proceed()
        assert event.result.error is None


@pytest.mark.parametrize("part", ["dataset", "collate_fn", "worker_init_fn"])
@pytest.mark.parametrize("where", ["train", "validate"])
def test_what_cannot_be_sent_to_workers_is_refused_before_training(part, where):
    class Local(Augmented):
        pass

    local = Local() if part == "dataset" else Augmented()
    options = {} if part == "dataset" else {part: lambda argument: None}
    handle = loader(local, **options)
    with running() as pool:
        result = pool.submit(build("generator", **{where: handle})).result(PATIENCE_SECONDS)
    assert isinstance(result.error, TaskError)
    assert result.units_run == 0
    for words in (
        part,
        "Local" if part == "dataset" else "<lambda>",
        "num_workers=0",
        "multiprocessing_context='fork'",
    ):
        assert words in str(result.error)


class MakesTensors(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)] * 8), index % 4

    def __len__(self) -> int:
        return 8


def test_a_worker_makes_tensors_of_the_default_dtype_as_a_forked_one_does():
    torch.set_default_dtype(torch.float64)
    try:
        described = build("generator", train=loader(MakesTensors()), epochs=1)
        with running() as pool:
            result = pool.submit(described).result(PATIENCE_SECONDS)
        assert against_plain(described, result) == []
    finally:
        torch.set_default_dtype(torch.float32)


class ManyTensors(Dataset[Any]):
    """More tensors than a process may be handed descriptors, and one large enough to be shared."""

    def __init__(self) -> None:
        self.rows = [torch.full((8,), float(row)) for row in range(1500)]
        self.table = torch.randn(1500, 256)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + self.table[index, :8], index % 4

    def __len__(self) -> int:
        return 24


@pytest.mark.cases(1 / 3)
def test_a_dataset_of_many_tensors_can_be_sent():
    dataset = ManyTensors()
    described = build("generator", train=loader(dataset), epochs=2)
    with running() as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
    assert against_plain(described, result) == []
    assert dataset.table.is_shared()
    assert not dataset.rows[0].is_shared()


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from hydra_tune import HydraExecutor, TrainTask

class Mine(Dataset):
    def __getitem__(self, index):
        return torch.full((8,), float(index)), index % 4
    def __len__(self):
        return 8

def main():
    task = TrainTask(
        model=lambda: torch.nn.Linear(8, 4),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=torch.nn.functional.cross_entropy,
        train=DataLoader(Mine(), 4, num_workers=1),
    )
    with HydraExecutor(devices="cpu:1") as pool:
        (result,) = pool.run([task], on_error="return")
    print("RESULT", result.status, result.error)

"""


def _run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.cases(1 / 3)
def test_a_script_may_define_its_dataset_itself(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + "if __name__ == '__main__':\n    main()\n")
    assert "RESULT completed None" in _run_script(str(path)).stdout


@pytest.mark.cases(1 / 3)
def test_a_script_whose_work_is_not_guarded_trains_and_does_it_only_once(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + "main()\n")
    assert _run_script(str(path)).stdout == "RESULT completed None\n"


@pytest.mark.cases(1 / 3)
def test_a_dataset_defined_in_a_session_is_known_to_workers():
    assert _run_script("-c", SCRIPT + "main()\n").stdout == "RESULT completed None\n"


BUSY = """
import threading
going = True
def work():
    while going:
        sum(range(1000))
threading.Thread(target=work, daemon=True).start()
"""


@pytest.mark.cases(1 / 3)
def test_beside_a_busy_thread_workers_import_the_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        SCRIPT + "if __name__ == '__main__':" + BUSY.replace("\n", "\n    ") + "\n    main()\n    going = False\n"
    )
    assert "RESULT completed None" in _run_script(str(path)).stdout


@pytest.mark.slow
def test_beside_a_busy_thread_a_script_whose_work_is_not_guarded_is_told_so_and_does_it_only_once(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + BUSY + "main()\ngoing = False\n")
    done = _run_script(str(path))
    assert done.stdout.count("RESULT") == 1
    assert "RESULT failed" in done.stdout
    assert "if __name__ == '__main__':" in done.stdout
    assert "HydraExecutor is made while a new process imports the main script" in done.stderr


@pytest.mark.slow
def test_beside_a_busy_thread_a_dataset_defined_in_a_session_is_refused_by_name():
    done = _run_script("-c", SCRIPT + BUSY + "main()\ngoing = False\n")
    assert "RESULT failed dataset=Mine" in done.stdout
    assert "defined in a session" in done.stdout


AFTERWARDS = """
class Wrong(Mine):
    def __getitem__(self, index):
        raise ZeroDivisionError

def run(pool, dataset):
    task = TrainTask(
        model=lambda: torch.nn.Linear(8, 4),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=torch.nn.functional.cross_entropy,
        train=DataLoader(dataset, 4, num_workers=1),
    )
    result = pool.submit(task).result()
    print(result.status, type(result.error).__name__)

with HydraExecutor(devices="cpu:1") as pool:
    run(pool, Mine())
    Mine.__getitem__ = Wrong.__getitem__
    run(pool, Mine())
    class Later(Dataset):
        __getitem__ = Wrong.__getitem__
        __len__ = lambda self: 8
    run(pool, Later())
"""


@pytest.mark.cases(1 / 3)
def test_workers_know_a_session_as_it_is_when_a_task_is_given():
    done = _run_script("-c", SCRIPT + AFTERWARDS)
    assert done.stdout.split() == [
        "completed",
        "NoneType",
        "failed",
        "ZeroDivisionError",
        "failed",
        "ZeroDivisionError",
    ]


@pytest.mark.cases(1 / 3)
def test_a_class_that_a_script_defines_after_its_first_task_is_refused_by_name(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + AFTERWARDS + "    print(pool.submit)\n".replace("pool.submit", "'end'"))
    done = _run_script(str(path))
    assert done.stdout.split()[4:] == ["failed", "TaskError", "end"]


@pytest.mark.cases(1 / 3)
def test_the_server_ends_with_the_last_executor_that_needs_it(monkeypatch):
    # Without a main file, as in the processes of a test runner, each executor has a server of its own.
    monkeypatch.setattr(worker_server, "has_main_file", lambda: True)
    train = DataLoader(Augmented(), 8, num_workers=1)
    with running() as without, running() as first:
        without.submit(task()).result(PATIENCE_SECONDS)
        assert servers() == []
        assert first.submit(build("generator", train=train)).result(PATIENCE_SECONDS).error is None
        (server,) = servers()
        with running() as second:
            assert second.submit(build("generator", train=train)).result(PATIENCE_SECONDS).error is None
            assert servers() == [server]
        first.shutdown()
        assert servers() == []


def callable_loader() -> DataLoader[Any]:
    return DataLoader(Augmented(), 8, num_workers=1, persistent_workers=True)


@pytest.mark.cases(1 / 3)
def test_a_later_task_with_workers_leaves_the_workers_of_a_callable_alive():
    with running(devices="cpu:2") as pool:
        stream = pool.events()
        first = build("generator", train=callable_loader, report_every=2, epochs=2)
        job = pool.submit(first, events=stream, max_retries=0)
        assert isinstance(stream.get(PATIENCE_SECONDS), Reported)
        assert pool.submit(build("generator", train=callable_loader())).result(PATIENCE_SECONDS).error is None
        # The job that waits at its report has not drawn all batches.
        job.proceed()
        while isinstance(event := stream.get(PATIENCE_SECONDS), Reported):
            job.proceed()
        assert event.result.error is None


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["submit", "clone", "plan", "profile"])
def test_a_server_begun_for_a_callable_ends_with_the_executor(way, tmp_path):
    drawn_task = build("generator", train=callable_loader)
    with running(checkpoint_dir=tmp_path) as pool:
        if way == "submit":
            assert pool.submit(drawn_task).result(PATIENCE_SECONDS).error is None
        elif way == "clone":
            earlier = pool.submit(task())
            earlier.result(PATIENCE_SECONDS)
            changes = {"train": callable_loader, "batch_size": None, "epochs": 3}
            assert pool.clone(earlier, changes).result(PATIENCE_SECONDS).error is None
        elif way == "plan":
            pool.plan(drawn_task)
        else:
            pool.profile(drawn_task, steps=1)
        assert len(servers()) == 1
    assert servers() == []


def test_a_class_defined_after_a_callables_workers_began_reaches_the_workers_of_a_later_loader(monkeypatch):
    with running() as pool:
        assert pool.submit(build("generator", train=callable_loader)).result(PATIENCE_SECONDS).error is None
        later = type("LaterData", (Augmented,), {"__module__": __name__})
        monkeypatch.setattr(sys.modules[__name__], "LaterData", later, raising=False)
        loader = DataLoader(later(), 8, num_workers=1)
        assert pool.submit(build("generator", train=loader)).result(PATIENCE_SECONDS).error is None


@pytest.mark.cases(1 / 3)
def test_a_server_keeps_no_pipe_of_the_program_open():
    """A program that reads until all ends of its pipe are closed would wait for ever."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader, running() as pool:
        train = DataLoader(Augmented(), 8, num_workers=1)
        assert pool.submit(build("generator", train=train)).result(PATIENCE_SECONDS).error is None
        assert servers()
        reader.stdin.close()
        assert reader.wait(PATIENCE_SECONDS) == 0


@pytest.mark.cases(1 / 3)
def test_slow_starts_are_told_once_with_what_helps(caplog, monkeypatch):
    monkeypatch.setattr("hydra_tune.train.data.loader_workers._SLOW_SECONDS", 0.0)
    monkeypatch.setattr("hydra_tune.train.data.loader_workers._WorkerStart.is_told", False)
    train = DataLoader(Augmented(), 8, num_workers=1)
    with running() as pool:
        for _ in range(2):
            assert pool.submit(build("generator", train=train)).result(PATIENCE_SECONDS).error is None
    (message,) = [record.getMessage() for record in caplog.records if "took" in record.getMessage()]
    for words in ("in every pass over the data", "persistent_workers=True", "num_workers=0"):
        assert words in message
    # A process of pytest-xdist has a thread that reads, and so is not copied.
    assert ("are shared" in message) != ("was busy" in message)


COMPARED = """
import random
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from hydra_tune import HydraExecutor, TrainTask, train_plain

class Drawn(Dataset):
    def __getitem__(self, index):
        return torch.randn(8) + random.random() + index, index % 4
    def __len__(self):
        return 24

task = TrainTask(
    model=lambda: torch.nn.Linear(8, 4),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    loss=torch.nn.functional.cross_entropy,
    train=DataLoader(Drawn(), 4, shuffle=True, num_workers=2),
    epochs=2,
)
torch.set_num_threads(1)
plain = train_plain(task)
with HydraExecutor(devices="cpu:1") as pool:
    (result,) = pool.run([task])
losses = [[entry["train_loss"] for entry in run.history] for run in (plain, result)]
weights = [run.state_dict()["weight"] for run in (plain, result)]
print("SAME", losses[0] == losses[1], torch.equal(*weights))
"""


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("arguments", [("-",), ("-c", COMPARED)], ids=["standard input", "an argument"])
def test_a_program_without_a_file_trains_with_workers_to_the_plain_loops_numbers(arguments):
    text = COMPARED if arguments == ("-",) else None
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "SAME True True\n", done.stderr


class Wrapped(DataLoader[Any]):
    """A loader whose passes are generators, which begin at their first batch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


@pytest.mark.parametrize(
    ("persistent", "options"),
    [
        (False, {}),
        (True, {"num_shards": 2}),
        pytest.param(True, {}, marks=pytest.mark.slow),
        pytest.param(False, {"num_shards": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_loader_whose_passes_are_generators_draws_the_trials_own_numbers(persistent, options):
    def described() -> Any:
        data = torch.utils.data.TensorDataset(X, Y)
        return short(train=Wrapped(data, 4, shuffle=True, num_workers=1, persistent_workers=persistent), epochs=2)

    before = torch.get_rng_state()
    with running(**options) as pool:
        result = pool.submit(described()).result(PATIENCE_SECONDS)
    assert torch.equal(torch.get_rng_state(), before)
    assert not workers()
    assert against_plain(described(), result) == []


KILLED = """
import os, time
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from hydra_tune import HydraExecutor, TrainTask


class Slow(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.zeros(3), 0


def step(module, batch):
    print("trains", flush=True)
    return module(batch[0]).sum()


task = TrainTask(
    model=lambda: torch.nn.Linear(3, 2),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    train=DataLoader(Slow(), 4, num_workers=2),
    step=step,
    epochs=100,
)
with HydraExecutor(devices="cpu:1") as pool:
    pool.run(task)
"""


@pytest.mark.cases(1 / 3)
def test_no_worker_outlives_a_program_that_is_killed(tmp_path):
    """Nor does the process that forks workers: the system ends none of them, so each has to notice."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    program = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "trains\n"
        begun = psutil.Process(program.pid).children(recursive=True)
        assert len(begun) >= 3  # the server and two workers
    finally:
        program.kill()
        program.wait()
    _, left = psutil.wait_procs(begun, timeout=60)
    for process in left:
        process.kill()
    assert not left
    program.stdout.close()


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("epochs_before", [1, 2])
def test_a_resumed_trial_draws_what_its_persistent_workers_would_have_drawn(epochs_before: int, tmp_path: Path) -> None:
    """Workers that are started draw a seed; workers that go on do not."""

    def described() -> Any:
        loader = DataLoader(TensorDataset(X, Y), 8, shuffle=True, num_workers=1, persistent_workers=True)
        return task(train=loader, epochs=4)

    with running(checkpoint_dir=tmp_path) as pool:
        events = pool.events()
        job = pool.submit(described(), "trial", events)
        for epoch in range(epochs_before):
            assert isinstance(events.get(PATIENCE_SECONDS), Reported)
            if epoch + 1 < epochs_before:
                job.proceed()
        pool.suspend()
    with running(checkpoint_dir=tmp_path) as pool:
        found = pool.find_checkpoint("trial")
        result = pool.submit(described(), "trial", resume_from=found.path).result(PATIENCE_SECONDS)
    assert against_plain(described(), result) == []
