"""A captured step sees every change of the files that it reads: cut and fused trials end as a plain loop does.

The plain loop is `by_hand` of `test_stateful.py`, which shares nothing with the package.
"""

import builtins
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor.compiler_bisector import CompilerBisector

from hydra_tune.errors import CaptureError
from hydra_tune.shard.python_state.opened_files import FileHolder, noting_files
from tests.parity.exact import differences
from tests.parity.stateful import Program, batches, error, net, task
from tests.parity.test_python_state import assert_close, captures, trained
from tests.parity.test_stateful import by_hand

# How a step reads a number that belongs to a path, and how data write the number. All numbers have one digit.
Way = tuple[Callable[[Path], float], Callable[[Path, int], None]]


def written_in_place(path: Path, number: int) -> None:
    path.write_text(str(number))


def replaced(path: Path, number: int) -> None:
    other = path.with_suffix(".new")
    other.write_text(str(number))
    other.replace(path)


def files_in_a_folder(path: Path, number: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for index in range(number):
        (path / str(index)).touch()


def there_or_not(path: Path, number: int) -> None:
    path.unlink(missing_ok=True)
    if number % 2:
        path.touch()


def saved_by_torch(path: Path, number: int) -> None:
    torch.save(torch.tensor(float(number)), path)


def linked(path: Path, number: int) -> None:
    path.unlink(missing_ok=True)
    path.with_name(f"number {number}").write_text(str(number))
    path.symlink_to(path.with_name(f"number {number}"))


def opened(path: Path) -> float:
    with open(path) as file:  # noqa: PTH123 - the function itself
        return float(json.load(file))


def opened_by_io(path: Path) -> float:
    with io.open(path, "r+") as file:  # noqa: UP020 - the function itself
        return float(file.readline())


def scanned(path: Path) -> float:
    with os.scandir(path) as entries:
        return float(len(list(entries)))


def opened_by_the_system(path: Path) -> float:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return float(os.read(descriptor, 9))
    finally:
        os.close(descriptor)


WAYS: dict[str, Way] = {
    "a text": (lambda path: float(path.read_text()), written_in_place),
    "a file replaced": (lambda path: float(path.read_text()), replaced),
    "open": (opened, written_in_place),
    "io.open": (opened_by_io, written_in_place),
    "os.open": (opened_by_the_system, written_in_place),
    "numpy": (lambda path: float(np.loadtxt(path)), written_in_place),
    "torch.load": (lambda path: float(torch.load(path)), saved_by_torch),
    "a file that is there": (lambda path: 1.0 + path.exists(), there_or_not),
    "a folder's files": (lambda path: float(len(os.listdir(path))), files_in_a_folder),  # noqa: PTH208
    "a folder scanned": (scanned, files_in_a_folder),
    "a link": (lambda path: float(path.read_text()), linked),
}
NOT_CAPTURED = {"torch.load"}  # torch.export has no stand-in for a storage
SLOW = {"a file replaced", "io.open", "numpy", "a folder scanned", "a link"}
CASES = [pytest.param(way, marks=[pytest.mark.slow] if way in SLOW else []) for way in WAYS]


def reading(path: Path, way: str, when: str = "pass") -> Program:
    """A program whose data write another number in each pass, or between batches."""
    read, write = WAYS[way]
    write(path, 1)
    passes = 0

    def train() -> Iterator[Any]:
        nonlocal passes
        passes += 1
        if passes > 1:  # the first passes of several trials begin while steps of the others are read and tried
            write(path, passes)
        for number, batch in enumerate(batches()):
            if when == "batch" and number == 2:
                write(path, passes + 4)
            yield batch

    def step(module: nn.Module, batch: Any) -> Any:
        return error(module, batch) * read(path)

    return Program(task=task(train=train, validate=batches, step=step))


def test_folders_in_which_torch_looks_for_its_caches_are_no_files_of_a_step():
    """Other programs write to the folder of temporary files all the time, and each write would cost a capture."""
    noted = {}

    def step(module, batch):
        Path("/tmp/of the step").exists()
        CompilerBisector.get_backend()
        return error(module, batch)

    with noting_files(noted):
        step(net(), batches()[0])
    assert list(noted) == ["/tmp/of the step"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("when", ["pass", pytest.param("batch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", CASES)
def test_a_cut_trial_follows_the_files_that_its_step_reads(way, when, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    expected = by_hand(reading(tmp_path / "number", way, when))
    (actual,) = trained([reading(tmp_path / "number", way, when)], num_shards="layer")
    assert list(differences(expected, actual)) == []
    assert (captures(caplog) > 0) == (way not in NOT_CAPTURED)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [case for case in CASES if case.values[0] not in NOT_CAPTURED])
def test_fused_trials_follow_the_files_that_their_steps_read(way, tmp_path, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    expected = by_hand(reading(tmp_path / "number", way))
    for actual in trained([reading(tmp_path / "number", way) for _ in range(3)], fusion="on"):
        assert_close(expected, actual)
    assert "are fused" in caplog.text


def test_a_file_that_does_not_change_is_captured_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    (tmp_path / "number").write_text("2")

    def step(module: nn.Module, batch: Any) -> Any:
        return error(module, batch) * float((tmp_path / "number").read_text())

    def train() -> Iterator[Any]:
        (tmp_path / "number").write_text("2")  # in each pass, what is there already
        return iter(batches())

    program = Program(task=task(train=train, validate=batches, step=step))
    expected = by_hand(program)
    (actual,) = trained([program], num_shards="layer")
    assert list(differences(expected, actual)) == []
    assert captures(caplog) == 0


def test_trials_that_share_a_plan_read_the_present_file(tmp_path):
    """A trial takes the plan that an earlier trial has made of another content, unless the file is looked at."""
    number = tmp_path / "number"

    def program() -> Program:
        def step(module: nn.Module, batch: Any) -> Any:
            return error(module, batch) * float(number.read_text())

        return Program(task=task(train=batches, validate=batches, step=step))

    for content in ("1", "3"):
        number.write_text(content)
        expected = by_hand(program())
        (actual,) = trained([program()], num_shards="layer")
        assert list(differences(expected, actual)) == []


def test_a_write_within_the_clocks_step_is_seen_by_its_contents(tmp_path):
    path = tmp_path / "number"
    path.write_text("1")
    status = path.stat()
    holder = FileHolder(str(path))
    assert holder.change() is None
    with path.open("r+") as file:  # the same size, and, set back, the same time
        file.write("2")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert holder.change() == f"the file '{path}'"


def test_of_a_large_file_the_status_counts(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(3 << 20))
    os.utime(path, (0, 0))
    holder = FileHolder(str(path))
    assert holder.change() is None
    with path.open("r+b") as file:
        file.write(b"1")
    assert holder.change() == f"the file '{path}'"


def test_only_files_that_the_thread_reads_are_noted(tmp_path):
    before = (builtins.open, io.open, os.open, os.stat, os.lstat, os.listdir, os.scandir)
    noted: dict[str, FileHolder] = {}
    (tmp_path / "read").touch()
    with noting_files(noted):
        (tmp_path / "read").read_bytes()
        (tmp_path / "written").write_text("1")
        Path("/proc/self/stat").read_text()
        Path(__file__).read_text()
    assert (builtins.open, io.open, os.open, os.stat, os.lstat, os.listdir, os.scandir) == before
    assert set(noted) == {str(tmp_path / "read")}


def test_a_step_that_reads_ever_more_files_is_refused(tmp_path):
    def read_many() -> None:
        with noting_files({}):
            for number in range(300):
                (tmp_path / str(number)).exists()

    with pytest.raises(CaptureError, match="reads more than 256 files"):
        read_many()
