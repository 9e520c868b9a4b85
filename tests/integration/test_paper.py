"""The paper's workloads: what the files ask for, and that the same modules, made small, train as plain PyTorch does."""

import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from PIL import Image

from hydra_tune import HydraExecutor, train_plain
from hydra_tune.cli import main
from hydra_tune.cli.sweep_file.domains import grid_size
from hydra_tune.cli.sweep_file.reader import read_sweep_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "paper"
SMALL_BERT = {"layers": 2, "width": 32, "heads": 2, "tokens": 16, "vocabulary": 64, "epochs": 1}
SMALL_VIT = {"layers": 2, "width": 32, "heads": 2, "epochs": 1}


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the example."""
    monkeypatch.setattr(sys, "path", [str(EXAMPLE), *sys.path])
    names = ("bert", "vit", "encoder", "text", "images")
    before = {name: sys.modules.pop(name, None) for name in names}
    yield __import__
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


@pytest.fixture
def text_file(tmp_path):
    source = random.Random(0)
    words = [source.choice(["the", "a", "<unk>", ",", *(f"word{number}" for number in range(90))]) for _ in range(900)]
    path = tmp_path / "wiki.txt"
    path.write_text(" = Title = \n " + " ".join(words))
    return str(path)


def pictures(count):
    source = np.random.default_rng(0)
    return source.integers(0, 256, (count, 3072), dtype=np.uint8), source.integers(0, 10, count).tolist()


@pytest.fixture
def image_folder(tmp_path):
    for part, count in (("train", 9), ("test", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            for number, row in enumerate(pictures(count)[0]):
                Image.fromarray(row.reshape(32, 32, 3)).save(folder / f"{number}.png")
    return str(tmp_path / "images")


def test_the_files_ask_for_the_papers_twelve_trials_each_and_for_its_machine():
    for name, epochs in (("bert", 4), ("vit", 5)):
        spec = read_sweep_file(EXAMPLE / f"{name}.yaml")
        assert (spec.method, grid_size(spec.parameters), spec.run_cap) == ("grid", 12, None)
        assert spec.parameters["epochs"].values == (epochs,)
        assert spec.engine["devices"].count(",") == 7
        assert spec.engine["device_memory"] == "11GiB"
    assert set(read_sweep_file(EXAMPLE / "vit.yaml").parameters["batch_size"].values) == {64, 128}
    bert = read_sweep_file(EXAMPLE / "bert.yaml").parameters
    assert (bert["batch_size"].values, bert["lr"].values) == ((8, 16, 32), (1e-3, 1e-4, 1e-5, 1e-6))


def test_the_models_have_the_papers_sizes(example):
    files = {name: yaml.safe_load((EXAMPLE / f"{name}.yaml").read_text())["parameters"] for name in ("bert", "vit")}
    sizes = []
    for kind, depths in (("bert", [files["bert"]["layers"]["value"]]), ("vit", files["vit"]["layers"]["values"])):
        with torch.device("meta"):
            models = [example(kind).build(layers=layers, batch_size=8, lr=1e-3).model() for layers in (1, 2)]
        one, two = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
        sizes += [one + (depth - 1) * (two - one) for depth in depths]
    assert [size / 1e9 for size in sizes] == pytest.approx([1.0, 0.3, 0.6, 0.8, 1.0, 1.5, 2.0], rel=0.015)


def write_sweep(folder, kind, parameters, hydra):
    """The example's file with some parameters set, as an option of the command line would set them."""
    content = yaml.safe_load((EXAMPLE / f"{kind}.yaml").read_text())
    content["parameters"] |= parameters
    content["hydra"] = hydra
    for file in EXAMPLE.glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "data", "small", "varied"),
    [
        pytest.param("bert", "text_file", SMALL_BERT, {"batch_size": [8], "lr": [1e-2, 1e-3]}, marks=pytest.mark.slow),
        ("vit", "image_folder", SMALL_VIT, {"batch_size": [4, 6], "layers": [2]}),
    ],
)
def test_a_sweep_of_the_file_made_small_gives_plain_numbers_from_spilled_shards(
    kind, data, small, varied, example, request, tmp_path
):
    data = request.getfixturevalue(data)
    parameters = {name: {"value": value} for name, value in (small | {"data": data}).items()}
    parameters |= {name: {"values": values} for name, values in varied.items()}
    path = write_sweep(tmp_path, kind, parameters, {"devices": "cpu:2", "device_memory": "400KiB"})
    done = CliRunner().invoke(main, ["sweep", str(path), "--json", "--no-log"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["trials"]) == 2
    for trial in found["trials"]:
        plain = train_plain(example(kind).build(**trial["params"]))
        assert trial["value"] == plain.metrics[found["metric"]["name"]]
        assert trial["num_shards"] > 1
    assert sum(device["bytes_out_by_kind"].get("parameters", 0) for device in found["devices"].values()) > 0


@pytest.mark.cases(1 / 3)
def test_losses_and_weights_are_plain_to_the_bit(example, text_file):
    sizes = SMALL_BERT | {"layers": 1}
    tasks = [example("bert").build(batch_size=8, lr=lr, data=text_file, **sizes) for lr in (1e-2, 1e-3)]
    with HydraExecutor("cpu:2", device_memory="500KiB") as pool:
        results = pool.run(tasks)
    for task, result in zip(tasks, results, strict=True):
        plain = train_plain(task)
        assert result.metrics == plain.metrics
        assert plain.losses
        for mine, theirs in zip(result.module().parameters(), plain.module().parameters(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.cases(1 / 3)
def test_without_data_a_plan_says_so_loudly_and_a_sweep_is_refused(example, tmp_path):
    parameters = {name: {"value": value} for name, value in SMALL_BERT.items()} | {"layers": {"value": 1}}
    path = write_sweep(tmp_path, "bert", parameters, {"devices": "cuda:0,1,2,3,4,5,6,97", "device_memory": "2MiB"})
    done = CliRunner().invoke(main, ["plan", str(path), "--trials", "1"])
    assert done.exit_code == 0, done.output
    stands, no_data, devices = done.stdout.splitlines()[:3]
    assert stands == "cuda:0,1,2,3,4,5,6,97: not here; 8 CPU devices of the same memory stand for them"
    assert no_data.startswith("NO DATA: ")
    assert devices.startswith("devices: 8 of 2.0 MiB")
    path = write_sweep(tmp_path, "bert", parameters, {"devices": "cpu:2", "device_memory": "500KiB"})
    refused = CliRunner().invoke(main, ["sweep", str(path), "--no-log", "--no-live"])
    assert refused.exit_code != 0
    assert "can be planned, but not trained" in " ".join(refused.output.split())  # it is wrapped


def test_a_folder_of_text_has_its_own_validation(example, tmp_path):
    (tmp_path / "wiki.train.tokens").write_text("one two two three three three " * 20)
    (tmp_path / "wiki.valid.tokens").write_text("three two four " * 10)
    train, validation = example("text").read(str(tmp_path), 6, 8)
    assert (len(train), len(validation)) == (120 // 7, 30 // 7)
    assert set(validation.words.unique().tolist()) == {4, 5, 1}  # "three" and "two" are known, "four" is not
    torch.manual_seed(0)
    words, labels = zip(*(train[index] for index in range(len(train))), strict=True)
    words, labels = torch.stack(words), torch.stack(labels)
    asked = labels != -100
    assert not asked[:, 0].any()
    assert 0 < asked.sum() < asked.numel() / 3
    assert (words[~asked][1:] != 3).all()
    assert (words[asked] == 3).any()


@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifar_is_read_as_it_is_downloaded(form, example, tmp_path):
    rows, labels = pictures(6)
    for number, name in enumerate(("data_batch_1", "data_batch_2", "test_batch")):
        some = slice(2 * number, 2 * number + 2)
        if form == "python":
            content = {b"data": rows[some], b"labels": labels[some]}
            (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
        else:
            records = np.concatenate([np.array(labels[some], np.uint8)[:, None], rows[some]], 1)
            (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    train, validation = example("images").read(str(tmp_path), 32, 10)
    assert (len(train), len(validation)) == (4, 2)
    assert torch.equal(train.images, torch.from_numpy(rows[:4].reshape(-1, 3, 32, 32)))
    assert validation.labels.tolist() == labels[4:]


def test_a_batch_that_would_run_something_is_not_read(example, tmp_path):
    for name in ("data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match=r"has no builtins\.print"):
        example("images").read(str(tmp_path), 32, 10)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("bert", 1.0e9), ("vit", 1.0e9)])
def test_a_full_plan_takes_little_memory(kind, size):
    code = (
        "import re, sys; from hydra_tune.cli import main\n"
        f"try: main(['plan', {str(EXAMPLE / kind) + '.yaml'!r}, '--trials', '1', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        # Not `ru_maxrss`, which begins at that of the process that has forked this one.
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (trial,) = json.loads(done.stdout)["trials"]
    assert trial["parameter_bytes"] / 4 > 0.29 * size
    assert int(done.stderr.splitlines()[-1]) < 1 << 20  # KiB
