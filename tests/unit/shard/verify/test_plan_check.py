"""A plan whose numbers are not the eager ones is refused, and so is a model whose Python moves.

Each of these would give wrong numbers without an error: the graph repeats for ever what the capture saw.
"""

import copy
import dataclasses
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.nn import functional

from hydra_tune.errors import CaptureError
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.cost.activation_policy import ActivationBudget, keeping
from hydra_tune.shard.verify.plan_check import verify
from tests.parity.models import MODELS, build
from tests.unit.shard.bench import analysed, bench, parity_bench, seeded, task_of

CALLS = {"count": 0}


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Counter(Base):
    calls = 0

    def middle(self, x):
        self.calls += 1
        return x


class UsedCounter(Base):
    """Counts in a list, as nobody can see who looks at numbers and texts only."""

    def __init__(self):
        super().__init__()
        self.calls = [0]

    def middle(self, x):
        self.calls[0] += 1
        return x * self.calls[0]


class GlobalCounter(Base):
    def middle(self, x):
        CALLS["count"] += 1
        return x * CALLS["count"]


class PythonRandom(Base):
    def middle(self, x):
        return x if random.random() < 0.5 else x * 2


class OwnRandom(Base):
    def __init__(self):
        super().__init__()
        self.random = random.Random(0)

    def middle(self, x):
        return x * self.random.random()


class NumpyRandom(Base):
    def middle(self, x):
        return x * float(np.random.rand())  # noqa: NPY002 - what is refused


class OwnNumpyRandom(Base):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(0)

    def middle(self, x):
        return x * float(self.random.random())


class PlainTensor(Base):
    """A tensor that is not registered, overwritten by the forward."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(())

    def middle(self, x):
        self.scale.mul_(2)
        return x * self.scale


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def unseen(function, *arguments):
    """Call a Function as no capture notices."""
    return super(_SingleLevelFunction, function).apply(*arguments)


class Custom(Base):
    def middle(self, x):
        return unseen(StraightThrough, x)


class Hooked(Base):
    def middle(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return x


class SparingFunction(torch.autograd.Function):
    """Its backward is that of its forward, until a gradient is large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (gradient.abs() < 1e6)


class SparingCustom(Base):
    """No operator of the backward is missing in the graph, and on this batch no gradient differs."""

    def middle(self, x):
        return unseen(SparingFunction, x * (x.abs() < 1e6))


class SparingHook(Base):
    def middle(self, x):
        x = x * (x.abs() < 1e6)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * (gradient.abs() < 1e6))
        return x


class AsksForGradients(Base):
    def middle(self, x):
        (slope,) = torch.autograd.grad((x**2).sum(), x, create_graph=True)
        return x + slope


TRAPS = (
    Counter,
    UsedCounter,
    GlobalCounter,
    PythonRandom,
    OwnRandom,
    NumpyRandom,
    OwnNumpyRandom,
    PlainTensor,
    Custom,
    SparingCustom,
    Hooked,
    SparingHook,
)


def check(made, plan):
    return verify(made.task, made.model, plan, made.batch)[0]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_model_that_a_graph_cannot_follow_is_refused(trap):
    model = trap()

    def capture_and_verify():
        """Each on a copy of its own, as the library does it."""
        made = bench(task_of(copy.deepcopy(model)))
        verify(made.task, copy.deepcopy(model), made.plan(), made.batch)

    with pytest.raises(CaptureError):
        capture_and_verify()


@pytest.mark.parametrize(
    ("trap", "message"),
    [
        (Counter, "the step changes module.calls"),
        (PythonRandom, "draws from Python's `random` in its forward"),
        (NumpyRandom, "draws from numpy.random in its forward"),
        (Custom, "gives other gradients than the eager step"),
        (SparingCustom, "runs a torch.autograd.Function of its own: SparingFunction"),
    ],
)
def test_the_message_says_what_the_model_does(trap, message):
    made = bench(task_of(trap()))
    with pytest.raises(CaptureError, match=message):
        check(made, made.plan())


