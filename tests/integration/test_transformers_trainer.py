"""A `Trainer` in the pool gives the bits of `Trainer.train()`, whole and cut; what would not is refused by name."""

import copy
import dataclasses
import functools
import gc
import itertools
import math
import re
import time
import weakref
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

import accelerate
import optuna
import transformers
from accelerate import PartialState
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import hydra_tune_transformers
from hydra_tune import HydraExecutor, train_plain
from hydra_tune.errors import MetricError, TaskError
from hydra_tune.train.checkpoint.trial_checkpoint import StartCheckpoint
from hydra_tune_transformers import RefusedTrainerError, installed, refusals, task_from_trainer, trainer_from_result
from hydra_tune_transformers.data import AheadLoader
from hydra_tune_transformers.evaluation import EarlyStop
from hydra_tune_transformers.gathered import GatheredMetric
from hydra_tune_transformers.own_loss import _contents
from tests.docs.pages import DOCS, PageCode
from tests.support import checkpointed
from tests.support.trainers import (
    KINDS,
    SKIPS_REST,
    Bag,
    Rows,
    accuracy,
    causal_model,
    making,
    masked,
    own_loss,
    questions,
    text_model,
    trained,
)

# Of older versions of transformers, which use old names of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


class Weighted(Trainer):
    """Weights classes, as the library's documentation shows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.class_weights = torch.tensor([1.0, 2.0, 3.0])

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        scores = outputs.logits.view(-1, self.model.config.num_labels)
        loss = torch.nn.functional.cross_entropy(scores, labels.view(-1), weight=self.class_weights)
        return (loss, outputs) if return_outputs else loss


def logged(function):
    """Copies the name and the module of the function, as decorators do."""

    @functools.wraps(Trainer.compute_loss)
    def inner(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    return inner


class Penalized(Trainer):
    """Adds to the stock loss, and logs. Code of the library sets `use_cache` on other objects."""

    use_cache = 0.0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.use_cache = 0.1

    @logged
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss = loss + self.penalty(outputs["logits"])
        self.log({"penalty": 1.0})
        return (loss, outputs) if return_outputs else loss

    def penalty(self, scores):
        return getattr(self, "strength", self.use_cache) * scores.logsumexp(-1).square().mean()


class Distilled(Trainer):
    """Follows the outputs of a fixed model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.teacher = Bag().eval().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        goal = self.teacher(**inputs)["logits"].softmax(-1)
        loss = outputs["loss"] + torch.nn.functional.cross_entropy(outputs["logits"], goal)
        return (loss, outputs) if return_outputs else loss


def of_scalars(prediction):
    """Metrics of predictions with a number for each batch beside the scores."""
    scores, means = prediction.predictions
    return {"score": float(scores.sum()), "mean": float(means.sum()), "batches": float(means.size)}


class Metered(Trainer):
    """Collects metrics in the loss and averages them in the log, as the trainers of trl."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._seen = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        mode = "train" if self.model.training else "eval"
        known, (loss, outputs) = (
            inputs["labels"] != -100,
            super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch),
        )
        count = self.accelerator.gather_for_metrics(known.sum()).sum()
        scores = outputs["logits"].detach().logsumexp(-1).masked_fill(~known, 0)
        scores = self.accelerator.gather_for_metrics(scores.sum()).sum()
        self._metrics[mode]["score"].append((scores / count).item() if count > 0 else 0.0)
        self._metrics[mode]["half"] += [1 - (count / 2).item(), 0.5]
        if mode == "train":
            self._seen += count.item() // 1
        self._metrics[mode]["seen"] = [self._seen]
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, None if prediction_loss_only else outputs["logits"] * 2, inputs["labels"]

    def log(self, logs, start_time=None):
        mode = "train" if self.model.training else "eval"
        prefix = "eval_" if mode == "eval" else ""
        logs.update({prefix + name: sum(values) / len(values) for name, values in self._metrics[mode].items()})
        super().log(logs, start_time)
        self._metrics[mode].clear()


class Contrast(torch.nn.Module):
    """A loss that calls the model, as those of sentence-transformers."""

    def __init__(self, model, scale=1.0):
        super().__init__()
        self.model, self.scale, self.inner = model, scale, torch.nn.ModuleList([torch.nn.CrossEntropyLoss()])

    def forward(self, inputs, labels):
        return self.inner[0](self.model(**inputs)["logits"] * self.scale, labels)


class Scaled(Contrast):
    """A loss with a parameter and a buffer of its own."""

    def __init__(self, model):
        super().__init__(model, torch.nn.Parameter(torch.tensor(0.7)))
        self.register_buffer("shift", torch.tensor([0.0, 0.5, 1.0]))

    def forward(self, inputs, labels):
        return super().forward(inputs, labels) + (self.shift * self.scale).square().mean()


class Losses(Trainer):
    """Computes its loss by a module around the model, whose parameters it trains, too."""

    kind = Contrast

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss = self.kind(self.model)
        self.add_callback(ZeroGrad())

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert self.loss.model is model
        labels = inputs.pop("labels")
        loss = self.loss(inputs, labels)
        return (loss, {}) if return_outputs else loss

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=self.args.learning_rate)
        return self.optimizer


class ScaledLosses(Losses):
    kind = Scaled


class ZeroGrad(TrainerCallback):
    def on_step_end(self, args, state, control, optimizer, **kwargs):
        optimizer.zero_grad()


class EpochSampler(torch.utils.data.SequentialSampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(super().__iter__())
        return iter(order[self.epoch * 7 :] + order[: self.epoch * 7])


class Batches(torch.utils.data.Sampler):
    """Passes on the batches of a batch sampler."""

    def __init__(self, batch_sampler):
        self.batch_sampler, self.batch_size, self.drop_last = batch_sampler, batch_sampler.batch_size, False

    def __iter__(self):
        return iter(self.batch_sampler)

    def __len__(self):
        return len(self.batch_sampler)


class OwnOrder(Trainer):
    """Draws in orders of its own."""

    def _get_train_sampler(self, train_dataset=None):
        return EpochSampler(self.train_dataset)

    def _get_eval_sampler(self, eval_dataset):
        return EpochSampler(eval_dataset)


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(9)
        loader = torch.utils.data.DataLoader(
            self.train_dataset, batch_size=5, shuffle=True, generator=generator, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


class ShuffledEvaluation(Trainer):
    """Evaluates in an order that the loader's own draw moves; `is_new`: as at the beginning each time."""

    is_new = True
    generator = torch.Generator().manual_seed(9)

    def get_eval_dataloader(self, eval_dataset=None):
        generator = torch.Generator().manual_seed(9) if self.is_new else self.generator
        loader = torch.utils.data.DataLoader(
            self.eval_dataset, batch_size=5, shuffle=True, generator=generator, collate_fn=self.data_collator
        )
        loader.batch_sampler.noise = torch.Generator().manual_seed(3)
        return self.accelerator.prepare(loader)


