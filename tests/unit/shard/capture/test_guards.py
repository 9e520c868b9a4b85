"""A step that asks for values of its batch has a plan for each answer, and no plan serves a batch with another."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune.shard.capture.guards import BatchGuardRecorder
from hydra_tune.shard.capture.value_replay import ask
from hydra_tune.shard.partition.plan_cache import PlanLibrary, ShardPlanConstraints
from hydra_tune.shard.verify.step_outcome import StepOperatorRecorder
from tests.unit.shard.bench import task_of

FULL, PADDED, OTHER = ([1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1])


class Asks(nn.Module):
    """As attention masks are treated: not applied if there is nothing to mask, but never asked while compiling."""

    def __init__(self, skipped=1.0):
        super().__init__()
        self.first, self.last, self.skipped = nn.Linear(8, 8), nn.Linear(8, 8), skipped

    def forward(self, x, mask):
        x = self.first(x)
        applied = torch.compiler.is_compiling() or not self.asked(mask)
        return self.last(x * mask[:, None] if applied else x * self.skipped)

    def asked(self, mask):
        return mask.bool().all()


def batch(mask):
    source = torch.Generator().manual_seed(7)
    return torch.randn(4, 8, generator=source), torch.tensor(mask)


def step(module, given):
    return functional.mse_loss(module(*given), given[0])


class Bench:
    """A library, a model and its task; `plan(mask)` is what the library prepares for a batch with that mask."""

    def __init__(self, model):
        self.model = model
        self.task = task_of(model, step=step, train=lambda: [batch(PADDED)])
        self.optimizer = self.task.optimizer(list(model.parameters()))
        self.plans = PlanLibrary(
            ShardPlanConstraints(budget_bytes=1 << 30, buffer_fraction=0.15, alignment=64, num_shards=2)
        )

    def plan(self, mask):
        return self.plans.prepare(self.task, self.model, self.optimizer, batch(mask), "train")


def test_a_plan_serves_the_batches_that_give_the_same_answer():
    bench = Bench(Asks())
    prepared = bench.plan(PADDED)
    assert len(prepared.plan.shards) == 2
    assert prepared.serves(batch(OTHER))
    assert not prepared.serves(batch(FULL))


def test_each_answer_has_a_plan_of_its_own():
    bench = Bench(Asks())
    padded, full = bench.plan(PADDED), bench.plan(FULL)
    assert full is not padded
    assert not full.plan.eager
    assert full.serves(batch(FULL))
    assert not full.serves(batch(PADDED))
    assert bench.plan(OTHER) is padded
    assert bench.plan(FULL) is full


def test_each_answer_may_lead_to_other_arithmetic():
    bench = Bench(Asks(skipped=1.5))
    padded, full = bench.plan(PADDED).plan, bench.plan(FULL).plan
    assert not padded.eager
    assert not full.eager
    assert padded.operators != full.operators


class AsksKind(Asks):
    """Notices that a capture's tensors have no values."""

    def asked(self, mask):
        return type(mask) is not torch.Tensor or mask.bool().all()


def test_an_answer_for_which_the_graph_is_wrong_runs_whole():
    """Equal on full batches, another number on padded ones: only these must not be cut."""
    bench = Bench(AsksKind(skipped=1.5))
    assert not bench.plan(FULL).plan.eager
    padded = bench.plan(PADDED)
    assert padded.plan.eager
    assert not padded.serves(batch(FULL))
    assert not bench.plan(FULL).plan.eager


class Classes(Asks):
    """`one_hot` looks for the largest class, wherever it runs."""

    def forward(self, x, mask):
        x = self.last(self.first(x) * 2) if self.asked(mask) else self.first(x)
        return self.last(x * functional.one_hot(mask, 8))

    def asked(self, mask):
        return True


class AsksClasses(Classes):
    def asked(self, mask):
        return mask.all()


def test_what_the_graph_reads_for_itself_is_not_asked_beforehand():
    bench = Bench(Classes())
    prepared = bench.plan([1, 2, 3, 4])
    assert len(prepared.plan.shards) == 2
    assert prepared.guard is None
    assert bench.plan([0, 7, 7, 7]) is prepared


def test_a_step_may_ask_beside_operators_that_read_for_themselves():
    bench = Bench(AsksClasses())
    prepared = bench.plan([1, 2, 3, 4])
    assert len(prepared.plan.shards) == 2
    assert prepared.serves(batch([1, 3, 2, 4]))
    assert not prepared.serves(batch([0, 3, 2, 4]))


class AsksWeights(Asks):
    def asked(self, mask):
        return (self.first.weight.abs() * mask.max()).sum() < 0


