"""Interrupts, exits and calls in the middle of a step: nothing goes on from half of one."""

from __future__ import annotations

import pytest

from gradwire.torch.errors import CommunicationError
from gradwire.torch.network.connection import CommunicationThread


def test_a_job_after_the_last_is_refused() -> None:
    """A step that began while another thread called close() waited for ever."""
    thread, ran = CommunicationThread(), []
    thread.submit(lambda: ran.append("before"))
    assert thread.stop(20)
    with pytest.raises(CommunicationError, match="it was closed"):
        thread.submit(lambda: ran.append("after"))
    assert ran == ["before"]
