"""Every model of the registry trains bit for bit, and on the path it is expected to take.

A few pools cover every model, feature and optimizer; one of them, without its longest, is in every run. The others are marked
slow, and so are the pools of each model in which all features, cuts and devices meet in pairs.
"""

from collections.abc import Hashable
from functools import lru_cache
from itertools import combinations
from itertools import product as product_of
from typing import Any

import pytest

from hydra_tune import HydraExecutor
from hydra_tune.errors import TaskError
from hydra_tune.shard.partition.plan_request import CapturedStep
from tests.parity import cases
from tests.parity.features import FEATURES, fits
from tests.parity.observe import Seen, difference, reference_of, run
from tests.parity.optimizers import OPTIMIZERS, OTHERS
from tests.parity.registry import ENTRIES, FAMILIES, Spec, build, product
from tests.parity.zoo.entry import MIXED
from tests.support.captured_once import captured_once

IN_EVERY_RUN = "two shards on cpu:2, but for the longest to capture"
# Three quarters of the time.
LONGEST_TO_CAPTURE = {"hf_t5_full", "hf_llama", "hf_llama_unmasked", "hf_gpt2", "transformer", "vit"}
LONGEST_TO_CAPTURE |= {"lstm", "lstm_cells", "resnet_channels_last"}
DRAWS = cases.draws()
FAST_PART = {pool.name: pool for pool in cases.pools()}
POOLS = FAST_PART | {IN_EVERY_RUN: cases.without(FAST_PART["two shards on cpu:2"], LONGEST_TO_CAPTURE, IN_EVERY_RUN)}
SECONDS = 280


def check(spec: Spec, seen: Seen, reference: dict[str, Any]) -> list[str]:
    """What is wrong with a task's outcome, in lines."""
    if "error" in reference:
        return [] if seen.result.error is not None else [f"{spec}: plain PyTorch fails with {reference['error']}"]
    refused = ENTRIES[spec.model].train == "refused"
    if seen.result.error is not None:
        return [] if refused and isinstance(seen.result.error, TaskError) else [f"{spec}: {seen.result.error!r}"]
    if refused:
        return [f"{spec}: was expected to be refused"]
    wrong = []
    for mode, shards in seen.way.shards.items():
        path, expected = "cut" if shards else "whole", ENTRIES[spec.model].path(mode, spec.feature)
        if path != expected:
            wrong.append(f"{spec}: {mode} ran {path}, expected {expected}: {seen.way.reasons.get(mode)}")
    return wrong + [f"{spec}: {line}" for line in difference(seen, reference)]


def outcomes(specs: list[Spec], references: dict[Spec, Any], **options: Any) -> list[str]:
    return [
        line
        for spec, seen in zip(specs, run(specs, **options), strict=True)
        for line in check(spec, seen, references[spec])
    ]


@lru_cache(maxsize=2)
def product_references(name: str) -> dict[Spec, Any]:
    """One for all cuts and devices, which a process sees one after the other."""
    return reference_of(product([name]))


def placed(name: str, cut: str, devices: str) -> list[Spec]:
    """Half of a cut model's features: every feature meets all cuts and all devices."""
    if ENTRIES[name].train != "cut":
        return product([name])
    place = list(cases.CUTS).index(cut) + cases.DEVICES.index(devices)
    return product([name])[place % 2 :: 2]


@lru_cache(maxsize=1)
def captures(name: str) -> dict[Hashable, CapturedStep]:
    """Captures of a model's steps, which know of no cut and of no device; each pool holds its plan against the eager step."""
    return {}


@lru_cache(maxsize=2)
def pool_references(name: str) -> dict[Spec, Any]:
    """One fresh process for all tasks of a pool: each would cost seconds."""
    return reference_of(POOLS[name].specs)


