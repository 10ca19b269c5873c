"""The exchange of buckets on a device against the core's on the CPU: the same bits.

The kernels run on the host, and again on a GPU where there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import loopback
from gradwire import GradwireError
from gradwire._core import Exchange, Layout
from gradwire.torch.device_codec import has_kernels, require_kernels
from gradwire.torch.device_exchange import DeviceExchange, Pull, Push, Received
from gradwire.torch.device_replays import Replays
from gradwire.torch.errors import PeerMismatchError
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


class World:
    """The same ranks twice: on the device and on the CPU."""

    place = CPU

    def __init__(self, size: int, codec: str, seed: int = 5, **options: Any) -> None:
        self.layout = Layout(TENSORS, size, codec, **{"min_numel": 64, **options})
        self.replays = [Replays(self.place) for _ in range(size)]
        self.device = [
            DeviceExchange(self.layout, rank, self.place, replays, seed=seed)
            for rank, replays in enumerate(self.replays)
        ]
        self.cpu = [Exchange(self.layout, r, seed=seed) for r in range(size)]
        self._generator = torch.Generator().manual_seed(size)

    def gradients(self) -> list[torch.Tensor]:
        shape = (len(self.device), self.layout.numel)
        return list(torch.randn(shape, generator=self._generator) ** 3)

    def step(
        self, step: int, gradients: list[torch.Tensor] | None = None, culprits: int = 1
    ) -> torch.Tensor:
        """Both ways, with the same bits. Returns the average. `culprits`: places that may be named
        where it is not finite; of several, the first to arrive is.
        """
        gradients = gradients or self.gradients()
        on_device = self.copies(gradients)
        on_cpu = [g.numpy().copy() for g in gradients]
        loopback.average(self.device, on_device, step)
        loopback.average_on_cpu(self.cpu, on_cpu, step)
        for a, b in zip(on_device, on_cpu, strict=True):
            same_bits(a.cpu().numpy(), b)
        for device, cpu in zip(self.device, self.cpu, strict=True):
            assert (device.non_finite is None) == (cpu.non_finite is None)
            assert culprits > 1 or device.non_finite == cpu.non_finite
        self.compare_residuals()
        return on_device[0].cpu()

    def capture(self, buckets: list[torch.Tensor]) -> None:
        """A step as in a CUDA graph, of this bucket alone."""
        for replays in self.replays:
            replays.begin_step()
        pairs = zip(self.device, buckets, strict=True)
        loopback.run([exchange.captured(bucket) for exchange, bucket in pairs])
        for replays in self.replays:
            replays.end_step()

    def copies(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """On the device."""
        return [gradient.to(self.place, copy=True) for gradient in gradients]

    def retract(self) -> None:
        for on_device, on_cpu in zip(self.device, self.cpu, strict=True):
            on_device.retract()
            on_cpu.retract()

    def compare_residuals(self) -> None:
        for device, cpu in zip(self.device, self.cpu, strict=True):
            for a, b in zip(device.export_residuals(), cpu.export_residuals(), strict=True):
                assert [a[k] for k in ("kind", "name", "offset")] == [
                    b[k] for k in ("kind", "name", "offset")
                ]
                same_bits(a["values"], b["values"])


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize(
    "codec",
    [
        "raw",
        "bf16",
        "fp16:ef=on",
        "3lc:s=1.75",
        "3lc:coder=none",
        "3lc:s=1.5,coder=rice,residual=bf16",
        "int8:bucket=100",
        "onebit",
        "topk:ratio=0.1",
        "terngrad",
        "stoch3:coder=zre,ef=on",
        "stc:density=0.1",
        "qsgd",
        "qsgd:coder=elias,ef=on",
        "inceptionn",
    ],
)
def test_results_and_residuals_are_those_of_the_cpu(codec: str) -> None:
    for size in (1, 2, 3):
        world = World(size, codec)
        for step in range(3):
            world.step(step)


def test_codecs_by_rule_and_role_and_ranks_without_a_segment() -> None:
    world = World(
        6,
        "3lc:coder=rice",
        pull_codec="int8",
        rules=[("b", "qsgd"), ("c", "onebit", "push"), ("norm", "topk:ratio=0.5")],
    )
    assert {segment["owner"] for segment in world.layout.segments} != set(range(6))
    for step in range(3):
        world.step(step)


def test_bytes_and_values_are_counted() -> None:
    world = World(3, "int8")
    sent = dict.fromkeys(range(3), 0)

    def count(request: Push | Pull, replies: list[Received]) -> None:
        for rank, reply in enumerate(replies):
            for peer, length in enumerate(reply.lengths):
                sent[peer] += length if peer != rank else 0

    loopback.average(world.device, world.copies(world.gradients()), 0, count)
    for rank, exchange in enumerate(world.device):
        stats = exchange.stats()
        assert stats["push_bytes"] + stats["pull_bytes"] == sent[rank]
        owned = sum(s["numel"] for s in world.layout.segments if s["owner"] == rank)
        assert stats["values_pulled"] == owned
        assert stats["values_pushed"] == world.layout.numel - owned
        payloads = 2 * (world.layout.numel - owned)  # a part goes raw
        assert stats["push_bytes"] < payloads
        assert 0 < stats["error_norm_sum"] < 0.1
    assert sum(e.stats()["received_bytes"] for e in world.device) == sum(sent.values())


@pytest.mark.parametrize("codec", ["3lc:coder=rice", "3lc:coder=none,residual=bf16", "raw"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_step_that_is_not_finite_is_skipped_as_on_the_cpu(codec: str, rank: int) -> None:
    world = World(3, codec)
    world.step(0)
    gradients = world.gradients()
    gradients[rank][1830 + 13] = float("inf")  # of tensor b
    average = world.step(1, gradients)
    if codec == "raw":
        assert world.device[0].non_finite is None
        assert int(torch.isfinite(average).logical_not().sum()) == 1
    else:
        assert world.device[0].non_finite == {"rank": rank, "tensor": "b", "element": 13}
        assert bool(torch.isnan(average).all())
    world.retract()
    world.compare_residuals()
    world.step(2)


def test_a_sum_with_the_residual_that_overflows_is_not_sent() -> None:
    world = World(2, "3lc:s=1.9,coder=rice")
    huge = [torch.full((world.layout.numel,), 3e38) for _ in range(2)]
    huge[0][::2] = -3e38
    world.step(0, huge, culprits=2)
    average = world.step(1, huge, culprits=2)
    assert bool(torch.isnan(average).all())
    world.retract()
    world.compare_residuals()


def test_a_step_that_nobody_applied_is_owed_again() -> None:
    world = World(3, "3lc:coder=rice")
    gradients = world.gradients()
    world.step(0, gradients)
    world.retract()
    world.compare_residuals()
    world.step(1, [torch.zeros_like(g) for g in gradients])


@pytest.mark.parametrize("codec", ["3lc", "int8:residual=bf16"])
def test_residuals_are_scaled_and_move_to_another_world(codec: str) -> None:
    world = World(3, codec)
    world.step(0)
    for on_device, on_cpu in zip(world.device, world.cpu, strict=True):
        on_device.scale_residuals(0.3)
        on_cpu.scale_residuals(0.3)
    world.compare_residuals()
    for size in (1, 2):
        other = World(size, codec)
        for rank, exchange in enumerate(world.cpu):
            for piece in exchange.export_residuals():
                for new in (other.device[rank % size], other.cpu[rank % size]):
                    new.import_residual(**piece)
        other.compare_residuals()
        other.step(1)


def test_a_residual_needs_a_place_and_finite_values() -> None:
    exchange = World(2, "3lc").device[0]
    with pytest.raises(GradwireError, match=r"values 1790\.\.1801: the layout has no such place"):
        exchange.import_residual("push", "a", 1790, np.zeros(11, np.float32))
    with pytest.raises(GradwireError, match="'b': not finite"):
        exchange.import_residual("push", "b", 0, np.full(3, np.inf, np.float32))


@pytest.mark.parametrize("leg", [Push, Pull])
def test_a_corrupt_payload_ends_the_step(leg: type) -> None:
    world = World(2, "3lc:coder=none")

    def spoil(request: Push | Pull, replies: list[Received]) -> None:
        if isinstance(request, leg):
            replies[0].data[replies[0].begins[1] + 60] = 255  # no five trits

    buckets = world.copies(world.gradients())
    with pytest.raises(GradwireError, match=f"a {leg.__name__.lower()}.* is corrupt") as raised:
        loopback.average(world.device, buckets, 0, spoil)
    assert raised.value.code == "corrupt_payload"


def test_sizes_that_no_message_has_are_refused() -> None:
    world = World(2, "3lc:coder=rice")

    def spoil(request: Push | Pull, replies: list[Received]) -> None:
        replies[0].data[replies[0].begins[1] + 16] ^= 64  # of the first payload

    buckets = world.copies(world.gradients())
    with pytest.raises(PeerMismatchError, match="a message of rank 1 does not fit") as raised:
        loopback.average(world.device, buckets, 0, spoil)
    assert raised.value.ranks == (1,)


# Steps in CUDA graphs, recorded here by running them ------------------------------------------


CAPTURED = ["3lc:s=1.75,coder=none", "int8", "onebit", "raw", "bf16"]


@pytest.mark.parametrize("codec", CAPTURED)
@pytest.mark.parametrize("size", [1, 3])
def test_a_captured_step_is_the_same_step(codec: str, size: int) -> None:
    world = World(size, codec)
    world.step(0)
    for step in (1, 2):
        gradients = world.gradients()
        on_device = world.copies(gradients)
        on_cpu = [g.numpy().copy() for g in gradients]
        world.capture(on_device)
        loopback.average_on_cpu(world.cpu, on_cpu, step)
        for a, b in zip(on_device, on_cpu, strict=True):
            same_bits(a.cpu().numpy(), b)
        world.compare_residuals()
    assert [replays.count for replays in world.replays] == [0] * size
    world.step(3)


def test_what_a_captured_step_sent_in_vain_is_owed_again() -> None:
    world = World(3, "3lc:s=1.75,coder=none")

    def captured(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        buckets = world.copies(gradients)
        world.capture(buckets)
        return [bucket.cpu() for bucket in buckets]

    def owed() -> torch.Tensor:
        for replays in world.replays:
            replays.begin_step()
        total = torch.zeros(world.layout.numel, dtype=torch.float64)
        begins = {s["name"]: s["bucket_offset"] - s["tensor_offset"] for s in world.layout.segments}
        for exchange in world.device:
            for piece in exchange.export_residuals():
                first = begins[piece["name"]] + piece["offset"]
                weight = 1.0 if piece["kind"] == "pull" else 1 / 3
                values = torch.from_numpy(piece["values"]).double()
                total[first : first + values.numel()] += weight * values
        return total

    captured(world.gradients())
    before = owed()
    gradients = world.gradients()
    gradients[1][5] = torch.nan  # of tensor a, all of rank 0's shard
    for bucket in captured(gradients):
        assert bool(torch.isnan(bucket).all())
    assert [replays.count for replays in world.replays] == [1] * 3
    # In a step of zeros, what is sent and owed is what was owed, and the gradients but for the
    # spoilt shard.
    sent = captured([torch.zeros(world.layout.numel)] * 3)[0]
    compressed = torch.zeros(world.layout.numel, dtype=torch.bool)
    for segment in world.layout.segments:
        begin = segment["bucket_offset"]
        if segment["push_codec"] != "raw" and segment["owner"] != 0:
            compressed[begin : begin + segment["numel"]] = True
    mean = torch.stack(gradients).double().mean(0)
    expected = before + mean
    after = owed() + sent.double()
    assert int(compressed.sum()) == 917
    np.testing.assert_allclose(after[compressed], expected[compressed], rtol=1e-4, atol=1e-5)


def test_a_step_in_vain_is_a_matter_of_all_its_buckets() -> None:
    """One bucket is NaN, and what the other one's pulls sent is owed again."""
    world = World(2, "3lc:s=1.75,coder=none", rules=[("b", "3lc:s=1.75,coder=none")])
    world.capture(world.copies(world.gradients()))
    for replays in world.replays:
        replays.begin_step()
    pairs = zip(world.device, world.copies(world.gradients()), strict=True)
    before = [exchange.export_residuals() for exchange in world.device]
    loopback.run([exchange.captured(bucket) for exchange, bucket in pairs])
    sent = [exchange.export_residuals() for exchange in world.device]
    for replays in world.replays:
        replays.note(torch.tensor(True, device=world.place))  # another bucket
        replays.end_step()
        replays.begin_step()
    back = [exchange.export_residuals() for exchange in world.device]
    for rank in range(2):
        for old, left, now in zip(before[rank], sent[rank], back[rank], strict=True):
            assert np.abs(old["values"] - left["values"]).max() > 0
            put_back = np.abs(now["values"] - left["values"]).max() > 0
            assert put_back == (now["kind"] == "pull")


