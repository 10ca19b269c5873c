"""What the places of SparseLoCo's values cost: Golomb-Rice code against 12 bits a place.

    python bench/sparse_index.py [rounds]

4 workers train the model gpt of `gradwire train` (664,448 parameters) on Python's library: AdamW,
30 local steps with batches of 8 to an exchange. Each worker encodes its changes with topk2bit, with
error feedback that decays by 0.95, and all subtract the mean of what they decode (SparseLoCo, Sarfi
et al. 2025, arXiv:2508.15706).

Prints, for each density: the bits of a place (without the sign, which travels in the same code) in
the first and in the last rounds, the entropy of a place that is equally likely anywhere, and all
bits of a value that is sent, frames included. Tensors of one dimension go raw, and are left out.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import gradwire
from gradwire_lab.train import text
from gradwire_lab.train.text_models import Gpt

WORKERS, EVERY, BATCH, DECAY = 4, 30, 8, 0.95
ROUNDS = 10
DENSITIES = (0.01, 0.02, 0.03)
CHUNK, HEADER, CHUNK_HEAD, LISTED_SIZE = 40960, 32, 10, 2  # values, bytes: spec/format.md


@dataclass
class Count:
    """Sums over all workers and tensors in some rounds."""

    sent: int = 0
    trit_bytes: int = 0
    frame_bytes: int = 0

    def add(self, frame: bytes, decoded: np.ndarray) -> None:
        chunks = [
            int(np.count_nonzero(part))
            for part in np.split(decoded, range(CHUNK, decoded.size, CHUNK))
        ]
        heads = HEADER + len(chunks) * (CHUNK_HEAD + (LISTED_SIZE if len(chunks) > 1 else 0))
        self.sent += sum(chunks)
        self.trit_bytes += len(frame) - heads - sum(-(-count // 8) for count in chunks)
        self.frame_bytes += len(frame)

    @property
    def place_bits(self) -> float:
        return 8 * self.trit_bytes / self.sent - 1  # a bit is the sign

    @property
    def value_bits(self) -> float:
        return 8 * self.frame_bytes / self.sent


def train(density: float, rounds: int) -> list[Count]:
    """A count for each round."""
    torch.manual_seed(0)
    data = text.load("text", None)
    anchor = Gpt(*data.shape, width=128, dropout=0.0)
    models = [Gpt(*data.shape, width=128, dropout=0.0) for _ in range(WORKERS)]
    for model in models:
        model.load_state_dict(anchor.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    batches = [data.batches(BATCH, WORKERS, rank, 0) for rank in range(WORKERS)]
    codec = f"topk2bit:density={density}"
    compressors = [
        [
            gradwire.Compressor(codec, p.numel()) if p.dim() > 1 else None
            for p in anchor.parameters()
        ]
        for _ in models
    ]
    counts = []
    for exchange in range(rounds):
        count = Count()
        for model, optimizer, mine in zip(models, optimizers, batches, strict=True):
            for step in range(exchange * EVERY, (exchange + 1) * EVERY):
                inputs, targets = (torch.from_numpy(part) for part in mine.at(step))
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        with torch.no_grad():
            _exchange(anchor, models, compressors, count)
        counts.append(count)
    return counts


def _exchange(
    anchor: nn.Module,
    models: list[Gpt],
    compressors: list[list[gradwire.Compressor | None]],
    count: Count,
) -> None:
    for place, (parameter, *own) in enumerate(
        zip(anchor.parameters(), *(model.parameters() for model in models), strict=True)
    ):
        total = torch.zeros_like(parameter)
        for worker, values in enumerate(own):
            change = parameter - values
            compressor = compressors[worker][place]
            if compressor is not None:
                frame = compressor.encode(change.flatten().numpy())
                decoded = gradwire.decode(frame)
                count.add(frame, decoded)
                owed = np.asarray(compressor.residual) * np.float32(DECAY)
                compressor.load_state_dict({**compressor.state_dict(), "residual": owed})
                change = torch.from_numpy(decoded.copy()).view_as(change)
            total += change
        parameter -= total / len(own)
        for values in own:
            values.copy_(parameter)


def entropy(density: float) -> float:
    """The entropy of the places, in bits for each value sent."""
    left_out = 1 - density
    return -math.log2(density) - left_out / density * math.log2(left_out)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    print("| density | place, first round | place, last round | entropy | all bits of a value |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for density in DENSITIES:
        counts = train(density, rounds)
        first, last = counts[0].place_bits, counts[-1].place_bits
        row = first, last, entropy(density), counts[-1].value_bits
        print(f"| {density} | " + " | ".join(f"{bits:.2f}" for bits in row) + " |", flush=True)


if __name__ == "__main__":
    main()
