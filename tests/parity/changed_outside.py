"""Programs whose step only reads Python state, and whose state something else changes: by kind of state.

Each kind makes a `Reader`: what the task has instead of the ordinary classifier's, and a function that sets the state. The
state is a number, 1.0 at first; `reading` builds the task and the code that changes the number as it trains.
"""

import array
import collections
import contextlib
import ctypes
import dataclasses
import enum
import functools
import importlib
import multiprocessing
import operator
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pydantic
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

from hydra_tune import TrainTask
from tests.parity.stateful import Program, Reads, batches, error, net, task


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A task's arguments, and how its state is set."""

    arguments: dict[str, Any]
    put: Callable[[float], None]


@dataclass
class Settings:
    weight: float = 1.0


@dataclass(frozen=True)
class Frozen:
    weight: float = 1.0


class Objective:
    weight = 1.0

    def step(self, module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * self.weight

    __call__ = step


KINDS: dict[str, Callable[[], Reader]] = {}
SHARED: set[str] = set()
"""Kinds whose state belongs to the process, so that several trials at once would set it for each other."""


def kind(make: Callable[[], Reader]) -> Callable[[], Reader]:
    KINDS[make.__name__] = make
    return make


def shared(make: Callable[[], Reader]) -> Callable[[], Reader]:
    SHARED.add(make.__name__)
    return kind(make)


def by_weight(weight: Callable[[], Any], put: Callable[[float], None]) -> Reader:
    """A step that weighs its loss."""

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * weight()

    return Reader(arguments={"step": step}, put=put)


# Of closures


@kind
def a_variable() -> Reader:
    weight = 1.0

    def put(value: float) -> None:
        nonlocal weight
        weight = value

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * weight

    return Reader(arguments={"step": step}, put=put)


@kind
def an_item_of_a_list() -> Reader:
    weights = [1.0, 2.0]
    return by_weight(lambda: weights[0], lambda value: weights.__setitem__(0, value))


@kind
def a_value_of_nested_containers() -> Reader:
    settings: dict[str, Any] = {"loss": [{"weight": 1.0}, (3, 4)]}
    return by_weight(lambda: settings["loss"][0]["weight"], lambda value: settings["loss"][0].update(weight=value))


@kind
def the_length_of_a_list() -> Reader:
    steps: list[None] = []

    def put(value: float) -> None:
        steps.extend([None] * round(10 * value))

    return by_weight(lambda: 1 + 0.1 * len(steps), put)


@kind
def the_end_of_a_deque() -> Reader:
    recent = deque([1.0], maxlen=3)
    return by_weight(lambda: sum(recent) / len(recent), recent.append)


@kind
def membership_of_a_set() -> Reader:
    switched: set[float] = set()
    return by_weight(
        lambda: 2.0 if switched else 1.0, lambda value: switched.clear() if value == 1 else switched.add(2.0)
    )


@kind
def a_field_of_a_dataclass() -> Reader:
    settings = Settings()
    return by_weight(lambda: settings.weight, lambda value: setattr(settings, "weight", value))


@kind
def a_frozen_dataclass_replaced() -> Reader:
    held = [Frozen()]
    return by_weight(
        lambda: held[0].weight, lambda value: held.__setitem__(0, dataclasses.replace(held[0], weight=value))
    )


@kind
def a_slot_of_an_object() -> Reader:
    class Settings:
        __slots__ = ("weight",)

    settings = Settings()
    settings.weight = 1.0
    return by_weight(lambda: settings.weight, lambda value: setattr(settings, "weight", value))


@kind
def an_attribute_that_is_not_there_at_first() -> Reader:
    settings = types.SimpleNamespace()
    return by_weight(lambda: getattr(settings, "weight", 1.0), lambda value: setattr(settings, "weight", value))


@kind
def an_array_of_numpy() -> Reader:
    weights = np.ones(3)
    return by_weight(lambda: float(weights[1]), lambda value: weights.__setitem__(1, value))


@kind
def a_number_of_numpy() -> Reader:
    held = {"weight": np.float32(1)}
    return by_weight(lambda: float(held["weight"]), lambda value: held.update(weight=np.float32(value)))


@kind
def a_tensor_changed_in_place() -> Reader:
    weight = torch.ones(())
    return by_weight(lambda: weight, weight.fill_)


@kind
def a_tensor_changed_through_numpy() -> Reader:
    weight = torch.ones(1)
    view = weight.numpy()
    return by_weight(lambda: 2 * weight.sum(), lambda value: view.__setitem__(0, value))


@kind
def a_method_of_a_dict() -> Reader:
    settings = {"weight": 1.0}
    return by_weight(functools.partial(settings.get, "weight"), lambda value: settings.update(weight=value))


@kind
def a_method_of_a_tensor() -> Reader:
    weight = torch.ones(1)
    return by_weight(weight.sum, weight.fill_)


@kind
def a_tensor_replaced() -> Reader:
    held = {"weight": torch.ones(())}
    return by_weight(lambda: held["weight"], lambda value: held.update(weight=torch.tensor(value)))


@kind
def a_tensor_given_other_data() -> Reader:
    weight = torch.ones(())

    def put(value: float) -> None:
        weight.data = torch.tensor(value)

    return by_weight(lambda: weight, put)


@kind
def keywords_of_a_partial() -> Reader:
    def weighed(module: nn.Module, batch: Any, *, settings: dict[str, float]) -> Tensor:
        return error(module, batch) * settings["weight"]

    settings = {"weight": 1.0}
    return Reader(
        arguments={"step": functools.partial(weighed, settings=settings)},
        put=lambda value: settings.update(weight=value),
    )


@kind
def the_object_of_a_bound_method() -> Reader:
    objective = Objective()
    return Reader(arguments={"step": objective.step}, put=lambda value: setattr(objective, "weight", value))


@kind
def a_callable_object() -> Reader:
    objective = Objective()
    return Reader(arguments={"step": objective}, put=lambda value: setattr(objective, "weight", value))


@kind
def a_mutable_default() -> Reader:
    def step(module: nn.Module, batch: Any, weights: list[float] = [1.0]) -> Tensor:  # noqa: B006
        return error(module, batch) * weights[0]

    return Reader(arguments={"step": step}, put=lambda value: step.__defaults__[0].__setitem__(0, value))


@kind
def an_attribute_of_the_step() -> Reader:
    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * step.weight

    step.weight = 1.0
    return Reader(arguments={"step": step}, put=lambda value: setattr(step, "weight", value))


@kind
def the_code_of_a_helper() -> Reader:
    def helper() -> float:
        return 1.0

    def doubled() -> float:
        return 2.0

    codes = {True: helper.__code__, False: doubled.__code__}
    return by_weight(helper, lambda value: setattr(helper, "__code__", codes[value == 1]))


@kind
def functions_in_a_table() -> Reader:
    table = {"weigh": lambda loss: loss}

    def step(module: nn.Module, batch: Any) -> Tensor:
        return table["weigh"](error(module, batch))

    return Reader(arguments={"step": step}, put=lambda value: table.update(weigh=lambda loss: loss * value))


@kind
def a_mode_in_words() -> Reader:
    settings = {"mode": "plain"}

    def step(module: nn.Module, batch: Any) -> Tensor:
        loss = error(module, batch)
        return loss if settings["mode"] == "plain" else loss + 0.1 * module(batch[0]).square().mean()

    return Reader(arguments={"step": step}, put=lambda value: settings.update(mode="plain" if value == 1 else "other"))


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


@kind
def a_member_of_an_enum() -> Reader:
    held = [Mode.FIRST]
    return by_weight(
        lambda: 1.0 if held[0] is Mode.FIRST else 3.0,
        lambda value: held.__setitem__(0, Mode.FIRST if value == 1 else Mode.SECOND),
    )


@kind
def a_threshold() -> Reader:
    """The value that matters is one that the first captures do not need."""
    held = [0]
    return by_weight(lambda: 2.0 if held[0] >= 2 else 1.0, lambda value: held.__setitem__(0, round(4 * (value - 1))))


@kind
def true_for_one() -> Reader:
    """Equal values of other types: only the type decides."""
    held: list[Any] = [1]
    return by_weight(
        lambda: 2.0 if held[0] is True else 1.0, lambda value: held.__setitem__(0, True if value != 1 else 1)
    )


@kind
def the_sign_of_zero() -> Reader:
    held = [0.0]
    return by_weight(
        lambda: 1.0 if str(held[0]) == "0.0" else 2.0, lambda value: held.__setitem__(0, 0.0 if value == 1 else -0.0)
    )


# Of objects that are not plain Python


@kind
def an_array_of_the_standard_library() -> Reader:
    weights = array.array("d", [1.0])
    return by_weight(lambda: weights[0], lambda value: weights.__setitem__(0, value))


@kind
def a_number_of_ctypes() -> Reader:
    weight = ctypes.c_double(1.0)
    return by_weight(lambda: weight.value, lambda value: setattr(weight, "value", value))


@kind
def a_number_that_processes_share() -> Reader:
    weight = multiprocessing.Value("d", 1.0)
    return by_weight(lambda: weight.value, lambda value: setattr(weight, "value", value))


@kind
def an_event() -> Reader:
    switched = threading.Event()
    return by_weight(
        lambda: 2.0 if switched.is_set() else 1.0, lambda value: switched.clear() if value == 1 else switched.set()
    )


@kind
def a_view_of_a_dict() -> Reader:
    weights = {"loss": 1.0}
    values = weights.values()
    return by_weight(lambda: next(iter(values)), lambda value: weights.update(loss=value))


@kind
def the_result_of_a_cached_function() -> Reader:
    @functools.lru_cache
    def settings() -> Settings:
        return Settings()

    return by_weight(lambda: settings().weight, lambda value: setattr(settings(), "weight", value))


class Weighing(type):
    @property
    def weight(cls) -> float:
        return cls._hidden  # type: ignore[attr-defined]


@kind
def a_property_of_a_metaclass() -> Reader:
    class Weights(metaclass=Weighing):
        _hidden = 1.0

    return by_weight(lambda: Weights.weight, lambda value: setattr(Weights, "_hidden", value))


class Private:
    __slots__ = ("__weight",)

    def __init__(self) -> None:
        self.set(1.0)

    def set(self, value: float) -> None:
        self.__weight = value

    def get(self) -> float:
        return self.__weight


@kind
def a_private_slot() -> Reader:
    private = Private()
    return by_weight(private.get, private.set)


class Checked(pydantic.BaseModel):
    weight: float = 1.0
    _factor: float = pydantic.PrivateAttr(1.0)

    def set_factor(self, value: float) -> None:
        self._factor = value

    def factor(self) -> float:
        return self._factor


@kind
def a_field_of_a_pydantic_model() -> Reader:
    settings = Checked()
    return by_weight(lambda: settings.weight, lambda value: setattr(settings, "weight", value))


@kind
def a_private_attribute_of_a_pydantic_model() -> Reader:
    settings = Checked()
    return by_weight(settings.factor, settings.set_factor)


class Prior(torch.distributions.Normal):
    """Its own class has no code: the library's code reads `scale`."""


@kind
def an_attribute_that_only_library_code_reads() -> Reader:
    prior = Prior(torch.zeros(()), torch.ones(()), validate_args=False)
    point = torch.tensor(0.5)
    return by_weight(lambda: -prior.log_prob(point), lambda value: setattr(prior, "scale", torch.tensor(value)))


@kind
def a_name_that_the_step_makes_up() -> Reader:
    settings = types.SimpleNamespace(weight0=1.0)
    number = 0
    return by_weight(lambda: getattr(settings, f"weight{number}"), lambda value: setattr(settings, "weight0", value))


@kind
def an_attrgetter() -> Reader:
    read, settings = operator.attrgetter("inner.weight"), types.SimpleNamespace(inner=Settings())
    return by_weight(lambda: read(settings), lambda value: setattr(settings.inner, "weight", value))


@kind
def the_attributes_of_an_object_replaced_as_a_whole() -> Reader:
    settings = Settings()
    return by_weight(lambda: settings.weight, lambda value: setattr(settings, "__dict__", {"weight": value}))


class Level(enum.Enum):
    LOSS = "loss"


@shared
def an_attribute_of_a_member_of_an_enum() -> Reader:
    Level.LOSS.weight = 1.0  # type: ignore[attr-defined]
    return by_weight(lambda: Level.LOSS.weight, lambda value: setattr(Level.LOSS, "weight", value))  # type: ignore[attr-defined]


class Scale(float):
    unit = 1.0


@kind
def an_attribute_of_a_number_of_its_own_class() -> Reader:
    scale = Scale(1.0)
    scale.unit = 1.0
    return by_weight(lambda: scale * scale.unit, lambda value: setattr(scale, "unit", value))


@kind
def the_shape_of_a_tensor() -> Reader:
    weights = torch.ones(4)
    return by_weight(lambda: float(weights.dim()), lambda value: weights.resize_((1,) * round(value) + (4,)))


@kind
def what_an_object_made_in_the_step_reads() -> Reader:
    settings = Settings()

    class Weighted:
        def __init__(self) -> None:
            self.weight = settings.weight

    return by_weight(lambda: Weighted().weight, lambda value: setattr(settings, "weight", value))


# Of the process

_WEIGHT = 1.0
_SETTINGS = {"weight": 1.0}


@shared
def a_global() -> Reader:
    def put(value: float) -> None:
        global _WEIGHT  # noqa: PLW0603
        _WEIGHT = value

    put(1.0)
    return by_weight(lambda: _WEIGHT, put)


@shared
def a_global_dict() -> Reader:
    _SETTINGS["weight"] = 1.0
    return by_weight(lambda: _SETTINGS["weight"], lambda value: _SETTINGS.update(weight=value))


class Config:
    weight = 1.0

    @classmethod
    def value(cls) -> float:
        return cls.weight


@shared
def an_attribute_of_a_class() -> Reader:
    Config.weight = 1.0
    return by_weight(Config.value, lambda value: setattr(Config, "weight", value))


_settings = types.ModuleType("settings_of_a_program")
sys.modules["settings_of_a_program"] = _settings


@shared
def a_variable_of_another_module() -> Reader:
    _settings.weight = 1.0
    return by_weight(lambda: _settings.weight, lambda value: setattr(_settings, "weight", value))


@shared
def the_environment() -> Reader:
    os.environ["WEIGHT_OF_A_PROGRAM"] = "1.0"
    return by_weight(
        lambda: float(os.environ["WEIGHT_OF_A_PROGRAM"]),
        lambda value: os.environ.__setitem__("WEIGHT_OF_A_PROGRAM", str(value)),
    )


@shared
def the_environment_in_bytes() -> Reader:
    os.environ["WEIGHT_OF_A_PROGRAM"] = "1.0"
    return by_weight(
        lambda: float(os.environb[b"WEIGHT_OF_A_PROGRAM"]),
        lambda value: os.environ.__setitem__("WEIGHT_OF_A_PROGRAM", str(value)),
    )


@shared
def a_module_that_is_looked_up() -> Reader:
    _settings.weight = 1.0
    return by_weight(
        lambda: sys.modules["settings_of_a_program"].weight, lambda value: setattr(_settings, "weight", value)
    )


@shared
def a_module_that_is_imported_by_name() -> Reader:
    _settings.weight = 1.0
    return by_weight(
        lambda: importlib.import_module("settings_of_a_program").weight,
        lambda value: setattr(_settings, "weight", value),
    )


# Of functions behind wrappers of the standard library


@kind
def a_function_by_the_class_of_its_argument() -> Reader:
    settings = Settings()
    weighed = functools.singledispatch(lambda loss: loss)
    weighed.register(Tensor, lambda loss: loss * settings.weight)
    return Reader(
        arguments={"step": lambda module, batch: weighed(error(module, batch))},
        put=lambda value: setattr(settings, "weight", value),
    )


@kind
def a_method_by_the_class_of_its_argument() -> Reader:
    settings = Settings()

    class Weighed:
        @functools.singledispatchmethod
        def of(self, loss: Any) -> Any:
            return loss

        @of.register
        def _(self, loss: Tensor) -> Tensor:
            return loss * settings.weight

    weighed = Weighed()
    return Reader(
        arguments={"step": lambda module, batch: weighed.of(error(module, batch))},
        put=lambda value: setattr(settings, "weight", value),
    )


@kind
def a_context_manager_as_a_decorator() -> Reader:
    settings, used = Settings(), [1.0]

    class Weighing(contextlib.ContextDecorator):
        def __enter__(self) -> None:
            used[0] = settings.weight

        def __exit__(self, *_: object) -> None:
            used[0] = 1.0

    @Weighing()
    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * used[0]

    return Reader(arguments={"step": step}, put=lambda value: setattr(settings, "weight", value))


@kind
def a_generator_as_a_decorator() -> Reader:
    settings, used = Settings(), [1.0]

    @contextlib.contextmanager
    def weighing() -> Iterator[None]:
        used[0] = settings.weight
        yield
        used[0] = 1.0

    @weighing()
    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * used[0]

    return Reader(arguments={"step": step}, put=lambda value: setattr(settings, "weight", value))


# Of objects that count by their contents, and of classes of the standard library


class Weighted(collections.UserDict[str, float]):
    pass


@kind
def an_item_of_a_user_dict() -> Reader:
    settings = Weighted(weight=1.0)
    return by_weight(lambda: settings["weight"], lambda value: settings.update(weight=value))


@kind
def an_item_of_a_dict_that_lies_deep_in_objects_of_a_library() -> Reader:
    settings, deep = {"weight": 1.0}, Subset[Any]([0], [0])
    inner = deep
    for _ in range(3):
        inner.dataset = Subset([0], [0])
        inner = inner.dataset
    inner.dataset = settings  # type: ignore[assignment]

    def step(module: nn.Module, batch: Any) -> Tensor:
        return error(module, batch) * (0 * len(deep.indices) + settings["weight"])

    return Reader(arguments={"step": step}, put=lambda value: settings.update(weight=value))


@kind
def an_attribute_of_a_thread() -> Reader:
    class Annealer(threading.Thread):
        weight = 1.0

    annealer = Annealer()
    return by_weight(lambda: annealer.weight, lambda value: setattr(annealer, "weight", value))


@kind
def an_attribute_of_a_loader() -> Reader:
    class Weighing(DataLoader[Any]):
        weight = 1.0

    loader = Weighing([0])
    return by_weight(lambda: loader.weight, lambda value: setattr(loader, "weight", value))


@kind
def an_attribute_of_a_partial() -> Reader:
    criterion: Any = functools.partial(error)
    criterion.weight = 1.0
    return by_weight(lambda: criterion.weight, lambda value: setattr(criterion, "weight", value))


@kind
def an_attribute_of_a_set() -> Reader:
    class Names(set[str]):
        weight = 1.0

    names = Names()
    return by_weight(lambda: names.weight, lambda value: setattr(names, "weight", value))


@kind
def the_default_of_a_dict() -> Reader:
    settings = Settings()
    weights = collections.defaultdict(lambda: settings.weight)

    def weight() -> float:
        value = weights["loss"]
        weights.clear()
        return value

    return by_weight(weight, lambda value: setattr(settings, "weight", value))


@shared
def a_variable_of_a_module_by_a_made_up_name() -> Reader:
    _settings.weight_of_loss = 1.0
    return by_weight(
        lambda: getattr(_settings, f"weight_of_{'loss'}"), lambda value: setattr(_settings, "weight_of_loss", value)
    )


@kind
def a_slot_by_a_made_up_name() -> Reader:
    class Slotted:
        __slots__ = ("weight_of_loss",)

    slotted = Slotted()
    slotted.weight_of_loss = 1.0
    return by_weight(
        lambda: getattr(slotted, "_".join(["weight", "of", "loss"])),  # noqa: FLY002
        lambda value: setattr(slotted, "weight_of_loss", value),
    )


_tabnanny = types.ModuleType(
    "tabnanny"
)  # as a file of the user's beside the program, with a name of the standard library
_tabnanny.__file__ = f"{os.getcwd()}/tabnanny.py"  # noqa: PTH109
exec("weight = 1.0\ndef weigh():\n    return weight", vars(_tabnanny))
sys.modules["tabnanny"] = _tabnanny


@shared
def a_module_with_a_name_of_the_standard_library() -> Reader:
    _tabnanny.weight = 1.0
    return by_weight(_tabnanny.weigh, lambda value: setattr(_tabnanny, "weight", value))


# Of loss objects


@kind
def an_attribute_of_a_loss_module() -> Reader:
    loss = nn.CrossEntropyLoss()
    return Reader(arguments={"loss": loss}, put=lambda value: setattr(loss, "label_smoothing", 0.1 * (value - 1)))


@kind
def a_buffer_of_a_loss_module() -> Reader:
    loss = nn.CrossEntropyLoss(weight=torch.ones(4))
    return Reader(arguments={"loss": loss}, put=loss.weight[:2].fill_)


@kind
def a_property_of_a_loss_object() -> Reader:
    class Loss:
        def __init__(self) -> None:
            self.epoch = 0

        @property
        def smoothing(self) -> float:
            return 0.1 * min(self.epoch, 2)

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(outputs, targets, label_smoothing=self.smoothing)

    loss = Loss()
    return Reader(arguments={"loss": loss}, put=lambda value: setattr(loss, "epoch", round(2 * (value - 1))))


# Of evaluations


@kind
def a_threshold_of_evaluate() -> Reader:
    held = [0.0]

    def evaluate(module: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": error(module, batch), "share": (module(batch[0]) > held[0]).float().mean()}

    return Reader(arguments={"evaluate": evaluate}, put=lambda value: held.__setitem__(0, value - 1))


# Of the model: held by a variable that the changing code reads, too


@kind
def an_attribute_of_the_model() -> Reader:
    scale = types.SimpleNamespace(value=1.0)
    return Reader(
        arguments={"model": lambda: Reads(lambda self, inputs: self.base(inputs) * self.scale.value, scale=scale)},
        put=lambda value: setattr(scale, "value", value),
    )


@kind
def a_dict_of_the_model() -> Reader:
    knobs = {"scale": 1.0}
    return Reader(
        arguments={"model": lambda: Reads(lambda self, inputs: self.base(inputs) * self.knobs["scale"], knobs=knobs)},
        put=lambda value: knobs.__setitem__("scale", value),
    )


@kind
def a_list_of_the_model() -> Reader:
    box = [1.0]
    return Reader(
        arguments={"model": lambda: Reads(lambda self, inputs: self.base(inputs) * self.box[0], box=box)},
        put=lambda value: box.__setitem__(0, value),
    )


@kind
def a_part_of_the_model() -> Reader:
    dropout = nn.Dropout(0.0)
    return Reader(
        arguments={"model": lambda: nn.Sequential(nn.Linear(8, 16), dropout, nn.Tanh(), nn.Linear(16, 4))},
        put=lambda value: setattr(dropout, "p", 0.1 * (value - 1)),
    )


@kind
def the_mode_of_a_part() -> Reader:
    norm = nn.BatchNorm1d(16)
    return Reader(
        arguments={"model": lambda: nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 4))},
        put=lambda value: norm.train(value == 1),
    )


