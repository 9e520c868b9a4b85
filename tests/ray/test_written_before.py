"""A checkpoint of Ray's that an earlier version has written is gone on from; `tests/integration` has all else of this kind."""

import shutil

import pytest

pytest.importorskip("ray")

import hydra_tune_ray
from hydra_tune_ray.pools import pools_of
from tests.fixtures.written_before import trials
from tests.ray.searches import DEVICES, build, expected


def test_a_checkpoint_of_an_earlier_version(ray_cluster, tmp_path):
    folder = shutil.copytree(trials.HERE / "ray" / "checkpoint", tmp_path / "checkpoint")
    made = hydra_tune_ray.trainable(build, **DEVICES)
    trial = made(config=trials.RAY_CONFIG)
    try:
        trial.load_checkpoint(str(folder))
        reports = [trial.train() for _ in range(trials.RAY_CONFIG["epochs"] - trials.RAY_REPORTS)]
    finally:
        trial.stop()
        pools_of(made).close()
    assert reports[-1]["done"]
    (whole,) = expected([trials.RAY_CONFIG])
    assert [report["train_loss"] for report in reports] == pytest.approx(whole[trials.RAY_REPORTS :], rel=1e-3)
