"""Bytes moved in a step, where a device has room for one shard and nothing stays."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from hydra_tune import TrainTask
from hydra_tune.devices import cpu
from hydra_tune.train import grouped
from tests.unit.pool.tasks import against_plain, running, task

WIDTH, LAYERS = 64, 8
PARAMETER_BYTES = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
BUDGET = "117KiB"
STEPS = 5


def wide(accumulate: int, steps: int, **changes: Any) -> TrainTask:
    """Steps of 16 samples, in as many batches as wanted."""
    inputs = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(5))
    return task(
        model=lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]),
        train=torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1)),
        batch_size=16 // accumulate,
        accumulate=accumulate,
        epochs=steps,
        **changes,
    )


def moved(
    accumulate: int, *, device_memory: str | None = BUDGET, optimizer_placement: Any = "device", **changes: Any
) -> Counter[str]:
    """Bytes moved in one step by kind, both ways together; the first steps, which make optimizer state, do not count."""
    totals: list[Counter[str]] = []
    for steps in (2, 2 + STEPS):
        described = wide(accumulate, steps, **changes)
        placed = {"device_memory": device_memory, "optimizer_placement": optimizer_placement}
        with running(num_shards=LAYERS, **placed) as pool:
            result = pool.submit(described).result(60.0)
            (device,) = pool.stats().devices.values()
        assert against_plain(described, result) == []
        totals.append(Counter(device.bytes_in_by_kind) + Counter(device.bytes_out_by_kind))
    return Counter({kind: (nbytes - totals[0][kind]) // STEPS for kind, nbytes in totals[1].items()})


@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_a_step_moves_three_times_the_parameters_however_many_batches_it_has(accumulate):
    assert 2 * PARAMETER_BYTES < moved(accumulate)["parameters"] <= 1.02 * 3 * PARAMETER_BYTES


def test_without_groups_it_moves_them_for_each_batch(monkeypatch):
    monkeypatch.setattr(grouped, "is_worth_it", lambda plan: False)
    assert moved(4)["parameters"] > 2 * 3 * PARAMETER_BYTES


def test_clipping_has_updates_of_their_own_which_load_the_parameters_once_more():
    assert 3 * PARAMETER_BYTES < moved(4, max_grad_norm=1.0)["parameters"] <= 1.02 * 4 * PARAMETER_BYTES


def test_nothing_moves_but_the_batches_where_all_fits():
    counted = moved(4, device_memory=None)
    assert {kind for kind, nbytes in counted.items() if nbytes} == {"inputs"}


def test_the_figures_are_what_is_copied(monkeypatch):
    """Counted where tensors are copied, in the background too."""
    copied: list[int] = []
    copy = cpu._copy

    def counting(pairs: Any) -> None:
        copy(pairs)
        copied.append(sum(target.nbytes for _, target in pairs))

    monkeypatch.setattr(cpu, "_copy", counting)
    with running(num_shards=LAYERS, device_memory=BUDGET) as pool:
        assert pool.submit(wide(4, 3, max_grad_norm=1.0, activations="recompute")).result(60.0).status == "completed"
        (device,) = pool.stats().devices.values()
        assert device.bytes_in + device.bytes_out == sum(copied)
        assert device.bytes_ahead > 0
    assert sum(copied) > 9 * PARAMETER_BYTES


def test_updates_on_the_host_move_gradients_and_no_optimizer_state():
    counted = moved(4, optimizer_placement="host")
    assert counted["parameters"] <= 1.02 * 2 * PARAMETER_BYTES
    assert (counted["gradients"], counted["optimizer"]) == (PARAMETER_BYTES, 0)
