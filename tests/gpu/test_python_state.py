"""Programs whose steps read Python state that changes, on a GPU: the bits of a plain loop there, or an error by name.

The programs, and the plain loop, are those of `tests/parity`; the loop shares nothing with the package.
"""

import logging

import pytest
import torch

pytest.importorskip("pydantic", reason="one of the programs reads a pydantic model")

from hydra_tune.errors import HydraTuneError
from tests.parity import test_changing_numbers as numbers
from tests.parity import test_files_of_steps as files
from tests.parity.changed_outside import KINDS, SHARED, reading
from tests.parity.exact import differences
from tests.parity.stateful import PROGRAMS
from tests.parity.test_python_state import assert_close, captures, trained
from tests.parity.test_stateful import by_hand

DEVICE = DEVICES = "cuda:0"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("deterministic"),
]
DIVIDES = {"a_temperature", "a_number_over_a_tensor"}  # each value is captured on GPUs
ROUNDED = {"an_attribute_that_only_library_code_reads"}  # computes with tensors of the host, and a graph on the GPU
FUSED = {"a_weight", "a_decay", "a_cosine", "a_branch", "a_probability", "in_low_precision"}


def some(names, every):
    """All names, of which one in so many is not among the slow tests."""
    return [
        pytest.param(name, marks=() if number % every == 0 else pytest.mark.slow) for number, name in enumerate(names)
    ]


def expected_of(made):
    """A program whose own tensors stay on the host fails on a GPU in any loop."""
    try:
        return by_hand(made, DEVICE)
    except (RuntimeError, TypeError) as error:
        if "device" not in str(error):
            raise
        pytest.skip(f"no program for a GPU: {str(error).splitlines()[0]}")


def assert_equal(expected, actual):
    """To the last bit, or refused by name."""
    if isinstance(actual, Exception):
        assert isinstance(actual, HydraTuneError), actual
        pytest.skip(f"refused: {str(actual)[:200]}")
    state = {name: tensor.cpu() for name, tensor in expected["state"].items()}
    assert list(differences(expected | {"state": state}, actual)) == []


@pytest.mark.parametrize("shards", [None, "layer"])
@pytest.mark.parametrize("name", some(PROGRAMS, 4))
def test_a_program_that_changes_its_own_state_has_the_plain_bits(name, shards):
    expected = expected_of(PROGRAMS[name]())
    (actual,) = trained([PROGRAMS[name]()], devices=DEVICES, num_shards=shards)
    assert_equal(expected, actual)


@pytest.mark.parametrize("name", some(KINDS, 4))
def test_a_cut_trial_follows_what_its_step_reads(name):
    expected = expected_of(reading(name, "pass"))
    (actual,) = trained([reading(name, "pass")], devices=DEVICES, num_shards="layer")
    if name in ROUNDED:
        assert_close(on_host(expected), actual)
    else:
        assert_equal(expected, actual)


@pytest.mark.parametrize("name", [name for number, name in enumerate(KINDS) if name not in SHARED and number % 8 == 0])
def test_fused_trials_follow_what_their_steps_read(name):
    expected = expected_of(reading(name, "pass"))
    for actual in trained([reading(name, "pass") for _ in range(3)], devices=DEVICES, fusion="on"):
        assert_close(on_host(expected), actual)


def on_host(expected):
    return expected | {"state": {name: tensor.cpu() for name, tensor in expected["state"].items()}}


@pytest.mark.parametrize("name", some(numbers.FOLLOWED | numbers.TAKEN, 3))
def test_a_cut_trial_follows_a_number_that_changes_at_every_step(name, caplog):
    caplog.set_level(logging.INFO, "hydra_tune")
    expected = expected_of(numbers.program_of(name))
    (actual,) = trained([numbers.program_of(name)], devices=DEVICES, num_shards="layer")
    assert_equal(expected, actual)
    if name in numbers.FOLLOWED and name not in DIVIDES:
        assert captures(caplog) == 1


@pytest.mark.parametrize("name", sorted(FUSED))
def test_fused_trials_follow_a_number_that_changes_at_every_step(name):
    expected = expected_of(numbers.program_of(name))
    for actual in trained([numbers.program_of(name) for _ in range(3)], devices=DEVICES, fusion="on"):
        assert_close(on_host(expected), actual)


@pytest.mark.parametrize("way", some(files.WAYS, 3))
def test_a_cut_trial_follows_the_files_that_its_step_reads(way, tmp_path):
    expected = expected_of(files.reading(tmp_path / "number", way))
    (actual,) = trained([files.reading(tmp_path / "number", way)], devices=DEVICES, num_shards="layer")
    assert_equal(expected, actual)
