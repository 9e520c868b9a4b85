"""Writes the tables of `docs/results/models.md` from what is seen when the whole registry is trained.

Run as `python -m tests.parity.table` from the repository's root, or `make models-table`. Every cell is a run of its own, cut
into three shards, on two devices, compared with a plain loop in another process. It ends with an error, and
leaves the page as it is, if any run gives other bits.
"""

import hashlib
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.parity.features import FEATURES
from tests.parity.observe import Seen, difference, reference_of, run
from tests.parity.optimizers import OPTIMIZERS, OTHERS
from tests.parity.registry import ENTRIES, Spec, product
from tests.support.slow_part import present_turn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "models.md"
BEGIN, END = "<!-- begin: written by `make models-table` -->", "<!-- end -->"
OPTIONS = {"devices": "cpu:2", "device_memory": "64MiB", "num_shards": 3}
OPTIMIZED = ("mlp", "masks", "shared_module")
STAMP = "<!-- seen with sources {sources}, in turn {turn} -->"
SHORT = {"bitwise": "✓", "bitwise, evaluated whole": "✓, evaluated whole"}  # outcomes that the page has a sign for
_MAX_REASON = 170
_MODELS_AT_ONCE = 6  # share one reference process, whose start takes seconds

Outcomes = dict[tuple[str, str], str]


class DifferentBitsError(Exception):
    """A run that is not the reference, to the last bit."""


def outcome(spec: Spec, seen: Seen, reference: dict[str, Any]) -> tuple[str, str]:
    """A cell, and the reason for what is not "bitwise".

    Raises:
        DifferentBitsError: the run completed and gave other numbers.
    """
    if "error" in reference:
        if seen.result.error is None:
            raise DifferentBitsError(f"{spec}: completed, but plain PyTorch fails with {reference['error']}")
        return "no", f"plain PyTorch fails too: {reference['error']}"
    if seen.result.error is not None:
        return "refused", str(seen.result.error)
    found = difference(seen, reference)
    if found:
        raise DifferentBitsError(f"{spec}: {found[0]}")
    whole = [mode for mode, shards in seen.way.shards.items() if not shards]
    if "train" in whole:
        return "whole", seen.way.reasons["train"]
    return ("bitwise, evaluated whole", seen.way.reasons["evaluate"]) if whole else ("bitwise", "")


def render(models: Outcomes, optimizers: Outcomes, reasons: dict[str, dict[str, list[str]]]) -> str:
    """Both tables and the reasons, as Markdown."""
    features, names = list(FEATURES), list(dict.fromkeys(name for name, _ in models))
    lines = [_row(["model", "trait", *features]), _row(["---"] * (2 + len(features)))]
    lines += [
        _row([f"`{name}`", ENTRIES[name].what, *(_cell(models.get((name, f), "-")) for f in features)])
        for name in names
    ]
    lines += ["", "Why not in parts:", ""]
    for name, found in reasons.items():
        every = sum(model == name for model, _ in models)
        lines += [
            f"* `{name}`: {_first_line(why)} ({'all' if 1 < len(where) == every else ', '.join(where)})"
            for why, where in found.items()
        ]
    tried = list(dict.fromkeys(optimizer for _, optimizer in optimizers))
    on = list(dict.fromkeys(name for name, _ in optimizers))
    lines += ["", _row(["optimizer", *(f"`{name}`" for name in on)]), _row(["---"] * (1 + len(on)))]
    lines += [_row([f"`{o}`", *(_cell(optimizers[name, o]) for name in on)]) for o in tried]
    return "\n".join(lines)


def _cell(outcome: str) -> str:
    return SHORT.get(outcome, outcome)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _first_line(why: str) -> str:
    text = " ".join(why.split()).replace(str(ROOT) + "/", "").replace("|", "/")
    return text if len(text) <= _MAX_REASON else text[:_MAX_REASON].rsplit(" ", 1)[0] + " ..."


def rewritten(page: str, tables: str) -> str:
    """The page with other tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def batched(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """Lists of at most `count` names."""
    rest = iter(names)
    while part := list(islice(rest, count)):
        yield part


def sources() -> str:
    """Says which sources of cutting and training these are: of all whose change may change a cell."""
    digest = hashlib.sha256()
    for path in sorted(path for name in ("shard", "train") for path in (ROOT / "hydra_tune" / name).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def observe() -> tuple[Outcomes, Outcomes, dict[str, dict[str, list[str]]]]:
    """Train everything, one pool for each model, in two processes."""
    parts = [[spec for name in names for spec in product([name])] for names in batched(ENTRIES, _MODELS_AT_ONCE)]
    parts += [[Spec(name, "schedule per step", o) for o in (*OPTIMIZERS, *OTHERS)] for name in OPTIMIZED]
    with ProcessPoolExecutor(2, get_context("spawn"), initializer=_quiet) as processes:
        found = list(processes.map(observe_part, parts))
    models: Outcomes = {}
    optimizers: Outcomes = {}
    reasons: dict[str, dict[str, list[str]]] = {}
    for number, cells in enumerate(found):
        by_model = number < len(found) - len(OPTIMIZED)
        for spec, (cell, why) in cells:
            if by_model:
                models[spec.model, spec.feature] = cell
            else:
                optimizers[spec.model, spec.optimizer] = cell
            if why:
                row, where = (spec.model, spec.feature) if by_model else (spec.optimizer, spec.model)
                reasons.setdefault(row, {}).setdefault(_general(why), []).append(where)
    return models, optimizers, reasons


def observe_part(specs: list[Spec]) -> list[tuple[Spec, tuple[str, str]]]:
    """Train some tasks, those of one model in one pool; a cell and its reason for each."""
    references = reference_of(specs)
    cells: list[tuple[Spec, tuple[str, str]]] = []
    for name in dict.fromkeys(spec.model for spec in specs):
        start, same = time.perf_counter(), [spec for spec in specs if spec.model == name]
        found = [
            (spec, outcome(spec, one, references[spec])) for spec, one in zip(same, run(same, **OPTIONS), strict=True)
        ]
        cells += found
        _say(f"{name}: {time.perf_counter() - start:.1f} s, {sorted({cell for _, (cell, _) in found})}")
    return cells


def _quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)


def _general(why: str) -> str:
    """A reason without the line of code that it was seen at, which moves with every edit."""
    return why.partition(" (at ")[0]


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main() -> None:
    """Observe everything, then write the page."""
    stamp = STAMP.format(
        sources=sources(), turn=present_turn()
    )  # before: what is edited meanwhile may not have been seen
    tables = f"{stamp}\n\n{render(*observe())}"
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
