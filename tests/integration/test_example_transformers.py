"""The BERT of the transformers library learns, and gives the numbers of a plain loop; a missing library is told."""

import json
import sys
from functools import partial

import pytest
import yaml
from click.testing import CliRunner

from hydra_tune.cli import main
from tests.support.examples import EXAMPLES, assert_cut_spilled_and_bitwise, imported, space

MODULES = ("bert", "sentences")


def test_cut_and_spilled_the_numbers_are_those_of_a_plain_loop(monkeypatch):
    with imported("transformers", *MODULES) as bert:
        monkeypatch.setattr(bert.sentences, "_MOST_OF_A_PACKAGE", 80)
        make = partial(bert.build, width=32, depth=1, lr=5e-3, epochs=3)
        plain = assert_cut_spilled_and_bitwise(make, device_memory="4MiB")
    assert plain.metrics["val_acc"] > 0.16  # guessing: one in eight


def test_sentences_are_padded_and_of_all_packages_alike():
    with imported("transformers", "sentences") as sentences:
        train, validation, num_tokens = sentences.load()
        assert len(train) % 32 == len(validation) % 32 == 0
        masks = (train.ids != sentences.PAD).sum(dim=1)
        assert 5 <= masks.min() < masks.max() == sentences.LENGTH
        assert train[0]["attention_mask"].sum() == masks[0]
        assert train.ids.max() < num_tokens
        assert validation.labels.bincount().max() < len(validation) / 5
        known = {tuple(row) for row in train.ids.tolist()}
        assert sum(tuple(row) in known for row in validation.ids.tolist()) < len(validation) / 50


def test_the_file_is_planned_and_every_model_is_cut(tmp_path):
    path = EXAMPLES / "transformers" / "space.yaml"
    small = space("transformers/space.yaml")
    small["parameters"] |= {"width": {"value": 48}, "depth": {"value": 2}}
    with imported("transformers", *MODULES):
        (tmp_path / "space.yaml").write_text(yaml.safe_dump(small))
        for file, trials in ((path, "1"), (tmp_path / "space.yaml", "1")):
            done = CliRunner().invoke(main, ["plan", str(file), "--json", "--trials", trials])
            assert done.exit_code == 0, done.output
            assert all(trial["num_shards"] >= 3 for trial in json.loads(done.stdout)["trials"])


def test_a_missing_library_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with (
        pytest.raises(ModuleNotFoundError, match=r"pip install 'hydra-tune\[transformers\]'"),
        imported("transformers", *MODULES),
    ):
        pass
