"""Stacked operators compute in the precision that autocast gives each member's operator, node by node."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydra_tune.batched.batched_random import GroupGenerator
from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.fusion.batching.batched_graph import StackedGraph
from hydra_tune.fusion.batching.rnn_rules import RECURRENT
from hydra_tune.fusion.batching.stacked_autocast import prepared
from hydra_tune.fusion.compile.batched_plan import SummedLosses, stacked_plan, trace_step
from hydra_tune.shard.analysis.random_ops import draws_random_numbers
from hydra_tune.shard.capture.precision import autocast, share_casts
from hydra_tune.shard.capture.step_capture import capture, state_specs
from hydra_tune.shard.execute import compute
from hydra_tune.shard.execute.compute import ShardOperands
from tests.parity.registry import ENTRIES, Spec, build
from tests.parity.test_fusion import in_float64
from tests.support.kernels import has_lstm_in
from tests.unit.shard.bench import analysed, first_batch, seeded, task_of

aten: Any = torch.ops.aten
MEMBERS = 3
LOW = ("bfloat16", "float16")
WHOLE = {  # of these there is no graph, or only with answers to questions about the batch
    *("branching", "value_loop", "random_depth", "numpy_noise", "counter", "custom_function", "hooked"),
    *("checkpointed_reentrant", "gradient_penalty", "asks_batch", "transformer_asks"),
}
NEVER = {
    ("moving_average", "bfloat16"),
    ("moving_average", "float16"),
    ("normalizations", "float16"),
    *(("lstm", precision) for precision in LOW if not has_lstm_in(precision)),
}
FAST = ("mlp", "cnn", "gpt2", "lstm")


def made_in(task, precision, mode="train"):
    """A step, captured in a precision."""
    task = replace(task, precision=precision)
    with seeded(0):
        model = task.model()
    batch = first_batch(task)
    with autocast(precision):
        captured = capture(task, model, batch, mode)
    share_casts(captured, state_specs(model), precision)
    return analysed(task, model, batch, captured)


def member_values(made, index):
    """A member's own weights."""
    generator = torch.Generator().manual_seed(index)

    def own(tensor):
        noise = (
            0.02 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype) if tensor.is_floating_point() else 0
        )
        return (tensor.detach() + noise).requires_grad_(tensor.requires_grad)

    return {name: own(tensor) for name, tensor in made.state.items()}


def operands(made, graph, states, count=None):
    def stacked(tensor):
        return torch.stack([tensor] * count) if count else tensor

    state = [
        states[0][n]
        if count is None
        else torch.stack([s[n].detach() for s in states]).requires_grad_(states[0][n].requires_grad)
        for n in graph.state
    ]
    constants = [made.captured.constants[name].clone() for name in graph.constants]
    inputs = [stacked(made.inputs[index].clone()) for index in graph.inputs]
    return ShardOperands(state=state, constants=constants, inputs=inputs, live_in=())


