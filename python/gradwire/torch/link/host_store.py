"""A store of torch.distributed that listens on one address."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it


def host_store(address: str, port: int) -> TCPStore:
    """A store for processes that come and go (`store=`), which others reach at this address alone.

    `TCPStore(address, port, is_master=True)` listens on all interfaces of the machine. The store
    ends with this process.

    Args:
        address: of this machine, on the network of the job.
        port: 0 takes a free one; see `port` of the result.

    Raises:
        OSError: the machine does not have the address, or the port is taken.
    """
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family, backlog=1024)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
