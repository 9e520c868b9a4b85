"""Trials of own code and trials that are cut, in one pool that has no room for all: each has a plain loop's bits."""

from unittest import mock

import pytest

from hydra_tune import HydraExecutor
from hydra_tune.train.loop import burst
from tests.parity.features import FEATURES, fits
from tests.parity.observe import Seen, difference, reference_of, watched_ways
from tests.parity.optimizers import OPTIMIZERS
from tests.parity.registry import ENTRIES, Spec, build

BUDGET_BYTES = 200 * 1024
FAST = [
    Spec("mlp"),
    Spec("gpt2", "iterable", "adam"),
    Spec("counter", "prune bad losses"),
    Spec("cnn", "evaluation", "adam"),
    Spec("moving_average", "schedule per epoch"),
    Spec("module_hooks", "evaluation", "sgd"),
]


def everything() -> list[Spec]:
    """Every model once, features and optimizers in turn."""
    optimizers = list(OPTIMIZERS)
    specs = []
    for row, name in enumerate(ENTRIES):
        fitting = [feature for feature in FEATURES if fits(ENTRIES[name], feature)]
        specs.append(Spec(name, fitting[row * 3 % len(fitting)], optimizers[row % len(optimizers)]))
    return specs


def check(specs: list[Spec], devices: str) -> None:
    references = reference_of(specs)
    tasks = [build(spec) for spec in specs]
    options = {"devices": devices, "device_memory": BUDGET_BYTES, "max_concurrent": 8, "policy": "round_robin"}
    with (
        mock.patch.object(burst, "BURST_SECONDS", 0.0),  # a step each: the trials take turns
        watched_ways() as ways,
        HydraExecutor(**options) as pool,
    ):
        results = pool.run(tasks, on_error="return")
        statistics = pool.stats().devices.values()
    assert [result.error for result in results] == [None] * len(specs)
    wrong = {str(s): d for s, r in zip(specs, results, strict=True) if (d := difference(Seen(r), references[s]))}
    assert wrong == {}
    went = [ways[id(task)] for task in tasks]
    assert any(way.own_batches and not way.shards for way in went), "some fit"
    assert any(way.shards for way in went), "some are cut"
    for device in statistics:
        assert device.peak_bytes <= BUDGET_BYTES
        assert device.bytes_out_by_kind["parameters"] > 0, "state had to go"


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_a_few_of_both_kinds(devices):
    check(FAST, devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
def test_the_whole_registry(devices):
    check(everything(), devices)
