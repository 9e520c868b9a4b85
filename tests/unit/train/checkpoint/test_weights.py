"""A trained module comes back from the folder of its trial's checkpoints."""

import pytest
import torch
from torch import nn

from hydra_tune import HydraExecutor, load_module
from hydra_tune.train.checkpoint.weights import weights_of, with_weights
from tests.unit.pool.tasks import PATIENCE_SECONDS, task


class ChangesBuffers(nn.Linear):
    """Adds a buffer, fills another, lets one grow and removes one."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("first", None)
        self.register_buffer("seen", torch.zeros(1, 8))
        self.register_buffer("warm", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first, self.warm = x.mean(0), None
            self.register_buffer("late", x[:1].clone())
        self.seen = torch.cat([self.seen, x[:1]])
        return super().forward(x - self.first)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(4))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_model_gets_the_tensors_that_another_process_has_trained():
    described = task(model=lazy)
    with HydraExecutor(devices="cpu:1") as pool:
        trained = pool.run(described).module()
    rebuilt = with_weights(described, *weights_of(trained))
    assert [type(part) for part in rebuilt] == [nn.Linear, nn.BatchNorm1d, nn.Linear]
    torch.testing.assert_close(rebuilt.state_dict(), trained.state_dict(), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("model", [ChangesBuffers, lazy])
def test_tensors_that_training_has_made_are_loaded_from_a_folder(model, tmp_path):
    described = task(model=model)
    with HydraExecutor(devices="cpu:1", checkpoint_dir=tmp_path) as pool:
        trained = pool.submit(described, "trial").result(PATIENCE_SECONDS).module()
    loaded = load_module(described, tmp_path / "trial").state_dict()
    torch.testing.assert_close(loaded, dict(trained.state_dict()), rtol=0, atol=0)
