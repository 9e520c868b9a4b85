"""The BERT of the transformers library gives the numbers of a plain loop; a missing library is told."""

import json
import sys
from functools import partial

import pytest
import yaml
from click.testing import CliRunner

from hydra_tune.cli import main
from tests.support.examples import assert_cut_spilled_and_bitwise, imported, space

MODULES = ("bert", "sentences")


@pytest.mark.slow
def test_cut_and_spilled_the_numbers_are_those_of_a_plain_loop(monkeypatch):
    with imported("transformers", *MODULES) as bert:
        monkeypatch.setattr(bert.sentences, "_MOST_OF_A_PACKAGE", 80)
        make = partial(bert.build, width=32, depth=1, epochs=1)
        assert_cut_spilled_and_bitwise(make, device_memory="4MiB")


@pytest.mark.cases(1 / 3)
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


@pytest.mark.slow
def test_the_file_is_planned_and_its_smallest_model_is_cut(tmp_path):
    small = space("transformers/space.yaml")
    small["parameters"] |= {
        name: {"value": small["parameters"][name]["values"][0]} for name in ("width", "depth", "dropout")
    }
    with imported("transformers", *MODULES):
        (tmp_path / "space.yaml").write_text(yaml.safe_dump(small))
        done = CliRunner().invoke(main, ["plan", str(tmp_path / "space.yaml"), "--json", "--trials", "1"])
        assert done.exit_code == 0, done.output
        (trial,) = json.loads(done.stdout)["trials"]
        assert trial["num_shards"] >= 3


def test_a_missing_library_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with (
        pytest.raises(ModuleNotFoundError, match=r"pip install 'hydra-tune\[transformers\]'"),
        imported("transformers", *MODULES),
    ):
        pass
