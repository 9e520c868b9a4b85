"""Models with the user's own `torch.autograd.Function`s and reentrant checkpoints: cut bit for bit, or whole."""

from functools import partial
from typing import Any

import pytest

from tests.parity.observe import watched_ways
from tests.parity.own_functions import CHECKPOINTS, KINDS, ODD, ODD_CHECKPOINTS, Around, Counts, Weighs
from tests.unit.pool.tasks import SAMPLES, against_plain, task, train

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


def paths(middle: Any, shards: int = 3, **changes: Any) -> dict[str, int]:
    """Number of shards by mode, 0 for whole, of a task whose numbers are the plain loop's."""
    described = task(model=partial(Around, middle), validate=SAMPLES, batch_size=6, report_every=1, **changes)
    Counts.calls = 0
    with watched_ways() as ways:
        result = train(described, devices="cpu:2", num_shards=shards)
        Counts.calls = 0  # as where the trial began
        assert against_plain(described, result) == []
    return ways[id(described)].shards


@pytest.mark.parametrize("feature", TASKS)
@pytest.mark.parametrize("kind", [*KINDS, *CHECKPOINTS])
def test_a_cut_around_a_function(kind, feature):
    for shards in (2, 3):
        found = paths((KINDS | CHECKPOINTS)[kind], shards, **TASKS[feature])
        assert found["train"] == shards
        assert found["evaluate"] > 0  # cut at the same parameters, which may leave fewer parts


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("kind", [*KINDS, *CHECKPOINTS])
def test_activations_of_a_function(kind, activations):
    assert paths((KINDS | CHECKPOINTS)[kind], activations=activations)["train"] == 3


@pytest.mark.parametrize("kind", [*ODD, *ODD_CHECKPOINTS])
def test_odd_functions_run_whole(kind):
    assert paths((ODD | ODD_CHECKPOINTS)[kind], max_grad_norm=0.1)["train"] == 0


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
