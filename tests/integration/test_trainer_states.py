"""Loaders, models and stateful objects of a `Trainer`: a trial has the bits of `Trainer.train()`, or is refused by name."""

import functools
import random

import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

import optuna
import transformers
from transformers import Trainer

import hydra_tune_transformers
from hydra_tune import HydraExecutor, train_plain
from hydra_tune.errors import TaskError
from hydra_tune_transformers import RefusedTrainerError, task_from_trainer
from tests.support.trainers import making, padded, text_model, trained

# Of older versions of transformers, which use old names of torch.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.cpu.amp.autocast:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _own_precision(monkeypatch):
    """Keep settings of other tests, which older versions note for the process, from these tests."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")


def assert_same(result, weights, reports):
    state = result.state_dict()
    assert list(state) == list(weights)
    assert [name for name, value in weights.items() if not torch.equal(value, state[name])] == []
    names = [name for name in result.metrics if name.startswith("val_")]
    expected = [{name: float(report[name.replace("val_", "eval_", 1)]) for name in names} for report in reports]
    assert names
    assert [{name: entry[name] for name in names} for entry in result.history] == expected


class UnevenBatches(torch.utils.data.Sampler):
    """Batches of several sizes; accelerate counts each as of `batch_size`."""

    batch_size, drop_last = 3, False

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        places = iter(range(sum(self.sizes)))
        return iter([[next(places) for _ in range(size)] for size in self.sizes])

    def __len__(self):
        return len(self.sizes)


class OwnEvaluation(Trainer):
    """Evaluates by a loader of its own."""

    first, arguments = None, None

    def get_eval_dataloader(self, eval_dataset=None):
        rows = (
            self.eval_dataset if self.first is None else torch.utils.data.Subset(self.eval_dataset, range(self.first))
        )
        loader = torch.utils.data.DataLoader(rows, collate_fn=self.data_collator, **self.arguments)
        return self.accelerator.prepare(loader)


class GivenRows(Trainer):
    """Evaluates the rows that `evaluate` gives."""

    def get_eval_dataloader(self, eval_dataset):
        return super().get_eval_dataloader(eval_dataset)


def evaluating(first=None, **arguments):
    return type("OwnEvaluation", (OwnEvaluation,), {"first": first, "arguments": arguments})


def with_mean(logits, labels):
    return logits, logits.mean()


def of_all(predicted):
    scores, means = predicted.predictions
    return {"scores": float(scores.sum()), "size": float(scores.size), "means": float(means.sum())}


EVALUATIONS = {
    "larger batches than those of the arguments": {"trainer_class": evaluating(batch_size=7)},
    "a part of the rows": {"trainer_class": evaluating(first=7, batch_size=4)},
    "the rest dropped": {"trainer_class": evaluating(batch_size=4, drop_last=True)},
    "the rest kept": {"trainer_class": evaluating(batch_size=4), "dataloader_drop_last": True},
    "batches of several sizes": {"trainer_class": evaluating(batch_sampler=UnevenBatches([2, 5, 3]))},
    "the rows given": {"trainer_class": GivenRows},
    "a number for each batch": {
        "trainer_class": evaluating(batch_sampler=UnevenBatches([2, 5, 3])),
        "given": {"preprocess_logits_for_metrics": with_mean, "compute_metrics": of_all},
    },
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_last_batch_of_an_own_loader_counts_as_in_the_trainer(tmp_path, name):
    """The pool took the rest of the whole dataset by the batch size of the arguments."""
    make = making(tmp_path, num_train_epochs=1, **EVALUATIONS[name])
    weights, reports, _ = trained(make)
    assert_same(train_plain(task_from_trainer(make)), weights, reports)


def freeze(trainer):
    trainer.model.bert.requires_grad_(False)


def thaw(trainer):
    trainer.model.bert.requires_grad_(True)


def adapt(trainer):
    peft = pytest.importorskip("peft")
    trainer.model = peft.get_peft_model(trainer.model, peft.LoraConfig(r=2, target_modules=["query"]))


def step_before(trainer):
    trainer.create_optimizer()


def frozen_model():
    model = text_model()
    model.bert.requires_grad_(False)
    return model


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (freeze, {}),
        (thaw, {"given": {"model_init": frozen_model}}),
        (adapt, {}),
        (step_before, {"weight_decay": 0.3}),
    ],
)
def test_a_model_init_undoes_what_a_script_does_to_the_model_of_the_trainer(tmp_path, change, arguments):
    """Trials froze what the first model had frozen, where `train()` makes another model."""

    def make():
        trainer = making(tmp_path, num_train_epochs=1, **arguments)()
        change(trainer)
        return trainer

    weights, reports, _ = trained(make)
    assert_same(train_plain(task_from_trainer(make)), weights, reports)


@pytest.mark.parametrize("shards", [0, 1, pytest.param(2, marks=pytest.mark.slow)], ids=["plain loop", "whole", "cut"])
def test_an_optimizer_with_a_state_before_its_first_step_is_taken_over(tmp_path, shards):
    """The state that Adagrad has from the beginning counted as that of steps."""
    make = making(tmp_path, optim="adagrad", num_train_epochs=1)
    weights, reports, _ = trained(make)
    task = task_from_trainer(make)
    if not shards:
        assert_same(train_plain(task), weights, reports)
        return
    with HydraExecutor(f"cpu:{shards}", num_shards=shards) as pool:
        (result,) = pool.run([task])
    assert_same(result, weights, reports)


def stepped(kind):
    model = text_model()
    optimizer = kind(model.parameters())
    model(input_ids=torch.tensor([[2, 3]]), labels=torch.tensor([1])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizers": (optimizer, None)}


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.AdamW])
def test_an_optimizer_that_has_made_a_step_is_refused(tmp_path, kind):
    make = making(tmp_path, live_model=True, given=stepped(kind))
    with pytest.raises(
        RefusedTrainerError, match=f"{kind.__name__} has made steps already; use an optimizer of torch that"
    ):
        task_from_trainer(make)


def encoded(samples):
    return transformers.BatchEncoding(padded(samples))


class ByAttributes(Trainer):
    """Reads a `BatchEncoding` by its attributes."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs.input_ids, attention_mask=inputs["attention_mask"], labels=inputs["labels"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class ByKeys(Trainer):
    """Computes on the model's device, otherwise in training than in an evaluation."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        weight = torch.tensor(0.5 if model.training else 2.0, device=model.device)
        return (outputs["loss"] * weight, outputs) if return_outputs else outputs["loss"] * weight


class OnTheAcceleratorsDevice(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)["loss"] * torch.ones((), device=self.accelerator.device)


class WhileTraining(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)["loss"] * (2 if self.is_in_train else 1)


class Misspelled(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).losses


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (ByAttributes, TaskError, r"compute_loss of ByAttributes reads inputs.input_ids, .* as inputs\['labels'\]"),
        (OnTheAcceleratorsDevice, TaskError, "reads self.accelerator.device, .* lacks; read model.device"),
        (WhileTraining, TaskError, "reads self.is_in_train, .* lacks: read model.training"),
        (Misspelled, AttributeError, "has no attribute 'losses'"),
    ],
)
def test_a_loss_that_reads_an_attribute_the_pool_lacks_is_told_what_to_read(tmp_path, kind, error, message):
    task = task_from_trainer(making(tmp_path, trainer_class=kind, given={"data_collator": encoded}))
    with pytest.raises(error, match=message):
        train_plain(task)


def test_a_loss_that_reads_as_told_has_the_bits(tmp_path):
    make = making(tmp_path, trainer_class=ByKeys, num_train_epochs=1, given={"data_collator": encoded})
    weights, reports, _ = trained(make)
    assert_same(train_plain(task_from_trainer(make)), weights, reports)
    with HydraExecutor("cpu:2", num_shards=2) as pool:
        (result,) = pool.run([task_from_trainer(make)])
    assert_same(result, weights, reports)


class Growing:
    """Gives another result at each call."""

    calls = 0

    def grown(self):
        self.calls += 1
        return 1 + 1 / self.calls


class GrowingLoss(Growing):
    def __call__(self, outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"], labels) * self.grown()


class MovingLoss(torch.nn.Module):
    """Subtracts a moving average."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, outputs, labels, num_items_in_batch=None):
        self.mean.mul_(0.9).add_(0.1 * outputs["logits"].detach().mean(0))
        return torch.nn.functional.cross_entropy(outputs["logits"] - self.mean, labels)


