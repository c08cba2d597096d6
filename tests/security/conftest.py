"""Clusters that the attacks share: attacks must leave them as they were, so that the next one finds them serving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quiver.testing import LocalCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Three nodes with their default settings, as a first minute has them."""
    with LocalCluster(nodes=3) as running:
        yield running
