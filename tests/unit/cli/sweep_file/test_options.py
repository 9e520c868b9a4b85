"""Options of the command line go before the file's."""

from dataclasses import replace

import pytest

from hydra_tune.cli.sweep_file.options import SweepFileOverrides, check_saving, with_overrides
from hydra_tune.cli.sweep_file.spec import SweepSpec
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
    assert with_overrides(SPEC, SweepFileOverrides()) == SPEC


def test_what_is_given_replaces_what_was_written_and_its_place():
    spec = with_overrides(
        SPEC,
        SweepFileOverrides(
            devices="cpu:1",
            device_memory="5MiB",
            max_concurrent=2,
            admission="staggered",
            policy="fifo",
            fusion="auto",
            event_log_limit="1MB",
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
        "fusion": "auto",
        "event_log_limit": "1MB",
    }
    assert (spec.run_cap, spec.storage) == (9, "sqlite:///b.db")
    assert spec.at("hydra.devices") == "hydra.devices"
    assert spec.at("hydra.num_shards") == "space.yaml:10:3: hydra.num_shards"


def test_fusion_off_takes_the_files_settings_of_fusion_with_it():
    written = replace(SPEC, engine={"devices": "cpu:2", "fusion": "on", "fusion_size": 4, "fusion_planner": "off"})
    engine = with_overrides(written, SweepFileOverrides(fusion="off")).engine
    assert engine == {"devices": "cpu:2", "fusion": "off"}


def test_a_sweep_must_end():
    endless = SweepSpec(file="space.yaml", task="train:build", metric="val_loss")
    with pytest.raises(SweepFileError, match=r"space\.yaml:1:1: run_cap is missing"):
        with_overrides(endless, SweepFileOverrides())
    assert with_overrides(endless, SweepFileOverrides(timeout_seconds=3.0)).run_cap is None
    assert with_overrides(endless, SweepFileOverrides(run_cap=1)).run_cap == 1
    grid = SweepSpec(file="space.yaml", task="train:build", metric="val_loss", method="grid")
    assert with_overrides(grid, SweepFileOverrides()).run_cap is None


def test_what_is_said_of_checkpoints_goes_before_the_file():
    written = replace(SPEC, checkpoint_dir="a", checkpoint_every="5min", stop_seconds=9.0)
    assert with_overrides(written, SweepFileOverrides()) == written
    spec = with_overrides(written, SweepFileOverrides(checkpoint_dir="b", checkpoint_every=7, stop_seconds=2.5))
    assert (spec.checkpoint_dir, spec.checkpoint_every, spec.stop_seconds) == ("b", 7, 2.5)


@pytest.mark.parametrize(
    ("changes", "resume", "problem"),
    [
        ({"checkpoint_every": 3}, False, "hydra.checkpoint_every: needs a folder for checkpoints; add checkpoint_dir"),
        ({}, True, "--resume: space.yaml has no checkpoint_dir in hydra:"),
        ({"storage": None}, True, "the study needs hydra.storage and name, or hydra.study as well"),
        ({"checkpoint_dir": "saved"}, False, "add name, or hydra.study"),
        ({"checkpoint_dir": "saved", "storage": None, "study": "first"}, False, "add hydra.storage"),
        ({"checkpoint_dir": "saved", "storage": None}, True, "add hydra.storage and name, or hydra.study"),
    ],
)
def test_checkpoints_that_nobody_would_find_again_are_refused(changes, resume, problem):
    with pytest.raises(SweepFileError) as caught:
        check_saving(replace(SPEC, **changes), resume=resume)
    assert problem in str(caught.value)


def test_checkpoints_of_a_study_that_is_kept_are_not():
    check_saving(SPEC, resume=False)
    check_saving(replace(SPEC, checkpoint_dir="saved", checkpoint_every="1h", study="first"), resume=True)
