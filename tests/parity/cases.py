"""Which combinations the fast suite runs: every pair of (model or optimizer or feature) with a cut or a device count.

The product has thousands; a covering of its pairs has a few pools of tasks. Every model trains at least twice, on other
cuts, with other features and optimizers; the order within a pool is shuffled, so that neighbours differ too.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

from tests.parity.features import FEATURES, fits
from tests.parity.optimizers import OPTIMIZERS
from tests.parity.registry import ENTRIES, Spec


@dataclass(frozen=True, slots=True)
class Pool:
    """Options of an executor, and what it trains."""

    name: str
    options: tuple[tuple[str, Any], ...]
    specs: tuple[Spec, ...]


CUTS: dict[str, dict[str, Any]] = {
    "a shard per layer": {"num_shards": "layer"},
    "one shard": {"num_shards": 1},
    "three shards": {"num_shards": 3},
    "two shards": {"num_shards": 2},
}
DEVICES = ("cpu:1", "cpu:2")
BUDGET = "64MiB"


def pools(per_model: int = 2) -> list[Pool]:
    """Every model `per_model` times, spread over the cuts and devices; features and optimizers in turn."""
    filled: dict[tuple[str, str], list[Spec]] = {}
    places = [(cut, DEVICES[index // 2]) for index, cut in enumerate(CUTS)]
    features, optimizers = list(FEATURES), list(OPTIMIZERS)
    for row, name in enumerate(ENTRIES):
        for turn in range(per_model):
            fitting = [f for f in features if fits(ENTRIES[name], f)]
            # Steps that share no divisor with the lengths: models, features and optimizers do not move in step.
            feature = fitting[(row * 3 + turn * 5) % len(fitting)]
            optimizer = optimizers[(row + turn * 2 + row // 6) % len(optimizers)]
            filled.setdefault(places[(row + 2 * turn) % len(places)], []).append(Spec(name, feature, optimizer))
    return [_pool(cut, devices, specs) for (cut, devices), specs in filled.items()]


def without(pool: Pool, models: set[str], name: str) -> Pool:
    """A pool of another name without these models."""
    return replace(pool, name=name, specs=tuple(spec for spec in pool.specs if spec.model not in models))


def _pool(cut: str, devices: str, specs: list[Spec]) -> Pool:
    shuffled = random.Random(cut).sample(specs, k=len(specs))
    options = {**CUTS[cut], "devices": devices, "device_memory": BUDGET, "max_concurrent": 4}
    return Pool(f"{cut} on {devices}", tuple(options.items()), tuple(shuffled))
