"""What a PyTorch before 2.13 lacks, which pyproject.toml takes: its tests are skipped there."""

from __future__ import annotations

from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version

import pytest

_LACKS = ("FullyShardComm needs the fully_shard of PyTorch 2.13", "this PyTorch has no devices")


def _is_before_2_13() -> bool:
    try:
        major, minor, *_ = version("torch").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) < (2, 13)


if _is_before_2_13():

    def _skip(error: BaseException) -> None:
        for lack in _LACKS:
            if lack in str(error):
                pytest.skip(lack)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup() -> Generator[None]:
        try:
            yield
        except Exception as error:
            _skip(error)
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call() -> Generator[None]:
        try:
            yield
        except Exception as error:
            _skip(error)
            raise
