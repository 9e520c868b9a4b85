"""Trained in one go, or saved between any two steps and gone on with by another trial: the same bits.

Weights, buffers, optimizer state, reports. What is saved goes through JSON; it is gone on with on another cut.
"""

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.checkpoint.saved import CheckpointContent
from hydra_tune.errors import CheckpointError, TaskError
from hydra_tune.task import TrainTask
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from tests.parity.exact import differences
from tests.parity.features import Samples
from tests.parity.observe import reference_of
from tests.parity.registry import ENTRIES, Spec, build, product
from tests.parity.zoo.entry import MIXED
from tests.support.checkpointed import Collector, library, run
from tests.unit.pool.tasks import PATIENCE_SECONDS, SAMPLES, X, Y, against_plain, mlp, task

pytestmark = pytest.mark.usefixtures("captured_once")

IN_EVERY_RUN = "moving_average/plateau/lion/5"


def assert_goes_on(described: TrainTask, *, every: bool = False, placement: str = "device") -> list[CheckpointContent]:
    """Train, saving after each step; go on from some of what was saved, or all of it, to the same end."""
    plans = library(num_shards=3, optimizer_placement=placement)
    others = library(num_shards=2, optimizer_placement=placement)
    keeper = Collector()
    expected = run(described, plans, keeper)
    saved = keeper.saved
    chosen = saved if every else [saved[index] for index in sorted({1, len(saved) // 2, len(saved) - 1})]
    assert len(chosen) > 1
    for one in chosen:
        found = run(described, others, beginning=StartCheckpoint(saved=one))
        assert list(differences(expected, found)) == [], (one.labels, one.facts["place"])
    return saved


@pytest.mark.cases(1 / 3)
def test_the_registry():
    assert_goes_on(build(Spec.parse(IN_EVERY_RUN)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint in an evaluation
@pytest.mark.parametrize("model", [name for name, entry in ENTRIES.items() if entry.train != "refused"])
def test_the_whole_registry(model):
    specs = product([model])
    references = reference_of([spec for spec in specs if spec.feature in MIXED])
    for spec in specs:
        if "error" not in references.get(spec, {}):  # torch has no such operator on the CPU in half precision
            assert_goes_on(build(spec))


SLOW = (
    "cnn/plateau/lion/5",
    "gpt2/one cycle/adamw/5",
    "mlp/all at once/adam/5",
    "cnn/all at once/sgd/5",
    "lstm/clip/adam/5",
    "resnet_channels_last/accumulate/rmsprop/5",
)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SLOW)
def test_more_of_the_registry(spec):
    assert_goes_on(build(Spec.parse(spec)))


def test_loss_scaling_clipping_and_accumulation():
    assert_goes_on(task(model=noisy, precision="float16", accumulate=2, max_grad_norm=0.1, report_every=1), every=True)


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4))


class Augmented(Dataset[Any]):
    """Samples with noise from each of the streams that a dataset may draw from."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(8) + torch.randn(8, generator=self.generator) + float(np.random.rand())  # noqa: NPY002
        return X[index] + 0.1 * noise, Y[index]


class Lazy(Sampler[int]):
    """Draws the next index only when it is asked for, and counts its passes."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        left = list(range(self.count))
        while left:
            yield left.pop((int(torch.randint(len(left), ())) + self.passes) % len(left))

    def __len__(self) -> int:
        return self.count


class Over(Lazy):
    """Is given what its loader need not have as its dataset."""

    def __init__(self, source: Any) -> None:
        super().__init__(len(source))
        self.source = source


class Rows:
    """A dataset of no class of torch's."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class MoreRows(Rows):
    """Of another class than a loader's dataset."""


class Walk(IterableDataset[Any]):
    """A walk whose next place depends on the last one, by a stream of its own."""

    def __init__(self) -> None:
        self.stream = np.random.default_rng(3)
        self.at = 0

    def __iter__(self):
        for _ in range(24):
            self.at = (self.at + int(self.stream.integers(1, 9))) % 24
            yield X[self.at], Y[self.at]


def drawn_batches() -> Any:
    """A generator whose batches depend on what it has drawn before, among what the model draws."""
    place = 0
    for _ in range(3):
        place = (place + int(torch.randint(8, ()))) % 16
        yield X[place : place + 8].clone(), Y[place : place + 8].clone()


def own_loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(SAMPLES, 8, shuffle=True, generator=torch.Generator().manual_seed(9), **options)


class GrowingNoise(DataLoader[Any]):
    """Counts its passes, keeps the iterator of the pass, and scales the samples by the count."""

    passes, current = 0, None

    def __iter__(self):
        self.passes += 1
        self.current = super().__iter__()
        return ((x * (1 + 0.1 * self.passes), y) for x, y in self.current)


DATA = {
    "shuffled": SAMPLES,
    "a generator of the loader's": own_loader(),
    "workers": own_loader(num_workers=2),
    "augmented": DataLoader(Augmented(), 8, shuffle=True),
    "a sampler that draws": DataLoader(SAMPLES, 8, sampler=Lazy(24)),
    "a sampler that draws, over another dataset": DataLoader(SAMPLES, 8, sampler=Over(Augmented())),
    "a sampler that draws, over other rows": DataLoader(Rows(), 8, sampler=Over(Rows())),
    "an iterable with a place": DataLoader(Walk(), 8),
    "a loader that counts passes": GrowingNoise(SAMPLES, 8, shuffle=True),
    "a generator that draws": drawn_batches,
    "batches at hand": lambda: [(X[:8].clone(), Y[:8].clone()), (X[8:16].clone(), Y[8:16].clone())],
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("data", DATA)
def test_the_very_same_batches_come(data):
    described = task(model=noisy, train=DATA[data], epochs=3, report_every=2)
    saved = assert_goes_on(described, every=data.startswith("a "))
    in_a_pass = [one for one in saved if one.facts["place"]["batches"] and not one.facts["place"]["is_over"]]
    # Where the next batches depend on what was drawn among other draws, a pass is saved at its end only.
    assert bool(in_a_pass) == (not data.startswith(("a sampler that draws", "a generator that draws")))


def made_anew() -> DataLoader[Any]:
    return DataLoader(SAMPLES, 8, shuffle=True, generator=torch.Generator().manual_seed(4))


class Jittered(Dataset[Any]):
    """A dataset with a generator of numpy, which cannot be referenced weakly."""

    def __init__(self) -> None:
        self.stream = np.random.default_rng(4)

    def __getitem__(self, index: int) -> Any:
        x, y = SAMPLES[index]
        return x + torch.from_numpy(self.stream.normal(size=tuple(x.shape))).float(), y

    def __len__(self) -> int:
        return len(SAMPLES)


def by_callables(train: str, validate: str) -> TrainTask:
    """Both loaders are behind callables, and are of different kinds."""
    kept, plain = own_loader(), DataLoader(SAMPLES, 8)
    some = DataLoader(
        SAMPLES, 8, sampler=RandomSampler(SAMPLES, num_samples=16, generator=torch.Generator().manual_seed(3))
    )
    made = {
        "kept": lambda: kept,
        "made anew": made_anew,
        "made anew with numpy": lambda: DataLoader(Jittered(), 8),
        "plain": lambda: plain,
        "some": lambda: some,
    }
    return task(train=made[train], validate=made[validate], epochs=3)


def test_what_a_sampler_is_over_and_nobody_knows_as_data_is_refused_with_what_to_do():
    described = task(train=DataLoader(Rows(), 8, sampler=Over(MoreRows())))
    with pytest.raises(
        CheckpointError, match=r"source is of type .*MoreRows.* derive its class from torch\.utils\.data"
    ):
        run(described, library(), Collector())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("train", "validate"),
    [
        ("kept", "some"),
        ("made anew", "some"),
        ("made anew", "plain"),
        ("made anew with numpy", "made anew"),
        ("plain", "kept"),
    ],
)
def test_loaders_behind_callables_keep_their_own_positions(train, validate):
    assert_goes_on(by_callables(train, validate), every=True)


SCHEDULES = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "multi step": partial(lr_scheduler.MultiStepLR, milestones=[2, 4], gamma=0.5),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=1e-3, max_lr=1e-2, step_size_up=2, cycle_momentum=False),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "chained": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule):
    assert_goes_on(task(scheduler=SCHEDULES[schedule], scheduler_interval="step", report_every=2))


