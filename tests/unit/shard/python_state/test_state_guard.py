"""What a step may read is found, compared and put back."""

import array
import collections
import contextvars
import copy
import ctypes
import functools
import gc
import hashlib
import importlib
import inspect
import itertools
import logging
import mmap
import multiprocessing
import os
import queue
import random
import re
import sys
import threading
import types
import weakref
from datetime import UTC, datetime
from os import getenv
from random import random as draw
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import and_masks
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune.errors import CaptureError, TaskError
from hydra_tune.shard.python_state import state_guard
from hydra_tune.shard.python_state.model_snapshot import ModelSnapshot
from hydra_tune.shard.python_state.reachable_values import walked
from hydra_tune.shard.python_state.state_guard import (
    PythonStateGuard,
    PythonStateUndo,
    TaskStateGuard,
    check_own_copy,
    reached,
)
from hydra_tune.shard.python_state.value_holder import ValueHolder
from tests.unit.shard.bench import task_of


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))


Bytes = ctypes.c_uint8 * 2
NOT_COPIED = (types.MappingProxyType, type(multiprocessing.Value("d")), threading.Event, threading.Semaphore)


def guard_of(step: Any, module: nn.Module | None = None, **options: Any) -> PythonStateGuard:
    module = net() if module is None else module
    return PythonStateGuard(task_of(module, step=step), module, "train", **options)


def reading(value: Any) -> Any:
    """A step that holds a value."""
    return lambda module, batch: (module(batch), value)


def test_nothing_has_changed_at_first():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.MultiheadAttention(4, 2))
    guard = guard_of(reading([{"a": {1, 2}}, np.ones(2), torch.ones(2)]), module)
    assert guard.change() is None
    guard.restore()
    assert guard.change() is None


def test_what_training_itself_changes_does_not_count():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    guard = guard_of(reading(None), module)
    module(torch.randn(3, 4)).sum().backward()
    with torch.no_grad():
        module[0].weight.add_(1)
    assert guard.change() is None


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], lambda v: v.append(3)),
        ([1, [2]], lambda v: v[1].clear()),
        ({"a": 1}, lambda v: v.update(a=2)),
        ({"a": 1}, lambda v: v.update(b=1)),
        ({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a"))),  # another order
        ({1, 2}, lambda v: v.add(3)),
        (collections.deque([1], maxlen=2), lambda v: v.extend([2, 3])),
        (collections.OrderedDict(a=[1]), lambda v: v["a"].append(2)),
        (np.ones(3), lambda v: v.__setitem__(1, 2)),
        (torch.ones(3), lambda v: v.mul_(2)),
        (torch.ones(100), lambda v: v.mul_(2)),
        (torch.ones(3), lambda v: v.numpy().fill(2)),
        (random.Random(1), lambda v: v.random()),
        (np.random.default_rng(1), lambda v: v.random()),
        (functools.partial(max, [1]), lambda v: v.args[0].append(2)),
        (types.MappingProxyType({"a": [1]}), lambda v: v["a"].append(2)),
        (array.array("d", [1.0]), lambda v: v.append(2.0)),
        (bytearray(b"ab"), lambda v: v.__setitem__(0, 0)),
        (Bytes(1, 2), lambda v: v.__setitem__(0, 0)),
        (multiprocessing.Value("d", 1.0), lambda v: setattr(v, "value", 2.0)),
        (threading.Event(), lambda v: v.set()),
        (threading.Semaphore(2), lambda v: v.acquire()),
    ],
    ids=lambda part: type(part).__name__,
)
def test_a_change_is_seen_and_put_back(value, change):
    before = copy.deepcopy(value) if type(value) not in NOT_COPIED else None
    guard = guard_of(reading(value), keeps_tensors=True)
    change(value)
    assert "'value'" in guard.change()
    guard.restore()
    assert guard.change() is None
    if isinstance(value, np.random.Generator | functools.partial) or before is None:
        return
    if isinstance(value, Bytes):
        assert list(value) == list(before)
    elif isinstance(value, random.Random):
        assert value.getstate() == before.getstate()
    else:
        assert str(value) == str(before)


def test_a_value_for_each_thread_is_refused_by_name():
    for value in (contextvars.ContextVar("variable", default=1), threading.local()):
        with pytest.raises(TaskError, match=r"'value'.* holds a value for each thread"):
            guard_of(reading(value))


