"""A trial's own code keeps within its device whatever its batches are made of, and whenever it makes state."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune import TrainTask
from hydra_tune.errors import BudgetError, OutOfMemoryError, TaskError
from hydra_tune.train.loop import burst, direct
from tests.unit.pool.tasks import against_plain, running

pytestmark = pytest.mark.timeout(120)
WIDTH = 64
SMALL, LARGE = 16, 700


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=stream), torch.randint(4, (rows,), generator=stream)


def mlp(depth: int = 4) -> nn.Module:
    layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def loss_of(module: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


def described(**changes: Any) -> TrainTask:
    arguments: dict[str, Any] = {
        "model": mlp,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "train": lambda: [batch_of(SMALL)] * 4,
        "step": loss_of,
    }
    return TrainTask(**(arguments | changes))


def own_code(**options: Any) -> Any:
    return running(**({"num_shards": None} | options))


@pytest.fixture
def followed(monkeypatch) -> Iterator[list[int]]:
    """The step numbers that were followed, from 0."""
    found: list[int] = []
    steps = [0]
    step = direct.WholeModelRunner.step

    def seen(self: direct.WholeModelRunner, number: int) -> None:
        if self._following is not None:
            found.append(steps[0])
        steps[0] += 1
        step(self, number)

    monkeypatch.setattr(direct.WholeModelRunner, "step", seen)
    return found


@dataclass
class Fields:
    x: Tensor
    y: Tensor


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Unhashable(Slots):
    """No capture could be keyed by such a batch."""

    __hash__ = None  # type: ignore[assignment]


class Items(dict[str, Tensor]):
    """Every attribute that is no item is a KeyError."""

    __getattr__ = dict.__getitem__


class Opaque:
    """Its iterator is of a class that is not written in Python, and whose parts cannot be told."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.pair = iter((x, y))


