"""`install()`: `import optuna` itself takes `executor=`, and without one nothing of it has changed."""

import inspect
import pickle
from functools import partial

import optuna
import pytest
from optuna._convert_positional_args import convert_positional_args

import hydra_tune_optuna
from hydra_tune import HydraTuneError
from tests.contract.optuna_drivers import Driver, build, make_pool, record, trials_of

STOCK = {name: getattr(optuna, name) for name in ("create_study", "load_study")}
MODULES = (optuna, optuna.study)


@pytest.fixture
def installed():
    hydra_tune_optuna.install()
    yield
    hydra_tune_optuna.uninstall()


@pytest.fixture(scope="module", params=["plain", "hydra"])
def pool(request):
    with make_pool(request.param, width=1) as pool:
        yield pool


@pytest.fixture(params=["optuna", "optuna.study"])
def module(request, installed):
    return {"optuna": optuna, "optuna.study": optuna.study}[request.param]


class Installed(Driver):
    """A user who writes `import optuna`."""

    def create_study(self, **options):
        return optuna.create_study(**options, executor=self.pool)


def test_a_search_with_an_executor_is_that_of_the_drop_in(installed, pool):
    assert record(Installed(pool), build) == record(Driver(pool), build)


def test_both_modules_make_and_load_studies_of_the_pool(module, pool):
    storage = optuna.storages.InMemoryStorage()
    study = module.create_study(study_name="search", storage=storage, direction="maximize", executor=pool)
    study.optimize(build, n_trials=2)
    loaded = module.load_study(study_name=None, storage=storage, pruner=optuna.pruners.NopPruner(), executor=pool)
    loaded.optimize(build, n_trials=1)

    assert isinstance(study, hydra_tune_optuna.PoolStudy)
    assert isinstance(loaded, hydra_tune_optuna.PoolStudy)
    assert isinstance(loaded.pruner, optuna.pruners.NopPruner)
    assert loaded.direction == optuna.study.StudyDirection.MAXIMIZE
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    assert trials_of(study) == trials_of(loaded)


def test_without_an_executor_studies_and_searches_are_stock_ones(module):
    class Plain(Driver):
        def create_study(self, **options):
            return module.create_study(**options)

    assert type(module.create_study()) is optuna.Study
    assert type(module.create_study(executor=None)) is optuna.Study
    assert record(Plain(), build) == record(Driver(), build)


def test_what_is_no_executor_is_refused_before_the_study_exists(module):
    storage = optuna.storages.InMemoryStorage()
    with pytest.raises(HydraTuneError, match="executor must be a HydraExecutor, not 4"):
        module.create_study(storage=storage, executor=4)
    assert optuna.get_all_study_names(storage) == []


WRONG = {
    "positional": lambda module: module.create_study("sqlite:///study.db"),
    "unknown": lambda module: module.create_study(storages=None),
    "direction": lambda module: module.create_study(direction="up"),
    "both": lambda module: module.create_study(direction="minimize", directions=["minimize"]),
    "no name": lambda module: module.load_study(storage=optuna.storages.InMemoryStorage()),
    "no study": lambda module: module.load_study(study_name=None, storage=optuna.storages.InMemoryStorage()),
    "unknown study": lambda module: module.load_study(study_name="no", storage=optuna.storages.InMemoryStorage()),
}


def error_of(call):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - compared
        call(optuna)
    return type(raised.value), str(raised.value).partition(" object at ")[0]


@pytest.mark.parametrize("wrong", WRONG)
def test_mistakes_are_answered_as_before(wrong):
    before = error_of(WRONG[wrong])
    hydra_tune_optuna.install()
    try:
        assert error_of(WRONG[wrong]) == before
    finally:
        hydra_tune_optuna.uninstall()