class ShuffledOnwards(ShuffledEvaluation):
    is_new = False


class PlainLoader(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=5, collate_fn=self.data_collator)


class Doubled(Trainer):
    """Evaluates otherwise than it trains."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, scores, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss * 2, scores, labels


CASES = {
    **{kind: {"kind": kind} for kind in KINDS},
    "accumulated, the last step of an epoch shorter": {"gradient_accumulation_steps": 4},
    "accumulated by tokens": {"kind": "causal language model", "gradient_accumulation_steps": 4},
    "accumulated, of a random collator": {"kind": "masked language model", "gradient_accumulation_steps": 4},
    "accumulated, a model that takes no count": {"kind": "a module of one's own", "gradient_accumulation_steps": 4},
    "ends within an epoch": {"max_steps": 9, "gradient_accumulation_steps": 2, "kind": "masked language model"},
    "half an epoch": {"num_train_epochs": 1.5},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "in order": {"train_sampling_strategy": "sequential"},
    "another seed of the data": {"data_seed": 7, "seed": 3},
    "torch's own order": {"accelerator_config": {"use_seedable_sampler": False}},
    "smoothed labels": {"label_smoothing_factor": 0.1},
    "smoothed labels of a causal model": {
        "kind": "causal language model",
        "label_smoothing_factor": 0.1,
        "gradient_accumulation_steps": 2,
    },
    "a loss of one's own": {
        "kind": "token classification",
        "given": {"compute_loss_func": own_loss},
        "gradient_accumulation_steps": 2,
    },
    "no clipping": {"max_grad_norm": 0.0},
    "strong clipping": {"max_grad_norm": 0.05},
    "a cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 0.2},
    "SGD": {"optim": "sgd"},
    "Adafactor": {"optim": "adafactor"},
    "plain AdamW": {"optim": "adamw_torch"},
    "a live model": {"live_model": True},
    "dropped rests": {"dataloader_drop_last": True},
    "evaluated every four steps": {"eval_strategy": "steps", "eval_steps": 4},
    "evaluated at the end": {"eval_strategy": "no"},
    "the loss alone": {"given": {"compute_metrics": None}},
    "predictions picked": {
        "kind": "translation",
        "given": {"preprocess_logits_for_metrics": lambda logits, labels: logits[0] * 2},
    },
    "a number for each batch": {
        "given": {
            "preprocess_logits_for_metrics": lambda logits, labels: (logits, logits.mean()),
            "compute_metrics": of_scalars,
        },
    },
    "bfloat16": {"bf16": True},
    "a Seq2SeqTrainer": {"kind": "translation", "trainer_class": transformers.Seq2SeqTrainer},
    "question answering": {"gradient_accumulation_steps": 2, "given": questions()},
    "a weighted loss": {"kind": "token classification", "trainer_class": Weighted, "gradient_accumulation_steps": 2},
    "a penalty beside the stock loss": {
        "kind": "causal language model",
        "trainer_class": Penalized,
        "gradient_accumulation_steps": 4,
    },
    "a penalty beside a smoothed loss": {"trainer_class": Penalized, "label_smoothing_factor": 0.1},
    "metrics of the loss's own": {
        "kind": "causal language model",
        "trainer_class": Metered,
        "gradient_accumulation_steps": 2,
    },
    "a prediction step of one's own": {"kind": "token classification", "trainer_class": Doubled},
    "a sampler that is told the epoch": {"trainer_class": OwnOrder, "num_train_epochs": 3},
    "a loader of one's own": {"trainer_class": OwnLoader},
    "distillation": {"kind": "a module of one's own", "trainer_class": Distilled},
    "weights in bfloat16": {"given": {"model_init": lambda: text_model().to(torch.bfloat16)}},
}
OWN_LOSSES = (
    "a weighted loss",
    "a penalty beside the stock loss",
    "metrics of the loss's own",
    "a prediction step of one's own",
    "a sampler that is told the epoch",
    "a loader of one's own",
    "distillation",
)
FAST_CUTS = ("accumulated by tokens", "a weighted loss", "metrics of the loss's own")


@pytest.fixture(autouse=True)
def _own_precision(monkeypatch):
    """Keep `bf16=True` and `torch_compile=True` of a test, which older versions note for the process, from later tests."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """`Trainer.train()` of each case, once."""
    runs = {}

    def run(name):
        if name not in runs:
            folder = tmp_path_factory.mktemp("trainer")
            make = making(folder, **CASES[name])
            weights, reports, trainer = trained(make)
            # What a user without evaluation strategy calls after train().
            runs[name] = make, weights, reports or [trainer.evaluate()]
        return runs[name]

    return run


def assert_same(result, weights, reports):
    state = result.state_dict()
    assert list(state) == list(weights)
    assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
    names = [name for name in result.metrics if name.startswith("val_")]
    assert "val_loss" in names
    assert len(result.history) == len(reports)
    for entry, report in zip(result.history, reports, strict=True):
        assert {name: entry[name] for name in names} == {
            name: float(report[name.replace("val_", "eval_", 1)]) for name in names
        }


def some(fast):
    """All cases, those not listed among the slow tests."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "name", some([*list(CASES)[::4], *OWN_LOSSES, "question answering", "a number for each batch"])
)
def test_the_task_is_the_trainers_training(stock, name):
    make, weights, reports = stock(name)
    task = task_from_trainer(make)
    assert_same(train_plain(task), weights, reports)
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert result.num_shards == 1
    assert_same(result, weights, reports)


def test_a_compiler_of_the_process_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    with pytest.raises(RefusedTrainerError, match=r"ACCELERATE_DYNAMO_BACKEND of the process, .*: remove the variable"):
        task_from_trainer(making(tmp_path))


