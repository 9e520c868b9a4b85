"""`PerMemberOptimizer`: run the members' own optimizers, each on its part of the stacked parameters.

The fallback for optimizers without stacked arithmetic, such as a user's own optimizer class.
`fusion/group/stacked_state.py` calls `group_optimizer`, which chooses between this class and `BatchedOptimizer`, when a
group's members are stacked; `ModelState` (`train/state/model_state.py`) calls `step`, with gradients for the parameters of
one update at a time. The module must not know groups, trials or plans, and a member's step must leave the other
members' bits alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hydra_tune.batched.batched_optimizer import BatchedOptimizer, StackedOptimizer, is_stackable


class PerMemberOptimizer(StackedOptimizer):
    """Steps the members in turn, by their own optimizers, including hooks.

    During a member's step the member's own parameters with gradients are views of the stacked parameters, and get their
    own memory back afterwards. The member's state is also stored as state of the stacked parameters, under prefixed names,
    so the group holds and moves the state like that of any optimizer. The valid state is the stored state.

    Attributes:
        around_member: returns the context manager entered around a member's step, by the member's slot.
    """

    def __init__(self, members: Sequence[Optimizer], groups: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(members, groups)
        self.around_member: Callable[[int], AbstractContextManager[object]] = nullcontext
        self._stacked = [p for group in groups for p in group]
        self._own = [self._parts_of(member) for member in members]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        """Step the parameters that have gradients, for the members that are active."""
        assert closure is None, "a stacked step has its gradients"
        for index, (member, parts, active) in enumerate(zip(self.members, self._own, self.active, strict=True)):
            if not active:
                # The member's scheduler would warn about a missing optimizer step.
                member._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
                continue
            present = [(p, stacked) for p, stacked in parts if stacked.grad is not None]
            self._take_over(index, member, present)
            with _parts(index, present), self.around_member(index):
                member.step()
            self._note(index, member, present)

    # Torch sets `hooked` on a step once wrapped to call hooks. The members' own steps call the program's hooks.
    step.hooked = True  # type: ignore[attr-defined]

    @override
    def member_state(self, p: Tensor, index: int) -> dict[str, Any]:
        prefix = _name(index, "")
        return {
            name.removeprefix(prefix): value.clone() if isinstance(value, Tensor) else value
            for name, value in self.state.get(p, {}).items()
            if name.startswith(prefix)
        }

    @override
    def replace(self, index: int, optimizer: Optimizer) -> None:
        super().replace(index, optimizer)
        self._own[index] = self._parts_of(optimizer)

    def put(self, p: Tensor, index: int, own: Mapping[str, Any]) -> dict[int, Tensor]:
        """As of `StackedOptimizer`; drops the old state, so the next step uses the state from `entries`, or begins anew."""
        del own
        state = self.state.get(p, {})
        for name in [name for name in state if name.startswith(_name(index, ""))]:
            del state[name]
        return {}

    @override
    def entries(self, p: Tensor, owns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        named_entries = {
            _name(index, name): value for index, own_state in enumerate(owns) for name, value in own_state.items()
        }
        return {name: value for name, value in named_entries.items() if name not in self.state.get(p, {})}

    def _parts_of(self, member: Optimizer) -> list[tuple[Tensor, Tensor]]:
        parameters = [p for group in member.param_groups for p in group["params"]]
        return list(zip(parameters, self._stacked, strict=True))

    def _take_over(self, index: int, member: Optimizer, present: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Give the member's optimizer the state tensors that the group holds.

        Between steps the group may have moved the state to other tensors than the optimizer created.
        """
        prefix = _name(index, "")
        for p, stacked in present:
            entries = {n: value for n, value in self.state.get(stacked, {}).items() if n.startswith(prefix)}
            if entries:
                member.state[p].update({name.removeprefix(prefix): value for name, value in entries.items()})

    def _note(self, index: int, member: Optimizer, present: Sequence[tuple[Tensor, Tensor]]) -> None:
        for p, stacked in present:
            self.state[stacked].update({_name(index, name): value for name, value in member.state[p].items()})


def _name(index: int, name: str) -> str:
    return f"{index}: {name}"


@contextmanager
def _parts(index: int, present: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Make the given own parameters of a member views of the stacked parameters inside the context, with their gradients."""
    # Swap `.data` instead of the parameters: the optimizer and its hooks refer to the parameter objects themselves.
    own_data = [p.data for p, _ in present]
    for p, stacked in present:
        assert stacked.grad is not None
        p.data = stacked.detach()[index]
        p.grad = stacked.grad[index]
    try:
        yield
    finally:
        for (p, stacked), data in zip(present, own_data, strict=True):
            part = stacked.detach()[index]
            # Optimizers may also replace the data: `p.data = p.data - lr * p.grad`.
            if p.data_ptr() != part.data_ptr():
                part.copy_(p.data)
            p.grad = None
            p.data = data


def group_optimizer(members: Sequence[Optimizer], groups: Sequence[Sequence[Tensor]]) -> StackedOptimizer:
    """Return the optimizer of a group: stacked where the first member's optimizer can be, otherwise member by member.

    The members' optimizers share `options_key`, so the first stands for all.
    """
    kind = BatchedOptimizer if is_stackable(members[0]) else PerMemberOptimizer
    return kind(members, groups)
