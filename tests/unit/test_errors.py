"""Errors go from one process to another whole."""

import inspect
import pickle

import pytest

from hydra_tune import errors

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.HydraTuneError)]
FIRST = {errors.TrialsFailed: [[]], errors.TrialCrashedError: ["a trial", 2, "SIGSEGV"]}
GIVEN = {"path": "/a/file", "errno": 28, "enough_bytes": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_after_pickling(kind):
    code = getattr(kind.__init__, "__code__", None)  # None where the class has no __init__ of its own
    names = code.co_varnames if code else ()
    given = {name: value for name, value in GIVEN.items() if name in names}
    error = kind(*FIRST.get(kind, ["said"]), **given)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
