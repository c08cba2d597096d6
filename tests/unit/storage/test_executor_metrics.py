"""Everything that a lane of the executor knows about itself is a metric."""

from __future__ import annotations

import msgspec

from quiver.storage import Lane, LaneStatus
from quiver.storage.metrics import describe_lanes


def test_every_number_of_a_lane_is_a_metric_with_its_lane() -> None:
    numbers = {name: at for at, name in enumerate(LaneStatus.__struct_fields__, start=1) if name != "lane"}
    status = msgspec.convert({"lane": Lane.READS.value, **numbers}, LaneStatus)
    families = {family.name: family for family in describe_lanes([status])}
    samples = [sample for family in families.values() for sample in family.samples]
    assert sorted(sample.value for sample in samples) == sorted(numbers.values())
    assert {sample.labels for sample in samples} == {(("lane", "reads"),)}
    (pause,) = families["quiver_executor_pause_seconds"].samples
    assert (families["quiver_executor_pause_seconds"].kind, pause.value) == ("gauge", numbers["pause_s"])
