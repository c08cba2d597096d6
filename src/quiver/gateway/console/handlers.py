"""Handlers of the console's routes, and of those for operators that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from quiver.client.cursors import PartitionLag, find_lag, plan_reset, reset_cursors
from quiver.clock import Clock
from quiver.config import all_settings
from quiver.errors import ConflictError, NotFoundError, QuiverError, RequestError
from quiver.gateway import contract as http_contract
from quiver.gateway.application import RouteHandler
from quiver.gateway.changes import submit_change
from quiver.gateway.console import contract
from quiver.gateway.console.assets import ConsoleAssets
from quiver.gateway.console.feed import ConsoleFeed
from quiver.gateway.console.meter import sum_lags
from quiver.gateway.console.pipelines import READ_MAX, RUNS_TOPIC, fold_runs
from quiver.gateway.console.recorder import ConsoleRecorder
from quiver.gateway.console.records import RecordBrowser
from quiver.gateway.console.topic_summaries import TopicSummaries
from quiver.gateway.http import HttpResponse
from quiver.gateway.http_route import EVENT_STREAM
from quiver.gateway.registrations import catch_up
from quiver.metadata import BrokerState, ConsumerRow, GroupKind, View
from quiver.model import ConsumerId, NodeId, Offset, PartitionId
from quiver.record.decoded import DecodedBatchBudget
from quiver.routing.retry import Deadline
from quiver.routing.router import Router, RouterOptions, gather_outcomes
from quiver.security import Principal
from quiver.tasks import map_in_steps
from quiver.wire.admin_messages import ClientInfo, DescribeNode, ListClients
from quiver.wire.answer_memory import AnswerMemory
from quiver.wire.messages import (
    AddPartitionsRequest,
    ConfigureTopicRequest,
    DrainBroker,
    RebalanceBrokers,
    RestoreTopicRequest,
    RetentionInfo,
)

LAGS_MS_MAX = 2_000
"""Time for a node to report the lags of consumers."""


class ConsoleHandlers:
    """Handle the calls of the console."""

    def __init__(
        self,
        router: Router,
        view: Callable[[], View],
        *,
        node: NodeId,
        clock: Clock,
        assets: ConsoleAssets,
        feed: ConsoleFeed,
        recorder: ConsoleRecorder,
        decoded: DecodedBatchBudget,
        answers: AnswerMemory,
        timeout_ms: int,
    ) -> None:
        self._router = router.with_options(RouterOptions(timeout_ms=timeout_ms))
        self._view = view
        self._clock = clock
        self._node = node
        self._assets = assets
        self._feed = feed
        self._recorder = recorder
        self._summaries = TopicSummaries(router, view, clock)
        self._browser = RecordBrowser(router, decoded, answers, timeout_ms=timeout_ms)
        self._timeout_ms = timeout_ms

    def handlers(self) -> dict[str, RouteHandler]:
        """Return the handlers by the name of their route."""
        return {
            "console": self.page,
            "console_file": self.file,
            "console_session": self.session,
            "console_events": self.events_stream,
            "console_topics": self.summarize_topics,
            "configure_topic": self.configure_topic,
            "restore_topic": self.restore_topic,
            "list_deleted_topics": self.list_deleted,
            "browse_records": self.browse,
            "list_consumers": self.list_consumers,
            "describe_consumer": self.describe_consumer,
            "reset_consumer": self.reset_consumer,
            "rebalance": self.rebalance,
            "undrain_broker": self.undrain_broker,
            "list_events": self.list_events,
            "list_holds": self.list_holds,
            "list_settings": self.list_settings,
            "list_pipelines": self.list_pipelines,
        }

    # -- the console itself ----------------------------------------------------------------------

    def page(self, _: http_contract.Parameters) -> HttpResponse:
        """Return the page."""
        return self._assets.page()

    def file(self, given: contract.AssetQuery) -> HttpResponse:
        """Return one of the page's files."""
        return self._assets.file(given.file)

    def session(self, _: http_contract.Parameters, on_behalf_of: str) -> contract.SessionAnswer:
        """Say who the caller is, and which nodes there are."""
        view = self._view()
        brokers = [row for _, row in sorted(view.brokers.items()) if row.state is not BrokerState.REMOVED]
        return contract.SessionAnswer(
            principal=on_behalf_of,
            node=self._node,
            cluster_id=view.cluster_id,
            nodes=[row.http_address for row in brokers if row.http_address],
        )

    def events_stream(self, _: http_contract.Parameters) -> HttpResponse:
        """Stream what happens."""
        self._feed.check_room()
        return HttpResponse(status=200, content_type=EVENT_STREAM, stream=self._feed.stream())

    async def summarize_topics(self, _: http_contract.Parameters) -> contract.TopicSummariesAnswer:
        """List all topics with sizes and rates."""
        return await self._summaries.find()

    # -- topics ----------------------------------------------------------------------------------

    async def configure_topic(self, given: contract.ConfigureTopicBody, on_behalf_of: str) -> http_contract.Answer:
        """Change a topic's retention or number of partitions."""
        if given.retention is None and given.partitions is None:
            raise RequestError("not done: give retention, partitions or both")
        if given.retention is not None:
            retention = RetentionInfo(
                ms=given.retention.ms, bytes=given.retention.bytes, until_consumed=given.retention.until_consumed
            )
            await self._change(ConfigureTopicRequest(topic=given.topic, retention=retention, on_behalf_of=on_behalf_of))
        if given.partitions is not None:
            await self._change(
                AddPartitionsRequest(topic=given.topic, partitions=given.partitions, on_behalf_of=on_behalf_of)
            )
        self._router.cache.forget_topic(given.topic)
        return http_contract.Answer()

    async def restore_topic(self, given: http_contract.TopicQuery, on_behalf_of: str) -> http_contract.Answer:
        """Restore a deleted topic."""
        await self._change(RestoreTopicRequest(topic=given.topic, on_behalf_of=on_behalf_of))
        return http_contract.Answer()

    async def list_deleted(self, _: http_contract.Parameters) -> contract.DeletedTopicsAnswer:
        """List the topics that can be restored."""
        await catch_up(self._router, deadline=self._deadline())
        rows = sorted(self._view().deleted_topics(), key=lambda row: (row.purge_ms or 0, row.name))
        return contract.DeletedTopicsAnswer(
            topics=[
                contract.DeletedTopicItem(topic=row.name, partitions=row.partitions, purge_ms=row.purge_ms)
                for row in rows
            ]
        )

    async def browse(self, given: contract.RecordsQuery, principal: Principal) -> contract.RecordsAnswer | HttpResponse:
        """Return records."""
        return await self._browser.browse(given, principal)

    # -- consumers -------------------------------------------------------------------------------

    async def list_consumers(self, _: http_contract.Parameters) -> contract.ConsumersAnswer:
        """List the consumers with their lags, as far as the leaders report them."""
        clients = (await self._router.ask(ListClients(kind="consumer"), deadline=self._deadline()))[0].clients
        lags = await self._find_lags()
        view = self._view()
        items = await map_in_steps(lambda client: _consumer_item(client, lags, view), clients)
        return contract.ConsumersAnswer(consumers=items)

    async def describe_consumer(self, given: contract.ConsumerQuery) -> contract.ConsumerAnswer:
        """Return a consumer's position in every partition."""
        consumer = await self._find_consumer(given.consumer_id)
        found = await find_lag(self._router, consumer.consumer_id, self._topics_of(consumer))
        return contract.ConsumerAnswer(
            name=consumer.request_id if consumer.is_named else "",
            group_kind=_group_kind(self._view(), consumer.consumer_id),
            cursors=[_cursor_item(lag) for lag in found],
        )

    async def reset_consumer(self, given: contract.ResetBody, _: str) -> contract.CursorsAnswer:
        """Move a consumer's cursors, or say where they would be.

        Raises:
            ConflictError: not done; they are the cursors of a group, or of a work queue.
        """
        if sum(one is not None for one in (given.to, given.offset, given.time_ms)) != 1:
            raise RequestError("not done: give one of to, offset and time_ms")
        # This node may not know yet that the consumer has become a group.
        await catch_up(self._router, deadline=self._deadline())
        _refuse_group(await self._find_consumer(given.consumer_id), self._view())
        target: int | str | None = next(one for one in (given.to, given.offset, given.time_ms) if one is not None)
        assert target is not None
        act = plan_reset if given.dry_run else reset_cursors
        plan = await act(
            self._router,
            ConsumerId(given.consumer_id),
            given.topic,
            target,
            is_timestamp=given.time_ms is not None,
            partitions=() if given.partition_id is None else (PartitionId(given.partition_id),),
        )
        if not plan:
            message = f"not done: consumer {given.consumer_id} is not registered for topic {given.topic!r}"
            raise NotFoundError(message, code="not_registered")
        return contract.CursorsAnswer(
            cursors=[_cursor_item(lag, target=to) for lag, to in plan], is_done=not given.dry_run
        )

    async def _find_consumer(self, consumer_id: int) -> ConsumerRow:
        if ConsumerId(consumer_id) not in self._view().consumers:
            await catch_up(self._router, deadline=self._deadline())
        found = self._view().consumers.get(ConsumerId(consumer_id))
        if found is None:
            raise NotFoundError(f"unknown consumer {consumer_id}", code="unknown_consumer")
        return found

    def _topics_of(self, consumer: ConsumerRow) -> list[str]:
        view = self._view()
        names = (view.topics.get(one.topic_id) for one in consumer.registrations)
        return sorted({topic.name for topic in names if topic is not None and topic.state == "active"})

    async def _find_lags(self) -> dict[tuple[str, str], int]:
        brokers = [row for row in self._view().brokers.values() if row.state is not BrokerState.REMOVED]
        request, deadline = DescribeNode(with_lags=True), self._router.deadline(LAGS_MS_MAX)
        answers = await gather_outcomes(
            self._router.ask_at(row.wire_address, request, deadline=deadline) for row in brokers
        )
        lags = [lag for answer in answers if not isinstance(answer, QuiverError) for lag in answer.lags]
        found = sum_lags(((lag.consumer, lag.topic, lag.records) for lag in lags), lags_max=len(lags))
        return {(consumer, topic): records for consumer, topic, records in found}

    # -- the cluster -----------------------------------------------------------------------------

    async def rebalance(self, _: http_contract.Parameters, on_behalf_of: str) -> http_contract.Answer:
        """Start to spread replicas evenly."""
        await self._change(RebalanceBrokers(on_behalf_of=on_behalf_of))
        return http_contract.Answer()

    async def undrain_broker(self, given: http_contract.BrokerQuery, on_behalf_of: str) -> http_contract.Answer:
        """Let a broker hold replicas again."""
        await self._change(DrainBroker(broker=NodeId(given.id), is_undone=True, on_behalf_of=on_behalf_of))
        return http_contract.Answer()

    def list_events(self, given: contract.EventsQuery) -> contract.EventsAnswer:
        """List what happened."""
        return contract.EventsAnswer(events=self._recorder.events(after_id=given.after or 0))

    async def list_holds(self, _: http_contract.Parameters) -> contract.HoldsAnswer:
        """List the holds."""
        view = self._view()
        return contract.HoldsAnswer(
            holds=[
                contract.HoldItem(
                    name=row.name,
                    topic=topic.name if (topic := view.topics.get(row.topic_id)) else "",
                    owner=row.owner,
                    placed_ms=row.placed_ms,
                    expires_ms=row.expires_ms,
                    offsets={str(one.partition_id): one.first_offset for one in row.positions},
                )
                for _, row in sorted(view.holds.items())
            ]
        )

    async def list_settings(self, given: contract.SettingsQuery) -> contract.SettingsAnswer:
        """List the settings in force on a node."""
        node = NodeId(self._node if given.node is None else given.node)
        described, _ = await self._router.ask_node(node, DescribeNode(with_settings=True), deadline=self._deadline())
        return contract.SettingsAnswer(
            node=node,
            settings=[
                contract.SettingItem(
                    key=one.key,
                    value=described.settings[one.key],
                    default=str(one.default),
                    source=described.setting_sources.get(one.key, "default"),
                    description=one.description,
                )
                for one in all_settings()
                if one.key in described.settings
            ],
        )

    async def list_pipelines(self, _: http_contract.Parameters) -> contract.PipelinesAnswer:
        """List the runs of pipelines."""
        query = contract.RecordsQuery(topic=RUNS_TOPIC, max=READ_MAX)
        try:
            found = await self._browser.read(query)
        except NotFoundError:
            return contract.PipelinesAnswer(runs=[])
        return contract.PipelinesAnswer(runs=fold_runs(found.records, now_ms=self._clock.wall_ms()))

    # -- requests --------------------------------------------------------------------------------

    async def _change(
        self,
        request: ConfigureTopicRequest | AddPartitionsRequest | RestoreTopicRequest | RebalanceBrokers | DrainBroker,
    ) -> None:
        await submit_change(self._router, request, deadline=self._deadline())

    def _deadline(self) -> Deadline:
        return self._router.deadline(self._timeout_ms)


