"""Which combinations the fast suite runs: every pair of (model or optimizer or feature) with a cut or a device count.

The product has thousands; a covering of its pairs has a few pools of tasks. Every model trains at least twice, on other
cuts, with other features and optimizers; the order within a pool is shuffled, so that neighbours differ too.
"""

import random
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from tests.parity.features import FEATURES, fits
from tests.parity.optimizers import OPTIMIZERS
from tests.parity.registry import ENTRIES, FAMILIES, Spec


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


@dataclass(frozen=True, slots=True)
class Draw:
    """One task of a family of models, and where it runs."""

    family: str
    spec: Spec
    cut: str
    devices: str

    @property
    def pairs(self) -> set[tuple[str, str]]:
        """What meets what in it."""
        values = (self.family, self.spec.feature, self.spec.optimizer, self.cut, self.devices)
        return set(combinations(values, 2))


def draws() -> dict[str, Draw]:
    """Of each family a draw in turn until every two of families, features, optimizers, cuts and devices have met.

    A family's models take turns, and of a model's draws the first is taken with the most that has not met.
    """
    missing = {
        pair
        for family, entries in FAMILIES.items()
        for one in entries
        for draw in _draws_of(family, one.name)
        for pair in draw.pairs
    }
    found: dict[str, Draw] = {}
    turn = 0
    while missing:
        for family, entries in FAMILIES.items():
            of_model = _draws_of(family, entries[turn % len(entries)].name)
            best = max(of_model, key=lambda draw: len(draw.pairs & missing))
            missing -= best.pairs
            found[f"{family}-{turn}"] = best
        turn += 1
    return found


def _draws_of(family: str, model: str) -> list[Draw]:
    fitting = [feature for feature in FEATURES if fits(ENTRIES[model], feature)]
    return [
        Draw(family, Spec(model, feature, optimizer), cut, devices)
        for feature, optimizer, cut, devices in product(fitting, OPTIMIZERS, CUTS, DEVICES)
    ]
