"""Whatever pieces cost: the chosen cut is legal, fits, moves no more than the largest shards, and is the same again."""

from itertools import accumulate, pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydra_tune.shard.cost.pilot import ShardCost
from hydra_tune.shard.cost.traffic_model import StepAccessPattern
from hydra_tune.shard.partition.shard_size_search import beside_copies, choose_packing

PIECE = st.tuples(st.integers(0, 400), st.integers(0, 50), st.integers(1, 200))  # weights, values, work


class Model:
    """Pieces in a row; a shard of several needs what they need, and its workspace adds up."""

    def __init__(self, pieces):
        self.pieces = pieces

    def measure(self, first, last):
        weights = sum(piece[0] for piece in self.pieces[first:last])
        work = sum(piece[2] for piece in self.pieces[first:last])
        return ShardCost(
            state_bytes=weights,
            value_bytes=self.pieces[first][1],
            handed_bytes=self.pieces[last][1] if last < len(self.pieces) else 0,
            optimizer_bytes=2 * weights,
            forward_workspace=work,
            backward_workspace=work + weights,
            update_workspace=0,
            first_update_workspace=0,
            trained_bytes=weights,
        )

    def pack(self, size):
        edges = [0]
        for end in range(1, len(self.pieces) + 1):
            if self.measure(end - 1, end).peak_bytes > size:
                return None
            if self.measure(edges[-1], end).peak_bytes > size:
                edges.append(end - 1)
        return [*edges, len(self.pieces)]


@example(pieces=[(0, 0, 1), (0, 2, 1)], share=1.0, habits=StepAccessPattern(waits=False, sends_ahead=False))
@settings(deadline=None, max_examples=40)
@given(
    pieces=st.lists(PIECE, min_size=2, max_size=12),
    share=st.floats(0, 1),
    habits=st.builds(StepAccessPattern, waits=st.booleans(), sends_ahead=st.booleans()),
)
def test_a_choice_is_legal_fits_and_is_never_expected_to_move_more(pieces, share, habits):
    model = Model(pieces)
    least = max(model.measure(i, i + 1).peak_bytes for i in range(len(pieces)))
    whole = model.measure(0, len(pieces)).peak_bytes
    # A piece that hands a value over may need more than all pieces together.
    budget = int(least + share * max(0, whole - least))
    largest = model.pack(budget)
    choice = choose_packing(largest, model.pack, model.measure, budget, habits)
    edges = choice.packing.edges
    assert (edges[0], edges[-1]) == (0, len(pieces))
    assert list(edges) == sorted(set(edges))
    assert max(model.measure(a, b).peak_bytes for a, b in pairwise(edges)) == choice.packing.peak_bytes <= budget
    assert choice.tried[0].edges == tuple(largest)
    assert choice.packing.step_bytes <= choice.tried[0].step_bytes
    assert choice.packing in choice.tried
    assert [one.peak_bytes for one in choice.tried] == list(accumulate((o.peak_bytes for o in choice.tried), min))
    assert choose_packing(largest, model.pack, model.measure, budget, habits) == choice


def test_the_fewest_shards_of_those_that_move_about_as_little():
    """A single shard has room, but its optimizer state leaves; three, four and eight shards move nothing."""
    model = Model([(100, 0, 10)] * 8)
    choice = choose_packing(model.pack(3_200), model.pack, model.measure, 3_200)
    assert (choice.tried[0].num_shards, choice.tried[0].step_bytes) == (1, 3_200)
    assert [one.num_shards for one in choice.tried if not one.step_bytes] == [3, 4, 8]
    assert choice.packing.num_shards == 3
    assert choice.reason.startswith("3 shards of up to ")


def test_nothing_smaller_is_tried_where_nothing_moves():
    model = Model([(100, 0, 10)] * 8)
    choice = choose_packing(model.pack(10_000), model.pack, model.measure, 10_000)
    assert [(one.num_shards, one.step_bytes) for one in choice.tried] == [(1, 0)]
    assert choice.packing is choice.tried[0]


def test_smaller_shards_are_chosen_where_they_save_something_and_the_reason_says_what():
    model = Model([(100, 4, 60)] * 16)
    budget = int(0.6 * model.measure(0, 16).peak_bytes)
    choice = choose_packing(model.pack(budget), model.pack, model.measure, budget, StepAccessPattern(sends_ahead=False))
    assert choice.packing.num_shards > choice.tried[0].num_shards
    assert choice.packing.step_bytes < 0.9 * choice.tried[0].step_bytes
    assert f"{choice.packing.num_shards} shards of up to" in choice.reason
    assert f"with {choice.tried[0].num_shards} of up to" in choice.reason


def sizes(model, edges):
    return [model.measure(first, last).peak_bytes for first, last in pairwise(edges)]


def test_beside_copies_a_shard_takes_half_the_device():
    model = Model([(100, 4, 60)] * 16)
    budget = int(0.6 * model.measure(0, 16).peak_bytes)
    largest = model.pack(budget)
    edges = beside_copies(largest, model.pack, model.measure, budget)
    assert max(sizes(model, largest)) > budget / 2 >= max(sizes(model, edges))
    assert edges == model.pack(budget // 2)


def test_beside_copies_a_part_of_more_than_half_the_device_has_the_next_share():
    model = Model([*[(100, 4, 60)] * 15, (100, 4, 700)])
    budget = int(model.measure(15, 16).peak_bytes / 0.55)
    edges = beside_copies(model.pack(budget), model.pack, model.measure, budget)
    assert model.pack(budget // 2) is None
    assert edges == model.pack(int(0.6 * budget))


def test_the_largest_shards_stay_where_no_part_is_smaller_or_nothing_moves():
    model = Model([(100, 4, 60)] * 2)
    for budget in (int(model.measure(0, 1).peak_bytes / 0.9), 10_000):
        largest = model.pack(budget)
        assert beside_copies(largest, model.pack, model.measure, budget) == largest


def test_shards_are_larger_than_half_the_device_where_those_would_move_many_more_bytes():
    """Large values cross each cut."""
    model = Model([(50, 200, 50)] * 8)
    budget = int(0.7 * model.measure(0, 8).peak_bytes)
    assert len(model.pack(budget // 2)) == 8
    edges = beside_copies(model.pack(budget), model.pack, model.measure, budget)
    assert edges in (model.pack(budget), *(model.pack(int(budget * share)) for share in (0.6, 0.7, 0.8)))
    assert len(edges) < 8
