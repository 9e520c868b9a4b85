"""Cuts that are tuned: planned bytes are those the choice went by, training keeps its bits, and plan says what was chosen."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.shard.partition import partition_planner
from hydra_tune.shard.partition.shard_size_search import CHOICES
from tests.unit.shard.bench import vectors

pytestmark = pytest.mark.usefixtures("captured_once")

WIDTH, DEPTH = 64, 8
BUDGET = 600 << 10


def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)))


def task(**changes):
    return TrainTask(
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        loss=functional.mse_loss,
        seed=3,
        **({"activations": "recompute", "train": lambda: [vectors(128, WIDTH)] * 3} | changes),
    )


@pytest.fixture
def choices(monkeypatch):
    """All that were made."""
    made = []

    def choose(*arguments):
        made.append(packer_choice(*arguments))
        return made[-1]

    packer_choice = partition_planner.choose_packing
    monkeypatch.setattr(partition_planner, "choose_packing", choose)
    return made


def pool_of(num_shards="tuned", **changes):
    options = {"devices": "cpu:1", "device_memory": BUDGET, "max_concurrent": 1} | changes
    return HydraExecutor(num_shards=num_shards, **options)


def each_on_one(cases, ids=str):
    """Every case with both placements; in every run of the tests the placements take turns, without the simplest case."""
    return [
        pytest.param(
            *(case, placement),
            marks=[pytest.mark.slow] * (row == 0 or (row + column) % 2 > 0),
            id=f"{ids(case)}-{placement}",
        )
        for row, case in enumerate(cases)
        for column, placement in enumerate(("device", "host"))
    ]


@pytest.mark.parametrize(("changes", "placement"), each_on_one([{}, {"activations": "keep"}, {"max_grad_norm": 1.0}]))
def test_planned_bytes_are_those_that_the_choice_went_by(choices, changes, placement):
    with pool_of(buffer_fraction=0.0, optimizer_placement=placement) as pool:
        planned = pool.plan([task(**changes)])
    (choice,) = choices
    moved = sum(nbytes for kind, nbytes in planned.bytes_by_kind.items() if kind != "inputs")
    assert planned.trials[0].num_shards == choice.packing.num_shards
    assert moved == pytest.approx(choice.packing.step_bytes, rel=0.01)


def test_a_tuned_cut_moves_fewer_bytes_and_the_bits_are_those_of_the_plain_loop(choices):
    results = {}
    for num_shards in (None, "tuned"):
        with pool_of(num_shards) as pool:
            (results[num_shards],) = pool.run([task()])
            stats = next(iter(pool.stats().devices.values()))
            results[num_shards, "bytes"] = stats.bytes_in + stats.bytes_out
    (choice,) = choices
    assert results["tuned"].num_shards == choice.packing.num_shards > results[None].num_shards
    assert results["tuned", "bytes"] < results[None, "bytes"]
    plain = train_plain(task())
    assert results["tuned"].metrics == plain.metrics
    for name, tensor in plain.state_dict().items():
        assert torch.equal(results["tuned"].state_dict()[name], tensor), name


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO, CHOICES.name), pool_of() as pool:
        pool.plan([task()])
    (message,) = [record.getMessage() for record in caplog.records if record.name == CHOICES.name]
    assert " shards of up to " in message
    assert "(tried " in message


KIB = 1 << 10
BATCHES = {  # what a task asks for, the device's memory, and how many batches go through each shard together
    "together": ({"accumulate": 3}, 600 * KIB, 3),
    "one after the other": ({"accumulate": 3, "activations": "keep"}, 600 * KIB, 1),
    "pieces": ({"split_batches": 4}, 360 * KIB, 4),
    "both, clipped": ({"accumulate": 2, "split_batches": 2, "max_grad_norm": 1.0}, 450 * KIB, 4),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "placement"), each_on_one(BATCHES))
def test_bytes_of_several_batches_are_those_that_the_choice_went_by(choices, name, placement):
    changes, memory, together = BATCHES[name]
    with pool_of(buffer_fraction=0.0, device_memory=memory, optimizer_placement=placement) as pool:
        planned = pool.plan([task(**changes)])
    (choice,) = choices
    moved = sum(nbytes for kind, nbytes in planned.bytes_by_kind.items() if kind != "inputs")
    assert planned.trials[0].together == together
    assert planned.trials[0].num_shards == choice.packing.num_shards
    assert moved == pytest.approx(choice.packing.step_bytes, rel=0.02)


def test_a_model_that_fits_is_not_cut(choices):
    with pool_of(device_memory="100MiB") as pool:
        assert pool.plan([task()]).trials[0].num_shards == 1
    assert [len(choice.tried) for choice in choices] == [1]


def test_a_single_shard_whose_optimizer_state_would_leave_in_each_step_is_cut(choices):
    """The model fits, but not beside the activations of a whole step."""
    with pool_of(1, device_memory=900 * KIB) as pool:
        whole = pool.plan([task()])
    with pool_of(device_memory=900 * KIB) as pool:
        tuned = pool.plan([task()])
    assert (whole.trials[0].num_shards, choices[0].tried[0].num_shards) == (1, 1)
    assert tuned.trials[0].num_shards == choices[0].packing.num_shards > 1
    assert sum(tuned.bytes_by_kind.values()) < 0.5 * sum(whole.bytes_by_kind.values())


def test_behind_a_link_units_leave_room_for_copies_and_the_bits_are_those_of_the_plain_loop():
    with pool_of(None) as pool:
        near = pool.plan([task()]).trials[0]
    with pool_of(None, link_bandwidth="1GB/s") as pool:
        far = pool.plan([task()]).trials[0]
        (result,) = pool.run([task()])
    assert far.unit_bytes <= BUDGET / 2 < near.unit_bytes
    assert result.num_shards == far.num_shards > near.num_shards > 1
    plain = train_plain(task())
    assert result.metrics == plain.metrics
    for name, tensor in plain.state_dict().items():
        assert torch.equal(result.state_dict()[name], tensor), name
