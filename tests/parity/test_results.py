"""Results of the pool are the user's own models: they load where plain ones do, and stand every use that plain ones do."""

from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hydra_tune import HydraExecutor, TrainTask, load_module, train_plain
from hydra_tune.errors import CaptureError
from hydra_tune.fusion.runtime.planned_unit import GroupStepRunner
from hydra_tune.train.loop import burst
from hydra_tune.train.trained import TrainingOutcome
from tests.parity.features import BATCHES, EPOCHS
from tests.parity.observe import Way, reference_of, run, watched_ways
from tests.parity.registry import ENTRIES, Spec, build
from tests.parity.test_fusion import documented
from tests.parity.uses import failures
from tests.support.gathered import gather

NAMES = ("gpt2", "hf_gpt2", "weight_norm", "spectral_norm", "moving_average", "shared_module")
LARGE = {"gpt2", "hf_gpt2"}  # take most of the time; shared_module has a tied parameter as well
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in NAMES]
SPECS = {name: Spec(name, "evaluation") for name in NAMES}
TIED = {
    "gpt2": ("tokens.weight", "head.weight"),
    "hf_gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "shared_module": ("shared.weight", "also_shared.weight"),
}


@lru_cache
def trained(*names):
    """Results and references."""
    specs = [SPECS[name] for name in names]
    seen = run(specs, devices="cpu:2", device_memory="64MiB", num_shards=3)
    return {name: one.result for name, one in zip(names, seen, strict=True)}, reference_of(specs)


@pytest.fixture
def together(name):
    """A test's model is trained beside the others of its size."""
    return trained(*(other for other in NAMES if (other in LARGE) == (name in LARGE)))


@pytest.fixture
def results(together):
    return together[0]


@pytest.fixture
def references(together):
    return together[1]


@pytest.mark.cases(1 / 3)
@pytest.mark.parametrize("name", EACH)
def test_the_state_dict_loads_into_a_plain_model_of_the_same_class(results, references, name):
    trained = results[name].module()
    plain = ENTRIES[name].model()
    assert type(trained) is type(plain)
    assert [type(part) for part in trained.modules()] == [type(part) for part in plain.modules()] or name in (
        "weight_norm",
        "spectral_norm",
    )
    state = results[name].state_dict()
    assert list(state) == list(plain.state_dict())
    assert plain.load_state_dict(state, strict=True).missing_keys == []
    for key, tensor in references[SPECS[name]]["state"].items():
        assert torch.equal(plain.state_dict()[key], tensor), key


@pytest.mark.parametrize(
    ("name", "aliases"), [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in LARGE)) for case in TIED.items()]
)
def test_tied_names_are_one_parameter_still(results, name, aliases):
    module, state = results[name].module(), results[name].state_dict()
    first, second = (module.get_parameter(alias) for alias in aliases)
    assert first is second
    assert all(state[alias].data_ptr() == first.data_ptr() for alias in aliases)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrizations_are_in_place_and_can_be_taken_off(results, name):
    module = results[name].module()
    layers = [layer for layer in module if isinstance(layer, nn.Linear)]
    assert all(parametrize.is_parametrized(layer, "weight") for layer in layers)
    module.eval()
    weights = [layer.weight.detach().clone() for layer in layers]
    for layer, weight in zip(layers, weights, strict=True):
        parametrize.remove_parametrizations(layer, "weight")
        assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("name", ["moving_average"])
def test_buffers_have_moved_and_are_the_modules_own(results, name):
    module = results[name].module()
    assert module.count.item() == 8
    assert module.average.abs().sum() > 0
    assert module.scale.item() != 1.0


@pytest.mark.parametrize("name", EACH)
def test_the_model_goes_on_training_by_itself(results, name):
    """No parameter is a leftover of the pool: gradients flow, an optimizer steps, and a copy can be made."""
    module = results[name].module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = {key: p.detach().clone() for key, p in module.named_parameters() if p.requires_grad}
    sum(p.pow(2).sum() for p in module.parameters()).backward()
    optimizer.step()
    assert all(
        not torch.equal(p, before[key]) for key, p in module.named_parameters() if p.requires_grad and before[key].any()
    )


WAYS: dict[str, dict[str, Any]] = {
    "own": {},
    "own, moved": {},
    "whole": {"num_shards": 1},
    "one shard": {"num_shards": 1},
    "cut": {"num_shards": 3},
    "fused": {"fusion": "on", "fusion_size": 2},
    "load_module": {"num_shards": 2},
}
OWN = ("own", "own, moved")
QUICK = ("shared_module", "moving_average", "resnet_channels_last")
TRAINED = [name for name, entry in ENTRIES.items() if entry.train != "refused"]
SEEDS = (5, 6, 7, 8)


def not_captured(*arguments: Any, **options: Any) -> None:
    raise CaptureError("this test has everything run whole")