def test_a_count_in_the_backward_is_put_back():
    """A capture runs the forward alone, so the check is the first to see the count."""

    class Counts(Base):
        def middle(self, x):
            def count(*gradients):
                CALLS["count"] += 1

            if x.grad_fn is not None:
                x.grad_fn.register_hook(count)
            return x

    made, before = bench(task_of(Counts())), CALLS["count"]
    with pytest.raises(CaptureError, match="the step changes"):
        check(made, made.plan(*made.spread(2)))
    assert CALLS["count"] == before


def test_gradients_asked_for_inside_the_forward_are_never_silently_wrong():
    try:
        made = bench(task_of(AsksForGradients()))
        check(made, made.plan())
    except CaptureError:
        return
    loss = made.task.loss(made.model(made.inputs[0]), made.inputs[1])
    state = [made.state[name] for name in made.captured.state.values()]
    inputs = [made.inputs[i] for i in made.captured.inputs.values()]
    assert made.captured.module(*state, *inputs)[0].equal(loss)


@pytest.mark.parametrize("num_shards", [1, 2, 6])
@pytest.mark.parametrize("name", MODELS)
def test_a_right_plan_passes_and_times_its_units(name, num_shards):
    made = parity_bench(name)
    state = torch.get_rng_state()
    seconds = check(made, made.plan(*made.spread(num_shards)))
    assert torch.get_rng_state().equal(state)
    assert [s > 0 for s in seconds.forward] == [True] * (num_shards - 1) + [False]
    assert all(s > 0 for s in seconds.backward)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_that_keeps_activations_passes_beside_the_one_that_does_not(name):
    made = parity_bench(name)
    plan = made.plan(*made.spread(3))
    kept = keeping(plan, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40))
    state = torch.get_rng_state()
    _, seconds = verify(made.task, made.model, plan, made.batch, kept=kept)
    assert seconds is not None
    assert all(s > 0 for s in (*seconds.forward[:-1], *seconds.backward))
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("needs_both", [True, False])
@pytest.mark.parametrize("wrong", ["raises", "differs"])
def test_a_graph_that_keeping_makes_wrong_is_not_kept(wrong, needs_both):
    made = parity_bench("mlp")
    plan = made.plan(*made.spread(3))
    kept = keeping(plan, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40))
    first = kept.shards[0]

    def module(*arguments):
        if wrong == "raises":
            raise RuntimeError
        return tuple(value * (1 + 1e-6) for value in first.graph.module(*arguments))

    broken = dataclasses.replace(first, graph=dataclasses.replace(first.graph, module=module))
    other = dataclasses.replace(kept, shards=(broken, *kept.shards[1:]))
    seconds, none = verify(made.task, made.model, plan, made.batch, kept=other, needs_both=needs_both)
    assert all(s > 0 for s in seconds.backward)
    assert none is None


@pytest.mark.parametrize("wrong", [False, True])
def test_a_plan_that_keeps_activations_is_checked_alone(wrong):
    made = parity_bench("mlp") if not wrong else bench(build("mlp"))
    plan = patch(made, "aten.dropout.default", 1, 0.25) if wrong else made.plan(*made.spread(3))
    kept = keeping(plan, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40))
    assert kept is not plan
    if wrong:
        with pytest.raises(CaptureError, match="other results"):
            verify(made.task, made.model, plan, made.batch, kept=kept, needs_both=False)
    else:
        none, seconds = verify(made.task, made.model, plan, made.batch, kept=kept, needs_both=False)
        assert none is None
        assert all(s > 0 for s in (*seconds.forward[:-1], *seconds.backward))


def test_a_right_evaluation_passes():
    made = bench(build("cnn"), mode="evaluate")
    seconds = check(made, made.plan(*made.spread(3)))
    assert all(s > 0 for s in seconds.forward)
    assert seconds.backward == (0, 0, 0)


def patch(made, operator, argument, value):
    """Change one constant of the captured graph before it is analysed and cut."""
    node = made.captured.nodes[made.position(operator)]
    assert node.args[argument] != value
    node.update_arg(argument, value)
    made = analysed(made.task, made.model, made.batch, made.captured)
    return made.plan(*made.spread(2))


