"""Each random operator against its stand-in: the same values, gradients, layout and stream, from another generator."""

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

from hydra_tune.devices.cpu import drawing_from
from hydra_tune.shard.draws import DrawFinder, Draws
from hydra_tune.shard.pilot import StorageTracker
from hydra_tune.shard.verify import same_bits, verify
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


def stand_in(target: Any, tensors: list[Tensor], others: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """A graph of one operator, its stand-in in its place."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    given = {key: inputs[value] if key == "attn_mask" else value for key, value in kwargs.items()}
    positional = inputs[:-1] if "attn_mask" in kwargs else inputs
    node = graph.call_function(target, (*positional, *others), given)
    graph.output(node)
    mode, draws = FakeTensorMode(), Draws()
    leaves = [mode.from_tensor(t.detach()).requires_grad_(t.requires_grad) for t in tensors]
    with mode:
        DrawFinder(fx.GraphModule({}, graph), draws).run(*[_own(leaf, target) for leaf in leaves])
    assert draws.cover(list(graph.nodes))
    replaced = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for n in graph.nodes:
        copies[n] = draws.copy(replaced, n, copies)
    return fx.GraphModule(draws.attributes(list(graph.nodes)), replaced)


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
    """The operator from the default generator, and its stand-in from another, give and leave the same."""
    module = stand_in(target, tensors, others, kwargs)

    def plain(*given: Tensor) -> Tensor:
        named = {key: given[value] if key == "attn_mask" else value for key, value in kwargs.items()}
        return target(*(given[:-1] if "attn_mask" in kwargs else given), *others, **named)

    with seeded(3):
        expected = outcome(plain, target, tensors, torch.get_rng_state)
        twice = plain(*[_own(t, target) for t in tensors])
    with seeded(3):
        fallback = outcome(module, target, tensors, torch.get_rng_state)
    with seeded(5):
        generator, before = torch.Generator().manual_seed(3), torch.get_rng_state()
        with drawing_from(generator):
            found = outcome(module, target, tensors, generator.get_state)
            again = module(*[_own(t, target) for t in tensors])
        assert torch.equal(torch.get_rng_state(), before), "drew from the default generator"
    for other in (found, fallback):
        assert same_bits(expected.value, other.value)
        assert expected.value.stride() == other.value.stride()
        assert torch.equal(expected.stream, other.stream)
        assert expected.operators == other.operators
        for a, b in zip(expected.gradients, other.gradients, strict=True):
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


@pytest.mark.parametrize("others", [(0.0, True), (0.5, False)])
def test_a_dropout_that_drops_nothing_stays_what_it_is(others):
    graph = fx.Graph()
    graph.output(graph.call_function(aten.dropout.default, (graph.placeholder("x"), *others)))
    draws = Draws()
    with FakeTensorMode() as mode:
        DrawFinder(fx.GraphModule({}, graph), draws).run(mode.from_tensor(torch.ones(3)))
    assert not draws.operators
    assert draws.cover(list(graph.nodes))


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
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives(name):
    target, tensors, others, kwargs = PRIMITIVES[name]
    assert_alike(target, tensors, others, **kwargs)


def test_a_stand_in_needs_no_more_memory_than_the_operator_that_the_pilot_measures():
    q, k, v = (values(2, 4, 64, 16) for _ in range(3))
    target, options = aten.scaled_dot_product_attention.default, {"dropout_p": 0.2, "is_causal": True}
    module = stand_in(target, [q, k, v], (), options)
    measured, real = StorageTracker(64), StorageTracker(64)
    with FakeTensorMode():
        fakes = [torch.empty(t.shape, requires_grad=True) for t in (q, k, v)]
        measured.know(*fakes)
        with measured:
            target(*fakes, **options).sum().backward()
    real.know(q, k, v)
    with drawing_from(torch.Generator()), real:
        module(q, k, v).sum().backward()
    assert 0.9 * measured.peak_bytes < real.peak_bytes <= measured.peak_bytes


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


def recorded(made: Bench) -> list[bool]:
    """Which of the shards that draw do it on their own; the plan's numbers and its stream are the eager ones."""
    plan = made.plan(*made.spread(3))
    assert any(shard.graph.stochastic for shard in plan.shards)
    verify(made.task, made.model, plan, made.batch)
    return [shard.graph.own_draws for shard in plan.shards if shard.graph.stochastic]


@pytest.mark.parametrize(
    "middle",
    [
        noise,
        lower(torch.bfloat16),
        lower(torch.float16),
        twice_over,
        attention_of_one_tensor,
        again,
        lambda self, x: functional.gumbel_softmax(functional.rrelu(x, training=True)),
        lambda self, x: functional.dropout2d(x[None, None], 0.3, inplace=True)[0, 0],
        lambda self, x: x[torch.randperm(4)] + torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    ],
)
def test_whole_models_draw_on_their_own_and_as_the_eager_step_does(middle):
    made = bench(task_of(Net(middle)))
    assert all(recorded(made))


@pytest.mark.parametrize("name", ["mlp", "gpt2", "gpt2_attention", "gpt2_bfloat16", "cnn_dropout"])
def test_the_parity_models_draw_on_their_own(name):
    assert all(recorded(bench(build(name))))


def test_evaluation_may_draw_too():
    made = bench(task_of(Net(lambda self, x: functional.dropout(x, 0.3, training=True))), mode="evaluate")
    assert all(recorded(made))


@pytest.mark.parametrize(
    "middle",
    [
        lambda self, x: torch.native_dropout(x, 0.3, True)[0],
        lambda self, x: self.lstm(x[None])[0][0],
        lambda self, x: half_recorded(x),
    ],
)
def test_what_cannot_be_recorded_draws_from_the_default_generator(middle):
    made = bench(task_of(Net(middle)))
    assert recorded(made) == [False]


def half_recorded(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.native_dropout(torch.rand_like(x), 0.3, True)[0]
    return x * gate


def test_shards_of_both_kinds_share_one_stream():
    def middle(self: nn.Module, x: Tensor) -> Tensor:
        x = self.extra(torch.native_dropout(functional.dropout(x, 0.3), 0.3, True)[0])
        return functional.dropout(x, 0.3)

    made = bench(task_of(Net(middle)))
    _, native, last = sorted(made.analysis.stochastic)
    plan = made.plan(native, last)
    assert [shard.graph.own_draws for shard in plan.shards] == [True, False, True]
    verify(made.task, made.model, plan, made.batch)
