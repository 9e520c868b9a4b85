"""A step that cannot be captured: one shard, the user's own code, and a peak measured on a copy."""

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hydra_tune.devices.cpu import CpuDevice, DefaultCpuGenerator
from hydra_tune.errors import BudgetError, CaptureError
from hydra_tune.memory.activation_offload import SavedTensorSpiller
from hydra_tune.quantities import format_bytes_up
from hydra_tune.shard.capture.batch import flatten
from hydra_tune.shard.capture.step_capture import named_state, state_specs
from hydra_tune.shard.execute.chain import ShardChain, parameter_gradient_key
from hydra_tune.shard.execute.eager_plan import whole_plan
from hydra_tune.shard.verify.step_outcome import HostChainStore
from tests.support.tracker import StorageTracker
from tests.unit.shard.bench import seeded, task_of, vectors
from tests.unit.shard.cost.test_pilot import measured_units
from tests.unit.shard.partition.test_plan_cache import Branch


def made_plan(model, batch, mode="train", budget_bytes=1 << 30, **changes):
    return whole_plan(
        task_of(model, **changes),
        model,
        copy.deepcopy(model),
        flatten(batch),
        mode,
        specs=state_specs(model),
        update=(lambda names: (10, 20, 30)) if mode == "train" else None,
        budget_bytes=budget_bytes,
        alignment=1,
        reason=CaptureError("it branches"),
    )


def test_the_plan_is_one_eager_shard_of_all_the_state():
    model = nn.Sequential(Branch(), nn.BatchNorm1d(8))
    model[0].linear.bias.requires_grad_(False)
    plan = made_plan(model, vectors())
    (shard,) = plan.shards
    assert plan.eager
    assert shard.graph.state == tuple(name for name, _ in named_state(model))
    assert shard.trained == ("0.linear.weight", "1.weight", "1.bias")
    assert shard.graph.stochastic, "nobody knows what the code draws"
    assert plan.cuts == ()
    assert (shard.cost.optimizer_bytes, shard.cost.update_workspace, shard.cost.first_update_workspace) == (10, 20, 30)


