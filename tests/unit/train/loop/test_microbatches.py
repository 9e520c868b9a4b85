"""What `split_batches` means, and what it is refused for."""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import train_plain
from hydra_tune.errors import TaskError
from hydra_tune.train.loop.microbatches import pieces
from tests.unit.pool.tasks import SAMPLES, X, Y, against_plain, mlp, one_batch, short, task, train


class Pair(NamedTuple):
    x: torch.Tensor
    rest: dict[str, Any]


def test_pieces_are_all_of_the_batch_in_order_and_in_its_structure():
    batch = Pair(torch.arange(7.0), {"y": [torch.arange(14).view(7, 2)], "scale": torch.tensor(2.0), "name": "a"})
    found = list(pieces(batch, 3))
    assert [piece.samples for piece in found] == [3, 2, 2]
    assert sum(piece.share for piece in found) == pytest.approx(1.0)
    assert [piece.is_last for piece in found] == [False, False, True]
    assert all(isinstance(piece.batch, Pair) for piece in found)
    assert torch.equal(torch.cat([piece.batch.x for piece in found]), batch.x)
    assert torch.equal(torch.cat([piece.batch.rest["y"][0] for piece in found]), batch.rest["y"][0])
    assert {(piece.batch.rest["name"], float(piece.batch.rest["scale"])) for piece in found} == {("a", 2.0)}


def test_a_batch_has_no_more_pieces_than_samples_and_one_piece_is_the_batch_itself():
    batch = (X[:2], Y[:2])
    assert [piece.samples for piece in pieces(batch, 5)] == [1, 1]
    assert [piece.batch is batch for piece in pieces(batch, 1)] == [True]


def test_tensors_of_other_lengths_are_refused():
    with pytest.raises(TaskError, match="one tensor has 8, another 3"):
        list(pieces((X[:8], Y[:3]), 2))


def test_gradients_are_those_of_the_pieces_by_their_share():
    described = short(split_batches=3, epochs=1, optimizer=partial(torch.optim.SGD, lr=0.1))
    plain = train_plain(described)
    torch.manual_seed(described.seed)
    module = mlp()
    (batch,) = one_batch()
    losses = []
    for start, stop in ((0, 3), (3, 6), (6, 8)):
        loss = functional.cross_entropy(module(batch[0][start:stop]), batch[1][start:stop])
        (loss * ((stop - start) / 8)).backward()
        losses.append(loss.item() * (stop - start))
    assert plain.losses == [pytest.approx(sum(losses) / 8)]
    for trained, parameter in zip(plain.module().parameters(), module.parameters(), strict=True):
        assert torch.allclose(trained, parameter - 0.1 * parameter.grad, rtol=1e-5, atol=1e-7)
    assert against_plain(described, train(described)) == []


def test_the_whole_batch_gives_the_same_but_for_rounding():
    losses = [train_plain(task(split_batches=count)).losses for count in (1, 2, 8)]
    assert losses[0] != losses[1], "another order of additions"
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4)


class Centred(nn.Module):
    """Looks at the other samples, with no buffer and no layer that is known to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x - x.mean(dim=0))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


REFUSED = {
    "normed": (
        {"model": lambda: nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False), mlp())},
        "'0', which normalizes",
    ),
    "counting": ({"model": Counting}, "buffer 'calls'"),
    "centred": ({"model": Centred}, "needs a loss that is the mean over a batch's samples"),
    "summed": ({"loss": partial(functional.cross_entropy, reduction="sum")}, "and the mean over its pieces"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pieces_would_change_is_refused_by_pool_and_plain_loop_alike(name):
    changes, message = REFUSED[name]
    with pytest.raises(TaskError, match=message):
        train_plain(task(split_batches=2, **changes))
    for count in (2, "auto"):
        error = train(task(split_batches=count, **changes)).error
        assert isinstance(error, TaskError)
        assert re.search(message, str(error))
        assert f"split_batches={count!r} " in str(error)


def test_a_check_moves_no_stream_and_changes_no_batch():
    def noisy_data():
        for start in (0, 8, 16):
            yield X[start : start + 8] + torch.rand(8, 8), Y[start : start + 8]

    model = partial(nn.Sequential, nn.Dropout(0.5))
    described = task(split_batches=2, train=noisy_data, model=lambda: model(mlp()))
    assert against_plain(described, train(described)) == []


def test_a_number_of_pieces_is_checked():
    with pytest.raises(TaskError, match="split_batches must be 'auto' or a whole number of at least 1, not 0"):
        task(split_batches=0)
    assert len(train_plain(task(split_batches=4, train=SAMPLES)).losses) == 6


def test_a_plain_loop_has_no_memory_to_choose_a_number_for():
    with pytest.raises(
        TaskError, match=r"only a pool chooses .* give the plain loop the number that a pool has chosen"
    ):
        train_plain(task(split_batches="auto"))
