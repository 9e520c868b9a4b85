"""Models of sequences that are not from a library."""

import torch
from torch import nn
from torch.nn import functional

from tests.parity.models import GPT2, next_token_loss
from tests.parity.zoo.entry import Entry, accuracy, shorter_texts, texts


class Recurrent(nn.Module):
    """Two layers in both directions, with dropout between them."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16, padding_idx=0)
        self.recurrent = kind(16, 12, 2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, ids):
        outputs, _ = self.recurrent(self.embedding(ids))
        return self.head(outputs[:, -1])


def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


def gru() -> nn.Module:
    return Recurrent(nn.GRU)


class Cells(nn.Module):
    """A loop over time, written in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(23, 16), nn.LSTMCell(16, 12), nn.Linear(12, 4)

    def forward(self, ids):
        x = self.embedding(ids)
        hidden = cell = x.new_zeros(len(ids), 12)
        for moment in range(ids.shape[1]):
            hidden, cell = self.cell(x[:, moment], (hidden, cell))
        return self.head(hidden)


class Encoder(nn.Module):
    """Torch's own transformer, which takes a fused path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)).mean(1))


class Translator(nn.Module):
    """Encoder states and two masks are used by every layer of the decoder."""

    says_causal: bool | None = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, 16)
        layers = (16, 2, 32, 0.1, functional.relu, 1e-5, True, True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(*layers), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(*layers), 2)
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        x, padding = self.embedding(ids), ids == 0
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        memory = self.encoder(x, src_key_padding_mask=padding)
        y = self.decoder(x, memory, causal, memory_key_padding_mask=padding, tgt_is_causal=self.says_causal)
        return self.head(y.mean(1))


class AsksMask(Translator):
    """Lets torch find out from the mask's values whether it is causal."""

    says_causal = None


class Masks(nn.Module):
    """A bool mask, integer lengths and integer positions, made first and used by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(23, 16), nn.Embedding(12, 16)
        self.mixers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, ids):
        present = ids != 0
        lengths, places = present.sum(1), present.long().cumsum(1) - present.long()
        x = self.tokens(ids)
        for mixer in self.mixers:
            x = x + self.positions(places)
            x = torch.where(present[..., None], torch.tanh(mixer(x)), x).masked_fill(~present[..., None], 0.0)
            x = x + x.sum(1, keepdim=True) / lengths[:, None, None]
        last = x[torch.arange(len(x), device=x.device), lengths - 1]
        return self.head(last)


def _dicts(count: int):
    return [{"ids": ids} for ids, _ in texts(count)]


def _shorter_dicts(batch):
    return {"ids": batch["ids"][:, :10].contiguous()}


def _texts(name: str, what: str, model, **changes) -> Entry:
    return Entry(name=name, what=what, model=model, samples=texts, shorter=shorter_texts, evaluate=accuracy, **changes)


ENTRIES = [
    Entry(
        name="gpt2",
        what="tied embeddings, dropout, dict batches",
        model=GPT2,
        samples=_dicts,
        step=next_token_loss,
        shorter=_shorter_dicts,
    ),
    _texts("lstm", "two layers, both directions, dropout", lstm),
    _texts("gru", "two layers, both directions, dropout", gru, evaluated_whole_with=("all at once",)),
    _texts("lstm_cells", "a Python loop over time", Cells),
    _texts("transformer_encoder", "`nn.TransformerEncoder`", Encoder, evaluation="whole", left_out=("all at once",)),
    _texts(
        "transformer",
        "`nn.TransformerDecoder` after an encoder, padding masks, `tgt_is_causal=True`",
        Translator,
        evaluation="whole",
        left_out=("all at once",),
    ),
    _texts(
        "transformer_asks", "the same without `tgt_is_causal`", AsksMask, evaluation="whole", left_out=("all at once",)
    ),
    _texts("masks", "int and bool masks across all cuts", Masks),
]