@pytest.mark.parametrize(
    ("name", "operator", "argument", "value", "message"),
    [
        ("vit", "aten.layer_norm.default", 4, 1e-3, "other results than the eager step: 'loss' differs"),
        ("mlp", "aten.dropout.default", 1, 0.25, "other results"),
        ("mlp", "aten.dropout.default", 2, False, "other results|other random numbers"),
        ("cnn", "aten.batch_norm.default", 6, 0.2, "other buffers than the eager step: 'norms.0.running_"),
    ],
)
def test_a_graph_with_one_wrong_constant_is_caught(name, operator, argument, value, message):
    torch.manual_seed(0)  # of some weights, a loss has the same bits, and only gradients differ
    made = bench(build(name))
    with pytest.raises(CaptureError, match=message):
        check(made, patch(made, operator, argument, value))


def test_attention_may_be_causal_by_a_mask_in_the_graph_and_by_a_flag_in_the_eager_step():
    class Attention(Base):
        def middle(self, x):
            capturing = torch.compiler.is_compiling()
            mask = torch.arange(4)[:, None] >= torch.arange(4) if capturing else None
            q = x[None]
            return functional.scaled_dot_product_attention(q, q, q, mask, 0.2, is_causal=not capturing)[0]

    made = bench(task_of(Attention()))
    check(made, made.plan(*made.spread(2)))


def test_a_graph_that_draws_too_much_is_caught_though_its_loss_is_right():
    made = bench(task_of(nn.Linear(8, 8)))
    graph = made.captured.module.graph
    with graph.inserting_before(made.captured.nodes[1]):
        graph.call_function(torch.ops.aten.rand.default, ([1],))
    made = analysed(made.task, made.model, made.batch, made.captured)
    with pytest.raises(CaptureError, match="other random numbers"):
        check(made, made.plan())


def test_a_graph_that_loses_a_gradient_is_caught_though_its_loss_is_right():
    made = bench(task_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))))
    graph = made.captured.module.graph
    first, second = made.captured.nodes[:2]
    with graph.inserting_before(second):
        detached = graph.call_function(torch.ops.aten.detach.default, (first,))
        second.replace_input_with(first, detached)
    made = analysed(made.task, made.model, made.batch, made.captured)
    with pytest.raises(CaptureError, match=r"other gradients than the eager step: 0\.bias, 0\.weight"):
        check(made, made.plan())


def test_a_shard_cut_at_a_forbidden_place_is_caught():
    """The value that crosses is overwritten through a view of it in the later shard."""

    class Aliasing(Base):
        def middle(self, x):
            half = x[:, :4]
            y = x * 1
            half.mul_(3)
            return x + y

    made = bench(task_of(Aliasing()))
    forbidden = made.position("aten.mul_.Tensor")
    assert forbidden not in made.analysis.cuts
    check(made, made.plan(*made.analysis.cuts))
    with pytest.raises((CaptureError, RuntimeError)):
        check(made, made.plan(forbidden))


def test_an_attribute_that_is_not_a_number_is_not_a_change():
    class Nan(Base):
        best = 0.0

        def __init__(self):
            super().__init__()
            self.best = float("nan")

        def middle(self, x):
            return x

    made = bench(task_of(Nan()))
    check(made, made.plan())


def test_the_batch_and_the_streams_are_left_alone():
    made = bench(build("mlp"))
    before = [tensor.clone() for tensor in made.inputs]
    with seeded(1):
        state = torch.get_rng_state()
        check(made, made.plan(*made.spread(3)))
        assert torch.get_rng_state().equal(state)
    assert all(a.equal(b) for a, b in zip(before, made.inputs, strict=True))


def test_bits_are_compared_and_not_values():
    zero = torch.zeros(3)
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, -zero)
    assert same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero[:2])
    assert same_bits(torch.arange(6.0).view(2, 3).t(), torch.arange(6.0).view(2, 3).t().contiguous())
    assert not same_bits(torch.ones(1), torch.nextafter(torch.ones(1), torch.full((1,), 2.0)))
