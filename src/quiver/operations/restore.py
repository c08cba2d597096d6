"""`quiver backup restore`: create a backup's topics in a running cluster, and prove that they are the same.

Every file is verified before anything is created, and a topic that exists already is refused. The batches are appended
in order by one producer, so that a retry is never a duplicate; they keep their records' keys, values, headers and
timestamps. Retention is configured last, after the digests of what the cluster holds were compared with the backup's.
`restore_clients` does the rest: named clients with cursors, owners and queue settings, and quotas.

A partition whose log began at offset 0 gets the same offsets. One that retention had trimmed to offset S begins again
at 0, since an empty partition cannot begin elsewhere: offset o becomes o - S, and cursors are moved by as much. The
time of appending, by which retention counts age, is that of the restore.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from quiver.client.cluster import AsyncCluster
from quiver.errors import ConflictError, DamageError, NotFoundError, QuiverError
from quiver.model import Offset, PartitionId, ProducerId
from quiver.operations.backup_folder import (
    BackupCounts,
    ClusterBackup,
    PartitionBackup,
    TopicBackup,
    find_damage,
    read_batches,
    read_cluster,
    read_manifest,
)
from quiver.operations.record_digests import RecordDigest
from quiver.operations.restore_clients import ClientRestorer, Owners, Report, restore_quotas
from quiver.record import Batch, build_batch
from quiver.record.builder import reseal_batch
from quiver.record.compression import Compression
from quiver.security.permissions import INTERNAL_PREFIX
from quiver.wire.messages import Produce, RegisterProducerRequest, Selection, TopicInfo


def verify_backup(folder: str) -> list[str]:
    """Return what is wrong with a backup: nothing, if every file is there and has its checksum.

    Raises:
        DamageError: there is no manifest, or it is damaged.
    """
    return list(find_damage(folder, read_manifest(folder)))


async def restore_backup(cluster: AsyncCluster, folder: str, topics: Sequence[str], report: Report) -> BackupCounts:
    """Restore these topics of a backup, or all but internal ones if none is named; return how much that was.

    Quotas are restored with all topics only.

    Raises:
        ConflictError: not done; a topic exists in the cluster (`topic_exists`).
        NotFoundError: not done; the backup has no such topic (`unknown_topic`).
        DamageError: the backup is damaged, and nothing was done; or what was restored is not what was backed up.
    """
    if damage := verify_backup(folder):
        raise DamageError(f"not done: {folder}: {damage[0]} ({len(damage)} files damaged)", code="backup_damaged")
    content = read_cluster(folder)
    chosen = _choose(content, topics, folder, report)
    existing = sorted({one.topic for one in chosen}.intersection(await cluster.list_topics()))
    if existing:
        raise ConflictError(
            f"not done: topic {existing[0]!r} exists in this cluster; a restore never adds to a topic: delete it, or "
            "restore into another cluster",
            code="topic_exists",
        )
    records, owners = 0, Owners(cluster, report)
    for topic in chosen:
        try:
            records += await _restore_topic(cluster, folder, topic, owners)
        except QuiverError as error:
            error.add_note(f"topic {topic.topic!r} is restored in part: delete it before you restore it again")
            raise
        report(f"{topic.topic}: restored and equal")
    clients = ClientRestorer(cluster, {one.topic: one for one in chosen}, owners)
    await clients.restore(content)
    quotas = 0 if topics else await restore_quotas(cluster, content.quotas, report)
    await owners.report_unknown()
    return BackupCounts(
        records=records,
        topics=len(chosen),
        producers=clients.producers,
        consumers=clients.consumers,
        cursors=clients.cursors,
        quotas=quotas,
    )


def _choose(content: ClusterBackup, topics: Sequence[str], folder: str, report: Report) -> list[TopicBackup]:
    known = {one.topic: one for one in content.topics}
    if unknown := sorted(set(topics) - known.keys()):
        raise NotFoundError(f"not done: {folder} has no topic {unknown[0]!r}", code="unknown_topic")
    if topics:
        return [known[topic] for topic in dict.fromkeys(topics)]
    for topic in known:
        if topic.startswith(INTERNAL_PREFIX):  # the cluster writes its own; backups of earlier programs have it
            report(f"{topic}: internal, not restored; name it with --topic to restore it")
    return [one for topic, one in known.items() if not topic.startswith(INTERNAL_PREFIX)]


async def _restore_topic(cluster: AsyncCluster, folder: str, topic: TopicBackup, owners: Owners) -> int:
    brokers = sum("broker" in node.roles for node in await cluster.brokers())
    await cluster.create_topic(
        topic.topic,
        len(topic.partitions),
        replicas=max(1, min(topic.replicas, brokers)),
        encrypted=topic.is_encrypted or None,  # never in plain text on disks what was not
    )
    created = await cluster.router.find_topic(topic.topic, deadline=cluster.router.deadline())
    await owners.give("topic", created.topic_id, topic.owner)
    appender = _Appender(cluster, topic.topic)
    await appender.open()
    try:
        for partition in topic.partitions:
            await _append(appender, folder, partition)
            await _compare(cluster, topic.topic, partition)
    finally:
        await appender.close()
    await cluster.configure_topic(topic.topic, retention=topic.retention)
    return sum(one.end_offset - one.first_offset for one in topic.partitions)


async def _append(appender: _Appender, folder: str, partition: PartitionBackup) -> None:
    position = partition.first_offset
    for batch in read_batches(folder, partition.file):
        first, end = max(batch.header.base_offset, position), min(batch.header.end_offset, partition.end_offset)
        if first > position:
            path = os.path.join(folder, partition.file)
            raise DamageError(f"{path} lacks the offsets {position} to {first - 1}", code="backup_damaged")
        if first < end:
            await appender.append(PartitionId(partition.partition), batch, first, end)
            position = end
    if position != partition.end_offset:
        path = os.path.join(folder, partition.file)
        raise DamageError(f"{path} ends at offset {position}, not {partition.end_offset}", code="backup_damaged")


async def _compare(cluster: AsyncCluster, topic: str, partition: PartitionBackup) -> None:
    """Read a restored partition back and compare its digest with that of the source."""
    count = partition.end_offset - partition.first_offset
    digest = RecordDigest(0, count, shift=partition.first_offset)
    async for batch in cluster.read_range(topic, partition.partition, 0, count):
        digest.add(batch)
    if (digest.count, digest.text) != (count, partition.digest):
        raise DamageError(
            f"topic {topic!r} partition {partition.partition}: the cluster holds {digest.count} records of digest "
            f"{digest.text}, the backup {count} of {partition.digest}",
            code="restore_differs",
        )


class _Appender:
    """Appends batches of a backup to a topic, exactly once, as a producer of its own."""

    def __init__(self, cluster: AsyncCluster, topic: str) -> None:
        self._cluster, self._router, self._topic = cluster, cluster.router, topic
        self._producer_id, self._epoch = ProducerId(0), 0
        self._sequences: dict[PartitionId, int] = {}

    async def open(self) -> None:
        """Register the producer."""
        request = RegisterProducerRequest(topics=(Selection(topic=self._topic),))
        registered, _ = await self._router.ask(request, deadline=self._router.deadline())
        self._router.cache.record_index(registered.index)
        self._producer_id, self._epoch = registered.producer_id, registered.epoch

    async def append(self, partition: PartitionId, batch: Batch, first: int, end: int) -> None:
        """Append the records of a batch from `first` up to `end`; the batch as it is, if that is all of it."""
        sequence = self._sequences.get(partition, 0)
        data = self._sealed(batch, sequence, first, end)
        deadline = self._router.deadline()
        await self._router.ask_leader(
            self._topic, partition, lambda info: _produce(info, partition), (data,), deadline=deadline
        )
        self._sequences[partition] = sequence + end - first

    async def close(self) -> None:
        """Remove the producer again."""
        await self._cluster.forget("producer", self._producer_id)

    def _sealed(self, batch: Batch, sequence: int, first: int, end: int) -> bytes:
        if (first, end) == (batch.header.base_offset, batch.header.end_offset):
            return reseal_batch(
                batch.data, producer_epoch=self._epoch, base_sequence=sequence, producer_id=self._producer_id
            )
        records = list(batch.records(Offset(first), Offset(end)))
        return build_batch(
            [record.value for record in records],
            timestamp=batch.header.first_timestamp,
            keys=[record.key for record in records],
            timestamps=[record.timestamp for record in records],
            headers=[record.headers for record in records],
            compression=Compression(batch.header.compression),
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            base_sequence=sequence,
        )


def _produce(info: TopicInfo, partition: PartitionId) -> Produce:
    return Produce(topic_id=info.topic_id, partition_id=partition)


def describe_shift(content: ClusterBackup) -> dict[str, dict[int, int]]:
    """Return by how much the offsets of a restored partition are lower than in the source, where they are."""
    shifted = {
        one.topic: {part.partition: part.first_offset for part in one.partitions if part.first_offset}
        for one in content.topics
    }
    return {topic: by for topic, by in shifted.items() if by}
