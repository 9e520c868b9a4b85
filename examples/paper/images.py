"""Pictures with labels: CIFAR-10 as it is downloaded, or folders of image files."""

import pickle
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

MEAN, DEVIATION = 121.0, 64.0  # of all of CIFAR-10's bytes
_KINDS = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


class Pictures(Dataset):
    """A sample is (image, label): (3, size, size) float32 of mean 0 and deviation 1 or so, and an int64.

    Args:
        images: (samples, 3, size, size) uint8.
        labels: (samples,) int64.
    """

    def __init__(self, images, labels) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return (self.images[index].float() - MEAN) / DEVIATION, self.labels[index]


@cache
def read(data: str, size: int, classes: int) -> tuple[Pictures, Pictures]:
    """A folder as (training, validation).

    Args:
        data: CIFAR-10's folder of Python batches (`data_batch_1` to 5, `test_batch`) or of binary ones (`*.bin`); or a folder
            with `train` and `test`, each with one folder of image files for each class, which needs Pillow.
        size: of the images; files of other sizes are scaled.
        classes: how many.
    """
    folder = Path(data)
    if list(folder.glob("data_batch_*")):
        parts = [_cifar(sorted(folder.glob(pattern))) for pattern in ("data_batch_*", "test_batch*")]
    elif (folder / "train").is_dir() and (folder / "test").is_dir():
        names = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
        parts = [_folders(folder / part, names, size) for part in ("train", "test")]
    else:
        raise FileNotFoundError(f"{folder} has neither CIFAR-10's data_batch_* nor folders train and test")
    for images, labels in parts:
        if images.shape[1:] != (3, size, size) or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise ValueError(
                f"{folder} has images {tuple(images.shape[1:])} with labels up to {int(labels.max())}; the model takes "
                f"{(3, size, size)} and {classes} classes"
            )
    return tuple(Pictures(*part) for part in parts)


def _cifar(files: list[Path]):
    if not files:
        raise FileNotFoundError("CIFAR-10's test_batch is not beside its data_batch_*")
    pairs = [_binary(file) if file.suffix == ".bin" else _python(file) for file in files]
    images, labels = (torch.from_numpy(np.concatenate(part)) for part in zip(*pairs, strict=True))
    return images.reshape(-1, 3, 32, 32), labels


def _binary(file: Path):
    """Records of a label and 3,072 bytes."""
    records = np.fromfile(file, dtype=np.uint8).reshape(-1, 3073)
    return records[:, 1:], records[:, 0].astype(np.int64)


def _python(file: Path):
    with file.open("rb") as stream:
        content = _Arrays(stream, encoding="bytes").load()
    return content[b"data"], np.asarray(content[b"labels"], dtype=np.int64)


class _Arrays(pickle.Unpickler):
    """Reads arrays of numbers and runs nothing else, whatever the file says."""

    def find_class(self, module: str, name: str):
        known = {"_reconstruct": np.zeros(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
        if module.partition(".")[0] == "numpy" and name in known:
            return known[name]
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a CIFAR-10 batch has no {module}.{name}")


def _folders(folder: Path, names: list[str], size: int):
    from PIL import Image  # noqa: PLC0415 - CIFAR-10's own files do without

    images, labels = [], []
    for label, name in enumerate(names):
        for file in sorted((folder / name).iterdir()):
            if file.suffix.lower() in _KINDS:
                with Image.open(file) as image:
                    scaled = image.convert("RGB").resize((size, size))
                images.append(torch.from_numpy(np.array(scaled)).permute(2, 0, 1))
                labels.append(label)
    if not images:
        raise FileNotFoundError(
            f"{folder} has no image files in folders named as train's: {', '.join(names) or 'none'}"
        )
    return torch.stack(images), torch.tensor(labels)
