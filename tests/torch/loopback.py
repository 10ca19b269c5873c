"""All ranks of an exchange in this process, in step with each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from gradwire._core import Exchange
from gradwire.torch.device_exchange import DeviceExchange, Pull, Push, Received, Step

Change = Callable[[Push | Pull, list[Received]], None]


def average(
    exchanges: Sequence[DeviceExchange],
    buckets: Sequence[torch.Tensor],
    step: int,
    change: Change = lambda request, replies: None,
) -> None:
    """`change` gets rank 0's request and what all ranks are about to receive."""
    run([e.average(b, step) for e, b in zip(exchanges, buckets, strict=True)], change)


def run(steps: Sequence[Step], change: Change = lambda request, replies: None) -> list[Push | Pull]:
    """Returns rank 0's requests."""
    asked: list[Push | Pull] = []
    replies: list[Received] | None = None
    while True:
        requests: list[Push | Pull] = []
        for rank, step in enumerate(steps):
            try:
                requests.append(next(step) if replies is None else step.send(replies[rank]))
            except StopIteration:
                continue
        if not requests:
            return asked
        assert len(requests) == len(steps), "some ranks are done, others are not"
        replies = _reply(requests)
        for request, reply in zip(requests, replies, strict=True):
            assert request.expected in (None, reply.lengths)
        assert len({request.expected is None for request in requests}) == 1
        change(requests[0], replies)
        asked.append(requests[0])


def _reply(requests: Sequence[Push | Pull]) -> list[Received]:
    ranks = range(len(requests))
    if isinstance(requests[0], Pull):
        return [_received([r.message for r in requests]) for _ in ranks]
    sent = [r.message.split(r.lengths) for r in requests if isinstance(r, Push)]
    return [_received([sent[peer][rank] for peer in ranks]) for rank in ranks]


def _received(messages: Sequence[torch.Tensor]) -> Received:
    lengths = [message.numel() for message in messages]
    return Received(torch.cat(list(messages)), [0, *accumulate(lengths)][:-1], lengths)


def average_on_cpu(exchanges: Sequence[Exchange], buckets: Sequence[np.ndarray], step: int) -> None:
    """The same of the core."""
    messages: deque[tuple[int, int, bytes]] = deque()

    def send() -> None:
        for rank, exchange in enumerate(exchanges):
            messages.extend((rank, peer, m.tobytes()) for peer, m in exchange.outgoing())

    for exchange, bucket in zip(exchanges, buckets, strict=True):
        exchange.start(bucket, step)
    send()
    while messages:
        source, peer, message = messages.popleft()
        exchanges[peer].receive(source, np.frombuffer(message, np.uint8))
        send()
    assert all(exchange.done for exchange in exchanges)
