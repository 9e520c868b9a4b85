"""A batch's values as blocks: the store of a chain of units in the pool.

`BatchUnits` (`train/loop/batch_units.py`) makes a `BlockStore` for each batch, and the batch's units read and write values
there, one unit at a time. Subclasses such as `TrainingBatch` (`train/loop/training_batch.py`) hand gradients from store to
store, and the leases of units set `stand_ins`. `UnitRollback` (`train/loop/unit_rollback.py`) undoes a unit that ran out of
memory with `begin` and `take_back`; `ShardChain` (`shard/execute/chain.py`) ends such a chance with `settle`. A store has no
lock: while a unit runs, other threads may call `blocks` alone. The module must not know the order of units.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hydra_tune.devices.device import Device
from hydra_tune.memory.block import Block, BlockKind, BlockTensorView, whole_storage
from hydra_tune.memory.block_release import bring_home, drop
from hydra_tune.memory.lease import Lease
from hydra_tune.shard.capture.batch import same_bits
from hydra_tune.shard.execute.chain import earlier_gradient_key, parameter_gradient_key
from hydra_tune.shard.partition.plan import ShardPlan
from hydra_tune.train.state.model_state import ModelState

_STATE_KINDS = (BlockKind.PARAMETERS, BlockKind.BUFFERS, BlockKind.OPTIMIZER)
_PARAMETER_GRADIENTS = (parameter_gradient_key(""), earlier_gradient_key(""))
# Prefixes of keys in `shard/execute/chain.py` for values that stay within a shard.
_WITHIN_SHARDS = ("saved:", "kept:")


class BlockStore:
    """Values of a batch, by key; a running unit sets `lease`, and `stand_ins` replaces tensors of the state.

    Values that were views of one storage are views of one block. The block is dropped with its last value, unless a value
    on the block was given away.

    Args:
        plan: plan whose constants the batch uses.
        batch: the batch's tensors, on the host.
        device: device whose alignment the blocks have.
    """

    def __init__(self, state: ModelState, plan: ShardPlan, batch: Sequence[Tensor], device: Device) -> None:
        self._state = state
        self._values: dict[str, BlockTensorView] = {}
        self._uses: Counter[Block] = Counter()
        self._given: set[Block] = set()
        self._undo: list[tuple[str, BlockTensorView | None]] | None = None
        self.lease: Lease | None = None
        self.stand_ins: Mapping[str, Tensor] = {}
        fixed = {**{_input_key(i): tensor for i, tensor in enumerate(batch)}, **_named(plan.constants)}
        self._take_over(fixed, device)

    def blocks(self, keys: Sequence[str], constants: Sequence[str], inputs: Sequence[int]) -> list[Block]:
        """Return the blocks under the keys that exist."""
        all_keys = [*keys, *(_constant_key(name) for name in constants), *(_input_key(index) for index in inputs)]
        values = [self._values.get(key) for key in all_keys]
        return [value.block for value in values if value is not None]

    def state(self, names: Sequence[str]) -> list[Tensor]:
        """Return parameters and buffers by name."""
        tensors, stand_ins = self._state.tensors, self.stand_ins
        return [stand_ins[name] if name in stand_ins else tensors[name] for name in names]

    def constants(self, names: Sequence[str]) -> list[Tensor]:
        """Return constants by name."""
        return [self._values[_constant_key(name)].tensor() for name in names]

    def inputs(self, indices: Sequence[int]) -> list[Tensor]:
        """Return batch tensors by index."""
        return [self._values[_input_key(index)].tensor() for index in indices]

    def get(self, key: str) -> Tensor | None:
        """Return a value, or None."""
        value = self._values.get(key)
        return None if value is None else value.tensor()

    def bring_home(self, key: str) -> Tensor | None:
        """Return a value, moved to the host, or None."""
        value = self._values.get(key)
        if value is None:
            return None
        bring_home(value.block)
        return value.host_tensor()

    def put(self, key: str, tensor: Tensor) -> None:
        """Store a value; a view of the trial's state is copied, because the state will change."""
        assert self.lease is not None, "values are made by running units"
        if self.lease.owns(tensor, _STATE_KINDS):
            tensor = tensor.clone()
        block = self.lease.block_of(_kind_of(key), tensor)
        block.tenant = self._state.tenant
        block.owner = self._state.number
        self._uses[block] += 1
        # While the unit can be undone, a replaced value has to stay.
        if self._undo is None:
            self.drop(key)
        else:
            self._undo.append((key, self._values.get(key)))
        self._values[key] = BlockTensorView(block, tensor)

    def begin(self) -> None:
        """Start recording replaced values, for `take_back` to restore until `settle`."""
        self._undo = []

    def settle(self) -> None:
        """Make the values put since `begin` final, and drop the replaced values."""
        undo, self._undo = self._undo, None
        for _, replaced in undo or ():
            if replaced is not None:
                self._let_go(replaced)

    @property
    def is_settled(self) -> bool:
        """Whether nothing can be taken back."""
        return self._undo is None

    def take_back(self) -> None:
        """Drop the values put since `begin`, and restore the replaced values."""
        undo, self._undo = self._undo, None
        # Last first: a key that was put twice gets its oldest value back.
        for key, replaced in reversed(undo or []):
            self.drop(key)
            if replaced is not None:
                self._values[key] = replaced

    def set_apart(self, key: str) -> None:
        """Give a value its own memory, if the block holds other values."""
        value = self._values.get(key)
        if value is None or self._uses[value.block] == 1:
            return
        assert self.lease is not None, "values are made by running units"
        # The copy needs room of its own, beyond the workspace that the pilot has measured.
        self.lease.grow(value.block.nbytes)
        self.put(key, value.tensor().clone())

    def changed(self, key: str) -> None:
        """Mark a value's block as dirty, because the device copy has changed."""
        block = self._values[key].block
        # Without a device copy, the host copy is the changed copy.
        block.dirty = block.data is not None

    def give_away(self, keys: Iterable[str]) -> dict[str, BlockTensorView]:
        """Take values out for another owner, and with the values their blocks; missing keys are skipped."""
        values = {key: self._values.pop(key) for key in keys if key in self._values}
        for value in values.values():
            self._uses[value.block] -= 1
            self._given.add(value.block)
        return values

    def take_in(self, values: Mapping[str, BlockTensorView]) -> None:
        """Keep values from another store's `give_away`."""
        self._values |= values
        for value in values.values():
            self._uses[value.block] += 1
            # The block is this store's own again, so the last value on it drops the block.
            self._given.discard(value.block)

    def drop(self, key: str) -> None:
        """Forget a value."""
        value = self._values.pop(key, None)
        if value is not None:
            self._let_go(value)

    def drop_all(self, keys: Iterable[str]) -> None:
        """Forget several values."""
        for key in keys:
            self.drop(key)

    def _let_go(self, value: BlockTensorView) -> None:
        """Drop the block of a forgotten value, unless other values lie on the block or the block was given away."""
        self._uses[value.block] -= 1
        if not self._uses[value.block]:
            del self._uses[value.block]
            if value.block in self._given:
                # A value on the block was given away, and the block with the value.
                return
            if self.lease is None:
                drop(value.block)
            else:
                self.lease.absorb(value.block)

    def touched_inputs(self) -> None:
        """Mark changed device copies of the batch as dirty; no pager writes unchanged copies back."""
        for block in self._input_blocks():
            if block.data is not None and block.host is not None and not block.dirty:
                block.dirty = _has_changed(block.data, block.host)

    def bring_inputs_home(self) -> None:
        """Bring the batch home, so that the batch's own memory has the changes made by the step."""
        for block in self._input_blocks():
            bring_home(block)

    def _input_blocks(self) -> list[Block]:
        return [value.block for key, value in self._values.items() if key.startswith(_input_key(""))]

    def clear(self) -> None:
        """Forget all values."""
        self.settle()
        self.drop_all(list(self._values))

    def _take_over(self, tensors: dict[str, Tensor], device: Device) -> None:
        """Make blocks for tensors on the host; tensors of a common storage share a block."""
        blocks: dict[int, Block] = {}
        for key, tensor in tensors.items():
            storage = tensor.untyped_storage()
            block = blocks.get(storage._cdata)  # noqa: SLF001 - the storage's identity
            if block is None:
                block = Block(BlockKind.INPUTS, storage.nbytes(), device.alignment)
                block.host, block.owner = whole_storage(tensor.detach()), self._state.number
                blocks[storage._cdata] = block  # noqa: SLF001
            self._uses[block] += 1
            self._values[key] = BlockTensorView(block, tensor)


def _kind_of(key: str) -> BlockKind:
    """Return the kind of block for a key of the chain; names of values have no colon."""
    if key.startswith(_PARAMETER_GRADIENTS):
        return BlockKind.GRADIENTS
    return BlockKind.ACTIVATIONS if key.startswith(_WITHIN_SHARDS) else BlockKind.BOUNDARIES


def _named(constants: dict[str, Tensor]) -> dict[str, Tensor]:
    return {_constant_key(name): tensor for name, tensor in constants.items()}


def _constant_key(name: str) -> str:
    return f"constant:{name}"


def _input_key(index: int | str) -> str:
    return f"input:{index}"


def _has_changed(data: Tensor, host: Tensor) -> bool:
    """Whether the device copy differs from the host copy; tensors without bytes count as unchanged."""
    return not isinstance(data, FakeTensor) and not same_bits(host, data.cpu())
