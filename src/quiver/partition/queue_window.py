"""The window of one work queue in one partition: which records are under way, and which are settled. Pure.

`next_offset` divides the partition: records from there on were never leased. Below it, the *outstanding* records are
leased or waiting; everything else below it is settled, that is acknowledged or dead. So the size depends on how many
records are under way, and not on the order in which they are settled. Dead records that still have to be moved to the
dead-letter topic are listed apart, each with a *sequence* of its own: dense, in the order in which they died.

Outstanding records are kept as **runs**: neighbouring records with the same state. The form is canonical: runs are
sorted, do not overlap, and neighbours that could be one run are one. Equal windows therefore have equal bytes.

Every change is an *operation* of a `QueueEntry`, and is validated here: one that does not fit changes nothing, on every
replica alike. Times come from the operations. A receipt is good if its **grant** is that of the record's last lease and
the record is still leased; whether the lease has ended plays no part here: the leader lets leases end by leasing the
records again. Nothing in this module may raise for any decoded operation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from quiver.model import ConsumerId, Offset
from quiver.partition.queue_operations import (
    LEASED,
    NOT_PARKED,
    WAITING,
    DeadRun,
    DeadTarget,
    QueueAcks,
    QueueBurial,
    QueueExtends,
    QueueHead,
    QueueKills,
    QueueLeases,
    QueueOpen,
    QueueOperation,
    QueuePart,
    QueueReturns,
    QueueTarget,
    Run,
)

PART_RUNS: Final = 256
"""Runs in one row of a snapshot: about a millisecond to encode or decode."""


class _Stale:
    """The type of `_STALE`: a receipt is not good for a run."""


_STALE: Final = _Stale()
_Change = Callable[[Run], "Run | _Stale | None"]
"""Returns a run's records after a change (offsets do not matter), None if they are settled, or `_STALE`."""


