"""A model whose head or embedding is larger than any device trains in pieces, with the bits of a plain loop over the pieces."""

import ast
import re
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_tune import Result, TrainTask, train_plain
from hydra_tune.errors import BudgetError, TaskError
from hydra_tune.shard.partition import trial_step
from tests.parity import registry
from tests.parity.models import GPT2, build
from tests.support.tracker import StorageTracker
from tests.unit.pool.tasks import PATIENCE_SECONDS, against_plain, running

pytestmark = pytest.mark.usefixtures("captured_once")

VOCABULARY, WIDTH = 2048, 32
BUDGET_BYTES = 700 * 1024
STATE_BYTES = 4 * VOCABULARY * WIDTH * 4  # an operator's weight, its gradient, and AdamW's two moments
IDS = torch.randint(VOCABULARY, (4, 2, 5), generator=torch.Generator().manual_seed(1))


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.middle(self.embed(ids)))))


def next_id(module: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def task(**changes: Any) -> TrainTask:
    arguments: dict[str, Any] = {
        "model": Language,
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "train": lambda: list(IDS),
        "validate": lambda: list(IDS[:1]),
        "step": next_id,
        "seed": 3,
    }
    return TrainTask(**(arguments | changes))


def train(described: TrainTask, devices: str) -> Result:
    """On devices that hold no operator whole; a tracker and the ledger agree that they never do."""
    tracker = StorageTracker()
    with running(devices=devices, device_memory=BUDGET_BYTES, instrument=tracker) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
        counted = sorted((device.peak_bytes for device in pool.stats().devices.values()), reverse=True)
    for seen, ledger in zip(sorted(tracker.peak_bytes, reverse=True), counted, strict=False):
        assert seen <= ledger <= BUDGET_BYTES < STATE_BYTES
    return result


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_does_not_fit_is_refused_with_a_remedy_that_works(tied):
    described = partial(task, model=partial(Language, tied=tied))
    error = train(described(), "cpu:1").error
    assert isinstance(error, BudgetError)
    remedy = re.search(r"train the weights in pieces \(split_operators=(\{.*?\})\), or raise device_memory", str(error))
    assert remedy, str(error)
    wanted = ast.literal_eval(remedy[1])
    assert wanted.keys() == {"embed", "head"}
    assert against_plain(described(split_operators=wanted), train(described(split_operators=wanted), "cpu:1")) == []


@pytest.mark.cases(1 / 3)
def test_too_few_pieces_and_too_long_batches_are_told_apart():
    few = train(task(split_operators={"embed": 2, "head": 4}), "cpu:1").error
    assert isinstance(few, BudgetError)
    assert "lower batch_size, cut more pieces by split_operators, or raise device_memory" in str(few)
    long = torch.randint(VOCABULARY, (8, 33))
    activations = train(task(train=lambda: [long], split_operators={"embed": 4, "head": 4}), "cpu:1").error
    assert isinstance(activations, BudgetError)
    assert "lower batch_size, have batches split (split_batches='auto'), or raise" in str(activations), (
        "no pieces would do"
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {"split_operators": {"embed": 4, "head": 4}},
    "tied": {"split_operators": {"head": 5}, "model": partial(Language, tied=True)},
    "a size": {"split_operators": "80KiB", "max_grad_norm": 0.5},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("case", "devices"),
    [
        pytest.param(case, devices, marks=[pytest.mark.slow] * ((devices == "cpu:1") != (case == "tied")))
        for case in CASES
        for devices in ("cpu:1", "cpu:2")
    ],
)
def test_a_model_of_pieces_has_the_bits_of_a_plain_loop(case, devices):
    described = task(**CASES[case])
    result = train(described, devices)
    assert against_plain(described, result) == []
    assert result.num_shards > 5


def test_the_result_is_the_users_own_model():
    result = train(task(split_operators={"embed": 4, "head": 4}), "cpu:1")
    model = Language()
    assert result.state_dict().keys() == model.state_dict().keys()
    model.load_state_dict(result.state_dict())
    trained = result.module()
    assert repr(trained) == repr(model)
    assert type(trained.get_submodule("head")) is nn.Linear
    assert torch.equal(trained.eval()(IDS[0]), model.eval()(IDS[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(result.optimizer_state_dict())
    assert optimizer.state[model.head.weight]["exp_avg"].shape == (VOCABULARY, WIDTH)
    next_id(trained, IDS[0]).backward()
    assert trained.get_parameter("head.weight").grad is not None


FEATURES: dict[str, dict[str, Any]] = {
    "accumulate, clip, activations": {"accumulate": 3, "max_grad_norm": 0.3, "activations": "keep"},
    "bfloat16, split_batches": {"precision": "bfloat16", "split_batches": 2},
    "float16": {"precision": "float16"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "feature", [pytest.param(each, marks=[pytest.mark.slow] * ("float16" in each)) for each in FEATURES]
)
def test_pieces_with_all_else_that_a_task_may_ask_for(feature):
    """Tied over all shards, with dropout and parameter groups."""
    described = build("gpt2", epochs=1, split_operators={"tokens": 3, "blocks.1.qkv": 2}, **FEATURES[feature])
    with running(devices="cpu:2", num_shards=6) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
    assert against_plain(described, result) == []
    assert isinstance(result.module(), GPT2)
    assert result.num_shards == 6


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        pytest.param("hf_gpt2", "transformer.wte", marks=pytest.mark.slow),
        pytest.param("hf_t5", "shared", marks=pytest.mark.slow),
    ],
)
def test_models_of_the_transformers_library_with_tied_embeddings(name, operator):
    described = replace(registry.build(registry.Spec(name)), split_operators={operator: 3})
    with running(devices="cpu:2", num_shards=3) as pool:
        result = pool.submit(described).result(PATIENCE_SECONDS)
    assert against_plain(described, result) == []
    assert result.num_shards == 3


def test_a_refusal_is_the_trials_own():
    adafactor = partial(torch.optim.Adafactor, lr=1e-2)
    with running(devices="cpu:1") as pool:
        refused = pool.submit(task(optimizer=adafactor, split_operators={"head": 4})).result(PATIENCE_SECONDS)
        reads = task(step=lambda m, ids: next_id(m, ids) + m.head.weight.mean(), split_operators={"head": 4})
        named = pool.submit(reads).result(PATIENCE_SECONDS)
    assert isinstance(refused.error, TaskError)
    assert "Adafactor does not update each element by itself, so training 'head.weight'" in str(refused.error)
    assert isinstance(named.error, TaskError)
    assert "the step reads 'weight' of 'head'" in str(named.error)


@pytest.mark.cases(1 / 3)
def test_trials_share_a_capture_where_they_are_cut_alike(captured_once):
    captured_once.clear()
    tasks = [task(split_operators={"embed": count, "head": 4}, seed=seed) for seed, count in enumerate((4, 4, 8))]
    with (
        mock.patch.object(trial_step, "capture", wraps=trial_step.capture) as captures,
        running(devices="cpu:2") as pool,
    ):
        results = pool.run(tasks)
    assert [against_plain(described, result) for described, result in zip(tasks, results, strict=True)] == [[], [], []]
    assert captures.call_count == 4, "two models, for training and for evaluation"


def test_the_plain_loop_is_whole_again_when_it_is_pruned():
    plain = train_plain(task(split_operators={"head": 4}), lambda step, metrics: False)
    assert plain.status == "pruned"
    assert repr(plain.module()) == repr(Language())
