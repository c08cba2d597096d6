"""Handlers of the queue routes.

A gateway has one dispatcher (`quiver.client.queue_core`) for each queue and principal that use it, so that the calls of
many workers share requests to the partitions' leaders. One that is not used is closed after a while. The leaders keep
all state of a job: any gateway settles what another one delivered.

A receipt names the job's topic, group, partition, offset and the grant of its lease. It is no secret: it is good only
together with the right to use the queue, and only until the job is leased again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from quiver.client.options import QueueOptions
from quiver.client.queue_core import QueueCore
from quiver.client.queue_groups import find_queue, open_group
from quiver.client.queue_jobs import LeasedJob, Receipt, SettleKind, merge_receipts
from quiver.config import GatewaySettings
from quiver.errors import FencedError, OverloadedError, QuiverError, RequestError
from quiver.gateway import queue_contract as contract
from quiver.gateway.application import RouteHandler
from quiver.gateway.codec import record_fields
from quiver.gateway.http import HttpResponse
from quiver.gateway.metrics import Metrics
from quiver.gateway.partition_reader import WAIT_SHARE
from quiver.gateway.record_answers import SMALL_BYTES, Item, respond_with_list
from quiver.model import ConsumerId, PartitionId, TopicId
from quiver.record.decoded import record_bytes
from quiver.routing.retry import Deadline
from quiver.routing.router import Router
from quiver.security import ANONYMOUS, Principal
from quiver.security.identity import parse_acting
from quiver.security.limits import is_share_used
from quiver.wire.answer_memory import AnswerMemory
from quiver.wire.answer_room import AnswerRoom
from quiver.wire.group_messages import QueueSettingsChange
from quiver.wire.queue_messages import Grant, Position
from quiver.wire.requests import PartitionNumber

T = TypeVar("T")

NOTHING = HttpResponse(status=204)
QUEUES_MAX = 1_000
"""Queues that a gateway serves at a time, each counted once per principal; `is_share_used` shares them out."""
RECEIVE_BYTES = 1024 * 1024
"""Bytes of the records that a dispatcher asks a partition for at once, unless a single one is larger."""
IDLE_MS_MAX = 30_000
"""Time after which the dispatcher of a queue that nobody uses is closed."""

QueueKey = tuple[str, str, str]
"""Topic, group and principal."""


class ReceiptToken(msgspec.Struct, frozen=True, array_like=True):
    """What a receipt says; with the bounds of the wire's requests, since a caller can make up any receipt."""

    topic_id: TopicId
    partition_id: PartitionNumber
    group_id: ConsumerId
    offset: Position
    grant: Grant


_decoder = msgspec.msgpack.Decoder(ReceiptToken)


def encode_receipt(receipt: ReceiptToken) -> str:
    """Return a receipt as text that needs no escaping anywhere."""
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(receipt)).rstrip(b"=").decode()


def decode_receipt(text: str) -> ReceiptToken:
    """Return what a receipt says; raises `RequestError` for what is none."""
    try:
        return _decoder.decode(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, msgspec.DecodeError):
        message = "not done: not a receipt; send it back as /queue/receive returned it"
        raise RequestError(message, code="bad_receipt") from None


class _OpenQueue(msgspec.Struct):
    core: QueueCore
    used_ms: int
    calls: int = 0