class Products(TorchDispatchMode):
    """The dtypes of all products that run inside."""

    NAMES = (
        "mv",
        "dot",
        "vdot",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention_for_cpu",
    )

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.NAMES:
            self.dtypes |= {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        return func(*args, **(kwargs or {}))


def noted(seen, node, run):
    """Note the dtypes of an operator's results, and of its products where it is one operator alone and together."""
    with Products() as products:
        result = run()
    dtypes = [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    is_one = isinstance(node.target, OpOverload) and not draws_random_numbers(node) and node.target not in RECURRENT
    seen[node.name] = dtypes, products.dtypes if is_one else None
    return result


class Alone(fx.Interpreter):
    def __init__(self, module):
        super().__init__(module)
        self.seen = {}

    def run_node(self, node):
        run = super().run_node
        is_checked = node.op == "call_function" and node.target is not aten._assert_tensor_metadata.default
        return noted(self.seen, node, lambda: run(node)) if is_checked else run(node)


def alone(code, given, precision):
    interpreter = Alone(code)
    with drawing_from(torch.Generator().manual_seed(0)), autocast(precision):
        interpreter.run(*given.all)
    return interpreter.seen


def together(code, given, flags, precision, slots=frozenset()):
    stacked, seen = StackedGraph(code, flags, slots, precision), {}
    stacked._calls = [
        replace(call, run=lambda n, a, k, call=call: noted(seen, call.node, lambda: call.run(n, a, k)))
        if call.node.graph is code.graph  # not what is inside a region, or a draw
        else call
        for call in stacked._calls
    ]
    with drawing_from(GroupGenerator([torch.Generator().manual_seed(0) for _ in range(MEMBERS)])):
        stacked(*given.all)
    return seen


@pytest.mark.cases(2)
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ENTRIES if name not in WHOLE],
)
def test_each_operator_computes_in_the_precision_of_the_unfused_step(name, mode, precision):
    if (name, precision) in NEVER:
        pytest.skip("plain PyTorch fails too")
    check_operators(made_in(build(Spec(name)), precision, mode), precision)


def check_operators(made, precision):
    graph = made.plan().shards[0].graph
    states = [member_values(made, index) for index in range(MEMBERS)]
    flags = [True] * len(graph.state) + [False] * len(graph.constants) + [True] * len(graph.inputs)
    with torch.set_grad_enabled(made.captured.mode == "train"):
        expected = alone(graph.code, operands(made, graph, states), precision)
        found = together(graph.code, operands(made, graph, states, MEMBERS), flags, precision)
    assert {name: dtypes for name, (dtypes, _) in found.items()} == {
        name: dtypes for name, (dtypes, _) in expected.items()
    }
    assert {name: products for name, (_, products) in found.items() if products is not None} == {
        name: products for name, (_, products) in expected.items() if products is not None
    }


