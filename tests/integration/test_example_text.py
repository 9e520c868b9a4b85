"""The language models do what their README says: any text, exact tokens, masks that repeat, numbers of a plain loop."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.cli import main
from tests.support.examples import EXAMPLES, assert_cut_spilled_and_bitwise, imported, space

SMALL = {"words": 100, "width": 32, "depth": 2, "context": 24, "windows": 24, "batch_size": 8, "epochs": 2}


@pytest.fixture
def language():
    with imported("text", "language", "corpus") as module:
        yield module


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("build", ["build_causal", pytest.param("build_masked", marks=pytest.mark.slow)])
def test_cut_and_spilled_the_numbers_are_those_of_a_plain_loop(language, build):
    make = partial(getattr(language, build), **SMALL, dropout=0.1)
    assert_cut_spilled_and_bitwise(make, device_memory="1300KiB")


@pytest.mark.parametrize(("build", "metric"), [("build_causal", "val_bits_per_byte"), ("build_masked", "val_loss")])
def test_the_models_learn(language, build, metric):
    history = train_plain(getattr(language, build)(**{**SMALL, "windows": 160, "width": 48})).history
    assert history[-1][metric] < history[0][metric] < 9  # bits of a byte that one knows nothing of, and a little


def test_tokens_are_the_text_exactly(language):
    text = "Ein Bär, naïve 東京\n\n" + "the cat  sat on the mat -------------------------------- \t" * 30
    corpus = language.corpus.Corpus(text, words=20)
    assert corpus.decode(corpus.encode(text)) == text
    assert len(corpus.encode(text)) < len(text.encode())
    assert language.corpus.Corpus(text, words=0).encode("aé").tolist() == [97, *"é".encode()]


def test_masks_are_others_in_each_epoch_and_the_same_for_each_trial(language):
    tokens = torch.arange(200)
    windows = [language.corpus.Windows(tokens, 20, 3, language.corpus.hidden, seed) for seed in (0, 0, 1)]
    (first, second), (again, _), (other, _) = [[list(data), list(data)] for data in windows]
    assert all(
        torch.equal(a, b) for one, same in zip(first, again, strict=True) for a, b in zip(one, same, strict=True)
    )
    assert not any(torch.equal(one[0], two[0]) for one, two in zip(first, second, strict=True))
    assert not any(torch.equal(one[0], two[0]) for one, two in zip(first, other, strict=True))
    for _, targets in first:
        assert (targets != language.corpus.IGNORED).sum() == 3  # 15 of 100


def test_hidden_tokens_are_those_to_be_found(language):
    window = torch.arange(1001) % 256
    shown, targets = language.corpus.hidden(window, torch.Generator().manual_seed(0))
    chosen = targets != language.corpus.IGNORED
    assert torch.equal(targets[chosen], window[:-1][chosen])
    assert torch.equal(shown[~chosen], window[:-1][~chosen])
    assert 100 < (shown == language.corpus.MASK).sum() < 140  # 8 in 10 of 150


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "does not exist"),
        (b"", "is empty; give a text file"),
        (b" \n ", "is empty; give a text file"),
        (b"\x89PNG\r\n\x1a\n", "is not text in UTF-8 (byte 0); convert it"),
        (b"a\0b" * 999, "holds zero bytes, as binary files do; give a text file"),
        (b"a short text", "is too short: "),
    ],
)
def test_a_text_that_is_none_is_told_with_the_remedy(language, tmp_path, content, told):
    path = tmp_path / "my.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^data: .*my\.txt ") as caught:
        language.build_masked(data=str(path))
    assert told in str(caught.value)


@pytest.mark.parametrize("file", ["space.yaml", "masked.yaml"])
def test_the_file_runs_on_a_text_of_ones_own(tmp_path, monkeypatch, file):
    (tmp_path / "my.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / file
    smaller = space(f"text/{file}")
    smaller["run_cap"] = 2
    smaller["parameters"] |= {"width": {"values": [16]}, "depth": {"value": 1}, "batch_size": {"value": 4}}
    path.write_text(yaml.safe_dump(smaller))
    monkeypatch.syspath_prepend(EXAMPLES / "text")
    settings = ("--set", "data=my.txt", "--set", "epochs=1", "--set", "windows=8", "--device-memory", "4MiB")
    with imported("text", "language", "corpus"):
        done = CliRunner().invoke(main, ["sweep", str(path), "--json", "--no-log", *settings])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["counts"]["completed"] == 2
    assert {trial["params"]["data"] for trial in report["trials"]} == {"my.txt"}
    assert {trial["epochs"] for trial in report["trials"]} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("file", ["space.yaml", "masked.yaml"])
def test_the_budget_cuts_the_smallest_and_fits_the_largest_model(file):
    smallest, largest = {}, {}
    for name in ("width", "depth", "dropout"):
        values = space(f"text/{file}")["parameters"][name]["values"]
        smallest[name], largest[name] = values[0], values[-1]
    _assert_planned_in_shards(f"text/{file}", smallest, largest)


def _assert_planned_in_shards(file, *configurations):
    sweep = space(file)
    module, _, function = sweep["task"].partition(":")
    with imported(Path(file).parent, module, "corpus") as found:
        pool = HydraExecutor(devices="cpu:2", device_memory=sweep["hydra"]["device_memory"])
        for params in configurations:
            (trial,) = pool.plan([getattr(found, function)(**params)]).trials
            assert trial.num_shards >= 3, params


def test_the_script_searches_what_the_file_says():
    script, sweep = (EXAMPLES / "text" / "sweep.py").read_text(), space("text/space.yaml")
    for name in ("width", "depth", "dropout"):
        assert f'suggest_categorical("{name}", {sweep["parameters"][name]["values"]})' in script
    assert f'device_memory="{sweep["hydra"]["device_memory"]}"' in script
    assert f"default={sweep['run_cap']}" in script