def _refuse_group(consumer: ConsumerRow, view: View) -> None:
    """Refuse to reset a group as if it were a consumer: it may have members, and a work queue has no cursors."""
    group = view.consumer_groups.get(consumer.consumer_id)
    if group is None:
        return
    name = consumer.request_id
    if group.kind is GroupKind.QUEUE:
        message = f"is the work queue {name!r}, which has no cursors to reset; GET /groups/{name}/queue describes it"
    else:
        message = f"is the group {name!r}; call POST /groups/{name}/reset"
    raise ConflictError(f"not done: consumer {consumer.consumer_id} {message}", code="group_kind")


def _group_kind(view: View, consumer_id: ConsumerId) -> Literal["stream", "queue"] | None:
    group = view.consumer_groups.get(consumer_id)
    if group is None:
        return None
    return "queue" if group.kind is GroupKind.QUEUE else "stream"


def _consumer_item(client: ClientInfo, lags: dict[tuple[str, str], int], view: View) -> contract.ConsumerItem:
    row = view.consumers.get(ConsumerId(client.id))
    name = client.name or str(client.id)
    return contract.ConsumerItem(
        id=client.id,
        name=client.name if row is None or row.is_named else "",
        is_alive=client.is_alive,
        last_heartbeat_ms=client.last_seen_ms,
        registered_ms=client.registered_ms,
        topics=[contract.ConsumerTopicItem(topic=topic, lag=lags.get((name, topic))) for topic in client.topics],
        group_kind=_group_kind(view, ConsumerId(client.id)),
    )


def _cursor_item(lag: PartitionLag, *, target: Offset | msgspec.UnsetType = msgspec.UNSET) -> contract.CursorItem:
    return contract.CursorItem(
        topic=lag.topic,
        partition_id=lag.partition,
        cursor=lag.cursor,
        first_offset=lag.first_offset,
        end_offset=lag.end_offset,
        lag=lag.lag,
        target=target,
    )
