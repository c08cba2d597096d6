"""What a broker's metrics say of the memory for decoded batches."""

from __future__ import annotations

import pytest

from quiver.broker.metrics import describe_decoded
from quiver.errors import OverloadedError
from quiver.metrics import MetricReader
from quiver.record import Batch, build_batch
from quiver.record.decoded import DecodedBatchBudget, DecodedBatchCache, decoded_bytes


def test_memory_for_decoded_batches_is_shown_by_its_use() -> None:
    batch = Batch.decode(bytes(build_batch([b"one", b"two"], timestamp=1)))
    budget = DecodedBatchBudget(10_000)
    DecodedBatchCache[int](bytes_max=10_000, budget=budget).add(0, batch)
    with budget.reserve(5_000):
        with pytest.raises(OverloadedError):
            budget.reserve(9_000)
        found = MetricReader(describe_decoded(budget))
    names = ("cached_bytes", "reserved_bytes", "refused_total")
    assert [found.total(f"quiver_decoded_{name}") for name in names] == [decoded_bytes(batch), 5_000, 1]