def test_an_attribute_of_a_class_that_hides_the_one_of_its_base():
    class Base:
        weight = 1.0

    class Derived(Base):
        pass

    guard = guard_of(lambda module, batch: module(batch).sum() * Derived.weight)
    Derived.weight = 2.0
    assert guard.change() == "Derived.weight"
    guard.restore()
    assert "weight" not in vars(Derived)


def test_the_environment(monkeypatch):
    for step in (
        lambda module, batch: module(batch).sum() * len(os.environ),
        lambda module, batch: module(batch).sum() * bool(getenv("PYTHON_STATE")),
    ):
        guard = guard_of(step)
        monkeypatch.setenv("PYTHON_STATE", "1")
        assert guard.change() == "the environment"
        monkeypatch.delenv("PYTHON_STATE")
        assert guard.change() is None


def test_an_attribute_whose_name_is_made_up_counts():
    module = net()
    module[0].scale1 = 1.0
    guard = guard_of(lambda module, batch: getattr(module[0], f"scale{len(batch)}"), module)
    module[0].scale1 = 2.0
    assert guard.change() == "module.0.scale1"


def test_equal_values_in_new_objects_are_no_change():
    state = {"rate": 1000.5, "name": "x" * 3, "shape": (1, 2.5)}
    guard = guard_of(reading(state))
    state.update(rate=float("1000.5"), name="".join(["x"] * 3), shape=tuple([1, 2.5]))  # noqa: C409
    assert guard.change() is None


@pytest.mark.parametrize(("before", "now"), [(1, True), (1, 1.0), (0.0, -0.0)])
def test_equal_values_that_code_tells_apart_are_a_change(before, now):
    state = [before]
    guard = guard_of(reading(state))
    state[0] = now
    assert guard.change() is not None


def test_not_a_number_stays_the_same():
    state = [float("nan")]
    guard = guard_of(reading(state))
    state[0] = float("nan")
    assert guard.change() is None


class Settings:
    used, unused, shared = 1.0, 1.0, 1.0

    @property
    def doubled(self) -> float:
        return 2 * self.used


def test_of_an_object_only_what_the_code_names_counts():
    settings = Settings()
    guard = guard_of(lambda module, batch: module(batch).sum() * settings.doubled)
    settings.unused = 2.0
    assert guard.change() is None
    settings.used = 2.0
    assert guard.change().endswith(".used")
    guard.restore()
    assert settings.used == 1.0
    assert guard.change() is None


