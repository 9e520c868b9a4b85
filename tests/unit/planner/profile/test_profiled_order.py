"""Algorithm A on a graph made by hand: in which order nodes and copies go, what is read off each, and Tables A and B of it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from hydra_tune.planner.profile.profiler import GraphMeasurements, array_of, measured
from hydra_tune.planner.profile.profiling_interpreter import ProfilingInterpreter
from tests.unit.planner.hand import array, op
from tests.unit.planner.passes.test_graph_rewrite import step as written

CPU = torch.device("cpu")
SQUARE = 4 * 4 * 4
"""Bytes of each of the graph's tensors but its loss."""


class Ones:
    """Noise that is none."""

    slot = None

    def draw(self, _generators, device):
        return torch.ones(4, 4, device=device)


def step():
    return replace(written(), noise=(Ones(),))


class Log:
    """A clock that notes what it is asked to time; of each it says what it is told, run by run."""

    def __init__(self, told=None):
        self.asked, self.made, self._told, self._found, self._runs = [], [], told or {}, {}, Counter()

    def timed(self, name, action):
        self.asked.append(name)
        self._found[name] = self._told.get(name, (0.0,) * 4)[self._runs[name]]
        self._runs[name] += 1
        return action()

    def seconds(self):
        found, self._found = self._found, {}
        return found

    def whole(self):
        return None

    def peak_beyond(self, made_bytes):
        self.made.append(made_bytes)
        return 100 * self._runs[self.asked[-1]] + made_bytes if self.asked[-1] == "dw" else 0


def run_of(made, clock):
    return ProfilingInterpreter(made, array_of("", made, GraphMeasurements()).maps, CPU, clock)


def test_maps_go_behind_their_last_use_in_the_forward_and_come_before_their_first_in_the_backward():
    """The rectifier's `r` and the `mask` are used last by `n`, and `n` by `y`; `dw` is the transpose of `n` times the gradient,
    so that `n` comes back before `nt`, `mask` before `dr` and `r` before `dh`. `h` and `y` are the forward's alone and stay."""
    clock = Log()
    run_of(step(), clock).once({})
    assert clock.asked == [
        "h", "r", "mask", "n", "out r", "out mask", "y", "out n", "loss",
        "g", "in n", "nt", "dw", "wt", "dn", "uw", "in mask", "dr", "in r", "dh", "xt", "dv", "uv",
    ]  # fmt: skip


def test_what_a_map_left_is_not_on_the_device_until_it_comes_back():
    made = step()
    run = run_of(made, clock := Log())
    seen = {}
    places = {node.name: place for place, node in enumerate(node for node in made.graph.nodes if node.op != "output")}
    take = clock.timed

    def timed(name, action):
        seen[name] = {one for one in ("r", "mask", "n") if run._values[places[one]] is not None}
        return take(name, action)

    clock.timed = timed
    run.once({})
    assert seen["y"] == {"n"}
    assert seen["loss"] == seen["g"] == set()
    assert seen["uw"] == set()  # `n` came back for its transpose, and went with it
    assert seen["dr"] == {"mask"}
    assert seen["dh"] == {"r"}


def test_of_each_node_and_copy_the_median_of_its_own_three_runs_counts():
    """The warm-up is the slowest of `h`, and the quickest of the copies."""
    told = {
        "h": (90.0, 3.0, 1.0, 2.0),
        "dv": (0.0, 5.0, 9.0, 7.0),
        "out r": (0.0, 4.0, 6.0, 5.0),
        "in r": (0.0, 8.0, 8.0, 1.0),
    }
    made = step()
    found = measured(made, CPU, Log(told))
    assert (found.seconds["h"], found.seconds["dv"], found.seconds["r"]) == (2.0, 7.0, 0.0)
    assert (found.out_seconds["r"], found.in_seconds["r"]) == (5.0, 8.0)
    assert found.out_seconds.keys() == found.in_seconds.keys() == {"r", "mask", "n"}
    assert found.seconds.keys() == {node.name for node in made.ops}


