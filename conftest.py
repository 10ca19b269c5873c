"""What the tests of the library and of the laboratory share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cluster import Cluster

# pytest-xdist sets it, and commands would make their tables as wide.
os.environ.pop("COLUMNS", None)

# The user's own job key is not for tests.
_configuration = tempfile.TemporaryDirectory(prefix="gradwire-tests-")
os.environ["XDG_CONFIG_HOME"] = _configuration.name

LARGEST_WORLD = 8


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Processes for tests in which nothing breaks."""
    from cluster import Cluster

    processes = Cluster(LARGEST_WORLD)
    yield processes
    processes.close()


@pytest.fixture
def fragile_cluster() -> Iterator[Cluster]:
    """Three processes for one test, which may kill them."""
    from cluster import Cluster

    processes = Cluster(3, fragile=True)
    yield processes
    processes.close(seconds=1.0)
