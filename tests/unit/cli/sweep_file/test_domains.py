"""What a sweep file allows is what Optuna draws and what the task is given."""

import math
from decimal import Decimal

import optuna
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hydra_tune.cli.sweep_file.distributions import to_domain
from hydra_tune.cli.sweep_file.domains import ChoiceDomain, FloatDomain, IntDomain, grid_size, multiples_within
from hydra_tune.errors import ConfigError
from hydra_tune_optuna.sweep import suggest

LIMITS = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False).map(lambda value: float(f"{value:.6g}"))
WHOLE = st.integers(min_value=-1000, max_value=1000)
STEPS = st.sampled_from([0.001, 0.01, 0.05, 0.1, 0.25, 0.3, 1.0, 2.5, 7.0])


@pytest.fixture(scope="module", autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


def draw(domain, seed=0):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    trial = study.ask()
    return suggest(trial, "x", domain), trial.distributions["x"]


@given(WHOLE, WHOLE, st.integers(0, 9))
def test_int_uniform(low, high, seed):
    assume(low < high)
    domain = to_domain({"min": low, "max": high})
    value, distribution = draw(domain, seed)
    assert distribution == optuna.distributions.IntDistribution(low, high)
    assert isinstance(value, int)
    assert low <= value <= high
    assert value in domain.grid()


@given(LIMITS, LIMITS, st.integers(0, 9))
def test_uniform(low, high, seed):
    assume(low < high)
    value, distribution = draw(to_domain({"distribution": "uniform", "min": low, "max": high}), seed)
    assert distribution == optuna.distributions.FloatDistribution(low, high)
    assert low <= value <= high


@given(st.floats(1e-9, 1.0), st.floats(1.0, 1e9, exclude_min=True), st.integers(0, 9))
def test_log_uniform_values(low, high, seed):
    value, distribution = draw(to_domain({"distribution": "log_uniform_values", "min": low, "max": high}), seed)
    assert distribution == optuna.distributions.FloatDistribution(low, high, log=True)
    assert low <= value <= high


@given(st.floats(-20, 20), st.floats(-20, 20))
def test_log_uniform_has_the_exponents_of_e_for_limits(low, high):
    assume(low < high)
    assume(math.exp(low) < math.exp(high))
    domain = to_domain({"distribution": "log_uniform", "min": low, "max": high})
    assert (domain.low, domain.high, domain.log) == (math.exp(low), math.exp(high), True)


@settings(deadline=None)  # draws are slow on a busy machine
@given(LIMITS, st.floats(0.5, 50.0).map(lambda width: float(f"{width:.4g}")), STEPS, st.integers(0, 9))
def test_q_uniform_gives_multiples_of_q_within_the_limits(low, width, q, seed):
    high = float(f"{low + width:.8g}")
    assume(low < high)
    keys = {"distribution": "q_uniform", "min": low, "max": high, "q": q}
    if math.floor(Decimal(str(high)) / Decimal(str(q))) < math.ceil(Decimal(str(low)) / Decimal(str(q))):
        with pytest.raises(ConfigError, match="there is no multiple of q"):
            to_domain(keys)
        return
    domain = to_domain(keys)
    value, _ = draw(domain, seed)
    assert low <= value <= high
    assert abs(value / q - round(value / q)) < 1e-6
    grid = list(domain.grid())
    assert all(low <= point <= high for point in grid)
    assert all(Decimal(str(point)) % Decimal(str(q)) == 0 for point in grid)
    assert min(abs(value - point) for point in grid) < 1e-9 * max(1.0, abs(value))


@given(st.integers(1, 100), st.integers(1, 1000), st.integers(1, 16), st.integers(0, 9))
def test_q_log_uniform_values_gives_multiples_of_q_within_the_limits(low, width, q, seed):
    given_keys = {"distribution": "q_log_uniform_values", "min": low, "max": low + width, "q": q}
    first, last = multiples_within(low, low + width, q)
    if first > last:
        with pytest.raises(ConfigError, match="no multiple of q"):
            to_domain(given_keys)
        return
    value, distribution = draw(to_domain(given_keys), seed)
    assert distribution.log
    assert low <= value <= low + width
    assert value % q == 0


@pytest.mark.cases(1 / 3)
@given(st.lists(st.one_of(st.integers(), st.text(), st.none()), min_size=1, max_size=5, unique=True), st.integers(0, 9))
def test_categorical(values, seed):
    value, distribution = draw(to_domain({"values": values}), seed)
    assert distribution.choices == tuple(values)
    assert value in values


def test_a_multiple_is_counted_in_decimal():
    assert list(FloatDomain(low=0.1, high=0.7, step=0.1).grid()) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert FloatDomain(low=0.1, high=9.0, log=True, multiple=0.1).settle(0.31) == 0.3


def test_the_size_of_a_grid_counts_without_listing():
    parameters = {
        "a": ChoiceDomain(values=(1, 2)),
        "b": IntDomain(low=0, high=10, step=5),
        "c": FloatDomain(low=0.0, high=1e6, step=0.001),
        "endless": FloatDomain(low=0.0, high=1.0),
    }
    assert grid_size(parameters) == 2 * 3 * (10**9 + 1)


def test_the_size_of_a_grid_may_be_beyond_that_of_any_list():
    parameters = {"a": IntDomain(low=1, high=10**20), "b": FloatDomain(low=0.0, high=1e30, step=0.5)}
    assert grid_size(parameters) == 10**20 * (2 * 10**30 + 1)


@given(WHOLE, st.integers(0, 50), st.integers(1, 7), STEPS)
def test_the_size_of_a_grid_is_the_number_of_its_points(low, width, step, q):
    domains = IntDomain(low=low, high=low + width, step=step), FloatDomain(low=low * q, high=low * q + width, step=q)
    for domain in domains:
        assert grid_size({"a": domain}) == len(domain.grid())
