"""Options of the command line go before the file's."""

import pytest

from hydra_tune.cli.options import Overrides, with_overrides
from hydra_tune.cli.spec import SweepSpec
from hydra_tune.errors import SweepFileError

SPEC = SweepSpec(
    file="space.yaml",
    task="train:build",
    metric="val_loss",
    run_cap=3,
    storage="sqlite:///a.db",
    engine={"devices": "cpu:2", "num_shards": 4},
    places={"hydra.devices": "space.yaml:9:3", "hydra.num_shards": "space.yaml:10:3"},
)


def test_nothing_given_changes_nothing():
    assert with_overrides(SPEC, Overrides()) == SPEC


def test_what_is_given_replaces_what_was_written_and_its_place():
    spec = with_overrides(
        SPEC,
        Overrides(
            devices="cpu:1",
            device_memory="5MiB",
            max_concurrent=2,
            admission="staggered",
            policy="fifo",
            run_cap=9,
            storage="sqlite:///b.db",
        ),
    )
    assert spec.engine == {
        "devices": "cpu:1",
        "num_shards": 4,
        "device_memory": "5MiB",
        "max_concurrent": 2,
        "admission": "staggered",
        "policy": "fifo",
    }
    assert (spec.run_cap, spec.storage) == (9, "sqlite:///b.db")
    assert spec.at("hydra.devices") == "hydra.devices"
    assert spec.at("hydra.num_shards") == "space.yaml:10:3: hydra.num_shards"


def test_a_sweep_must_end():
    endless = SweepSpec(file="space.yaml", task="train:build", metric="val_loss")
    with pytest.raises(SweepFileError, match=r"space\.yaml:1:1: run_cap is missing"):
        with_overrides(endless, Overrides())
    assert with_overrides(endless, Overrides(timeout_seconds=3.0)).run_cap is None
    assert with_overrides(endless, Overrides(run_cap=1)).run_cap == 1
    grid = SweepSpec(file="space.yaml", task="train:build", metric="val_loss", method="grid")
    assert with_overrides(grid, Overrides()).run_cap is None
