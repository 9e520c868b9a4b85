"""Searches drawn at random, run by stock Optuna around the plain loop and in a pool: what differs is a fault of ours."""

import warnings
from functools import partial

import optuna
import pytest

from tests.contract.optuna_drivers import Driver, make_pool, record
from tests.contract.optuna_random_searches import draw, draw_wide

QUICK = range(18, 30)
MORE = range(30, 600)
OF_THE_FAULT = 115  # in this search stock Optuna fails by itself: see `FAULT`
WIDTH = 4

# Stock Optuna's GridSampler asks which point a trial had that ends while one point is left, and an enqueued trial had none.
FAULT = repr(KeyError("grid_id"))


class FaultlessGridSampler(optuna.samplers.GridSampler):
    """The sampler without this fault: no such trial had the point that is left, so the search goes on."""

    def after_trial(self, study, trial, state, values):
        try:
            super().after_trial(study, trial, state, values)
        except KeyError as error:
            if repr(error) != FAULT:
                raise


@pytest.fixture(scope="module", params=["plain", "hydra"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def narrow(kind):
    with make_pool(kind, 1) as pool:
        yield Driver(pool)


@pytest.fixture(scope="module")
def wide(kind):
    with make_pool(kind, WIDTH) as pool:
        yield Driver(pool)


def run(driver, search):
    """What the search left and showed, warnings included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = record(
            driver,
            search,
            calls=search.calls,
            callbacks=search.callbacks,
            prepare=search.prepare,
            **search.options,
        )
    return seen, [(warning.category.__name__, str(warning.message)) for warning in caught]


def run_stock(seed):
    """What stock Optuna leaves and shows; where its GridSampler fails by itself, what it would without that fault."""
    search = draw(seed)
    stock = run(Driver(), search)
    if FAULT not in stock[0].raised:
        return stock
    sampler = search.options["sampler"]
    assert sampler.func is optuna.samplers.GridSampler
    search = draw(seed)
    search.options["sampler"] = partial(FaultlessGridSampler, *sampler.args, **sampler.keywords)
    return run(Driver(), search)


def assert_same(driver, seeds):
    for seed in seeds:
        ours, stock = run(driver, draw(seed)), run_stock(seed)
        assert ours == stock, f"seed {seed}"


def assert_same_out_of_order(driver, seeds):
    """At a larger width trials end in another order, and what they are does not depend on it."""
    for seed in seeds:
        (ours, _), (stock, _) = run(driver, draw_wide(seed)), run(Driver(), draw_wide(seed))
        assert ours.trials == stock.trials, f"seed {seed}"
        assert sorted(ours.called_back) == sorted(stock.called_back), f"seed {seed}"
        assert ours.raised == stock.raised == [], f"seed {seed}"
        assert unordered(ours.log) == unordered(stock.log), f"seed {seed}"


def unordered(log):
    return sorted(line.partition(" Best is trial")[0] for line in log)


def test_random_searches_at_width_one_are_those_of_stock_optuna(narrow):
    assert_same(narrow, QUICK)


def test_where_stock_optuna_fails_by_itself_a_search_goes_on_as_if_it_had_not(narrow):
    assert run(Driver(), draw(OF_THE_FAULT))[0].raised == [FAULT]
    ours = run(narrow, draw(OF_THE_FAULT))
    assert ours[0].raised == []
    assert ours == run_stock(OF_THE_FAULT)


@pytest.mark.slow
def test_many_random_searches_at_width_one_are_those_of_stock_optuna(narrow):
    assert_same(narrow, MORE)


@pytest.mark.cases(1)
def test_random_searches_at_a_larger_width_have_the_same_trials(wide):
    assert_same_out_of_order(wide, QUICK)


@pytest.mark.slow
def test_many_random_searches_at_a_larger_width_have_the_same_trials(wide):
    assert_same_out_of_order(wide, MORE)


def test_the_searches_drawn_do_all_there_is():
    """The comparison is worth as much as what is drawn: all states, errors of all kinds, stops, prunes, enqueued trials."""
    seen = [run(Driver(), draw(seed))[0] for seed in QUICK]

    states = {state for each in seen for _, state in each.called_back}
    raised = {text.partition("(")[0] for each in seen for text in each.raised}
    assert states == {"COMPLETE", "PRUNED", "FAIL"}
    assert {"ValueError", "KeyError", "KeyboardInterrupt", "RuntimeError"} <= raised
    assert any("fixed_params" in trial for each in seen for trial in each.trials)
    assert sum(len(each.trials) for each in seen) > 40
