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
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from hydra_tune import Failed, Finished, Reported
from hydra_tune.errors import TaskError
from tests.support.feeds import Augmented, build
from tests.unit.pool.tasks import PATIENCE_SECONDS, X, Y, against_plain, running, short, task

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]


def workers() -> list[psutil.Process]:
    """Living processes below this one, but for the two that serve all: the fork server and the resource tracker."""
    servers = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    below = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                below[process] = " ".join(process.cmdline()), process.ppid()
        except psutil.NoSuchProcess:
            continue
    direct = os.getpid()
    return [
        process
        for process, (command, parent) in below.items()
        if parent != direct or not any(server in command for server in servers)
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
from torch.utils.data import DataLoader, Dataset
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
        (result,) = pool.run([task])
    print("RESULT", result.status, result.error)

"""


def _run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)


def test_a_script_may_define_its_dataset_itself(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + "if __name__ == '__main__':\n    main()\n")
    assert "RESULT completed None" in _run_script(str(path)).stdout


@pytest.mark.slow
def test_a_script_whose_work_is_not_guarded_is_told_so_and_does_it_only_once(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + "main()\n")
    done = _run_script(str(path))
    assert done.stdout.count("RESULT") == 1
    assert "RESULT failed" in done.stdout
    assert "if __name__ == '__main__':" in done.stdout
    assert "HydraExecutor is made while a new process imports the main script" in done.stderr


def test_a_dataset_defined_in_a_session_is_refused_by_name():
    done = _run_script("-c", SCRIPT + "main()\n")
    assert "RESULT failed dataset=Mine" in done.stdout
    assert "defined in a session" in done.stdout