@pytest.mark.parametrize("name", STOCK)
def test_name_documentation_and_arguments_are_optunas_and_ours(name, module):
    ours, stock = getattr(module, name), STOCK[name]

    assert (ours.__name__, ours.__qualname__) == (stock.__name__, stock.__qualname__)
    assert ours.__doc__ == stock.__doc__
    assert inspect.unwrap(ours, stop=lambda function: function is stock) is stock
    *shown, executor, keep_best, weights_dir = inspect.signature(ours).parameters.values()
    assert shown == list(inspect.signature(stock).parameters.values())
    for parameter, called in ((executor, "executor"), (keep_best, "keep_best"), (weights_dir, "weights_dir")):
        assert (parameter.name, parameter.kind, parameter.default) == (called, parameter.KEYWORD_ONLY, None)
    assert inspect.signature(ours).return_annotation == inspect.signature(stock).return_annotation
    assert pickle.loads(pickle.dumps(ours)) is ours


def test_decorators_with_which_optuna_deprecates_arguments_work_on(monkeypatch, pool):
    """As it did when arguments became keywords only: by position they are taken, with a warning."""
    deprecating = convert_positional_args(
        previous_positional_arg_names=["storage", "sampler"], deprecated_version="5.0.0", removed_version="7.0.0"
    )(STOCK["create_study"])
    monkeypatch.setattr(optuna, "create_study", deprecating)
    sampler = optuna.samplers.RandomSampler()
    hydra_tune_optuna.install()
    try:
        for executor in (None, pool):
            with pytest.warns(FutureWarning, match="Positional arguments"):
                study = optuna.create_study(None, sampler, executor=executor)
            assert study.sampler is sampler
            assert isinstance(study, hydra_tune_optuna.PoolStudy) == (executor is pool)
        with (
            pytest.warns(FutureWarning),
            pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"),
        ):
            optuna.create_study(None, sampler, None)
    finally:
        hydra_tune_optuna.uninstall()
    assert optuna.create_study is deprecating


def test_installed_twice_and_removed_once_the_very_objects_are_back():
    hydra_tune_optuna.install()
    first = [getattr(module, name) for module in MODULES for name in STOCK]
    hydra_tune_optuna.install()
    assert [getattr(module, name) for module in MODULES for name in STOCK] == first
    assert optuna.create_study is optuna.study.create_study is not STOCK["create_study"]

    hydra_tune_optuna.uninstall()
    for module in MODULES:
        for name, stock in STOCK.items():
            assert getattr(module, name) is stock
    hydra_tune_optuna.uninstall()
    with pytest.raises(TypeError, match="unexpected keyword argument 'executor'"):
        optuna.create_study(executor=None)


def test_what_another_library_put_there_since_is_left_alone(pool):
    monkeypatch = pytest.MonkeyPatch()
    hydra_tune_optuna.install()
    theirs = partial(optuna.create_study, study_name="theirs")
    monkeypatch.setattr(optuna, "create_study", theirs)

    hydra_tune_optuna.uninstall()

    assert optuna.create_study is theirs
    assert optuna.study.create_study is STOCK["create_study"]
    assert theirs(executor=pool).study_name == "theirs"

    monkeypatch.undo()  # puts back what it found, which is ours
    assert optuna.create_study is not STOCK["create_study"]
    hydra_tune_optuna.install()
    hydra_tune_optuna.uninstall()
    assert optuna.create_study is STOCK["create_study"]


def test_a_name_imported_before_keeps_what_it_stood_for(installed, pool):
    from_optuna_import_create_study = STOCK["create_study"]

    with pytest.raises(TypeError, match="unexpected keyword argument 'executor'"):
        from_optuna_import_create_study(executor=pool)


def test_studies_made_before_it_is_removed_go_on(pool):
    hydra_tune_optuna.install()
    study = optuna.create_study(executor=pool)
    hydra_tune_optuna.uninstall()

    study.optimize(build, n_trials=2)

    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2


def test_the_drop_in_is_the_same_with_and_without(installed, pool):
    assert isinstance(hydra_tune_optuna.create_study(executor=pool), hydra_tune_optuna.PoolStudy)
    assert type(hydra_tune_optuna.create_study()) is optuna.Study
