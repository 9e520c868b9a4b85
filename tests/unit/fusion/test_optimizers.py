"""A stacked step is what each member's own optimizer would do, and no member's business is another's."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import ExponentialLR

from hydra_tune.errors import UnfusableError
from hydra_tune.fusion.optimizers import StackedOptimizer, check_optimizer

SHAPES = [(3, 4), (5,), ()]
MEMBERS = 3

KINDS = {
    "sgd": [partial(SGD, lr=0.1 / (i + 1), weight_decay=0.01 * i) for i in range(MEMBERS)],
    "momentum": [partial(SGD, lr=0.1, momentum=0.5 + 0.1 * i, dampening=0.1 * i) for i in range(MEMBERS)],
    "some_momentum": [partial(SGD, lr=0.1, momentum=0.9 * (i != 1), dampening=0.1) for i in range(MEMBERS)],
    "nesterov": [partial(SGD, lr=0.1, momentum=0.5 + 0.1 * i, nesterov=True) for i in range(MEMBERS)],
    "adam": [
        partial(Adam, lr=0.1 / (i + 1), betas=(0.8 + 0.05 * i, 0.99), weight_decay=0.1 * i) for i in range(MEMBERS)
    ],
    "adamw": [partial(AdamW, lr=0.1 / (i + 1), eps=10.0 ** -(4 + i), weight_decay=0.1 * i) for i in range(MEMBERS)],
    "decoupled": [partial(Adam, lr=0.1, weight_decay=0.1 * i, decoupled_weight_decay=True) for i in range(MEMBERS)],
    "rmsprop": [partial(RMSprop, lr=0.01 * (i + 1), alpha=0.9 + 0.03 * i) for i in range(MEMBERS)],
    "centered": [partial(RMSprop, lr=0.01, momentum=0.3 * i, centered=True) for i in range(MEMBERS)],
    "adagrad": [partial(Adagrad, lr=0.1, lr_decay=0.1 * i, initial_accumulator_value=0.1 * i) for i in range(MEMBERS)],
}


class Group:
    """Members' own parameters and optimizers, and the same stacked."""

    def __init__(self, kinds):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(MEMBERS, *shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        self.alone = [[nn.Parameter(value[i].clone()) for value in values] for i in range(MEMBERS)]
        self.stacked = [nn.Parameter(value.clone()) for value in values]
        self.own = [kind(parameters) for kind, parameters in zip(kinds, self.alone, strict=True)]
        self.read = [
            kind([nn.Parameter(p.detach().clone()) for p in ps]) for kind, ps in zip(kinds, self.alone, strict=True)
        ]
        self.optimizer = StackedOptimizer(self.read, [self.stacked])
        self.schedules = [ExponentialLR(o, 0.9) for o in (*self.own, *self.read)]
        self.generator = generator

    def step(self, active=(True, True, True), bad=None):
        self.optimizer.active = list(active)
        for place, p in enumerate(self.stacked):
            p.grad = torch.randn(p.shape, generator=self.generator, dtype=p.dtype)
            if bad is not None:
                p.grad[bad] = torch.nan
            for i in range(MEMBERS):
                self.alone[i][place].grad = p.grad[i].clone()
        for own, is_active in zip(self.own, active, strict=True):
            if is_active:
                own.step()
        self.optimizer.step()
        for schedule, is_active in zip(self.schedules, active * 2, strict=True):
            if is_active:
                schedule.step()

    def distance(self, i):
        pairs = [(p[i], a) for p, a in zip(self.stacked, self.alone[i], strict=True)]
        return max(((p - a).abs().max() / a.abs().max()).item() for p, a in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_each_member_goes_where_its_own_optimizer_takes_it(kind):
    group = Group(KINDS[kind])
    for _ in range(50):
        group.step()
    for i in range(MEMBERS):
        assert group.distance(i) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_rests_keeps_its_bits_and_goes_on_where_it_was(kind):
    group = Group(KINDS[kind])
    group.step((True, False, True))  # one begins late
    before = [p[0].clone() for p in group.stacked]
    group.step((False, True, True), bad=0)
    assert all(torch.equal(p[0], b) for p, b in zip(group.stacked, before, strict=True))
    for _ in range(5):
        group.step()
    for i in range(MEMBERS):
        assert group.distance(i) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_goes_nan_leaves_the_bits_of_the_others(kind):
    healthy, ill = Group(KINDS[kind]), Group(KINDS[kind])
    for step in range(4):
        healthy.step()
        ill.step(bad=1 if step == 2 else None)
    for p, q in zip(healthy.stacked, ill.stacked, strict=True):
        assert q[1].isnan().all()
        assert torch.equal(p[0], q[0])
        assert torch.equal(p[2], q[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_members_state_is_as_its_own_optimizer_has_it(kind):
    group = Group(KINDS[kind])
    for _ in range(3):
        group.step()
    for i in range(MEMBERS):
        for p, alone in zip(group.stacked, group.alone[i], strict=True):
            own = {k: v for k, v in group.own[i].state[alone].items() if v is not None}
            found = group.optimizer.member_state(p, i)
            if kind == "some_momentum" and i == 1:
                continue  # its buffer is there, and never used
            if kind == "centered" and i == 0:
                found.pop("momentum_buffer")
            assert found.keys() == own.keys()
            for name, value in own.items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (partial(LBFGS), "LBFGS"),
        (partial(Adam, amsgrad=True), "amsgrad"),
        (partial(SGD, lr=0.1, maximize=True), "maximize"),
        (type("Mine", (AdamW,), {}), "Mine"),
    ],
)
def test_what_has_no_stacked_form_is_refused_by_name(make, told):
    with pytest.raises(UnfusableError, match=told):
        check_optimizer(make([nn.Parameter(torch.zeros(1))]))
