"""`GroupResizePolicy`: decide how many slots a group has, from step to step.

`GroupTrial` (`group_trial.py`) asks `GroupResizePolicy` between two steps, before new members join, and tells of each computed
batch. `LiveGroup` (`pool/fusion/live_group.py`) and `PairTrial` (`fusion/runtime/pair_trial.py`) may lower `most` through
`GroupTrial`, on any thread; the policy has no lock. The policy must not know whether the plans for a size are ready.
"""

_PATIENCE_STEPS = 16


class GroupResizePolicy:
    """Decides when a group gains or loses slots.

    New sizes are powers of two, which keeps the number of plans small, or the largest permitted size. A group is to grow as
    soon as a member waits without a vacant slot, and to shrink only if no member waits and at least half of its slots
    have been vacant for `_PATIENCE_STEPS` batches: an ended trial is often followed by a new trial, and resizing the
    stack twice would gain nothing.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._quiet_steps = 0

    def computed(self, size: int, taken: int) -> None:
        """Note that a batch has been computed with `taken` of `size` slots occupied."""
        self._quiet_steps = self._quiet_steps + 1 if 2 * taken <= size else 0

    def wanted(self, size: int, taken: int, waiting: int) -> int:
        """Return the size that the group should have."""
        if taken + waiting > size:
            # `most` may have been lowered below the present size; a group never evicts members.
            return max(size, min(self.most, _power_of_two(taken + waiting)))
        if taken and not waiting and self._quiet_steps >= _PATIENCE_STEPS and 2 * taken <= size:
            return _power_of_two(taken)
        return size

    def changed(self) -> None:
        """Note that the group has been resized."""
        self._quiet_steps = 0


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