# The others take a minute each.
BY_POOL = [pytest.param(name, marks=() if name == IN_EVERY_RUN else pytest.mark.slow) for name in POOLS]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", BY_POOL)
def test_a_pool_of_everything(name):
    pool = POOLS[name]
    wrong = outcomes(list(pool.specs), pool_references(name), **dict(pool.options))
    assert not wrong, "\n".join(wrong)


def test_the_fast_part_leaves_nothing_out():
    specs = [spec for pool in FAST_PART.values() for spec in pool.specs]
    assert {spec.model for spec in specs} == set(ENTRIES)
    assert {spec.feature for spec in specs} == set(FEATURES)
    assert {spec.optimizer for spec in specs} == set(OPTIMIZERS)
    for name in ENTRIES:
        assert len({spec.feature for spec in specs if spec.model == name}) == 2
        assert len({spec.optimizer for spec in specs if spec.model == name}) == 2


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("name", BY_POOL)
def test_every_reference_trains(name):
    for spec, reference in pool_references(name).items():
        if "error" in reference:
            assert spec.feature in MIXED, f"{spec}: {reference['error']}"
            continue
        assert len(set(reference["losses"])) == len(reference["losses"]), spec
        assert all(loss == loss for loss in reference["losses"]), spec  # noqa: PLR0124 - NaN


def test_the_draws_leave_no_two_apart_that_may_meet():
    met = {pair for draw in DRAWS.values() for pair in draw.pairs}
    apart = {(name, f) for name, family in FAMILIES.items() for f in FEATURES if not any(fits(e, f) for e in family)}
    for one, other in combinations((FAMILIES, FEATURES, OPTIMIZERS, cases.CUTS, cases.DEVICES), 2):
        assert set(product_of(one, other)) - apart <= met
    assert {draw.spec.model for draw in DRAWS.values()} == set(ENTRIES)


def test_features_cuts_and_devices_meet_in_pairs():
    met = [(spec, *place.values[1:]) for place in PRODUCT for spec in placed(*place.values)]
    places = {(spec, devices) for spec, _, devices in met}
    assert {(spec, cut) for spec, cut, _ in met} == {
        (spec, place.values[1]) for place in PRODUCT for spec in product([place.values[0]])
    }
    assert places == set(product_of(product(), cases.DEVICES))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint in an evaluation
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_of_each_family(name):
    draw = DRAWS[name]
    options = {"devices": draw.devices, "device_memory": cases.BUDGET, **cases.CUTS[draw.cut]}
    wrong = outcomes([draw.spec], reference_of([draw.spec]), **options)
    assert not wrong, "\n".join(wrong)


# What is not cut is the same whatever the cut.
PRODUCT = [
    pytest.param(name, cut, devices, marks=pytest.mark.xdist_group(name))
    for name, entry in ENTRIES.items()
    for cut in (cases.CUTS if entry.train == "cut" else list(cases.CUTS)[:1])
    for devices in cases.DEVICES
]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint in an evaluation
@pytest.mark.parametrize(("name", "cut", "devices"), PRODUCT)
def test_the_product(name, cut, devices):
    options = {"devices": devices, "device_memory": cases.BUDGET, **cases.CUTS[cut]}
    with captured_once(captures(name)):
        wrong = outcomes(placed(name, cut, devices), product_references(name), **options)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", ["mlp", "masks", "shared_module"])
def test_every_other_optimizer_of_torch(name):
    specs = [Spec(name, "schedule per step", optimizer) for optimizer in (*OPTIMIZERS, *OTHERS)]
    wrong = outcomes(specs, reference_of(specs), devices="cpu:2", device_memory=cases.BUDGET, num_shards=3)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_fused_transformer_layer_under_autocast_is_not_followed():
    """A dispatch mode around it changes its last bits, so neither the engine nor this test may enter one."""
    spec = Spec("transformer_encoder", "all at once")
    with HydraExecutor(devices="cpu:1", device_memory=cases.BUDGET, num_shards=3) as pool:
        (result,) = pool.run([build(spec)])
    assert result.error is None
    assert difference(Seen(result), reference_of([spec])[spec]) == []
