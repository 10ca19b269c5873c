from collections.abc import Iterator

import pytest

from cluster import Cluster

LARGEST_WORLD = 8


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Processes for tests in which nothing breaks."""
    processes = Cluster(LARGEST_WORLD)
    yield processes
    processes.close()


@pytest.fixture
def fragile_cluster() -> Iterator[Cluster]:
    """Three processes for one test, which may kill them."""
    processes = Cluster(3, fragile=True)
    yield processes
    processes.close(seconds=1.0)
