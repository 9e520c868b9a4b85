"""Each random operator, from a generator of the thread's own: the same values, gradients, layout and stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.shard.analysis.rng_consumption import CountedRandomOpFinder, CountedRandomOps
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.verify.plan_check import verify
from tests.parity.models import build
from tests.unit.shard.bench import Bench, bench, seeded, task_of

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run of an operator gives and leaves."""

    value: Tensor
    gradients: list[Tensor | None]
    stream: Tensor
    operators: list[str]


class Operators(TorchDispatchMode):
    """The operators that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A random operator and its overload that takes a generator count as one.
        name = func._schema.name if torch.Tag.nondeterministic_seeded in func.tags else str(func)
        if func.namespace != "prim" and name != "aten.detach.default":
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def is_counted(target: Any, tensors: list[Tensor], others: tuple[Any, ...] = ()) -> bool:
    """Whether a graph of one operator is found to move the generator by as much at each run."""
    graph = fx.Graph()
    graph.output(graph.call_function(target, (*[graph.placeholder(f"x{i}") for i in range(len(tensors))], *others)))
    mode, draws = FakeTensorMode(), CountedRandomOps()
    fakes = [mode.from_tensor(t.detach()) for t in tensors]
    with mode:
        CountedRandomOpFinder(fx.GraphModule({}, graph), draws).run(*fakes)
    return draws.are_counted(list(graph.nodes))


def _own(leaf: Tensor, target: Any) -> Tensor:
    """What an operator in place may change."""
    return leaf * 1 if target._schema.is_mutable else leaf


def outcome(run: Callable[..., Tensor], target: Any, tensors: list[Tensor], stream: Callable[[], Tensor]) -> Outcome:
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    with Operators() as operators:
        value = run(*[_own(leaf, target) for leaf in leaves])
        state = stream()
        if value.requires_grad:
            torch.autograd.backward(value, torch.linspace(-1, 1, value.numel()).reshape(value.shape).to(value.dtype))
    return Outcome(
        value=value.detach(), gradients=[leaf.grad for leaf in leaves], stream=state, operators=operators.seen
    )


def assert_alike(target: Any, tensors: list[Tensor], others: tuple[Any, ...] = (), **kwargs: Any) -> None:
    """The operator from the default generator, and from the thread's own, gives and leaves the same."""

    def plain(*given: Tensor) -> Tensor:
        named = {key: given[value] if key == "attn_mask" else value for key, value in kwargs.items()}
        return target(*(given[:-1] if "attn_mask" in kwargs else given), *others, **named)

    with seeded(3):
        expected = outcome(plain, target, tensors, torch.get_rng_state)
        twice = plain(*[_own(t, target) for t in tensors])
    with seeded(5):
        generator, before = torch.Generator().manual_seed(3), torch.get_rng_state()
        with drawing_from(generator):
            found = outcome(plain, target, tensors, torch.get_rng_state)
            again = plain(*[_own(t, target) for t in tensors])
        assert torch.equal(torch.get_rng_state(), before), "drew from the default generator"
    assert same_bits(expected.value, found.value)
    assert expected.value.stride() == found.value.stride()
    assert torch.equal(expected.stream, found.stream)
    assert expected.operators == found.operators
    for a, b in zip(expected.gradients, found.gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (same_bits(a, b) and a.stride() == b.stride())
    assert same_bits(twice.detach(), again.detach()), "the stream does not go on alike"


def values(*shape: int, dtype: torch.dtype = torch.float32, gradients: bool = True) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return tensor.requires_grad_(gradients)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: values(3, 4, 5, 6),
    "frozen": lambda: values(3, 4, 5, 6, gradients=False),
    "bfloat16": lambda: values(3, 4, 5, 6, dtype=torch.bfloat16),
    "float16": lambda: values(3, 4, 5, 6, dtype=torch.float16),
    "float64": lambda: values(3, 4, 5, 6, dtype=torch.float64),
    "channels_last": lambda: values(3, 4, 5, 6).detach().to(memory_format=torch.channels_last).requires_grad_(),
    "transposed": lambda: values(6, 5, 4, 3).detach().transpose(0, 3).requires_grad_(),
    "strided": values(3, 4, 5, 12).detach()[..., ::2].requires_grad_,
    "empty": lambda: values(0, 4, 5, 6),
    "large": lambda: values(3, 40, 50, 6),
}
DROPOUTS = [
    getattr(aten, name + inplace).default
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    for inplace in ("", "_")
]


