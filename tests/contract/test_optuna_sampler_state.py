"""A sampler whose state was noted goes on with the same draws, at whatever draw it was left."""

import json

import optuna
import pytest

from hydra_tune.checkpoint.sweep_folder import SweepFolder
from hydra_tune_optuna.search.resume_sweep import keep_sampler
from hydra_tune_optuna.search.sampler_state import note_draws, restore, state_of

SAMPLERS = {
    "random": lambda: optuna.samplers.RandomSampler(seed=3),
    "bayes": lambda: optuna.samplers.TPESampler(seed=3, n_startup_trials=3),
    "grid": lambda: optuna.samplers.GridSampler({"x": [0.1, 0.2, 0.3], "y": [0.5, 0.6, 0.7]}, seed=3),
}


def ask(study, told=True):
    trial = study.ask()
    drawn = trial.suggest_float("x", 0.0, 1.0), trial.suggest_float("y", 0.0, 1.0)
    if told:
        study.tell(trial, sum(drawn))
    return drawn


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_search_that_goes_on_draws_what_it_would_have_drawn(kind, tmp_path):
    whole = optuna.create_study(sampler=SAMPLERS[kind]())
    expected = [ask(whole) for _ in range(7)]
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    found = []
    for _ in range(7):  # a process for each
        sampler = SAMPLERS[kind]()
        study = optuna.create_study(study_name="s", storage=url, sampler=sampler, load_if_exists=True)
        with SweepFolder(tmp_path, "s") as folder:
            keep_sampler(study, sampler, 3, folder)
            found.append(ask(study))
    assert found == expected


def test_what_was_drawn_last_is_never_drawn_again(tmp_path):
    """Killed between a draw and the storage's hearing of it: the value is lost, and nobody has had it."""
    sampler, noted = SAMPLERS["random"](), []
    note_draws(sampler, lambda state: noted.append(json.dumps(state)))
    study = optuna.create_study(sampler=sampler)
    drawn = [ask(study) for _ in range(3)]
    assert len(noted) == 6
    for at, state in enumerate(noted[:-1], 1):
        other = SAMPLERS["random"]()
        restore(other, json.loads(state))
        (x, _), flat = ask(optuna.create_study(sampler=other)), [value for pair in drawn for value in pair]
        assert x == flat[at]
        assert x not in flat[:at]


def test_another_study_of_the_name_or_another_seed_begins_anew(tmp_path):
    def first(seed, url):
        sampler = optuna.samplers.RandomSampler(seed=seed)
        study = optuna.create_study(study_name="s", storage=url, sampler=sampler, load_if_exists=True)
        with SweepFolder(tmp_path, "s") as folder:
            keep_sampler(study, sampler, seed, folder)
            return ask(study)

    urls = [f"sqlite:///{tmp_path / name}.db" for name in "ab"]
    one = first(0, urls[0])
    assert first(0, urls[0]) != one  # goes on
    assert first(0, urls[1]) == one  # deleted and made again
    assert first(1, urls[1]) == ask(optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1)))


@pytest.mark.parametrize(
    "state", [[], [{}], [{"kind": "MT19937", "keys": [1], "position": 0, "has_gauss": 0, "gauss": 0.0}]]
)
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match=r".+"):
        restore(SAMPLERS["random"](), state)


def test_a_state_is_the_same_as_json():
    sampler = SAMPLERS["bayes"]()
    study = optuna.create_study(sampler=sampler)
    for _ in range(4):
        ask(study)
    assert json.loads(json.dumps(state_of(sampler))) == state_of(sampler)
