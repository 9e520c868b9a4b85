"""A stacked step is what each member's own optimizer would do, and no member's business is another's."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hydra_tune.batched.batched_optimizer import BatchedOptimizer, is_stackable
from hydra_tune.batched.flat_tensors import runs
from hydra_tune.batched.hyperparameters import MemberRates
from hydra_tune.batched.per_member_optimizer import group_optimizer
from hydra_tune.memory.block import lay_out

SHAPES = [(3, 4), (5,), ()]
MEMBERS = 3


class SoftDescent(Optimizer):
    """A user's own, with state that is made anew at each step, and a number."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["seen"] = state.get("seen", 0) + 1
                state["mean"] = p.grad.lerp(state.get("mean", p.grad), 0.9)
                p.sub_(state["mean"].tanh(), alpha=group["lr"] / state["seen"])


class Replacing(Optimizer):
    """A user's own, which gives each parameter other data."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def hooked(lr, params):
    made = SGD(params, lr=lr)
    made.register_step_pre_hook(
        lambda optimizer, args, kwargs: [p.grad.mul_(2) for p in optimizer.param_groups[0]["params"]] and None
    )
    return made


def two_groups(i, params):
    return AdamW([{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 0.03}], lr=0.1 / (i + 1))


BY_THEMSELVES = {
    "amsgrad": [partial(Adam, lr=0.1 / (i + 1), amsgrad=True) for i in range(MEMBERS)],
    "maximize": [partial(SGD, lr=0.1 / (i + 1), momentum=0.9, maximize=True) for i in range(MEMBERS)],
    "nadam": [partial(NAdam, lr=0.1 / (i + 1)) for i in range(MEMBERS)],
    "mine": [partial(SoftDescent, lr=0.1 / (i + 1)) for i in range(MEMBERS)],
    "replacing": [partial(Replacing, lr=0.1 / (i + 1)) for i in range(MEMBERS)],
    "hooked": [partial(hooked, 0.1 / (i + 1)) for i in range(MEMBERS)],
}

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
    "two_groups": [partial(two_groups, i) for i in range(MEMBERS)],
}
EVERY = KINDS | BY_THEMSELVES


class Group:
    """Members' own parameters and optimizers, and the same stacked."""

    def __init__(self, kinds, *, is_flat=True, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(MEMBERS, *shape, generator=generator, dtype=dtype) for shape in SHAPES]
        self.alone = [[nn.Parameter(value[i].clone()) for value in values] for i in range(MEMBERS)]
        self.stacked = [nn.Parameter(value.clone()) for value in values]
        if is_flat:  # as in a block of memory
            slots, size = lay_out(values, 64)
            flat = torch.full((size,), 255, dtype=torch.uint8)
            for p, slot in zip(self.stacked, slots, strict=True):
                p.data = slot.view(flat).copy_(p.detach())
        self.own = [kind(parameters) for kind, parameters in zip(kinds, self.alone, strict=True)]
        copies = [[nn.Parameter(p.detach().clone()) for p in ps] for ps in self.alone]
        self.read_parameters = copies[0]
        self.read = [kind(ps) for kind, ps in zip(kinds, copies, strict=True)]
        places = {id(p): place for place, p in enumerate(self.read_parameters)}
        groups = [[self.stacked[places[id(p)]] for p in group["params"]] for group in self.read[0].param_groups]
        self.optimizer = group_optimizer(self.read, groups)
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


@pytest.mark.parametrize(
    ("kind", "is_flat"), [*((kind, True) for kind in EVERY), ("momentum", False), ("adamw", False)]
)
def test_each_member_goes_where_its_own_optimizer_takes_it(kind, is_flat):
    group = Group(EVERY[kind], is_flat=is_flat)
    assert isinstance(group.optimizer, BatchedOptimizer) == (kind in KINDS)
    for _ in range(50):
        group.step()
    for i in range(MEMBERS):
        assert group.distance(i) < 1e-12


