"""What pytest finds when Quiver is installed: the fixture `quiver_cluster`.

def test_orders_are_queued(quiver_cluster):
    with quiver_cluster.connect() as cluster:
        cluster.create_topic("orders")
        ...
        quiver_cluster.kill(1)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from quiver.testing.local_cluster import LocalCluster


@pytest.fixture
def quiver_cluster() -> Iterator[LocalCluster]:
    """Run a cluster of three nodes in this process, and nothing of it remains."""
    from quiver.testing.local_cluster import LocalCluster

    with LocalCluster(nodes=3) as cluster:
        yield cluster