@pytest.mark.cases(1 / 3)
def test_the_precision_of_the_process_counts_as_that_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    make = making(tmp_path)
    weights, reports, _ = trained(make)
    assert_same(train_plain(task_from_trainer(make)), weights, reports)
    with pytest.raises(
        RefusedTrainerError, match=r"ACCELERATE_MIXED_PRECISION=bf16 of the process, .* with a label_smooth"
    ):
        task_from_trainer(making(tmp_path, label_smoothing_factor=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(FAST_CUTS))
def test_a_model_that_is_cut_has_the_same_bits(stock, name):
    make, weights, reports = stock(name)
    with HydraExecutor("cpu:2", num_shards=3) as pool:
        (result,) = pool.run([task_from_trainer(make)])
    assert result.num_shards == 3
    assert_same(result, weights, reports)


@pytest.fixture
def with_losses(monkeypatch, tmp_path):
    """Makes trainers of `Losses`; their callback counts as the one of sentence-transformers."""
    monkeypatch.setattr(refusals, "_ZEROING", {f"{__name__}.ZeroGrad"})

    def make(kind, **arguments):
        own = {"compute_metrics": None, "model": None, "model_init": None}
        shared = text_model()

        def fresh():
            transformers.set_seed(3)
            own["model"] = shared if arguments.get("is_shared") else text_model()
            rest = {name: value for name, value in arguments.items() if name != "is_shared"}
            return making(tmp_path, trainer_class=kind, given=own, **rest)()

        return fresh

    return make


@pytest.mark.cases(1)
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("kind", [Losses, ScaledLosses])
def test_a_loss_around_the_model_is_trained_with_it(with_losses, kind, is_shared, shards):
    clipping = {"max_grad_norm": 0.0} if kind is ScaledLosses else {}
    make = with_losses(kind, is_shared=is_shared, gradient_accumulation_steps=2, **clipping)
    task = task_from_trainer(make)
    with HydraExecutor("cpu:2", **({"num_shards": shards} if shards > 1 else {})) as pool:
        results = pool.run([task, task])
    assert {result.num_shards for result in results} == {shards}
    again = trainer_from_result(make, results[0])
    assert again.loss.model is again.model
    assert again.evaluate()["eval_loss"] == results[0].metrics["val_loss"]
    plain = train_plain(task)
    stock = make()
    stock.train()  # last, because the model may be shared
    weights = stock.model.state_dict()
    if kind is ScaledLosses:
        own = {f"losses.loss.{name}": getattr(stock.loss, name).detach() for name in ("scale", "shift")}
        weights = {f"model.{name}": value for name, value in weights.items()} | own
        assert weights["losses.loss.scale"] != 0.7
    reports = [entry for entry in stock.state.log_history if "eval_loss" in entry]
    for result in (plain, *results):
        assert_same(result, weights, reports)


class Dropping(Scaled):
    """A loss whose part is in training mode also while the model is evaluated, as the stock Trainer leaves the part."""

    def __init__(self, model):
        super().__init__(model)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, inputs, labels):
        return super().forward(inputs, labels) + self.drop(self.scale.expand(64)).mean()


class DroppingLosses(Losses):
    kind = Dropping


def test_the_modes_of_a_loss_around_the_model_stay_as_they_are(with_losses):
    make = with_losses(DroppingLosses, max_grad_norm=0.0)
    result, stock = train_plain(task_from_trainer(make)), make()
    stock.train()
    weights = {f"model.{name}": value for name, value in stock.model.state_dict().items()}
    own = {f"losses.loss.{name}": getattr(stock.loss, name).detach() for name in ("scale", "shift")}
    assert_same(result, weights | own, [entry for entry in stock.state.log_history if "eval_loss" in entry])


class Counting(Contrast):
    calls = 0

    def forward(self, inputs, labels):
        self.calls = self.calls + 1
        return super().forward(inputs, labels) * (1 + self.calls % 2)


class CountingLosses(Losses):
    kind = Counting


def test_a_loss_around_the_model_that_counts_is_refused(with_losses):
    with pytest.raises(TaskError, match=r"compute_loss of CountingLosses changes self\.loss"):
        train_plain(task_from_trainer(with_losses(CountingLosses)))


def test_a_loss_that_a_script_uses_again_is_left_as_it_is(with_losses):
    loss, base = Scaled(text_model()), with_losses(ScaledLosses, max_grad_norm=0.0)

    def make():
        trainer = base()
        loss.model, trainer.loss = trainer.model, loss
        return trainer

    result = train_plain(task_from_trainer(make))
    before = loss.scale.item()
    assert trainer_from_result(make, result).loss.scale.item() != before
    assert loss.scale.item() == before


class Reporting(Metered):
    compute_loss, prediction_step = Trainer.compute_loss, Trainer.prediction_step


def test_a_log_beside_the_stock_loss_is_refused(tmp_path):
    with pytest.raises(RefusedTrainerError, match="its own log, which the pool would not call"):
        task_from_trainer(making(tmp_path, trainer_class=Reporting))


def test_an_evaluation_draws_with_all_its_generators_as_at_the_beginning(tmp_path):
    options = {"accelerator_config": {"use_seedable_sampler": False}, "trainer_class": ShuffledEvaluation}
    make = making(tmp_path, **options)
    task = task_from_trainer(make)
    for _ in range(2):
        stock, own = list(make().get_eval_dataloader()), list(task.validate())
        assert all(torch.equal(one["labels"], other["labels"]) for one, other in zip(stock, own, strict=True))
    with pytest.raises(
        RefusedTrainerError, match="which goes on from one evaluation to the next: make a new generator"
    ):
        task_from_trainer(making(tmp_path, **options | {"trainer_class": ShuffledOnwards}))


def test_samplers_of_inner_batch_samplers_are_told_the_epoch():
    def prepared():
        batches = Batches(torch.utils.data.BatchSampler(EpochSampler(range(20)), 5, drop_last=False))
        loader = torch.utils.data.DataLoader(range(20), batch_sampler=batches, collate_fn=lambda rows: {"rows": rows})
        return accelerate.Accelerator().prepare(loader)

    stock, own = prepared(), AheadLoader(prepared())
    for _ in range(3):
        assert list(stock) == list(own)


def test_collected_metrics_compare_as_numbers():
    one, two = GatheredMetric(torch.tensor(1.0)), GatheredMetric(torch.tensor(2.0))
    assert (one == 1, one != 1, one == two, one != two) == (True, False, False, True)
    with pytest.raises(TaskError, match="asks for a count over the training"):
        bool(GatheredMetric(None) == 1)


@pytest.mark.parametrize("number", [float, int, round, math.floor, math.isnan])
def test_a_number_made_of_a_collected_metric_is_refused_with_the_remedy(number):
    metric = GatheredMetric(torch.tensor(1.0)).item()
    with pytest.raises(
        TaskError, match=r"a Python number of a metric, .*: collect the metric itself, metric\.item\(\)"
    ):
        number(metric)


def of_a_batch(task):
    """Return what a task evaluates on its first batch."""
    loader = task.validate() if callable(task.validate) else task.validate
    return task.evaluate(task.model().eval(), next(iter(loader)))


