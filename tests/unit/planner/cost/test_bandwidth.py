"""A slower link shifts decisions of a real step from swaps to recomputations; times are counted, so that no clock decides."""

import pytest

from hydra_tune.planner.cost.peak_memory import peak_of
from hydra_tune.planner.ir.plan_state import undecided
from hydra_tune.planner.ir.verify import verify_schedule
from hydra_tune.planner.passes.swap_recompute import AllowedPlanActions, planned
from hydra_tune.planner.profile.profiler import GraphMeasurements, array_of, copied_at
from tests.unit.planner.made import sub_array

BYTES_PER_SECOND = (1e12, 3e9, 3e8, 1e8, 5e7, 3e7, 1e7, 3e6, 1e3)
SHARE = 0.6


def cnn():
    """The traced CNN; each operator takes a microsecond, and a nanosecond for each byte that it touches."""
    step = sub_array("cnn").step
    sizes, reads, makes = step.seen.sizes, step.seen.reads, step.seen.makes
    seconds = {n.name: 1e-6 + 1e-9 * sum(map(sizes.__getitem__, (*reads[n.name], *makes[n.name]))) for n in step.ops}
    return array_of("cnn", step, GraphMeasurements(seconds))


@pytest.mark.parametrize("policy", [AllowedPlanActions(), AllowedPlanActions(interleaves=False)])
def test_the_slower_the_link_the_more_is_computed_again_and_never_less(policy):
    made, shares = cnn(), []
    for bandwidth in BYTES_PER_SECOND:
        pair = (copied_at(made, bandwidth),) * 2
        whole = undecided(pair, 1 << 60)
        rest = peak_of(whole)[1].peak_bytes - whole.static_bytes
        schedule, _ = planned(undecided(pair, whole.static_bytes + int(SHARE * rest)), policy)
        verify_schedule(schedule)
        assert peak_of(schedule)[1].peak_bytes <= schedule.limit_bytes
        swapped = sum(made.maps[name].num_bytes for one in schedule.decisions for name in one.swaps)
        again = sum(made.maps[name].num_bytes for one in schedule.decisions for name in one.recomputes)
        shares.append(swapped / (swapped + again))
    assert shares == sorted(shares, reverse=True), shares
    assert (shares[0], shares[-1]) == (1.0, 0.0)
    assert any(0.0 < share < 1.0 for share in shares)
