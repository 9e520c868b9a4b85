"""Shards run by `torch.compile`: compiled indeed, close to plain PyTorch, and refused by name where the compiler fails."""

import shutil

import pytest
import torch
from torch import nn

from hydra_tune import train_plain
from hydra_tune.errors import TaskError
from tests.unit.pool.tasks import SAMPLES, against_plain, running, task


class Normalized(nn.Module):
    """BatchNorm twice, so that one shard overwrites several buffers that lie in one block; dropout; a tied layer."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.again.weight = self.first.weight
        self.norms, self.drop = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2)), nn.Dropout(0.2)

    def forward(self, x):
        x = self.drop(self.norms[0](self.first(x)).relu())
        return self.head(self.norms[1](self.again(x)).relu())


@torch._dynamo.register_backend
def broken_compiler(graph, inputs):
    raise RuntimeError("no code for this")


@torch._dynamo.register_backend
def wrong_compiler(graph, inputs):
    return lambda *arguments: [value * 1.1 for value in graph(*arguments)]


def described(**changes):
    return task(model=Normalized, validate=SAMPLES, **changes)


def compiled_frames():
    return torch._dynamo.utils.counters["frames"]["ok"]


ALL_AT_ONCE = {"precision": "bfloat16", "accumulate": 2, "max_grad_norm": 0.1}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("cut", "changes"),
    [
        (1, ALL_AT_ONCE),
        (3, {}),
        *(pytest.param(3, each, marks=pytest.mark.slow) for each in ({"precision": "bfloat16"}, {"accumulate": 2})),
        *(pytest.param(cut, ALL_AT_ONCE if cut == 3 else {}, marks=pytest.mark.slow) for cut in (1, 3)),
    ],
    ids=str,
)
def test_compiled_shards_train_like_plain_ones(cut, changes):
    """This backend does all that compilers do but to generate code, so its numbers are the eager ones."""
    before = compiled_frames()
    with running(devices="cpu:2", num_shards=cut) as pool:
        results = pool.run([described(compile="aot_eager", seed=seed, **changes) for seed in (3, 4)])
    assert compiled_frames() - before >= 2 * cut  # training and evaluation
    for seed, result in zip((3, 4), results, strict=True):
        assert against_plain(described(seed=seed, **changes), result) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_generated_code_trains_to_nearly_the_same():
    with running(devices="cpu:1", num_shards=3) as pool:
        (result,) = pool.run([described(compile="inductor")])
    assert result.error is None
    plain = train_plain(described())
    for name, value in plain.state_dict().items():
        assert torch.allclose(value, result.state_dict()[name], atol=1e-3), name


def test_a_compiler_that_fails_is_named():
    with running() as pool:
        failed, fine = pool.run([described(compile="broken_compiler"), described()], on_error="return")
    assert isinstance(failed.error, TaskError)
    assert "compile='broken_compiler' fails on this model" in str(failed.error)
    assert "no code for this" in str(failed.error)
    assert fine.status == "completed"


def test_a_compiler_that_is_wrong_is_found_out():
    with running() as pool:
        (failed,) = pool.run([described(compile="wrong_compiler")], on_error="return")
    assert isinstance(failed.error, TaskError)
    assert "gives other" in str(failed.error)
    assert "train this model without a compiler" in str(failed.error)


def test_an_unknown_backend_is_refused_at_once():
    with pytest.raises(TaskError, match=r"compile must be None or a backend of torch.compile \(.*inductor.*'indutor'"):
        described(compile="indutor")
