"""The transformer encoder that both models are made of, in plain PyTorch."""

from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """One layer: self-attention and a feed-forward part four times as wide, 12 width^2 parameters and some.

    BERT adds and then normalises; ViT normalises first.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, norm_first: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width ({width}) must be a multiple of heads ({heads})")
        self.heads = heads
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        """(batch, tokens, width) in and out."""
        if self.norm_first:
            x = x + self.dropout(self.attend(self.norm1(x)))
            return x + self.dropout(self.feed_forward(self.norm2(x)))
        x = self.norm1(x + self.dropout(self.attend(x)))
        return self.norm2(x + self.dropout(self.feed_forward(x)))

    def attend(self, x):
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, width))

    def feed_forward(self, x):
        return self.narrow(functional.gelu(self.widen(x)))


def initialise(model: nn.Module) -> None:
    """Weights as BERT and ViT have them: deviation 0.02, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
