"""What a profile leaves alone of what others have on the device, and what it does not take for its own."""

import torch

from hydra_tune.planner.profile.profiler import WARM_UPS, SubArrayProfiler, measured
from hydra_tune.planner.profile.profiling_interpreter import made_up
from tests.unit.planner.profile.test_profiled_order import CPU, Log, step


class Warming(Log):
    """A library takes memory for good where an operator runs first."""

    def peak_beyond(self, made_bytes):
        super().peak_beyond(made_bytes)
        return 8 << 20 if self._runs[self.asked[-1]] <= WARM_UPS else 7


def test_what_a_warm_up_leaves_to_a_library_is_no_room_that_an_operator_works_in():
    assert set(measured(step(), CPU, Warming()).workspace_bytes.values()) == {7}


def test_numbers_made_up_do_not_move_the_generator_that_trials_draw_from():
    before = torch.get_rng_state()
    made = made_up(torch.empty(50), CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert 0.25 <= made.min() < made.max() < 0.75


def test_a_graph_is_known_where_it_has_been_measured():
    profiles, made = SubArrayProfiler(lambda _device: Log(), lambda _device: 0.0), step()
    assert not profiles.knows(made, CPU)
    profiles.array("", made, CPU)
    assert profiles.knows(made, CPU)
    assert not profiles.knows(made, torch.device("cuda", 0))
