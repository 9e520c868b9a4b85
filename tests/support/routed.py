"""A program that has taken functions of `random` and `numpy.random` wherever a program may, before anybody routes them.

Run alone. It needs neither torch nor pytest, and says nothing unless something is wrong.
"""

# ruff: noqa: NPY002 - the global functions are what is tested

import copy
import multiprocessing
import os
import pickle
import random
import signal
import threading
from contextlib import contextmanager, nullcontext
from random import gauss, getrandbits, getstate, seed, setstate, shuffle
from random import random as uniform

import numpy as np
from numpy.random import get_bit_generator, get_state, randn, set_bit_generator, set_state

from hydra_tune.train.rng import own_numpy, own_python


class Holder:
    of_class = uniform

    def __init__(self):
        self.of_object = uniform


def closure():
    mine = uniform
    return lambda: mine()  # noqa: PLW0108 - what is called is to be looked up then


HOLDER, ENCLOSED, LISTED, NAMED = Holder(), closure(), [uniform], {"it": uniform}


def everywhere():
    """One number by each."""
    ways = [
        uniform,
        HOLDER.of_class,
        HOLDER.of_object,
        Holder.of_class,
        ENCLOSED,
        LISTED[0],
        NAMED["it"],
        random.random,
    ]
    return [way() for way in ways]


def numbers():
    """Numbers of all kinds, an odd count of normal ones."""
    order = list(range(9))
    shuffle(order)
    return [*everywhere(), order, getrandbits(70), gauss(0, 1), randn(), np.random.rand(2).tolist()]


def states():
    name, key, *rest = get_state()
    return getstate(), (name, key.tobytes(), *rest)


@contextmanager
def streams(number):
    python, numpy = own_python.PythonStream(number), own_numpy.NumpyStream.of_seed(number)
    tokens = [python.become_own(), numpy.become_own()]
    try:
        yield python, numpy
    finally:
        for token in tokens:
            token.var.reset(token)


def expected(number, count):
    """What a process gives that has seeded, after so many times."""
    seed(number)
    np.random.seed(number)
    found = [numbers() for _ in range(count)]
    return found, states()


def in_thread(run):
    found = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def check_threads(plain):
    """Each has its own, whatever is drawn, kept, seeded and set beside."""
    seed(1)
    np.random.seed(1)
    with streams(2) as (python, _):
        moves = python.moves
        found = []
        for turn in range(3):
            found.append((in_thread(numbers), numbers()))
            kept = states()
            seed(turn)
            np.random.seed(turn)
            gauss(0, 1)
            randn()
            setstate(kept[0])
            set_state((kept[1][0], np.frombuffer(kept[1][1], np.uint32), *kept[1][2:]))
        assert python.moves > moves
        assert [mine for _, mine in found] == plain[2][0]
        assert states() == plain[2][1]
    assert [theirs for theirs, _ in found] == plain[1][0]
    assert states() == plain[1][1]


def check_copies():
    assert copy.deepcopy(uniform) is uniform
    assert copy.copy(getrandbits) is getrandbits
    with streams(5):
        before = states()
        for function in (uniform, gauss, getrandbits, getstate, randn, get_state, np.random.mtrand._rand):
            pickle.loads(pickle.dumps(function))
            copy.deepcopy(function)
        assert states() == before
        again = pickle.loads(pickle.dumps(uniform))
        assert type(again.__self__) is random.Random
        assert again() == uniform()
        assert pickle.loads(pickle.dumps(randn))() == randn()
        assert copy.deepcopy(np.random.mtrand._rand).rand() == np.random.rand()


def check_bit_generators():
    """The process's may be replaced, at once and for other threads alone."""
    mine = np.random.PCG64(3)
    with streams(5):
        theirs = get_bit_generator()
        expected = np.random.RandomState(5).rand(3)
        in_thread(lambda: set_bit_generator(mine))
        assert get_bit_generator() is theirs
        assert (np.random.rand(3) == expected).all()
    assert get_bit_generator() is mine
    assert np.random.rand() == np.random.Generator(np.random.PCG64(3)).random()
    np.random.seed(4)
    assert np.random.rand() == np.random.Generator(np.random.PCG64(4)).random()
    set_bit_generator(np.random.MT19937(1))
    np.random.seed(6)
    assert np.random.rand() == np.random.RandomState(6).rand()


def of_child():
    """Where Python's stream begins, and numpy's next number."""
    return getstate(), randn()


def send(pipe):
    pipe.send(of_child())


def check_children():
    """A forked one has its thread's numpy stream, and one of Python's that nobody else has, as without routing."""
    seed(3)
    np.random.seed(3)
    randn()
    for around in (streams(4), nullcontext()):
        with around:
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                os.write(writer, pickle.dumps(of_child()))
                os._exit(0)
            os.waitpid(child, 0)
            of_python, of_numpy = pickle.loads(os.read(reader, 1 << 16))
            assert of_python != getstate()
            assert of_numpy == randn()
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with streams(4):
            reader, writer = context.Pipe()
            process = context.Process(target=send, args=(writer,))
            process.start()
            assert reader.poll(60)
            assert reader.recv()[0] != getstate()
            process.join()


def check_children_of_busy_processes():
    """While another thread is drawing: nobody goes on with that in a child, which can draw all the same."""
    is_over = threading.Event()

    def draw():
        while not is_over.is_set():
            np.random.rand(1_000_000)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if not child:
                signal.alarm(60)  # ends it
                randn()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        thread.join()


def main():
    plain = {number: expected(number, 3) for number in (1, 2)}
    python, numpy = random.Random(8), np.random.RandomState(8)
    seed(8)
    np.random.seed(8)
    assert (gauss(0, 1), randn()) == (python.gauss(0, 1), numpy.randn())
    for _ in range(2):
        own_python.replace_everywhere(own_python.install() | own_numpy.install())
    assert uniform is random.random
    for _ in range(3):
        assert (gauss(0, 1), randn()) == (python.gauss(0, 1), numpy.randn()), "what was kept before is kept"
    check_threads(plain)
    check_copies()
    check_bit_generators()
    check_children()
    check_children_of_busy_processes()


if __name__ == "__main__":
    main()