def trained_in(way: str, tasks: list[TrainTask]) -> list[TrainingOutcome]:
    """The results of tasks, each of which has a member of its own to be fused with where that is the way."""
    if way == "own, moved":
        return [moved(task) for task in tasks]
    capture = (
        mock.patch("hydra_tune.shard.partition.trial_step.capture", not_captured) if way == "whole" else nullcontext()
    )
    options = {"devices": "cpu:1", "device_memory": "256MiB"} | WAYS[way]
    with capture, pytest.MonkeyPatch.context() as patch, HydraExecutor(**options) as pool:
        if way != "fused":
            return pool.run(tasks)
        gather(patch, lambda count: count % 2 == 0)
        return [pool.run([task, replace(task, seed=SEEDS[1])])[0] for task in tasks]


def moved(task: TrainTask) -> TrainingOutcome:
    """The result of a trial whose tensors have left the device, because others took turns with it after each step."""
    options = {"devices": "cpu:1", "policy": "round_robin", "max_concurrent": len(SEEDS)}
    with HydraExecutor(device_memory="256MiB", **options) as pool:
        pool.run([replace(task)])
        alone = pool.stats().devices["cpu:0"].peak_bytes
    state_bytes = sum(tensor.nbytes for tensor in task.model().state_dict().values())
    with (
        mock.patch.object(burst, "BURST_SECONDS", 0.0),
        HydraExecutor(device_memory=int(alone + min(0.1 * alone, state_bytes)), **options) as pool,
    ):
        result, *_ = pool.run([task, *(replace(task, seed=seed) for seed in SEEDS[1:])])
        device = pool.stats().devices["cpu:0"]
    assert device.bytes_out_by_kind["parameters"] > 0
    return result


def astray(way: str, name: str, result: TrainingOutcome, went: Way) -> str:
    """What is wrong with the way that a task went; nothing if it is the one that is named."""
    train = went.shards.get("train")
    fuses = documented()[name] == "yes"
    if way in OWN or (
        way == "fused" and not fuses
    ):  # what does not fuse runs as it would by itself, if captured in vain
        right = not (train if way == "fused" else went.shards) and went.own_batches >= BATCHES * EPOCHS
    elif way == "fused":
        right = not went.own_batches and result.group_size == 2
    elif way == "whole" or ENTRIES[name].train == "whole":
        right = not went.own_batches and train == 0
    else:
        right = not went.own_batches and train == WAYS[way]["num_shards"]
    return "" if right else f"{way}: {went}, in a group of {result.group_size}"


def unusable(way: str, names: list[str], folder: Any) -> dict[str, dict[str, str]]:
    """By model: the uses that its result does not stand."""
    tasks = [build(Spec(name, seed=SEEDS[0])) for name in names]
    wrong = {}
    with watched_ways() as ways:
        results = trained_in(way, tasks)
    for name, task, result in zip(names, tasks, results, strict=True):
        assert not (found := astray(way, name, result, ways[id(task)])), f"{name}: {found}"
        plain = train_plain(task)
        if way == "load_module":
            result.save(folder / f"{name}.safetensors")
            result.keep(load_module(task, folder / f"{name}.safetensors"), result._optimizer)
        if found := failures(result, plain, task, folder / name):
            wrong[name] = found
    return wrong


@pytest.mark.cases(1)
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")  # the uses warn of this and that
@pytest.mark.parametrize("way", WAYS)
def test_results_stand_every_use(way, tmp_path):
    assert unusable(way, list(QUICK), tmp_path) == {}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in ENTRIES for way in WAYS if name in TRAINED or way in OWN]
)
def test_results_of_every_model_stand_every_use(name, way, tmp_path):
    assert unusable(way, [name], tmp_path) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in TRAINED if documented()[name] == "yes"])
def test_results_of_planned_members_stand_every_use(name, monkeypatch, tmp_path):
    """On the largest device that has no room for four members; models of which no step is planned are skipped."""
    ran = []
    backward = GroupStepRunner.backward
    monkeypatch.setattr(GroupStepRunner, "backward", lambda self: (ran.append(name), backward(self)))
    tasks = [build(Spec(name, seed=seed)) for seed in SEEDS]
    options = {"devices": "cpu:1", "fusion": "on", "fusion_planner": "on", "fusion_size": len(SEEDS)}
    with HydraExecutor(device_memory="256MiB", plans_only=True, **options) as pool:
        figures = pool.plan(tasks[:1], profile=len(SEEDS)).trials[0].fusion.figures
    if figures is None:
        pytest.skip("no steps of it are planned")
    static = figures.static_bytes * len(SEEDS)
    kept = next(peak for peak in figures.peaks if peak.num_trials == len(SEEDS)).peak_bytes
    for share in (0.65, 0.9, 0.8, 0.5):
        with HydraExecutor(device_memory=int(static + share * (kept - static)), **options) as pool:
            results = pool.run(tasks, on_error="return")
        if ran and results[0].error is None:
            break
    else:
        pytest.skip("no memory that was tried has had its steps planned")
    assert failures(results[0], train_plain(tasks[0]), tasks[0], tmp_path) == {}