class Lossless(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return None, *super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)[1:]


def test_a_prediction_step_without_a_loss_is_refused_with_the_remedy(tmp_path):
    task = task_from_trainer(making(tmp_path, trainer_class=Lossless))
    with pytest.raises(
        TaskError, match=r"prediction_step of Lossless returned NoneType in place of the loss, .*: return the loss"
    ):
        of_a_batch(task)


class Rarely(Metered):
    """Has a metric that few batches have, and a setting named like an attribute of the outputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = 0.5

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        notes = SimpleNamespace()
        notes.weight = self.weight
        self._metrics["eval"]["rare"] += []
        return (loss * self.weight, outputs) if return_outputs else loss * self.weight

    def log(self, logs, start_time=None):
        logs["eval_times"] = len(self._metrics["eval"].pop("rare"))
        super().log(logs, start_time)


def test_an_empty_list_of_metrics_stays_empty(tmp_path):
    task = task_from_trainer(making(tmp_path, kind="causal language model", trainer_class=Rarely))
    values = {name: torch.as_tensor(value).reshape(-1) for name, value in of_a_batch(task).items()}
    assert values["metric:rare"].shape == (0,)
    assert task.finish(values)["times"] == 0


class PartLosses(Losses):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss.inner.append(self.model.classifier)


def test_a_loss_around_the_model_that_would_not_be_exact_is_refused(tmp_path, with_losses):
    with pytest.raises(RefusedTrainerError, match="whose gradients Trainer does not clip: set max_grad_norm=0"):
        task_from_trainer(with_losses(ScaledLosses))
    with pytest.raises(
        RefusedTrainerError, match=r"self.loss of PartLosses, .*, which holds a part of the model as well"
    ):
        task_from_trainer(with_losses(PartLosses))
    with pytest.raises(RefusedTrainerError, match="and a model_init: give model=, and make the module in the function"):
        task_from_trainer(making(tmp_path, trainer_class=Losses))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refusals, "_ZEROING", frozenset())
        with pytest.raises(RefusedTrainerError, match="whose gradients Trainer does not zero: make these a part"):
            task_from_trainer(with_losses(ScaledLosses, max_grad_norm=0.0))


@pytest.mark.cases(1)
@pytest.mark.parametrize("is_alone", [False, True])
def test_metrics_of_the_losses_own_are_reported_without_counts_of_the_training(tmp_path, is_alone):
    own = {"trainer_class": Metered, "metric_for_best_model": "score"}
    make = making(
        tmp_path, "causal language model", **own, **({"given": {"compute_metrics": None}} if is_alone else {})
    )
    _, reports, _ = trained(make)
    assert {"eval_score", "eval_half", "eval_seen"} <= reports[0].keys()
    task = task_from_trainer(make)
    assert task.metric == "val_score"
    for _ in range(2):
        result = train_plain(task)
        assert {"val_score", "val_half"} <= result.metrics.keys()
        assert "val_seen" not in result.metrics
        assert result.metrics["val_score"] == reports[-1]["eval_score"]
    assert trainer_from_result(make, result).evaluate()["eval_score"] == reports[-1]["eval_score"]


@pytest.mark.slow
def test_a_model_that_does_not_fit_its_device_has_the_same_bits(stock):
    make, weights, reports = stock("text classification")
    with HydraExecutor("cpu:1", device_memory="200KiB") as pool:
        (result,) = pool.run([task_from_trainer(make)])
    assert result.num_shards > 1
    assert_same(result, weights, reports)


@pytest.mark.cases(1 / 3)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads the old name
@pytest.mark.parametrize(("shards", "smoothing"), [(1, 0.1), pytest.param(3, 0.0, marks=pytest.mark.slow)])
def test_an_adapter_of_peft_has_the_same_bits(tmp_path, shards, smoothing):
    peft = pytest.importorskip("peft", reason="the adapter is made with peft")

    def make():
        transformers.set_seed(0)
        settings = peft.LoraConfig(
            r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        model = peft.get_peft_model(causal_model(), settings)
        return making(
            tmp_path,
            "causal language model",
            given={"model": model, "model_init": None},
            label_smoothing_factor=smoothing,
            gradient_accumulation_steps=2,
        )()

    weights, reports, _ = trained(make)
    with HydraExecutor("cpu:1", **({"num_shards": shards} if shards > 1 else {})) as pool:
        (result,) = pool.run([task_from_trainer(make)])
    assert result.num_shards == shards
    assert_same(result, weights, reports)
    trainer_from_result(make, result).save_model(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_that_has_not_been_tried_is_refused(tmp_path):
    peft = pytest.importorskip("peft", reason="the adapter is made with peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    own = {"model": peft.get_peft_model(causal_model(), settings), "model_init": None}
    with pytest.raises(RefusedTrainerError, match="a PEFT model other than LoRA"):
        task_from_trainer(making(tmp_path, "causal language model", given=own))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "masked language model"])
def test_fused_trials_are_close(tmp_path, kind):
    makes = [making(tmp_path, kind, learning_rate=rate, weight_decay=decay) for rate, decay in ((1e-3, 0), (2e-3, 0.1))]
    with HydraExecutor("cpu:1", fusion="on") as pool:
        results = pool.run([task_from_trainer(make) for make in makes])
    for make, result in zip(makes, results, strict=True):
        assert result.group_size == 2
        weights, reports, _ = trained(make)
        for name, value in result.state_dict().items():
            # The loss of a choice does not depend on this bias, so Adam steps by the sign of a gradient of rounding errors.
            if kind != "multiple choice" or name != "classifier.bias":
                assert torch.allclose(value, weights[name], atol=1e-4), name
        assert math.isclose(result.metrics["val_loss"], reports[-1]["eval_loss"], rel_tol=1e-4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("as_factory", [False, True])
def test_a_model_made_before_the_trainer_is_trained_from_the_same_weights_each_time(tmp_path, as_factory):
    """Scripts load their model, then make the `Trainer`: all calls of the function then have one model."""
    transformers.set_seed(5)
    loaded = text_model()
    begin = copy.deepcopy(loaded.state_dict())
    own = {"model": None, "model_init": lambda: loaded} if as_factory else {"model": loaded, "model_init": None}
    with HydraExecutor("cpu:1") as pool:
        results = pool.run([task_from_trainer(making(tmp_path, given=own)) for _ in range(2)])
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in begin.items())
    trainers = [trainer_from_result(making(tmp_path, given=own), result) for result in results]
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in begin.items())
    assert trainers[0].model is not trainers[1].model
    assert trainers[0].evaluate()["eval_loss"] == results[0].metrics["val_loss"]
    weights, reports, _ = trained(making(tmp_path, given=own))
    for result in results:
        assert_same(result, weights, reports)


@pytest.mark.cases(1)
@pytest.mark.parametrize("as_factory", [False, True])
def test_trials_that_share_a_part_of_the_model_begin_from_its_weights(tmp_path, as_factory):
    words = Bag().words
    begin = words.weight.detach().clone()

    def bag():
        model = Bag()
        model.words = words
        return model

    def make():
        transformers.set_seed(5)
        own = {"model": None, "model_init": bag} if as_factory else {"model": bag(), "model_init": None}
        return making(tmp_path, kind="a module of one's own", given=own)()

    with HydraExecutor("cpu:1") as pool:
        results = pool.run([task_from_trainer(make) for _ in range(2)])
    assert torch.equal(begin, words.weight)
    weights, reports, _ = trained(make)
    for result in results:
        assert_same(result, weights, reports)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("metric", "threshold", "rate"), [("loss", 0.05, 1e-3), ("loss", None, 1e-2), ("eval_accuracy", 0.0, 2e-3)]
)
def test_early_stopping_stops_where_the_trainer_does(tmp_path, metric, threshold, rate):
    make = making(
        tmp_path,
        given={"callbacks": [EarlyStoppingCallback(2, threshold or 0.0)]},
        metric_for_best_model=metric,
        num_train_epochs=12,
        learning_rate=rate,
    )
    weights, reports, _ = trained(make)
    assert 2 < len(reports) < 12
    if threshold:
        assert reports[-1]["eval_loss"] < reports[0]["eval_loss"], "it stops although the loss falls"
    assert_same(train_plain(task_from_trainer(make)), weights, reports)


@pytest.mark.parametrize("is_greater_better", [False, True])
def test_early_stopping_counts_as_the_trainer_does_whatever_the_values(is_greater_better):
    """Also NaN and infinite ones, first or later; `Trainer` compares before it keeps the best."""
    for values in itertools.product([math.nan, math.inf, -math.inf, 1.0, 1.04, 2.0], repeat=4):
        callback = EarlyStoppingCallback(2, 0.05)
        seen = SimpleNamespace(
            state=transformers.TrainerState(),
            args=SimpleNamespace(metric_for_best_model="loss", greater_is_better=is_greater_better, save_strategy="no"),
        )
        stops = EarlyStop(metric="val_loss", is_greater_better=is_greater_better, patience=2, threshold=0.05)
        for number, value in enumerate(values):
            callback.check_metric_value(seen.args, seen.state, None, value)
            Trainer._determine_best_metric(seen, {"eval_loss": value}, None)
            expected = callback.early_stopping_patience_counter >= 2
            assert stops([{"val_loss": each} for each in values[: number + 1]]) == expected, values


def test_labels_that_label_names_leave_out_are_refused_by_name(tmp_path):
    task = task_from_trainer(making(tmp_path, "causal language model", label_names=["start_positions"]))
    with pytest.raises(TaskError, match="label_names= lacks 'labels'; add the name"):
        train_plain(task)


def test_predictions_with_an_empty_tuple_are_refused_by_name(tmp_path):
    """Values behind the empty tuple were lost."""
    task = task_from_trainer(
        making(tmp_path, given={"preprocess_logits_for_metrics": lambda logits, labels: (logits, (), logits)})
    )
    with pytest.raises(
        TaskError, match="the logits of a batch hold an empty tuple; pick the tensors in preprocess_logits"
    ):
        train_plain(task)


@pytest.mark.cases(1 / 3)
def test_the_result_becomes_a_trainer_that_evaluates_to_the_reported_numbers(stock, tmp_path):
    make, weights, reports = stock("token classification")
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task_from_trainer(make)])
    trainer = trainer_from_result(make, result)
    evaluated = trainer.evaluate()
    assert {name: evaluated[f"eval_{name}"] for name in ("loss", "accuracy", "spread")} == {
        name: reports[-1][f"eval_{name}"] for name in ("loss", "accuracy", "spread")
    }
    trainer.save_model(tmp_path / "saved")
    loaded = transformers.BertForTokenClassification.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in weights.items())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arguments", "saves_within_epochs"),
    [
        ({"gradient_accumulation_steps": 2, "max_steps": 5}, True),
        ({"train_sampling_strategy": "group_by_length"}, False),
        ({"kind": "masked language model"}, False),
        ({"kind": "token classification", "trainer_class": Weighted}, True),
    ],
)
def test_a_saved_trial_goes_on_with_the_same_bits(tmp_path, arguments, saves_within_epochs):
    make, keeper, plans = making(tmp_path, **arguments), checkpointed.Collector(), checkpointed.library()
    through = checkpointed.run(task_from_trainer(make), plans, keeper)
    in_epochs = [saved for saved in keeper.saved if not saved.labels["at_report"] and saved.labels["steps"] % 3]
    assert bool(in_epochs) == saves_within_epochs
    for saved in (in_epochs or keeper.saved)[:2]:
        resumed = checkpointed.run(task_from_trainer(make), plans, beginning=StartCheckpoint(saved=saved))
        assert resumed["history"] == through["history"]
        assert all(torch.equal(value, resumed["state"][name]) for name, value in through["state"].items())


def test_the_process_keeps_its_random_numbers(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    task_from_trainer(making(tmp_path))
    assert torch.equal(torch.rand(3), expected)


def test_the_tuner_sees_the_metric_for_the_best_model(tmp_path):
    assert task_from_trainer(making(tmp_path, metric_for_best_model="eval_accuracy")).metric == "val_accuracy"
    assert task_from_trainer(making(tmp_path)).metric == "val_loss"
    assert task_from_trainer(making(tmp_path, given={"eval_dataset": None}, eval_strategy="no")).metrics == (
        "train_loss",
    )


@pytest.mark.cases(1 / 3)
def test_trials_share_a_metric_that_collects_in_itself(tmp_path):
    """As those of the library `evaluate`, which scripts load once."""
    inside, overlaps = [], []

    def compute(predicted):
        inside.append(predicted)
        time.sleep(0.05)  # the other trial's thread comes meanwhile
        overlaps.append(len(inside) > 1)
        inside.pop()
        return accuracy(predicted)

    makes = [making(tmp_path, given={"compute_metrics": compute}) for _ in range(4)]
    with HydraExecutor("cpu:2") as pool:
        pool.run([task_from_trainer(make) for make in makes])
    assert overlaps == [False] * 8


def test_a_metric_that_is_no_number_is_named(tmp_path):
    task = task_from_trainer(making(tmp_path, given={"compute_metrics": lambda _: {"words": "many"}}))
    with pytest.raises(MetricError, match="compute_metrics returned 'words' as str"):
        train_plain(task)


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class OwnLog(Trainer):
    def log(self, *args, **kwargs):
        super().log(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs)

    def create_model_card(self, *args, **kwargs):
        """Of no effect on a training."""


class Looks(TrainerCallback):
    """Any callback."""


class Seeded:
    seed = 1

    def __call__(self, samples):
        return masked(samples)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield {}


class Epochs(Rows):
    def set_epoch(self, epoch):
        """Change the order or the samples of the epoch."""


def given(**arguments):
    return {"given": arguments}


def passed_scheduler():
    model = text_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = transformers.get_constant_schedule(optimizer)
    return {"model": model, "optimizers": (optimizer, scheduler)}


class Attached(Weighted):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.head = self.model.classifier


class Deferred(Weighted):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = [{"steps": lambda: self.state.global_step}]


class Bound(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compute_loss_func = self.scaled

    def scaled(self, outputs, labels, num_items_in_batch=None):
        return own_loss(outputs, labels, num_items_in_batch) / (1 + self.state.global_step)


class Noisy(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.noise = SimpleNamespace(generator=np.random.default_rng(0))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if return_outputs else loss * self.noise.generator.random()


class Lazy(Trainer):
    @functools.cached_property
    def first(self):
        return copy.deepcopy(self.model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if return_outputs else loss + sum(self.first(**inputs)["logits"].mean() for _ in range(2))


class Annealed(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if return_outputs else loss / (1 + self.state.global_step)


class Counting(Trainer):
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls += 1
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Collecting(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sizes = {"inputs": 0}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.sizes["inputs"] += len(inputs["labels"])
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Tallying(Trainer):
    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        type(self).calls += 1
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


NUM_CALLS, SETTINGS = 0, {"scale": 1.0, "unread": 0}


class CountingInAGlobal(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        global NUM_CALLS  # noqa: PLW0603 - the case
        NUM_CALLS += 1
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if return_outputs else loss * (1 + NUM_CALLS % 2)


def annealed(loss):
    SETTINGS["scale"] *= 0.5
    return loss * SETTINGS["scale"]


class AnnealedByAFunction(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if return_outputs else annealed(loss)


@functools.cache
def smoothing():
    return torch.tensor(SETTINGS["scale"])


CACHE = {}


class CachingInAGlobal(Trainer):
    """Fills a cache when the cache is first read."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "weights" not in CACHE:
            CACHE["weights"] = torch.tensor([1.0, 2.0, 3.0])
        outputs = model(**inputs)
        labels = inputs["labels"].view(-1)
        loss = torch.nn.functional.cross_entropy(outputs.logits.view(-1, 3), labels, weight=CACHE["weights"])
        return (loss, outputs) if return_outputs else loss


