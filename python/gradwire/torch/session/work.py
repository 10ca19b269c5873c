"""An exchange as a `Work` of torch.distributed."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


class ExchangeWork(dist.Work):
    """Waits for a future of Session.start_for_torch. (PyTorch's own Work of a future hides its
    error.) `outputs`: what a caller of C++ gets as the collective's result."""

    def __init__(
        self, future: torch.futures.Future[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._future = future
        self._outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        outputs = self._outputs
        # C++ sees an error only if a callback raises it.
        return self._future.then(lambda finished: (finished.value(), outputs)[1])
