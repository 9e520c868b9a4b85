"""The step of a group may be compiled; what a compiler cannot do, or does wrongly, is not taken."""

import logging
import math
import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset

from hydra_tune import HydraExecutor, TrainTask, train_plain
from hydra_tune.errors import ConfigError
from hydra_tune.fusion.compile.torch_compile import difference
from tests.support.gathered import gather

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(24, 8, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(4, (24,), generator=GENERATOR)
RAN = []


def counting(graph, _inputs):
    def run(*arguments):
        RAN.append(None)
        return graph(*arguments)

    return run


def broken(_graph, _inputs):
    raise RuntimeError("no code for this")


def wrong(graph, _inputs):
    return lambda *arguments: [value * 1.1 for value in graph(*arguments)]


for _backend in (counting, broken, wrong):
    torch._dynamo.register_backend(_backend, name=f"group_{_backend.__name__}")


def net():
    """BatchNorm twice: one shard overwrites several buffers, of two kinds, that lie in one block."""
    first = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*first, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()


def trained(backend, caplog):
    """Three trials in a group, each held against its plain loop; what was said of the compiler."""
    tasks = [
        TrainTask(
            model=net,
            optimizer=partial(SGD, lr=0.1 / (seed + 1), momentum=0.9),
            train=TensorDataset(X, Y),
            batch_size=8,
            loss=functional.cross_entropy,
            epochs=2,
            seed=seed,
        )
        for seed in range(3)
    ]
    with (
        pytest.MonkeyPatch.context() as patch,
        caplog.at_level(logging.INFO, "hydra_tune.fusion"),
        HydraExecutor("cpu:1", "64MiB", fusion="on", fusion_compile=backend) as pool,
    ):
        gather(patch, lambda count: count >= len(tasks))
        results = pool.run(tasks)
    for result, task in zip(results, tasks, strict=True):
        assert result.group_size == len(tasks)
        plain = train_plain(task)
        for name, tensor in plain.state_dict().items():
            torch.testing.assert_close(result.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    return " ".join(record.getMessage() for record in caplog.records if "compile" in record.getMessage())


@pytest.mark.cases(1 / 3)
def test_compiled_steps_are_each_members_own(caplog):
    RAN.clear()
    assert "the step of a group of 3 was compiled by group_counting in" in trained("group_counting", caplog)
    assert len(RAN) == 1 + 6  # compared once, and then every step


@pytest.mark.parametrize(("backend", "why"), [("broken", "no code for this"), ("wrong", "its numbers are off by")])
def test_a_compiler_that_fails_is_left_out(backend, why, caplog):
    said = trained(f"group_{backend}", caplog)
    assert f"a group's step is not compiled by group_{backend}: " in said
    assert why in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_them(caplog):
    assert "was compiled by inductor" in trained("inductor", caplog)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match=r"fusion_compile must be None or a backend of torch.compile \(.*not 'fast'"):
        HydraExecutor("cpu:1", fusion="on", fusion_compile="fast")


@pytest.mark.parametrize(
    ("expected", "found", "why"),
    [
        ([True, False], [True, False], ""),
        ([True, False], [True, True], "its numbers are off by 1, of tensors of up to 1"),
        ([math.nan, math.inf, 1.0], [math.nan, math.inf, 1.0], ""),
        ([math.inf, 1.0], [math.inf, 2.0], "its numbers are off by 1, of tensors of up to 1"),
        ([math.nan, 1.0], [0.0, 1.0], "its numbers are off by nan, of tensors of up to 1"),
        ([math.inf, 1.0], [-math.inf, 1.0], "its numbers are off by inf, of tensors of up to 1"),
        ([3, 4], [3, 5], "its numbers are off by 1, of tensors of up to 4"),
        ([], [], ""),
    ],
)
def test_numbers_agree_up_to_rounding_also_after_a_member_has_diverged(expected, found, why):
    assert difference([torch.tensor(expected)], [torch.tensor(found)]) == why
