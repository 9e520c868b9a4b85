"""The page's tables name exactly what the registry holds, and say nothing that is not an outcome."""

import re
from types import SimpleNamespace

import pytest
import torch

from hydra_tune.errors import BudgetError
from tests.parity import table
from tests.parity.features import FEATURES, fits
from tests.parity.observe import Seen, Way
from tests.parity.optimizers import OPTIMIZERS, OTHERS
from tests.parity.registry import ENTRIES, Spec, build, product
from tests.parity.table import (
    BEGIN,
    END,
    OPTIMIZED,
    PAGE,
    SHORT,
    STAMP,
    DifferentBitsError,
    outcome,
    render,
    rewritten,
    sources,
)
from tests.support.slow_part import present_turn

OUTCOMES = {"bitwise", "bitwise, evaluated whole", "whole", "refused", "no"}
SPEC = Spec("mlp")


def tables() -> list[list[list[str]]]:
    """The rows of each table between the markers, without the rules under the headings, with outcomes in full."""
    outcomes = {sign: cell for cell, sign in SHORT.items()}
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    blocks = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", written, re.MULTILINE)]
    rows = [[[c.strip(" `") for c in line.strip("|").split("|")] for line in [b[0], *b[2:]]] for b in blocks]
    return [[[outcomes.get(cell, cell) for cell in row] for row in table] for table in rows]


def test_the_page_names_the_registrys_models_and_features():
    heading, *rows = tables()[0]
    assert heading == ["model", "trait", *FEATURES]
    assert [(row[0], row[1]) for row in rows] == [(name, entry.what.strip("`")) for name, entry in ENTRIES.items()]
    for name, _, *cells in rows:
        for feature, cell in zip(FEATURES, cells, strict=True):
            assert cell in (OUTCOMES if fits(ENTRIES[name], feature) else {"-"}), (name, feature, cell)


def test_the_page_names_the_registrys_optimizers():
    heading, *rows = tables()[1]
    assert heading == ["optimizer", *OPTIMIZED]
    assert [row[0] for row in rows] == [*OPTIMIZERS, *OTHERS]
    assert {cell for row in rows for cell in row[1:]} <= OUTCOMES


def test_what_the_page_calls_cut_is_what_the_tests_expect():
    for row in tables()[0][1:]:
        entry = ENTRIES[row[0]]
        for feature, cell in zip(FEATURES, row[2:], strict=True):
            if cell in ("-", "no"):
                continue
            paths = entry.path("train", feature), entry.path("evaluate", feature)
            evaluated = fits(entry, feature) and Spec(row[0], feature).evaluates
            by_path = {("cut", "cut"): "bitwise", ("whole", "whole"): "whole", ("refused", "refused"): "refused"}
            expected = by_path.get(paths, "bitwise, evaluated whole" if evaluated else "bitwise")
            assert cell == expected, (row[0], feature)


def test_the_tables_were_made_with_these_sources_or_in_the_release_before():
    found = re.search(
        STAMP.format(sources="(?P<sources>\\w+)", turn="(?P<turn>\\d+)"), PAGE.read_text(encoding="utf-8")
    )
    age = present_turn() - int(found["turn"])
    assert age >= 0
    assert found["sources"] == sources() or age <= 1, (
        "hydra_tune/shard or hydra_tune/train has changed: make models-table"
    )


def test_whatever_changes_in_cutting_or_training_gives_other_sources(monkeypatch, tmp_path):
    for name in ("shard", "train", "pool"):
        (tmp_path / "hydra_tune" / name).mkdir(parents=True)
        (tmp_path / "hydra_tune" / name / "one.py").write_text("x = 1")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    found = [sources()]
    (tmp_path / "hydra_tune" / "pool" / "one.py").write_text("x = 2")
    assert sources() == found[0]
    for change in (
        lambda: (tmp_path / "hydra_tune" / "shard" / "one.py").write_text("x = 2"),
        lambda: (tmp_path / "hydra_tune" / "train" / "one.py").rename(tmp_path / "hydra_tune" / "train" / "two.py"),
        lambda: (tmp_path / "hydra_tune" / "train" / "three.py").write_text(""),
    ):
        change()
        assert sources() not in found
        found.append(sources())


def made(shards, state, error=None):
    module = torch.nn.Linear(1, 1)
    result = SimpleNamespace(
        error=error, history=[], state_dict=lambda: state, optimizer_state_dict=dict, module=lambda: module
    )
    return Seen(result, Way(shards, {mode: f"why {mode}" for mode, count in shards.items() if not count}))


def reference(value):
    return {"history": [], "state": {"a": torch.tensor(value)}, "optimizer": {}}


@pytest.mark.parametrize(
    ("shards", "cell"),
    [
        ({"train": 3}, ("bitwise", "")),
        ({"train": 3, "evaluate": 1}, ("bitwise", "")),
        ({"train": 3, "evaluate": 0}, ("bitwise, evaluated whole", "why evaluate")),
        ({"train": 0, "evaluate": 0}, ("whole", "why train")),
    ],
)
def test_an_outcome_is_what_was_seen(shards, cell):
    assert outcome(SPEC, made(shards, {"a": torch.tensor(1.0)}), reference(1.0)) == cell


def test_other_bits_and_lone_successes_are_no_outcome():
    with pytest.raises(DifferentBitsError, match="mlp/plain"):
        outcome(SPEC, made({"train": 3}, {"a": torch.tensor(1.0)}), reference(1.0000001))
    with pytest.raises(DifferentBitsError, match="plain PyTorch fails"):
        outcome(SPEC, made({"train": 3}, {}), {"error": "ValueError: no"})


def test_a_failure_is_a_refusal_unless_plain_pytorch_fails_too():
    seen = made({}, {}, BudgetError("too large"))
    assert outcome(SPEC, seen, reference(1.0)) == ("refused", "too large")
    assert outcome(SPEC, seen, {"error": "ValueError: no"})[0] == "no"


def test_only_what_is_between_the_markers_is_written():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert rewritten(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    text = render({("mlp", "plain"): "bitwise"}, {("mlp", "adam"): "bitwise"}, {"mlp": {"a | b": ["plain"]}})
    assert "* `mlp`: a / b (plain)" in text
    assert "| ✓ |" in text


def test_a_reason_of_all_runs_of_a_model_names_none():
    runs = {("mlp", "plain"): "whole", ("mlp", "clip"): "whole", ("cnn", "plain"): "bitwise"}
    text = render(runs, {}, {"mlp": {"counts": ["plain", "clip"]}, "cnn": {"asks": ["plain"]}})
    assert "* `mlp`: counts (all)" in text
    assert "* `cnn`: asks (plain)" in text


def test_names_of_tasks_are_tasks():
    for spec in product():
        assert Spec.parse(str(spec)) == spec
    assert build(SPEC).seed == SPEC.seed
    assert {spec.optimizer for spec in product()} == set(OPTIMIZERS)
