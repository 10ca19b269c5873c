"""Gives every function of gradwire._core that takes arrays all kinds of tensors whose memory does
not hold their values, and prints a line of JSON for each kind: the answers by door, or the signal
that ended the kind's process."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import gradwire
from gradwire._core import (
    AutoGoal,
    DecodedDelta,
    Exchange,
    Layout,
    Simulation,
    WorkerSide,
    apply_delta,
    checksum32,
    digest_array,
    encode_delta,
    fold_deltas,
    frame_header,
    inspect_delta,
    max_delta_size,
)

Door = Callable[[Any], object]

NUMEL = 4096  # float32 or, as bytes, a frame's


def free(tensor: torch.Tensor, keep: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(keep)
    return tensor


def leak(transform: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a transformed function sees, after the transform has ended."""
    seen: list[torch.Tensor] = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x.sum()

    transform(watch)(tensor)
    return seen[0]


FAKE = FakeTensorMode()


def fake(numel: int, dtype: torch.dtype) -> torch.Tensor:
    with FAKE:
        return torch.ones(numel, dtype=dtype)


def ones(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(numel, dtype=dtype)


KINDS: dict[str, Callable[[int, torch.dtype], Any]] = {
    "good": ones,
    "good, a part": lambda n, t: ones(4 * n, t)[n : 2 * n],
    "good, the last part": lambda n, t: ones(2 * n, t)[n:],
    "fake": fake,
    "fake, behind the beginning": lambda n, t: fake(4 * n, t)[n : 2 * n],
    "freed": lambda n, t: free(ones(n, t)),
    "freed, behind the beginning": lambda n, t: free(ones(4 * n, t)[n : 2 * n]),
    "half freed": lambda n, t: free(ones(n, t), ones(n, t).nbytes // 2),
    "one byte short": lambda n, t: free(ones(n, t), ones(n, t).nbytes - 1),
    "freed, in 16 bits": lambda n, t: free(ones(n, torch.bfloat16)),
    "freed, of DLPack": lambda n, t: free(ones(n, t)).__dlpack__(),
    "on meta": lambda n, t: torch.ones(n, dtype=t, device="meta"),
    "negative": lambda n, t: torch._neg_view(ones(n, t)),
    "imaginary part": lambda n, t: torch.complex(torch.ones(1), torch.ones(1)).conj().imag,
    "conjugate": lambda n, t: torch.complex(torch.ones(n), torch.ones(n)).conj(),
    "zeros without memory": lambda n, t: torch._efficientzerotensor(n, dtype=t),
    "functional": lambda n, t: torch._to_functional_tensor(ones(n, t)),
    "in vmap": lambda n, t: leak(torch.vmap, torch.ones(n)),
    "in grad": lambda n, t: leak(torch.func.grad, torch.ones(n)),
    "of two tensors": lambda n, t: TwoTensor(ones(n, t), ones(n, t)),
    "not yet initialised": lambda n, t: torch.nn.UninitializedParameter(),
    "sparse": lambda n, t: ones(n, t).to_sparse(),
    "nested": lambda n, t: torch.nested.nested_tensor([ones(3, t), ones(4, t)]),
    "jagged": lambda n, t: torch.nested.nested_tensor(
        [ones(3, t), ones(4, t)], layout=torch.jagged
    ),
    "quantized": lambda n, t: torch.quantize_per_tensor(torch.ones(n), 0.1, 0, torch.quint8),
    "for MKL-DNN": lambda n, t: torch.ones(n).to_mkldnn(),
    "expanded": lambda n, t: ones(1, t).expand(n),
    "backwards": lambda n, t: np.ones(n, np.float32 if t is torch.float32 else np.uint8)[::-1],
}


def exchange(receiving: bool = False, numel: int = NUMEL) -> Exchange:
    made = Exchange(Layout([("w", [2, numel // 2])], 2, "3lc"), 0)
    if receiving:
        made.start(np.ones(numel, np.float32), 0)
    return made


def join(bucket: Any) -> None:
    layout = Layout([("w", [NUMEL])], 2, "3lc", servers=1)
    worker = WorkerSide(layout, 0, lambda server, version: None)
    worker.join(1, 1, bucket)


def load_residual(values: Any) -> None:
    compressor = gradwire.Compressor("3lc", NUMEL)
    compressor.load_state_dict({**compressor.state_dict(), "residual": values})


def delta_of(base: Any, result: Any, room: Any) -> int:
    written = encode_delta(base, result, room, width=1, is_float=False, follow=False)
    return int(written["size"])


ARRAY, FEW = np.ones(NUMEL, np.uint8), np.ones(16, np.uint8)
ROOM = np.zeros(max_delta_size(NUMEL, 1), np.uint8)
DELTA = ROOM[: delta_of(ARRAY, ARRAY, ROOM)].copy()
OF_FEW = ROOM[: delta_of(FEW, FEW, ROOM)].copy()
FRAME = gradwire.encode(np.ones(NUMEL, np.float32), "raw")
OUT = np.zeros(2 * len(FRAME), np.uint8)

# By the names of the arguments in _core.pyi.
FLOATS: dict[str, Door] = {
    "encode x": lambda t: gradwire.encode(t, "raw"),
    "decode_into out": lambda t: gradwire.decode_into(FRAME, t),
    "Compressor.encode x": lambda t: gradwire.Compressor("3lc", NUMEL).encode(t),
    "Compressor.encode_into x": lambda t: gradwire.Compressor("3lc", NUMEL).encode_into(t, OUT),
    "Compressor.load_state_dict residual": load_residual,
    "AutoGoal.try_candidates x": lambda t: AutoGoal("auto:bits=0.5").try_candidates(t),
    "AutoGoal.try_candidates residual": lambda t: AutoGoal("auto:bits=0.5").try_candidates(
        np.ones(NUMEL, np.float32), t
    ),
    "Exchange.start bucket": lambda t: exchange().start(t, 0),
    "Exchange.import_residual values": lambda t: exchange().import_residual("push", "w", 0, t),
    "WorkerSide.join bucket": join,
    "Simulation.__init__ values": lambda t: Simulation(
        "sharded", 2, [(Layout([("w", [NUMEL])], 2, "3lc"), 0.0)], t, bits_per_second=1e9
    ),
}
BYTES: dict[str, Door] = {
    "decode frame": gradwire.decode,
    "decode_into frame": lambda t: gradwire.decode_into(t, np.zeros(NUMEL, np.float32)),
    "inspect data": gradwire.inspect,
    "frame_header data": frame_header,
    "checksum32 data": checksum32,
    "Compressor.encode_into out": lambda t: gradwire.Compressor("3lc", NUMEL).encode_into(
        np.ones(NUMEL, np.float32), t
    ),
    "Exchange.receive message": lambda t: exchange(receiving=True).receive(1, t),
    "Exchange.keep_residuals_in memory": lambda t: exchange(numel=NUMEL // 4).keep_residuals_in(t),
    "encode_delta base": lambda t: delta_of(t, ARRAY, ROOM),
    "encode_delta result": lambda t: delta_of(ARRAY, t, ROOM),
    "encode_delta delta": lambda t: delta_of(FEW, FEW, t),
    "inspect_delta data": inspect_delta,
    "apply_delta delta": lambda t: apply_delta(t, ARRAY),
    "apply_delta values": lambda t: apply_delta(DELTA, t),
    "DecodedDelta data": DecodedDelta,
    "DecodedDelta.apply values": lambda t: DecodedDelta(DELTA).apply(t),
    "fold_deltas first": lambda t: fold_deltas(t, OF_FEW, ROOM),
    "fold_deltas second": lambda t: fold_deltas(OF_FEW, t, ROOM),
    "fold_deltas folded": lambda t: fold_deltas(OF_FEW, OF_FEW, t),
    "digest_array array": digest_array,
}


def knock(door: Door, tensor: Any) -> str:
    try:
        door(tensor)
    except gradwire.GradwireError as error:
        return str(error)
    return "taken"


def visit(kind: str) -> dict[str, str]:
    warnings.simplefilter("ignore")  # of prototypes in PyTorch
    make = KINDS[kind]
    answers = {name: knock(door, make(NUMEL, torch.float32)) for name, door in FLOATS.items()}
    for name, door in BYTES.items():
        answers[name] = knock(door, make(NUMEL, torch.uint8))
    return answers


def main() -> None:
    for kind in KINDS:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps([kind, visit(kind)]), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(json.dumps([kind, f"ended with status {os.waitstatus_to_exitcode(status)}"]))


if __name__ == "__main__":
    main()
