"""Small models with one trait each that has broken, or could break, an engine that cuts models."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.parity.models import MLP
from tests.parity.zoo.entry import Entry, accuracy, generator, vectors


class FreeForm(nn.Module):
    """Written as researchers write: dicts of tensors, slices, in-place writes, einsum, a loop over a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("left", "right")})
        self.mix = nn.Parameter(torch.randn(8, 8, 4) / 8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.join = nn.Linear(20, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        halves = dict(zip(("left", "right"), x.chunk(2, dim=1), strict=True))
        halves = {name: torch.tanh(self.parts[name](half)) for name, half in halves.items()}
        mixed = torch.einsum("bi,bj,ijk->bk", halves["left"], halves["right"], self.mix)
        canvas = x.new_zeros(len(x), 20)
        canvas[:, :8] = halves["left"] * self.scale
        canvas[:, 8:16] += halves["right"]
        canvas[:, 16:] = mixed
        y = functional.gelu(self.join(canvas))
        y = y / y.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return self.head(y.sort(dim=1).values)


class Dlrm(nn.Module):
    """Embedding tables, bags of ids, and the products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(11, 8) for _ in range(2))
        self.bag = nn.EmbeddingBag(13, 8, mode="sum")
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, ids, bag):
        dense = self.bottom(dense)
        features = [dense, *(table(ids[:, i]) for i, table in enumerate(self.tables)), self.bag(bag)]
        stacked = torch.stack(features, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([dense, products[:, rows, columns]], dim=1)).squeeze(1)


def clicks(count: int) -> list[Any]:
    source = generator(5)
    dense = torch.randn(count, 6, generator=source)
    ids, bag = (torch.randint(11, (count, width), generator=source) for width in (2, 5))
    return [{"features": (dense[i], ids[i], bag[i]), "clicked": (dense[i, 0] > 0).float()} for i in range(count)]


def click_loss(module, batch):
    return functional.binary_cross_entropy_with_logits(module(*batch["features"]), batch["clicked"])


class Offsets(nn.Module):
    """A bag of ids per sample as one long list with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.hidden, self.head = nn.EmbeddingBag(23, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, ids):
        offsets = torch.arange(0, ids.numel(), ids.shape[1], device=ids.device)
        return self.head(torch.relu(self.hidden(self.bag(ids.flatten(), offsets))))


def bags(count: int) -> list[Any]:
    ids = torch.randint(23, (count, 5), generator=generator(6))
    return list(zip(ids, ids.max(1).values % 4, strict=True))


class Nested(nn.Module):
    """Takes a batch of dicts, tuples and lists as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(4, 16)
        self.third = nn.Linear(8, 16)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 4))

    def forward(self, batch):
        early, (late, rest) = batch["early"], batch["late"]
        return {"logits": self.head(self.first(early) + self.second(late) * self.third(rest["wide"]))}


def nests(count: int) -> list[Any]:
    return [({"early": x[:4], "late": (x[4:8], {"wide": x[8:]})}, [label]) for x, label in vectors(count)]


def nest_loss(module, batch):
    inputs, (label,) = batch
    return functional.cross_entropy(module(inputs)["logits"], label)


class SeveralLosses(nn.Module):
    """A head in the middle, a head at the end, and a penalty on all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.upper = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.early_head, self.head = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x):
        lower = self.lower(x)
        return self.early_head(lower), self.head(self.upper(lower)), lower


def added_losses(module, batch):
    early, late, hidden = module(batch[0])
    penalty = sum(p.abs().sum() for p in module.parameters())
    loss = functional.cross_entropy(late, batch[1]) + 0.3 * functional.cross_entropy(early, batch[1])
    return loss + 1e-4 * penalty + 1e-3 * hidden.pow(2).mean()


class Shared(nn.Module):
    """One Linear used first, in the middle and last, and one whose weight is another's transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)
        self.between = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.also_shared = self.shared
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.shared(x))
        for layer in self.between[:2]:
            x = torch.relu(layer(x))
        x = torch.relu(self.shared(x))
        for layer in self.between[2:]:
            x = torch.relu(layer(x)) + functional.linear(x, self.between[0].weight.t())
        return self.head(self.also_shared(x))


class Frozen(nn.Module):
    """The first layers, a normalization and one in the middle are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.ReLU())
        self.middle = nn.Linear(32, 32)
        self.tail = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        for part in (self.body, self.tail[0]):
            part.requires_grad_(requires_grad=False)

    def forward(self, x):
        return self.tail(torch.relu(self.middle(self.body(x))))