@kind
def an_activation_of_the_model() -> Reader:
    made: list[Any] = []

    def model() -> nn.Module:
        made[:] = [net()]
        return made[0]

    def put(value: float) -> None:
        made[0][1] = nn.Tanh() if value == 1 else nn.SiLU()

    return Reader(arguments={"model": model}, put=put)


@kind
def a_hook_of_the_model() -> Reader:
    made: list[Any] = []
    handles: list[Any] = []

    def model() -> nn.Module:
        made[:] = [net()]
        return made[0]

    def put(value: float) -> None:
        while handles:
            handles.pop().remove()
        if value != 1:
            handles.append(made[0][0].register_forward_hook(lambda module, inputs, output: output * value))

    return Reader(arguments={"model": model}, put=put)


@kind
def the_forward_of_a_part() -> Reader:
    made: list[Any] = []

    def model() -> nn.Module:
        made[:] = [net()]
        return made[0]

    def put(value: float) -> None:
        layer = made[0][3]
        if value == 1:
            vars(layer).pop("forward", None)
        else:
            layer.forward = lambda inputs: functional.linear(inputs, layer.weight * value, layer.bias)

    return Reader(arguments={"model": model}, put=put)


@kind
def a_frozen_part() -> Reader:
    made: list[Any] = []

    def model() -> nn.Module:
        made[:] = [net()]
        return made[0]

    return Reader(arguments={"model": model}, put=lambda value: made[0][0].requires_grad_(value == 1))


@dataclass(slots=True)
class Course:
    """When the state changes."""

    values: list[float] = field(default_factory=lambda: [1.0, 1.5, 2.0])
    passes: int = 0


def reading(name: str, when: str) -> Program:
    """Make a kind's program.

    Args:
        name: the kind.
        when: "pass": another value in each pass. "batch": another value for one batch of each pass, then undone.
            "scheduler": as "pass", by the scheduler.
    """
    reader, course = KINDS[name](), Course()
    arguments: dict[str, Any] = dict(reader.arguments)

    def by_pass() -> list[Any]:
        reader.put(course.values[course.passes])
        course.passes += 1
        return batches()

    def by_batch() -> Iterator[Any]:
        for number, batch in enumerate(batches()):
            reader.put(1.5 if number == 2 else 1.0)
            yield batch
        reader.put(1.0)

    def rate(epoch: int) -> float:
        if epoch:  # the model is not there yet when the scheduler is made
            reader.put(course.values[min(epoch, 2)])
        return 1.0

    if when == "scheduler":
        arguments["train"] = batches
        arguments["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    else:
        arguments["train"] = by_pass if when == "pass" else by_batch
    described: TrainTask = task(**arguments)
    return Program(task=described)
