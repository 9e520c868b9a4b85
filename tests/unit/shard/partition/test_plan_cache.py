"""Each architecture is captured once, whoever asks; what cannot be captured runs whole; nothing of it shows in the trial."""

import copy
import dataclasses
import functools
import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from hydra_tune import TrainTask
from hydra_tune.errors import BudgetError, CaptureError, TaskError
from hydra_tune.shard.capture.batch import flatten
from hydra_tune.shard.capture.capture_lock import GATE
from hydra_tune.shard.cost import update_pilot
from hydra_tune.shard.execute.eager_plan import state_plan
from hydra_tune.shard.partition import plan_cache as library_module
from hydra_tune.shard.partition import trial_step as capture_module
from hydra_tune.shard.partition.plan_cache import PlanLibrary, ShardPlanConstraints
from hydra_tune.shard.partition.plan_request import TrialStateLayout
from hydra_tune.shard.python_state.state_guard import TaskStateGuard
from tests.parity.models import build
from tests.unit.pool.tasks import against_plain, running
from tests.unit.shard.bench import first_batch, task_of, vectors
from tests.unit.shard.verify.test_plan_check import TRAPS, unseen

PATIENCE_SECONDS = 60


class Branch(nn.Module):
    """Cannot be captured: it looks at a value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum() > 0 else -y


def library(budget_bytes=1 << 30, num_shards=None, buffer_fraction=0.15):
    return PlanLibrary(
        ShardPlanConstraints(
            budget_bytes=budget_bytes, buffer_fraction=buffer_fraction, alignment=64, num_shards=num_shards
        )
    )


def prepare(plans, task, batch=None, mode="train", like=None, model=None):
    model = task.model() if model is None else model
    optimizer = task.optimizer(list(model.parameters()))
    return plans.prepare(task, model, optimizer, first_batch(task) if batch is None else batch, mode, like)


@pytest.fixture
def captures(monkeypatch):
    """The modes of the captures that really ran."""
    modes = []
    real = capture_module.capture

    def counted(task, twin, batch, mode, *rest, **options):
        modes.append(mode)
        return real(task, twin, batch, mode, *rest, **options)

    monkeypatch.setattr(capture_module, "capture", counted)
    return modes


def test_a_second_trial_of_an_architecture_is_not_captured_again(captures):
    plans = library()
    one = prepare(plans, build("mlp", seed=1))
    other = prepare(plans, build("mlp", seed=2))
    assert other is one
    assert captures == ["train"]
    assert one.seconds is not None


class Clipped(torch.optim.Optimizer):
    """Steps each parameter by itself, unless an attribute bounds the norm of all gradients."""

    def __init__(self, params, bound=None):
        super().__init__(params, {"lr": 0.1})
        self.bound = bound

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.bound is not None and parameters:
            nn.utils.clip_grad_norm_(parameters, self.bound)
        for p in parameters:
            p.sub_(0.1 * p.grad)


def hooked(params, hook=None):
    optimizer = torch.optim.SGD(params, lr=0.1)
    if hook is not None:
        optimizer.register_step_post_hook(hook)
    return optimizer


@pytest.mark.parametrize(
    ("first", "second"),
    [(Clipped, partial(Clipped, bound=1e-3)), (hooked, partial(hooked, hook=lambda *arguments: None))],
    ids=["attribute", "hook"],
)
def test_a_plan_of_another_trial_serves_no_optimizer_that_couples_shards(first, second, captures):
    plans = library(num_shards=2)
    prepare(plans, build("mlp", optimizer=first))
    with pytest.raises(TaskError, match="cannot be stepped shard by shard"):
        prepare(plans, build("mlp", optimizer=second))
    assert prepare(plans, build("mlp", optimizer=second), mode="evaluate").plan.mode == "evaluate"
    assert captures == ["train", "evaluate"]


@pytest.mark.parametrize(("optimizer", "num_checks"), [(torch.optim.Adam, 1), (Clipped, 2)])
def test_optimizers_of_torch_are_not_checked_for_each_trial(optimizer, num_checks, monkeypatch):
    plans, checked = library(num_shards=2), []
    monkeypatch.setattr(library_module, "check_separable", lambda *arguments: checked.append(arguments))
    found = [prepare(plans, build("mlp", optimizer=optimizer)) for _ in range(2)]
    assert found[0] is found[1]
    assert len(checked) == num_checks
    prepare(plans, build("mlp", optimizer=optimizer), like=layout_of(found[0]))
    checked.clear()
    prepare(plans, build("mlp", optimizer=optimizer), like=layout_of(found[0]))
    assert checked == [], "with the first plan of the trial"


def test_other_modes_batches_and_optimizers_are_captured_apart(captures):
    plans, task = library(), build("mlp")
    x, y = first_batch(task)
    first = prepare(plans, task, (x, y))
    assert prepare(plans, task, (x[:5].clone(), y[:5].clone())) is not first
    assert prepare(plans, task, (x, y), "evaluate") is not first
    assert prepare(plans, build("mlp", optimizer=torch.optim.SGD), (x, y)) is not first
    assert captures == ["train", "train", "evaluate", "train"]
    assert prepare(plans, build("mlp", optimizer=torch.optim.Adagrad), (x, y), "evaluate").plan.mode == "evaluate"
    assert captures == ["train", "train", "evaluate", "train"], "an evaluation knows no optimizer"


def test_a_capture_that_failed_is_not_tried_again(captures):
    plans = library()
    for _ in range(2):
        assert prepare(plans, task_of(Branch())).plan.eager
    assert captures == ["train"]


def test_a_loss_with_other_weights_is_another_graph():
    """Class weights are a hyperparameter like any other."""
    plans = library()
    batch = vectors()[0], torch.tensor([0, 1, 2, 0])
    model = nn.Linear(8, 3)
    found = []
    for weight in ([1.0, 2.0, 3.0], [1.0, 2.0, 9.0]):
        task = task_of(model, loss=nn.CrossEntropyLoss(weight=torch.tensor(weight)))
        (constant,) = prepare(plans, task, batch).plan.constants.values()
        found.append(constant.tolist())
    assert found == [[1.0, 2.0, 3.0], [1.0, 2.0, 9.0]]


@pytest.mark.parametrize("trap", TRAPS)
def test_a_model_that_a_graph_cannot_follow_runs_whole(trap):
    assert prepare(library(), task_of(trap())).plan.eager


def test_a_buffer_written_without_gradients_is_known_to_be_written():
    """Otherwise the pool would take the device's copy for clean and lose it."""

    class Observer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x):
            x = self.first(x)
            with torch.no_grad():
                self.largest.copy_(torch.maximum(self.largest, x.abs().max()))
            return self.last(x) / (1 + self.largest)

    plan = prepare(library(), task_of(Observer())).plan
    assert plan.eager or "largest" in {name for shard in plan.shards for name in shard.graph.written_state}


