"""Algorithms D, E and F, and the lineages that they keep: what recomputing costs, and what a decision changes for others."""

import pytest

from hydra_tune.planner.ir.lineage import FeatureMapLineage, holds, lineage
from hydra_tune.planner.ir.plan_state import SubArrayDecisions
from hydra_tune.planner.passes.candidates import candidates_of, updated_candidates
from hydra_tune.planner.passes.recompute_updates import can_join, updated_recomputations
from tests.unit.planner.hand import array, chain, op


def test_a_map_is_made_again_of_the_nearest_ones_kept():
    assert lineage(chain(4), "z2") == FeatureMapLineage(frozenset(["z1"]), frozenset([2]))
    assert lineage(chain(4), "z0") == FeatureMapLineage(frozenset(), frozenset([0]))


def test_what_the_backward_does_not_use_is_made_again_on_the_way():
    made = array([op("a"), op("t", reads=["a"]), op("b", reads=["t"])], [op("d", reads=["a", "b"])], {})
    assert lineage(made, "b") == FeatureMapLineage(frozenset(["a"]), frozenset([1, 2]))
    found = candidates_of(made, 0)["b"]
    assert (found.seconds, found.total_seconds) == (2.0, 2.0)  # `t` and `b`, a second each


def test_what_is_overwritten_in_place_is_made_again_with_its_overwriting():
    forward = [op("a"), op("relu_", reads=["a"], makes=(), writes=["a"])]
    assert lineage(array(forward, [op("d", reads=["a"])], {}), "a") == FeatureMapLineage(frozenset(), frozenset([0, 1]))


def test_random_numbers_are_never_drawn_again():
    drawn = array([op("m", is_random=True), op("a", reads=["m"])], [op("d", reads=["a"])], {})
    assert lineage(drawn, "a") is None
    kept = array([op("m", is_random=True), op("a", reads=["m"])], [op("d", reads=["a", "m"])], {})
    assert lineage(kept, "m") is None
    assert lineage(kept, "a") == FeatureMapLineage(frozenset(["m"]), frozenset([1]))


def test_running_statistics_are_left_alone_the_second_time_and_other_writes_forbid_it():
    def norm(repeated):
        return array(
            [op("a"), op("n", reads=["a", "mean"], writes=["mean"], repeated=repeated)], [op("d", reads=["n"])], {}
        )

    assert lineage(norm(["mean"]), "n") is not None
    assert lineage(norm([]), "n") is None


def test_nothing_is_made_of_what_has_been_overwritten_since():
    forward = [op("a"), op("b", reads=["a"]), op("relu_", reads=["a"], makes=(), writes=["a"])]
    assert lineage(array(forward, [op("d", reads=["a", "b"])], {}), "b") is None


@pytest.mark.parametrize(("update_first", "expected"), [(True, False), (False, True)])
def test_nothing_is_made_of_a_parameter_that_has_been_updated(update_first, expected):
    update, use = op("u", makes=(), reads=["w"], writes=["w"]), op("d", reads=["a"])
    backward = [update, use] if update_first else [use, update]
    assert (lineage(array([op("a", reads=["w"])], backward, {}), "a") is not None) is expected


def test_the_overhead_is_of_all_times_that_a_map_is_computed_again():
    candidate = candidates_of(chain(3), 0)["z1"]
    assert candidate.total_seconds == 1.0
    candidate.total_seconds = 3.0
    assert candidate.ratio == pytest.approx(4 / 3)


def decided(made, *names):
    """Decide to recompute maps one after the other, by Algorithms E and F."""
    candidates, decisions = candidates_of(made, 0), SubArrayDecisions()
    counts = []
    for name in names:
        one = candidates.pop(name)
        assert can_join(made, decisions, one)
        counts.append(updated_recomputations(made, decisions, one))
        decisions.recomputes[name] = one
        updated_candidates(made, decisions, one, counts[-1], candidates)
    return decisions, candidates, counts


def test_e_a_source_that_is_recomputed_is_replaced_by_its_own_sources():
    decisions, _, counts = decided(chain(5), "z2", "z1")
    later = decisions.recomputes["z2"]
    assert (later.sources, later.ops, later.seconds) == (frozenset(["z0"]), frozenset([1, 2]), 2.0)
    assert later.total_seconds == 2.0
    assert counts == [1, 2]


def test_e_a_source_that_is_there_anyhow_stays_a_source():
    """It has been recomputed for its own use before, and is used again later."""
    forward = [op("a"), op("b", reads=["a"]), op("rest", reads=["b"])]
    backward = [op("d0", reads=["a"]), op("d1", reads=["b"]), op("d2", reads=["a"])]
    made = array(forward, backward, {"a": 4, "b": 4})
    decisions, _, counts = decided(made, "b", "a")
    assert decisions.recomputes["b"].sources == frozenset(["a"])
    assert counts == [1, 1]


def test_f_candidates_behind_a_recomputed_map_take_its_sources():
    _, left, _ = decided(chain(5), "z1")
    assert (left["z2"].sources, left["z2"].seconds) == (frozenset(["z0"]), 2.0)
    assert left["z2"].ratio == 2.0


def test_f_candidates_before_a_recomputed_map_would_be_computed_for_it_too():
    _, left, _ = decided(chain(5), "z2")
    assert (left["z1"].seconds, left["z1"].total_seconds) == (1.0, 2.0)
    assert left["z0"].total_seconds == 1.0


