"""A trial that begins again finds the user's functions with the state that they kept at that moment."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.errors import SpillError
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from tests.support.checkpointed import Collector, library, run

_STREAM = torch.Generator().manual_seed(2)
BATCHES = [(torch.randn(4, 8, generator=_STREAM), torch.randint(3, (4,), generator=_STREAM)) for _ in range(5)]
BAD_LABEL = (BATCHES[0][0], torch.full((4,), 9))


@dataclass
class Schedule:
    """What a script keeps beside its model: a weight that grows with every batch, and a tensor that follows the loss."""

    weight: float = 0.0
    seen: list[int] = field(default_factory=list)
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def task(*, bad_batch: int | None = None, fault: tuple[int, Path] | None = None) -> TrainTask:
    """Two epochs of 5 batches.

    A batch, by number from 0, has a bad label, or meets a fault of the system: once, as a file notes.
    """
    schedule = Schedule()

    def train() -> Iterator[Any]:
        for batch in BATCHES:
            number = len(schedule.seen)
            if fault is not None and number == fault[0] and not fault[1].exists():
                fault[1].touch()
                raise SpillError("the disk has failed")
            schedule.weight += 0.1
            schedule.seen.append(number)
            schedule.mean.mul_(0.9).add_(0.1 * number)
            yield BAD_LABEL if number == bad_batch else batch

    def step(module: nn.Module, batch: Any) -> Tensor:
        scores = module(batch[0])
        return functional.cross_entropy(scores, batch[1]) + (schedule.weight + schedule.mean) * scores.square().mean()

    return TrainTask(
        model=net,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        train=train,
        step=step,
        epochs=2,
        seed=1,
    )


def reports(result: Any) -> list[dict[str, float]]:
    return [{name: value for name, value in report.items() if name != "seconds"} for report in result.history]


@pytest.mark.cases(1 / 3)
def test_members_of_a_group_whose_step_another_member_failed_end_as_by_themselves():
    with HydraExecutor("cpu:1", fusion="on") as pool:
        failed, *others = pool.run([task(bad_batch=7), task(), task()], on_error="return")
    assert isinstance(failed.error, IndexError)
    expected = train_plain(task())
    for result in others:
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("saves", [False, True], ids=["from the beginning", "from a checkpoint"])
@pytest.mark.parametrize("faulty_batch", [3, 8])
def test_a_trial_begins_again_with_the_state_of_that_moment(saves, faulty_batch, tmp_path):
    options = {"checkpoint_dir": tmp_path / "saved"} if saves else {}
    with HydraExecutor("cpu:1", **options) as pool:
        (result,) = pool.run([task(fault=(faulty_batch, tmp_path / "fault"))])
    expected = train_plain(task())
    assert reports(result) == reports(expected)
    assert all(tensor.equal(expected.state_dict()[name]) for name, tensor in result.state_dict().items())


def in_the_environment(_batch: Any) -> None:
    os.environ["DRAWN"] = str(int(os.environ["DRAWN"]) + 1)


def in_an_iterator() -> Callable[[Any], object]:
    numbers = itertools.count()
    return lambda batch: next(numbers)


def in_a_large_tensor() -> Callable[[Any], object]:
    seen = torch.zeros(30_000)
    return lambda batch: seen.add_(1.0)


STUBBORN = {
    "the environment": lambda: in_the_environment,
    "the variable 'numbers' of": in_an_iterator,
    "the tensor the variable 'seen' of": in_a_large_tensor,
}


@pytest.mark.parametrize("name", STUBBORN)
def test_state_that_cannot_be_put_back_is_named(name, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("DRAWN", "0")
    made, noted = task(fault=(3, tmp_path / "fault")), STUBBORN[name]()
    train = made.train

    def drawing() -> Iterator[Any]:
        for batch in train():
            noted(batch)
            yield batch

    with HydraExecutor("cpu:1") as pool:
        pool.run([replace(made, train=drawing)])
    assert f"begins again, but {name}" in caplog.text
    assert "may have changed meanwhile and cannot be put back" in caplog.text


@pytest.mark.parametrize("num_shards", [None, 1], ids=["own code", "cut"])
def test_a_resumed_trial_names_what_its_functions_have_lost(num_shards, caplog):
    """The batches of a first pass that are drawn again bring the values of its checkpoints back."""
    plans, keeper = library(num_shards=num_shards), Collector()
    run(task(), plans, keeper)
    names = [f"the variable 'schedule' of step=.{name}" for name in ("weight", "seen", "mean")]
    for place, is_lost in {(0, 3): False, (1, 0): True, (1, 2): True}.items():
        saved = next(
            one for one in keeper.saved if (one.facts["place"]["epoch"], one.facts["place"]["batches"]) == place
        )
        caplog.clear()
        run(task(), plans, beginning=StartCheckpoint(saved=saved))
        assert ("is resumed, and" in caplog.text) == is_lost, place
        assert all(name in caplog.text for name in names) == is_lost


def test_a_resumed_trial_whose_functions_have_the_values_of_its_checkpoint_is_not_told(caplog):
    plans, keeper, described = library(), Collector(), task()
    run(described, plans, keeper)
    last = StartCheckpoint(saved=keeper.saved[-1])
    run(replace(described, epochs=3), plans, beginning=replace(last, allows_changes=True))
    assert "is resumed, and" not in caplog.text


COUNTS: dict[str, int] = {}


def test_what_trials_count_in_one_dictionary_is_not_put_back_and_named(caplog):
    """Nothing tells which of the counts are those of the trial that begins again; another trial's must stay."""
    has_begun, has_failed, begins_again = threading.Event(), threading.Event(), threading.Event()

    def counting(name: str, draw: Callable[[int], None]) -> TrainTask:
        COUNTS[name] = 0

        def train() -> Iterator[Any]:
            for batch in BATCHES:
                COUNTS[name] += 1
                draw(COUNTS[name])
                yield batch

        def step(module: nn.Module, batch: Any) -> Tensor:
            return functional.cross_entropy(module(batch[0]), batch[1]) * COUNTS[name]

        return replace(task(), train=train, step=step)

    def wait(count: int) -> None:
        if count == 3:
            has_begun.set()
            assert begins_again.wait(60)

    def fail(count: int) -> None:
        if has_failed.is_set():
            begins_again.set()
        elif count == 2:
            assert has_begun.wait(60)
            has_failed.set()
            raise SpillError("the disk has failed")

    with HydraExecutor("cpu:2") as pool:
        other, again = pool.run([counting("other", wait), counting("again", fail)])
    assert again.status == "completed"
    assert reports(other) == reports(train_plain(counting("other", lambda count: None)))
    assert "COUNTS" in caplog.text
    assert "cannot be put back; if its numbers depend on that value, they will be others" in caplog.text
