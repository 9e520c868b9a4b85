"""A long search must not gather the weights of trials that are over: they go with the last who holds the result."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, TrainTask
from tests.unit.pool.tasks import until

INPUTS, TARGETS = torch.randn(8, 4), torch.randn(8, 1)


class Net(nn.Module):
    """Cut into shards, or, where its code asks for values, run whole."""

    def __init__(self, seen, *, asks):
        super().__init__()
        self.first, self.second, self.asks = nn.Linear(4, 16), nn.Linear(16, 1), asks
        seen.append((weakref.ref(self), weakref.ref(self.first.weight)))

    def forward(self, inputs):
        hidden = self.first(inputs).relu()
        return self.second(hidden if not self.asks or hidden.detach().numpy().sum() > -1 else -hidden)


def task(seen, *, asks):
    return TrainTask(
        model=partial(Net, seen, asks=asks),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        train=lambda: [(INPUTS, TARGETS)],
        validate=lambda: [(INPUTS, TARGETS)],
        loss=nn.functional.mse_loss,
        epochs=2,
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("asks", [False, True], ids=["cut", "whole"])
def test_weights_go_with_the_result_without_a_garbage_collector(asks):
    seen = []
    with HydraExecutor(devices="cpu:1", device_memory="1MiB", num_shards=1 if asks else 2) as pool:
        pool.run([task(seen, asks=asks)])  # captures leave garbage of their own
        gc.collect()
        seen.clear()
        gc.disable()
        try:
            (result,) = pool.run([task(seen, asks=asks)])
            assert [reference() is None for reference in seen[-1]] == [False, False]
            assert result.status == "completed"
            module = result.module()
            assert module is seen[-1][0]()
            del module, result
            # The worker may have told of the end, and not have come back from the trial's last unit.
            until(lambda: all(reference() is None for references in seen for reference in references))
        finally:
            gc.enable()