class CachingInAFunction(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if return_outputs else loss * smoothing()


class Gathering(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.accelerator.gather(inputs["labels"])
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Gathered(Metered):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss if return_outputs else loss / self.accelerator.gather_for_metrics(inputs["labels"].numel() * loss)


class Sparse(Metered):
    def log(self, logs, start_time=None):
        if self.state.global_step > 3:
            super().log(logs, start_time)


class Scheduled(Metered):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * 2 if self._seen > 10 else loss


class Unscaled(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = False


def hooked_optimizer():
    model = text_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: None)
    return {"model": model, "optimizers": (optimizer, None)}


def optimizer_of_the_head():
    model = text_model()
    return {"model": model, "optimizers": (torch.optim.SGD(model.classifier.parameters(), lr=0.1), None)}


class Decoupled(torch.optim.SGD):
    def __init__(self, params, lr=0.1, is_decoupled=False):
        super().__init__(params, lr=lr)
        self.is_decoupled = is_decoupled


def optimizer_with_an_attribute(is_decoupled=True):
    model = text_model()
    return {"model": model, "optimizers": (Decoupled(model.parameters(), is_decoupled=is_decoupled), None)}


REFUSALS = {
    "a part of the model in an attribute": (
        {"trainer_class": Attached}, "self.head of Attached, which holds a part of the model.*from compute_loss's model"
    ),
    "the training in an attribute": ({"trainer_class": Deferred}, "self.parts of Deferred, which holds a part.*or a Trainer"),
    "a loss of the Trainer's": ({"trainer_class": Bound}, "a compute_loss_func that holds .* a Bound: override compute_loss"),
    "half precision and a loss": ({"bf16": True, "trainer_class": Weighted}, "a compute_loss of the Trainer's own"),
    "training_step": ({"trainer_class": OwnStep}, "OwnStep has its own training_step"),
    "a loss that is not scaled": (
        {"kind": "causal language model", "trainer_class": Unscaled, "gradient_accumulation_steps": 2},
        "loss_is_scaled_for_ga=False of the Trainer: leave it at None, and give a compute_loss_func=",
    ),
    "several methods": (
        {"trainer_class": OwnLog}, "OwnLog has its own log, evaluate, which the pool .*: use the stock methods"
    ),
    "a callback": (given(callbacks=[Looks()]), "the callback Looks, which the pool would not call: leave it out"),
    "early stopping without a metric": (
        given(callbacks=[EarlyStoppingCallback()]), "EarlyStoppingCallback without metric_for_best_model"
    ),
    "saving": ({"save_strategy": "epoch"}, "save_strategy='epoch': set save_strategy='no'.*checkpoint_dir"),
    "the best model": (
        {"load_best_model_at_end": True, "save_strategy": "epoch"}, "load_best_model_at_end=True: leave it out"
    ),
    "recomputation": ({"activation_checkpointing": True}, "activation_checkpointing=True: leave it out; the pool recomputes"),
    "noise": ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: leave it out"),
    "a compiler": ({"torch_compile": True}, "torch_compile=True: leave it out, and set compile="),
    "batch sizes": ({"auto_find_batch_size": True}, "auto_find_batch_size=True: give per_device_train_batch_size"),
    "an evaluation first": ({"eval_on_start": True}, "eval_on_start=True: leave it out"),
    "a late evaluation": ({"eval_delay": 1}, "eval_delay=1: evaluate from the beginning"),
    "inputs for metrics": ({"include_for_metrics": ["inputs"]}, "include_for_metrics=.*compute the metrics from"),
    "workers": ({"dataloader_num_workers": 1}, "dataloader_num_workers=1: load the data in the process"),
    "a plateau": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}, "'reduce_lr_on_plateau': choose"
    ),
    "a scheduler": (passed_scheduler, "a scheduler in optimizers=: give lr_scheduler_type"),
    "a step hook": (hooked_optimizer, "its optimizer: SGD has step hooks.*leave the hooks out, or set after_step="),
    "a setting outside the groups": (
        optimizer_with_an_attribute, "Decoupled has is_decoupled=True, and made again .* False; use a subclass that has"
    ),
    "clipping beside the optimizer": (
        optimizer_of_the_head, "its optimizer lacks the unfrozen 'bert.*: freeze these with .*, or set max_grad_norm=0"
    ),
    "half precision and smoothing": ({"bf16": True, "label_smoothing_factor": 0.1}, "bf16=True with a label_smoothing"),
    "evaluation in bfloat16": ({"bf16_full_eval": True}, "bf16_full_eval=True: evaluate in the precision"),
    "no data": (given(train_dataset=None), "no train_dataset: give the Trainer one"),
    "endless data": ({"max_steps": 2} | given(train_dataset=Endless()), "a train_dataset without a length"),
    "data that are told the epoch": (given(train_dataset=Epochs([{}])), "the dataset Epochs has set_epoch.*count its passes"),
    "validation data that are told the epoch": (given(eval_dataset=Epochs([{}])), "the dataset Epochs has set_epoch"),
    "a loader that accelerate does not know": (
        {"trainer_class": PlainLoader}, "a loader of the class DataLoader.*: return self.accelerator.prepare"
    ),
    "several validation sets": (given(eval_dataset={"a": Rows([]), "b": Rows([])}), "several eval_datasets: give one"),
    "a seeded collator": (given(data_collator=Seeded()), "Seeded with a seed, which trials would share"),
    "an evaluation after the last step": (
        {"eval_strategy": "steps", "eval_steps": 5}, "eval_steps=5 in a training of 12 steps.*divides the steps"
    ),
    "split batches": (
        {"accelerator_config": {"split_batches": True}}, "accelerator_config with split_batches=True: leave it out"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_not_be_exact_is_refused(tmp_path, name):
    arguments, message = REFUSALS[name]
    if callable(arguments):
        arguments = {"live_model": True, "given": arguments()}
    make = making(tmp_path, **arguments)
    with pytest.raises(RefusedTrainerError, match=message):
        task_from_trainer(make)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Annealed, "compute_loss of Annealed reads self.state, which a trial in the pool lacks"),
        (Counting, "compute_loss of Counting changes self.calls, which trials of a search would share"),
        (Collecting, "compute_loss of Collecting changes self.sizes, which trials of a search would share"),
        (Tallying, "compute_loss of Tallying changes self.calls, which trials of a search would share"),
        (Noisy, "compute_loss of Noisy changes self.noise, which trials of a search would share"),
        (Lazy, "compute_loss of Lazy changes self.first, which trials of a search would share"),
        (
            CountingInAGlobal,
            "compute_loss of CountingInAGlobal changes the global 'NUM_CALLS', which trials of a search would",
        ),
        (
            AnnealedByAFunction,
            "compute_loss of AnnealedByAFunction changes the global 'SETTINGS'['scale'], which trials of",
        ),
        (Gathering, "compute_loss reads self.accelerator.gather, which a trial in the pool lacks"),
        (Gathered, "the loss of Gathered follows from accelerator.gather_for_metrics, which is for metrics: compute"),
        (Scheduled, "compute_loss asks for a count over the training, which a trial in the pool lacks: compute"),
        (Sparse, "log of Sparse reads self.state, which a trial in the pool lacks"),
    ],
)
def test_a_loss_that_reads_or_changes_the_training_fails_by_name(tmp_path, kind, message):
    task = task_from_trainer(making(tmp_path, trainer_class=kind))
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task], on_error="return")
    assert result.status == "failed"
    assert message in str(result.error)


