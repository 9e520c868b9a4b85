"""Steps with distributions of `torch.distributions`: cut and fused, and failed where a distribution is invalid."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MixtureSameFamily,
    Normal,
    kl_divergence,
)

from hydra_tune import train_plain
from tests.parity.observe import watched_ways
from tests.parity.test_fusion import TOLERANCE, fused, in_float64, worst
from tests.unit.pool.tasks import SAMPLES, X, Y, against_plain, task, train


def gaussian(module: nn.Module, batch: Any) -> Tensor:
    """Draws, as an autoencoder does."""
    mean, spread = module(batch[0]).chunk(2, 1)
    latent = Normal(mean, spread.exp())
    return latent.rsample().square().mean() + kl_divergence(latent, Normal(0.0, 1.0)).sum(1).mean()


def categorical(module: nn.Module, batch: Any) -> Tensor:
    policy = Categorical(logits=module(batch[0]))
    return -policy.log_prob(batch[1]).mean() - 0.01 * policy.entropy().mean()


def bernoulli(module: nn.Module, batch: Any) -> Tensor:
    return (
        -Bernoulli(logits=module(batch[0])).log_prob((batch[1][:, None] == torch.arange(4)).to(batch[0].dtype)).mean()
    )


def mixture(module: nn.Module, batch: Any) -> Tensor:
    logits, means = module(batch[0]).chunk(2, 1)
    parts = Independent(Normal(means[..., None], 0.5), 1)
    return -MixtureSameFamily(Categorical(logits=logits), parts).log_prob(batch[0][:, :1]).mean()


def of_values(module: nn.Module, batch: Any) -> Tensor:
    """A number all the same where a value, which depends on the model too, is neither 0 nor 1."""
    logits = module(batch[0])
    return -Bernoulli(logits=logits).log_prob(logits.detach() * 0 + batch[1][:, None]).mean()


@pytest.fixture(autouse=True)
def validating(monkeypatch):
    """Distributions check their arguments, whatever another test of the process has told them: a compiler turns checks off."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


STEPS = (gaussian, categorical, bernoulli, mixture)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_cut(step):
    evaluate = lambda module, batch: {"loss": step(module, batch)}  # noqa: E731
    described = task(step=step, loss=None, evaluate=evaluate, validate=SAMPLES, report_every=1)
    with watched_ways() as ways:
        result = train(described, devices="cpu:2", num_shards=3)
    assert against_plain(described, result) == []
    assert ways[id(described)].shards["train"] == 3


@pytest.mark.parametrize("step", [categorical, bernoulli, mixture])
def test_trials_are_fused(step, caplog):
    batches = [(X[:8].double(), Y[:8])] * 3
    changes = {"step": step, "loss": None, "train": lambda: batches, "report_every": 1}
    described = [in_float64(task(seed=seed, **changes)) for seed in (1, 2)]
    results, reasons, is_fused = fused(described, caplog)
    assert is_fused, reasons
    assert max(worst(results, described)) < TOLERANCE


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("values", [(0.5,), (1.0, 0.5, *[0.0] * 6)])
def test_a_check_that_fails_fails_the_trial(values, num_shards):
    batches = [(X[:8], torch.full((8,), value)) for value in values]
    described = task(step=of_values, loss=None, train=lambda: batches)
    with pytest.raises(ValueError, match="Expected value argument"):
        train_plain(described)
    result = train(described, devices="cpu:1", num_shards=num_shards)
    assert (result.status, result.history) == ("failed", [])
    assert "Expected value argument" in str(result.error) or "nan" in str(result.error)