@pytest.mark.parametrize("kind", EVERY)
def test_a_member_that_rests_keeps_its_bits_and_goes_on_where_it_was(kind):
    group = Group(EVERY[kind])
    group.step((True, False, True))  # one begins late
    before = [p[0].clone() for p in group.stacked]
    group.step((False, True, True), bad=0)
    assert all(torch.equal(p[0], b) for p, b in zip(group.stacked, before, strict=True))
    for _ in range(5):
        group.step()
    for i in range(MEMBERS):
        assert group.distance(i) < 1e-12


@pytest.mark.parametrize("kind", EVERY)
def test_a_member_that_goes_nan_leaves_the_bits_of_the_others(kind):
    healthy, ill = Group(EVERY[kind]), Group(EVERY[kind])
    for step in range(4):
        healthy.step()
        ill.step(bad=1 if step == 2 else None)
    for p, q in zip(healthy.stacked, ill.stacked, strict=True):
        assert q[1].isnan().all()
        assert torch.equal(p[0], q[0])
        assert torch.equal(p[2], q[2])


@pytest.mark.parametrize("kind", EVERY)
def test_a_members_state_is_as_its_own_optimizer_has_it(kind):
    group = Group(EVERY[kind])
    for _ in range(3):
        group.step()
    for i in range(MEMBERS):
        for p, alone in zip(group.stacked, group.alone[i], strict=True):
            own = {k: v for k, v in group.own[i].state[alone].items() if v is not None}
            found = group.optimizer.member_state(p, i)
            assert found.keys() == own.keys()
            for name, value in own.items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "kinds",
    [
        [partial(SGD, lr=0.1 * 0.7**i, momentum=0.9) for i in (0, 0, 1)],
        [partial(AdamW, lr=0.1 * 0.7**i) for i in (0, 0, 1)],
        [partial(AdamW, lr=0.1 * 0.7**i, betas=(0.9 - 0.1 * i, 0.99)) for i in (0, 0, 1)],
        [partial(RMSprop, lr=0.1, alpha=0.9 - 0.1 * i, momentum=0.5) for i in (0, 0, 1)],
        [partial(Adagrad, lr=0.1 * 0.7**i) for i in (0, 0, 1)],
    ],
)
def test_a_member_that_rests_leaves_the_bits_of_the_others_whatever_its_rates(kinds):
    """Others that have the same rates among themselves round as they did beside a member that has not."""
    together, resting = (Group(kinds, dtype=torch.float32) for _ in range(2))
    for step in range(6):
        together.step()
        resting.step((True, True, step < 2))
    for p, q in zip(together.stacked, resting.stacked, strict=True):
        assert torch.equal(p[:2], q[:2])
        assert not torch.equal(p[2], q[2])


def test_parameters_that_lie_one_behind_the_other_take_one_step():
    """The gaps between them are stepped, too, so each run is one tensor; state lies as they do."""
    group = Group(KINDS["adamw"])
    group.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert len({group.optimizer.state[p][name].untyped_storage().data_ptr() for p in group.stacked}) == 1


