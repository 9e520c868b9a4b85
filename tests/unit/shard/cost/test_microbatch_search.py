"""Which number of pieces is chosen, of what is foreseen for each."""

import re

import pytest

from hydra_tune.shard.cost.microbatch_search import StepCostEstimate, choose_count, divisors


class Probe:
    """Answers by a table or a rule, and remembers what it was asked."""

    def __init__(self, rule):
        self.rule = rule
        self.asked = []

    def __call__(self, count):
        self.asked.append(count)
        return self.rule(count)


def step(nbytes, seconds=None):
    return StepCostEstimate(num_shards=2, peak_bytes=100, step_bytes=nbytes, seconds=seconds)


def chosen(samples, table):
    """Of a table of bytes, or of bytes and seconds; what is not in it does not fit."""
    found = {count: step(*one) if isinstance(one, tuple) else step(one) for count, one in table.items()}
    return choose_count(samples, found.get).count


@pytest.mark.parametrize("samples", [1, 7, 12, 720])
def test_divisors_are_all_numbers_that_leave_pieces_alike(samples):
    found = divisors(samples)
    assert found == sorted({samples // count for count in found})
    assert [count for count in range(1, samples + 1) if samples % count == 0] == found


def test_nothing_else_is_looked_at_where_whole_batches_move_nothing():
    probe = Probe(lambda count: step(0, 1.0))
    assert choose_count(64, probe).count == 1
    assert probe.asked == [1]


@pytest.mark.parametrize("samples", [64, 97, 720])
def test_the_smallest_number_that_fits_is_found_and_no_number_asked_twice(samples):
    for most in range(1, samples + 1):
        probe = Probe(lambda count, most=most: step(1000, 1.0) if samples / count <= most else None)
        found = choose_count(samples, probe)
        assert found.count == min(count for count in divisors(samples) if samples / count <= most)
        assert found.fits
        assert len(probe.asked) == len(set(probe.asked))
        assert len(probe.asked) < 16


def test_where_none_fits_it_is_said_and_the_smallest_pieces_are_left():
    found = choose_count(12, lambda count: None)
    assert (found.count, found.fits) == (12, False)
    assert found.reason == "batches of 12 do not fit, not even in pieces of one sample"


def test_pieces_have_to_be_clearly_better_than_whole_batches():
    assert chosen(4, {1: 1000, 2: 910, 4: 910}) == 1
    assert chosen(4, {1: 1000, 2: 890, 4: 890}) == 2


def test_and_than_the_fewest_that_fit():
    assert chosen(8, {2: 1000, 4: 910, 8: 905}) == 2
    assert chosen(8, {2: 1000, 4: 800, 8: 800}) == 4


def test_of_numbers_about_as_good_the_smallest_is_taken():
    assert chosen(8, {1: 1000, 2: 510, 4: 500, 8: 499}) == 2
    assert chosen(8, {1: 1000, 2: 600, 4: 500, 8: 400}) == 8


def test_seconds_decide_where_they_are_known_and_bytes_elsewhere():
    assert chosen(4, {1: (1000, 1.0), 2: (100, 1.0), 4: (100, 1.2)}) == 1
    assert chosen(4, {1: (100, 2.0), 2: (1000, 1.0), 4: (1000, 1.0)}) == 2
    assert chosen(4, {1: (1000, 1.0), 2: 100, 4: 100}) == 2


def test_larger_numbers_are_given_up_after_two_that_do_no_better():
    probe = Probe(lambda count: step(1000, 1.0 + count))
    choose_count(1024, probe)
    assert probe.asked == [1, 2, 4]


def test_one_that_does_no_better_is_passed_over():
    assert chosen(8, {1: 1000, 2: 1000, 4: 500, 8: 500}) == 4


def test_a_number_beyond_that_does_not_fit_after_all_is_left_out():
    assert chosen(8, {1: 1000, 2: 500, 8: 500}) == 2


REASONS = {
    "whole": (
        {1: (2048, 0.5), 2: (2048, 0.5)},
        "whole batches: a step in 2 shards moves about 2.0 KiB; pieces would not make the step clearly shorter",
    ),
    "shorter": (
        {1: (4096, 0.5), 2: (0, 0.25)},
        "2 pieces of each batch of 4: a step in 2 shards moves nothing; whole batches would take",
    ),
    "must": (
        {2: (4096, 1.5)},
        "2 pieces of each batch of 4: a step in 2 shards moves about 4.0 KiB; whole batches would not fit",
    ),
    "more": ({2: (4096, 1.5), 4: (1024, 1.0)}, "4 pieces of each batch of 4: .*; fewer than 2 would not fit"),
}


@pytest.mark.parametrize("name", REASONS)
def test_it_says_why(name):
    table, expected = REASONS[name]
    choice = choose_count(4, {count: step(*one) for count, one in table.items()}.get)
    assert re.match(expected, choice.reason), choice.reason
    assert ("sums are rounded as with split_batches=" in choice.reason) == (choice.count > 1)
    assert choice.reason.count("does not fit") == sum(one is None for _, one in choice.tried)
    assert "500 ms" in choice.reason or "1.50 s" in choice.reason
