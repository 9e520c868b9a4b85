"""Members that come late, go early, or go and come back, leave all others as they were."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, AdamW, RMSprop, lr_scheduler
from torch.utils.data import TensorDataset

from hydra_tune.fusion.group import group_trial, multi_step_unit
from hydra_tune.fusion.group.member import MemberTrial
from tests.unit.fusion.group.test_group_trial import X, Y, small
from tests.unit.fusion.groups import Run, assert_as_plain

pytestmark = pytest.mark.usefixtures("captured_once")

OPTIMIZERS = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(AdamW, lr=1e-2),
    "RMSprop": partial(RMSprop, lr=1e-3, momentum=0.5),
    "Adagrad": partial(Adagrad, lr=1e-2, initial_accumulator_value=0.1),
}


def by(*in_every_run):
    marks = {name: () if name in in_every_run else pytest.mark.slow for name in OPTIMIZERS}
    return pytest.mark.parametrize("optimizer", [pytest.param(name, marks=marks[name]) for name in OPTIMIZERS])


@pytest.fixture(autouse=True)
def step_by_step(monkeypatch):
    """Who comes and goes is counted in units, of which each step has two here."""
    monkeypatch.setattr(multi_step_unit, "_SHARE", 0.0)


def assert_bits(run, other, indices):
    for index in indices:
        for name, tensor in other.weights(index).items():
            assert torch.equal(tensor, run.weights(index)[name]), (index, name)


@pytest.mark.cases(1)
@by("AdamW", "RMSprop")
def test_a_member_that_comes_late_has_a_free_place_and_changes_nobody(optimizer):
    """The first ends early; the one in its place begins while the others are in the middle of their second epoch."""
    optimizer = OPTIMIZERS[optimizer]
    tasks = [small(seed=s, epochs=1 if s == 0 else 4, optimizer=optimizer) for s in range(3)]
    late = small(seed=7, epochs=2, optimizer=optimizer)
    without, run = Run(tasks), Run(tasks, later=[(12, late)])
    assert set(run.sizes) == {3}
    assert run.trial.seats[0] is run.seats[3]
    for index, task in enumerate([*tasks, late]):
        assert_as_plain(run, index, task)
    assert_bits(run, without, range(3))


@pytest.mark.cases(1 / 3)
def test_members_that_come_while_another_is_out_of_step_have_its_place_one_after_the_other():
    tasks = [small(seed=s, epochs=8 if s else 1) for s in range(2)]
    later = [(0, small(seed=9, epochs=1, train=TensorDataset(X[:21], Y[:21]))), (0, small(seed=5, epochs=2))]
    run = Run(tasks, later=later)
    assert run.sizes[:24] == [2] * 24
    for index, task in enumerate([*tasks, *(task for _, task in later)]):
        assert_as_plain(run, index, task)


@pytest.mark.cases(1 / 3)
def test_a_member_that_comes_late_and_fails_leaves_the_others_bits():
    class Broken(TensorDataset):
        def __getitem__(self, index):
            raise RuntimeError("unreadable")

    tasks = [small(seed=s, epochs=1 if s == 0 else 4) for s in range(3)]
    without = Run(tasks)
    stepping = partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 - epoch))
    for changes in ({"train": Broken(X, Y)}, {"scheduler": stepping}, {"validate": Broken(X, Y)}):
        run = Run(tasks, later=[(9, small(seed=7, **changes))])
        assert [seat.status for seat in run.seats] == ["completed"] * 3 + ["failed"]
        assert_bits(run, without, range(3))


def test_state_that_a_member_brings_back_moves_with_the_groups_state():
    """Of an optimizer that steps member by member: a block that goes to a GPU has to have the tensors."""
    tasks = [small(seed=s, epochs=4, optimizer=partial(AdamW, lr=1e-2, amsgrad=True)) for s in range(3)]
    apart = []

    def before(run, unit):
        if len(run.units) == 4:
            run.seats[1].is_paused = True
        if run.trial.state is not None:
            held = run.trial.state.aliases()
            entries = run.trial.state.optimizer.state.values()
            apart.extend(key for one in entries for key, value in one.items() if id(value) not in held)

    run = Run(tasks, before=before, back=8)
    assert run.trial.seats[1] is run.seats[1]
    assert not apart
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)


def annealed(dropout, **changes):
    """A task with a dropout of its own, whose step reads a number that changes at each step."""
    schedule = SimpleNamespace(weight=0.0)

    def train():
        for step in range(3):
            schedule.weight = 0.5 * step
            yield X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]

    return small(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 4)).double(),
        step=lambda module, batch: functional.cross_entropy(module(batch[0]), batch[1]) * (1 + schedule.weight),
        **{"train": train, "loss": None, "batch_size": None, "validate": None, **changes},
    )


@pytest.mark.cases(1 / 3)
def test_members_that_join_do_not_count_as_values_of_the_state(monkeypatch):
    """Each has an architecture of its own, by its dropout."""
    monkeypatch.setattr(group_trial, "_MAX_STATES", 3)
    tasks = [annealed(0.1 + 0.05 * number, seed=number, epochs=1 if number else 9) for number in range(7)]
    run = Run(tasks[:2], waits=False, later=[(0, task) for task in tasks[2:]])
    assert [seat.status for seat in run.seats] == ["completed"] * 7
    for index, task in enumerate(tasks[:3]):
        assert_as_plain(run, index, task)


@pytest.mark.cases(1 / 3)
def test_a_stack_shrinks_and_grows_and_members_are_as_alone():
    """Four members, of which one is left; then five come."""
    tasks = [small(seed=s, epochs=20 if s == 2 else 1) for s in range(4)]
    later = [(70 + s, small(seed=5 + s, epochs=3)) for s in range(5)]
    run = Run(tasks, later=later, most=8)
    changes = [size for size, before in zip(run.sizes, [0, *run.sizes], strict=False) if size != before]
    assert changes[:3] == [4, 1, 2]
    assert 8 in changes
    for index, task in enumerate([*tasks, *(task for _, task in later)]):
        assert_as_plain(run, index, task)


def test_a_vacant_place_is_kept_for_some_steps_before_the_stack_shrinks():
    tasks = [small(seed=s, epochs=20 if s == 0 else 1) for s in range(2)]
    run = Run(tasks, later=[(20, small(seed=5, epochs=1))])
    first = run.sizes.index(1)
    assert run.trial.seats[0].status == "completed"
    assert run.sizes[:first] == [2] * first
    assert first > 2 * 16


@pytest.mark.cases(1)
@by("SGD", "Adagrad")
def test_a_member_that_leaves_and_comes_back_is_as_if_it_had_never_paused(optimizer):
    def before(run, unit):
        if len(run.units) == 7:
            run.seats[1].is_paused = True

    tasks = [small(seed=s, epochs=3 if s == 1 else 5, optimizer=OPTIMIZERS[optimizer]) for s in range(3)]
    run = Run(tasks, before=before, back=25)
    healthy = Run(tasks)
    assert set(run.sizes[:25]) == {3}
    for index, task in enumerate(tasks):
        assert_as_plain(run, index, task)
    assert_bits(run, healthy, range(3))


class Odd(AdamW):
    """Has no form for all members at once."""


@pytest.mark.cases(1 / 3)
def test_members_that_step_by_their_own_optimizers_come_and_go():
    """Stacked, each member's optimizer is its own; one comes late, one leaves and comes back, and the stack shrinks."""

    def before(run, unit):
        if len(run.units) == 7:
            run.seats[1].is_paused = True

    tasks = [small(seed=s, epochs=(1, 3, 24, 2)[s], optimizer=partial(Odd, lr=1e-2)) for s in range(4)]
    late = small(seed=7, epochs=2, optimizer=partial(Odd, lr=1e-2))
    run = Run(tasks, before=before, back=30, later=[(12, late)])
    assert {4, 1} <= set(run.sizes)
    for index, task in enumerate([*tasks, late]):
        assert_as_plain(run, index, task)


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_a_member_that_would_change_how_the_others_round_is_not_admitted(kind):
    """Operators of one number for all do not round as those of another for each."""
    seen = []

    def before(run, unit):
        if unit.kind == "evaluate" and not seen:
            library, device = run.library, run.device
            for decay in (0.1, 0.2):
                member = MemberTrial(small(optimizer=partial(kind, lr=1e-2, weight_decay=decay)), library, device)
                seen.append(run.trial.admits(member))
                member.close(keep=False)

    Run([small(seed=s, optimizer=partial(kind, lr=1e-2 * (s + 1), weight_decay=0.1)) for s in range(2)], before=before)
    assert seen == [True, False]


def test_a_member_that_clips_is_not_admitted_where_losses_are_scaled_and_nobody_clips():
    seen = []

    def before(run, unit):
        if unit.kind == "evaluate" and not seen:
            for norm in (None, 0.1):
                member = MemberTrial(small(precision="float16", max_grad_norm=norm), run.library, run.device)
                seen.append(run.trial.admits(member))
                member.close(keep=False)

    Run([small(seed=s, precision="float16") for s in range(2)], before=before)
    assert seen == [True, False]
