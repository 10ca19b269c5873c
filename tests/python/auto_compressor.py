"""Compressors whose codecs are chosen at run time, for senders in one process.

    group = CompressorGroup("auto:bits=0.5")
    parts = [group.compressor(name, numel) for name, numel in tensors]
    for step in range(steps):
        frames = [part.encode(gradient, step) for part, gradient in zip(parts, gradients)]

Between processes, `gradwire.torch` shares the measurements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire._core import Compressor
from gradwire.choice import Chooser, ChosenTensor, Row

_MEASURERS = 2  # senders that are measured for each tensor


class CompressorGroup:
    """Compressors that share a goal: the tensors of one sender, or of several senders of the same
    tensors, who then use the same codecs.

    Before its first frame each tensor is decided for alone, within the whole limit. All tensors of
    a step are encoded before the first of the next step.
    """

    def __init__(self, goal: str, remedy: str = "") -> None:
        """remedy: see Chooser."""
        self.chooser = Chooser(goal, remedy)
        self._rows: dict[str, Row] = {}
        self._senders: dict[str, int] = {}
        self._step: int | None = None
        self._steps = 0  # complete ones

    def compressor(self, name: str, numel: int, **arguments: Any) -> AutoCompressor:
        """A compressor of the tensor `name` for one more sender. arguments: as of Compressor."""
        sender = self._senders.get(name, 0)
        self._senders[name] = sender + 1
        return AutoCompressor(self, name, numel, sender < _MEASURERS, arguments)

    @property
    def tensors(self) -> tuple[ChosenTensor, ...]:
        """What is chosen now."""
        return tuple(self.chooser.tensors.values())

    @property
    def decisions(self) -> int:
        return self.chooser.decisions

    def codec(
        self,
        name: str,
        x: npt.NDArray[np.float32],
        residual: npt.NDArray[np.float32] | None,
        step: int,
        is_measured: bool,
    ) -> str:
        """The codec with which the tensor is encoded in this step; None: no residual yet."""
        if step != self._step:
            if self._step is not None:
                self._steps += 1
                if self._rows:
                    self.chooser.decide(self._rows, self._steps)
                    self._rows = {}
            self._step = step
        goal = self.chooser.goal
        if name not in self.chooser.tensors:
            self.chooser.begin({name: np.array(goal.try_candidates(x, residual))})
        chosen = self.chooser.tensors.get(name)
        if chosen is None:  # not all values were finite
            return self.chooser.candidates[0]
        if is_measured and goal.is_due(self._steps + 1):
            row = np.array(goal.try_candidates(x, residual, chosen.codec))
            self._rows[name] = self._rows[name] + row if name in self._rows else row
        return chosen.codec


class AutoCompressor:
    """As Compressor, but its codec may change from step to step; its residual stays."""

    def __init__(
        self,
        group: CompressorGroup,
        name: str,
        numel: int,
        is_measured: bool,
        arguments: dict[str, Any],
    ) -> None:
        self._group, self._name, self._numel = group, name, numel
        self._is_measured, self._arguments = is_measured, arguments
        self._compressor: Compressor | None = None

    @property
    def codec(self) -> str | None:
        """The codec of the last frame; None before the first."""
        return None if self._compressor is None else self._compressor.codec

    @property
    def residual(self) -> npt.NDArray[np.float32] | None:
        return None if self._compressor is None else self._compressor.residual

    def encode(self, x: npt.NDArray[np.float32], step: int) -> bytes:
        """Encodes x plus the residual into a frame; the codec's error is the new residual."""
        residual = self.residual
        codec = self._group.codec(self._name, x, residual, step, self._is_measured)
        if codec != self.codec:
            self._compressor = Compressor(codec, self._numel, **self._arguments)
            if residual is not None:
                state = {"codec": self.codec, "numel": self._numel, "residual": residual}
                self._compressor.load_state_dict(state)
        assert self._compressor is not None
        return self._compressor.encode(x, step)
