import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import Fifo, LRTFPaper, ShardedLRTF, make_policy
from tests.support.installed import install_policies


def test_names():
    assert isinstance(make_policy("lrtf"), ShardedLRTF)
    assert isinstance(make_policy("fifo"), Fifo)


def test_a_policy_of_an_installed_package(tmp_path, monkeypatch):
    entries = {"house": "House", "lrtf": "House", "typo": "NOTHING.bit_length", "gone": "Gone"}
    install_policies(tmp_path, monkeypatch, entries)
    assert type(make_policy("house")).__name__ == "House"
    assert isinstance(make_policy("lrtf"), ShardedLRTF), "no package takes a name away"
    with pytest.raises(ConfigError, match=r"'random', 'house', 'typo', 'gone', not 'horse'; did you mean 'house'\?"):
        make_policy("horse")
    with pytest.raises(
        ConfigError, match=r"the entry point 'typo' \(house_policies:NOTHING.bit_length\) must make an obj"
    ):
        make_policy("typo")
    with pytest.raises(ConfigError, match=r"policy 'gone': .* cannot be loaded: AttributeError: .*'Gone'"):
        make_policy("gone")


def test_a_structure_the_paper_does_not_have():
    with pytest.raises(ConfigError, match="structure must be 'scan' or 'heap', not 'tree'"):
        LRTFPaper(structure="tree")


def test_a_policy_object_is_taken_as_it_is():
    class Last:
        def choose(self, device, candidates):
            return candidates[-1]

    policy = Last()
    assert make_policy(policy) is policy


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ltrf", r"policy must be one of 'lrtf', .*, 'random', not 'ltrf'; did you mean 'lrtf'\?"),
        ("FIFO", r"not 'FIFO'; did you mean 'fifo'\?"),
        ("greedy", r"not 'greedy'; or give an object with choose\(device, candidates\)"),
        (Fifo, r"policy must be an object, not the class Fifo; write Fifo\(\)"),
        (3, r"or an object with choose\(device, candidates\), not 3"),
    ],
)
def test_anything_else_is_refused_with_a_remedy(policy, message):
    with pytest.raises(ConfigError, match=message):
        make_policy(policy)
