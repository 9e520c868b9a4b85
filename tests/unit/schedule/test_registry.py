import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import Fifo, ShardedLRTF, make_policy


def test_names():
    assert isinstance(make_policy("lrtf"), ShardedLRTF)
    assert isinstance(make_policy("fifo"), Fifo)


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
