"""What no plan is made of is refused with the operator, tensors or number in the way, and with what is done instead."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.errors import BudgetError, UnfusableError
from hydra_tune.planner.search.portfolio import Planner
from hydra_tune.planner.trace.optimizer_graph import UpdateTracer
from hydra_tune.planner.trace.step_graph import step_graph
from hydra_tune.shard.execute.compute import ShardOperands
from tests.unit.planner.run.test_planned_run import array

X, Y = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 4


class Between(nn.Module):
    """Two layers, and something between."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 16), nn.Linear(16, 4), between

    def forward(self, x):
        return self.last(self.between(torch.relu(self.first(x))))


def scaled_by_sum(h):
    return h * h.sum().item()


def multinomial(h):
    return h + torch.multinomial(h.abs() + 1, 1)


def bernoulli(h):
    return h * torch.bernoulli(torch.sigmoid(h))


def noisy(h):
    return h + torch.rand_like(h)


def why_no_figures(between):
    task = TrainTask(
        model=partial(Between, between),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train=lambda: [(X, Y)],
        loss=functional.cross_entropy,
    )
    with HydraExecutor(devices="cpu:1") as pool:
        found = pool.plan([task], profile=True).trials[0].fusion
    assert found.figures is None
    return found.why_no_figures


@pytest.mark.parametrize(
    ("between", "operator"),
    [
        (scaled_by_sum, r"runs whole \(.*aten._local_scalar_dense.default\)"),
        (multinomial, r"other than those of dropout \(aten.multinomial.default\)"),
        (bernoulli, r"other than those of dropout \(aten.bernoulli.default\)"),
        (noisy, r"other than those of dropout \(aten.rand_like.generator\)"),
    ],
)
def test_a_model_with_an_operator_that_cannot_be_planned_is_told_which(between, operator):
    why = why_no_figures(between)
    assert why.endswith("it runs unplanned")
    with pytest.raises(AssertionError, match=operator):
        raise AssertionError(why)


def traced(between, place="cpu"):
    """The step of a pair of such models, stacked by hand."""
    model = Between(between)
    names, tensors = zip(*model.named_parameters(), strict=True)

    def run(*given):
        *state, x, y = given
        losses = []
        for member in range(2):
            own = {name: one[member] for name, one in zip(names, state, strict=True)}
            losses.append(functional.cross_entropy(torch.func.functional_call(model, own, (x[member],)), y[member]))
        return (torch.stack(losses),)

    state = [torch.stack([one.detach()] * 2).requires_grad_() for one in tensors]
    inputs = [torch.stack([X] * 2).to(place), torch.stack([Y] * 2)]
    operands = ShardOperands(state=state, constants=[], inputs=inputs, live_in=())
    tracer = UpdateTracer([torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)])
    return step_graph(run, names, operands, [True] * len(names), 2, tracer, dict.fromkeys(names, 0))


def test_the_operator_that_the_tracer_cannot_take_is_named():
    assert len(traced(torch.sin).ops) > 10
    with pytest.raises(UnfusableError, match=r"aten._local_scalar_dense.default cannot be traced.*runs unplanned"):
        traced(scaled_by_sum)
    with pytest.raises(UnfusableError, match=r"cannot be traced .*DynamicOutputShapeException: aten.nonzero.default\)"):
        traced(lambda h: h + h[h > 0].sum())


def test_tensors_on_several_devices_are_named_with_them():
    with pytest.raises(UnfusableError, match=r"first.weight on cpu, tensor of the batch 0 on meta.*runs unplanned"):
        traced(torch.sin, "meta")


def test_a_limit_below_what_never_moves_is_told_with_that_number():
    """Of the traced DLRM: its parameters, moments and batch, and what would be enough."""
    made = array("dlrm")
    found = Planner(array=lambda _: made, limit_bytes=made.static_bytes // 2).portfolio(1)
    with pytest.raises(BudgetError, match="static tensors, which no plan moves, and the limit is") as raised:
        _ = found.best
    enough = raised.value.enough_bytes
    assert enough > made.static_bytes
    assert f"{made.static_bytes / 1024:.1f} KiB are static" in str(raised.value)
    assert Planner(array=lambda _: made, limit_bytes=enough).portfolio(1).best.fits


def singular(h):
    """Fails on the numbers that profiles are made with, of which some are alike."""
    return h + torch.linalg.eigvalsh(h.T @ h)


def test_an_operator_that_fails_while_it_is_profiled_is_named():
    assert "aten.linalg_eigh" in (why := why_no_figures(singular)) or "aten._linalg_eigh" in why
    assert why.endswith("it runs unplanned")
