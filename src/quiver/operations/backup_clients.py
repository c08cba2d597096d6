"""What `quiver backup create` saves beside topics: named clients with cursors, owners and queue settings, and quotas.

Each is read with what the user of the backup may read. `left_out` gets a sentence for what that user may not read.
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.client.cluster import AsyncCluster
from quiver.client.cursors import find_lag
from quiver.errors import NotAllowedError, NotFoundError, RequestError
from quiver.groups.settings import QueueSettings
from quiver.model import ConsumerId
from quiver.operations.backup_folder import ConsumerBackup, ProducerBackup, QuotaBackup
from quiver.routing.router import Router
from quiver.wire.admin_messages import ListClients
from quiver.wire.group_messages import DescribeGroups

HIDDEN_CLIENTS = "producers and consumers that this user may not read: grant it read on 'producer:*' and 'consumer:*'"
HIDDEN_QUOTAS = "quotas, which only an administrator may read"


async def find_clients(
    router: Router, topics: Sequence[str], left_out: list[str]
) -> tuple[tuple[ProducerBackup, ...], tuple[ConsumerBackup, ...]]:
    """Return the clients that have a name, as far as they use these topics."""
    found, _ = await router.ask(ListClients(), deadline=router.deadline())
    queues = await _find_queues(router)
    if found.is_partial:
        left_out.append(HIDDEN_CLIENTS)
    producers: list[ProducerBackup] = []
    consumers: list[ConsumerBackup] = []
    for client in found.clients:
        used = tuple(topic for topic in client.topics if topic in topics)
        if not client.name or not used:
            continue
        if client.kind == "producer":
            producers.append(ProducerBackup(name=client.name, topics=used, owner=client.owner))
            continue
        id_ = ConsumerId(client.id)
        cursors = await _find_cursors(router, id_, used)
        if cursors is not None:
            consumers.append(
                ConsumerBackup(name=client.name, cursors=cursors, owner=client.owner, queue=queues.get(id_))
            )
    return tuple(producers), tuple(consumers)


async def find_quotas(cluster: AsyncCluster, left_out: list[str]) -> tuple[QuotaBackup, ...]:
    """Return all quotas; none if the caller may not read them."""
    try:
        found = await cluster.access.quotas()
    except NotAllowedError:
        left_out.append(HIDDEN_QUOTAS)
        return ()
    return tuple(QuotaBackup(subject=one.subject, limits=one.limits) for one in found)


async def _find_queues(router: Router) -> dict[ConsumerId, QueueSettings]:
    try:
        found, _ = await router.ask(DescribeGroups(with_members=False), deadline=router.deadline())
    except RequestError as error:
        if error.code != "unknown_request":  # a program from before groups has no queues either
            raise
        return {}
    router.cache.record_index(found.index)
    return {one.group_id: one.settings or QueueSettings() for one in found.groups if one.kind == "queue"}


async def _find_cursors(
    router: Router, consumer_id: ConsumerId, topics: Sequence[str]
) -> dict[str, dict[int, int]] | None:
    """Return a consumer's cursors; None if it expired or was forgotten meanwhile."""
    cursors: dict[str, dict[int, int]] = {topic: {} for topic in topics}
    try:
        for lag in await find_lag(router, consumer_id, topics):
            cursors[lag.topic][lag.partition] = lag.cursor
    except NotFoundError as error:
        if error.code != "unknown_consumer":
            raise
        return None
    return cursors