class QueueWindow:
    """The window of one queue in one partition."""

    __slots__ = ("_firsts", "dead", "dead_next", "grants", "next_offset", "outstanding", "runs", "target")

    def __init__(self, next_offset: Offset) -> None:
        self.next_offset = next_offset
        """Records from here on were never leased."""
        self.grants = 0
        """The last grant."""
        self.runs: list[Run] = []
        self.outstanding = 0
        """Records in `runs`."""
        self.dead: list[DeadRun] = []
        """In the order of their sequences."""
        self.dead_next = 0
        """Sequence of the next record that dies."""
        self.target: DeadTarget | None = None
        self._firsts: list[int] = []
        """The first offset of each run."""

    def copy(self) -> QueueWindow:
        """Return a window that changes independently of this one."""
        made = QueueWindow(self.next_offset)
        made.grants, made.outstanding, made.dead_next = self.grants, self.outstanding, self.dead_next
        made.runs, made.dead, made._firsts = self.runs.copy(), self.dead.copy(), self._firsts.copy()
        made.target = self.target
        return made

    @property
    def first_unsettled(self) -> Offset:
        """Return the offset below which nothing has to be kept for this queue."""
        runs, dead = self.runs, self.dead
        if not dead:
            return Offset(runs[0].first if runs else self.next_offset)
        # After a reset, the dead may lie anywhere.
        return Offset(min(runs[0].first if runs else self.next_offset, *(one.first for one in dead)))

    @property
    def in_flight(self) -> int:
        """Return the number of records under way: outstanding, or dead and not moved yet."""
        return self.outstanding + self.dead_next - (self.dead[0].sequence if self.dead else self.dead_next)

    def overlapping(self, first: int, end: int) -> Iterator[Run]:
        """Yield the runs that have records in [`first`, `end`)."""
        runs, at = self.runs, self._find(first)
        while at < len(runs) and runs[at].first < end:
            yield runs[at]
            at += 1

    # -- operations: each returns the records for which the receipts are stale, as [first, end) ------------

    def lease(self, operation: QueueLeases) -> None:
        """Lease outstanding records again, and fresh ones for the first time."""
        if operation.grant <= self.grants or (operation.fresh and operation.first > self.next_offset):
            return  # planned with another window than this: nothing of it is valid here
        self.grants = grant = operation.grant
        for first, count in operation.again:
            self._change(
                first,
                first + count,
                lambda run: Run(0, 1, LEASED, run.attempt + 1, grant, operation.deadline_ms, run.key),
            )
        position = operation.first
        for count, not_before_ms, key in operation.fresh:
            first, position = max(position, self.next_offset), Offset(position + count)
            if first >= position:
                continue  # trimmed meanwhile
            if not_before_ms == NOT_PARKED:
                self._append(Run(first, position - first, LEASED, 1, grant, operation.deadline_ms, key))
            else:
                self._append(Run(first, position - first, WAITING, 0, 0, not_before_ms, key))
            self.next_offset = position

    def acknowledge(
        self, first: int, count: int, grant: int, settled: list[tuple[int, int]] | None = None
    ) -> list[tuple[int, int]]:
        """Settle records; those that are settled already are not stale, and are added to `settled`."""
        end, at = first + count, self._find(first)
        run = self.runs[at] if at < len(self.runs) else None
        if run is not None and run.first <= first and end <= run.end and is_current(run, grant):
            self._remove(at, run, first, end)  # nearly always: all of them are in one run
            return []
        return self._change(
            first, end, lambda run: None if is_current(run, grant) else _STALE, gap_is_done=True, settled=settled
        )

    def give_back(
        self, first: int, count: int, grant: int, *, not_before_ms: int, is_counted: bool
    ) -> list[tuple[int, int]]:
        """Let leased records wait; those that were returned by the same grant are not stale, and stay as they are."""

        def change(run: Run) -> Run | _Stale:
            if run.state == WAITING and grant and run.grant == grant:
                return run
            if not is_current(run, grant):
                return _STALE
            attempt = run.attempt if is_counted else max(0, run.attempt - 1)
            return Run(0, 1, WAITING, attempt, grant, not_before_ms, run.key)

        return self._change(first, first + count, change)

    def extend(self, first: int, count: int, grant: int, *, deadline_ms: int) -> list[tuple[int, int]]:
        """Change when leases end."""

        def change(run: Run) -> Run | _Stale:
            if not is_current(run, grant):
                return _STALE
            return Run(0, 1, LEASED, run.attempt, grant, deadline_ms, run.key)

        return self._change(first, first + count, change)

    def kill(
        self,
        first: int,
        count: int,
        grant: int,
        *,
        time_ms: int,
        reason: str,
        is_final: bool,
        settled: list[tuple[int, int]] | None = None,
    ) -> list[tuple[int, int]]:
        """Turn records into dead letters; those that are settled already are not stale, and are added to `settled`."""
        end, killed = first + count, list[DeadRun]()

        def change(run: Run) -> _Stale | None:
            if not (run.grant == grant if is_final else is_current(run, grant)):
                return _STALE
            low, high = max(run.first, first), min(run.end, end)
            killed.append(DeadRun(low, high - low, 0, run.attempt, grant, time_ms, reason))
            return None

        stale = self._change(first, end, change, gap_is_done=True, dead_grant=grant, settled=settled)
        for one in killed:
            self._bury_later(one)
        return stale

    def bury(self, end_sequence: int) -> None:
        """Forget dead letters below a sequence."""
        dead, gone = self.dead, 0
        while gone < len(dead) and dead[gone].sequence + dead[gone].count <= end_sequence:
            gone += 1
        del dead[:gone]
        if dead and dead[0].sequence < end_sequence:
            one, moved = dead[0], end_sequence - dead[0].sequence
            dead[0] = DeadRun(
                one.first + moved, one.count - moved, end_sequence, one.attempt, one.grant, one.time_ms, one.reason
            )

    def reset(self, offset: Offset) -> None:
        """Begin again at an offset: no record is outstanding, and all receipts are stale; dead ones are moved still."""
        self.next_offset, self.runs, self._firsts, self.outstanding = offset, [], [], 0

    def trim(self, first_offset: Offset) -> bool:
        """Settle the records that retention has removed; return whether anything changed."""
        is_changed = bool(self.runs) and self.runs[0].first < first_offset
        if is_changed:
            self._change(0, first_offset, lambda _: None)
        if self.next_offset < first_offset:
            self.next_offset, is_changed = first_offset, True
        return is_changed

    # -- snapshots -------------------------------------------------------------------------------------

    def head(self) -> QueueHead:
        """Return what the window has beside its runs."""
        return QueueHead(self.next_offset, self.grants, self.dead_next, self.target)

    def add_part(self, part: QueuePart) -> None:
        """Append the runs of a snapshot's row, in the order in which `frozen_parts` made them."""
        for run in part.runs:
            self._append(run)
        self.dead.extend(part.dead)

    # -- internals -------------------------------------------------------------------------------------

    def _find(self, first: int) -> int:
        """Return the position of the first run that ends after an offset."""
        at = bisect_right(self._firsts, first) - 1
        return at if at >= 0 and self.runs[at].end > first else at + 1

    def _change(
        self,
        first: int,
        end: int,
        change: _Change,
        *,
        gap_is_done: bool = False,
        dead_grant: int | None = None,
        settled: list[tuple[int, int]] | None = None,
    ) -> list[tuple[int, int]]:
        """Change the outstanding records in [`first`, `end`); return what is stale.

        Records that are not outstanding are stale if they were never leased or wait to be moved as dead letters (of
        another grant than `dead_grant`), and unless `gap_is_done` if they are settled; else those are added to
        `settled`.
        """
        runs, low = self.runs, self._find(first)
        stale, gaps, made = list[tuple[int, int]](), list[tuple[int, int]](), list[Run]()
        position, at = first, low
        while at < len(runs) and runs[at].first < end:
            run = runs[at]
            at += 1
            inside, outside = max(run.first, first), min(run.end, end)
            if position < inside:
                gaps.append((position, inside))
            position = outside
            changed = change(run)
            if changed is run or isinstance(changed, _Stale):
                made.append(run)
                if changed is not run:
                    stale.append((inside, outside))
                continue
            if run.first < inside:
                made.append(_cut(run, run.first, inside))
            if changed is None:
                self.outstanding -= outside - inside
            else:
                made.append(_cut(changed, inside, outside))
            if outside < run.end:
                made.append(_cut(run, outside, run.end))
        if position < end:
            gaps.append((position, end))
        if low < at:
            self._splice(low, at, made)
        if not gap_is_done:
            return stale + gaps
        for gap in gaps:
            stale += self._stale_parts(*gap, dead_grant, settled)
        return stale

    def _stale_parts(
        self, first: int, end: int, dead_grant: int | None, settled: list[tuple[int, int]] | None
    ) -> list[tuple[int, int]]:
        """Return what is stale of records that are not outstanding; add the others to `settled`."""
        stale = [(max(first, self.next_offset), end)] if end > self.next_offset else []
        end = min(end, self.next_offset)
        # Dead records that are not moved yet, and whether they died by this receipt; after a reset, some twice.
        dead: dict[int, bool] = {}
        for one in self.dead:
            for offset in range(max(first, one.first), min(end, one.first + one.count)):
                dead[offset] = dead.get(offset, False) or one.grant == dead_grant
        stale += [(offset, offset + 1) for offset, is_own in dead.items() if not is_own]
        if settled is not None:
            for offset in (*sorted(dead), end):
                if first < offset:
                    settled.append((first, offset))
                first = offset + 1
        return stale

    def _remove(self, at: int, run: Run, first: int, end: int) -> None:
        """Settle records of one run; what is left of it can be joined with no other."""
        self.outstanding -= end - first
        if run.first < first:
            self.runs[at] = _cut(run, run.first, first)
            if end < run.end:
                self.runs.insert(at + 1, _cut(run, end, run.end))
                self._firsts.insert(at + 1, end)
        elif end < run.end:
            self.runs[at] = _cut(run, end, run.end)
            self._firsts[at] = end
        else:
            del self.runs[at], self._firsts[at]

    def _splice(self, low: int, high: int, made: list[Run]) -> None:
        """Replace runs, and join neighbours that have become alike."""
        runs = self.runs
        if low and (made or high < len(runs)):
            low -= 1
            made.insert(0, runs[low])
        if high < len(runs) and made:
            made.append(runs[high])
            high += 1
        joined: list[Run] = []
        for run in made:
            if joined and _is_alike(joined[-1], run):
                joined[-1] = _cut(run, joined[-1].first, run.end)
            else:
                joined.append(run)
        runs[low:high] = joined
        self._firsts[low:high] = [run.first for run in joined]

    def _append(self, run: Run) -> None:
        runs = self.runs
        self.outstanding += run.count
        if runs and _is_alike(runs[-1], run):
            runs[-1] = _cut(run, runs[-1].first, run.end)
        else:
            runs.append(run)
            self._firsts.append(run.first)

    def _bury_later(self, one: DeadRun) -> None:
        """Append a run to the dead ones, with the next sequences."""
        made = DeadRun(one.first, one.count, self.dead_next, one.attempt, one.grant, one.time_ms, one.reason)
        self.dead_next += one.count
        last = self.dead[-1] if self.dead else None
        if (
            last is not None
            and last.first + last.count == made.first
            and (last.attempt, last.grant, last.time_ms, last.reason)
            == (made.attempt, made.grant, made.time_ms, made.reason)
        ):
            self.dead[-1] = DeadRun(
                last.first, last.count + made.count, last.sequence, made.attempt, made.grant, made.time_ms, made.reason
            )
        else:
            self.dead.append(made)


