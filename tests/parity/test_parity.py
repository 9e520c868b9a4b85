"""The pool gives what a plain PyTorch loop gives, to the last bit: losses, metrics, weights, buffers, optimizer state.

Whatever the cut, on however many devices, alone or among seven other trials. Two cases are in every run; the whole product is
marked slow.
"""

import random
from typing import Any

import pytest
import torch

from hydra_tune import HydraExecutor, Result
from tests.parity.conftest import SPECS
from tests.parity.exact import differences, without_seconds
from tests.parity.models import MODELS, NUM_STEPS, build
from tests.support.tracker import StorageTracker

CUTS = (1, 2, 8, "layer")
DEVICES = ("cpu:1", "cpu:2")
FAST_ALONE = {("mlp", 8, "cpu:2"), ("vit", 1, "cpu:1")}
FAST_CROWDS: set[tuple[Any, str]] = set()  # of crowds there are others, in test_interleaving.py


def task_of(spec: str, **changes: Any):
    name, seed = spec.split(":")
    return build(name, seed=int(seed), **changes)


def run(specs: list[str], **options: Any) -> list[Result]:
    """Train on a pool, and hold what a tracker saw on each device against what the device's ledger counted."""
    tracker = StorageTracker()
    with HydraExecutor(instrument=tracker, **options) as pool:
        results = pool.run([task_of(spec) for spec in specs])
        devices = pool.stats().devices.values()
    seen = sorted(tracker.peak_bytes, reverse=True)
    counted = sorted((device.peak_bytes for device in devices), reverse=True)
    assert seen[0] > 0
    for tracked, ledger in zip(seen, counted, strict=False):
        assert tracked <= ledger <= max(device.budget_bytes for device in devices)
    return results


def assert_same(result: Result, reference: dict[str, Any]) -> None:
    if result.error is not None:
        raise result.error
    assert result.status == "completed"
    actual = {
        "history": without_seconds(result.history),
        "state": dict(result.state_dict()),
        "optimizer": result.optimizer_state_dict(),
    }
    found = list(differences({key: reference[key] for key in actual}, actual))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("spec", SPECS)
def test_the_reference_trains_for_twenty_steps(references, spec):
    assert len(set(references[spec]["losses"])) == NUM_STEPS
    name, seed = spec.split(":")
    torch.manual_seed(int(seed))
    untrained = MODELS[name.removesuffix("_by_epoch")]().model()
    moved = [key for key, value in untrained.named_parameters() if not value.equal(references[spec]["state"][key])]
    assert moved == [key for key, _ in untrained.named_parameters()]


def test_a_difference_in_the_last_bit_is_seen():
    one, other = torch.ones(3), torch.ones(3)
    other[1] = torch.nextafter(other[1], torch.tensor(2.0))
    assert list(differences({"a": [one, 1.0]}, {"a": [one.clone(), 1.0]})) == []
    assert len(list(differences({"a": [one]}, {"a": [other]}))) == 1
    assert len(list(differences({"a": 0.1 + 0.2}, {"a": 0.3}))) == 1
    assert len(list(differences({"a": 1}, {"b": 1}))) == 1
    assert len(list(differences([torch.zeros(1)], [-torch.zeros(1)]))) == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "cut", "devices"),
    [
        pytest.param(*case, marks=() if case in FAST_ALONE else pytest.mark.slow)
        for name in MODELS
        for cut in CUTS
        for devices in DEVICES
        for case in [(name, cut, devices)]
    ],
)
def test_alone(references, name, cut, devices):
    spec = f"{name}:5"
    (result,) = run([spec], devices=devices, num_shards=cut)
    assert_same(result, references[spec])


@pytest.mark.parametrize(
    ("cut", "devices"),
    [
        pytest.param(cut, devices, marks=() if (cut, devices) in FAST_CROWDS else pytest.mark.slow)
        for cut in CUTS
        for devices in DEVICES
    ],
)
def test_among_seven_others(references, cut, devices):
    """All models at once, most twice with different seeds: their random streams and their state stay apart."""
    specs = random.Random(str((cut, devices))).sample(SPECS, k=len(SPECS))
    assert len(specs) == 8
    results = run(specs, devices=devices, num_shards=cut, max_concurrent=8)
    for spec, result in zip(specs, results, strict=True):
        assert_same(result, references[spec])
