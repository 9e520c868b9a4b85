"""How many places a group has, from step to step."""

_PATIENCE_STEPS = 16


class Sizes:
    """Says when a group is to have more places, or fewer.

    Sizes are powers of two, so that there are few plans, or the most that there may be. A group grows as soon as somebody waits
    for whom there is no place. It shrinks when half of its places or more have been vacant for some steps: one that ends
    is often followed by another, and a stack that changes its size twice would have gained nothing.

    Args:
        most: places that there may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._quiet_steps = 0

    def computed(self, size: int, taken: int) -> None:
        """A step is over, in which so many places were taken."""
        self._quiet_steps = self._quiet_steps + 1 if 2 * taken <= size else 0

    def wanted(self, size: int, taken: int, waiting: int) -> int:
        """The size that a group should have.

        Args:
            size: that it has.
            taken: places taken.
            waiting: members that would come.
        """
        if taken + waiting > size:
            return max(size, min(self.most, _power_of_two(taken + waiting)))
        if taken and not waiting and self._quiet_steps >= _PATIENCE_STEPS and 2 * taken <= size:
            return _power_of_two(taken)
        return size

    def changed(self) -> None:
        """The group has another size now."""
        self._quiet_steps = 0


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