def is_current(run: Run, grant: int) -> bool:
    """Return whether a grant is the one by which a run is leased: the safeguard against stale receipts."""
    return run.state == LEASED and run.grant == grant


def _cut(run: Run, first: int, end: int) -> Run:
    return Run(first, end - first, run.state, run.attempt, run.grant, run.time_ms, run.key)


def _is_alike(run: Run, following: Run) -> bool:
    """Return whether two runs can be one."""
    return (
        run.end == following.first
        and run.grant == following.grant
        and run.time_ms == following.time_ms
        and run.state == following.state
        and run.attempt == following.attempt
        and run.key == following.key
    )


# -- all windows of a partition ------------------------------------------------------------------------


def apply_operation(
    windows: dict[ConsumerId, QueueWindow], operation: QueueOperation, settled: list[tuple[int, int]] | None = None
) -> list[tuple[int, int]]:
    """Apply an operation to the windows of a partition; return the records with stale receipts, as [first, end).

    Records of acknowledgements and kills that were settled before are added to `settled`. An operation of a queue
    without a window changes nothing.
    """
    window = windows.get(operation.group_id)
    if window is None:
        if isinstance(operation, QueueOpen):
            windows[operation.group_id] = QueueWindow(operation.offset)
        return []
    match operation:
        case QueueOpen():
            return []
        case QueueLeases():
            window.lease(operation)
            return []
        case QueueAcks(_, spans):
            return [one for span in spans for one in window.acknowledge(*span, settled)]
        case QueueReturns(_, spans, not_before_ms, is_counted):
            return [
                one
                for span in spans
                for one in window.give_back(*span, not_before_ms=not_before_ms, is_counted=is_counted)
            ]
        case QueueExtends(_, spans, deadline_ms):
            return [one for span in spans for one in window.extend(*span, deadline_ms=deadline_ms)]
        case QueueKills(_, spans, time_ms, reason, is_final):
            kills = (
                window.kill(*span, time_ms=time_ms, reason=reason, is_final=is_final, settled=settled) for span in spans
            )
            return [one for stale in kills for one in stale]
        case QueueBurial(_, end_sequence):
            window.bury(end_sequence)
            return []
        case QueueTarget(_, target):
            window.target = target
            return []


