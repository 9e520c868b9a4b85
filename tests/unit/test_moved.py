"""Old paths of modules lead to the modules themselves, and say so."""

import sys
from importlib import import_module

import pytest

from hydra_tune.moved import OLD_PATHS


@pytest.mark.parametrize(("old", "new"), OLD_PATHS.items())
def test_an_old_path(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        module = import_module(old)
    assert module is import_module(new)
    assert module.__spec__.name == new
    monkeypatch.delitem(sys.modules, old)


def test_a_module_of_a_package_that_has_moved(monkeypatch):
    with pytest.warns(DeprecationWarning, match="hydra_tune.planner.ir now"):
        module = import_module("hydra_tune.fusion.planner.ir")
    assert module is import_module("hydra_tune.planner.ir")
    for name in ("hydra_tune.fusion.planner", "hydra_tune.fusion.planner.ir"):
        monkeypatch.delitem(sys.modules, name)


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"hydra_tune\.fusion\.nothing"):
        import_module("hydra_tune.fusion.nothing")
