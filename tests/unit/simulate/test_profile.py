"""Profiles from files and from runs."""

import re
from pathlib import Path

import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.simulate import simulate
from hydra_tune.simulate.profile import parse_profile, read_profile

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "profile.md"


def profile(**changes):
    trial = {
        "name": "a",
        "steps": 2,
        "shards": [{"forward_seconds": 1, "backward_seconds": 2}, {"backward_seconds": 3}],
    }
    return {"trials": [trial | changes.pop("trial", {})], "devices": [{"name": "d0"}]} | changes


def unit(seconds, shard=0):
    return {"kind": "forward", "shard": shard, "seconds": seconds}


def test_the_documented_profile_is_one(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(re.search(r"```json\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)[1])
    scenario = read_profile(path)
    assert len(scenario.trials) == 5
    assert simulate(scenario).units_run == scenario.num_units


def test_shards_become_a_training_step():
    trial = parse_profile(profile(), source="it").trials[0]
    assert [(unit.kind, unit.shard, unit.seconds) for unit in trial.step] == [
        ("forward", 0, 1),
        ("backward", 1, 3),
        ("backward", 0, 2),
    ]


def test_a_profile_may_stagger():
    assert parse_profile(profile(admission="staggered"), source="it").admission == "staggered"
    assert parse_profile(profile(), source="it").admission == "eager"


def test_a_step_may_be_written_out():
    unit = {"kind": "evaluate", "shard": 1, "seconds": 0.5}
    trial = parse_profile(profile(trial={"shards": [], "step": [unit]}), source="it").trials[0]
    assert (trial.step[0].kind, trial.shard_bytes) == ("evaluate", (0, 0))


def test_a_count_makes_trials_of_different_names():
    trials = parse_profile(profile(trial={"count": 3}), source="it").trials
    assert [trial.name for trial in trials] == ["a-0", "a-1", "a-2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (profile(trial={"steps": 0}), "it: trials[0].steps: input should be greater than or equal to 1, not 0"),
        (
            profile(trial={"count": 2**70}),
            "it: a simulation holds at most 10,000,000 shards of all trials together, not",
        ),
        (profile(trial={"shards": [], "step": [unit(1, shard=2**60)]}), "holds at most 10,000,000 shards"),
        (profile(trial={"shards": [{"backward_seconds": -1}]}), "trials[0].shards[0].backward_seconds"),
        (profile(trial={"shards": [{"backward_seconds": 0}]}), "greater than 0, not 0"),
        (profile(trial={"shards": [], "step": [unit(0)]}), "trials[0].step[0].seconds: input should be greater than 0"),
        (
            profile(trial={"shards": [], "step": [unit(-1)]}),
            "trials[0].step[0].seconds: input should be greater than 0",
        ),
        (
            profile(trial={"shards": [], "step": [unit(1, shard=3)], "shard_bytes": [10, 10]}),
            "it: trial 'a': a unit needs shard 3; there are 2, from 0",
        ),
        (profile(trial={"shards": []}), "trial 'a' needs either shards or step"),
        (profile(trial={"shards": [{"backward_seconds": 1}] * 2}), "shard 0 needs forward_seconds"),
        (profile(trial={"step_seconds": 1}), "trials[0].step_seconds: extra inputs are not permitted"),
        (profile(devices=[]), "it: devices: list should have at least 1 item"),
        (profile(format=2), "format must be 1, not 2; it is from another version"),
        (profile(devices=[{"name": "d"}, {"name": "d"}]), "it: names of devices must differ; 'd'"),
        (profile(admission="late"), "it: admission: input should be 'eager' or 'staggered', not 'late'"),
        ([], "it: the profile: input should be"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_place(content, message):
    with pytest.raises(ConfigError) as caught:
        parse_profile(content, source="it")
    assert message in str(caught.value)


def test_a_file_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "p.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"p\.json is not JSON"):
        read_profile(path)