def test_updates_on_the_host():
    assert_goes_on(task(model=noisy), placement="host")


class Counting(nn.Module):
    """Runs whole; keeps a count, a moving mean that is no buffer, and a list of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.seen, self.mean, self.all = 0, torch.zeros(4), list(self.inner.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y = self.inner(x) / (1 + float(self.mean.abs().sum())) * self.seen
        self.mean = 0.9 * self.mean + y.detach().mean(0)
        return y

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_what_a_model_keeps_outside_of_buffers():
    assert_goes_on(task(model=Counting))


class MakesBuffers(nn.Module):
    """Makes buffers from its first batches, lets one grow, and gives one up."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.inner = nn.Linear(8, 4), nn.Identity()
        self.register_buffer("first", None, persistent=False)
        self.register_buffer("seen", torch.zeros(0, 8))
        self.register_buffer("warm", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = x.mean(0)
            self.inner.register_buffer("late", x[:1].clone())
            self.inner.register_buffer("hidden", x[1:2].clone(), persistent=False)
        self.seen = torch.cat([self.seen, x[:1]])
        if len(self.seen) == 3:
            self.warm = None
        scale = 1 if self.warm is None else 2
        return self.last(x - self.first - self.inner.late - self.inner.hidden + self.seen.mean(0)) * scale


def test_buffers_that_training_makes():
    plans, keeper, described = library(), Collector(), task(model=MakesBuffers)
    expected = run(described, plans, keeper)
    for one in keeper.saved:
        found = run(described, plans, beginning=StartCheckpoint(saved=one))
        assert list(differences(expected, found)) == [], one.labels


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(4))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_get_the_shapes_that_were_saved():
    described = task(model=lazy, validate=SAMPLES, scheduler=partial(lr_scheduler.StepLR, step_size=1))
    plans, keeper = library(), Collector()
    expected = run(described, plans, keeper)
    for one in keeper.saved:
        found = run(described, plans, beginning=StartCheckpoint(saved=one))
        assert list(differences(expected, found)) == [], one.labels


