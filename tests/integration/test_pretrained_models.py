"""Models of `from_pretrained`, which replaces functions and the default dtype of the whole process while a model is made."""

from functools import partial

import pytest
import torch

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

import transformers
from transformers import PreTrainedModel

import hydra_tune_optuna as optuna
from hydra_tune import HydraExecutor, LoopTask, TrainTask, train_plain
from hydra_tune_transformers import task_from_trainer
from tests.parity.exact import differences
from tests.support.trainers import ENCODER, LABELS, WORDS, making, trained

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
BATCHES = [torch.randint(2, WORDS, (4, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


@pytest.fixture
def folder(tmp_path):
    """A saved model whose head shares its weights with the embedding."""
    transformers.set_seed(5)
    transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _process_stays_as_before():
    before = (PreTrainedModel.tie_weights, torch.nn.init.normal_, torch.get_default_dtype())
    yield
    assert (PreTrainedModel.tie_weights, torch.nn.init.normal_, torch.get_default_dtype()) == before


def loaded(folder, dtype=torch.float32):
    return transformers.BertForMaskedLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_trial_of_a_search_loads_the_model(folder, dtype):
    """The objective loads a model on the user's thread while the pool loads the model of an earlier trial."""

    def make(lr):
        own = {"model_init": partial(loaded, folder, dtype)}
        return making(folder.parent, "masked language model", given=own, learning_rate=lr, num_train_epochs=1)

    def objective(trial):
        return task_from_trainer(make(trial.suggest_categorical("lr", RATES)))

    with HydraExecutor("cpu:2") as pool:
        study = optuna.create_study(executor=pool, sampler=optuna.samplers.GridSampler({"lr": RATES}))
        study.optimize(objective)
    for trial in study.trials:
        _, reports, _ = trained(make(trial.params["lr"]))
        assert trial.value == reports[-1]["eval_loss"]


def train(loop, folder, lr):
    model = loaded(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loop.register(model, optimizer)
    for batch in BATCHES:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.step()
    loop.report({"loss": loss.item()})


def test_loops_load_their_models_beside_a_thread_of_the_user(folder):
    tasks = [LoopTask(partial(train, folder=folder, lr=lr), metric="loss") for lr in RATES]
    with HydraExecutor("cpu:2") as pool:
        jobs = [pool.submit(task) for task in tasks]
        for lr in RATES:
            task_from_trainer(
                making(
                    folder.parent,
                    "masked language model",
                    given={"model_init": partial(loaded, folder)},
                    learning_rate=lr,
                )
            )
        results = [job.result() for job in jobs]
    for task, result in zip(tasks, results, strict=True):
        assert list(differences(train_plain(task).state_dict(), result.state_dict())) == []


class Head(torch.nn.Module):
    """A small classifier, over a model that is loaded in another precision and left out."""

    def __init__(self, folder):
        super().__init__()
        for _ in range(3):
            loaded(folder, torch.bfloat16)
        self.layer = torch.nn.Linear(8, LABELS)

    def forward(self, inputs):
        return self.layer(inputs)


def share(model, batch):
    """Divide whole numbers, which gives a tensor of the default dtype."""
    hits = (model(batch[0]).argmax(dim=1) == batch[1]).sum()
    return {"share": hits / torch.tensor(3)}


def test_a_model_that_loads_in_another_precision_leaves_the_steps_of_others_alone(folder):
    data = [(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)), torch.arange(3)) for seed in range(40)]
    tasks = [
        TrainTask(
            model=partial(Head, folder),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            train=lambda: data,
            validate=lambda: data,
            loss=torch.nn.functional.cross_entropy,
            evaluate=share,
            metric="val_share",
            epochs=3,
            seed=seed,
        )
        for seed in range(8)
    ]
    with HydraExecutor("cpu:2") as pool:
        results = pool.run(tasks)
    for task, result in zip(tasks, results, strict=True):
        plain = train_plain(task)
        assert [each["val_share"] for each in plain.history] == [each["val_share"] for each in result.history]
