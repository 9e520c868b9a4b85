"""What is done while the machine is slower takes no longer beside what else is done there."""

import pytest

from hydra_tune.planner.profile.clock_drift import CpuPaceMeter, PacedTimer


class Machine:
    """Time on it goes by as told: what is done takes as long as its work at the pace of the moment."""

    def __init__(self):
        self.time, self.slower = 0.0, 1.0

    def pace(self):
        machine = self

        class Fixed(CpuPaceMeter):
            def seconds(self, beside=0.0):
                return machine.work(1.0)

        return Fixed(lambda: machine.time)

    def work(self, seconds):
        self.time += seconds * self.slower
        return seconds * self.slower


def test_what_takes_longer_as_the_machine_is_slower_takes_the_same_for_its_pace():
    machine = Machine()
    paced = PacedTimer(machine.pace())
    for machine.slower in (1.0, 1.0, 1.5, 3.0, 1.0):
        paced.time(lambda: machine.work(7.0), 2, counts=True)
    assert paced.pace_seconds == 1.0
    assert paced.seconds == pytest.approx(7.0)


def test_times_that_do_not_count_are_left_out():
    machine = Machine()
    paced = PacedTimer(machine.pace())
    assert (paced.seconds, paced.pace_seconds) == (0.0, 0.0)
    paced.time(lambda: machine.work(100.0), 3, counts=False)
    assert paced.seconds == 0.0
    paced.time(lambda: machine.work(2.0), 1, counts=True)
    assert paced.seconds == 2.0


def test_the_pace_is_the_mean_of_small_operators_and_a_long_one():
    looks = iter((3.0, 7.0, 16.0))
    assert CpuPaceMeter(lambda: next(looks)).seconds() == pytest.approx(6.0), "4 and 9"


def test_beside_what_takes_long_it_is_looked_at_for_longer():
    looks = iter(range(1000))
    assert CpuPaceMeter(lambda: next(looks)).seconds(beside=100.0) == 1.0
    assert next(looks) == 3 * 3, "three looks of one second are 3% of 100"