def gradients_as_the_parameters_lie(group, extra=0):
    """The gradients of the next step, in a buffer with so many more bytes."""
    slots, size = lay_out(group.stacked, 64)
    buffer = torch.full((size + extra,), 63, dtype=torch.uint8)
    return buffer, [slot.view(buffer).copy_(p.grad) for p, slot in zip(group.stacked, slots, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_lie_as_the_parameters_do_give_the_same_step(kind):
    apart, together = Group(KINDS[kind]), Group(KINDS[kind])
    for _ in range(3):
        apart.step()
        before = together.optimizer.step

        def step(before=before):
            _, gradients = gradients_as_the_parameters_lie(together)
            for p, gradient in zip(together.stacked, gradients, strict=True):
                p.grad = gradient
            before()

        together.optimizer.step = step
        together.step()
        together.optimizer.step = before
    for p, q in zip(apart.stacked, together.stacked, strict=True):
        assert torch.equal(p, q)


def test_a_buffer_that_holds_more_than_gradients_is_only_read():
    group = Group(KINDS["adamw"])
    group.step()
    buffer, gradients = gradients_as_the_parameters_lie(group, extra=8)
    before = buffer.clone()
    for p, gradient in zip(group.stacked, gradients, strict=True):
        p.grad = gradient
    group.optimizer.step()
    assert torch.equal(buffer, before)


def test_an_optimizer_that_every_step_is_told_of_is_stepped_by_itself():
    seen = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: seen.append(optimizer) and None)
    try:
        group = Group(KINDS["sgd"])
        group.step()
    finally:
        handle.remove()
    assert [optimizer for optimizer in seen if optimizer not in group.own] == group.read


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adamw", "rmsprop", "centered", "adagrad"])
def test_complex_parameters_go_where_each_members_own_optimizer_takes_them(kind):
    group = Group(KINDS[kind], dtype=torch.complex128)
    for _ in range(20):
        group.step()
    for i in range(MEMBERS):
        assert group.distance(i) < 1e-12


def test_state_that_lies_elsewhere_is_stepped_all_the_same():
    group = Group(KINDS["adamw"])
    group.step()
    for p in group.stacked:
        entries = group.optimizer.state[p]
        entries["exp_avg"] = entries["exp_avg"].clone()
    group.step()
    assert max(group.distance(i) for i in range(MEMBERS)) < 1e-12


@pytest.mark.parametrize("kind", EVERY)
def test_only_what_is_known_is_stepped_at_once(kind):
    group = Group(EVERY[kind])
    assert is_stackable(group.own[0]) == (kind in KINDS)


def test_parameters_that_come_to_where_others_were_are_stepped_themselves():
    """As those of two shards that are on a device in turns, at one address."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(MEMBERS, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    place = torch.empty(MEMBERS, 4, dtype=torch.float64)
    stacked = [nn.Parameter(value.clone()) for value in values]
    members = [
        SGD([nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2)], lr=0.5) for _ in range(MEMBERS)
    ]
    optimizer = group_optimizer(members, [stacked])
    for p in stacked * 2:
        home = p.data
        p.data = place.copy_(home)
        p.grad = torch.ones_like(p)
        optimizer.step()
        p.grad = None
        p.data = home.copy_(place)
    for p, value in zip(stacked, values, strict=True):
        torch.testing.assert_close(p.detach(), value - 1.0)


def test_members_may_have_options_that_their_schedulers_alone_have_added():
    common = {"params": [], "lr": 0.1, "momentum": 0.9}
    cyclic = common | {"max_lr": 0.2, "base_momentum": 0.8}
    for groups in ([common, cyclic], [cyclic, common]):
        rates = MemberRates(groups)
        rates.read()
        assert rates("lr") == (0.1, 0.1)
        groups[0]["lr"] = groups[1]["lr"] = 0.3
        rates.read()
        assert rates("lr") == (0.3, 0.3), "read anew at each step"
        groups[0]["lr"] = groups[1]["lr"] = 0.1
    rates = MemberRates([cyclic, cyclic])
    rates.replace(1, common)
    rates.read()
    assert rates("momentum") == (0.9, 0.9)


def test_tensors_are_stepped_as_one_across_padding_and_never_across_another_tensor():
    """Each lies at a multiple of 64 bytes, as a block lays them out; what is between them may be somebody else's."""
    memory = torch.zeros(24, dtype=torch.float64)
    first, between, last = memory[:5], memory[8:16], memory[16:]
    assert [len(entries) for _, entries in runs([(first, 0), (between, 0), (last, 0)])] == [3]
    assert [len(entries) for _, entries in runs([(first, 0), (last, 0)])] == [1, 1]