def weight_norm() -> nn.Module:
    layers = [nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)]
    return nn.Sequential(*(parametrizations.weight_norm(m) if isinstance(m, nn.Linear) else m for m in layers))


def spectral_norm() -> nn.Module:
    """Each forward in training moves the buffers that the norm is estimated with."""
    layers = [nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)]
    return nn.Sequential(*(parametrizations.spectral_norm(m) if isinstance(m, nn.Linear) else m for m in layers))


class Checkpointed(nn.Module):
    """Recomputes its blocks in backward by itself, dropout included."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32)) for _ in range(3)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class ReentrantlyCheckpointed(Checkpointed):
    reentrant = True


class MovingAverage(nn.Module):
    """Buffers that follow the activations, one overwritten in place, one replaced, both used in what comes after."""

    average: Tensor
    count: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.register_buffer("average", torch.zeros(32))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.training:
            with torch.no_grad():
                self.average.lerp_(x.mean(0), 0.1)
                self.scale = 0.9 * self.scale + 0.1 * x.std()
                self.count += 1
        x = torch.relu(self.middle(x - self.average)) / self.scale
        return self.last(x) / (1 + self.count)


class Normalizations(nn.Module):
    """Every kind of dropout and normalization that keeps statistics or draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.AlphaDropout(0.1), nn.RReLU())
        self.second = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.InstanceNorm1d(4, track_running_stats=True))
        self.third = nn.Sequential(
            nn.Dropout1d(0.2), nn.PReLU(), nn.Flatten(), nn.RMSNorm(96), nn.FeatureAlphaDropout(0.1)
        )
        self.head = nn.Linear(96, 4)

    def forward(self, x):
        return self.head(self.third(self.second(self.first(x)[:, None])))


def _vectors(name: str, what: str, model, **changes: Any) -> Entry:
    return Entry(**({"name": name, "what": what, "model": model, "samples": vectors, "evaluate": accuracy} | changes))


ENTRIES = [
    _vectors("mlp", "dropout, in-place activations", MLP),
    _vectors("free_form", "dicts, slices, in-place writes, einsum", FreeForm),
    Entry(
        name="dlrm", what="`nn.Embedding`, `nn.EmbeddingBag`, interactions", model=Dlrm, samples=clicks, step=click_loss
    ),
    _vectors("bag_offsets", "`nn.EmbeddingBag` with offsets", Offsets, samples=bags),
    Entry(
        name="nested_batch", what="dicts, tuples and lists in the batch", model=Nested, samples=nests, step=nest_loss
    ),
    _vectors(
        "several_losses", "heads in the middle, penalties on weights", SeveralLosses, step=added_losses, evaluate=None
    ),
    _vectors("shared_module", "one Linear used far apart, a weight used transposed", Shared),
    _vectors("frozen", "parameters that are not trained, among others", Frozen),
    _vectors("weight_norm", "`parametrizations.weight_norm`", weight_norm),
    _vectors("spectral_norm", "`parametrizations.spectral_norm`", spectral_norm),
    _vectors("checkpointed", "`torch.utils.checkpoint` inside, not reentrant", Checkpointed),
    _vectors("checkpointed_reentrant", "`torch.utils.checkpoint` inside, reentrant", ReentrantlyCheckpointed),
    _vectors("moving_average", "buffers that follow the activations", MovingAverage),
    _vectors("normalizations", "all kinds of dropout and of running statistics", Normalizations),
]
