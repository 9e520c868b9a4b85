"""A group's plan gives each member the losses, gradients and buffers that it has alone, whole, cut or traced."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from hydra_tune.batched.batched_random import GroupGenerator
from hydra_tune.devices.cpu import DefaultCpuGenerator
from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.batching.batched_graph import StackedGraph
from hydra_tune.fusion.compile import batched_plan_cache
from hydra_tune.fusion.compile.batched_plan import stacked_plan, trace_step
from hydra_tune.fusion.compile.batched_plan_cache import GroupPlanFactory
from hydra_tune.shard.execute import compute
from hydra_tune.shard.execute.chain import ShardChain, parameter_gradient_key
from hydra_tune.shard.execute.compute import ShardOperands
from hydra_tune.shard.verify.step_outcome import HostChainStore
from tests.unit.shard.bench import bench, parity_bench, task_of

MEMBERS = 3


class Norms(nn.Module):
    """What other models of searches are made of: depthwise convolutions, group norms, embeddings, layers of a constant."""

    def __init__(self):
        super().__init__()
        self.deep = nn.Conv2d(4, 8, 3, groups=4, padding="same", bias=False)
        self.norm, self.table = nn.GroupNorm(2, 8), nn.Embedding(5, 8)
        self.places, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        ids = (x[:, 0, 0].abs() * 7).long() % 5
        y = functional.max_pool2d(functional.silu(self.norm(self.deep(x))), 2).mean((2, 3))
        y = y + self.places(torch.linspace(0, 1, 8, dtype=y.dtype))
        return self.head(y * torch.sigmoid(self.table(ids).mean(1)))


def member_values(made, plan, index):
    """A member's own weights and batch, in float64."""
    generator = torch.Generator().manual_seed(index)

    def own(tensor):
        if not tensor.is_floating_point():
            return tensor.clone()
        return tensor.detach().double() + 0.1 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)

    state = {name: own(made.state[name]).requires_grad_(made.state[name].requires_grad) for name in plan.used_state()}
    return state, tuple(own(tensor) for tensor in made.inputs)


def run(plan, state, inputs, generator, objective):
    """One step: losses, gradients by name, and what is left of the buffers."""
    constants = {n: t.double() if t.is_floating_point() else t for n, t in plan.constants.items()}
    store = HostChainStore(state, constants, inputs)
    chain = ShardChain(plan, store, objective)
    with drawing_from(generator):
        for index in range(len(plan.shards) - 1):
            chain.forward(index, DefaultCpuGenerator())
        for index in reversed(range(len(plan.shards))):
            if plan.shards[index].has_backward:
                chain.backward(index, DefaultCpuGenerator())
            else:
                chain.skip_backward(index)
    prefix = parameter_gradient_key("")
    gradients = {k.removeprefix(prefix): v for k, v in store.values.items() if k.startswith(prefix)}
    return store.values[plan.outputs[0]], gradients, {n: t for n, t in state.items() if not t.requires_grad}


def compare(made, cuts=(), *, is_traced=False):
    plan = made.plan(*cuts)
    group = stacked_plan(plan, MEMBERS)
    members = [member_values(made, plan, index) for index in range(MEMBERS)]
    state = {
        name: torch.stack([own[name].detach() for own, _ in members]).requires_grad_(members[0][0][name].requires_grad)
        for name in plan.used_state()
    }
    inputs = tuple(torch.stack(tensors) for tensors in zip(*(batch for _, batch in members), strict=True))
    if is_traced:
        assert trace_step(group, [state[name] for name in group.shards[0].graph.state], inputs, MEMBERS)
    generators = [torch.Generator().manual_seed(index) for index in range(MEMBERS)]
    losses, gradients, buffers = run(group, state, inputs, GroupGenerator(generators), torch.sum)
    for index, (own, batch) in enumerate(members):
        generator = torch.Generator().manual_seed(index)
        loss, expected, left = run(plan, own, batch, generator, lambda loss: loss)
        torch.testing.assert_close(losses[index], loss, rtol=1e-12, atol=0)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name][index], gradient, rtol=1e-10, atol=1e-14)
        for name, buffer in left.items():
            torch.testing.assert_close(buffers[name][index], buffer, rtol=1e-12, atol=0)
        assert torch.equal(generators[index].get_state(), generator.get_state())


def images(width=4):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(5, width, 8, 8, generator=generator).double(), torch.randint(3, (5,), generator=generator)


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "vit", "gpt2_attention"))]
)
def test_a_whole_step_is_each_members_own(name, is_traced):
    compare(parity_bench(name), is_traced=is_traced)


FOR_A_GPU = pytest.param(
    "mlp",
    torch.device("cuda", 0),
    marks=pytest.mark.skipif(
        not torch.backends.cuda.is_built(), reason="torch knows no GPUs; some of its builds do without one"
    ),
)