def test_a_step_gives_what_the_users_code_gives():
    model = Branch()
    batch = vectors()
    plan = made_plan(model, batch)
    store = HostChainStore(dict(named_state(model)), {}, flatten(batch).tensors)
    chain = ShardChain(plan, store)
    chain.backward(0, DefaultCpuGenerator())
    gradients = {name: store.get(parameter_gradient_key(name)) for name, _ in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    assert store.get("loss").equal(loss.detach())
    assert all(p.grad.equal(gradients[name]) for name, p in model.named_parameters())


def test_an_evaluation_gives_the_metrics_in_their_order():
    model = Branch()
    batch = vectors()
    evaluate = lambda module, b: {"z": module(b[0]).mean(), "a": module(b[0]).std()}  # noqa: E731
    plan = made_plan(model, batch, "evaluate", validate=lambda: [batch], evaluate=evaluate)
    assert plan.names == ("z", "a")
    store = HostChainStore(dict(named_state(model)), {}, flatten(batch).tensors)
    ShardChain(plan, store).forward(0, DefaultCpuGenerator())
    with torch.no_grad():
        assert store.get("z").equal(model(batch[0]).mean())
        assert store.get("a").equal(model(batch[0]).std())
    assert plan.shards[0].cost.backward_workspace == 0
    assert not plan.shards[0].has_backward


@pytest.mark.cases(1 / 3)
def test_the_peak_is_what_a_step_needs():
    model = nn.Sequential(nn.Linear(8, 64), Branch8(64), nn.Linear(64, 8))
    batch = vectors(16)
    plan = made_plan(model, batch, loss=lambda output, target: ((output - target) ** 2).mean())
    found = measured_units(SimpleNamespace(model=model, inputs=flatten(batch).tensors), plan)
    assert found == {("backward", 0): plan.shards[0].cost.backward_bytes}


class Branch8(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum() > 0 else -y


def test_the_measured_copy_and_the_batch_leave_no_trace():
    model = nn.Sequential(Branch(), nn.BatchNorm1d(8))
    before = copy.deepcopy(model.state_dict())
    batch = vectors()
    kept = [tensor.clone() for tensor in batch]
    made_plan(model, batch)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert all(a.equal(b) for a, b in zip(kept, batch, strict=True))


def test_a_budget_of_exactly_the_peak_is_enough_and_one_byte_less_is_not():
    peak = made_plan(Branch(), vectors()).peak_bytes
    made_plan(Branch(), vectors(), budget_bytes=peak)
    with pytest.raises(BudgetError, match=r"cannot be cut \(it branches\), and whole it needs .* at least") as caught:
        made_plan(Branch(), vectors(), budget_bytes=peak - 1)
    assert isinstance(caught.value.__cause__, CaptureError)


class Wide(nn.Module):
    """Its activations take more than everything else together."""

    def __init__(self):
        super().__init__()
        with seeded(0):
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = self.middle(layer(x)).tanh()
        return x

    def middle(self, x):
        return x if x.sum() > 0 else -x


def test_activations_are_spilled_only_where_keeping_them_does_not_fit():
    batch = vectors(512)
    kept = made_plan(Wide(), batch)
    assert kept.shards[0].cost.spilled_bytes == 0
    assert made_plan(Wide(), batch, budget_bytes=kept.peak_bytes).shards[0].cost == kept.shards[0].cost
    spilled = made_plan(Wide(), batch, budget_bytes=kept.peak_bytes - 1)
    assert spilled.peak_bytes < kept.peak_bytes / 2
    assert spilled.shards[0].cost.spilled_bytes == 12 * 512 * 8 * 4, (
        "what the layers and the tanhs save: one result each"
    )
    made_plan(Wide(), batch, budget_bytes=spilled.peak_bytes)
    with pytest.raises(BudgetError, match=r"at once.* KiB with its activations spilled.* at least") as caught:
        made_plan(Wide(), batch, budget_bytes=spilled.peak_bytes - 1)
    assert format_bytes_up(spilled.peak_bytes) in str(caught.value)


def test_the_peak_of_a_spilled_step_is_what_it_needs():
    model, batch = Wide(), vectors(512)
    cost = made_plan(model, batch, budget_bytes=made_plan(model, batch).peak_bytes - 1).shards[0].cost
    device = CpuDevice(0, 0)
    owned = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *batch)}
    saved = SavedTensorSpiller(device, stays=lambda tensor: tensor.untyped_storage()._cdata in owned)
    tracker = StorageTracker()
    with tracker(), saved.hooks():
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
    device.close()
    given = sum(tensor.untyped_storage().nbytes() for tensor in (*model.parameters(), *batch))
    assert max(tracker.peak_bytes) <= cost.backward_workspace + given
    assert max(tracker.peak_bytes) >= 0.9 * (cost.backward_workspace + given)
    assert saved.peak_bytes == cost.spilled_bytes


class Overwrites(Wide):
    """Behind autograd's back, and lets go of it: the backward of a plain loop reads what was written."""

    def middle(self, x):
        y = x * x.sum().sign()
        z = y.square()
        y.data.add_(1)
        return z


class Transforms(Wide):
    """Torch allows no hooks there."""

    def middle(self, x):
        slope = torch.func.grad(lambda inner: inner.pow(3).mean())(x)
        return x + slope if x.sum() > 0 else x - slope


@pytest.mark.parametrize("model", [Overwrites, Transforms])
def test_a_step_whose_activations_cannot_be_spilled_says_why(model):
    batch = vectors(512)
    peak = made_plan(model(), batch).peak_bytes
    with pytest.raises(
        BudgetError, match=r"its activations cannot be spilled: .*(\.data or \.numpy|torch\.func)"
    ) as caught:
        made_plan(model(), batch, budget_bytes=peak - 1)
    assert format_bytes_up(peak) in str(caught.value)


def test_the_runs_of_the_pilot_leave_no_trace():
    model, batch = Wide(), vectors(512)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate()
    made_plan(model, batch, budget_bytes=made_plan(model, batch).peak_bytes - 1)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert states[0].equal(torch.get_rng_state())
    assert states[1] == random.getstate()