@pytest.mark.parametrize("kind", [CachingInAFunction, CachingInAGlobal])
def test_a_loss_may_read_globals_and_keep_results_of_functions(tmp_path, kind):
    task = task_from_trainer(making(tmp_path, trainer_class=kind))
    with HydraExecutor("cpu:1") as pool:
        (result,) = pool.run([task])
    assert result.status == "completed"


def test_a_trainer_is_free_while_its_loss_lives(tmp_path):
    made = []

    def make():
        made.append(making(tmp_path, trainer_class=Weighted)())
        return made[-1]

    task = task_from_trainer(make)
    trainer, model = weakref.ref(made[-1]), weakref.ref(made.pop().model)
    gc.collect()
    assert trainer() is None
    assert model() is None
    assert task.step.own_loss is not None


def test_a_trainer_made_on_another_thread_is_no_change_of_a_loss(tmp_path):
    trainer = making(tmp_path, trainer_class=Weighted)()
    before = _contents(trainer)
    PartialState._reset_state()  # as each new Trainer does first
    try:
        assert _contents(trainer) == before
    finally:
        making(tmp_path)()


def test_an_optimizer_that_can_be_made_again_is_taken_over(tmp_path):
    own = optimizer_with_an_attribute(is_decoupled=False)
    transformers.get_constant_schedule(own["optimizers"][0])  # leaves a note on the optimizer
    task_from_trainer(making(tmp_path, live_model=True, given=own))