def loss_of_a_closure():
    calls = 0

    def count(outputs, labels, num_items_in_batch=None):
        nonlocal calls
        calls += 1
        return torch.nn.functional.cross_entropy(outputs["logits"], labels) * (1 + 1 / calls)

    return count


class GrowingCollator(Growing):
    def __call__(self, samples):
        batch = padded(samples)
        return {**batch, "labels": (batch["labels"] + int(4 * self.grown())) % 3}


def collator_of_a_closure():
    stream = random.Random(0)

    def shift(samples):
        batch = padded(samples)
        return {**batch, "labels": (batch["labels"] + stream.randrange(3)) % 3}

    return shift


class GrowingMetrics(Growing):
    def __call__(self, predicted):
        return {"grown": self.grown()}


class GrowingScores(Growing):
    def change(self, logits, labels):
        return logits * self.grown()


STATES = {
    "compute_loss_func=GrowingLoss": {"compute_loss_func": GrowingLoss},
    "compute_loss_func=MovingLoss": {"compute_loss_func": MovingLoss},
    "compute_loss_func=count": {"compute_loss_func": loss_of_a_closure},
    "data_collator=GrowingCollator": {"data_collator": GrowingCollator},
    "data_collator=shift": {"data_collator": collator_of_a_closure},
    "compute_metrics=GrowingMetrics": {"compute_metrics": GrowingMetrics},
    "preprocess_logits_for_metrics=GrowingScores": {
        "preprocess_logits_for_metrics": lambda: functools.partial(GrowingScores().change)
    },
}