def test_a_package_in_the_folder_of_another_environment_is_installed(tmp_path, monkeypatch):
    """A `.pth` file adds folders that Python does not list; to walk all code of a large package takes minutes."""
    for folder, is_followed in (("site-packages", False), ("work", True)):
        name = f"package_in_{folder.replace('-', '_')}"
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text("RATE = 1.0\n\n\ndef scaled(value):\n    return value * RATE\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
        package = importlib.import_module(name)
        guard = guard_of(lambda module, batch, package=package: package.scaled(module(batch).sum()))
        package.RATE = 2.0
        assert (guard.change() is not None) == is_followed


def scaled_by(weight: float) -> Any:
    return lambda *arguments: weight


def wrapping(weight: float) -> Any:
    @functools.wraps(nn.functional.gelu)
    def scaled(value: Any) -> Any:
        return nn.functional.gelu(value) * weight

    return scaled


@pytest.mark.parametrize("make", [get_ema_multi_avg_fn, wrapping, lambda weight: and_masks(scaled_by(weight))])
def test_what_a_function_of_a_package_was_given_counts(make):
    """Also where a function of the user's has the name of a package's function, or is held by such a function."""
    one, same, other = (guard_of(reading(make(weight))) for weight in (0.5, 0.5, 0.9))
    assert one.digest == same.digest
    assert one.digest != other.digest


def test_a_variable_of_a_function_of_a_package_is_compared_and_put_back():
    function = inspect.unwrap(get_ema_multi_avg_fn(0.5))
    guard = guard_of(reading(function))
    function.__closure__[0].cell_contents = 0.9
    assert guard.change().startswith("the variable 'decay' of ")
    guard.restore()
    assert function.__closure__[0].cell_contents == 0.5


def test_an_attribute_of_a_parameter_counts_where_the_code_names_the_attribute():
    module, other = net(), net()
    module[0].weight.scale = other[0].weight.scale = 1.0

    def step(module: nn.Module, batch: Any) -> Any:
        return module(batch).sum() * module[0].weight.scale

    guard = guard_of(step, module)
    assert guard.digest == guard_of(step, other).digest
    other[0].weight.mark = True
    assert guard.digest == guard_of(step, other).digest
    other[0].weight.scale = 2.0
    assert guard.digest != guard_of(step, other).digest
    module[0].weight.scale = 2.0
    assert guard.change() == "module.0.weight.scale"
    guard.restore()
    assert module[0].weight.scale == 1.0


def test_an_attribute_that_the_step_sets_is_taken_away_again():
    settings = Settings()

    def step(module: nn.Module, batch: Any) -> Any:
        settings.calls = getattr(settings, "calls", 0) + 1
        return module(batch).sum()

    guard = guard_of(step)
    step(net(), torch.ones(2, 4))
    assert guard.change().endswith(".calls")
    guard.restore()
    assert not hasattr(settings, "calls")


def test_attributes_of_a_class_are_put_back():
    def step(module: nn.Module, batch: Any) -> Any:
        Settings.shared += 1
        return module(batch).sum()

    guard = guard_of(step)
    step(net(), torch.ones(2, 4))
    assert guard.change() == "Settings.shared"
    guard.restore()
    assert Settings.shared == 1.0


@pytest.mark.parametrize("num_looks", [0, 2])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: setattr(m[1], "p", 0.5), "module.1.p"),
        (lambda m: setattr(m[1], "inplace", 0), "module.1.inplace"),  # equal to False
        (lambda m: delattr(m[1], "p"), "module.1.p"),
        (lambda m: setattr(m[1], "rate", vars(m[1]).pop("p")), "module.1.p"),
        (lambda m: m[1].eval(), "the mode of module.1"),
        (lambda m: m[0].requires_grad_(False), "of module.0"),
        (lambda m: m.__setitem__(1, nn.Tanh()), "of module"),
        (lambda m: m[0].register_forward_hook(lambda *_: None), "of module.0"),
        (lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 4))), "of module.0"),
        (lambda m: setattr(m[0], "forward", m[0].forward), "module.0.forward"),
        (lambda m: m.append(nn.Tanh()), "of module"),
        (lambda m: m[0].register_buffer("mask", torch.ones(1)), "of module.0"),
        (lambda m: m[1].register_forward_pre_hook(lambda *_: None), "of module.1"),
        (lambda m: setattr(m[1], "__class__", nn.AlphaDropout), "the forward of module.1"),
    ],
)
def test_changes_of_the_model(change, name, num_looks):
    module = net()
    guard = guard_of(reading(None), module)
    for _ in range(num_looks):
        assert guard.change() is None
    change(module)
    assert guard.change(beside_model=True) is None
    assert guard.change().endswith(name)


@pytest.mark.parametrize("num_looks", [0, 2])
def test_another_forward_of_a_class(num_looks, monkeypatch):
    guard = guard_of(reading(None))
    for _ in range(num_looks):
        assert guard.change() is None
    monkeypatch.setattr(nn.Dropout, "forward", nn.AlphaDropout.forward)
    assert guard.change() == "the forward of module.1"


def test_a_look_at_an_unchanged_model_reads_no_module_by_itself(monkeypatch):
    module = net()
    guard = guard_of(reading(None), module)
    assert guard.change() is None
    looked_at = []
    change = ValueHolder.change
    monkeypatch.setattr(ValueHolder, "change", lambda self, **kinds: (looked_at.append(self), change(self, **kinds))[1])
    assert guard.change() is None
    assert not any(holder.is_of_model for holder in looked_at)
    module[1].p = float("0.1")  # another object
    for number in (1, 0):
        looked_at.clear()
        assert guard.change() is None
        assert sum(holder.is_of_model for holder in looked_at) == number * 3


def test_of_a_model_that_differs_few_snapshots_are_taken(monkeypatch):
    taken = []
    monkeypatch.setattr(state_guard, "ModelSnapshot", lambda model: taken.append(model) or ModelSnapshot(model))
    module = net()
    guard = guard_of(reading(None), module)
    module[1].p = 0.5
    for _ in range(20):
        assert guard.change() == "module.1.p"
    assert 0 < len(taken) < 10