class Exchanges(nn.Module):
    """Gets a new layer in its third batch, and the optimizer keeps the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.seen = nn.Linear(8, 8), nn.Linear(8, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen == 3:
            self.last = nn.Linear(8, 4)
        return self.last(self.first(x))


def test_a_layer_that_training_exchanges_is_refused():
    run(task(model=Exchanges), library())
    with pytest.raises(CheckpointError, match="a parameter of its optimizer is no longer the module's"):
        run(task(model=Exchanges), library(), Collector())


class Holds(nn.Module):
    """Scales by a count that another module keeps, too."""

    def __init__(self, counts: Any, history: list[int]) -> None:
        super().__init__()
        self.counts, self.history = counts, history

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * self.counts["steps"] + 0.1 * len(self.history))


class SharesContainers(nn.Module):
    """Counts in a dict and in a list inside a dict, each of which a module inside holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {"steps": 0}
        self.histories: dict[str, list[int]] = {"first": []}
        self.inner, self.last = Holds(self.counts, self.histories["first"]), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counts["steps"] += 1
            self.histories["first"].append(self.counts["steps"])
        return self.last(self.inner(x))


class WarmsUp(nn.Module):
    """Deletes an attribute in the third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.seen, self.warm = nn.Linear(8, 4), 0, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen == 3:
            del self.warm
        return self.last(x) * (2 if hasattr(self, "warm") else 1)


@pytest.mark.parametrize("model", [SharesContainers, WarmsUp])
def test_what_modules_share_and_what_they_delete(model):
    assert_goes_on(task(model=model), every=True)


class Freezes(nn.Module):
    """Trains its first layer in some steps and not in others; runs whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.seen = nn.Linear(8, 16), nn.Linear(16, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.first.requires_grad_(self.seen % 4 > 1)
        return self.last(torch.relu(self.first(x)))


class FreezesLater(lr_scheduler.LRScheduler):
    """Freezes the first layer after two epochs, from outside of a model that is cut."""

    def get_lr(self) -> list[Any]:
        if self.last_epoch == 2:
            for parameter in self.optimizer.param_groups[0]["params"][:2]:
                parameter.requires_grad_(False)
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.cases(1)
@pytest.mark.parametrize("changes", [{"model": Freezes}, {"scheduler": FreezesLater}], ids=["forward", "scheduler"])
def test_weights_that_are_frozen_for_a_while(changes):
    described = task(epochs=3, **changes)
    plain = train_plain(described)
    assert_goes_on(described, every=True)
    found = run(described, library(num_shards=3))
    assert list(differences(dict(plain.state_dict()), found["state"])) == []


class Thaws(Freezes):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class ThawsLater(lr_scheduler.LRScheduler):
    def get_lr(self) -> list[Any]:
        self.optimizer.param_groups[0]["params"][0].requires_grad_(self.last_epoch == 2)
        return [group["lr"] for group in self.optimizer.param_groups]


class ThawsForever(lr_scheduler.LRScheduler):
    """Gradual unfreezing: of all parameters but the last layer's, one more after each epoch."""

    def get_lr(self) -> list[Any]:
        parameters = self.optimizer.param_groups[0]["params"]
        for number, parameter in enumerate(reversed(parameters[:-2])):
            parameter.requires_grad_(number < self.last_epoch)
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.cases(1)
@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("scheduler", [ThawsLater, ThawsForever])
def test_weights_that_are_frozen_at_first_and_trained_later(scheduler, interval):
    """The trial is planned again, also where the trial is resumed after that."""
    described = task(epochs=4, scheduler=scheduler, scheduler_interval=interval)
    plain = train_plain(described)
    assert_goes_on(described, every=True)
    for num_shards in (1, 3):
        found = run(described, library(num_shards=num_shards))
        assert list(differences(dict(plain.state_dict()), found["state"])) == []


def test_weights_that_begin_to_train_within_a_step_are_refused():
    """Rather than trained otherwise than in a plain loop."""
    with pytest.raises(TaskError, match=r"the step sets requires_grad of 'first.weight'"):
        run(task(epochs=4, model=Thaws), library(num_shards=3))
    loader = ThawingLoader()
    described = task(epochs=2, model=partly_frozen, train=loader, accumulate=2, param_groups=loader.sees)
    with pytest.raises(TaskError, match=r"'0.weight' did not require gradients when the trial began"):
        run(described, library(num_shards=3))


class ThawingLoader:
    """Data that let a parameter train between two batches of a step."""

    def sees(self, module: nn.Module) -> list[nn.Parameter]:
        self.module = module
        return list(module.parameters())

    def __call__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(4):
            if number == 3:
                self.module[0].requires_grad_(True)
            yield torch.full((8, 8), 0.1 * number), torch.arange(8) % 4


def test_what_is_frozen_has_to_be_so_when_gone_on_with():
    keeper, plans = Collector(), library()
    run(task(model=mlp), plans, keeper)
    beginning = StartCheckpoint(saved=keeper.saved[0])
    with pytest.raises(CheckpointError, match=r"trained: \['0.weight', .* when it was saved, \['2.weight'"):
        run(task(model=partly_frozen), plans, beginning=beginning)
    allowed = StartCheckpoint(saved=keeper.saved[0], allows_changes=True)
    found = run(task(model=partly_frozen), plans, beginning=allowed)
    assert torch.equal(found["state"]["0.weight"], keeper.saved[0].tensors["model.0.weight"])


def partly_frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def test_samples_of_another_length_are_refused():
    """The first thing to be changed by mistake."""
    keeper, plans = Collector(), library()
    described = build(Spec("mlp"))
    run(described, plans, keeper)
    shorter = TrainTask(
        **{name: getattr(described, name) for name in described.__dataclass_fields__ if name != "train"},
        train=Samples(ENTRIES["mlp"].samples(12)),
    )
    with pytest.raises(Exception, match=r"task.train.samples: 16 when it was saved, 12 now"):
        run(shorter, plans, beginning=StartCheckpoint(saved=keeper.saved[0]))


def test_a_pass_that_may_not_be_skipped_is_saved_at_its_end_alone_beside_a_validation():
    """The data draws while it is read, so the rest of a pass cannot be read without its beginning."""

    def train() -> Any:
        start = 0
        for _ in range(4):
            start = (start + int(torch.randint(8, ()))) % (len(X) - 8)
            yield X[start : start + 8], Y[start : start + 8]

    validate = TensorDataset(X[:8], Y[:8])
    assert_goes_on(
        task(model=noisy, train=train, validate=validate, batch_size=8, report_every=1, epochs=3), every=True
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("sharer", ["validation", "samples", "nobody"])
def test_a_sampler_that_draws_in_parts_from_a_generator_that_others_move(sharer):
    def described() -> TrainTask:
        stream = torch.Generator().manual_seed(3)
        samples = Augmented() if sharer == "samples" else SAMPLES
        if sharer == "samples":
            samples.generator = stream
        sampler = RandomSampler(samples, replacement=True, num_samples=72, generator=stream)
        rows = TensorDataset(X[:16], Y[:16])
        validate = DataLoader(rows, 8, shuffle=True, generator=stream if sharer == "validation" else None)
        train = DataLoader(samples, 8, sampler=sampler)
        return task(model=noisy, train=train, validate=validate, epochs=2, report_every=2)

    saved = assert_goes_on(described(), every=True)
    late = [one for one in saved if one.facts["place"]["batches"] > 4 and not one.facts["place"]["is_over"]]
    assert bool(late) == (sharer == "nobody")


class KeepsState(nn.Linear):
    """Holds what changes in place, and what no checkpoint holds."""

    def __init__(self, kept: Any) -> None:
        super().__init__(8, 4)
        self.kept = kept


STATEFUL = {
    "Generator": torch.Generator,
    "Random": random.Random,
    "count": itertools.count,
    "AdamW": lambda: [torch.optim.AdamW([torch.zeros(1, requires_grad=True)])],
    "PCG64": lambda: {"bits": np.random.PCG64(1)},
    "Linear": lambda: (nn.Linear(1, 1),),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_state_that_no_checkpoint_holds_is_named_once(name, caplog):
    collector = Collector()
    run(task(model=lambda: KeepsState(STATEFUL[name]()), report_every=1), library(), collector)
    assert len(collector.saved) > 1
    (warning,) = [record.getMessage() for record in caplog.records if "in no checkpoint" in record.getMessage()]
    assert warning.startswith(f"attribute 'kept' of the model holds a {name}, ")


@pytest.mark.parametrize("kept", ["beside", "inside"])
def test_an_average_beside_the_model_is_named(kept, caplog):
    averages = {}

    def groups(module):
        trained = list(module.parameters())
        averages["ema"] = AveragedModel(module)
        if kept == "inside":
            module.average = averages["ema"].requires_grad_(False)
        return trained

    def evaluate(module, batch):
        return {"loss": averages["ema"](batch[0]).mean()}

    given = {"model": lambda: nn.Linear(8, 4), "param_groups": groups}
    run(task(**given, evaluate=evaluate, validate=TensorDataset(X[:8], Y[:8]), batch_size=8), library(), Collector())
    warnings = [record.getMessage() for record in caplog.records if "in no checkpoint" in record.getMessage()]
    assert len(warnings) == (kept == "beside")
    assert all(
        "= of a TrainTask reads the variable 'averages', which holds an AveragedModel" in text for text in warnings
    )


def test_constants_that_no_checkpoint_holds_are_not_spoken_of(caplog):
    run(task(model=lambda: KeepsState({"activation": torch.relu, "kind": nn.Linear})), library(), Collector())
    assert not [record for record in caplog.records if "in no checkpoint" in record.getMessage()]


class Pairs(nn.Linear):
    """Holds each parameter with an average."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.kept = [(parameter, parameter.detach().clone()) for parameter in self.parameters()]


def average(module: Any, _optimizer: Any, _step: int) -> None:
    with torch.no_grad():
        for parameter, mean in module.kept:
            mean.lerp_(parameter, 0.5)


def anneal(module: Any, _optimizer: Any, step: int) -> None:
    module.kept["temperature"] = 1 / step


@pytest.mark.parametrize(
    ("model", "after_step"),
    [(Pairs, average), (lambda: KeepsState({"activation": torch.relu, "temperature": 1.0}), anneal)],
)
@pytest.mark.parametrize("changes", [True, False])
def test_a_container_that_no_checkpoint_holds_and_that_changes_in_place_is_named_once(
    model, after_step, changes, caplog
):
    collector = Collector()
    run(task(model=model, after_step=after_step if changes else None, report_every=1), library(), collector)
    assert len(collector.saved) > 1
    warnings = [record.getMessage() for record in caplog.records if "no checkpoint can hold" in record.getMessage()]
    assert [text.startswith("attribute 'kept' of the model has changed in place") for text in warnings] == [
        True
    ] * changes


class Momentum(torch.optim.Optimizer):
    """Keeps each parameter's momentum by the parameter's `id`, or by the parameter."""

    def __init__(self, parameters: Any, place: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.place, self.kept = place, {}

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                kept = self.kept if self.place == "attribute" else self.state["kept"]
                key = parameter if self.place == "parameter" else id(parameter)
                kept = self.state[key] if self.place == "parameter" else kept.setdefault(key, {})
                momentum = kept.setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.1)


@pytest.mark.parametrize(
    ("place", "name"),
    [("attribute", "attribute 'kept' of the optimizer"), ("state", "the state of the optimizer"), ("parameter", None)],
)
def test_what_an_optimizer_keeps_by_the_id_of_a_parameter_is_named_once(place, name, caplog):
    run(task(optimizer=partial(Momentum, place=place), report_every=1), library(), Collector())
    warnings = [record.getMessage() for record in caplog.records if "the id() of parameters" in record.getMessage()]
    assert [text.startswith(f"{name} has ") for text in warnings] == [True] * (name is not None)


class KeepsAnArray(torch.optim.SGD):
    """Counts steps in an array beside the state of parameters."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["steps"] = self.state.get("steps", np.zeros(3)) + 1


def test_an_array_beside_the_state_of_parameters_is_saved(tmp_path):
    described = task(optimizer=partial(KeepsAnArray, lr=0.1), report_every=1)
    with HydraExecutor("cpu:1", checkpoint_dir=tmp_path) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        assert result.status == "completed", result.error
        resumed = pool.submit(described, resume_from=result.checkpoint).result(PATIENCE_SECONDS)
    assert resumed.optimizer_state_dict()["state"]["steps"].tolist() == [6.0] * 3


class KeepsItsStart(torch.optim.SGD):
    """Keeps where each parameter began, as a copy or as an alias."""

    def __init__(self, parameters: Any, *, is_alias: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.is_alias = is_alias

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["start"] = parameter.detach() if self.is_alias else parameter.detach().clone()
                parameter.sub_(parameter.grad + 0.5 * (parameter - state["start"]), alpha=0.1)


@pytest.mark.parametrize("is_alias", [True, False])
def test_state_of_the_optimizer_that_shares_memory_is_named_once(is_alias, tmp_path, caplog):
    described = task(optimizer=partial(KeepsItsStart, is_alias=is_alias), report_every=1)
    with HydraExecutor("cpu:1", checkpoint_dir=tmp_path) as pool:
        assert against_plain(described, pool.submit(described).result(PATIENCE_SECONDS)) == []
    warnings = [record.getMessage() for record in caplog.records if "share memory" in record.getMessage()]
    assert [text.startswith("the optimizer's state of parameter") for text in warnings] == [True] * is_alias


class Changes(nn.Linear):
    """Has another function or module from its third step on."""

    def __init__(self, first: Any, then: Any) -> None:
        super().__init__(8, 4)
        self.seen, self.applied, self.then = 0, first, then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen == 3:
            self.applied = self.then
        return self.applied(super().forward(x))

    def once(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_function_that_training_exchanges_is_named_once(caplog):
    run(task(model=lambda: Changes(torch.tanh, torch.sin), report_every=1), library(), Collector())
    (warning,) = [record.getMessage() for record in caplog.records if "no checkpoint" in record.getMessage()]
    assert warning.startswith("attribute 'applied' of the model holds another function")


def test_a_method_that_is_set_anew_is_not_spoken_of(caplog):
    def model() -> nn.Module:
        module = Changes(None, None)
        module.applied, module.then = module.once, module.once
        return module

    run(task(model=model), library(), Collector())
    assert not [record for record in caplog.records if "no checkpoint" in record.getMessage()]


def test_a_module_without_parameters_that_training_exchanges_is_refused():
    described = task(model=lambda: Changes(nn.Dropout(0.1), nn.Identity()))
    run(described, library())
    with pytest.raises(CheckpointError, match="module 'applied' was built as Dropout and is Identity now"):
        run(described, library(), Collector())


class Halves:
    """A schedule that is no torch scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


def test_a_schedule_without_a_state_is_refused_by_name():
    run(task(scheduler=Halves), library())
    with pytest.raises(CheckpointError, match=r"its scheduler Halves has no state_dict\(\)"):
        run(task(scheduler=Halves), library(), Collector())


class Adds(lr_scheduler.LambdaLR):
    """Adds a parameter group in its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda _: 1.0)
        self.is_ready = True

    def step(self, epoch: int | None = None) -> None:
        if getattr(self, "is_ready", False) and len(self.optimizer.param_groups) == 1:
            added = [self.optimizer.param_groups[0]["params"].pop()]
            self.optimizer.add_param_group({"params": added, "lr": 1e-3, "initial_lr": 1e-3})
            self.lr_lambdas, self.base_lrs = self.lr_lambdas * 2, [*self.base_lrs, 1e-3]
        super().step(epoch)


def test_a_parameter_group_that_is_added_in_training_is_refused():
    run(task(scheduler=Adds), library())
    with pytest.raises(CheckpointError, match="has 2 parameter groups and was built with 1"):
        run(task(scheduler=Adds), library(), Collector())


class TwoHeads(nn.Module):
    """One head for each half of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x: Any, head: int) -> Any:
        return self.heads[head](self.body(x).relu())


class ZerosGradients(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=set_to_none)


class TrainsItself(nn.Module):
    """A scale outside the optimizer follows the gradients that add up there."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net, self.scale = mlp(), make(torch.ones(1))

    def forward(self, x: Any) -> Any:
        if self.training and self.scale.grad is not None:
            with torch.no_grad():
                self.scale -= 0.1 * self.scale.grad
        return self.net(x) * self.scale


def _by_halves() -> list[Any]:
    return [(X[i : i + 6], Y[i : i + 6], int(i >= 12)) for i in range(0, 24, 6)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "described",
    [
        task(
            model=TwoHeads,
            train=_by_halves,
            step=lambda module, batch: nn.functional.cross_entropy(module(batch[0], batch[2]), batch[1]),
            loss=None,
            optimizer=partial(ZerosGradients, lr=0.1, momentum=0.9, weight_decay=0.1),
        ),
        *(
            task(model=partial(TrainsItself, make), param_groups=lambda module: list(module.net.parameters()))
            for make in (nn.Parameter, torch.Tensor.requires_grad_)
        ),
    ],
    ids=["zeros", "a parameter outside the optimizer", "a tensor outside the optimizer"],
)
def test_gradients_that_are_left_between_two_steps(described):
    keeper = Collector()
    expected = run(described, library(), keeper)
    for saved in keeper.saved:
        found = run(described, library(), beginning=StartCheckpoint(saved=saved))
        assert list(differences(expected, found)) == [], saved.facts["place"]
