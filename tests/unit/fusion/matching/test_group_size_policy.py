"""How many trials are computed together follows from what steps were seen to take, and little is spent on finding out."""

import pytest

from hydra_tune.fusion.matching.group_size_policy import LEAST_GAIN, FusionStepTimes, chosen_size, next_size, sizes, why

MANY = 1e9


def timing(alone=1.0, drawing=0.0, **groups):
    return FusionStepTimes(
        alone_seconds=alone,
        drawing_seconds=drawing,
        group_seconds={int(name.removeprefix("n")): seconds for name, seconds in groups.items()},
    )


def settled(step, most, total=MANY):
    """All that is found out of trials whose groups of `n` take `step(n)` seconds, and the sizes in the order they are timed."""
    known, order = timing(step(1)), []
    while (size := next_size(known, most, total)) is not None:
        order.append(size)
        known = known.with_size(size, step(size))
        assert len(order) <= len(sizes(most)), "a size is timed twice"
    return known, order


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1, []), (2, [2]), (3, [3, 2]), (4, [4, 2]), (6, [6, 4, 2]), (16, [16, 8, 4, 2]), (17, [17, 16, 8, 4, 2])],
)
def test_sizes_are_what_there_is_and_the_powers_of_two_below(most, expected):
    assert sizes(most) == expected


@pytest.mark.parametrize(
    ("seconds", "gain"), [(4.0, 1.0), (2.0, 2.0), (8.0, 0.5)], ids=["as alone", "twice as fast", "half as fast"]
)
def test_the_gain_is_of_a_step_of_one_member(seconds, gain):
    assert timing(n4=seconds).gain(4) == pytest.approx(gain)


def test_what_every_member_does_for_itself_is_part_of_both():
    """Stacking takes nothing at all, and still half of the step stays."""
    assert timing(drawing=1.0, n4=0.0).gain(4) == pytest.approx(2.0)


def test_a_size_between_two_that_were_timed_is_known_and_one_beyond_is_not():
    seen = timing(n4=2.0, n8=4.0)
    assert seen.seconds(6) == pytest.approx(3.0)
    assert seen.gain(12) is None
    assert seen.expected_gain(16) == pytest.approx(16 / 8.0)


def test_the_largest_size_that_gains_is_chosen():
    seen = timing(n2=1.0, n4=2.0, n8=8.0)
    assert chosen_size(seen, 8, MANY) == 4
    assert chosen_size(seen, 4, MANY) == 4
    assert chosen_size(seen, 2, MANY) == 2


@pytest.mark.parametrize(("gain", "size"), [(LEAST_GAIN + 0.01, 4), (LEAST_GAIN - 0.01, 1)])
def test_a_gain_that_is_too_small_is_left(gain, size):
    assert chosen_size(timing(n4=4 / gain), 4, MANY) == size


def test_few_steps_do_not_make_up_for_what_a_group_costs_at_first():
    seen = timing(n4=1.0)
    assert chosen_size(seen, 4, 1000) == 4
    assert chosen_size(seen, 4, 20) == 1


def test_nothing_is_chosen_of_what_was_not_timed():
    assert chosen_size(timing(), 8, MANY) == 1
    assert chosen_size(timing(n2=0.5), 8, MANY) == 2


def test_a_size_that_gains_at_once_is_the_only_one_that_is_timed():
    known, order = settled(lambda count: 1.0 + 0.01 * count, 16)
    assert order == [16]
    assert chosen_size(known, 16, MANY) == 16


def test_where_the_largest_does_not_gain_smaller_ones_are_timed_as_long_as_that_is_better():
    """Caches hold four members, not eight."""
    known, order = settled(lambda count: 0.5 + 0.25 * count if count <= 4 else count * 0.85, 8)
    assert order == [8, 4]
    assert chosen_size(known, 8, MANY) == 4


def test_what_is_hopeless_at_a_large_size_is_given_up():
    known, order = settled(lambda count: 1.5 * count if count > 1 else 1.0, 16)
    assert order == [16]
    assert chosen_size(known, 16, MANY) == 1


def test_what_gets_no_better_is_given_up():
    known, order = settled(lambda count: 1.0 * count, 16)
    assert order == [16, 8]
    assert chosen_size(known, 16, MANY) == 1


@pytest.mark.parametrize(
    ("seconds", "first"), [(200.0, None), (700.0, 2), (1500.0, 4), (3000.0, 8), (6000.0, 16), (MANY, 16)]
)
def test_a_small_group_is_first_where_a_large_one_would_cost_too_much(seconds, first):
    """At the worst four steps of a group take as long as four of each member, and two thirds more."""
    assert next_size(timing(), 16, seconds) == first


def test_what_has_been_seen_says_what_a_larger_one_costs():
    """Four that lose: eight would take 4 steps of 9 seconds."""
    seen = timing(n4=4.5)
    assert next_size(seen, 16, 1900.0) == 8
    assert next_size(seen, 16, 1900.0, 10.0) is None
    assert next_size(seen, 16, 1700.0) is None


def test_more_is_spent_where_a_gain_is_expected():
    """Two and four gain 2 and 4, so that sixteen are worth 4 steps of 4 seconds."""
    assert next_size(timing(n4=1.0), 16, 170.0) == 16
    assert next_size(timing(n4=1.0), 16, 100.0) == 8
    assert next_size(timing(n4=1.0), 16, 50.0) is None


def test_small_groups_that_lose_say_by_a_line_that_large_ones_will_gain():
    """Two lose, since a group's step begins at 0.8 or more, and with one more it takes less than one alone."""
    assert next_size(timing(n2=2.1), 4, MANY) == 4
    assert next_size(timing(n2=2.1, n4=3.9), 16, MANY) is None  # on their line sixteen gain 1.09
    assert next_size(timing(n2=2.1, n4=3.4), 16, MANY) == 16


def test_no_more_is_spent_than_a_twentieth_whatever_groups_take():
    """But for what those gain that are computed together."""
    for slope in (0.05, 0.3, 0.5, 0.9, 1.0, 1.5):
        for total in (100.0, 500.0, 1000.0, 3000.0, 10_000.0):
            spent, known = 0.0, timing()
            while (size := next_size(known, 16, total, spent)) is not None:
                seconds = 0.8 + slope * size
                spent += 4 * seconds
                known = known.with_size(size, seconds)
            size = chosen_size(known, 16, total)
            saved = total * (1 - 1 / (known.gain(size) or 1.0)) if size > 1 else 0.0
            assert spent <= 0.05 * total + saved, (slope, total)


def test_the_choice_is_told_with_its_numbers():
    seen = timing(1e-3, 2e-4, n8=2e-3)
    told = why(seen, 8, 10)
    assert "8 of 10" in told
    assert "1 ms alone" in told
    assert "0.25 ms each (2.67x)" in told
    assert "0.2 ms for drawing" in told
    assert f"{LEAST_GAIN}x" in why(seen, 1, 10)
