"""The metrics of the executor's lanes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from quiver.metrics import MetricFamily, labelled
from quiver.storage.executor import LaneStatus


def describe_lanes(lanes: Iterable[LaneStatus]) -> Iterable[MetricFamily]:
    """Return the metrics of the lanes, labelled by lane."""
    known = tuple(lanes)

    def family(
        name: str, kind: Literal["counter", "gauge"], sentence: str, value: Callable[[LaneStatus], float]
    ) -> MetricFamily:
        values = [((("lane", one.lane.value),), value(one)) for one in known]
        return labelled(f"quiver_executor_{name}", kind, sentence, values)

    return (
        family("threads", "gauge", "Threads of a lane of the executor.", lambda one: one.threads),
        family("running", "gauge", "Tasks that run in a lane.", lambda one: one.running),
        family("queued", "gauge", "Tasks that wait in a lane.", lambda one: one.queued),
        family("queue_limit", "gauge", "Tasks at which a lane rejects clients' work.", lambda one: one.queue_max),
        family("tasks_total", "counter", "Tasks that a lane completed.", lambda one: one.completed),
        family("refused_total", "counter", "Requests rejected because a lane was full.", lambda one: one.refused),
        family("wait_seconds_total", "counter", "Time that completed tasks waited.", lambda one: one.waited_s),
        family("work_seconds_total", "counter", "Time that completed tasks ran.", lambda one: one.worked_s),
        family("wait_max_seconds", "gauge", "Longest wait of a task since the start.", lambda one: one.waited_s_max),
        family("pause_seconds", "gauge", "Pause after each task, while writes are slow.", lambda one: one.pause_s),
    )
