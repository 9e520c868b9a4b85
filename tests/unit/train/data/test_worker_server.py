"""Which threads may be there when the process is copied for workers."""

import ast
from pathlib import Path

from hydra_tune.train.data.worker_server import _WAITS

ROOT = Path(__file__).parents[4]


def test_functions_of_ours_that_count_as_waiting_are_there():
    ours = {file: names for file, names in _WAITS.items() if file.startswith("hydra_tune/")}
    assert len(ours) >= 4
    for file, names in ours.items():
        functions = {
            node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert set(names) <= functions