class QueueHandlers:
    """Handle the calls of workers."""

    def __init__(self, router: Router, metrics: Metrics, *, settings: GatewaySettings, answers: AnswerMemory) -> None:
        self._router, self._clock = router, router.clock
        self._metrics = metrics
        self._settings = settings
        self._answers = answers
        self._queues: dict[QueueKey, _OpenQueue] = {}
        self._opening: dict[QueueKey, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def handlers(self) -> dict[str, RouteHandler]:
        """Return the handlers by the names of their routes."""
        return {
            "receive_jobs": self.receive,
            "ack_jobs": self.ack,
            "nack_jobs": self.nack,
            "extend_jobs": self.extend,
            "reject_jobs": self.reject,
        }

    async def close(self) -> None:
        """Close all dispatchers; jobs that no worker has got are released; idempotent."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for key in list(self._queues):
            self._drop(key)
        if self._closing:
            await asyncio.wait(self._closing)

    # -- calls -----------------------------------------------------------------------------------

    async def receive(self, given: contract.ReceiveBody, on_behalf_of: str) -> contract.JobsAnswer | HttpResponse:
        """Lease jobs to the caller."""
        wait_ms = min(given.wait_ms or 0, self._settings.wait_ms_max)
        deadline = self._router.deadline(self._settings.request_timeout_ms + wait_ms)
        opened = await self._open((given.topic, given.group, on_behalf_of), deadline, is_creating=True)
        jobs = await self._use(given, on_behalf_of, opened, opened.core.receive(given.max or 1, wait_ms))
        if not jobs:
            return NOTHING
        self._metrics.count_consumed(records=len(jobs), size_bytes=sum(len(job.value or b"") for job in jobs))
        items = [_job_item(job, opened.core.group_id) for job in jobs]
        size_bytes = sum(record_bytes(job.record) for job in jobs)
        if size_bytes > SMALL_BYTES:
            room = AnswerRoom(self._answers, _principal_of(on_behalf_of))
            room.count(size_bytes)
            return respond_with_list(_make_answer, items, room, size_bytes)
        return _make_answer([make(**record_fields(record)) for make, record in items])

    async def ack(self, given: contract.SettleBody, on_behalf_of: str) -> contract.SettledAnswer:
        """Acknowledge jobs."""
        return await self._settle(given, on_behalf_of, "ack")

    async def nack(self, given: contract.NackBody, on_behalf_of: str) -> contract.SettledAnswer:
        """Return jobs."""
        return await self._settle(given, on_behalf_of, "return", given.delay_ms)

    async def extend(self, given: contract.ExtendBody, on_behalf_of: str) -> contract.SettledAnswer:
        """Extend the leases of jobs."""
        return await self._settle(given, on_behalf_of, "extend", given.lease_ms)

    async def reject(self, given: contract.RejectBody, on_behalf_of: str) -> contract.SettledAnswer:
        """Make jobs dead letters."""
        return await self._settle(given, on_behalf_of, "reject", given.reason or "")

    async def _settle(
        self, given: contract.SettleBody, on_behalf_of: str, kind: SettleKind, argument: Any = None
    ) -> contract.SettledAnswer:
        texts = _receipts_of(given)
        receipts = [decode_receipt(text) for text in texts]
        deadline = self._router.deadline(self._settings.request_timeout_ms)
        opened = await self._open((given.topic, given.group, on_behalf_of), deadline, is_creating=False)
        core = opened.core
        if kind == "extend" and argument is None:
            argument = core.settings.lease_ms
        by_partition: dict[int, list[Receipt]] = {}
        for receipt in receipts:
            if (receipt.topic_id, receipt.group_id) != (core.topic.topic_id, core.group_id):
                message = (
                    f"not done: a receipt is not of topic {given.topic!r} and group {given.group!r} as they are now"
                )
                raise RequestError(message, code="bad_receipt")
            by_partition.setdefault(receipt.partition_id, []).append((receipt.grant, receipt.offset))
        stale: set[tuple[int, Receipt]] = set()
        before: set[tuple[int, Receipt]] = set()
        for partition_id, pairs in by_partition.items():
            ranges = merge_receipts(pairs)
            settling = core.settle_ranges(kind, PartitionId(partition_id), ranges, argument)
            refused = await self._use(given, on_behalf_of, opened, settling)
            stale |= {(partition_id, receipt) for receipt in refused.stale}
            before |= {(partition_id, receipt) for receipt in refused.before}
        names = [(one.partition_id, (one.grant, one.offset)) for one in receipts]
        lost = [text for text, name in zip(texts, names, strict=True) if name in stale]
        known = [text for text, name in zip(texts, names, strict=True) if name in before]
        if len(lost) == len(texts):
            message = "not done: the leases have ended, and the jobs went to other workers or are settled"
            raise FencedError(message, code="stale_receipt")
        return contract.SettledAnswer(count=len(texts) - len(lost), stale=lost or UNSET, settled_before=known or UNSET)

    # -- dispatchers -----------------------------------------------------------------------------

    async def _use(
        self,
        given: contract.ReceiveBody | contract.SettleBody,
        on_behalf_of: str,
        opened: _OpenQueue,
        work: Coroutine[Any, Any, T],
    ) -> T:
        """Run a call of a dispatcher, which is not closed meanwhile; one of what does not exist any more is dropped."""
        opened.calls += 1
        try:
            return await work
        except RequestError as error:
            if not isinstance(error, FencedError):
                self._drop((given.topic, given.group, on_behalf_of))
            raise
        finally:
            opened.calls -= 1
            opened.used_ms = self._clock.monotonic_ms()

    async def _open(self, key: QueueKey, deadline: Deadline, *, is_creating: bool) -> _OpenQueue:
        """Return the dispatcher of a queue; its group is created if it does not exist and `is_creating`."""
        known = self._queues.get(key)
        if known is not None:
            return known
        async with self._opening.setdefault(key, asyncio.Lock()):
            try:
                known = self._queues.get(key)
                return known or await self._make(key, deadline, is_creating=is_creating)
            finally:
                self._opening.pop(key, None)

    async def _make(self, key: QueueKey, deadline: Deadline, *, is_creating: bool) -> _OpenQueue:
        topic, group, on_behalf_of = key
        self._check_room(key)
        router = self._router.acting_for(on_behalf_of)
        if is_creating:
            group_id, settings = await open_group(
                router, topic, group, QueueSettingsChange(), start="earliest", deadline=deadline
            )
        else:
            found = await find_queue(router, group, deadline=deadline)
            assert found.settings is not None  # it is a queue
            group_id, settings = found.group_id, found.settings
        info = await self._router.find_topic(topic, deadline=deadline, age_ms_max=0)
        core = QueueCore(
            info,
            group,
            group_id,
            router=self._router,
            options=QueueOptions(receive_bytes=RECEIVE_BYTES),
            settings=settings,
            make_job=partial(LeasedJob, None),
            reserve_room=partial(self._reserve_room, _principal_of(on_behalf_of)),
        )
        opened = self._queues[key] = _OpenQueue(core=core, used_ms=self._clock.monotonic_ms())
        if self._sweeper is None:
            self._sweep()
        return opened

    async def _reserve_room(self, principal: Principal, size_bytes: int) -> Callable[[], None]:
        """Wait for the memory of a large record, before it is leased, and return what releases it."""
        room = AnswerRoom(self._answers, principal)
        await room.reserve_large(size_bytes, timeout_s=self._router.options.attempt_timeout_ms / 1000 * WAIT_SHARE)
        return room.release

    def _check_room(self, key: QueueKey) -> None:
        """Raise `OverloadedError` if all dispatchers, or the caller's share of them, are in use or being opened."""
        others = (self._queues.keys() | self._opening.keys()) - {key}
        own = sum(principal == key[2] for _, _, principal in others) if key[2] else 0
        if is_share_used(own=own, used=len(others), most=QUEUES_MAX):
            message = (
                f"not done: this node serves {len(others)} queues over HTTP already, of at most {QUEUES_MAX}, {own} of "
                "them yours; use another node"
            )
            raise OverloadedError(message, code="too_many_queues")

    def _sweep(self) -> None:
        """Close dispatchers that nobody uses."""
        now_ms = self._clock.monotonic_ms()
        for key, opened in list(self._queues.items()):
            if not opened.calls and now_ms - opened.used_ms >= IDLE_MS_MAX:
                self._drop(key)
        self._sweeper = None
        if self._queues:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(IDLE_MS_MAX / 1000, self._sweep)

    def _drop(self, key: QueueKey) -> None:
        opened = self._queues.pop(key, None)
        if opened is not None:
            task = asyncio.get_running_loop().create_task(_close(opened.core), name="close-queue")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


async def _close(core: QueueCore) -> None:
    with suppress(QuiverError):
        await core.close()


def _receipts_of(given: contract.SettleBody) -> Sequence[str]:
    if (given.receipt is None) == (given.receipts is None):
        raise RequestError("not done: give either receipt or receipts")
    return (given.receipt,) if given.receipt is not None else given.receipts or ()


def _principal_of(on_behalf_of: str) -> Principal:
    """Return the principal for whom the memory of an answer counts; the node itself asks for nobody known."""
    return parse_acting(on_behalf_of, address="").principal if on_behalf_of else ANONYMOUS


def _job_item(job: LeasedJob, group_id: ConsumerId) -> Item:
    grant = job.grant
    receipt = ReceiptToken(grant.topic_id, grant.partition_id, group_id, job.offset, grant.grant)
    make = partial(
        contract.JobItem,
        receipt=encode_receipt(receipt),
        attempt=job.attempt,
        lease_ms=grant.lease_ms,
        partition_id=grant.partition_id,
    )
    return Item(make, job.record)


def _make_answer(jobs: list[contract.JobItem]) -> contract.JobsAnswer:
    return contract.JobsAnswer(jobs=jobs)
