"""A chain of units gives the eager step's numbers, keeps what is needed for as long as it is needed, and no longer."""

import gc
import weakref

import pytest
import torch
from torch import nn

from hydra_tune.devices.cpu import DefaultCpuGenerator
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.cost.activation_policy import ActivationBudget, keeping
from hydra_tune.shard.execute.chain import ShardChain, gradient_key, parameter_gradient_key, saved_key
from hydra_tune.shard.verify.step_outcome import HostChainStore
from tests.parity.models import MODELS, build
from tests.unit.shard.bench import bench, parity_bench, seeded, task_of, vectors

GENERATOR = DefaultCpuGenerator()


class Warmup(nn.Module):
    """The last layer counts steps, the first reads the count: a recompute must not see the new one."""

    def __init__(self, buffer=0.0):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.full((), buffer))

    def forward(self, x):
        x = self.last(self.first(x * torch.where(self.count < 2, 1.0, 0.5)))
        self.count.add_(1)
        return x


def train_step(made, plan):
    """One step through a chain: loss, gradients, buffers, and what the store is left with."""
    store = HostChainStore(dict(named_state(made.model)), plan.constants, tuple(t.clone() for t in made.inputs))
    chain = ShardChain(plan, store)
    for index in range(len(plan.shards) - 1):
        chain.forward(index, GENERATOR)
    for index in reversed(range(len(plan.shards))):
        if plan.shards[index].has_backward:
            chain.backward(index, GENERATOR)
        else:
            chain.skip_backward(index)
    prefix = parameter_gradient_key("")
    loss = store.values.pop(plan.outputs[0])
    gradients = {
        key.removeprefix(prefix): store.values.pop(key) for key in list(store.values) if key.startswith(prefix)
    }
    return loss, gradients, store.values


def eager_step(made):
    inputs, target = made.inputs
    made.model.train()
    loss = made.task.loss(made.model(inputs.clone()), target)
    loss.backward()
    gradients = {name: p.grad for name, p in made.model.named_parameters() if p.grad is not None}
    made.model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


@pytest.mark.parametrize("num_shards", [1, 2, 7])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_of_a_step_but_its_loss_and_gradients(name, num_shards):
    made = parity_bench(name)
    loss, gradients, left = train_step(made, made.plan(*made.spread(num_shards)))
    assert loss.shape == ()
    assert gradients.keys() == {n for n, _ in made.model.named_parameters()}
    assert left == {}


@pytest.mark.parametrize("buffer", [0.0, 1.0, 2.0])
def test_a_recompute_reads_buffers_as_the_forward_did(buffer):
    """With a count of 1 the forward is in the warm-up, and the recompute would not be."""
    made = bench(task_of(Warmup(buffer)))
    plan = made.plan(made.position("aten.linear.default", 1))
    loss, expected = eager_step(made)
    made.model.count.fill_(buffer)
    ours, gradients, _ = train_step(made, plan)
    assert ours.equal(loss)
    assert all(same_bits(expected[name], gradients[name]) for name in expected)
    assert made.model.count.item() == buffer + 1


def test_batch_norm_counts_a_step_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    made = bench(task_of(model))
    plan = made.plan(made.position("aten.linear.default", 1))
    train_step(made, plan)
    assert model[1].num_batches_tracked.item() == 1
    ours = {name: b.clone() for name, b in model.named_buffers()}
    model[1].reset_running_stats()
    eager_step(made)
    assert all(same_bits(ours[name], b) for name, b in model.named_buffers())


def test_a_recompute_draws_the_same_masks_and_the_stream_goes_on_once():
    made = bench(task_of(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))))
    second = made.position("aten.linear.default", 1)
    with seeded(3):
        loss, expected = eager_step(made)
    with seeded(3):
        ours, gradients, _ = train_step(made, made.plan(second))
    assert ours.equal(loss)
    assert all(same_bits(expected[name], gradients[name]) for name in expected)


def kept_plan(made, num_shards):
    plan = made.plan(*made.spread(num_shards))
    return keeping(plan, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40))


@pytest.mark.parametrize("name", MODELS)
def test_what_was_kept_is_gone_after_the_step(name):
    made = parity_bench(name)
    plan = kept_plan(made, 5)
    _, gradients, left = train_step(made, plan)
    assert gradients.keys() == {n for n, _ in made.model.named_parameters()}
    assert left == {}


