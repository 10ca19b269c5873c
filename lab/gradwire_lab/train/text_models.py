"""Models that predict the next byte of a text.

All take bytes, int64 (batch, context), and return logits (batch * context, vocabulary), a row for
each byte of each sequence in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCKS = "blocks."  # names of parameters inside them begin so
_HEAD = 32  # values of an attention head
_STD = 0.02
_EMBEDDING = 64  # values of a byte, for the LSTM


class Block(nn.Module):
    """Causal attention and a perceptron, each after a layer normalisation."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = width // _HEAD
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, context, width)))
        change: Tensor = self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return x + change


class Gpt(nn.Module):
    """A transformer with learned positions, an output layer of its own and no biases, as is usual
    today: they would go raw, and in so small a model take as many bytes as the compressed weights.
    664,448 parameters for 256 bytes, a context of 64 and a width of 128."""

    def __init__(
        self, vocabulary: int, context: int, width: int, dropout: float, layers: int = 3
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.flatten(0, 1)


class Lstm(nn.Module):
    """One layer of LSTM cells, whose state begins at zero in every sequence."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(vocabulary, _EMBEDDING)
        self.cells = nn.LSTM(_EMBEDDING, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)
        nn.init.normal_(self.bytes.weight, std=1.0 / _EMBEDDING**0.5)
        with torch.no_grad():  # cells remember from the first step (Jozefowicz et al. 2015)
            self.cells.get_parameter("bias_ih_l0")[width : 2 * width].fill_(1.0)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.cells(self.bytes(text))
        logits: Tensor = self.head(self.dropout(states))
        return logits.flatten(0, 1)
