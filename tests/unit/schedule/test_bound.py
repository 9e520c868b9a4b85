import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import makespan_bound


@pytest.mark.parametrize(
    ("job_seconds", "num_devices", "bound"),
    [
        ([3.0, 3.0, 3.0], 2, 4.5),
        ([8.0, 1.0, 1.0], 2, 8.0),
        ([5.0], 4, 5.0),
        ([1.0, 2.0, 3.0], 1, 6.0),
        ([], 2, 0.0),
    ],
)
def test_the_larger_of_even_work_and_longest_job(job_seconds, num_devices, bound):
    assert makespan_bound(iter(job_seconds), num_devices) == bound


def test_no_devices():
    with pytest.raises(ConfigError, match="num_devices must be at least 1, not 0"):
        makespan_bound([1.0], 0)