def test_trials_of_a_task_begin_with_the_tensor_that_is_the_learning_rate(tmp_path):
    """Schedulers write the tensor in place: those of other trials, and those of the trainer."""
    model = text_model()
    own = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    task = task_from_trainer(making(tmp_path, live_model=True, given={"model": model, "optimizers": (own, None)}))
    for _ in range(2):
        module = task.model()
        optimizer = task.optimizer(task.param_groups(module))
        assert optimizer.param_groups[0]["lr"] == torch.tensor(0.1)
        optimizer.param_groups[0]["lr"].zero_()
        own.param_groups[0]["lr"].zero_()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_optimizer_of_the_head_is_taken_over_where_nothing_else_is_clipped(tmp_path, is_frozen):
    own = optimizer_of_the_head()
    own["model"].base_model.requires_grad_(not is_frozen)
    task_from_trainer(making(tmp_path, live_model=True, given=own, **({} if is_frozen else {"max_grad_norm": 0})))


def test_generation_is_refused(tmp_path):
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, save_strategy="no", predict_with_generate=True
    )
    make = making(tmp_path, "translation", trainer_class=transformers.Seq2SeqTrainer, given={"args": arguments})
    with pytest.raises(RefusedTrainerError, match="predict_with_generate=True: evaluate by the loss"):
        task_from_trainer(make)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fp16": True}, "fp16=True: use bf16=True"),
        ({"deepspeed": "config.json"}, "deepspeed='config.json': give the devices to the pool"),
        ({"fsdp": True}, "fsdp=True: give the devices to the pool"),
        ({"_n_gpu": 2}, "a Trainer on 2 GPUs: set use_cpu=True"),
        ({"report_to": ["wandb"]}, "report_to=.*set report_to='none'"),
        ({"push_to_hub": True}, "push_to_hub=True: push after the search"),
    ],
)
def test_settings_that_need_other_hardware_or_services_are_refused(tmp_path, change, message):
    def make():
        trainer = making(tmp_path)()
        for name, value in change.items():
            object.__setattr__(trainer.args, name, value)
        return trainer

    with pytest.raises(RefusedTrainerError, match=message):
        task_from_trainer(make)


