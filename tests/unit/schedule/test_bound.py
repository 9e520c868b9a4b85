import pytest

from hydra_tune.errors import ConfigError
from hydra_tune.schedule import makespan_bound, uneven_makespan_bound


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


@pytest.mark.parametrize(
    ("job_seconds", "speeds", "bound"),
    [
        ([3.0, 3.0, 3.0], [1.0, 1.0], 4.5),  # equal speeds: as above
        ([8.0, 1.0, 1.0], [1.0, 1.0], 8.0),
        ([8.0, 1.0], [1.0, 3.0], 8 / 3),  # the longest job, on the fastest device from start to end
        ([6.0, 6.0, 0.1], [2.0, 2.0, 0.1], 3.0),  # two long jobs, two fast devices: the slow one helps neither
        ([4.0, 4.0, 4.0], [2.0, 1.0], 4.0),  # all work, all devices
        ([5.0], [0.5], 10.0),
        ([], [1.0, 2.0], 0.0),
    ],
)
def test_unequal_devices(job_seconds, speeds, bound):
    assert uneven_makespan_bound(iter(job_seconds), iter(speeds)) == bound


def test_no_devices_to_have_a_speed():
    with pytest.raises(ConfigError, match="device_speeds is empty, expected the speed of at least 1 device"):
        uneven_makespan_bound([1.0], [])


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_speeds(speed):
    with pytest.raises(ConfigError, match=f"speed must be a positive number, not {speed}; leave out"):
        uneven_makespan_bound([1.0], [1.0, speed])


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_times(seconds):
    message = f"a job's time must be a finite number of seconds from 0, not {seconds}"
    with pytest.raises(ConfigError, match=message):
        makespan_bound([1.0, seconds], 2)
    with pytest.raises(ConfigError, match=message):
        uneven_makespan_bound([1.0, seconds], [1.0])
