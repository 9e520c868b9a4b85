"""What each policy chooses, said as plainly as it can be: one look at every candidate."""

from hydra_tune.schedule import IncrementalPolicy, JobView, LRTFPaper, Policy, Selection, make_policy


def lrtf(device, candidates):
    longest = max(candidates, key=lambda view: (view.remaining_seconds, -view.order))
    slack = 2 * longest.step_seconds
    at_hand = [view for view in candidates if view.shard_device in (device, None)]
    most = max((view.remaining_seconds for view in at_hand), default=float("-inf"))
    if most < longest.remaining_seconds - slack:
        return longest
    ran_here = [view for view in candidates if view.last_device == device]
    last = min(ran_here, key=lambda view: (-view.turn, view.order), default=None)
    if last in at_hand and last.remaining_seconds >= most - slack:
        return last

    def rank(view):
        return view.shard_device is None, -view.remaining_seconds, view.order

    return min([view for view in at_hand if view.remaining_seconds >= most - slack / 2], key=rank)


def lrtf_paper(device, candidates):
    return min(candidates, key=lambda view: (-max(view.remaining_seconds, 0.0), view.order))


def srtf(device, candidates):
    return min(candidates, key=lambda view: (view.remaining_seconds, view.order))


def fifo(device, candidates):
    return min(candidates, key=lambda view: view.order)


def round_robin(device, candidates):
    return min(candidates, key=lambda view: (view.turn, view.order))


def fair(device, candidates):
    def fraction(view):
        left = view.remaining_seconds
        return view.done_seconds / (view.done_seconds + left) if left > 0 else 1.0

    return min(candidates, key=lambda view: (fraction(view), view.order))


def lpt(device, candidates):
    def rank(view):
        if view.last_device == device:
            return 0, -view.turn, view.order
        return 1 if view.last_device is None else 2, -view.remaining_seconds, view.order

    return min(candidates, key=rank)


ORACLES = {
    "lrtf": lrtf,
    "lrtf_paper": lrtf_paper,
    "srtf": srtf,
    "fifo": fifo,
    "round_robin": round_robin,
    "fair": fair,
    "lpt": lpt,
}
"""By name of the policy; `random` has none."""


class OneMethod:
    """A user's policy: takes the last of what it is shown."""

    def choose(self, device, candidates):
        return max(candidates, key=lambda view: view.order)


def some_policies() -> dict[str, Policy]:
    """Every kind of policy there is, those with an oracle checked against it at every choice."""
    made: dict[str, Policy] = {name: Checked(make_policy(name), oracle) for name, oracle in ORACLES.items()}
    return made | {
        "lrtf_paper, scan": Checked(LRTFPaper(structure="scan"), lrtf_paper),
        "lrtf_paper, idle_only": LRTFPaper(idle_only=True),
        "lrtf_paper, scan, idle_only": LRTFPaper(structure="scan", idle_only=True),
        "random": make_policy("random"),
        "one method": OneMethod(),
    }


class Checked(IncrementalPolicy):
    """A policy each of whose choices must be its oracle's."""

    def __init__(self, policy, oracle):
        self.policy, self.oracle = policy, oracle

    def start(self) -> Selection:
        return _CheckedSelection(self.policy.start(), self.oracle)


class _CheckedSelection:
    def __init__(self, selection, oracle):
        self.selection, self.oracle, self.views = selection, oracle, {}

    def add(self, view: JobView) -> None:
        assert view.job not in self.views, "told once"
        self.views[view.job] = view
        self.selection.add(view)

    def remove(self, view: JobView) -> None:
        assert self.views.pop(view.job) is view, "the object that was added"
        self.selection.remove(view)

    def choose(self, device):
        chosen = self.selection.choose(device)
        assert chosen is self.oracle(device, list(self.views.values()))
        return chosen
