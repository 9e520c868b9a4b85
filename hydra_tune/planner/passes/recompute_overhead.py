"""Algorithm D: cost of recomputing a candidate in a step, for the candidate's own sake and for other recomputations."""

from hydra_tune.planner.ir.plan_state import FeatureMapCandidate


def recompute_overhead(candidate: FeatureMapCandidate) -> float:
    """Return the seconds of all recomputations of a candidate in a step (`total_recomp_time`).

    Args:
        candidate: with its present sources.
    """
    return candidate.total_seconds