class AsksChance(Asks):
    def asked(self, mask):
        return torch.rand(()) < 0


@pytest.mark.parametrize("model", [AsksWeights, AsksChance])
def test_questions_about_anything_else_are_not_answered_beforehand(model):
    prepared = Bench(model()).plan(PADDED)
    assert prepared.plan.eager
    assert prepared.guard is None


def recorded(code, *tensors):
    """The guard of some code over a batch of these tensors, and how many operators serve it alone."""
    recorder = BatchGuardRecorder(tensors)
    with StepOperatorRecorder(recorder):
        code(*tensors)
    return recorder.finish()


def masks(*values):
    return (torch.tensor(values),)


def in_place(mask):
    copy = mask.clone()
    copy[:2].mul_(0)
    return bool(copy.any())


def with_a_constant(mask):
    return bool((mask * torch.tensor([1, 2, 3, 4])).sum() > torch.tensor(7))


def by_an_operator_that_returns_nothing(mask):
    found = torch.zeros_like(mask)
    torch._foreach_add_([found], [mask])
    return bool(found.all())


def through_views(mask):
    return bool(mask.view(2, 2).t()[0].all())


@pytest.mark.parametrize(
    ("code", "same", "other"),
    [
        (in_place, [0, 1, 0, 1], [1, 1, 0, 0]),
        (with_a_constant, [1, 1, 1, 1], [1, 1, 0, 1]),
        (by_an_operator_that_returns_nothing, [1, 1, 1, 1], [1, 1, 0, 1]),
        (through_views, [1, 0, 1, 0], [1, 1, 0, 1]),
        (lambda mask: mask.sum().item(), [1, 1, 0, 1], [1, 1, 1, 1]),
        (lambda mask: torch.equal(mask, torch.ones_like(mask)), [1, 1, 1, 1], [1, 1, 1, 0]),
    ],
)
def test_questions_are_played_again_as_they_were_asked(code, same, other):
    start = {in_place: [1, 1, 0, 1], with_a_constant: [1, 1, 1, 1], through_views: [1, 1, 1, 1]}.get(code, same)
    given = masks(*start)
    guard, _ = recorded(code, *given)
    assert guard.holds(given)
    assert given[0].tolist() == start
    assert guard.holds(masks(*same))
    assert not guard.holds(masks(*other))


def test_a_batch_that_is_changed_in_the_asking_is_left_alone_when_asked_again():
    guard, _ = recorded(lambda mask: bool(mask.sub_(1).any()), *masks(1, 1))
    given = masks(1, 1)
    assert guard.holds(given)
    assert given[0].tolist() == [1, 1]


def test_what_was_overwritten_by_something_unknown_is_unknown():
    weight = torch.ones(2)

    def code(mask):
        copy = mask.float()
        copy.copy_(weight)
        return bool(copy.all())

    guard, numbers = recorded(code, *masks(1, 0))
    assert guard is None
    assert numbers == frozenset()


def test_answers_are_compared_to_the_last_bit():
    def code(x):
        return x[0].item()

    guard, _ = recorded(code, torch.zeros(1))
    assert guard.holds((torch.zeros(1),))
    assert not guard.holds((-torch.zeros(1),))
    guard, _ = recorded(code, torch.full((1,), float("nan")))
    assert guard.holds((torch.full((1,), float("nan")),))


def test_a_batch_is_known_in_the_memory_of_something_unknown_that_is_gone():
    mask = torch.ones(16)
    recorder = BatchGuardRecorder([mask])
    with StepOperatorRecorder(recorder):
        for _ in range(20):
            unknown = torch.rand(16).relu_()
            del unknown
            assert (mask * 1).any()
    assert not recorder.asks_otherwise


@pytest.mark.parametrize("hand_out", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_a_step_that_reads_what_cannot_be_followed_has_no_answers(hand_out):
    class Reads(Asks):
        def asked(self, mask):
            level = float(hand_out(self.first.bias.detach())[0])
            return torch.full((), level) * mask.min() < mask.max()

    model = Reads()
    assert ask(task_of(Asks(), step=step), Asks(), "train", batch(PADDED))
    assert not ask(task_of(model, step=step), model, "train", batch(PADDED))


def test_without_questions_there_is_no_guard():
    assert recorded(lambda mask: mask + 1, *masks(1, 0)) == (None, frozenset())


def test_only_what_leads_to_a_question_serves_it():
    guard, numbers = recorded(lambda mask: (mask * 3, bool(mask.all())), *masks(1, 0))
    assert [str(call.func) for call in guard.calls] == ["aten.all.default", "aten._local_scalar_dense.default"]
    assert len(numbers) == 2
