"""The simulated workers of one process send the same bytes with a GPU's kernels as with codecs.

The kernels run on the host.
"""

from __future__ import annotations

import pytest
import torch

from gradwire_lab.train import one_process
from on_host import device_kernels

CPU = torch.device("cpu")
SEGMENTS = [150, 2400, 801, 36]


@pytest.mark.parametrize("codec", ["raw", "3lc:s=1.75", "stoch3:coder=none", "int8:residual=bf16"])
def test_sums_and_bytes_are_those_of_the_cpu(codec: str) -> None:
    generator = torch.Generator().manual_seed(3)
    cpu = one_process.Compressors(codec, SEGMENTS, 7, 2, CPU)
    with device_kernels():
        device = one_process.DeviceCompressors(codec, SEGMENTS, 7, 2, CPU)
        for step in range(3):
            values = torch.randn(sum(SEGMENTS), generator=generator)
            sums, wanted = torch.ones(2, sum(SEGMENTS)).unbind()
            sent = device.transmit(values, step, sums)
            assert sent == cpu.transmit(values, step, wanted)
            assert torch.equal(sums.view(torch.int32), wanted.view(torch.int32))


def test_what_is_not_finite_makes_the_sum_nan() -> None:
    with device_kernels():
        device = one_process.DeviceCompressors("3lc", SEGMENTS, 7, 2, CPU)
        sums = torch.zeros(sum(SEGMENTS))
        device.transmit(torch.full_like(sums, torch.inf), 0, sums)
    assert bool(sums.isnan().all())