def test_a_look_beside_the_model_compares_no_snapshot(monkeypatch):
    guard = guard_of(reading(None))
    assert guard.change() is None
    monkeypatch.setattr(ModelSnapshot, "holds", lambda _: pytest.fail("a look at the model"))
    assert guard.change(beside_model=True) is None


def test_a_tensor_that_the_model_keeps_for_others_is_no_change_by_the_step():
    module = net()
    module.last = None
    guard = guard_of(reading(None), module)
    module.last = torch.ones(2)
    assert guard.change(by_step=True) is None


def test_a_tensor_that_a_closure_keeps_is_a_change_by_the_step():
    kept: dict[str, Any] = {"last": None}
    guard = guard_of(reading(kept))
    kept["last"] = torch.ones(2)
    assert guard.change(by_step=True) is not None


@pytest.mark.parametrize("iterator", [itertools.count(), iter([1, 2]), zip([1], [2], strict=True), (i for i in "ab")])
def test_an_iterator_is_refused_by_name(iterator):
    with pytest.raises(TaskError, match=r"'value'.* is an iterator"):
        guard_of(reading(iterator))


def test_another_name_for_a_parameters_memory_is_refused_by_name():
    module = net()
    for value in (module[0].weight.detach(), module[0].weight.detach().numpy(), [module[0].weight.data[1]]):
        with pytest.raises(TaskError, match="shares the memory of a parameter"):
            guard_of(reading(value), module)


def test_a_step_that_holds_the_model_is_refused_by_name():
    module = net()
    guard_of(reading(module), module)  # to look at the state is fine
    with pytest.raises(TaskError, match=r"'value'.* is the model or a part of it"):
        check_own_copy(task_of(module, step=reading(module[0])), module, "train")


def test_many_objects_are_refused_and_many_numbers_are_not():
    guard = guard_of(reading(list(range(100_000))))
    assert guard.change() is None
    with pytest.raises(CaptureError, match="5000 objects"):
        guard_of(reading([[] for _ in range(5000)]))


def test_a_function_with_a_cache_computes_anew_what_a_tried_step_has_computed():
    seen: list[int] = []

    @functools.lru_cache
    def scale(size: int) -> int:
        seen.append(size)
        return len(seen)

    def step(module: nn.Module, batch: Any) -> Any:
        return module(batch).sum() * scale(len(batch))

    guard = guard_of(step)
    step(net(), torch.ones(2, 4))
    guard.restore()
    assert seen == []
    assert scale(2) == 1


def test_a_function_with_a_cache_keeps_what_others_have_computed():
    large = torch.ones(1 << 20)
    scale = functools.cache(lambda size: large if size > 2 else torch.rand(size))
    step = lambda module, batch: module(batch).sum() * scale(len(batch)).sum()  # noqa: E731
    others = scale(1)
    guard = guard_of(step)
    scale(2)
    guard.restore()
    assert scale.cache_info().currsize == 1
    undo = PythonStateUndo({"train=": lambda: [scale(2)]})
    tried = scale(2), scale(3)
    undo.undo()
    assert scale(1) is others
    assert scale(3) is tried[1], "a large result may be data, which is costly to load"
    assert scale(2) is not tried[0]


def test_a_function_with_a_limited_cache_is_not_called_by_the_look_at_the_cache():
    seen: list[Any] = []

    @functools.lru_cache(maxsize=1)
    def scale(*sizes: int, **options: int) -> int:
        seen.append((sizes, options))
        return 1

    scale(3)
    guard_of(lambda module, batch: module(batch).sum() * scale(3))
    assert seen == [((3,), {})]


def test_a_function_with_a_cache_keeps_an_object_that_others_use():
    @functools.lru_cache
    def settings() -> types.SimpleNamespace:
        return types.SimpleNamespace(weight=1.0)

    def step(module: nn.Module, batch: Any) -> Any:
        return module(batch).sum() * settings().weight

    first, guard = settings(), guard_of(step)
    step(net(), torch.ones(2, 4))
    guard.restore()
    assert settings() is first
    first.weight = 2.0
    assert guard.change() is not None


