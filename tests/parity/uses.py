"""Everyday uses of a trained module, and the marks of one that nobody else has a hand in.

Each use is tried on the module of a plain loop as well: a class that pickle refuses by itself is refused here, too.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import default_collate

from hydra_tune.shard.capture.precision import eager_autocast
from hydra_tune.shard.capture.step_module import training_loss
from hydra_tune.task import TrainTask
from hydra_tune.train.trained import TrainingOutcome

Use = Callable[[TrainingOutcome, TrainTask, Path], None]


def save_state(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    state = result.state_dict()
    torch.save(state, folder / "state.pt")
    loaded = torch.load(folder / "state.pt", weights_only=True)
    assert_same(state, loaded)
    distinct = {id(t): t.nbytes for t in result.module().parameters()} | {
        id(t): t.nbytes for t in result.module().buffers()
    }
    assert (folder / "state.pt").stat().st_size < 2 * sum(distinct.values()) + 2048 * (len(state) + 4)


def save_module(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    torch.save(result.module(), folder / "module.pt")
    assert_same(result.state_dict(), torch.load(folder / "module.pt", weights_only=False).state_dict())


def save_optimizer(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    torch.save(result.optimizer_state_dict(), folder / "optimizer.pt")
    torch.load(folder / "optimizer.pt", weights_only=True)


def safetensors(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    save_model(result.module(), str(folder / "model.safetensors"))
    other = copy.deepcopy(result.module())
    for parameter in other.parameters():
        parameter.data.zero_()
    load_model(other, str(folder / "model.safetensors"))
    assert_same(result.state_dict(), other.state_dict())


def save_pretrained(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    models = [module for module in result.module().modules() if hasattr(module, "save_pretrained")]
    for number, model in enumerate(models[:1]):
        model.save_pretrained(folder / f"pretrained{number}")
        found = type(model).from_pretrained(folder / f"pretrained{number}")
        assert_same(model.state_dict(), found.state_dict())


def pickled(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    assert_same(result.state_dict(), pickle.loads(pickle.dumps(result.module())).state_dict())


def copied(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    other = copy.deepcopy(result.module())
    assert_same(result.state_dict(), other.state_dict())
    assert_ordinary(other)


def half(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    other = copy.deepcopy(result.module()).half()
    assert all(p.dtype == torch.float16 for p in other.parameters() if p.is_floating_point())
    assert_ordinary(other)


def wide(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    other = copy.deepcopy(result.module()).to(torch.float64)
    assert all(p.dtype == torch.float64 for p in other.parameters() if p.is_floating_point())
    assert_ordinary(other)


def compiled(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    torch._dynamo.reset()
    module = copy.deepcopy(result.module())
    loss_of(torch.compile(module, backend="eager"), task).backward()
    assert any(p.grad is not None for p in module.parameters())


def trained_on(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    """With a new optimizer, on the result itself."""
    module = copy.deepcopy(result.module())
    before = [p.detach().clone() for p in module.parameters()]
    optimizer = optimizer_of(task, module)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(module, task).backward()
        optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def resumed(result: TrainingOutcome, task: TrainTask, folder: Path) -> None:
    """With an optimizer that has the state of the one that has trained."""
    module = copy.deepcopy(result.module())
    optimizer = optimizer_of(task, module)
    optimizer.load_state_dict(result.optimizer_state_dict())
    loss_of(module, task).backward()
    optimizer.step()


USES: dict[str, Use] = {
    "torch.save of the state": save_state,
    "torch.save of the module": save_module,
    "torch.save of the optimizer's state": save_optimizer,
    "safetensors' save_model": safetensors,
    "save_pretrained": save_pretrained,
    "pickle": pickled,
    "deepcopy": copied,
    "half": half,
    "to another dtype": wide,
    "compile": compiled,
    "training on": trained_on,
    "training on with the optimizer's state": resumed,
}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same or (isinstance(value, Tensor) and value.isnan().any()), name


def optimizer_of(task: TrainTask, module: nn.Module) -> torch.optim.Optimizer:
    return task.optimizer(list(module.parameters()) if task.param_groups is None else task.param_groups(module))


def loss_of(module: nn.Module, task: TrainTask) -> Tensor:
    """The task's own loss of its first samples."""
    data: Any = task.train
    torch.manual_seed(0)
    with eager_autocast(task.precision, "cpu"):
        loss = training_loss(task)(module, default_collate([data[number] for number in range(4)]))
    assert isinstance(loss, Tensor)
    return loss


