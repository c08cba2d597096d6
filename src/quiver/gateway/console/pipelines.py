"""The runs of pipelines: each describes itself in records of a topic, the newest of which counts. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from quiver.gateway.console.contract import PipelineRunItem
from quiver.gateway.contract import MessageItem

RUNS_TOPIC: Final = "_pipelines"
"""Where pipelines describe their runs; who may write to it registers its runs, and who may read it sees them."""
READ_MAX: Final = 2_000
"""Records that are read: a run writes one every few seconds."""
RUNS_MAX: Final = 200
SILENT_MS: Final = 60_000
"""A run that says nothing for so long is no longer shown as running."""
_decoder = msgspec.json.Decoder(PipelineRunItem)


def fold_runs(records: Iterable[MessageItem], *, now_ms: int) -> list[PipelineRunItem]:
    """Return the newest description of each run, the one that reported last first; what is none is left out."""
    runs: dict[str, PipelineRunItem] = {}
    for record in records:
        try:
            found = _decoder.decode(record.message or "")
        except (msgspec.DecodeError, TypeError):
            continue
        known = runs.get(found.run)
        if known is None or known.updated_ms <= found.updated_ms:
            runs[found.run] = found
    newest = sorted(runs.values(), key=lambda run: -run.updated_ms)[:RUNS_MAX]
    return [_judge(run, now_ms) for run in newest]


def _judge(run: PipelineRunItem, now_ms: int) -> PipelineRunItem:
    is_silent = run.state == "running" and now_ms - run.updated_ms > SILENT_MS
    return msgspec.structs.replace(run, state="silent") if is_silent else run