def test_a_trainer_in_place_of_its_function_is_refused(tmp_path):
    with pytest.raises(
        RefusedTrainerError, match=r"make_trainer is a Trainer, .*: give a function that makes the Trainer"
    ):
        task_from_trainer(making(tmp_path)())


def test_all_reasons_are_told_at_once(tmp_path):
    with pytest.raises(RefusedTrainerError) as refused:
        task_from_trainer(making(tmp_path, eval_delay=1, save_strategy="epoch", trainer_class=OwnStep))
    assert len(refused.value.reasons) == 3
    assert all(reason in str(refused.value) for reason in refused.value.reasons)


def test_a_version_too_old_is_refused_by_its_version(tmp_path, monkeypatch):
    """Before its arguments, which may have other names or lack."""

    class Lacking(transformers.TrainingArguments):
        @property
        def gradient_accumulation_steps(self):
            raise AttributeError("gradient_accumulation_steps")

        @gradient_accumulation_steps.setter
        def gradient_accumulation_steps(self, value):
            pass

    def make():
        trainer = making(tmp_path)()
        trainer.args.__class__ = Lacking
        return trainer

    monkeypatch.setattr(installed.transformers, "__version__", "4.49.0")
    with pytest.raises(RefusedTrainerError) as refused:
        task_from_trainer(make)
    assert refused.value.reasons == (
        "transformers 4.49.0, and the oldest supported is 4.50: install transformers>=4.50",
    )


@pytest.mark.parametrize(
    ("version", "is_compared"), [("4.50.3", True), ("4.51.3", False), ("5.0.0", True), ("5.99.0", False)]
)
def test_a_version_that_has_not_been_compared_is_logged(tmp_path, monkeypatch, caplog, version, is_compared):
    monkeypatch.setattr(installed.transformers, "__version__", version)
    task_from_trainer(making(tmp_path))
    assert (f"and {version} is installed; compare a trial" in caplog.text) != is_compared


@pytest.mark.skipif(not SKIPS_REST, reason="this version trains all batches of an epoch")
def test_a_rest_that_the_trainer_does_not_train_is_refused(tmp_path):
    with pytest.raises(RefusedTrainerError, match="gradient_accumulation_steps=5 in epochs of 6 batches, whose rest"):
        task_from_trainer(making(tmp_path, gradient_accumulation_steps=5))


def test_an_unknown_argument_is_refused_unless_it_has_its_default(tmp_path, monkeypatch):
    monkeypatch.setattr(refusals, "TAKEN_OVER", refusals.TAKEN_OVER - {"adam_beta1"})
    task_from_trainer(making(tmp_path))
    with pytest.raises(RefusedTrainerError, match=re.escape("adam_beta1=0.5: an argument that this version")):
        task_from_trainer(making(tmp_path, adam_beta1=0.5))


@dataclasses.dataclass
class OwnArguments(transformers.TrainingArguments):
    gamma: float = 1.0


def test_arguments_of_a_subclass_are_the_losses_own(tmp_path):
    arguments = OwnArguments(
        str(tmp_path), gamma=2.0, use_cpu=True, save_strategy="no", report_to="none", eval_strategy="epoch"
    )
    task = task_from_trainer(making(tmp_path, given={"args": arguments}, trainer_class=Weighted))
    assert task.step.own_loss.method.__self__.args.gamma == 2


@dataclasses.dataclass
class OtherDefaults(transformers.TrainingArguments):
    neftune_noise_alpha: float = 5.0
    activation_offloading: bool = False


def test_defaults_and_arguments_of_a_subclass_are_refused_as_those_of_the_library(tmp_path):
    arguments = OtherDefaults(
        str(tmp_path),
        activation_offloading=True,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        eval_strategy="epoch",
    )
    with pytest.raises(RefusedTrainerError, match=r"neftune_noise_alpha=5\.0: leave it out") as refused:
        task_from_trainer(making(tmp_path, given={"args": arguments}))
    assert any("activation_offloading=True: leave it out; the pool spills" in each for each in refused.value.reasons)


def test_every_argument_of_the_installed_version_is_known():
    known = refusals.TAKEN_OVER | refusals.WITHOUT_EFFECT | set(refusals.REFUSED)
    assert {field.name for field in dataclasses.fields(transformers.TrainingArguments)} - known == set()


def space(trial):
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [2, 4]),
    }


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("is_installed", [False, True])
def test_a_search_in_the_pool_is_the_trainers_search(tmp_path, is_installed):
    """Also, one direction in a list is one direction."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search = {"hp_space": space, "n_trials": 4, "direction": "maximize" if is_installed else ["maximize"]}
    make = making(tmp_path, num_train_epochs=1, trainer_class=Trainer if is_installed else Penalized)
    stock = make().hyperparameter_search(backend="optuna", sampler=optuna.samplers.RandomSampler(seed=0), **search)
    search["sampler"] = optuna.samplers.RandomSampler(seed=0)
    with HydraExecutor("cpu:2") as pool:
        if not is_installed:
            best = hydra_tune_transformers.hyperparameter_search(make(), executor=pool, **search)
        else:
            hydra_tune_transformers.install()
            try:
                best = make().hyperparameter_search(backend="optuna", executor=pool, **search)
            finally:
                hydra_tune_transformers.uninstall()
    assert best == stock


@pytest.mark.cases(1 / 3)
def test_the_page_runs(tmp_path, monkeypatch):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    monkeypatch.chdir(tmp_path)
    page = {}
    exec(compile(PageCode.of(DOCS / "howto" / "trainer.md").program, "trainer.md", "exec"), page)
    assert page["result"].metrics["val_loss"] == page["trainer"].evaluate()["eval_loss"]
    weights, reports, _ = trained(page["make_trainer"])
    assert_same(page["result"], weights, reports)
    assert math.isfinite(page["best"].objective)
    assert "learning_rate" in page["best"].hyperparameters
