"""A plan says when each value is born, first and last used, and which shard completes each gradient."""

import torch
from torch import nn

from hydra_tune.shard.partition.plan import operators
from tests.unit.shard.bench import bench, parity_bench, task_of
from tests.unit.shard.partition.test_subgraph import Skip


def test_values_are_born_used_and_let_go_by_known_shards():
    made = bench(task_of(Skip()))
    plan = made.plan(made.position("aten.linear.default", 1), made.position("aten.linear.default", 2))
    early = made.captured.nodes[0].name
    assert (plan.birth[early], plan.first_use[early], plan.last_use[early]) == (0, 2, 2)
    scaled = made.captured.nodes[1].name
    assert (plan.birth[scaled], plan.first_use[scaled], plan.last_use[scaled]) == (0, 1, 1)
    assert plan.cuts == (made.position("aten.linear.default", 1), made.position("aten.linear.default", 2))
    assert plan.birth[plan.outputs[0]] == 2
    assert [shard.losses for shard in plan.shards] == [(), (), plan.outputs]


def test_a_tied_parameter_is_completed_by_its_lowest_user():
    made = parity_bench("gpt2")
    plan = made.plan(*made.spread(4))
    used = plan.used_state()["tokens.weight"]
    assert used == [0, 3]
    assert "tokens.weight" in plan.shards[0].trained
    assert "tokens.weight" in plan.shards[3].shared_gradients
    trained = [name for shard in plan.shards for name in shard.trained]
    assert sorted(trained) == sorted(name for name, _ in made.model.named_parameters())


def test_frozen_layers_below_have_no_backward_and_hand_no_gradient_down():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    model[:2].requires_grad_(False)
    made = bench(task_of(model))
    plan = made.plan(1, 2, 3)
    assert [shard.has_backward for shard in plan.shards] == [False, False, True, True]
    assert plan.shards[2].needs_gradient == frozenset()
    assert plan.shards[1].trained == ()
    assert plan.shards[1].gradient_outputs == ()


def test_frozen_layers_between_pass_gradients_through():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    model[1].requires_grad_(False)
    plan = bench(task_of(model)).plan(1, 2)
    assert [shard.has_backward for shard in plan.shards] == [True, True, True]
    assert plan.shards[1].trained == ()
    assert len(plan.shards[1].needs_gradient) == 1


def test_an_evaluation_has_no_gradients_at_all():
    made = parity_bench("cnn", "evaluate")
    plan = made.plan(*made.spread(3))
    assert plan.names == ("acc", "loss")
    for shard in plan.shards:
        assert not shard.has_backward
        assert shard.trained == shard.shared_gradients == shard.gradient_outputs == ()
        assert shard.needs_gradient == frozenset()
        assert shard.cost.backward_workspace == shard.cost.optimizer_bytes == 0


def test_a_plan_holds_no_tensor_of_the_trial_and_the_constants_it_uses():
    weight = torch.ones(8)
    made = bench(task_of(nn.Linear(8, 8), loss=lambda output, target: ((output - target) ** 2 * weight).mean()))
    plan = made.plan(1)
    assert [tensor.tolist() for tensor in plan.constants.values()] == [weight.tolist()]
    assert plan.shards[0].graph.constants == ()
    assert plan.peak_bytes == max(shard.cost.peak_bytes for shard in plan.shards)
    assert plan.operators == operators(made.captured)
    assert plan.operators[0] == "aten.linear.default"
