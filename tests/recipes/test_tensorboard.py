"""log_to with the real SummaryWriter: what TensorBoard reads is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="scripts/test.sh recipes installs it")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from gradwire.torch.live import LiveScalars


class Counting(LiveScalars):
    """Tells the number of the step."""

    def __init__(self) -> None:
        self.step = 0

    def _find_scalars(self) -> dict[str, float | None]:
        return {"push_bytes": 100 * self.step, "ratio": 25.5, "error_norm": None}

    def run(self, steps: int) -> None:
        for self.step in range(steps):
            self._log(self.step)


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    counting, writer = Counting(), SummaryWriter(str(tmp_path))
    counting.log_to(writer, every=2)
    counting.run(5)
    writer.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert sorted(read.Tags()["scalars"]) == ["gradwire/push_bytes", "gradwire/ratio"]
    found = [(event.step, event.value) for event in read.Scalars("gradwire/push_bytes")]
    assert found == [(0, 0.0), (2, 200.0), (4, 400.0)]
