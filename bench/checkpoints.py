#!/usr/bin/env python3
"""Compares the bytes of a training's checkpoints: whole, compressed, and as a chain of versions.

    bench/checkpoints.py [--steps 600] [--every 100] [--lr 1e-3] [--out build/checkpoints.json]

The laboratory's `gpt` (664,448 float32 weights) learns the source of Python's library with AdamW.
Model and optimizer are saved every so many steps, in each of the ways. All of it is restored and
compared, bit for bit. Needs the packages zstandard and zipnn. Seconds are of one core, medians of
the checkpoints, and the ways take turns.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import safetensors.torch
import torch
import zipnn
import zstandard

from gradwire.weights import Publisher, Subscriber, flatten, unflatten
from gradwire_lab.train import models, text

State = dict[str, Any]
_BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(given, Path(folder))
    for way, (sizes, seconds) in rows.items():
        print(
            f"| {way} | {mean(sizes) / 1e6:.2f} | {sizes[-1] / 1e6:.2f} | {median(seconds):.3f} |"
        )
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


def compare(given: argparse.Namespace, folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Bytes and seconds of each checkpoint after the first, by way."""
    source = text.load("text", None)
    model = models.build("gpt", *source.shape, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    batches = source.batches(_BATCH, 1, 0, 0)
    publisher = Publisher(folder, anchor_every=0)
    rows: dict[str, tuple[list[int], list[float]]] = {}
    before: bytes | None = None
    for step in range(1, given.steps + 1):
        inputs, targets = (torch.from_numpy(array) for array in batches.at(step))
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % given.every:
            continue
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        flat = flatten(state)
        whole = safetensors.torch.save(flat)
        ways = ways_to_save(state, whole, before)
        ways["gradwire.weights, a chain"] = lambda flat=flat: publisher.publish(flat).bytes  # type: ignore[misc]
        for way, save in ways.items():
            began = time.perf_counter()
            size = save()
            sizes, seconds = rows.setdefault(way, ([], []))
            if before is not None:
                sizes.append(size)
                seconds.append(time.perf_counter() - began)
        before = whole
        check(folder, flat)
        print(f"step {step}: loss {loss:.3f}", flush=True)
    return rows


def ways_to_save(state: State, whole: bytes, before: bytes | None) -> dict[str, Callable[[], int]]:
    """Each returns the bytes. whole: the state as a .safetensors file, and the one before it."""
    ways: dict[str, Callable[[], int]] = {
        "whole, `torch.save`": lambda: len(torch_saved(state)),
        "whole, zstd-3": lambda: len(zstandard.ZstdCompressor(level=3).compress(whole)),
        "whole, zipnn": lambda: len(
            zipnn.ZipNN(bytearray_dtype="float32", threads=1).compress(bytearray(whole))
        ),
    }
    if before is not None and len(before) == len(whole):
        old = before

        def xor() -> int:
            pair = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in (old, whole)]
            changed = pair[0] ^ pair[1]
            return len(zstandard.ZstdCompressor(level=3).compress(changed.numpy().data))

        ways["XOR with the one before, zstd-3"] = xor
    return ways


def torch_saved(state: State) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def check(folder: Path, flat: State) -> None:
    """Raises RuntimeError unless the newest version is this state."""
    found: State = {}
    subscriber = Subscriber(folder)
    subscriber.fetch()
    subscriber.apply_(found)
    unflatten(found)
    if found.keys() != flat.keys() or any(not torch.equal(found[key], flat[key]) for key in flat):
        raise RuntimeError("the version is not the state that was published")


if __name__ == "__main__":
    main()