def test_f_a_swapped_source_is_passed_over_unless_it_cannot_be_made_again():
    made = chain(4)
    candidates = candidates_of(made, 0)
    swapped = candidates.pop("z1")
    updated_candidates(made, SubArrayDecisions(swaps={"z1": 0}), swapped, 0, candidates)
    assert candidates["z2"].sources == frozenset(["z0"])
    mask = array([op("m", is_random=True), op("a", reads=["m"])], [op("d", reads=["a"]), op("e", reads=["m"])], {})
    candidates = candidates_of(array(mask.forward, mask.backward, {"m": 4, "a": 4}, copy={"m": 1.0}), 0)
    swapped = candidates.pop("m")
    updated_candidates(mask, SubArrayDecisions(swaps={"m": 0}), swapped, 0, candidates)
    assert candidates["a"].sources == frozenset(["m"])
    assert candidates["a"].can_recompute


def test_what_cannot_be_recomputed_where_others_need_it_is_not():
    """A recomputation of `b` through `a` would read a parameter that has been updated by then."""
    forward = [op("a", reads=["w"]), op("b", reads=["a"])]
    backward = [op("d0", reads=["a"]), op("u", makes=(), reads=["w"], writes=["w"]), op("d1", reads=["b"])]
    made = array(forward, backward, {"a": 4, "b": 4})
    candidates = candidates_of(made, 0)
    assert candidates["a"].can_recompute
    assert not holds(made, frozenset([0, 1]), 2)
    assert not can_join(made, SubArrayDecisions(recomputes={"b": candidates["b"]}), candidates["a"])


def test_what_is_made_again_beside_a_source_is_not_taken_for_the_source_which_was_overwritten_since():
    """One operator makes `a` and `b`, and `b` is rectified. With `a` swapped, `c` would be made of both as they were first."""
    forward = [op("a", makes=("a", "b")), op("b_", reads=["b"], makes=(), writes=["b"]), op("c", reads=["a", "b"])]
    backward = [op("d0", reads=["c"]), op("d1", reads=["a", "b"])]
    made = array(forward, backward, {"a": 4, "b": 4, "c": 4}, copy={"a": 1.0, "b": 1.0, "c": 1.0})
    candidates = candidates_of(made, 0)
    assert candidates["c"].sources == frozenset(["a", "b"])
    swapped = candidates.pop("a")
    updated_candidates(made, SubArrayDecisions(swaps={"a": 0}), swapped, 0, candidates)
    assert (candidates["c"].sources, candidates["c"].ops) == (frozenset(["a", "b"]), frozenset([2]))
    assert not holds(made, frozenset([0, 2]), 0)
    assert holds(made, frozenset([0, 1, 2]), 0)


def test_what_is_small_and_what_the_step_leaves_behind_are_no_candidates():
    made = array(
        [op("a"), op("b"), op("c")], [op("d", reads=["a", "b", "c"])], {"a": 10_000, "b": 1, "c": 10_000}, results=["c"]
    )
    assert list(candidates_of(made, 0)) == ["a"]


def test_a_map_whose_copies_were_not_timed_is_recomputed_alone():
    made = array([op("a"), op("b")], [op("d", reads=["a", "b"])], {"a": 4, "b": 4}, copy={"b": 1.0})
    assert {name: one.can_swap for name, one in candidates_of(made, 0).items()} == {"a": False, "b": True}


def test_f_a_candidate_is_not_computed_for_a_recomputation_that_finds_it_there():
    """`a` is used at `d0` and `d2`: if it is recomputed it is there when `b` is, at `d1`; before `c`, at `d3`, it has gone."""
    forward = [op("a"), op("b", reads=["a"]), op("c", reads=["a"])]
    backward = [op("d0", reads=["a"]), op("d1", reads=["b"]), op("d2", reads=["a"]), op("d3", reads=["c"])]
    _, left, _ = decided(array(forward, backward, {"a": 4, "b": 4, "c": 4}), "b")
    assert left["a"].total_seconds == 1.0
    _, left, _ = decided(array(forward, backward, {"a": 4, "b": 4, "c": 4}), "b", "c")
    assert left["a"].total_seconds == 2.0


def test_an_update_by_the_very_operator_that_uses_a_map_comes_behind_its_recomputation():
    backward = [op("d", reads=["a", "w"], writes=["w"])]
    assert lineage(array([op("a", reads=["w"])], backward, {}), "a") is not None


def test_a_candidate_whose_recomputed_source_cannot_be_made_again_then_is_swapped_or_kept():
    """`b` is needed when a parameter has been updated that making `a` again would read, and `a` has gone by then."""
    forward = [op("a", reads=["w"]), op("b", reads=["a"])]
    backward = [op("d0", reads=["a"]), op("u", makes=(), reads=["w"], writes=["w"]), op("d1", reads=["b"])]
    _, left, _ = decided(array(forward, backward, {"a": 4, "b": 4}), "a")
    assert not left["b"].can_recompute


def test_sources_of_sources_that_have_gone_are_replaced_too():
    """`a` is there when `b` is made again for itself, and no longer when `b` is made again for `c`."""
    forward = [op("a"), op("b", reads=["a"]), op("c", reads=["b"])]
    backward = [op("d0", reads=["a"]), op("d1", reads=["b"]), op("d2", reads=["a"]), op("d3"), op("d4", reads=["c"])]
    decisions, _, _ = decided(array(forward, backward, {"a": 4, "b": 4, "c": 4}), "c", "a", "b")
    assert decisions.recomputes["b"].sources == frozenset(["a"])
    assert (decisions.recomputes["c"].sources, decisions.recomputes["c"].ops) == (frozenset(), frozenset([0, 1, 2]))