def test_an_object_of_an_extension_module_is_refused_by_name():
    for value in (queue.SimpleQueue(), hashlib.sha256()):
        with pytest.raises(CaptureError, match=r"'value'.* an object of an extension module"):
            guard_of(reading(value))
    for value in (
        threading.Lock(),
        re.compile("a"),
        torch.float32,
        np.dtype("float32"),
        np.add,
        datetime.now(UTC),
        object(),
    ):
        assert guard_of(reading(value)).change() is None


_WEIGHT, _NAME = 2.0, "settings"


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda: globals()["_WEIGHT"], "uses globals, and so may read values that cannot be followed"),
        (lambda: next(eval("_WEIGHT") for _ in range(1)), "uses eval"),
        (lambda: exec("_WEIGHT"), "uses exec"),
        (lambda: sys._getframe().f_globals["_WEIGHT"], "uses f_globals"),
        (lambda: reading.__globals__["_WEIGHT"], "uses __globals__"),
        (
            lambda: importlib.import_module(_NAME).w,
            "looks up a module whose name is not in the code",
        ),
        (lambda: sys.modules[_NAME].w, "looks up a module whose name is not in the code"),
    ],
)
def test_a_step_that_may_read_any_variable_is_refused_by_name(weight, message):
    with pytest.raises(CaptureError, match=message):
        guard_of(lambda module, batch: module(batch).sum() * weight())


def test_variables_that_no_code_reads_do_not_count_where_other_code_makes_up_names():
    settings = types.ModuleType("settings_of_a_test")
    settings.weight, settings.step = 1.0, 0

    def scale():
        return settings.weight

    def step(module, batch):
        return getattr(module, f"{'forward'}")(batch).sum() * scale()

    guard = guard_of(step)
    settings.step = 1
    assert guard.change() is None
    settings.weight = 2.0
    assert guard.change() is not None


def test_what_a_loader_works_on_does_not_count_where_code_makes_up_names():
    loader = DataLoader([0, 1], num_workers=1, persistent_workers=True)

    def step(module, batch):
        return getattr(module, f"{'forward'}")(batch).sum() * len(loader)

    list(loader)
    try:
        guard = guard_of(step)
        list(loader)
        assert guard.change() is None
    finally:
        loader._iterator._shutdown_workers()


def test_what_a_thread_works_on_does_not_count():
    class Logger(threading.Thread):
        def __init__(self):
            super().__init__()
            self.waiting, self.seen = queue.Queue(), []

        def log(self, value):
            self.waiting.put(value)
            self.seen.append(value)

    logger, is_verbose = Logger(), False

    def step(module, batch):
        if is_verbose:
            logger.log(len(logger.seen))
        return module(batch).sum()

    guard = guard_of(step)
    logger.log(1.0)
    assert guard.change() is None


def test_switching_a_module_to_evaluation_reads_no_variables():
    module = net()
    assert guard_of(lambda model, batch: model.eval()(batch).sum(), module).change() is None


def test_the_random_streams_of_the_process_do_not_count():
    guard = guard_of(lambda module, batch: module(batch).sum() * (random.gauss(0, 1) + np.random.random() + draw()))  # noqa: NPY002
    random.random(), np.random.random()  # noqa: NPY002
    assert guard.change() is None


def test_a_hook_of_all_modules_is_refused():
    before = guard_of(reading(None))
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        assert before.change() == "the hooks of all modules"
        with pytest.raises(CaptureError, match="a hook of all modules"):
            guard_of(reading(None))
    finally:
        handle.remove()
    assert guard_of(reading(None)).change() is None


