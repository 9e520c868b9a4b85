"""Which block makes room: bytes moved by three rules, by trials that take turns on one device. Pure Python, no torch.

    last used   what has not been used for longest goes
    pager       the rule of `hydra_tune.memory.pager`: what is needed last, as far as that is known from a step's course
    future      what is needed last by what really comes: no rule moves less by much

A trial's step is F0 .. F(K-2), then B(K-1) U(K-1) .. B0 U0. Parameters of a shard count 1, its optimizer state 2; an update
changes both. One to four trials take turns after each unit, each half step, or every two steps (in a row, or the longest first,
as `lrtf` does). Printed are the bytes that are loaded again or written back in a step, over the state of all trials.

    python benchmarks/victims.py
"""

import argparse
import random
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator

NUM_SHARDS, NUM_STEPS = 6, 20
UNITS = 3 * NUM_SHARDS - 1
SHARES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)

Piece = tuple[str, int, int]
"""Kind, trial, shard."""
Use = tuple[list[Piece], bool]
"""What a unit needs, and whether it changes it."""


def step(trial: int) -> Iterator[Use]:
    """The units of a trial's step."""
    for shard in range(NUM_SHARDS - 1):
        yield [("parameters", trial, shard)], False
    for shard in reversed(range(NUM_SHARDS)):
        yield [("parameters", trial, shard)], False
        yield [("parameters", trial, shard), ("optimizer", trial, shard)], True


def course(num_trials: int, turn: int, *, longest_first: bool) -> list[Use]:
    """Units of all trials, who take turns after so many."""
    left = [[use for _ in range(NUM_STEPS) for use in step(trial)] for trial in range(num_trials)]
    drawn, found, following = random.Random(1), [], 0
    while any(left):
        if longest_first:
            trial = max(range(num_trials), key=lambda number: len(left[number]) + drawn.random() * turn)
        else:
            trial, following = following, (following + 1) % num_trials
        found += left[trial][:turn]
        del left[trial][:turn]
    return found


class Run:
    """A device with room for so much, and what is moved when units come in a given order."""

    def __init__(self, units: list[Use], room: float, rule: Callable[["Run", list[Piece]], Piece]) -> None:
        self.used: dict[Piece, int] = {}  # what is there, and when it was used last
        self.uses: dict[Piece, list[int]] = {}
        self.now = 0
        self.trial = 0
        for now, (needed, _) in enumerate(units):
            for piece in needed:
                self.uses.setdefault(piece, []).append(now)
        dirty: set[Piece] = set()
        known: set[Piece] = set()
        self.moved = 0
        for self.now, (needed, changes) in enumerate(units):
            self.trial = needed[0][1]
            missing = [piece for piece in needed if piece not in self.used]
            while sum(map(size, [*self.used, *missing])) > room:
                victim = rule(self, [piece for piece in self.used if piece not in needed])
                del self.used[victim]
                self.moved += size(victim) * (victim in dirty)
                dirty.discard(victim)
            self.moved += sum(size(piece) for piece in missing if piece in known)
            known.update(missing)
            self.used |= dict.fromkeys(needed, self.now)
            dirty |= set(needed) if changes else set()

    def last_used(self, found: list[Piece]) -> Piece:  # noqa: D102
        return min(found, key=self.used.__getitem__)

    def pager(self, found: list[Piece]) -> Piece:  # noqa: D102
        others = [piece for piece in found if piece[1] != self.trial]
        found = others or found
        state = [piece for piece in found if piece[0] == "optimizer"]
        return max(state, key=self.used.__getitem__) if state else self.last_used(found)

    def future(self, found: list[Piece]) -> Piece:  # noqa: D102
        def next_use(piece: Piece) -> int:
            uses = self.uses[piece]
            place = bisect_left(uses, self.now)
            return uses[place] if place < len(uses) else sys.maxsize

        return max(found, key=next_use)


def size(piece: Piece) -> int:
    return 2 if piece[0] == "optimizer" else 1


RULES = {"last used": Run.last_used, "pager": Run.pager, "future": Run.future}
TURNS = {"each unit": 1, "half a step": UNITS // 2, "two steps": 2 * UNITS, "two steps, longest": 2 * UNITS}


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{'trials, turn':<24}{'rule':<12}" + "".join(f"{share:>8.0%}" for share in SHARES) + "   room, of all state")
    is_worse = False
    for num_trials in (1, 2, 3, 4):
        for name, turn in TURNS.items():
            if num_trials == 1 and name != "each unit":
                continue
            units, state = course(num_trials, turn, longest_first="longest" in name), 3 * NUM_SHARDS * num_trials
            rows = {}
            for rule, choose in RULES.items():
                rooms = [share * state for share in SHARES]
                rows[rule] = [
                    Run(units, room, choose).moved / NUM_STEPS / state if room >= 6 else None for room in rooms
                ]
                cells = "".join(f"{'-' if found is None else format(found, '.2f'):>8}" for found in rows[rule])
                print(f"{f'{num_trials}, {name}':<24}{rule:<12}{cells}")
            pairs = zip(rows["pager"], rows["last used"], strict=True)
            is_worse |= any(mine is not None and mine > other for mine, other in pairs)
    print(f"the pager's rule moved more than the last used one {'somewhere' if is_worse else 'nowhere'}")
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
