"""Where a rank of a measurement runs."""

from __future__ import annotations

import os

from gradwire_lab.train import network


def is_behind_link() -> bool:
    return os.environ["GLOO_SOCKET_IFNAME"] == network.INTERFACE


def address() -> str:
    """This rank's own."""
    rank = int(os.environ["RANK"])
    return network.address(rank) if is_behind_link() else "127.0.0.1"
