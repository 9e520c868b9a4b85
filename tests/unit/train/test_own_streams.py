"""Python's and numpy's functions draw from the stream of the thread that calls them, and from no other's, bit for bit."""

# ruff: noqa: NPY002 - the global functions are what is tested

import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_tune.errors import TaskError
from hydra_tune.train.rng import own_numpy
from hydra_tune.train.rng.rng_streams import RandomStreams

ROOT = Path(__file__).parents[3]
NUMPY_CALLS = [
    ("beta", 1, 1),
    ("binomial", 9, 0.5), ("bytes", 3), ("chisquare", 1), ("choice", 5), ("dirichlet", [1, 2]), ("exponential",),
    ("f", 1, 2), ("gamma", 1), ("geometric", 0.5), ("get_state",), ("gumbel",), ("hypergeometric", 3, 4, 5), ("laplace",),
    ("logistic",), ("lognormal",), ("logseries", 0.5), ("multinomial", 4, [0.5, 0.5]), ("multivariate_normal", [0], [[1]]),
    ("negative_binomial", 4, 0.5), ("noncentral_chisquare", 2, 3), ("noncentral_f", 2, 3, 4), ("normal",), ("pareto", 1),
    ("permutation", 4), ("poisson",), ("power", 2), ("rand",), ("rand", 700), ("randint", 4), ("randn",), ("randn", 5),
    ("random",), ("random_sample",), ("rayleigh",), ("standard_cauchy",), ("standard_exponential",), ("standard_gamma", 2),
    ("standard_normal",), ("standard_t", 3), ("triangular", 1, 2, 3), ("uniform",), ("vonmises", 0, 1), ("wald", 1, 1),
    ("weibull", 1), ("zipf", 2), ("randn",), ("get_state", False), ("seed", 4), ("randn", 3), ("get_state",), ("seed",
    [3, 4]), ("randn",), ("set_state", np.random.RandomState(3).get_state()), ("rand",), ("randn",),
]  # fmt: skip
PYTHON_CALLS = [
    ("random",), ("gauss", 0, 1), ("uniform", 1, 2), ("triangular",), ("randint", 1, 9), ("choice", range(9)), ("randrange", 9),
    ("sample", range(9), 3), ("choices", range(9)), ("normalvariate", 0, 1), ("lognormvariate", 0, 1), ("expovariate", 1),
    ("vonmisesvariate", 0, 1), ("gammavariate", 2, 1), ("betavariate", 1, 2), ("paretovariate", 1), ("weibullvariate", 1, 2),
    ("getrandbits", 70), ("randbytes", 5), ("getstate",), ("gauss", 0, 1), ("gauss", 0, 1), ("seed", "abc"), ("random",),
    ("gauss", 0, 1), ("setstate", random.Random(3).getstate()), ("random",), ("gauss", 0, 1), ("getstate",), ("seed", 3),
]  # fmt: skip


