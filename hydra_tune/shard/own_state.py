"""What the user's own code does to a module's parameters and buffers beyond overwriting them.

Parameters and buffers live in blocks and are known to the optimizer, so a forward must not add or replace any. A buffer that is
replaced by a tensor of its kind (`self.mean = 0.9 * self.mean + ...`) is as good as one that is overwritten.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from hydra_tune.errors import TaskError
from hydra_tune.shard.capture import named_state


def replaced_buffers(before: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are other tensors than before, of the same kind.

    Args:
        before: the model's parameters and buffers as they were.
        model: the model after its code has run.

    Raises:
        TaskError: the code has added, removed or replaced anything else.
    """
    present = dict(named_state(model))
    odd = sorted(present.keys() ^ before.keys())
    if odd:
        name = odd[0]
        done, kind = ("adds", present[name]) if name in present else ("removes", before[name])
        raise TaskError(
            f"the model's forward {done} its {_kind(kind)} {name!r}, which the optimizer and the memory plan cannot follow; "
            "make it in __init__, or run one batch through the module in model="
        )
    replaced = {name: tensor for name, tensor in present.items() if tensor is not before[name]}
    for name, tensor in replaced.items():
        if isinstance(before[name], nn.Parameter) or not _alike(before[name], tensor):
            raise TaskError(
                f"the model's forward replaces its {_kind(before[name])} {name!r} by another tensor"
                f"{_difference(before[name], tensor)}; overwrite it in place, e.g. by copy_() under torch.no_grad()"
            )
    return replaced


def put_back(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Let a name hold a buffer again."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, buffer)


def _kind(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _alike(old: Tensor, new: Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device and not new.requires_grad


def _difference(old: Tensor, new: Tensor) -> str:
    if old.shape != new.shape:
        return f" of shape {tuple(new.shape)} instead of {tuple(old.shape)}"
    if old.dtype != new.dtype:
        return f" of {new.dtype} instead of {old.dtype}"
    if old.device != new.device:
        return f" on {new.device} instead of {old.device}"
    return " that requires gradients" if new.requires_grad and not isinstance(old, nn.Parameter) else ""