@pytest.mark.parametrize("mode", ["train", "evaluate"])
def test_nothing_of_a_preparation_shows_in_the_trial(mode):
    task = build("mlp")
    model = task.model()
    before = copy.deepcopy(model.state_dict())
    batch = first_batch(task)
    kept = [tensor.clone() for tensor in flatten(batch).tensors]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - the stream models draw from
    prepare(library(), task, batch, mode, model=model)
    assert torch.get_rng_state().equal(states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # noqa: NPY002
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(a.equal(b) for a, b in zip(kept, flatten(batch).tensors, strict=True))


def test_the_streams_of_a_model_that_draws_and_runs_whole_come_back():
    task = task_of(nn.Sequential(Branch(), nn.Dropout(0.5)))
    states = torch.get_rng_state()
    assert prepare(library(), task).plan.eager
    assert torch.get_rng_state().equal(states)


def test_streams_come_back_though_the_preparation_fails():
    task = task_of(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), loss=lambda output, target: output)
    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(TaskError, match="reduce it"):
        prepare(library(), task)
    assert torch.get_rng_state().equal(states[0])
    assert random.getstate() == states[1]


def test_a_budget_that_cannot_be_met_is_an_error_and_not_a_model_run_whole():
    with pytest.raises(BudgetError, match="raise device_memory"):
        prepare(library(1024), build("mlp"))


def test_a_model_that_must_run_whole_and_does_not_fit_says_why():
    with pytest.raises(BudgetError) as caught:
        prepare(library(512), task_of(Branch()))
    assert "the model cannot be cut (torch.export cannot capture this model: GuardOnDataDependentSymNode" in str(
        caught.value
    )
    assert "whole it needs" in str(caught.value)


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "gpt2"))])
def test_further_plans_of_a_trial_are_cut_like_its_first(name):
    plans, task = library(num_shards=4), build(name)
    batch = first_batch(task)
    model = task.model()
    first = prepare(plans, task, batch, model=model).plan
    owners = {n: shards[0] for n, shards in first.used_state().items() if len(shards) == 1}
    like = TrialStateLayout(plan=first, owners=owners)
    smaller = (
        {k: v[:3].clone() for k, v in batch.items()} if isinstance(batch, dict) else [v[:3].clone() for v in batch]
    )
    second = prepare(plans, task, smaller, like=like, model=model).plan
    assert second.cuts == first.cuts
    evaluation = prepare(plans, task, batch, "evaluate", like=like, model=model).plan
    for parameter, shards in evaluation.used_state().items():
        if parameter in owners:
            assert len(shards) == 1, "a shard's group is used by one shard of the evaluation too"
    assert len(evaluation.shards) >= 2


