from hydra_tune.schedule import ViewHeap
from tests.unit.schedule.policies.test_lrtf import view


def test_what_was_removed_does_not_pile_up():
    """Jobs that come back behind the first leave their old entries where no choice ever clears them."""
    heap = ViewHeap()
    heap.add(0.0, view("a", 1.0))
    for number in range(1, 10_000):
        other = view("b", 1.0)
        heap.add(float(number), other)
        heap.remove(other)
        assert heap.first().job == "a"
    assert len(heap) == 1
    assert len(heap._entries) < 100


def test_equal_numbers_are_in_order_of_submission_and_a_returning_job_is_where_it_belongs():
    heap = ViewHeap()
    views = [view(job, 1.0) for job in "cab"]
    for each in views:
        heap.add(1.0, each)
    heap.remove(views[1])
    assert heap.first().job == "b"
    heap.add(1.0, views[1])
    assert heap.first().job == "a"
    for each in views:
        heap.remove(each)
    assert heap.first() is None