def test_memory_is_read_behind_each_node_beyond_what_it_makes_and_the_most_counts():
    """`h`, `r`, `mask`, `n` make 64 bytes each, `y` too, the loss 4; of four runs `dw` needs 100 bytes more in each."""
    clock = Log()
    found = measured(step(), CPU, clock)
    assert clock.made[:6] == [SQUARE, SQUARE, SQUARE, SQUARE, SQUARE, 4]
    assert clock.made[6:9] == [SQUARE, 0, SQUARE]  # `g`, the view `nt`, `dw`
    assert found.workspace_bytes["dw"] == 400 + SQUARE
    assert found.workspace_bytes["dv"] == 0


def test_tables_a_and_b_of_the_graph_by_hand():
    """Forward h 1, r 2, mask 3, n 4, y 5, loss 6 seconds; backward g 10, nt 20, dw 30, then one second each."""
    made = step()
    seconds = dict.fromkeys((node.name for node in made.ops), 1.0)
    seconds |= {"h": 1.0, "r": 2.0, "mask": 3.0, "n": 4.0, "y": 5.0, "loss": 6.0, "g": 10.0, "nt": 20.0, "dw": 30.0}
    profile = GraphMeasurements(
        seconds, {"dw": 7}, {"r": 0.1, "mask": 0.2, "n": 0.3}, {"r": 0.4, "mask": 0.5, "n": 0.6}
    )
    found = array_of("a", made, profile)
    assert [one.name for one in found.forward] == ["h", "r", "mask", "n", "y", "loss"]
    assert found.backward[2].name == "dw"
    assert (found.backward[2].seconds, found.backward[2].workspace_bytes) == (30.0, 7)
    assert [one.name for one in found.forward if one.is_random] == ["mask"]
    assert found.static_bytes == 3 * SQUARE  # x, v, w
    r, mask, n = found.maps.values()
    assert (r.name, mask.name, n.name) == ("r", "mask", "n")
    assert (r.made, r.last_forward, r.first_backward, r.last_backward) == (1, 3, 7, 7)
    assert (mask.made, mask.last_forward, mask.first_backward, mask.last_backward) == (2, 3, 6, 6)
    # The transpose of `n` is a view of it, which `dw` reads: `n` is used until then.
    assert (n.made, n.last_forward, n.first_backward, n.last_backward) == (3, 4, 1, 2)
    assert r.inactive_seconds == 5.0 + 6.0 + 10.0 + 20.0 + 30.0 + 4.0  # y, loss, g, nt, dw; wt, dn, uw, dr
    assert mask.inactive_seconds == r.inactive_seconds - 1.0  # not dr, which uses it
    assert n.inactive_seconds == 6.0 + 10.0  # loss, g
    assert (r.num_bytes, r.out_seconds, r.in_seconds) == (SQUARE, 0.1, 0.4)
    assert (n.out_seconds, n.in_seconds) == (0.3, 0.6)


@pytest.mark.parametrize(("forward", "last"), [([op("a"), op("b", reads=["a"])], 1), ([op("a"), op("b")], 0)])
def test_a_map_that_nothing_reads_in_the_forward_is_last_used_where_it_is_made(forward, last):
    made = array(forward, [op("d", reads=["a"])], {"a": 4})
    assert made.maps["a"].last_forward == last
    assert made.maps["a"].inactive_seconds == 1.0 - last


def test_a_map_that_is_overwritten_in_place_is_in_use_while_it_is():
    """Rank 2 overwrites `a`, and the update at rank 1 of the backward does."""
    forward = [op("a"), op("b", reads=["a"]), op("a_", reads=["a"], makes=(), writes=["a"]), op("end")]
    backward = [op("d", reads=["b"]), op("o", makes=(), writes=["a"]), op("e", reads=["a"])]
    (a, b) = array(forward, backward, {"a": 4, "b": 4}).maps.values()
    assert (a.last_forward, a.first_backward, a.last_backward) == (2, 1, 2)
    assert (b.last_forward, b.first_backward, b.last_backward) == (1, 0, 0)
