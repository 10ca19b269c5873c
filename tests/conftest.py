"""Tests that need what PyTorch before 2.13 lacks, or does in another way, are skipped there."""

from __future__ import annotations

from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version

import pytest

_LACKING = (
    "FullyShardComm needs the fully_shard of PyTorch 2.13 or newer",
    "this PyTorch has no devices in Python",
    "not implemented for 'UInt16'",
    "this bucket is torch.complex64",
    "no attribute 'list_keys'",  # a store, which a test asks
    "[Gloo] Rank",  # lines on stdout, which a test compares
)


def _is_before_2_13() -> bool:
    try:
        major, minor, *_ = version("torch").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) < (2, 13)


if _is_before_2_13():
    collect_ignore_glob = ["torch/test_fsdp*.py", "torch/test_frozen.py"]  # they need FSDP2

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call() -> Generator[None]:
        yield from _skipping()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup() -> Generator[None]:
        yield from _skipping()

    def _skipping() -> Generator[None]:
        try:
            yield
        except Exception as error:
            for lacking in _LACKING:
                if lacking in str(error):
                    pytest.skip(lacking)
            raise
