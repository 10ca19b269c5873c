"""Exchanges of buckets on a device and on the CPU: the same packets, so the same bits.

The kernels run on the host, and again on a GPU where there is one. tests/cuda compares more codecs.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from gradwire import GradwireError
from gradwire._core import Exchange, Layout
from gradwire.torch.buckets import session
from gradwire.torch.exchange_settings import ExchangeSettings
from gradwire.torch.options import Execution
from gradwire.torch.staging.stage import CopyStage, KernelStage, kernels_for, stage_for
from on_host import device_kernels

# Pieces of tensors, tensors that go raw, and more segments than ranks.
TENSORS = [("a", [60, 30]), ("norm", [30]), ("b", [7, 11]), ("c", [40, 21]), ("bias", [301])]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True, params=[CPU, GPU], ids=["host", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the buckets of the tests are."""
    monkeypatch.setattr(World, "place", request.param)
    if request.param == GPU:
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU here")
        yield
    else:
        with device_kernels():
            yield


Change = Callable[[int, np.ndarray], None]  # changes a message of the given sender


class World:
    """The same ranks twice: all on the CPU, and all but the last of several on the device."""

    place = CPU

    def __init__(
        self, size: int, codec: str, seed: int = 5, *, offload: bool = False, **options: Any
    ) -> None:
        self.layout = Layout(TENSORS, size, codec, **{"min_numel": 64, **options})
        kernels = kernels_for(self.place)
        assert kernels is not None
        self.stage = KernelStage(self.place, kernels, "pinned" if offload else "")
        self.on_device = [rank == 0 or rank + 1 < size for rank in range(size)]
        self.mixed = [
            Exchange(
                self.layout,
                rank,
                seed=seed,
                shard_codecs=self.stage.shard_codecs if there else None,
            )
            for rank, there in enumerate(self.on_device)
        ]
        self.cpu = [Exchange(self.layout, rank, seed=seed) for rank in range(size)]
        self._generator = torch.Generator().manual_seed(size)

    def gradients(self) -> list[torch.Tensor]:
        shape = (len(self.cpu), self.layout.numel)
        return list(torch.randn(shape, generator=self._generator) ** 3)

    def step(self, step: int, gradients: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Takes a step in both worlds, checks that the bits are equal and returns the average."""
        gradients = gradients or self.gradients()
        on_cpu = [g.numpy().copy() for g in gradients]
        for exchange, bucket in zip(self.cpu, on_cpu, strict=True):
            exchange.start(bucket, step)
        deliver(self.cpu)
        average = self.step_on_device(step, gradients)
        for a, b in zip(average, on_cpu, strict=True):
            same_bits(a, b)
        for mixed, cpu in zip(self.mixed, self.cpu, strict=True):
            assert mixed.non_finite == cpu.non_finite
            for name, count in mixed.stats().items():
                if isinstance(count, int):
                    assert count == cpu.stats()[name], name
            assert mixed.stats()["error_norm_sum"] == pytest.approx(cpu.stats()["error_norm_sum"])
        self.compare_residuals()
        return torch.from_numpy(average[0])

    def step_on_device(
        self, step: int, gradients: list[torch.Tensor], change: Change = lambda rank, message: None
    ) -> list[np.ndarray]:
        with self.stage.after(None):
            buckets = [
                gradient.to(self.place if there else CPU, copy=True)
                for gradient, there in zip(gradients, self.on_device, strict=True)
            ]
            for exchange, bucket, there in zip(self.mixed, buckets, self.on_device, strict=True):
                if there:
                    exchange.start_on_device(bucket.data_ptr(), bucket.numel(), step)
                else:
                    exchange.start(bucket.numpy(), step)
            deliver(self.mixed, change)
            return [bucket.cpu().numpy() for bucket in buckets]

    def retract(self) -> None:
        for exchange in (*self.mixed, *self.cpu):
            exchange.retract()
        self.compare_residuals()

    def compare_residuals(self) -> None:
        for mixed, cpu in zip(self.mixed, self.cpu, strict=True):
            for a, b in zip(mixed.export_residuals(), cpu.export_residuals(), strict=True):
                assert [a[k] for k in ("kind", "name", "offset")] == [
                    b[k] for k in ("kind", "name", "offset")
                ]
                same_bits(a["values"], b["values"])


def deliver(exchanges: list[Exchange], change: Change = lambda rank, message: None) -> None:
    """Delivers the messages of all ranks, which are in this process, until the step is done."""
    messages: deque[tuple[int, int, np.ndarray]] = deque()

    def send() -> None:
        for rank, exchange in enumerate(exchanges):
            messages.extend((rank, peer, m.copy()) for peer, m in exchange.outgoing())

    send()
    while messages:
        source, peer, message = messages.popleft()
        change(source, message)
        exchanges[peer].receive(source, message)
        send()
    assert all(exchange.done for exchange in exchanges)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize(
    "codec", ["raw", "3lc:s=1.75", "int8:bucket=100", "topk:ratio=0.1", "qsgd:coder=elias,ef=on"]
)
def test_results_and_residuals_are_those_of_the_cpu(codec: str) -> None:
    for size in (1, 2, 3):
        world = World(size, codec)
        for step in range(3):
            world.step(step)


def test_offloaded_residuals_are_those_of_the_cpu() -> None:
    world = World(3, "3lc:residual=bf16", offload=True)
    for step in range(3):
        world.step(step)


def test_the_hook_asks_for_residuals_in_this_memory() -> None:
    with (
        mock.patch.object(session, "Connection"),
        mock.patch.object(session, "stage_for") as stage,
    ):
        for memory in ("", "device", "host", "pinned"):
            session.Session(ExchangeSettings.of(Execution(memory=memory)), CPU)
            assert stage.call_args.args == (CPU, memory, True)
        with pytest.warns(DeprecationWarning, match="write memory='pinned'") as said:
            session.Session(ExchangeSettings.of(Execution(offload_residuals=True)), CPU)
        assert stage.call_args.args == (CPU, "pinned", True)
        assert [warning.filename for warning in said] == [__file__]


def test_codecs_by_rule_and_role_and_ranks_without_a_segment() -> None:
    world = World(
        6,
        "3lc:coder=rice",
        pull_codec="int8",
        rules=[("b", "qsgd"), ("c", "onebit", "push"), ("norm", "topk:ratio=0.5")],
    )
    assert {segment["owner"] for segment in world.layout.segments} != set(range(6))
    for step in range(16):
        world.step(step)
    samples = [exchange.stats()["error_norm_samples"] for exchange in world.mixed]
    assert max(samples) == 1, "of the error norm, which World.step compares"


@pytest.mark.parametrize("codec", ["3lc:coder=rice", "3lc:coder=none,residual=bf16", "raw"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_step_that_is_not_finite_is_skipped_as_on_the_cpu(codec: str, rank: int) -> None:
    world = World(3, codec)
    world.step(0)
    gradients = world.gradients()
    gradients[rank][1830 + 13] = float("inf")  # of tensor b
    average = world.step(1, gradients)
    if codec == "raw":
        assert world.mixed[0].non_finite is None
        assert int(torch.isfinite(average).logical_not().sum()) == 1
    else:
        text = f"the gradient of rank {rank} is not finite at element 13 of b"
        expected = {"rank": rank, "tensor": "b", "element": 13, "text": text}
        assert world.mixed[0].non_finite == expected
        assert bool(torch.isnan(average).all())
    world.retract()
    world.step(2)


def test_a_step_that_nobody_applied_is_owed_again() -> None:
    world = World(3, "3lc:coder=rice")
    gradients = world.gradients()
    world.step(0, gradients)
    world.retract()
    world.step(1, [torch.zeros_like(g) for g in gradients])


@pytest.mark.parametrize("codec", ["3lc", "int8:residual=bf16"])
def test_residuals_are_scaled_and_move_to_another_world(codec: str) -> None:
    world = World(3, codec)
    world.step(0)
    for exchange in (*world.mixed, *world.cpu):
        exchange.scale_residuals(0.3)
    world.compare_residuals()
    for size in (1, 2):
        other = World(size, codec)
        for rank, exchange in enumerate(world.cpu):
            for piece in exchange.export_residuals():
                for new in (other.mixed[rank % size], other.cpu[rank % size]):
                    new.import_residual(**piece)
        other.compare_residuals()
        other.step(1)


def test_a_residual_needs_a_place_and_finite_values() -> None:
    exchange = World(2, "3lc").mixed[0]
    with pytest.raises(GradwireError, match=r"values 1790\.\.1801: the layout has no such place"):
        exchange.import_residual("push", "a", 1790, np.zeros(11, np.float32))
    with pytest.raises(GradwireError, match="'b': not finite"):
        exchange.import_residual("push", "b", 0, np.full(3, np.inf, np.float32))


def test_a_message_that_was_changed_on_its_way_is_refused() -> None:
    world = World(2, "3lc:coder=none")

    def spoil(source: int, message: np.ndarray) -> None:
        if source == 1:
            message[60] ^= 1

    with pytest.raises(GradwireError, match="message from rank 1") as raised:
        world.step_on_device(0, world.gradients(), spoil)
    assert raised.value.code == "checksum_mismatch"


def test_a_bucket_elsewhere_than_the_codecs_is_refused() -> None:
    world = World(2, "3lc")
    bucket = np.zeros(world.layout.numel, np.float32)
    with pytest.raises(GradwireError, match="the exchange's buckets are on a device"):
        world.mixed[0].start(bucket, 0)
    with pytest.raises(GradwireError, match="the exchange has no shard_codecs of a device"):
        world.cpu[0].start_on_device(bucket.ctypes.data, bucket.size, 0)


def test_kernels_are_taken_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(stage_for(World.place), KernelStage)  # in these tests
    assert not isinstance(stage_for(World.place, takes_kernels=False), KernelStage)
    monkeypatch.setitem(sys.modules, "gradwire._cuda", None)
    assert kernels_for(torch.device("cuda:1")) is None


def test_a_build_without_cuda_copies_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradwire._cuda", None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    stage = stage_for(torch.device("cuda:1"))
    assert isinstance(stage, CopyStage)
    (said,) = stage.remarks()
    assert re.search("values on cuda:1 are copied to the host.*GRADWIRE_CUDA=ON", said)