@pytest.mark.parametrize("name", STATES)
def test_an_object_that_changes_in_its_calls_serves_one_trial_alone(tmp_path, name):
    """Trials called the one object in turn, and each got another state than that of a training of its own."""

    def make():
        return making(tmp_path, given={key: build() for key, build in STATES[name].items()})()

    weights, reports, _ = trained(make)
    assert_same(train_plain(task_from_trainer(make)), weights, reports)
    with HydraExecutor("cpu:2") as pool:
        results = pool.run([task_from_trainer(make) for _ in range(2)])
        for result in results:
            assert_same(result, weights, reports)
        task = task_from_trainer(make)
        (first,) = pool.run([task])
        assert_same(first, weights, reports)
        (second,) = pool.run([task], on_error="return")
        at_once = pool.run([task_from_trainer(make)] * 2, on_error="return")
    message = f"{name} changes in its calls, which trials share"
    assert message in str(second.error)
    assert any(message in str(result.error) for result in at_once)
    for result in at_once:
        if result.status == "completed":
            assert_same(result, weights, reports)


def test_trials_of_a_search_share_no_object_that_changes(tmp_path):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    trainer = making(tmp_path, num_train_epochs=1, given={"compute_loss_func": GrowingLoss()})()
    search = {"hp_space": lambda trial: {}, "n_trials": 2, "n_jobs": 1}
    with HydraExecutor("cpu:1") as pool, pytest.raises(Exception, match="compute_loss_func=GrowingLoss changes in its"):
        hydra_tune_transformers.hyperparameter_search(trainer, executor=pool, **search)


class Weighing:
    """Weighs the classes, and holds more than a look at each call would read."""

    def __init__(self):
        self.weights, self.rows = torch.tensor([1.0, 2.0, 3.0]), list(range(5000))

    def __call__(self, outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=self.weights)


def test_an_object_without_changes_serves_all_trials(tmp_path):
    make = making(tmp_path, num_train_epochs=1, given={"compute_loss_func": Weighing()})
    weights, reports, _ = trained(make)
    with HydraExecutor("cpu:2") as pool:
        for result in pool.run([task_from_trainer(make)] * 2):
            assert_same(result, weights, reports)


class DrawsItsOrder(Trainer):
    """Draws the order of a loader where the loader is made, which a trial does not repeat."""

    def get_train_dataloader(self):
        order = torch.randperm(len(self.train_dataset)).tolist()
        return torch.utils.data.DataLoader(self.train_dataset, 4, sampler=order, collate_fn=self.data_collator)


class DrawsAnEvaluation(Trainer):
    def get_eval_dataloader(self, eval_dataset=None):
        random.random()
        return super().get_eval_dataloader(eval_dataset)


@pytest.mark.parametrize(("kind", "name"), [(DrawsItsOrder, "get_train_dataloader"), (DrawsAnEvaluation, "get_eval_")])
def test_a_loader_whose_order_is_drawn_at_once_is_refused(tmp_path, kind, name):
    with pytest.raises(RefusedTrainerError, match=rf"its {name}\w*\(\) draws random numbers"):
        task_from_trainer(making(tmp_path, trainer_class=kind))
