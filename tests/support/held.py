"""What this process holds at one moment: threads, files, memory, and objects of the package."""

import gc
import threading
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import psutil
import torch


@dataclass(frozen=True)
class Held:
    """Counts, and bytes; page-locked ones are among those of storages."""

    threads: int
    files: int
    storages: int
    storage_bytes: int
    pinned_bytes: int
    objects: int
    resident_bytes: int

    @staticmethod
    def now():
        while gc.collect():  # what is collected may have held further cycles
            pass
        objects = gc.get_objects()
        storages = {
            found.untyped_storage()._cdata: found.untyped_storage()
            for found in objects
            if type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout is torch.strided
        }.values()
        has_gpu = torch.cuda.is_available()
        return Held(
            threads=threading.active_count(),
            files=psutil.Process().num_fds(),
            storages=len(storages),
            storage_bytes=sum(storage.nbytes() for storage in storages),
            pinned_bytes=sum(storage.nbytes() for storage in storages if has_gpu and storage.is_pinned()),
            objects=sum(_is_ours(found) for found in objects),
            resident_bytes=psutil.Process().memory_info().rss,
        )


def _is_ours(found: object) -> bool:
    """Whether it is an object or a closure of the package: what else there is comes and goes by the hundred."""
    kind: Any = found if type(found) is FunctionType else type(found)
    return str(kind.__module__).startswith("hydra_tune.")
