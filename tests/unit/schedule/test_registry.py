import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import Fifo, LRTFPaper, ShardedLRTF, make_policy


def test_names():
    assert isinstance(make_policy("lrtf"), ShardedLRTF)
    assert isinstance(make_policy("fifo"), Fifo)


def install(folder, monkeypatch, entries):
    """An installed package, as far as the import system can see."""
    (folder / "house_policies.py").write_text(
        "from hydra_tune.schedule import Fifo\nclass House(Fifo): pass\nNOTHING = 3\n"
    )
    about = folder / "house_policies-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: house-policies\nVersion: 1.0\n")
    lines = [f"{name} = house_policies:{value}" for name, value in entries.items()]
    (about / "entry_points.txt").write_text("\n".join(["[hydra_tune.policies]", *lines, ""]))
    monkeypatch.syspath_prepend(folder)


def test_a_policy_of_an_installed_package(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, {"house": "House", "lrtf": "House", "typo": "NOTHING.bit_length"})
    assert type(make_policy("house")).__name__ == "House"
    assert isinstance(make_policy("lrtf"), ShardedLRTF), "no package takes a name away"
    with pytest.raises(ConfigError, match=r"'random', 'house', 'typo', not 'horse'; did you mean 'house'\?"):
        make_policy("horse")
    with pytest.raises(
        ConfigError, match=r"the entry point 'typo' \(house_policies:NOTHING.bit_length\) must make an obj"
    ):
        make_policy("typo")


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