BATCHES = {
    "dataclass": (Fields, lambda b: (b.x, b.y), [0, 2]),
    "slots": (Slots, lambda b: (b.x, b.y), [0, 2]),
    "attributes": (lambda x, y: Items(x=x, y=y), lambda b: (b.x, b.y), [0, 2]),
    "numpy": (lambda x, y: (x.numpy(), y.numpy()), lambda b: tuple(map(torch.from_numpy, b)), [0, 2]),
    "opaque": (Opaque, lambda b: tuple(b.pair), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_step_of_a_larger_batch_is_followed_whatever_holds_it(name, followed):
    make, read, expected = BATCHES[name]
    one = described(
        train=lambda: [make(*batch_of(rows)) for rows in (SMALL, SMALL, LARGE, SMALL)],
        step=lambda module, batch: loss_of(module, read(batch)),
    )
    with own_code() as pool:
        result = pool.run(one)
        device = pool.stats().devices["cpu:0"]
    assert followed == expected
    assert device.peak_bytes > 3 * LARGE * WIDTH * 4
    assert not against_plain(one, result)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_mixed_precision_activations_go_to_the_host_while_the_forward_runs(precision, monkeypatch):
    rows = 4000
    one = described(precision=precision, train=lambda: [batch_of(rows)] * 2)
    live: list[int] = []
    pack = direct.LazySavedTensorSpiller.pack

    def seen(self: Any, tensor: Tensor) -> Any:
        packed = pack(self, tensor)
        live.append(sum(p.bytes.untyped_storage().nbytes() for p in self._kept if isinstance(p.bytes, Tensor)))
        return packed

    monkeypatch.setattr(direct.LazySavedTensorSpiller, "pack", seen)
    with own_code(device_memory="2MiB") as pool:
        pool.run([one], on_error="return")
        device = pool.stats().devices["cpu:0"]
    assert device.bytes_out_by_kind["activations"] > 0
    assert 0 < max(live) < 2 << 20


class Late(torch.optim.Optimizer):
    """Makes state at its third step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-0.1)
                if self.steps == 3:
                    self.state[p].update({f"a{number}": torch.zeros_like(p) for number in range(3)})


def test_optimizer_state_that_is_made_at_a_later_step_is_taken_into_account(monkeypatch):
    """In the same burst, before the next step."""
    monkeypatch.setattr(burst, "BURST_SECONDS", 60.0)
    seen: list[int] = []

    def step(module: nn.Module, batch: Any) -> Tensor:
        seen.append(pool.stats().devices["cpu:0"].resident_bytes)
        return loss_of(module, batch)

    with own_code() as pool:
        pool.run(described(optimizer=Late, step=step, train=lambda: [batch_of(SMALL)] * 5))
    state = 3 * sum(p.numel() * p.element_size() for p in mlp().parameters())
    assert seen[2] + state <= seen[3] == seen[4]


def test_a_lease_has_its_workspace_again_once_the_optimizer_has_made_its_state(monkeypatch):
    monkeypatch.setattr(burst, "BURST_SECONDS", 60.0)
    found: list[bool] = []
    train = direct.WholeModelRunner.train

    def seen(self: direct.WholeModelRunner, *arguments: Any) -> Any:
        assert self._lease is not None
        found.append(self._lease._workspace_bytes >= self.workspace_bytes > 0)
        return train(self, *arguments)

    monkeypatch.setattr(direct.WholeModelRunner, "train", seen)
    with own_code() as pool:
        pool.run(described(optimizer=partial(torch.optim.Adam, lr=0.01), train=lambda: [batch_of(LARGE)] * 4))
    assert found[1:] == [True] * 3


def test_a_later_batch_of_a_step_that_does_not_fit_is_taken_back_with_those_before():
    model = partial(mlp, 12)
    one = described(model=model, train=lambda: [batch_of(rows) for rows in (8, 8, 8, 200)], accumulate=2)
    with own_code(device_memory="550KiB") as pool:
        result = pool.run(one)
    assert result.num_shards > 1
    assert not against_plain(one, result)


def _raising(error: BaseException) -> Any:
    def step(module: nn.Module, batch: Any) -> Tensor:
        raise error

    return step


class ZerosGradients(torch.optim.SGD):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none=set_to_none)


@pytest.mark.cases(1 / 3)
def test_gradients_of_zeros_that_own_code_has_left_are_not_stepped_once_the_model_is_cut():
    """The update of one shard would step the parameters of all others."""
    one = described(
        optimizer=partial(ZerosGradients, lr=0.1, momentum=0.9, weight_decay=0.1),
        train=lambda: [batch_of(300 + rows) for rows in range(4)],
    )
    with own_code(device_memory="440KiB") as pool:
        result = pool.run(one)
    assert result.num_shards > 1
    assert not against_plain(one, result)


@pytest.mark.cases(1 / 3)
def test_what_a_step_raises_is_told_as_it_is():
    errors = (StopIteration("enough"), MemoryError("my own"))
    with own_code() as pool:
        stopped, short = pool.run([described(step=_raising(error)) for error in errors], on_error="return")
    assert isinstance(stopped.error, TaskError)
    assert str(stopped.error) == "the trial's own code raised StopIteration: enough"
    assert isinstance(short.error, OutOfMemoryError)
    assert "in a step of the own code of trial" in str(short.error)
    assert "my own" in str(short.error)


def test_a_step_of_own_code_that_has_no_room_is_called_that():
    def step(module: nn.Module, batch: Any) -> Tensor:
        return loss_of(module, (batch.x, batch.y))

    one = described(step=step, train=lambda: [Unhashable(*batch_of(9000))])
    with own_code(device_memory="2MiB") as pool:
        (result,) = pool.run([one], on_error="return")
    assert isinstance(result.error, BudgetError)
    assert "the trial needs" in str(result.error)


def test_an_evaluation_that_cannot_be_cut_and_has_no_room_is_called_that():
    def evaluate(module: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": loss_of(module, (torch.from_numpy(batch[0]), torch.from_numpy(batch[1])))}

    large = [tuple(tensor.numpy() for tensor in batch_of(9000))]
    with own_code(device_memory="2MiB") as pool:
        (result,) = pool.run([described(validate=lambda: large, evaluate=evaluate)], on_error="return")
    assert isinstance(result.error, BudgetError)
    assert "the trial needs" in str(result.error)


class Padded(nn.Module):
    """A Transformer with a padding mask, which torch evaluates by way of a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        is_padding = torch.zeros(len(x), 4, dtype=torch.bool)
        is_padding[::2, 3] = True
        return self.head(self.encoder(x.view(-1, 4, 16), src_key_padding_mask=is_padding)[:, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{}, {"num_shards": 1}])
def test_a_transformer_with_a_padding_mask_is_evaluated(options):
    one = described(model=Padded, validate=lambda: [batch_of(SMALL)])
    with own_code(**options) as pool:
        assert against_plain(one, pool.submit(one).result()) == []


class CountsTrain(nn.Linear):
    """Scales by how often it was set to training."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.times = 0

    def train(self, mode: bool = True) -> nn.Module:
        self.times += mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.times)


def test_a_module_is_set_to_training_as_often_as_in_a_plain_loop():
    one = described(model=CountsTrain, validate=lambda: [batch_of(SMALL)], epochs=3)
    with own_code() as pool:
        assert against_plain(one, pool.submit(one).result()) == []


def test_pieces_are_checked_with_the_first_batch_alone():
    """Of later batches the loss need not be a mean over samples; `accumulate` makes them batches of the first step."""

    def step(module: nn.Module, batch: Any) -> Tensor:
        losses = functional.cross_entropy(module(batch[0]), batch[1], reduction="none")
        return (losses * batch[2]).sum() / batch[2].sum()

    whole, padded = torch.ones(SMALL), 1.0 / (1 + torch.arange(SMALL))
    data = [(*batch_of(SMALL), mask) for mask in (whole, padded, padded, padded)]
    one = described(step=step, train=lambda: data, accumulate=2, split_batches=2)
    with own_code() as pool:
        assert against_plain(one, pool.submit(one).result()) == []


def test_validation_data_is_drawn_without_gradients():
    def validate() -> Iterator[Any]:
        yield batch_of(LARGE if torch.is_grad_enabled() else SMALL)

    one = described(validate=validate)
    for options in ({}, {"num_shards": 1}):
        with own_code(**options) as pool:
            assert against_plain(one, pool.submit(one).result()) == []