def test_trials_that_ask_at_once_share_one_capture(captures):
    plans = library()
    barrier = threading.Barrier(3)

    def ask(seed):
        task = build("vit", seed=seed)
        barrier.wait(PATIENCE_SECONDS)
        return prepare(plans, task)

    with ThreadPoolExecutor(3) as threads:
        found = [future.result(PATIENCE_SECONDS) for future in [threads.submit(ask, seed) for seed in range(3)]]
    assert found[0] is found[1] is found[2]
    assert captures == ["train"]


def test_a_capture_is_alone_and_eager_code_never_sees_it(monkeypatch):
    """`torch.compiler.is_compiling()` is true in all threads while one exports."""
    exporting = threading.Event()
    alone, answers = [], []
    real = capture_module.capture

    def capture(task, twin, batch, mode, *rest, **options):
        exporting.set()
        alone.append(GATE._is_exclusive)
        return real(task, twin, batch, mode, *rest, **options)

    monkeypatch.setattr(capture_module, "capture", capture)

    def eager():
        assert exporting.wait(PATIENCE_SECONDS)
        with GATE.shared():
            answers.append(torch.compiler.is_compiling())

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(eager)
        prepare(library(), build("mlp"))
        future.result(PATIENCE_SECONDS)
    assert alone == [True]
    assert answers == [False]


@pytest.mark.parametrize("plan", ["cut", "whole", "uncaptured"])
def test_updates_are_measured_inside_the_gate(plan, monkeypatch):
    """Optimizers ask `torch.compiler.is_compiling()`; RAdam's update then takes a fifth less memory."""
    inside = []
    step = torch.optim.RAdam.step

    @functools.wraps(step)
    def noted(*arguments):
        inside.append(GATE._sharing > 0 or GATE._is_exclusive)
        return step(*arguments)

    monkeypatch.setattr(torch.optim.RAdam, "step", noted)
    monkeypatch.setattr(update_pilot, "_KNOWN", {})
    task = task_of(
        Branch() if plan == "whole" else nn.Linear(8, 8), optimizer=partial(torch.optim.RAdam, foreach=False)
    )
    if plan == "uncaptured":
        model = task.model()
        state_plan(task, model, task.optimizer(model.parameters()), library().budget)
    else:
        assert prepare(library(), task).plan.eager == (plan == "whole")
    assert len(inside) > 1
    assert all(inside)


