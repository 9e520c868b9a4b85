"""What a sweep on a Ray cluster cannot do is found before its task is loaded, or Ray."""

import re

import pytest

from hydra_tune.cli.run.cluster import run_cluster_sweep
from hydra_tune.cli.sweep_file.domains import ChoiceDomain, IntDomain
from hydra_tune.cli.sweep_file.options import DisplayOptions
from hydra_tune.cli.sweep_file.spec import SweepSpec
from hydra_tune.errors import ConfigError

GRID = {"a": ChoiceDomain(values=("x", "y")), "b": IntDomain(low=0, high=4, step=2)}


@pytest.mark.parametrize(
    ("method", "run_cap", "problem"),
    [
        ("grid", 5, "run_cap: on a Ray cluster a grid is trained whole, and this one has 6 points; leave run_cap out"),
        ("grid", 6, "task: there is no module 'nowhere'"),
        ("grid", None, "task: there is no module 'nowhere'"),
        ("random", 5, "task: there is no module 'nowhere'"),
    ],
)
def test_a_grid_has_all_its_points(method, run_cap, problem):
    spec = SweepSpec(
        file="space.yaml", task="nowhere:build", metric="val_loss", method=method, run_cap=run_cap, parameters=GRID
    )
    with pytest.raises(ConfigError, match=re.escape(problem)):
        run_cluster_sweep(spec, DisplayOptions(), "local")
