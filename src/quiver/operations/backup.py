"""`quiver backup create`: copy topics of a running cluster, with their clients, to a folder.

Consistent for each partition: all records from its first offset up to its high watermark at one moment, which every
one of its readers could have read then. The order of the steps makes the whole fit together:

1. a hold keeps retention from removing records while they are copied;
2. cursors of named consumers are read *before* the end offsets, so that no cursor is beyond the copied records;
3. the topics' configuration and owners are read after the end offsets, at one index of the metadata;
4. the batches are copied as they are; a batch that crosses a bound is copied whole, and the bound is noted.

Leaves nothing in the cluster: the hold is released, and it expires by itself if this program dies. What the user of the
backup may not read is not in it; as far as the cluster says so, `left_out` names it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from quiver import __version__
from quiver.client.cluster import AsyncCluster
from quiver.errors import NotFoundError
from quiver.operations.backup_clients import find_clients, find_quotas
from quiver.operations.backup_folder import (
    CLUSTER_NAME,
    VERSION,
    BackupFile,
    ClusterBackup,
    FileEntry,
    Manifest,
    PartitionBackup,
    TopicBackup,
    prepare_folder,
    write_manifest,
)
from quiver.operations.record_digests import RecordDigest
from quiver.security.permissions import INTERNAL_PREFIX
from quiver.wire.messages import GetMetadata, TopicInfo

HOLD_S = 600.0
"""How long a hold lasts unless it is renewed: it is, before each partition and every `RENEW_S`."""
RENEW_S = 60.0

Report = Callable[[str], None]


async def create_backup(cluster: AsyncCluster, folder: str, topics: Sequence[str], report: Report) -> Manifest:
    """Back up these topics, or all but internal ones if none is named; return the manifest.

    Raises:
        ConflictError: the folder is not empty (`backup_exists`), or a topic was deleted and created again meanwhile.
        NotFoundError: unknown topic (`unknown_topic`).
    """
    known = await cluster.list_topics()
    if unknown := sorted(set(topics) - set(known)):
        raise NotFoundError(f"not done: unknown topic {unknown[0]!r}", code="unknown_topic")
    internal = [topic for topic in known if topic.startswith(INTERNAL_PREFIX)]
    chosen = list(dict.fromkeys(topics)) or [topic for topic in known if topic not in internal]
    left_out = [] if topics else [f"internal topic {topic}" for topic in internal]
    prepare_folder(folder)
    first = {topic: (await cluster.offsets(topic, "earliest")).offsets for topic in chosen}
    async with _holding(cluster, first) as renew:
        first = {topic: (await cluster.offsets(topic, "earliest")).offsets for topic in chosen}  # held from here on
        producers, consumers = await find_clients(cluster.router, chosen, left_out)
        ends = {topic: await cluster.offsets(topic, "latest") for topic in chosen}
        found = (
            await cluster.router.ask(
                GetMetadata(topics=tuple(chosen), is_linearizable=True, with_owners=True),
                deadline=cluster.router.deadline(),
            )
        )[0]
        infos = {info.topic: info for info in found.topics}
        files: list[FileEntry] = []
        saved: list[TopicBackup] = []
        for number, topic in enumerate(chosen):
            bounds = {part: (first[topic].get(part, 0), end) for part, end in ends[topic].offsets.items()}
            copier = _TopicCopier(cluster, folder, infos[topic], number, ends[topic].topic_id, renew)
            saved.append(await copier.copy(bounds, files))
            report(f"{topic}: {sum(end - start for start, end in bounds.values())} records")
    content = ClusterBackup(
        cluster_id=found.cluster_id,
        metadata_index=found.index,
        topics=tuple(saved),
        consumers=consumers,
        producers=producers,
        quotas=await find_quotas(cluster, left_out),
        left_out=tuple(left_out),
    )
    return _complete(folder, content, files)


def _complete(folder: str, content: ClusterBackup, files: list[FileEntry]) -> Manifest:
    """Write what describes the copied batches, the manifest last."""
    described = BackupFile(folder, CLUSTER_NAME)
    described.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    files.append(described.finish())
    partitions = [one for topic in content.topics for one in topic.partitions]
    manifest = Manifest(
        version=VERSION,
        program=__version__,
        created_ms=time.time_ns() // 1_000_000,
        cluster_id=content.cluster_id,
        records=sum(one.end_offset - one.first_offset for one in partitions),
        files=tuple(files),
    )
    write_manifest(folder, manifest)
    return manifest


class _TopicCopier:
    """Copies the batches of one topic."""

    def __init__(
        self, cluster: AsyncCluster, folder: str, info: TopicInfo, number: int, topic_id: int, renew: _Renew
    ) -> None:
        self._cluster, self._folder, self._info = cluster, folder, info
        self._number, self._topic_id, self._renew = number, topic_id, renew

    async def copy(self, bounds: dict[int, tuple[int, int]], files: list[FileEntry]) -> TopicBackup:
        """Copy the given range of each partition; add the files to `files`."""
        info = self._info
        return TopicBackup(
            topic=info.topic,
            topic_id=self._topic_id,
            created_ms=info.created_ms,
            replicas=info.replicas,
            retention=info.retention,
            is_encrypted=info.is_encrypted,
            owner=info.owner,
            partitions=tuple([await self._copy(part, *bounds[part], files) for part in sorted(bounds)]),
        )

    async def _copy(self, partition: int, first: int, end: int, files: list[FileEntry]) -> PartitionBackup:
        name = f"topics/{self._number}/{partition}.batches"
        file, digest = BackupFile(self._folder, name), RecordDigest(first, end)
        async for batch in self._cluster.read_range(self._info.topic, partition, first, end, topic_id=self._topic_id):
            batch.verify()
            file.write(bytes(batch.data))
            digest.add(batch)
            await self._renew()
        files.append(file.finish())
        return PartitionBackup(partition=partition, first_offset=first, end_offset=end, digest=digest.text, file=name)


class _Renew:
    """Renews the holds of a backup when it is time."""

    def __init__(self, cluster: AsyncCluster, name: str, offsets: dict[str, dict[int, int]]) -> None:
        self._cluster, self._name, self._offsets = cluster, name, offsets
        self._next_s = 0.0

    async def __call__(self) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + RENEW_S
        for topic, offsets in self._offsets.items():
            await self._cluster.hold(topic, self._name, offsets, lasting=HOLD_S, owner="quiver backup")


@asynccontextmanager
async def _holding(cluster: AsyncCluster, offsets: dict[str, dict[int, int]]) -> AsyncIterator[_Renew]:
    name = f"backup-{time.time_ns():x}"
    renew = _Renew(cluster, name, offsets)
    await renew()
    try:
        yield renew
    finally:
        await cluster.release_hold(name)