def test_a_model_that_cannot_be_copied_says_so():
    class Single(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("only one of me")

    with pytest.raises(CaptureError, match="Single cannot be copied: RuntimeError: only one of me"):
        prepare(library(), task_of(Single(8, 8)))


class Counts(nn.Module):
    """Its evaluation is a graph, but what the graph holds moves with every training step."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += self.training
        return self.linear(x) * (1 + self.calls)


def layout_of(prepared):
    used = prepared.plan.used_state()
    return TrialStateLayout(
        plan=prepared.plan, owners={name: shards[0] for name, shards in used.items() if len(shards) == 1}
    )


def test_where_training_runs_whole_evaluation_does_too():
    plans, task = library(), task_of(Counts())
    assert not prepare(plans, task, mode="evaluate").plan.eager
    training = prepare(plans, task)
    assert training.plan.eager
    assert prepare(plans, task, mode="evaluate", like=layout_of(training)).plan.eager


def test_a_whole_trial_and_a_cut_one_do_not_share_their_further_plans():
    """Two trials of one architecture, one of which could not be cut for its first batch."""
    plans, task = library(), task_of(Counts())
    cut = prepare(plans, task, mode="evaluate")
    layout = layout_of(cut)
    whole = TrialStateLayout(plan=dataclasses.replace(cut.plan, eager=True), owners=layout.owners)
    assert not prepare(plans, task, mode="evaluate", like=layout).plan.eager
    assert prepare(plans, task, mode="evaluate", like=whole).plan.eager


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(unseen(CheckpointFunction, torch.tanh, True, self.first(x)))


def test_a_capture_that_lost_its_gradients_says_so(monkeypatch):
    reasons = []
    real = library_module.whole_plan

    def noted(*arguments, reason, **rest):
        reasons.append(str(reason))
        return real(*arguments, reason=reason, **rest)

    monkeypatch.setattr(library_module, "whole_plan", noted)
    assert prepare(library(), task_of(Reentrant())).plan.eager
    assert "has no gradients" in reasons[0]


@pytest.mark.cases(1 / 3)
def test_a_plan_that_tells_its_smallest_budget_holds_no_tensor_of_the_trial():
    plans, task = library(), build("mlp")
    model = task.model()
    optimizer = task.optimizer(list(model.parameters()))
    references = [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]
    found = plans.prepare(task, model, optimizer, first_batch(task), "train", None)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert found.smallest_budget() > 0


WIDE = 64


def deep(samples: int, layers: int = 8):
    """Equal layers, with few samples nearly all parameters, with many nearly all activations."""
    inputs = torch.randn(samples, WIDE)
    made = torch.utils.data.TensorDataset(inputs, inputs)
    return TrainTask(
        model=lambda: nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(layers)]),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=nn.functional.mse_loss,
        train=made,
        batch_size=samples,
        epochs=2,
    )


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("samples", [4, pytest.param(256, marks=pytest.mark.slow)])
def test_an_automatic_buffer_is_the_smallest_that_holds_any_shards_parameters(samples):
    task = deep(samples)
    whole = prepare(library(), task).plan.peak_bytes
    budget, fractions = whole * 3 // 5, (0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
    found = prepare(library(budget, buffer_fraction="auto"), task)
    fixed = {fraction: prepare(library(budget, buffer_fraction=fraction), task).plan for fraction in fractions}
    enough = next(
        fraction
        for fraction, plan in fixed.items()
        if max(shard.cost.state_bytes for shard in plan.shards) <= int(budget * fraction)
    )
    assert found.plan.cuts == fixed[enough].cuts
    assert f"({enough:.0%} of the device)" in found.why
    assert (enough > 0.15) == (samples == 4), "more for a model of parameters, less for one of activations"


def test_where_no_automatic_buffer_is_large_enough_it_is_the_largest_with_which_the_model_can_be_cut():
    task = deep(4)
    whole = prepare(library(), task).plan.peak_bytes
    budget = int(prepare(library(whole * 3 // 5, buffer_fraction=0.05), task).smallest_budget() * 1.02)
    with pytest.raises(BudgetError):
        prepare(library(budget, buffer_fraction=0.15), task)
    found = prepare(library(budget, buffer_fraction="auto"), task)
    assert "(5% of the device)" in found.why


def test_a_model_that_fits_needs_no_automatic_buffer():
    found = prepare(library(buffer_fraction="auto"), deep(4))
    assert len(found.plan.shards) == 1
    assert found.why is None


def test_an_automatic_buffer_changes_no_bit():
    described = deep(16)
    with running(device_memory="80KiB", buffer_fraction="auto") as pool:
        result = pool.submit(described).result(60.0)
        (device,) = pool.stats().devices.values()
    assert against_plain(described, result) == []
    assert device.bytes_ahead > 0


def test_who_waits_for_the_library_inside_the_gate_lets_a_capture_by():
    plans, is_held, is_inside = library(), threading.Event(), threading.Event()

    def capture():
        with plans._preparing():
            is_held.set()
            assert is_inside.wait(PATIENCE_SECONDS)
            with GATE.exclusive():
                return True

    def step():
        with GATE.shared():
            assert is_held.wait(PATIENCE_SECONDS)
            is_inside.set()
            with plans._preparing():
                return True

    with ThreadPoolExecutor(2) as threads:
        for future in (threads.submit(capture), threads.submit(step)):
            assert future.result(PATIENCE_SECONDS)


class Doubled(torch.autograd.Function):
    """Code of the user's that a graph calls, and that may count its calls."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@pytest.mark.parametrize(("middle", "needs_both"), [(torch.relu, False), (Doubled.apply, True)])
def test_only_the_chosen_plan_is_checked_unless_code_of_the_users_runs_in_it(middle, needs_both, monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = middle(layer(x))
            return x

    asked = []
    real = library_module.verify

    def verify(*arguments, **options):
        seconds = real(*arguments, **options)
        asked.append((options["needs_both"], [each is not None for each in seconds]))
        return seconds

    monkeypatch.setattr(library_module, "verify", verify)
    task = task_of(Model(), step=lambda module, batch: module(batch[0]).square().mean(), activations="keep")
    found = prepare(library(num_shards=3), task)
    assert any(shard.keeps_activations for shard in found.plan.shards) or needs_both
    assert asked[0][0] is needs_both
    assert asked[0][1][0] is needs_both, "the plan that computes again"


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_check_of_a_step_keeps_trials_out_that_may_change_what_the_step_reads(is_shared, monkeypatch):
    """Their changes would be put back, and taken for the step's own."""
    weights, kept_out = torch.ones(2), []
    real = library_module.verify

    def verify(*arguments, **options):
        kept_out.append(GATE._lone_thread == threading.get_ident())
        return real(*arguments, **options)

    def task_with(values):
        return task_of(nn.Linear(8, 8), step=lambda module, batch: module(batch[0]).square().mean() * values[0])

    monkeypatch.setattr(library_module, "verify", verify)
    other = task_with(weights if is_shared else torch.ones(2))
    guard = TaskStateGuard(other, other.model())
    prepare(library(), task_with(weights))
    assert kept_out[-1] is is_shared
    del guard
