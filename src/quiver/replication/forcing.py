"""Force a configuration on a stopped member whose group has lost its majority for good.

This is what Raft never does by itself: the member's log, whatever it has and lacks, becomes the group's log, and
members that are not named any longer have no say. Only `quiver recover` calls it, on files that no process uses.

What is on disk, step by step; a crash between two steps leaves a member that starts as if nothing had happened, or as
after the last step, and the work may be done again:

1. a copy of the hard state as it was (`hardstate.before-recovery`), never overwritten by a later attempt;
2. the hard state with the new term and the forced configuration, which is ignored while its entry is not in the log;
3. the entry of the configuration, in the new term, and after it entries without content and the given batches.

The only voter elects itself when it starts; with its first entry everything in its log is committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from quiver.errors import StorageError
from quiver.model import Index, NodeId, Term
from quiver.raft import Configuration, Entry, EntryKind
from quiver.record import Batch
from quiver.replication.entries import KnownConfiguration, encode_own_entry
from quiver.replication.member_files import Membership, MemberStorage, encode_membership, open_files
from quiver.storage import Disk, StoredHardState
from quiver.storage.flush import write_all
from quiver.storage.hardstate import HARD_STATE_NAME

COPY_NAME = HARD_STATE_NAME + ".before-recovery"


async def force_configuration(
    storage: MemberStorage,
    directory: str,
    *,
    voter: NodeId,
    term: Term,
    skipped: int = 0,
    batches: Sequence[bytes] = (),
) -> Index:
    """Make `voter` the only voter of a stopped group, in `term`; append unstamped batches; return the last index.

    `skipped` indexes before the batches are used up by entries without content: the lost members may have had entries
    there that others still remember by their index.

    Raises:
        StorageError: the disk failed, or the log is damaged beyond what a restart repairs.
    """
    await storage.submit(partial(_copy_hard_state, storage.disk, directory))
    files = await open_files(storage, directory, bootstrap=None)
    log, index = files.log, files.log.end_index
    try:
        configuration = Configuration(voters=(voter,))
        known = [*files.membership.configurations, KnownConfiguration(index, term, configuration)]
        state = StoredHardState(
            term=term,
            vote=voter,
            commit_index=files.initial.commit,
            membership=encode_membership(Membership(tuple(known[-2:]))),
        )
        await storage.submit(partial(files.hard_state.save, state))
        entry = Entry(index, term, EntryKind.CONFIG, configuration=configuration)
        timestamp = storage.clock.wall_ms()
        own = [entry, *(Entry(Index(index + number), term, EntryKind.NOOP) for number in range(1, skipped + 1))]
        stamped = [encode_own_entry(one, base_offset=log.end_offset, timestamp=timestamp) for one in own]
        for number, batch in enumerate(batches, 1):
            at = Index(index + skipped + number)
            stamped.append(
                Batch.stamped(batch, term=term, index=at, base_offset=log.end_offset, append_timestamp=timestamp)
            )
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        log.on_failure = failed.set_exception
        log.on_durable = lambda end: None if end < log.end_index or failed.done() else failed.set_result(None)
        log.append(stamped)
        await failed
        return Index(log.end_index - 1)
    finally:
        await log.close()


def _copy_hard_state(disk: Disk, directory: str) -> None:
    source, target = f"{directory}/{HARD_STATE_NAME}", f"{directory}/{COPY_NAME}"
    if disk.exists(target):
        return
    if not disk.exists(source):
        raise StorageError(f"{directory}: there is no hard state, so nothing can be recovered")
    original = disk.open(source)
    try:
        data = original.read(original.size(), 0)
    finally:
        original.close()
    if disk.exists(target + ".new"):
        disk.remove(target + ".new")  # left by an attempt that was interrupted
    copy = disk.open(target + ".new", create=True)
    try:
        write_all(copy, [data], 0)
        copy.sync()
    finally:
        copy.close()
    disk.rename(target + ".new", target)
    disk.sync_directory(directory)