@pytest.mark.parametrize("target", DROPOUTS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropouts(target, layout):
    assert_alike(target, [LAYOUTS[layout]()], (0.3, True))


@pytest.mark.parametrize("target", DROPOUTS, ids=str)
@pytest.mark.parametrize("p", [0.5, 1.0, 1e-3])
def test_dropouts_at_the_ends_of_their_range(target, p):
    assert_alike(target, [values(3, 4, 5)], (p, True))


@pytest.mark.parametrize("others", [(0.0, True), (0.5, False), (0.5, True)])
def test_dropouts_are_counted(others):
    assert all(is_counted(target, [values(3, 4)], others) for target in DROPOUTS)


def test_what_draws_until_a_number_pleases_it_is_not_counted():
    assert not is_counted(aten.randn_like.default, [values(3)])
    assert not is_counted(aten.poisson.default, [values(3, gradients=False).abs()])
    assert not is_counted(aten.native_dropout.default, [values(3)], (0.5, True)), (
        "fake tensors do not show what it runs"
    )


HEADS = (2, 4, 6, 8)  # batch, heads, tokens, width
ATTENTION: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "plain": ([HEADS] * 3, {}),
    "causal": ([HEADS] * 3, {"is_causal": True}),
    "scaled": ([HEADS] * 3, {"scale": 0.3}),
    "mask": ([*[HEADS] * 3, (6, 6)], {"attn_mask": 3}),
    "mask_by_batch": ([*[HEADS] * 3, (2, 1, 6, 6)], {"attn_mask": 3, "scale": 2.0}),
    "grouped": ([HEADS, (2, 2, 6, 8), (2, 2, 6, 8)], {"enable_gqa": True}),
    "grouped_causal": ([HEADS, (2, 2, 6, 8), (2, 2, 6, 8)], {"enable_gqa": True, "is_causal": True}),
    "across": ([(2, 4, 5, 8), HEADS, (2, 4, 6, 3)], {}),
    "three_dimensions": ([HEADS[1:]] * 3, {"is_causal": True}),
    "dropping_all": ([HEADS] * 3, {"dropout_p": 1.0}),
    "no_tokens": ([(2, 4, 0, 8)] * 3, {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case, dtype):
    shapes, options = ATTENTION[case]
    tensors = [values(*shape, dtype=dtype) for shape in shapes]
    assert_alike(aten.scaled_dot_product_attention.default, tensors, **({"dropout_p": 0.2} | options))


def test_attention_with_a_mask_of_truths():
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[2] = False  # a row that attends to nothing
    tensors = [*[values(*HEADS) for _ in range(3)], mask]
    assert_alike(aten.scaled_dot_product_attention.default, tensors, attn_mask=3, dropout_p=0.2)


def test_attention_of_transposed_heads():
    q, k, v = (values(2, 6, 4, 8).detach().transpose(1, 2).requires_grad_() for _ in range(3))
    assert_alike(aten.scaled_dot_product_attention.default, [q, k, v], dropout_p=0.2, is_causal=True)


PRIMITIVES: dict[str, tuple[Any, list[Tensor], tuple[Any, ...], dict[str, Any]]] = {
    "bernoulli": (aten.bernoulli.default, [torch.full((3, 4), 0.3)], (), {}),
    "bernoulli.p": (aten.bernoulli.p, [values(3, 4, gradients=False)], (0.3,), {}),
    "bernoulli_": (aten.bernoulli_.float, [values(3, 4)], (0.3,), {}),
    "bernoulli_.Tensor": (aten.bernoulli_.Tensor, [values(3, 4), torch.full((3, 4), 0.3)], (), {}),
    "rand": (aten.rand.default, [], ([3, 40],), {"dtype": torch.float64}),
    "randn": (aten.randn.default, [], ([3, 5],), {}),
    "randn_odd": (aten.randn.default, [], ([3],), {"dtype": torch.bfloat16}),
    "rand_like": (aten.rand_like.default, [values(3, 4)], (), {"dtype": torch.float64}),
    "randn_like": (aten.randn_like.default, [values(6, 4).detach().t()], (), {}),
    "randint": (aten.randint.default, [], (9, [3, 4]), {}),
    "randint.low": (aten.randint.low, [], (2, 9, [3, 4]), {"dtype": torch.int32}),
    "randint_like": (aten.randint_like.default, [values(3, 4, gradients=False)], (9,), {}),
    "randint_like.low": (aten.randint_like.low_dtype, [values(3, 4, gradients=False)], (2, 9), {}),
    "randperm": (aten.randperm.default, [], (17,), {}),
    "multinomial": (aten.multinomial.default, [torch.full((3, 4), 0.3)], (2,), {}),
    "multinomial_again": (aten.multinomial.default, [torch.full((3, 4), 0.3)], (9, True), {}),
    "normal": (aten.normal.float_float, [], (1.0, 2.0, [3, 5]), {}),
    "normal.Tensor_float": (aten.normal.Tensor_float, [values(3, 4, gradients=False)], (2.0,), {}),
    "normal.Tensor_Tensor": (aten.normal.Tensor_Tensor, [values(3, 4, gradients=False), torch.ones(3, 4)], (), {}),
    "normal_": (aten.normal_.default, [values(3, 4)], (1.0, 2.0), {}),
    "uniform_": (aten.uniform_.default, [values(3, 4)], (-1.0, 2.0), {}),
    "exponential_": (aten.exponential_.default, [values(3, 4)], (), {}),
    "log_normal_": (aten.log_normal_.default, [values(3, 4)], (), {}),
    "geometric_": (aten.geometric_.default, [values(3, 4)], (0.3,), {}),
    "random_": (aten.random_.to, [values(3, 4)], (9,), {}),
    "poisson": (aten.poisson.default, [values(3, 4, gradients=False).abs()], (), {}),
    "rrelu": (aten.rrelu.default, [values(3, 4)], (0.1, 0.3, True), {}),
    "rrelu_": (aten.rrelu_.default, [values(3, 4)], (0.1, 0.3, True), {}),
    "gamma": (aten._standard_gamma.default, [values(3, 4, gradients=False).abs()], (), {}),
    "dirichlet": (aten._sample_dirichlet.default, [values(3, 4, gradients=False).abs()], (), {}),
    "binomial": (aten.binomial.default, [torch.full((3, 4), 9.0), torch.full((3, 4), 0.3)], (), {}),
    "cauchy_": (aten.cauchy_.default, [values(3, 4)], (), {}),
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives(name):
    target, tensors, others, kwargs = PRIMITIVES[name]
    assert_alike(target, tensors, others, **kwargs)


class Net(nn.Module):
    """A function between two linear layers."""

    def __init__(self, middle: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.extra = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x)))


def attend(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3)[0]


def noise(self: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.rand(8) + torch.rand_like(x)
    return x * scale


def lower(dtype: torch.dtype) -> Callable[[nn.Module, Tensor], Tensor]:
    def region(self: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return attend(functional.dropout(self.extra(x), 0.3)).float()

    return region


def twice_over(self: nn.Module, x: Tensor) -> Tensor:
    """A region within another."""
    with torch.no_grad():
        gate = attend(x)
        with torch.enable_grad():
            x = functional.dropout(x, 0.3)
        gate = gate + torch.randn_like(gate)
    return x * gate


def attention_of_one_tensor(self: nn.Module, x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.3)[0]


def again(self: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: functional.dropout(self.extra(y), 0.3), x, use_reentrant=False)


def assert_drawn_apart(made: Bench) -> None:
    """A plan's numbers and its stream are the eager ones, and nothing comes near the default generator."""
    plan = made.plan(*made.spread(3))
    assert any(shard.graph.stochastic for shard in plan.shards)
    verify(made.task, made.model, plan, made.batch)
    before = torch.get_rng_state()
    with drawing_from(torch.Generator().manual_seed(1)):
        verify(made.task, made.model, plan, made.batch)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "middle",
    [
        noise,
        lower(torch.bfloat16),
        lower(torch.float16),
        twice_over,
        attention_of_one_tensor,
        again,
        lambda self, x: torch.native_dropout(x, 0.3, True)[0],
        lambda self, x: self.lstm(x[None])[0][0],
        lambda self, x: gated(x),
        lambda self, x: functional.gumbel_softmax(functional.rrelu(x, training=True)),
        lambda self, x: functional.dropout2d(x[None, None], 0.3, inplace=True)[0, 0],
        lambda self, x: x[torch.randperm(4)] + torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    ],
)
def test_whole_models_draw_on_their_own_and_as_the_eager_step_does(middle):
    assert_drawn_apart(bench(task_of(Net(middle))))


@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "gpt2_attention", "cnn_dropout"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gpt2_bfloat16")),
    ],
)
def test_the_parity_models_draw_on_their_own(name):
    assert_drawn_apart(bench(build(name)))


def test_evaluation_may_draw_too():
    made = bench(task_of(Net(lambda self, x: functional.dropout(x, 0.3, training=True))), mode="evaluate")
    assert_drawn_apart(made)


def gated(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.native_dropout(torch.rand_like(x), 0.3, True)[0]
    return x * gate
