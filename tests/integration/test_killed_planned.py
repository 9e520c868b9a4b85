"""Searches whose steps are planned are killed within their units, and gone on with: the bits of one that never was."""

import functools

import pytest

from hydra_tune import HydraExecutor
from hydra_tune.checkpoint.tensors import load_tensors
from tests.parity.exact import differences
from tests.support.faults import ended, start
from tests.support.killed_planned import main, search

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Where, when, and at which call. A unit of a pair begins with the forward of a group alone (its first segment).
MOMENTS = {
    "pair": (
        "hydra_tune.fusion.runtime.paired_unit:PairStepRunner.run/before/2",  # the first forward has run, and nothing is saved
        "hydra_tune.fusion.runtime.paired_unit:PairStepRunner.run/after/7",
        "hydra_tune.fusion.runtime.step_arguments:StepStateBinding.begin/after/13",
        "hydra_tune.checkpoint.folder:write_file/before/14",  # some members have saved a step, and others have not
        "hydra_tune.fusion.runtime.paired_unit:PairStepRunner.run/after/6",
    ),
    "group": (
        "hydra_tune.fusion.runtime.planned_unit:GroupStepRunner.backward/before/2",  # between forward and backward
        "hydra_tune.fusion.runtime.planned_unit:GroupStepRunner.backward/after/3",
        "hydra_tune.checkpoint.folder:write_file/before/14",
        "hydra_tune.fusion.runtime.planned_unit:GroupStepRunner.forward/after/4",
    ),
}


@functools.cache
def expected(size):
    """The same groups where everything is kept, and nobody is killed."""
    with HydraExecutor(devices="cpu:1", fusion="on", fusion_size=size, fusion_planner="off") as pool:
        return search(pool)


@pytest.mark.parametrize("kind", ["pair", "group"])
def test_a_search_of_planned_steps_is_killed_and_gone_on_with(tmp_path, kind):
    folder, result, errors = tmp_path / "saved", tmp_path / "result", tmp_path / "errors"
    folder.mkdir()
    *moments, last = MOMENTS[kind]
    for moment in moments:
        assert ended(start(main, folder, result, kind, errors=errors, moment=moment), errors) == -9, moment
    assert not result.exists()
    # Where checkpoints are quick to write, too few steps may be left for the last moment to come.
    is_killed = ended(start(main, folder, result, kind, errors=errors, moment=last), errors) == -9
    assert result.exists() != is_killed
    assert ended(start(main, folder, result, kind, errors=errors), errors) == 0
    found = list(differences(expected(2 if kind == "pair" else 4), load_tensors(result)[0]))
    # Where checkpoints are slow to write, the last process may find all trials at their ends, and makes no group.
    assert [line for line in found if ".members" not in line] == []
    assert not [path.name for path in folder.rglob("*.tmp")]
