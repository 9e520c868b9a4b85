"""Algorithm D: what recomputing a candidate costs in a step: all of its recomputations, on its own account and on others'."""

from hydra_tune.fusion.planner.schedule import Candidate


def recompute_overhead(candidate: Candidate) -> float:
    """Seconds (`total_recomp_time`).

    Args:
        candidate: with its present sources.
    """
    return candidate.total_seconds