@pytest.fixture(autouse=True)
def process_streams() -> Iterator[None]:
    """The process's are put back."""
    RandomStreams(0)
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def plain(value: Any) -> Any:
    """To be compared with `==`."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", ["numpy", "python"])
def test_threads_that_draw_in_turns_draw_what_each_draws_alone(name):
    """Two trials and a thread that works for none, by every function, with normal numbers kept; each its own way on."""
    functions, own, calls = {
        "numpy": (np.random, np.random.RandomState, NUMPY_CALLS),
        "python": (random, random.Random, PYTHON_CALLS),
    }[name]
    meet, wrong = threading.Barrier(3, timeout=60), []

    def draw(number: int) -> None:
        reference = own(number)
        for place in range(len(calls)):
            what, *args = calls[(place + 7 * number) % len(calls)]
            meet.wait()
            found = getattr(functions, what)(*args)
            if plain(found) != plain(getattr(reference, what)(*args)):
                wrong.append((number, what))

    def run(number: int) -> None:
        if not number:
            functions.seed(0)
            draw(0)
            return
        with RandomStreams(number).everything():
            draw(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not meet.broken
    assert not wrong


def test_streams_inside_streams_and_what_was_there_before():
    outer, inner = RandomStreams(1), RandomStreams(2)
    random.seed(0)
    np.random.seed(0)
    found = [[], [], []]

    def draw(number: int) -> None:
        found[number] += [random.gauss(0, 1), np.random.randn(), random.random()]

    for _ in range(3):
        draw(0)
        with outer.everything():
            draw(1)
            with inner.everything():
                draw(2)
            with outer.everything():
                draw(1)
            draw(1)
    for number, numbers in enumerate(found):
        python, numpy = random.Random(number), np.random.RandomState(number)
        expected = [way() for _ in numbers[::3] for way in (lambda p=python: p.gauss(0, 1), numpy.randn, python.random)]
        assert numbers == expected


def test_streams_and_generators_of_ones_own_are_nobody_elses():
    mine = np.random.RandomState(1), np.random.default_rng(2), random.Random(3)
    same = np.random.RandomState(1), np.random.default_rng(2), random.Random(3)
    streams = RandomStreams(4)
    before = streams.state()
    with streams.everything():
        found = [[each.normal(), each.random()] for each in mine[:2]] + [mine[2].gauss(0, 1)]
    assert found == [[each.normal(), each.random()] for each in same[:2]] + [same[2].gauss(0, 1)]
    assert plain(before["numpy"]) == plain(streams.state()["numpy"])
    assert before["python"] == streams.state()["python"]
    assert type(mine[0]._bit_generator.lock) is type(np.random.MT19937().lock)


@pytest.mark.parametrize("count", [1, 2])
def test_a_state_is_as_the_modules_give_it_and_streams_go_on_from_there(count):
    """With a normal number kept, and without; of streams that were drawn from last, and not."""
    for is_last in (True, False):
        streams, other = RandomStreams(7), RandomStreams(8)
        numpy, python = np.random.RandomState(7), random.Random(7)
        with streams.everything():
            for _ in range(count):
                assert (np.random.randn(), random.gauss(0, 1)) == (numpy.randn(), python.gauss(0, 1))
        if not is_last:
            np.random.randn()
        state = streams.state()
        assert plain(state["numpy"]) == plain(numpy.get_state())
        assert [type(value) for value in state["numpy"]] == [type(value) for value in numpy.get_state()]
        assert state["python"] == python.getstate()
        with other.everything():
            np.random.randn()
        other.restore({**state, "python": python.getstate(), "numpy": numpy.get_state()})
        with other.everything():
            assert (np.random.randn(), random.gauss(0, 1)) == (numpy.randn(), python.gauss(0, 1))
        assert plain(streams.state()["numpy"]) == plain(state["numpy"])


@pytest.mark.parametrize(
    "way",
    [
        lambda: torch.rand(1), lambda: torch.manual_seed(1), lambda: torch.set_rng_state(torch.get_rng_state()),
        lambda: torch.nn.functional.dropout(torch.ones(3)), torch.seed, lambda: torch.ones(3).bernoulli_(),
        random.random, lambda: random.gauss(0, 1), lambda: random.seed(1), lambda: random.setstate(random.getstate()),
        lambda: random.shuffle([1, 2]), lambda: random.getrandbits(3),
        np.random.rand, np.random.randn, lambda: np.random.seed(1), lambda: np.random.set_state(np.random.get_state()),
        lambda: np.random.shuffle([1, 2]), lambda: np.random.permutation(2),
    ],
)  # fmt: skip
def test_whatever_moves_a_stream_is_counted_where_it_is_drawn_from(way):
    streams, other = RandomStreams(1), RandomStreams(2)
    with streams.everything():
        before = streams.moves()
        way()
        assert streams.moves() > before
        before = streams.moves()
        torch.get_rng_state(), torch.initial_seed(), random.getstate()
        torch.rand(1, generator=torch.Generator()), random.Random().random(), np.random.default_rng().random()
        with other.everything():
            way()
    way()
    assert streams.moves() == before


class Interrupt(BaseException):
    """From outside, as Ctrl-C is."""


class Interrupting:
    """Raises where Python does: when a function begins and when a call to C has ended. Of `own_numpy.py`, at the n-th place."""

    def __init__(self, place: int) -> None:
        self.left = place

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "c_return") or frame.f_code.co_filename != own_numpy.__file__:
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise Interrupt


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_draw_that_is_interrupted_anywhere_has_drawn_nothing_and_keeps_nobody_from_drawing(ahead):
    """Between two threads' streams, of which both keep a normal number, or one."""
    streams, references = RandomStreams(1), [np.random.RandomState(number) for number in (0, 1)]
    np.random.seed(0)
    np.random.randn(ahead), references[0].randn(ahead)

    def draw(profile: Any = None) -> float:
        with streams.everything():
            sys.setprofile(profile)
            try:
                return np.random.randn()
            finally:
                sys.setprofile(None)

    places = 0
    for place in itertools.count(1):
        assert np.random.randn() == references[0].randn()
        interrupting = Interrupting(place)
        try:
            found = draw(interrupting)
        except Interrupt:
            places += 1
            assert not own_numpy._LOCK._is_owned()
            found = draw()
        assert found == references[1].randn()
        if interrupting.left > 0:  # the draw has no such place
            break
    assert places > 9


def test_a_trial_cannot_have_another_kind_of_stream():
    bits = np.random.get_bit_generator()
    with RandomStreams(1).everything(), pytest.raises(TaskError, match="bit generator of your own"):
        np.random.set_bit_generator(np.random.PCG64(1))
    assert np.random.get_bit_generator() is bits


def test_a_program_that_has_taken_the_functions_before_they_were_routed_and_its_children():
    """See there."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests/support/routed.py"],
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


def test_who_takes_numpys_bit_generator_draws_from_the_threads_own_stream():
    """As `scipy.stats.sampling` does, and a `Generator` made of the legacy one."""
    before = np.random.get_state()
    streams = RandomStreams(3)
    with streams.everything():
        drawn = np.random.default_rng(np.random.mtrand._rand).random(4)
    expected = np.random.RandomState(3)
    assert drawn.tolist() == np.random.default_rng(expected).random(4).tolist()
    after = np.random.get_state()
    assert (before[1] == after[1]).all()
    assert before[2:] == after[2:]