@pytest.mark.parametrize(
    ("codec", "why"),
    [
        ("3lc:s=1.75,coder=rice", "differ from step to step: take coder=none"),
        ("terngrad", "every replay would draw the same"),
        ("int8:residual=bf16", "its residual is not float32"),
    ],
)
def test_what_cannot_be_captured_says_why(codec: str, why: str) -> None:
    world = World(2, codec)
    with pytest.raises(RuntimeError, match=f"{codec} can't be captured in a CUDA graph: .*{why}"):
        next(world.device[0].captured(world.copies(world.gradients())[0]))


@pytest.mark.parametrize("codec", CAPTURED)
def test_a_cuda_graph_replays_the_step(codec: str) -> None:
    world = World(3, codec)
    if world.place != GPU:
        pytest.skip("graphs are a GPU's")
    world.step(0)
    buckets = world.copies(world.gradients())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        world.capture(buckets)
    for step in (1, 2):
        gradients = world.gradients()
        on_cpu = [g.numpy().copy() for g in gradients]
        for bucket, gradient in zip(buckets, gradients, strict=True):
            bucket.copy_(gradient)
        graph.replay()
        loopback.average_on_cpu(world.cpu, on_cpu, step)
        for a, b in zip(buckets, on_cpu, strict=True):
            same_bits(a.cpu().numpy(), b)
        world.compare_residuals()


# What there is -----------------------------------------------------------------------------------


def test_kernels_are_for_devices_that_have_some() -> None:
    assert has_kernels(World.place)  # in these tests
    with pytest.raises(TypeError, match="not on meta"):
        require_kernels(torch.device("meta"))


def test_a_build_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradwire._cuda", None)
    pattern = "gradients on cuda:1: this gradwire was built without CUDA.*GRADWIRE_CUDA=ON"
    with pytest.raises(RuntimeError, match=re.compile(pattern)):
        require_kernels(torch.device("cuda:1"))
