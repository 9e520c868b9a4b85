"""Figures of a pool, read while its threads count on."""

from tests.unit.pool.tasks import running


class CountedOn:
    """A kind of bytes that another thread counts a further kind beside, just as the kind is read."""

    def __init__(self, counts):
        self.counts = counts

    @property
    def value(self):
        self.counts[object()] += 1
        return "counted on"


def test_figures_are_read_while_a_device_counts_a_further_kind():
    with running() as pool:
        counts = pool._started()._pagers["cpu:0"].bytes_in
        counts[CountedOn(counts)] = 1
        assert pool.stats().devices["cpu:0"].bytes_in_by_kind == {"counted on": 1}
        counts.clear()