@pytest.mark.parametrize(("name", "place"), [("mlp", None), ("cnn", None), FOR_A_GPU])
def test_a_traced_evaluation_has_each_members_own_metrics(name, place):
    """What is traced for a GPU runs here as well, where all of its operators are the same on both."""
    made = parity_bench(name, "evaluate")
    plan = made.plan()
    group = stacked_plan(plan, MEMBERS)
    members = [member_values(made, plan, index) for index in range(MEMBERS)]
    graph = group.shards[0].graph
    state = [torch.stack([own[name].detach() for own, _ in members]) for name in graph.state]
    inputs = [torch.stack(same) for same in zip(*(batch for _, batch in members), strict=True)]
    assert trace_step(group, state, inputs, MEMBERS, place=place)
    constants = [one.double() if one.is_floating_point() else one for one in map(plan.constants.get, graph.constants)]
    operands = ShardOperands(
        state=state, constants=constants, inputs=[inputs[index] for index in graph.inputs], live_in=()
    )
    if place is None:
        found = group.computing.forward(
            replace(graph, module=None), operands
        )  # what was traced runs, and not the graph
    else:
        trace = group.computing.forwards[graph.first]
        found = dict(zip(graph.live_out, trace.run(*operands.all), strict=True))
        assert trace.place == place
        with pytest.raises(TypeError, match="NoneType"):
            group.computing.forward(replace(graph, module=None), operands)  # the graph, as the operands are elsewhere
    for index, (own, batch) in enumerate(members):
        alone = plan.shards[0].graph
        expected = compute.forward(
            alone,
            ShardOperands(
                state=[own[name] for name in alone.state],
                constants=constants,
                inputs=[batch[place] for place in alone.inputs],
                live_in=(),
            ),
        )
        for metric in plan.outputs:
            torch.testing.assert_close(found[metric][index], expected[metric], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["mlp_native", pytest.param("cnn_dropout", marks=pytest.mark.slow)])
def test_a_step_whose_numbers_cannot_be_drawn_beforehand_is_each_members_own(name):
    compare(parity_bench(name))


@pytest.mark.parametrize(
    ("failure", "attempts"),
    [(None, 1), (RuntimeError("no trace"), 1), (torch.OutOfMemoryError("out of memory"), 3)],
)
def test_a_step_without_a_trace_is_traced_once_for_all_joins(monkeypatch, failure, attempts):
    """Each trace halts all devices; one that has failed for lack of memory may succeed later."""
    made, found = parity_bench("mlp"), []

    def trace(*_):
        found.append(1)
        if failure is not None:
            raise failure
        return False

    monkeypatch.setattr(batched_plan_cache, "trace_step", trace)
    prepared = SimpleNamespace(plan=stacked_plan(made.plan(), MEMBERS))
    state = {name: torch.stack([tensor.detach()] * MEMBERS) for name, tensor in made.state.items()}
    for _ in range(3):
        GroupPlanFactory(None).trace(prepared, state, (), MEMBERS)
    assert len(found) == attempts


def test_comparisons_of_ever_new_architectures_are_kept_up_to_a_number(monkeypatch):
    """A dropout from a range gives each trial an architecture of its own."""
    monkeypatch.setattr(batched_plan_cache, "_MAX_PAIRS", 4)
    monkeypatch.setattr(GroupPlanFactory, "_check_plans", lambda *_: None)
    plans, first = GroupPlanFactory(None), SimpleNamespace(architecture=0)
    for number in range(1, 10):
        plans.check_alike(first, SimpleNamespace(architecture=number))
    assert [number for number in range(1, 10) if plans.are_known(0, number)] == [6, 7, 8, 9]


@pytest.mark.parametrize("name", ["cnn", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_step_of_several_shards_is_each_members_own(name):
    made = parity_bench(name)
    compare(made, made.spread(3))


def test_other_operators_are_each_members_own():
    task = task_of(Norms().double(), train=lambda: [images()], loss=functional.cross_entropy)
    compare(bench(task), is_traced=True)


def test_a_member_that_rests_draws_nothing():
    made = parity_bench("mlp")
    plan = stacked_plan(made.plan(), MEMBERS)
    members = [member_values(made, plan, 0) for _ in range(MEMBERS)]
    state = {name: torch.stack([own[name].detach() for own, _ in members]) for name in plan.used_state()}
    inputs = tuple(torch.stack(tensors) for tensors in zip(*(batch for _, batch in members), strict=True))
    state = {name: t.requires_grad_(members[0][0][name].requires_grad) for name, t in state.items()}
    generators = [torch.Generator().manual_seed(5) for _ in range(MEMBERS)]
    before = generators[1].get_state()
    losses, _, _ = run(plan, state, inputs, GroupGenerator(generators, [True, False, True]), torch.sum)
    assert torch.equal(generators[1].get_state(), before)
    assert losses[0] == losses[2]


def test_what_a_member_draws_does_not_depend_on_the_others():
    """The same member, first of three and second of two."""
    made = parity_bench("mlp")
    found = []
    for seeds in ([5, 6, 7], [9, 5]):
        plan = stacked_plan(made.plan(), len(seeds))
        members = [member_values(made, plan, seed) for seed in seeds]
        state = {
            name: torch.stack([own[name].detach() for own, _ in members]).requires_grad_(made.state[name].requires_grad)
            for name in plan.used_state()
        }
        inputs = tuple(torch.stack(tensors) for tensors in zip(*(batch for _, batch in members), strict=True))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        losses, _, _ = run(plan, state, inputs, GroupGenerator(generators), torch.sum)
        found.append(losses[seeds.index(5)].item())
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_sparse_gradients_are_refused():
    code = make_fx(lambda ids, weight: functional.embedding(ids, weight, sparse=True))(
        torch.arange(3), torch.ones(5, 4)
    )
    with pytest.raises(UnfusableError, match="sparse"):
        StackedGraph(code, [True, True])
