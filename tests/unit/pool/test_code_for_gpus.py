"""Steps that name a GPU are cut and fused for GPUs, although their captures run on the host."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode, has_torch_function
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask
from hydra_tune.errors import CaptureError
from hydra_tune.shard.capture.gpu_code import as_on_gpu, preparing_for_gpus
from hydra_tune.shard.partition import plan_cache

GENERATOR = torch.Generator().manual_seed(2)
X, Y = torch.randn(48, 8, generator=GENERATOR), torch.randint(4, (48,), generator=GENERATOR)


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def plain(module, batch):
    return functional.cross_entropy(module(batch[0]), batch[1], weight=torch.linspace(0.5, 1.5, 4))


def moving(module, batch):
    inputs, targets = batch[0].to("cuda", non_blocking=True), batch[1].cuda()
    return functional.cross_entropy(module(inputs), targets, weight=torch.linspace(0.5, 1.5, 4).to("cuda:0"))


def making(module, batch):
    with torch.device("cuda"):
        low = torch.tensor(0.5)
    weight = torch.linspace(0.5, 1.5, 4, device=torch.device("cuda", 0)) + (low - 0.5)
    weight = weight + torch.zeros(1, 4, device="cuda")[0]
    return functional.cross_entropy(module(batch[0]), batch[1], weight=weight)


def by_number(module, batch):
    return functional.cross_entropy(module(batch[0].to(0)), batch[1].to(device=0), weight=torch.linspace(0.5, 1.5, 4))


def task(step, seed=3, precision="float32"):
    return TrainTask(
        precision=precision,
        model=net,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        train=TensorDataset(X, Y),
        batch_size=16,
        step=step,
        epochs=2,
        seed=seed,
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{"num_shards": "layer"}, {"fusion": "on"}], ids=["cut", "fused"])
@pytest.mark.parametrize("step", [moving, making, by_number])
def test_a_step_that_names_a_gpu_is_captured_on_the_host(monkeypatch, step, options, precision):
    monkeypatch.setattr(plan_cache, "preparing_for_gpus", lambda _: preparing_for_gpus(True))
    histories = []
    for each in (plain, step):
        with HydraExecutor(devices="cpu:1", **options) as pool:
            results = pool.run([task(each, seed, precision) for seed in range(3)])
        assert all(result.num_shards > 1 or result.group_size == 3 for result in results)
        histories.append([[report["train_loss"] for report in result.history] for result in results])
    assert histories[0] == histories[1]


def test_a_region_without_a_dtype_has_that_of_a_gpu():
    with preparing_for_gpus(True), as_on_gpu(), torch.autocast("cpu"):
        assert functional.linear(X, torch.ones(2, 8)).dtype is torch.float16
    with torch.autocast("cpu"):
        assert functional.linear(X, torch.ones(2, 8)).dtype is torch.bfloat16


def test_a_plan_for_cpu_devices_leaves_a_gpus_name_alone():
    with as_on_gpu(), pytest.raises((AssertionError, RuntimeError)):
        X.to("cuda:9")


def test_a_write_to_a_tensor_on_a_gpu_is_refused(monkeypatch):
    mean = torch.zeros(4)
    monkeypatch.setattr("hydra_tune.shard.capture.gpu_code._is_elsewhere", lambda value: value is mean)
    with preparing_for_gpus(True), as_on_gpu():
        assert torch.equal(mean + 1, torch.ones(4))
        with pytest.raises(CaptureError, match="register_buffer"):
            mean.mul_(0.9)
        with pytest.raises(CaptureError, match="register_buffer"):
            torch.add(X[0, :4], 1, out=mean)


def test_an_eager_run_has_no_mode_unless_the_code_names_a_gpu():
    """With a mode, layers of torch leave their fast path."""
    with preparing_for_gpus(True):
        with as_on_gpu():
            torch.zeros(2)
        with as_on_gpu():
            assert not has_torch_function((X,))
        with BaseTorchFunctionMode(), as_on_gpu():  # as in a capture
            torch.zeros(2, device="cuda")
        with as_on_gpu():
            assert torch.zeros(2, device="cuda").is_cpu