def test_the_position_of_a_file(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("1\n2\n3\n")
    with path.open() as file:
        guard = PythonStateUndo({"train=": lambda: [file.readline()]})
        assert file.readline() == "1\n"
        guard.note_changes(is_alone=True)
        guard.undo_changes()
        assert file.readline() == "1\n"
        next(file)  # within a loop over lines a text file does not tell its position
        assert PythonStateUndo({"train=": lambda: [file.readline()]}).iterators
    assert guard_of(reading(sys.stdout)).change() is None


def test_a_file_that_the_step_closes_leaves_other_values_to_be_put_back(tmp_path):
    (tmp_path / "weights").write_text("1\n2\n")
    file = (tmp_path / "weights").open()
    before, since = {"runs": 0}, {"runs": 0}

    def step(module: nn.Module, batch: Any) -> float:
        before["runs"] += 1
        weight = float(file.readline())
        file.close()
        since["runs"] += 1
        return weight

    guard = guard_of(step)
    step(net(), None)
    guard.restore()
    assert (before["runs"], since["runs"]) == (0, 0)


def test_attributes_in_which_a_step_keeps_tensors():
    module = net()
    module.last, module.features, module.count = None, {"a": torch.ones(1)}, torch.ones(1)
    guard = guard_of(reading(None), module)
    assert guard.kept() == set()
    module.last = torch.ones(2)
    module.features["a"] = torch.ones(2)
    assert guard.kept() == {"last", "features"}


def test_what_data_count_is_put_back():
    class Counting(TensorDataset):
        drawn = 0

        def __getitem__(self, index: int) -> Any:
            self.drawn += 1
            return super().__getitem__(index)

    data = Counting(torch.ones(8, 4))
    for handle in (data, DataLoader(data), lambda: DataLoader(data)):
        guard = PythonStateUndo({"train=": handle})
        assert data[0] is not None
        guard.note_changes(is_alone=True)
        assert guard.has_changes
        guard.undo_changes()
        assert data.drawn == 0
    endless = itertools.count()
    assert PythonStateUndo({"train=": lambda: [next(endless)]}).iterators == ["the variable 'endless' of train="]


@pytest.mark.cases(1 / 3)
def test_a_walk_keeps_no_class_alive():
    """The methods of a class made inside a function may close over the data of a trial."""

    def walked_class():
        class Pairs:
            def __getitem__(self, index: int) -> Any:
                return index

        PythonStateUndo({"train=": Pairs()}).note_changes(is_alone=True)
        return weakref.ref(Pairs)

    kept = walked_class()
    gc.collect()
    assert kept() is None


def test_what_others_change_after_the_data_stays(monkeypatch):
    counts, names, order, settings = (
        {"own": 1, "others": 1},
        {"begun"},
        ["begun"],
        types.SimpleNamespace(own=1, others=1),
    )
    places, array, tensor = {"own": 0, "others": 1}, np.ones(2), torch.ones(2)
    monkeypatch.setenv("OWN_COUNT", "1")

    def train(who: str = "own") -> list[Any]:
        counts[who] += 1
        counts[f"{who} passes"] = 1
        names.add(who)
        order.append(who)
        setattr(settings, who, getattr(settings, who) + 1)
        array[places[who]] += 1
        tensor[places[who]] += 1
        os.environ[f"{who}_COUNT".upper()] = "2"
        return []

    for has_others in (False, True):
        guard = PythonStateUndo({"train=": train})
        train()
        guard.note_changes(is_alone=True)
        if has_others:
            train("others")
        guard.undo_changes()
        assert (counts["own"], "own passes" in counts, settings.own, os.environ["OWN_COUNT"]) == (1, False, 1, "1")
        assert (names, order) == (({"begun", "others"}, ["begun", "others"]) if has_others else ({"begun"}, ["begun"]))
        assert (counts["others"], counts.get("others passes")) == ((2, 1) if has_others else (1, None))
        assert array.tolist() == tensor.tolist() == [1, 2 if has_others else 1]
        assert (settings.others, os.environ.get("OTHERS_COUNT")) == ((2, "2") if has_others else (1, None))
    monkeypatch.delenv("OTHERS_COUNT")


def test_what_others_have_changed_again_is_theirs_and_named(caplog):
    counts, settings, array = {"runs": 0}, types.SimpleNamespace(runs=0), np.array([0.0, np.nan])

    def train() -> list[Any]:
        counts["runs"] += 1
        settings.runs += 1
        array[0] += 1
        return []

    guard = PythonStateUndo({"train=": train})
    train()
    guard.note_changes(is_alone=True)
    train()
    guard.undo_changes()
    assert (counts["runs"], settings.runs, array[0]) == (2, 2, 2)
    assert "has changed while the pool tried code of a trial, and is not put back" in caplog.text


def test_what_cannot_be_compared_any_more_is_named_and_fails_nothing(tmp_path, caplog):
    ragged, array = np.empty(2, dtype=object), np.zeros(4)
    file = (tmp_path / "data.txt").open("w+")

    def train() -> list[Any]:
        ragged[0] = np.ones(3)
        array.resize(8, refcheck=False)
        file.close()
        return []

    guard = PythonStateUndo({"train=": train})
    train()
    guard.note_changes(is_alone=True)
    guard.undo_changes()
    assert ragged[0] is None
    assert "is not put back" in caplog.text


def test_a_change_of_a_very_large_array_is_named(tmp_path, caplog):
    array = np.zeros(1 << 20)
    mapped = np.memmap(tmp_path / "data", np.float64, "w+", shape=array.shape)

    def train(changed: Any) -> list[Any]:
        changed += 1
        return []

    for changed, is_named in ((mapped, False), (array, True)):
        guard = PythonStateUndo({"train=": functools.partial(train, changed)})
        train(changed)
        guard.undo()
        assert ("is not put back, because the value is large" in caplog.text) is is_named


def test_a_change_of_a_very_large_buffer_is_named(tmp_path, caplog):
    path = tmp_path / "data"
    path.write_bytes(bytes(8 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        train = lambda values: [values[0]]  # noqa: E731
        numbers, every_other = (ctypes.c_int * (2 << 20))(), memoryview(bytearray(16 << 20))[::2]
        for changed, ones in (
            (mapped, bytes([1]) * (8 << 20)),
            (bytearray(8 << 20), bytes([1]) * (8 << 20)),
            (array.array("i", bytes(8 << 20)), array.array("i", [1] * (2 << 20))),
            (numbers, [1] * (2 << 20)),
            (every_other, memoryview(bytes([1]) * (16 << 20))[::2]),
        ):
            guard = PythonStateUndo({"train=": functools.partial(train, changed)})
            changed[:] = ones
            caplog.clear()
            guard.undo()
            assert ("is not put back, because the value is large" in caplog.text) is (changed is not mapped)
        with memoryview(mapped) as view:
            guard = PythonStateUndo({"train=": functools.partial(train, view)})
            view[0] = 2
            caplog.clear()
            guard.undo()
            assert not caplog.text
            del guard
        buffer = bytearray(8 << 20)
        guard = PythonStateUndo({"train=": functools.partial(train, buffer)})
        buffer.clear()
        guard.undo()
        assert "is not put back" in caplog.text
        with pytest.raises(CaptureError, match="too large to be compared at each step"):
            guard_of(reading(bytearray(8 << 20)))


def test_functions_that_hold_the_model_are_found():
    module, held = net(), []

    def train() -> Any:
        return [held[0](torch.ones(2, 4))]

    assert reached({"train=": train}, module.modules()) is None
    held.append(module)
    assert reached({"scheduler=": None, "train=": train}, module.modules()) == "train="


@functools.cache
def _drawn(key: str) -> float:
    return float(torch.rand(()))


def test_a_result_that_another_trial_may_have_cached_meanwhile_stays(caplog):
    """A plan is made while trials run, and may not make them draw anew."""
    _drawn.cache_clear()
    task, other = (task_of(net(), step=lambda module, batch: module(batch) * _drawn("own")) for _ in range(2))
    with PythonStateUndo.of_tasks(task).undone(keeps_results=True):
        _drawn("own")
    assert _drawn.cache_info().currsize == 0
    another = TaskStateGuard(other, net())
    with PythonStateUndo.of_tasks(task).undone(keeps_results=True):
        _drawn("other")
    assert _drawn.cache_info().currsize == 1
    assert "the cache of _drawn has changed" in caplog.text
    del another


class Unprintable(nn.Parameter):
    """A parameter; to print it, torch would compute, and switch off the modes of captures."""

    def __repr__(self):
        raise AssertionError("printed")


def test_a_walk_prints_no_key():
    """Such as the parameters that are the keys of an optimizer's state."""
    parameter = Unprintable(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()

    walk = walked({"kept": {"state": optimizer.state}}, None, keeps_tensors=False)
    assert walk.holders


def test_a_librarys_logger_does_not_lead_to_all_loggers_of_the_process():
    """Their number makes a walk long, and no code reads them by its own logger."""
    trainer_utils = pytest.importorskip("transformers.trainer_utils")
    logger, other = logging.getLogger("of the library"), logging.getLogger("of another library")
    collator = trainer_utils.RemoveColumnsCollator(list, [], logger)
    walk = walked({"collate_fn": collator}, None, keeps_tensors=False)
    assert id(logger) in walk.seen
    assert id(other) not in walk.seen
