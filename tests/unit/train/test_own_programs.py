"""Own code of kinds that following a step could disturb: compiled modules, transforms of `torch.func`, sparse gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from hydra_tune import TrainTask
from hydra_tune.errors import TaskError
from tests.unit.pool.tasks import against_plain, running

pytestmark = pytest.mark.timeout(120)

_GENERATOR = torch.Generator().manual_seed(4)
X = torch.randn(64, 16, generator=_GENERATOR)
Y = torch.randint(4, (64,), generator=_GENERATOR)
WORDS = torch.randint(50, (64, 5), generator=_GENERATOR)


def own_code(**options: Any) -> Any:
    return running(**({"num_shards": None} | options))


def described(**changes: Any) -> TrainTask:
    arguments: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "train": lambda: list(zip(X.split(16), Y.split(16), strict=True)),
        "step": lambda module, batch: functional.cross_entropy(module(batch[0]), batch[1]),
        "epochs": 2,
    }
    return TrainTask(**(arguments | changes))


def trained_as_plain(one: TrainTask, **options: Any) -> Any:
    with own_code(**options) as pool:
        result = pool.run(one)
    assert result.num_shards == 1
    assert not against_plain(one, result)
    return result


@pytest.mark.parametrize("what", ["module", "part", "step"])
def test_what_the_user_has_compiled_runs_compiled(what):
    """From the first step on, with the numbers of the compiled code, which differ from those of the code itself here."""
    calls = []

    def backend(graph: Any, examples: Any) -> Any:
        def run(*arguments: Any) -> Any:
            calls.append(1)
            return [
                1.01 * out if isinstance(out, Tensor) and out.is_floating_point() else out for out in graph(*arguments)
            ]

        return run

    def model() -> nn.Module:
        torch._dynamo.reset()
        calls.clear()
        module = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        if what == "part":
            module[0] = torch.compile(module[0], backend=backend)
        return torch.compile(module, backend=backend) if what == "module" else module

    def loss(module: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(module(batch[0]), batch[1])

    compiled = torch.compile(loss, backend=backend) if what == "step" else loss
    one = described(model=model, step=compiled)
    with own_code() as pool:
        result = pool.run(one)
    assert len(calls) == 8
    assert not against_plain(one, result)
    assert len(calls) == 8


def _with_gradient_norm(module: nn.Module, batch: Any) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1  # once for each step, or the numbers differ

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(functional_call(module, parameters, (batch[0],)), batch[1])

    parameters = dict(module.named_parameters())
    squares = sum((value**2).sum() for value in grad(loss)(parameters).values())
    return loss(parameters) + 0.01 * module.calls * squares


def _by_sample(module: nn.Module, batch: Any) -> Tensor:
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(module, parameters, (x[None],)), y[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, *batch)
    norms = sum(value.flatten(1).pow(2).sum(1) for value in gradients.values())
    return (functional.cross_entropy(module(batch[0]), batch[1], reduction="none") / (1 + norms)).mean()


def _with_jacobian(module: nn.Module, batch: Any) -> Tensor:
    values = torch.func.jacrev(module)(batch[0][0])
    return functional.cross_entropy(module(batch[0]), batch[1]) + 1e-2 * values.pow(2).mean()


@pytest.mark.parametrize("step", [_with_gradient_norm, _by_sample, _with_jacobian])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_of_torch_func(step, precision):
    trained_as_plain(described(step=step, precision=precision))


def test_hooks_of_the_users_own_are_refused_by_torch_func_as_in_a_plain_loop():
    def step(module: nn.Module, batch: Any) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return _with_gradient_norm(module, batch)

    with own_code() as pool:
        (result,) = pool.run([described(step=step)], on_error="return")
    assert "don't yet support saved tensor hooks" in str(result.error)
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()


class Words(nn.Module):
    def __init__(self, *, has_head: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, sparse=True)
        self.head = nn.Linear(16, 4) if has_head else None

    def forward(self, x: Tensor) -> Tensor:
        mean = self.table(x).mean(1)
        return mean[:, :4] if self.head is None else self.head(mean)


class Multiplies(nn.Linear):
    """Multiplies a sparse batch, or a batch by a sparse tensor, and autograd saves the sparse one."""

    def __init__(self, graph: Tensor | None) -> None:
        super().__init__(16, 4)
        self.graph = graph

    def forward(self, x: Tensor) -> Tensor:
        if self.graph is None:
            return torch.sparse.mm(x, self.weight.T)
        return torch.sparse.mm(self.graph, super().forward(x))


@pytest.mark.filterwarnings("ignore:Sparse (invariant checks|CSR tensor support|CSC tensor support):UserWarning")
@pytest.mark.parametrize("is_of_batch", [True, False])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_that_autograd_saves(layout, is_of_batch):
    rows = X[:16].relu()
    graph = None if is_of_batch else rows @ rows.T
    train = [(rows.to_sparse(layout=layout) if is_of_batch else rows, Y[:16])]
    model = partial(Multiplies, graph if graph is None else graph.to_sparse(layout=layout))
    trained_as_plain(described(model=model, train=lambda: train))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(
    ("has_head", "optimizer"),
    [
        (True, partial(torch.optim.SGD, lr=0.1)),
        (True, partial(torch.optim.Adagrad, lr=0.1)),
        (False, partial(torch.optim.SparseAdam, lr=0.1)),
    ],
)
def test_sparse_gradients(has_head, optimizer):
    train = lambda: list(zip(WORDS.split(16), Y.split(16), strict=True))  # noqa: E731
    trained_as_plain(described(model=partial(Words, has_head=has_head), optimizer=optimizer, train=train))


def test_sparse_gradients_of_a_trial_that_has_to_be_cut_are_refused_by_name():
    train = lambda: list(zip(WORDS.split(16), Y.split(16), strict=True))  # noqa: E731
    one = described(model=partial(Words, has_head=True), train=train)
    with own_code(num_shards=2) as pool:
        (result,) = pool.run([one], on_error="return")
    assert isinstance(result.error, TaskError)
    assert "sparse" in str(result.error)