@pytest.mark.parametrize("buffer", [0.0, 1.0, 2.0])
def test_a_graph_that_was_kept_has_read_buffers_as_its_forward_did(buffer):
    made = bench(task_of(Warmup(buffer)))
    cut = made.plan(made.position("aten.linear.default", 1))
    plan = keeping(cut, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40))
    loss, expected = eager_step(made)
    made.model.count.fill_(buffer)
    ours, gradients, _ = train_step(made, plan)
    assert ours.equal(loss)
    assert all(same_bits(expected[name], gradients[name]) for name in expected)
    assert made.model.count.item() == buffer + 1


def test_a_graph_of_another_device_is_given_up_and_its_shard_computed_again():
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)]
    made = bench(task_of(nn.Sequential(*layers)))
    cut = made.plan(made.position("aten.linear.default", 1))
    plan = keeping(cut, made.pilot, "keep", ActivationBudget(capacity_bytes=1 << 40, budget_bytes=1 << 40))
    with seeded(3):
        loss, expected = eager_step(made)
    layers[1].reset_running_stats()
    store = HostChainStore(made.state, plan.constants, made.inputs)
    chain = ShardChain(plan, store)
    with seeded(3):
        chain.forward(0, GENERATOR)
        assert chain.is_kept(0, torch.device("cpu"))
        assert not chain.is_kept(0, torch.device("meta"))
        assert set(chain.kept_keys(0)) == {key for key in store.values if key.startswith("kept:")} != set()
        chain.let_go(0)
        assert not any(key.startswith("kept:") for key in store.values)
        for index in (1, 0):
            chain.backward(index, GENERATOR)
    assert store.values[plan.outputs[0]].equal(loss)
    for name, gradient in expected.items():
        assert same_bits(gradient, store.values[parameter_gradient_key(name)])
    assert layers[1].num_batches_tracked.item() == 1


def test_a_chain_that_is_closed_holds_no_graph():
    made = bench(task_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))))
    chain = ShardChain(kept_plan(made, 2), HostChainStore(made.state, {}, made.inputs))
    chain.forward(0, GENERATOR)
    tape = weakref.ref(chain._tapes[0].tape)
    gc.disable()
    try:
        chain.close()
        assert tape() is None
    finally:
        gc.enable()


def test_gradients_accumulate_across_a_skipped_shard():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    model[0].requires_grad_(False)
    made = bench(task_of(model))
    loss, expected = eager_step(made)
    ours, gradients, left = train_step(made, made.plan(1, 2))
    assert ours.equal(loss)
    assert gradients.keys() == expected.keys() == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert left == {}


def test_keys_name_all_that_a_backward_unit_reads():
    made = parity_bench("cnn")
    plan = made.plan(*made.spread(3))
    chain = ShardChain(plan, HostChainStore({}, {}, ()))
    middle = plan.shards[1].graph
    assert chain.keys("forward", 1) == list(middle.live_in)
    keys = chain.keys("backward", 1)
    assert set(keys) >= {
        *middle.live_in,
        *(gradient_key(name) for name in middle.live_out),
        *(saved_key(1, name) for name in middle.written_state),
    }
    assert [chain.has_forward(i) for i in range(3)] == [True, True, False]


def test_values_of_an_evaluation_go_after_their_last_use():
    made = bench(build("vit", validate=build("vit").train), mode="evaluate")
    plan = made.plan(*made.spread(4))
    store = HostChainStore(dict(named_state(made.model)), plan.constants, made.inputs)
    chain = ShardChain(plan, store)
    for index in range(4):
        chain.forward(index, GENERATOR)
        alive = {name for name, last in plan.last_use.items() if last > index and plan.birth[name] <= index}
        assert set(store.values) - set(plan.outputs) == alive
    assert set(store.values) == set(plan.outputs)
    assert chain.has_forward(3)


def test_a_value_dropped_too_early_is_our_own_mistake():
    made = bench(task_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))))
    chain = ShardChain(made.plan(1), HostChainStore(dict(named_state(made.model)), {}, vectors()))
    with pytest.raises(AssertionError, match="were dropped too early"):
        chain.backward(1, GENERATOR)
