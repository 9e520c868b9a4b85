"""The frozen parameters of a trial that lie in a shared file: which they are, and where a unit reads them.

`TensorGroups` (`tensor_groups.py`) keeps a `SharedTensors` beside its groups. Captured units
(`train/loop/batch_units.py`) and batches side by side (`replicas.py`) ask for `views`; bursts (`train/loop/burst.py`) and
units of the user's own code run inside `pointed`. After code of the user's, `ModelState` (`model_state.py`) asks for the
parameters that are shared no more (`lost`). `Trial` (`train/trial.py`) puts the `digests` into checkpoints. The module must
not know graphs or steps.

A parameter is shared while frozen, and while showing the untouched bytes of the file (`memory/shared/shared_file.py`).
Between units the trial's own parameter lies in the trial's mapping, on the host, so the user's code there reads the
parameter as ever.

Note: three ways to read a device's copy. A captured unit computes on a *view* of the copy in place of the parameter. The
user's own code reads the parameter itself, which is *pointed* at the copy for the length of a unit. On a device that
computes on host tensors, the user's own code reads the mapping, and the copy only counts the bytes.

Note: threads. The shares change only on the thread that runs the trial; other threads may ask for `blocks` and `place`
meanwhile. There is no lock: `blocks` and `place` read a copy of the dictionary.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from hydra_tune.errors import TaskError
from hydra_tune.memory.pager import Pager
from hydra_tune.memory.shared.shared_block import SharedBlockHandle
from hydra_tune.memory.shared.shared_file import SharedFile, SharedTensor, shared_source


class SharedPlace(NamedTuple):
    """A place in a shared file: the name of the file, and bytes before the place."""

    base: str
    position: int


class SharedTensors:
    """The shared parameters of a trial.

    Args:
        tensors: parameters and buffers of the trial, by name.
        written: names of tensors that the trial's graphs write; not shared.
        owner: number of the trial.
        alignment: in bytes.
        runs_own_code: whether units run the user's own code, which reads the parameters themselves.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        written: Collection[str],
        owner: int,
        alignment: int,
        *,
        runs_own_code: bool,
    ) -> None:
        self._handles: dict[str, SharedBlockHandle] = {}
        self._tensors: dict[str, Tensor] = {}
        # Address and version of each parameter as last seen.
        self._marks: dict[str, tuple[int, int]] = {}
        self._pointed: frozenset[str] = frozenset()
        for name, tensor in tensors.items():
            source = None if name in written else _source_of(tensor)
            if source is not None:
                self._handles[name] = SharedBlockHandle(source, owner, alignment, may_lie_in_place=runs_own_code)
                self._tensors[name] = tensor
                self._marks[name] = _mark_of(tensor)

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    @property
    def files(self) -> dict[SharedFile, int]:
        """The files of the parameters, and the host memory of each in bytes."""
        return {handle.source.file: handle.source.file.nbytes for handle in self._handles.values()}

    def blocks(self, names: Iterable[str] | None = None) -> list[SharedBlockHandle]:
        """Return the blocks of the shared parameters among the names; None: of all."""
        if names is None:
            return list(self._handles.values())
        # A copy: a prefetch asks from another thread while a parameter may cease to be shared.
        handles = dict(self._handles)
        return [handles[name] for name in names if name in handles]

    def place(self, names: Iterable[str]) -> SharedPlace | None:
        """Return the lowest place among those of the shared parameters of the names; None if none is shared."""
        handles = dict(self._handles)
        sources = (handles[name].source for name in names if name in handles)
        return min((SharedPlace(source.file.name, source.file.offset(source.name)) for source in sources), default=None)

    def views(self, names: Iterable[str], pager: Pager) -> dict[str, Tensor]:
        """Return the shared parameters among the names, as views of leased copies."""
        return {name: self._view(name, pager) for name in names if name in self._handles}

    @contextmanager
    def pointed(self, pager: Pager) -> Iterator[None]:
        """Point the trial's own parameters at the leased copies inside the context.

        Raises:
            TaskError: the code inside has written to a parameter in place; the copy has its old bytes again.
        """
        homes = {
            name: self._tensors[name].data
            for name, handle in self._handles.items()
            if not handle.at(pager).lies_in_place and _mark_of(self._tensors[name]) == self._marks[name]
        }
        for name in homes:
            self._point(name, self._view(name, pager))
        self._pointed, written = frozenset(homes), []
        try:
            yield
        finally:
            for name, home in homes.items():
                # The code may have given the parameter other memory, or may train it from now on.
                if name not in self._handles or self._tensors[name].data_ptr() != self._marks[name][0]:
                    continue
                if self._is_spoiled(name):
                    written.append(name)
                    self._reload(name, pager)
                self._point(name, home)
            self._pointed = frozenset()
        if written:
            raise TaskError(
                f"training has written to {written[0]!r} of a shared base in place, which other trials read on the same "
                f"device; take a base of its own with base.module(copy=True), or write in model="
            )

    def lost(self, tensors: Mapping[str, Tensor], *, is_thorough: bool = False) -> list[str]:
        """Return the names of parameters that are shared no more: replaced, given other memory, thawed, or written.

        A write to a device's copy is no such case, but an error of `pointed`.

        Args:
            tensors: present parameters and buffers of the trial, by name.
            is_thorough: whether to ask the system for written pages as well, which finds writes of every kind.
        """
        return [
            name
            for name, handle in self._handles.items()
            if not self._is_spoiled(name)
            and (
                tensors.get(name) is not self._tensors[name]
                or self._tensors[name].requires_grad
                or _mark_of(self._tensors[name]) != self._marks[name]
                or (is_thorough and shared_source(self._tensors[name]) is not handle.source)
            )
        ]

    def digests(self) -> dict[str, str]:
        """Return the digest of each parameter that still shows the bytes of its file, by name."""
        return {
            name: handle.source.digest
            for name, handle in self._handles.items()
            if name in self._pointed or shared_source(self._tensors[name]) is handle.source
        }

    def part_with(self, names: Iterable[str]) -> None:
        """Give up the shares in some parameters, which the caller keeps in other ways from now on."""
        for name in names:
            self._handles.pop(name).leave()
            del self._tensors[name], self._marks[name]

    def leave(self) -> None:
        """Give up all shares; the parameters stay in the trial's mapping."""
        self.part_with(list(self._handles))

    def _is_spoiled(self, name: str) -> bool:
        """Whether a parameter that is pointed at a copy has been written there, so that the copy's bytes are wrong."""
        address, version = _mark_of(self._tensors[name])
        return name in self._pointed and address == self._marks[name][0] and version != self._marks[name][1]

    def _view(self, name: str, pager: Pager) -> Tensor:
        handle = self._handles[name]
        data = handle.at(pager).data
        assert data is not None, "leased blocks are on the device"
        return handle.source.slot.view(data)

    def _point(self, name: str, place: Tensor) -> None:
        tensor = self._tensors[name]
        tensor.data = place
        self._marks[name] = _mark_of(tensor)

    def _reload(self, name: str, pager: Pager) -> None:
        copy = self._handles[name].at(pager)
        if copy.host is not None and copy.data is not None:
            # By `.data`: a graph that another trial has kept would refuse a newer version, and the bytes are what they were.
            pager.device.load([(copy.host, copy.data.data)])


def digests(module: nn.Module) -> dict[str, str]:
    """Return the digest of each frozen parameter of a module on the host that shows the bytes of a shared file, by name."""
    sources = {name: _source_of(parameter) for name, parameter in module.named_parameters()}
    return {name: source.digest for name, source in sources.items() if source is not None}


def _source_of(tensor: Tensor) -> SharedTensor | None:
    """Return the shared tensor of a frozen parameter; None for others."""
    return shared_source(tensor) if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else None


def _mark_of(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version  # noqa: SLF001 - torch has no other name for it
