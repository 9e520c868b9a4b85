"""Finds the operators of a model to cut for `split_operators`, and the positions of the cuts; refuses others with a reason.

`split_operators` (`operator_splitting.py`) asks an `OperatorTree` for all cuts before the first weight is taken apart. The
module knows modules and their parameters, and must change nothing: a refusal leaves the model whole.
"""

import difflib
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeGuard

from torch import nn

from hydra_tune.errors import TaskError
from hydra_tune.quantities import format_bytes
from hydra_tune.shard.capture.step_capture import named_state
from hydra_tune.shard.operators.split_modules import TensorCut

_UNIT = 64  # in rows: pieces of a multiple of 64 rows have rounded like the whole in every kernel tried
_MIN_UNITS = 4  # units in each piece, so that no piece is much larger than another
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")

Operator = nn.Linear | nn.Embedding


class OperatorTree:
    """Answers questions about a model to be cut.

    Attributes:
        paths: module -> first name of the module.
        names: id of a parameter or buffer -> first name of the tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths = {module: path for path, module in model.named_modules()}
        self.names = {id(tensor): name for name, tensor in named_state(model)}
        # With duplicates, because the user may name a shared module by any of its names.
        self._by_path = dict(model.named_modules(remove_duplicate=False))
        self._holders: dict[int, list[nn.Module]] = {}
        for module in self.paths:
            for parameter in module._parameters.values():  # noqa: SLF001 - its own, under each name that it has for them
                self._holders.setdefault(id(parameter), []).append(module)
        # If one of two tensors on a common storage were cut, the other would no longer follow its changes.
        storages = Counter(tensor.untyped_storage()._cdata for _, tensor in named_state(model) if tensor.numel())  # noqa: SLF001
        self._shared = {storage for storage, count in storages.items() if count > 1}

    def named(self, path: str) -> Operator:
        """Return the operator with this name.

        Raises:
            TaskError: the model has no such operator.
        """
        candidate = self._by_path.get(path)
        if candidate is None:
            operators = [name for name, module in self._by_path.items() if is_operator(module)]
            close_names = difflib.get_close_matches(path, operators, n=1)
            names = ", ".join(map(repr, operators)) or "nothing"
            hint = f"did you mean {close_names[0]!r}?" if close_names else f"operators that can be cut: {names}"
            raise TaskError(f"split_operators names {path!r}, which the model does not have; {hint}")
        if not is_operator(candidate):
            raise TaskError(
                f"split_operators names {path!r}, which is a {_class_name(candidate)}; only nn.Linear and nn.Embedding "
                "can be cut, not their subclasses, whose code may use the weight in other ways"
            )
        return candidate

    def larger_than(self, limit: int) -> dict[Operator, int]:
        """Operators with more bytes of parameters than `limit`, and the fewest pieces with at most `limit` bytes each.

        Raises:
            TaskError: a piece of a single row or column exceeds the limit.
        """
        return {
            module: self._count(module, limit)
            for module in self.paths
            if is_operator(module) and _num_bytes(module) > limit
        }

    def _count(self, module: Operator, limit: int) -> int:
        nbytes, size = _num_bytes(module), self._size(module)
        # From the fewest conceivable pieces on; pieces of unequal sizes may need a larger number.
        for count in range(-(-nbytes // limit), size + 1):
            # The largest piece's share of the bytes against the limit, multiplied out to stay exact.
            if max(self.cut(module, count).sizes) * nbytes <= limit * size:
                return count
        raise TaskError(
            f"split_operators={format_bytes(limit)!r} is less than one of the {size} rows or columns of {self._label(module)}, "
            f"{format_bytes(nbytes / size)}; raise the limit to at least a row or column"
        )

    def add_tied(self, chosen: dict[Operator, int], *, may_differ: bool) -> None:
        """Add the modules that hold parameters of chosen modules, with the same number of pieces.

        With `may_differ`, the largest number wins if tied modules have several numbers.

        Raises:
            TaskError: a tied module cannot be cut, or has another number.
        """
        # A tied module may be tied to further modules, hence the queue.
        queue = list(chosen)
        while queue:
            module = queue.pop()
            tied = {other: p for p in module.parameters() for other in self._holders[id(p)] if other is not module}
            for other, parameter in tied.items():
                self._check_tie(module, other, parameter, chosen, may_differ=may_differ)
                if is_operator(other) and chosen.get(other, 0) < chosen[module]:
                    chosen[other] = chosen[module]
                    queue.append(other)

    def _check_tie(
        self, module: Operator, other: nn.Module, tie: nn.Parameter, chosen: Mapping[Any, int], *, may_differ: bool
    ) -> None:
        name = self.names[id(tie)]
        if not is_operator(other):
            raise TaskError(
                f"split_operators would cut {name!r}, which {self._label(other)} holds too, a {_class_name(other)}; only "
                "nn.Linear and nn.Embedding themselves can be cut"
            )
        if chosen.get(other, chosen[module]) != chosen[module] and not may_differ:
            raise TaskError(
                f"split_operators cuts {self._label(module)} into {chosen[module]} and {self._label(other)} into "
                f"{chosen[other]} pieces, which both hold {name!r}; give them the same number"
            )

    def cut(self, module: Operator, count: int) -> TensorCut:
        """Return the cut of a module into `count` pieces.

        Raises:
            TaskError: the module has fewer rows or columns than pieces.
        """
        size = self._size(module)
        if count > size:
            raise TaskError(
                f"split_operators cuts {self._label(module)} into {count} pieces, but the operator has only "
                f"{size} rows or columns"
            )
        dim = self._dim(module)
        return TensorCut(dim=dim, sizes=_sizes(size, count, 1 if dim else _UNIT))

    def check(self, module: Operator) -> None:
        """Refuse a module that its pieces could not replace.

        Raises:
            TaskError: the pieces could not replace the module; the message gives the reason.
        """
        why = _why_not(module)
        # In a piece by rows, indices of other pieces look up the first row, and would count as its occurrences.
        if why is None and self._dim(module) == 0 and isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
            why = "is tied to a Linear and scales gradients by how often an index occurs (scale_grad_by_freq)"
        if why is None and any(p.untyped_storage()._cdata in self._shared for p in module.parameters()):  # noqa: SLF001
            why = "shares memory with another parameter or buffer without holding the same Parameter"
        if why is not None:
            raise TaskError(
                f"split_operators cannot cut {self._label(module)}, which {why}; remove the module from split_operators"
            )

    def _dim(self, module: Operator) -> int:
        """Dimension of the cut: rows for a Linear and an Embedding tied to a Linear; columns, which are exact, for the rest."""
        return int(not any(isinstance(other, nn.Linear) for other in self._holders.get(id(module.weight), ())))

    def _size(self, module: Operator) -> int:
        return module.weight.shape[self._dim(module)]

    def _label(self, module: nn.Module) -> str:
        return repr(self.paths[module]) if self.paths[module] else f"the {_class_name(module)}"


def is_operator(module: nn.Module) -> TypeGuard[Operator]:
    """Whether a module can be cut; a subclass cannot, because its code may use the weight differently."""
    return type(module) in (nn.Linear, nn.Embedding)


def _class_name(module: nn.Module) -> str:
    return type(module).__qualname__


def _num_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _sizes(size: int, count: int, unit: int) -> tuple[int, ...]:
    """Rows or columns of each piece: as equal as possible, in multiples of `unit` if there are enough."""
    unit = unit if size >= count * unit * _MIN_UNITS else 1
    units = -(-size // unit)
    ends = [min(size, unit * (units * index // count)) for index in range(count + 1)]
    return tuple(stop - start for start, stop in pairwise(ends))


def _why_not(module: Operator) -> str | None:
    """Reason against cutting a module, regardless of the rest of the model; None if there is no reason."""
    names = {"weight", "bias"} if isinstance(module, nn.Linear) else {"weight"}
    parameters = list(module.parameters())
    reasons = {
        "has other parameters than its class (a parametrization, or pruning)": set(module._parameters) != names  # noqa: SLF001
        or any(type(p) is not nn.Parameter or not p.is_floating_point() for p in parameters),
        "has hooks, or a forward of its own": "forward" in vars(module)
        or any(getattr(module, name) for name in _HOOKS),
        "has a hook on the gradient of a parameter": any(
            getattr(p, name, None) for p in parameters for name in _PARAMETER_HOOKS
        ),
        "renormalizes rows in its forward (max_norm)": getattr(module, "max_norm", None) is not None,
        "makes sparse gradients (sparse=True)": bool(getattr(module, "sparse", False)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
