"""Trials with random operators of many kinds are bitwise, and those on several CPU devices draw at the same time."""

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_tune import HydraExecutor
from tests.parity.conftest import DROPOUT_SPECS, DROPOUTS
from tests.parity.test_parity import CUTS, DEVICES, assert_same, run, task_of

FAST_ALONE = {("mlp_native", 8, "cpu:2")}
FAST_CROWDS = set()  # of crowds there are others, in test_interleaving.py


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut", "devices"),
    [
        pytest.param(*case, marks=() if case in FAST_ALONE else pytest.mark.slow)
        for name in DROPOUTS
        for cut in CUTS
        for devices in DEVICES
        for case in [(name, cut, devices)]
    ],
)
def test_alone(references, name, cut, devices):
    (result,) = run([f"{name}:5"], devices=devices, num_shards=cut)
    assert_same(result, references[f"{name}:5"])


@pytest.mark.parametrize(
    ("cut", "devices"),
    [
        pytest.param(cut, devices, marks=() if (cut, devices) in FAST_CROWDS else pytest.mark.slow)
        for cut in CUTS
        for devices in DEVICES
    ],
)
def test_among_others(references, cut, devices):
    specs = [*DROPOUT_SPECS, "mlp:5", "mlp:11"]
    results = run(specs, devices=devices, num_shards=cut, max_concurrent=len(specs))
    for spec, result in zip(specs, results, strict=True):
        assert_same(result, references[spec])


class Meeting:
    """Lets units go on only once units on two workers have come to the middle of their first random operator."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._came: set[int] = set()

    def come(self) -> None:
        if threading.get_ident() not in self._came:
            self._came.add(threading.get_ident())
            self._barrier.wait(timeout=60)

    def __call__(self) -> TorchDispatchMode:
        meeting = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if torch.Tag.nondeterministic_seeded in func.tags:
                    meeting.come()
                return func(*args, **(kwargs or {}))

        return Mode()

    @property
    def held(self) -> bool:
        return len(self._came) == 2 and not self._barrier.broken


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("cut", [1, pytest.param("layer", marks=pytest.mark.slow)])
def test_two_trials_draw_on_two_devices_at_the_same_time(references, cut):
    """Each unit waits inside a dropout until the other trial's unit is inside one too, so neither can hold a lock."""
    meeting, specs = Meeting(), ["mlp:5", "mlp:11"]
    with HydraExecutor(devices="cpu:2", num_shards=cut, instrument=meeting, max_concurrent=2) as pool:
        results = pool.run([task_of(spec) for spec in specs])
    for spec, result in zip(specs, results, strict=True):
        assert_same(result, references[spec])
    assert meeting.held
