"""A step's graph trains as each member's own model and optimizer do."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.devices.own_generator import drawing_from
from hydra_tune.errors import UnfusableError
from hydra_tune.planner.ir.planner_ops import draw
from hydra_tune.planner.trace.optimizer_graph import UpdateTracer
from hydra_tune.planner.trace.step_graph import step_graph
from hydra_tune.planner.trace.unsupported_ops import value_draws
from hydra_tune.shard.execute.compute import ShardOperands
from tests.unit.planner import made as tests_made
from tests.unit.planner.made import EXAMPLES, MODELS, OPTIMIZERS, run_unplanned, sub_array


def members_alone(made, name, optimizer, steps):
    """Each member's own model, trained by itself."""
    found = []
    for index in range(made.count):
        model = EXAMPLES[name][0]()
        model.load_state_dict({key: tensor[index] for key, tensor in made.state.items()})
        own = OPTIMIZERS[optimizer](model.parameters())
        own.param_groups[0]["lr"] *= 1 + 0.1 * index
        generator = torch.Generator()
        generator.set_state(made.generators.members[index].get_state())
        losses = []
        for number in range(steps):
            x, y = (tensor[index] for tensor in made.batch(number))
            with drawing_from(generator):
                loss = functional.cross_entropy(model(x), y)
            own.zero_grad()
            loss.backward()
            own.step()
            losses.append(loss.item())
        found.append((model.state_dict(), losses))
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", list(MODELS))
def test_steps_are_those_of_each_member_alone(name, optimizer):
    made = sub_array(name, optimizer=optimizer)
    expected = members_alone(made, name, optimizer, 3)
    losses = torch.stack([run_unplanned(made, number) for number in range(3)])
    for index, (state, own) in enumerate(expected):
        torch.testing.assert_close(losses[:, index], torch.tensor(own), rtol=1e-3, atol=1e-4)
        for key, tensor in state.items():
            torch.testing.assert_close(made.state[key][index], tensor, rtol=1e-2, atol=2e-3)


def test_attention_without_dropout_draws_nothing():
    made = sub_array("attention")
    expected = members_alone(made, "attention", "adamw", 1)
    losses = run_unplanned(made, 0)
    torch.testing.assert_close(losses, torch.tensor([own[0] for _, own in expected]), rtol=1e-4, atol=1e-5)


def test_numbers_are_drawn_in_order_before_their_uses():
    step = sub_array("transformer").step
    drawn = [node.args[0] for node in step.graph.nodes if node.target is draw]
    assert drawn == list(range(9))
    assert [node for node in step.ops[step.num_forward :] if node.target is draw] == []


class _UnusedMask(nn.Module):
    """Draws a mask for an output that the loss leaves out."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = x * torch.empty_like(x).bernoulli_(0.8)
        out = self.head(x)
        out * torch.empty_like(out).bernoulli_(0.5)
        return out


def test_numbers_that_nothing_uses_are_drawn_too(monkeypatch):
    example = _UnusedMask, lambda: (torch.randn(6, 8), torch.randint(4, (6,)))
    monkeypatch.setitem(EXAMPLES, "unused mask", example)
    step = sub_array("unused mask", laid_out=False).step
    assert [node.args[0] for node in step.ops[: step.num_forward] if node.target is draw] == [0, 1]


def test_every_parameter_is_updated_once_and_nothing_reads_it_afterwards():
    made = sub_array("transformer")
    step, facts = made.step, made.step.seen
    for name in (key for key, _ in step.moments):
        argument = step.state[name]
        writes = [rank for rank, node in enumerate(step.ops) if argument in facts.writes[node.name]]
        reads = [rank for rank, node in enumerate(step.ops) if argument in facts.reads[node.name]]
        assert writes
        others = [rank for rank in reads if rank > writes[0]]
        assert all(argument in facts.writes[step.ops[rank].name] for rank in others)


def test_updates_are_made_before_the_backward_is_over():
    """So that gradients are not all there at once."""
    step = sub_array("cnn").step
    argument = step.state["head.weight"]
    first = next(rank for rank, node in enumerate(step.ops) if argument in step.seen.writes[node.name])
    assert first < step.num_forward + (len(step.ops) - step.num_forward) // 2


@pytest.mark.cases(1 / 3)
def test_a_step_is_traced_for_a_device_other_than_that_of_its_tensors(monkeypatch):
    """As for a GPU, while parameters are on the host or on several; here one whose tensors have no bytes."""
    place = torch.device("meta")
    here = sub_array("dlrm").step
    monkeypatch.setattr(tests_made, "step_graph", partial(step_graph, place=place))
    there = tests_made._traced.__wrapped__("dlrm", 2, "adamw", "cpu")[0]
    assert {one.device for one in there.geometry.values()} == {place}
    assert {one.device for one in here.geometry.values()} == {torch.device("cpu")}
    assert [str(node.target) for node in there.ops] == [str(node.target) for node in here.ops]
    named = [value for node in there.ops for value in node.kwargs.values() if isinstance(value, torch.device)]
    assert set(named) <= {place}


def test_what_draws_by_values_is_named_wherever_its_tensors_are():
    operands = ShardOperands(state=[torch.rand(3)], constants=[], inputs=[torch.empty(3, device="meta")], live_in=())
    found = value_draws(lambda state, batch: torch.bernoulli(state * batch), operands, torch.device("meta"))
    assert found == ["aten.bernoulli.default"]


@pytest.mark.parametrize(
    ("kind", "options", "changed"),
    [
        (torch.optim.SGD, {"weight_decay": 0.1}, {"weight_decay": 0.5}),
        (torch.optim.SGD, {"weight_decay": 0.0}, {"weight_decay": 0.5}),
        (torch.optim.SGD, {"momentum": 0.8}, {"momentum": 0.9}),
        (torch.optim.Adam, {"betas": (0.9, 0.99)}, {"betas": (0.9, 0.999)}),
        (torch.optim.RMSprop, {"eps": 1e-6}, {"eps": 1e-3}),
    ],
)
def test_an_option_held_as_a_constant_that_a_scheduler_changes_is_refused(kind, options, changed):
    members = [kind([torch.nn.Parameter(torch.ones(3))], lr=0.1 + index, **options) for index in range(2)]
    tracer = UpdateTracer(members)
    for member in members:
        member.param_groups[0]["lr"] /= 2
    assert tracer.rates(0, [1, 1])  # a rate that changes is an argument of the graph
    for member in members:
        member.param_groups[0].update(changed)
    with pytest.raises(
        UnfusableError, match=r"now has \w+ .*, and the traced step holds .* as a constant.*runs unplanned"
    ):
        tracer.rates(0, [1, 1])
    planned_anew = UpdateTracer(members, tracer._rates)
    assert planned_anew.rates(0, [1, 1])
    assert planned_anew.key != tracer.key


def test_an_option_that_is_an_argument_of_the_graph_may_change():
    """The weight decay of AdamW goes into a rate."""
    members = [torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1, weight_decay=0.1) for _ in range(2)]
    tracer = UpdateTracer(members)
    before = tracer.rates(0, [1, 1])
    for member in members:
        member.param_groups[0]["weight_decay"] = 0.5
    assert tracer.rates(0, [1, 1]) != before