class FrozenWindow(msgspec.Struct, frozen=True):
    """A window at one moment."""

    head: QueueHead
    runs: Sequence[Run]
    dead: Sequence[DeadRun]


def freeze_windows(windows: dict[ConsumerId, QueueWindow]) -> dict[ConsumerId, FrozenWindow]:
    """Return copies of windows that nobody changes."""
    return {id_: FrozenWindow(one.head(), one.runs.copy(), one.dead.copy()) for id_, one in windows.items()}


def frozen_parts(windows: dict[ConsumerId, FrozenWindow]) -> Iterator[QueuePart]:
    """Yield windows as the rows of a snapshot, sorted; equal windows give equal rows."""
    for group_id in sorted(windows):
        window = windows[group_id]
        head: QueueHead | None = window.head
        firsts = range(0, max(len(window.runs), len(window.dead), 1), PART_RUNS)
        for first in firsts:
            part = slice(first, first + PART_RUNS)
            yield QueuePart(group_id, head, tuple(window.runs[part]), tuple(window.dead[part]))
            head = None


def count_parts(windows: dict[ConsumerId, FrozenWindow]) -> int:
    """Return how many rows `frozen_parts` yields."""
    return sum(len(range(0, max(len(window.runs), len(window.dead), 1), PART_RUNS)) for window in windows.values())


def add_part(windows: dict[ConsumerId, QueueWindow], part: QueuePart) -> None:
    """Add a row of a snapshot to windows; rows come in the order of `frozen_parts`."""
    if part.head is not None:
        window = windows[part.group_id] = QueueWindow(part.head.next_offset)
        window.grants, window.dead_next, window.target = part.head.grants, part.head.dead_next, part.head.target
    found = windows.get(part.group_id)
    if found is not None:
        found.add_part(part)
