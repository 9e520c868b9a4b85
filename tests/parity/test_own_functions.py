"""Models with the user's own `torch.autograd.Function`s and reentrant checkpoints: cut bit for bit, or whole."""

from functools import partial
from typing import Any

import pytest

from tests.parity.observe import Way, watched_ways
from tests.parity.own_functions import (
    CHECKPOINTS,
    KINDS,
    ODD,
    ODD_CHECKPOINTS,
    Around,
    Counts,
    CountsInContext,
    StraightThrough,
    Weighs,
)
from tests.parity.test_fusion import TOLERANCE, fused, in_float64, worst
from tests.unit.pool.tasks import SAMPLES, X, Y, against_plain, task, train

pytestmark = [
    pytest.mark.usefixtures("captured_once"),
    pytest.mark.filterwarnings(
        "ignore:None of the inputs have requires_grad"
    ),  # a reentrant checkpoint in an evaluation
]

TASKS: dict[str, dict[str, Any]] = {
    "accumulate and clip": {"accumulate": 2, "max_grad_norm": 0.1},
    "bfloat16": {"precision": "bfloat16"},
}


def trained(middle: Any, shards: int = 3, **changes: Any) -> Way:
    """How a task was run whose numbers are the plain loop's."""
    described = task(model=partial(Around, middle), validate=SAMPLES, batch_size=6, report_every=1, **changes)
    Counts.calls = CountsInContext._backward_cls.calls = 0
    with watched_ways() as ways:
        result = train(described, devices="cpu:2", num_shards=shards)
        Counts.calls = CountsInContext._backward_cls.calls = 0  # as where the trial began
        assert against_plain(described, result) == []
    return ways[id(described)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("feature", TASKS)
@pytest.mark.parametrize("kind", [*KINDS, *CHECKPOINTS])
def test_a_cut_around_a_function(kind, feature):
    for shards in (2, 3):
        found = trained((KINDS | CHECKPOINTS)[kind], shards, **TASKS[feature]).shards
        assert found["train"] == shards
        assert found["evaluate"] > 0  # cut at the same parameters, which may leave fewer parts


@pytest.mark.cases(5)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("kind", [*KINDS, *CHECKPOINTS])
def test_activations_of_a_function(kind, activations):
    assert trained((KINDS | CHECKPOINTS)[kind], activations=activations).shards["train"] == 3


REASONS = {
    "reads a tensor of its own": "reads a tensor that is none of its arguments",
    "draws": "it draws random numbers",
    "draws in backward": "it draws random numbers",
    "overwrites its input": "it overwrites an argument",
    "counts its calls": "the step changes Counts.calls",
    "counts its calls in its context": "the step changes CountsInContextBackward.calls",
    "reads what is set for its call": "the step changes Clamps.most, which Clamps reads",
    "asks for values": "_local_scalar_dense",
    "computes by numpy": "numpy() is not supported",
    "keeps a tensor at times": "give it to save_for_backward",
    "returns a text": "it returns more than tensors and None",
    "takes a function": "it is given a builtin_function_or_method",
    "a class of a function": "its class is made inside a function",
    "an error caught": "it draws random numbers",
    "reads another tensor": "reads a tensor with gradients that is none of its inputs",
    "one parameter in two regions": "other code use the same parameter",
    "one parameter in a region and outside": "other code use the same parameter",
    "draws anew": "than the eager step",
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", [*ODD, *ODD_CHECKPOINTS])
def test_odd_functions_run_whole(kind):
    way = trained((ODD | ODD_CHECKPOINTS)[kind], max_grad_norm=0.1)
    assert way.shards["train"] == 0
    assert REASONS[kind] in way.reasons["train"]


def test_state_that_only_a_backward_reads():
    def weigh(_module: Any, _optimizer: Any, steps: int) -> None:
        Weighs.weight = 1.0 if steps % 3 else 0.5

    try:
        Weighs.weight = 2.0
        described = task(model=partial(Around, lambda _, x: Weighs.apply(x)), after_step=weigh, report_every=1)
        with watched_ways() as ways:
            result = train(described, devices="cpu:2", num_shards=3)
        Weighs.weight = 2.0
        assert against_plain(described, result) == []
        assert ways[id(described)].shards == {"train": 3}
    finally:
        Weighs.weight = 2.0


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["parameters", "several outputs", "tensors in its context"])
def test_trials_with_functions_are_fused(kind, caplog):
    batches = [(X[:8].double(), Y[:8])] * 3
    changes = {"model": partial(Around, KINDS[kind]), "train": lambda: batches, "report_every": 1}
    described = [in_float64(task(seed=seed, **changes)) for seed in (1, 2)]
    results, reasons, is_fused = fused(described, caplog)
    assert is_fused, reasons
    assert max(worst(results, described)) < TOLERANCE


@pytest.mark.cases(1)
@pytest.mark.parametrize("parallel", ["none", "data", "pipeline"])
def test_data_that_change_what_a_function_reads(parallel):
    def drawn() -> Any:
        for place in range(0, 24, 4):
            Weighs.weight = 1.0 + place % 16 / 8
            yield X[place : place + 4].clone(), Y[place : place + 4].clone()

    described = task(
        model=partial(Around, lambda _, x: Weighs.apply(x)), train=drawn, epochs=4, accumulate=3, parallel=parallel
    )
    try:
        with watched_ways() as ways:
            result = train(described, devices="cpu:2", num_shards=2)
        assert against_plain(described, result) == []
        assert ways[id(described)].shards == {"train": 2}
    finally:
        Weighs.weight = 2.0


def test_methods_that_are_replaced():
    original = StraightThrough.forward

    def replace(_module: Any, _optimizer: Any, steps: int) -> None:
        other = lambda _ctx, x: x.clamp(-0.1, 0.1)  # noqa: E731
        StraightThrough.forward = staticmethod(other if steps == 3 else original)

    middle = lambda _, x: StraightThrough.apply(x)  # noqa: E731
    described = task(model=partial(Around, middle), after_step=replace, validate=SAMPLES, report_every=1)
    try:
        with watched_ways() as ways:
            result = train(described, devices="cpu:2", num_shards=3)
        assert against_plain(described, result) == []
        assert ways[id(described)].shards["train"] == 3
    finally:
        StraightThrough.forward = staticmethod(original)
