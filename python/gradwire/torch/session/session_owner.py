"""What the hook's state and the optimizers tell of their session."""

from __future__ import annotations

from typing import Any

from gradwire.torch.records.stats import StepCounters
from gradwire.torch.session.session import Session


class SessionOwner:
    """Owns a session, which may begin later than the owner."""

    _session: Session | None = None

    @property
    def error(self) -> Exception | None:
        """The error that ended the communication; after it no step can be taken."""
        return None if self._session is None else self._session.error

    def last_step(self) -> dict[str, Any]:
        """This rank's last complete step: bytes, bits a value (None: no value) and timings."""
        return (self._session.runner.last_step if self._session else StepCounters()).summary()

    def explain(self, error: BaseException) -> BaseException:
        """An error that names the ranks that are gone; `error` itself if no rank is.

        A rank may die while DDP itself communicates: it broadcasts buffers before each forward.
        DDP's error does not say whose connection closed.
        """
        return error if self._session is None else self._session.explain(error)

    def close(self) -> None:
        """Ends the communication thread and its process group. Statistics and residuals stay.

        Happens by itself at exit, or when the model or the optimizer is dropped.
        """
        if self._session is not None:
            self._session.close()
