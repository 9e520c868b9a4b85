"""A step that cannot be captured: one shard, the user's own code, and a peak measured on a copy."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hydra_tune.devices.cpu import DefaultCpuGenerator
from hydra_tune.errors import BudgetError, CaptureError
from hydra_tune.shard.batch import flatten
from hydra_tune.shard.capture import named_state, state_specs
from hydra_tune.shard.chain import Chain, parameter_gradient_key
from hydra_tune.shard.verify import HostStore
from hydra_tune.shard.whole import whole_plan
from tests.unit.shard.bench import task_of, vectors
from tests.unit.shard.test_library import Branch
from tests.unit.shard.test_pilot import measured_units


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
    store = HostStore(dict(named_state(model)), {}, flatten(batch).tensors)
    chain = Chain(plan, store)
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
    store = HostStore(dict(named_state(model)), {}, flatten(batch).tensors)
    Chain(plan, store).forward(0, DefaultCpuGenerator())
    with torch.no_grad():
        assert store.get("z").equal(model(batch[0]).mean())
        assert store.get("a").equal(model(batch[0]).std())
    assert plan.shards[0].cost.backward_workspace == 0
    assert not plan.shards[0].has_backward


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
