"""Splits operators into pieces for `split_operators`, checks the optimizer, and restores the whole model at the end.

`Trial` (`train/trial.py`) and `train_plain` (`train/loop/reference_loop.py`) split the operators between building the
model and building the optimizer, so that both train the same pieces. The model and its parameter groups are made while
the model is whole, so the model draws the same numbers and keeps its own names. Then the pieces replace the whole
parameters, in the modules and in the groups. Both check the optimizer (`SplitOperators.check`) before the first step, and
restore the model at the end. A refusal leaves the model whole.

Example: `split_operators={"head": 4}` turns the weight of a Linear `head`, of shape `(vocabulary, width)`, into four parameters
of about `(vocabulary / 4, width)` each, which may lie in different shards.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydra_tune.errors import TaskError
from hydra_tune.quantities import parse_bytes
from hydra_tune.shard.operators.operator_tree import Operator, OperatorTree
from hydra_tune.shard.operators.split_modules import (
    ColumnSplitEmbedding,
    RowSplitEmbedding,
    SplitLinear,
    TensorCut,
    piece_name,
)
from hydra_tune.shard.verify.elementwise_optimizers import check_elementwise, whole_state


@dataclass(slots=True, kw_only=True)
class _SplitOperator:
    """A module in pieces.

    Attributes:
        parameters: registry of parameters of the whole module.
    """

    module: Operator
    kind: type[nn.Module]
    parameters: dict[str, nn.Parameter | None]


@dataclass(slots=True, kw_only=True)
class _SplitParameter:
    """A parameter in pieces.

    Attributes:
        whole: the whole parameter, which the model had before and will have again.
        cut: dimension and sizes of the cut.
    """

    name: str
    whole: nn.Parameter
    cut: TensorCut
    stride: tuple[int, ...]
    pieces: list[nn.Parameter] = field(default_factory=list)

    def take_apart(self) -> None:
        """Make the pieces, and fill the whole parameter with NaN."""
        whole = self.whole
        parts = torch.split(whole.detach(), list(self.cut.sizes), self.cut.dim)
        # Cloned, because pieces with a common storage could not lie in different blocks.
        self.pieces = [nn.Parameter(part.clone(memory_format=torch.contiguous_format)) for part in parts]
        for piece in self.pieces:
            piece.requires_grad_(whole.requires_grad)
        # Code with a private reference to the parameter gets a NaN loss, instead of a loss that silently ignores the
        # weights. A single element fills the whole shape, so the parameter takes no memory.
        whole.data = torch.full((1,), torch.nan, dtype=whole.dtype).expand(whole.shape)

    def put_together(self) -> None:
        """Restore the whole parameter from its pieces."""
        whole = torch.empty_strided(self.whole.shape, self.stride, dtype=self.whole.dtype)
        for part, piece in zip(torch.split(whole, list(self.cut.sizes), self.cut.dim), self.pieces, strict=True):
            part.copy_(piece.detach())
        self.whole.data = whole


class SplitOperators:
    """The operators of a single model that are in pieces."""

    def __init__(self, modules: Sequence[_SplitOperator] = (), parameters: Sequence[_SplitParameter] = ()) -> None:
        self._modules = modules
        self._parameters = parameters
        self._by_whole = {id(p.whole): p for p in parameters}

    def in_groups(self, groups: Any) -> Any:
        """Return an optimizer's argument with the pieces in place of the whole parameters."""
        if isinstance(groups, Mapping):
            return {key: self.in_groups(value) for key, value in groups.items()}
        if type(groups) in (list, tuple):
            items = [part for item in groups for part in self._expanded(item)]
            # Unchanged sequences are returned as they are, so that options such as betas stay tuples.
            return groups if len(items) == len(groups) and all(map(operator.is_, items, groups)) else items
        part = self._known(groups)
        return groups if part is None else list(part.pieces)

    def _expanded(self, item: Any) -> Iterator[Any]:
        is_named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)  # noqa: PLR2004 - name and parameter
        split_parameter = self._known(item[1] if is_named else item)
        if split_parameter is None:
            yield item if is_named else self.in_groups(item)
        elif is_named:
            yield from ((piece_name(item[0], index), piece) for index, piece in enumerate(split_parameter.pieces))
        else:
            yield from split_parameter.pieces

    def _known(self, value: object) -> _SplitParameter | None:
        return self._by_whole.get(id(value)) if isinstance(value, nn.Parameter) else None

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that would train the pieces differently from the whole; the model is then restored first.

        Raises:
            TaskError: the optimizer holds a whole parameter, separates the pieces of a parameter, or does not update
                each element by itself.
        """
        try:
            check_elementwise(optimizer, list(self._members(optimizer)))
        except TaskError:
            self.restore(optimizer)
            raise

    def _members(self, optimizer: Optimizer) -> Iterator[tuple[str, int, int, Tensor]]:
        """Trained parameters in pieces: name, parameter group, dimension, and a piece."""
        group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for parameter in self._parameters:
            if id(parameter.whole) in group_of:
                raise TaskError(
                    f"the optimizer holds the whole {parameter.name!r}, which split_operators has cut; let optimizer= use "
                    "the parameters that it receives, and param_groups= return lists, or dicts with a list under 'params'"
                )
            first_group, *other_groups = (group_of.get(id(piece)) for piece in parameter.pieces)
            if any(other != first_group for other in other_groups):
                raise TaskError(
                    f"the optimizer puts the pieces of {parameter.name!r} into different groups; let param_groups= make the "
                    "groups"
                )
            if first_group is not None and parameter.whole.requires_grad:
                yield parameter.name, first_group, parameter.cut.dim, parameter.pieces[0]

    def restore(self, optimizer: Optimizer) -> None:
        """Restore the model, and the optimizer over the whole parameters, as if nothing had been cut.

        Raises:
            TaskError: the optimizer's states of the pieces are not the state of a single tensor.
        """
        whole_by_first_piece: dict[int, nn.Parameter] = {}
        later_piece_ids: set[int] = set()
        for parameter in self._parameters:
            parameter.put_together()
            states = [optimizer.state.pop(piece, {}) for piece in parameter.pieces]
            # An optimizer that has not stepped yet has no state to join.
            if any(states):
                optimizer.state[parameter.whole] = whole_state(states, parameter.cut)
            whole_by_first_piece[id(parameter.pieces[0])] = parameter.whole
            later_piece_ids.update(map(id, parameter.pieces[1:]))
        for group in optimizer.param_groups:
            _put_back(group, whole_by_first_piece, later_piece_ids)
        for split in self._modules:
            split.module.__class__ = split.kind  # type: ignore[assignment]
            for name in ("split_path", "split_sizes"):
                delattr(split.module, name)
            split.module._parameters.clear()  # noqa: SLF001 - the registry itself is restored
            split.module._parameters.update(split.parameters)  # noqa: SLF001


def _listed(groups: Any) -> Any:
    """Parameter groups with lists in place of iterators, because an iterator would run over the model after the cut."""
    if isinstance(groups, Iterator):
        return [_listed(item) for item in groups]
    if isinstance(groups, Mapping):
        return {key: _listed(value) for key, value in groups.items()}
    return [_listed(item) for item in groups] if type(groups) is list else groups


def split_operators(
    model: nn.Module, groups: Any, wanted: Mapping[str, int] | str | None
) -> tuple[SplitOperators, Any]:
    """Cut operators of a newly built model.

    `groups` is the argument for the optimizer of the whole model; `wanted` is as in `TrainTask`.

    Returns:
        The operators in pieces, and the argument for the optimizer.

    Raises:
        TaskError: a module does not exist, or cannot be cut without changing its results; by name.
    """
    if not wanted:
        return SplitOperators(), groups
    groups = _listed(groups)
    tree = OperatorTree(model)
    if isinstance(wanted, Mapping):
        chosen = {tree.named(path): count for path, count in wanted.items()}
    else:
        chosen = tree.larger_than(parse_bytes(wanted))
    tree.add_tied(chosen, may_differ=not isinstance(wanted, Mapping))
    cuts = {module: tree.cut(module, count) for module, count in chosen.items() if count > 1}
    # All modules are checked before the first parameter is taken apart, so that a refusal leaves the model whole.
    for module in cuts:
        tree.check(module)
    parameters = {
        id(parameter): _SplitParameter(
            name=tree.names[id(parameter)], whole=parameter, cut=cut, stride=tuple(parameter.stride())
        )
        for module, cut in cuts.items()
        for parameter in module.parameters()
    }
    for parameter in parameters.values():
        parameter.take_apart()
    modules = [_taken_apart(module, tree.paths[module], cut, parameters) for module, cut in cuts.items()]
    operators = SplitOperators(modules, list(parameters.values()))
    return operators, operators.in_groups(groups)


def _taken_apart(
    module: Operator, path: str, cut: TensorCut, parameters: Mapping[int, _SplitParameter]
) -> _SplitOperator:
    """Give a module its pieces, and change its class."""
    registry = module._parameters  # noqa: SLF001 - a class in pieces would not register whole parameters
    split = _SplitOperator(module=module, kind=type(module), parameters=dict(registry))
    registry.clear()
    for name, whole in split.parameters.items():
        pieces = [] if whole is None else parameters[id(whole)].pieces
        registry.update({piece_name(name, index): piece for index, piece in enumerate(pieces)})
    if isinstance(module, nn.Linear):
        module.__class__ = SplitLinear
    else:
        module.__class__ = ColumnSplitEmbedding if cut.dim else RowSplitEmbedding
    vars(module).update(split_path=path, split_sizes=cut.sizes)
    return split


def _put_back(group: dict[str, Any], first: Mapping[int, nn.Parameter], rest: set[int]) -> None:
    """Replace the first pieces in a group by the whole parameters, and remove the other pieces."""
    params = group["params"]
    kept_indices = [index for index, parameter in enumerate(params) if id(parameter) not in rest]
    if "param_names" in group:
        names = group["param_names"]
        group["param_names"] = [
            names[index].removesuffix(piece_name("", 0)) if id(params[index]) in first else names[index]
            for index in kept_indices
        ]
    group["params"] = [first.get(id(params[index]), params[index]) for index in kept_indices]
