"""Ways to bring a trainer's weights to receivers in bfloat16, for weights.py.

A sender brings a version on its way each time it is called with the float32 weights. A receiver
changes its model and returns the seconds in which the model could not be used, or None while there
is nothing new.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed as dist
import zstandard
from numpy.typing import NDArray

from gradwire.weights import Publisher, Subscriber

Weights = Mapping[str, torch.Tensor]
Send = Callable[[Weights], None]
Receive = Callable[[], float | None]


@dataclass(frozen=True)
class Way:
    """sender: for a folder. receiver: for the URL of that folder, and a model of zeros."""

    title: str
    sender: Callable[[Path], Send]
    receiver: Callable[[str, Weights], Receive]
    depends_on_lr: bool


def _send_gradwire(folder: Path) -> Send:
    publisher = Publisher(folder, anchor_every=0, dtype="bfloat16")

    def send(weights: Weights) -> None:
        publisher.publish(weights)

    return send


def _receive_gradwire(url: str, model: Weights) -> Receive:
    subscriber = Subscriber(url)

    def receive() -> float | None:
        return None if subscriber.fetch() is None else subscriber.apply_(model).seconds

    return receive


def _send_xor(folder: Path) -> Send:
    """XOR with the version before, each tensor by zstd-1."""
    old: dict[str, NDArray[np.int16]] = {}
    packer = zstandard.ZstdCompressor(level=1)
    version = 0

    def send(weights: Weights) -> None:
        nonlocal version
        version += 1
        packed = {}
        for name, values in weights.items():
            new = values.to(torch.bfloat16).view(torch.int16).numpy()
            changed = new ^ old[name] if version > 1 else new
            packed[name] = np.frombuffer(packer.compress(changed.data), np.uint8)
            old[name] = new
        safetensors.numpy.save_file(packed, folder / f"{version}.safetensors")
        _write_newest(folder, version)

    return send


def _receive_xor(url: str, model: Weights) -> Receive:
    unpacker = zstandard.ZstdDecompressor()

    def take(file: bytes) -> float:
        packed = safetensors.numpy.load(file)
        changed = {name: unpacker.decompress(data.tobytes()) for name, data in packed.items()}
        began = time.perf_counter()
        for name, data in changed.items():
            values = model[name].view(torch.int16).numpy().reshape(-1)
            values ^= np.frombuffer(data, np.int16)
        return time.perf_counter() - began

    return _each_version(url, take)


def _send_full(folder: Path) -> Send:
    version = 0

    def send(weights: Weights) -> None:
        nonlocal version
        version += 1
        rounded = {name: values.to(torch.bfloat16) for name, values in weights.items()}
        safetensors.torch.save_file(rounded, folder / f"{version}.safetensors")
        _write_newest(folder, version)
        (folder / f"{version - 1}.safetensors").unlink(missing_ok=True)

    return send


def _receive_full(url: str, model: Weights) -> Receive:
    def take(file: bytes) -> float:
        found = safetensors.torch.load(file)
        began = time.perf_counter()
        for name, values in found.items():
            model[name].copy_(values)
        return time.perf_counter() - began

    return _each_version(url, take)


def _each_version(url: str, take: Callable[[bytes], float]) -> Receive:
    """Calls `take` with the file of each version, one after the other."""
    version = 0

    def receive() -> float | None:
        nonlocal version
        if _newest(url) <= version:
            return None
        version += 1
        return take(_get(f"{url}/{version}.safetensors"))

    return receive


def _send_broadcast(folder: Path) -> Send:
    def send(weights: Weights) -> None:
        for values in weights.values():
            dist.broadcast(values.to(torch.bfloat16).view(torch.uint8), 0)

    return send


def _receive_broadcast(url: str, model: Weights) -> Receive:
    """The model cannot be used from the first tensor to the last."""

    def receive() -> float:
        began = time.perf_counter()
        for values in model.values():
            dist.broadcast(values.view(torch.uint8), 0)
        return time.perf_counter() - began

    return receive


def _write_newest(folder: Path, version: int) -> None:
    new = folder / "newest.new"
    new.write_text(json.dumps(version))
    os.replace(new, folder / "newest")


def _newest(url: str) -> int:
    try:
        return int(_get(f"{url}/newest"))
    except urllib.error.HTTPError:
        return 0


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:
        data: bytes = answer.read()
    return data


WAYS = {
    "gradwire": Way("gradwire.weights", _send_gradwire, _receive_gradwire, True),
    "xor": Way("XOR + zstd-1", _send_xor, _receive_xor, True),
    "full": Way("full, by HTTP", _send_full, _receive_full, False),
    "broadcast": Way("full, broadcast by Gloo", _send_broadcast, _receive_broadcast, False),
}