class Odd(nn.Module):
    """Operators whose stacked forms are other operators."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.mixed = nn.Linear(8, 8), nn.Linear(8, 8), nn.Bilinear(8, 8, 8)
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        y = self.norm(self.first(x)) * self.scale
        near = torch.cdist(y, self.second(x)).mean(1, keepdim=True)
        heads = (x * self.scale)[:, None, None]  # in float32
        y = y + functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)[:, 0, 0]
        y = y + torch.einsum("bi,ij->bj", y.softmax(-1), self.second.weight) + self.mixed(y, y.to(y.dtype)) + near
        return y + y @ self.scale.to(y.dtype)[:, None]


def odd_loss(module, batch):
    y, target = module(batch[0]), batch[1].argmax(1)
    losses = functional.nll_loss(y.log_softmax(1), target), functional.cross_entropy(y, target, label_smoothing=0.1)
    return sum(losses) + functional.mse_loss(y, batch[1]) + functional.smooth_l1_loss(y, batch[1])


@pytest.mark.parametrize("precision", LOW)
def test_stacked_forms_that_are_other_operators(precision):
    made = made_in(task_of(Odd(), step=odd_loss, loss=None), precision)
    check_operators(made, precision)


def backward_of(computing, graph, given, generator, objective):
    incoming = compute.IncomingGradients(outputs={graph.live_out[0]: None}, live_in={}, parameters={})
    with drawing_from(generator):
        return computing.backward(
            graph, given, needs_gradient=frozenset(), incoming=incoming, objective=objective
        ).parameters


def total_error(found, exact):
    """Relative to all exact gradients of all members."""
    errors = [(found[i][name].double() - tensor).norm() for i, own in enumerate(exact) for name, tensor in own.items()]
    return (torch.stack(errors).norm() / torch.stack([t.norm() for own in exact for t in own.values()]).norm()).item()


@pytest.mark.cases(1)
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "cnn",
        "gpt2",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet", "vit", "gru", "lstm", "hf_bert")),
    ],
)
def test_gradients_are_as_far_from_those_in_float64_as_the_unfused_steps(name, precision, is_traced):
    if (name, precision) in NEVER:
        pytest.skip("plain PyTorch fails too")
    made, wide = made_in(build(Spec(name)), precision), made_in(in_float64(build(Spec(name))), "float32")
    plan, wide_graph = made.plan(), wide.plan().shards[0].graph
    states = [member_values(made, index) for index in range(MEMBERS)]
    scale = 2.0**8 if precision == "float16" else 1.0
    unfused, exact = [], []
    for index, state in enumerate(states):
        own = operands(made, plan.shards[0].graph, [state])
        generator = torch.Generator().manual_seed(index)
        own_gradients = backward_of(compute, plan.shards[0].graph, own, generator, lambda loss: loss * scale)
        unfused.append({name: gradient / scale for name, gradient in own_gradients.items()})
        wide_state = {
            n: t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
            for n, t in state.items()
        }
        given = operands(wide, wide_graph, [wide_state])
        exact.append(backward_of(compute, wide_graph, given, torch.Generator().manual_seed(index), torch.sum))
    group = stacked_plan(plan, MEMBERS)
    graph, given = group.shards[0].graph, operands(made, group.shards[0].graph, states, MEMBERS)
    if is_traced:
        batch = [torch.stack([tensor] * MEMBERS) for tensor in made.inputs]
        # An LSTM in low precision is a kernel of its own, which draws for one member after the other.
        assert trace_step(group, given.state, batch, MEMBERS) == (name != "lstm")
    generators = GroupGenerator([torch.Generator().manual_seed(index) for index in range(MEMBERS)])
    scales = torch.full((MEMBERS,), scale) if precision == "float16" else None
    stacked = backward_of(group.computing, graph, given, generators, SummedLosses(1, scales))
    fused = [{name: gradient[index] / scale for name, gradient in stacked.items()} for index in range(MEMBERS)]
    assert total_error(unfused, exact) > 1e-4, "the precision is low"
    assert total_error(fused, exact) <= 1.5 * total_error(unfused, exact)


low, full = torch.bfloat16, torch.float32
CASTS = [  # operator, dtypes and shapes of its operands, other arguments, and the dtypes after autocast's casts, by device
    (aten.linear.default, [(low, (4, 5)), (full, (6, 5))], (), {"cpu": [low, low], "cuda": [low, low]}),
    (aten.cdist.default, [(low, (4, 5)), (low, (4, 5))], (), {"cpu": [full, full], "cuda": [full, full]}),
    (aten.mse_loss.default, [(low, (4, 5)), (full, (4, 5))], (), {"cpu": [full, full], "cuda": [full, full]}),
    (aten.mv.default, [(full, (4, 5)), (full, (5,))], (), {"cpu": [full, full], "cuda": [low, low]}),
    (aten.sum.dim_IntList, [(low, (4, 5))], ([1],), {"cpu": [low], "cuda": [full]}),
    (aten.pow.Tensor_Scalar, [(low, (4, 5))], (2,), {"cpu": [low], "cuda": [full]}),
    (aten.add.Tensor, [(low, (4, 5)), (full, (4, 5))], (), {"cpu": [low, full], "cuda": [low, full]}),
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("target", "tensors", "others", "after"), CASTS, ids=lambda value: str(value)[:12])
def test_operands_are_cast_as_autocast_does_on_a_kind_of_device(target, tensors, others, after, device):
    """On tensors without bytes, so that GPUs' rules are seen without a GPU."""
    with FakeTensorMode():
        operand_tensors = [torch.empty(3, *shape, dtype=dtype, device=device) for dtype, shape in tensors]
        arguments, _, _ = prepared(target, [*operand_tensors, *others], {}, [True] * len(tensors), "bfloat16")
    assert [argument.dtype for argument in arguments[: len(tensors)]] == after[device]
