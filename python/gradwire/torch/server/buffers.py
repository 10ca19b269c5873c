"""A model's buffers, such as the statistics of batch normalisation, from one responsible worker."""

from __future__ import annotations

import torch
from torch import nn

from gradwire.torch.network.transport import Bytes
from gradwire.torch.parameters import (
    NamedTensor,
    named_buffers,
    ordinary_tensors,
    tensors_in_common,
)
from gradwire.torch.staging.moves import moved, overwrite, pack, unpack


class ModelBuffers:
    """The buffers of `model`: one worker sends them, the first server keeps them (3LC, section
    4.3: one worker is responsible for what batch normalisation keeps).

    sender: the worker's rank. keeper: the server's. every: versions from one message to the next.
    """

    def __init__(self, model: nn.Module, sender: int, keeper: int, every: int) -> None:
        self.sender, self.keeper, self.every = sender, keeper, every
        self._model = model

    def describe(self) -> str:
        """What must be equal on all ranks."""
        lines = [f"buffers of rank {self.sender}, every {self.every} versions"]
        lines += [f"buffer {n} {list(b.shape)} {b.dtype}" for n, b in self._named()]
        return "\n".join(lines)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for _, buffer in self._named())

    def pack(self) -> Bytes:
        """Their bytes, one buffer after the other."""
        return pack(buffer for _, buffer in self._named())

    @ordinary_tensors()
    def load(self, message: Bytes) -> None:
        """Takes over what `pack` wrote on another rank. Raises ValueError for another size."""
        if message.size != self.nbytes:
            raise ValueError(f"it has {message.size} bytes, and the model's buffers {self.nbytes}")
        unpack(message, [buffer for _, buffer in self._named()])

    def named(self) -> dict[str, torch.Tensor]:
        named = self._named()
        values = moved(buffer for _, buffer in named)
        return {name: each.clone() for (name, _), each in zip(named, values, strict=True)}

    @ordinary_tensors()
    def load_named(self, buffers: dict[str, torch.Tensor]) -> None:
        """Takes over saved buffers. Raises ValueError if they are not those of the model."""
        own = dict(self._named())
        if own.keys() != buffers.keys():
            raise ValueError(
                f"the state's buffers are {sorted(buffers)}, the model has {sorted(own)}"
            )
        overwrite(list(own.values()), [buffers[name] for name in own])

    def _named(self) -> list[NamedTensor]:
        return tensors_in_common(self._model, "buffer", named_buffers(self._model))


def make_buffers(
    model: nn.Module | None, sender: int | None, every: int, workers: int
) -> ModelBuffers | None:
    """Those of `model`, if a worker is responsible for them. Raises ValueError."""
    if sender is None:
        return None
    if model is None:
        raise ValueError("buffers_from needs model=, which has the buffers")
    if not 0 <= sender < workers:
        raise ValueError(f"buffers_from is {sender}; the workers are ranks 0 to {workers - 1}")
    if every < 1:
        raise ValueError(f"buffers_every is {every}; valid are 1 and more")
    return ModelBuffers(model, sender, workers, every)