def named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_ordinary(module: nn.Module) -> None:
    """Every parameter and buffer fills a storage that no other one has."""
    owners: dict[int, str] = {}
    for name, tensor in named(module).items():
        storage = tensor.untyped_storage()
        assert tensor.storage_offset() == 0, name
        assert storage.nbytes() == tensor.nbytes, (name, storage.nbytes(), tensor.nbytes)
        if tensor.numel():
            assert owners.setdefault(storage.data_ptr(), name) == name


def unlike(result: TrainingOutcome, plain: TrainingOutcome) -> list[str]:
    """Where a result's module and optimizer are made otherwise than those of a plain loop."""
    module, other = result.module(), plain.module()
    tensors, others = named(module), named(other)
    if tensors.keys() != others.keys():
        return [f"names: {tensors.keys() ^ others.keys()}"]
    return [
        *(
            f"{name} is {_made(t)}, not {_made(others[name])}"
            for name, t in tensors.items()
            if _made(t) != _made(others[name])
        ),
        *(f"other ties of {kind}" for kind in _KINDS if _tied(module, kind) != _tied(other, kind)),
        *(
            f"module {name!r}: {_kept(one)}, not {_kept(two)}"
            for (name, one), two in zip(module.named_modules(), other.modules(), strict=True)
            if _kept(one) != _kept(two)
        ),
        *_unlike_states(result.optimizer_state_dict()["state"], plain.optimizer_state_dict()["state"]),
    ]


_KINDS = ("named_parameters", "named_buffers")


def _unlike_states(mine: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> list[str]:
    return [
        f"optimizer's {name} of {key} is {_laid(value)}, not {_laid(theirs[key][name])}"
        for key, entries in mine.items()
        for name, value in entries.items()
        if isinstance(value, Tensor) and _laid(value) != _laid(theirs[key][name])
    ]


def _laid(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def _made(tensor: Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor.grad is None


def _tied(module: nn.Module, kind: str) -> list[list[str]]:
    by_id: dict[int, list[str]] = {}
    for name, tensor in getattr(module, kind)(remove_duplicate=False):
        by_id.setdefault(id(tensor), []).append(name)
    return list(by_id.values())


def _kept(module: nn.Module) -> tuple[object, ...]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return type(module).__qualname__, module.training, [len(getattr(module, name)) for name in names]


def failures(result: TrainingOutcome, plain: TrainingOutcome, task: TrainTask, folder: Path) -> dict[str, str]:
    """Uses that a result does not stand and a plain loop's does, each with the error; and how it is made otherwise."""
    wrong = {}
    for number, (name, use) in enumerate(USES.items()):
        try:
            place = folder / str(number)
            place.mkdir(parents=True, exist_ok=True)
            use(result, task, place)
        except Exception as error:  # noqa: BLE001 - whatever it is counts
            try:
                use(plain, task, place)
            except Exception as also:  # noqa: BLE001
                if type(also) is type(error):
                    continue
            wrong[name] = f"{type(error).__name__}: {str(error)[:200]}"
    if found := unlike(result, plain):
        wrong["as the class makes it"] = "; ".join(found[:3])
    try:
        assert_ordinary(result.module())
    except AssertionError as error:
        wrong["memory of its own"] = str(error)[:200]
    return wrong
