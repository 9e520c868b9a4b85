"""What both processes have in common is found without running code of the objects that are looked at."""

import gc
import weakref

import pytest

from hydra_tune.isolation.sending import known_here, pickled, unpickled


class Lazy:
    @property
    def __class__(self):
        raise RuntimeError("looked at")


class Gone:
    pass


@pytest.mark.cases(1 / 3)
def test_dead_proxies_and_lazy_objects_are_let_be():
    target = Gone()
    kept = [weakref.proxy(target), Lazy()]
    del target
    gc.collect()
    known = known_here()
    assert all(id(one) not in known for one in kept)


def test_a_function_that_no_name_leads_to_is_sent_by_its_place():
    factor = 3
    scaled = [lambda value: factor * value]
    known = known_here()
    assert unpickled(pickled(scaled, known), known)[0] is scaled[0]


def test_what_the_program_has_frozen_is_known():
    scaled = [lambda value: 3 * value]
    gc.freeze()
    try:
        known = known_here()
        assert unpickled(pickled(scaled, known), known)[0] is scaled[0]
    finally:
        gc.unfreeze()
