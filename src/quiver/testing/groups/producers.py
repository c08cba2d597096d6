"""Clients of consensus groups: idempotent producers with retries, and readers.

A producer sends batches of unique values, several at a time, and retries each until it has an answer or its delivery
timeout is over. A timeout ends the producer's epoch: it begins the next one, and the answer says how far the last one
got. Batches below that sequence are done, and sending them again must find them; the others can never be done. Clients
follow hints to the leader, and otherwise ask any node.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quiver.clock import Rng
from quiver.errors import OutcomeUnknownError, OutOfSequenceError, QuiverError, StorageError, UnavailableError
from quiver.model import GroupId, NodeId, Offset, ProducerId
from quiver.partition import AppendResult
from quiver.record import Batch, build_batch
from quiver.tasks import timeout
from quiver.testing.checkers.committed import check_ack, check_end_read
from quiver.testing.groups.history import EndRead, RecordedBatch
from quiver.testing.groups.node import SimulatedNode
from quiver.testing.simulator.report import require

if TYPE_CHECKING:
    from quiver.testing.groups.world import GroupWorld


class GroupClient:
    """What producers and readers share: a group, and a guess at its leader."""

    def __init__(self, world: GroupWorld, group: GroupId, rng: Rng) -> None:
        self.world = world
        self.group = group
        self.rng = rng
        self._guess: NodeId | None = None

    def target(self) -> NodeId:
        """Return the node to ask: the last known leader, else any."""
        nodes = self.world.serving_nodes()
        if self._guess is None or self._guess not in nodes or self.rng.random() < 0.05:
            self._guess = nodes[self.rng.randrange(len(nodes))]
        return self._guess

    def learn(self, asked: NodeId) -> None:
        """Follow the hint of a node that refused, or ask another one next time."""
        node = self.world.nodes[asked]
        replica = node.replicas.get(self.group)
        leader = replica.member.leader if replica is not None and node.is_running else None
        self._guess = leader if leader != asked else None

    async def pause(self, about_ms: int) -> None:
        """Wait for about so long."""
        await asyncio.sleep(about_ms * (0.5 + self.rng.random()) / 1000)


class GroupProducer(GroupClient):
    """One idempotent producer of one group."""

    def __init__(self, world: GroupWorld, group: GroupId, producer_id: ProducerId, rng: Rng) -> None:
        super().__init__(world, group, rng)
        self.producer_id = producer_id
        self.epoch = 0
        self.burst = 0
        """How many batches to send next without a pause."""
        self._sequence = 0
        self._unanswered: list[RecordedBatch] = []
        self._has_timed_out = False

    async def run(self) -> None:
        """Send until the world no longer wants it, then until everything has an answer."""
        world = self.world
        while world.wants_load:
            if self.burst:
                self.burst -= 1
            else:
                await self.pause(world.knobs.send_gap_ms)
            await self._send_some()

    async def send_one(self) -> RecordedBatch:
        """Send one batch and wait for its outcome."""
        send = self._next_send()
        await self._send_until_answered(send)
        return send

    async def _send_some(self) -> None:
        """Send up to a window of batches at a time; all have an outcome when this returns."""
        if self._has_timed_out and not await self._begin_epoch():
            return
        count = 1 + self.rng.randrange(self.world.knobs.in_flight_max)
        sends = [self._next_send() for _ in range(count)]
        async with asyncio.TaskGroup() as tasks:
            for send in sends:
                tasks.create_task(self._send_until_answered(send))

    def _next_send(self) -> RecordedBatch:
        count = 1 + self.rng.randrange(self.world.knobs.batch_records_max)
        first = self._sequence
        self._sequence += count
        history = self.world.history
        send = RecordedBatch(
            group=self.group,
            producer_id=self.producer_id,
            epoch=self.epoch,
            base_sequence=first,
            values=tuple(b"%d/%d/%d" % (self.producer_id, self.epoch, at) for at in range(first, first + count)),
            invoked_ns=self.world.loop.now_ns,
            acked_before=history.acked_end(self.group),
        )
        history.sends.append(send)
        self._unanswered.append(send)
        return send

    async def _send_until_answered(self, send: RecordedBatch) -> None:
        data = build_batch(
            send.values,
            timestamp=1,
            producer_id=send.producer_id,
            producer_epoch=self.epoch,
            base_sequence=send.base_sequence,
        )
        deadline_ns = self.world.loop.now_ns + self.world.delivery_timeout_ms * 1_000_000
        while not await self._attempt(send, data):
            if self.world.loop.now_ns >= deadline_ns:
                send.outcome = "info" if send.may_be_done else "fail"
                self._has_timed_out = True
                return
            await self.pause(20)

    async def _attempt(self, send: RecordedBatch, data: bytes) -> bool:
        """Send once; tell whether there is a final answer."""
        asked = self.target()
        in_order = self._unanswered[0] is send

        async def append(node: SimulatedNode) -> AppendResult:
            return await node.serve(self.group).append(bytearray(data))

        try:
            async with timeout(self.world.knobs.attempt_timeout_ms / 1000):
                appended = await self.world.rpc.call(asked, append)
        except OutOfSequenceError as error:
            require(not in_order, "I11", f"a producer in order was refused: {error}", group=self.group)
        except (TimeoutError, QuiverError) as error:
            self._take_error(send, asked, error)
        else:
            self._take_answer(send, appended)
            return True
        return False

    def _take_error(self, send: RecordedBatch, asked: NodeId, error: Exception) -> None:
        if isinstance(error, UnavailableError):
            self.learn(asked)
            return
        self._guess = None
        require(
            isinstance(error, TimeoutError | StorageError) or getattr(error, "outcome", "") == "unknown",
            "I11",
            f"a producer was refused: {error!r}",
            group=self.group,
        )
        send.may_be_done = True

    def _take_answer(self, send: RecordedBatch, appended: AppendResult) -> None:
        check_ack(send, appended.base_offset, self.world.observer.committed[self.group])
        send.outcome = "ok"
        send.base_offset = appended.base_offset
        send.completed_ns = self.world.loop.now_ns
        self._unanswered.remove(send)
        self.world.history.note_end(self.group, Offset(appended.base_offset + len(send.values)))

    async def _begin_epoch(self) -> bool:
        """Begin a new epoch and resolve the batches that timed out; tell whether there was an answer."""
        asked, epoch = self.target(), self.epoch + 1

        async def begin_epoch(node: SimulatedNode) -> int:
            return await node.serve(self.group).begin_epoch(self.producer_id, epoch)

        try:
            async with timeout(self.world.knobs.attempt_timeout_ms / 1000):
                next_sequence = await self.world.rpc.call(asked, begin_epoch)
        except UnavailableError:
            self.learn(asked)
            return False
        except (TimeoutError, StorageError, OutcomeUnknownError):
            self._guess = None
            return False
        self.epoch, self._sequence, self._has_timed_out = epoch, next_sequence, False
        await self._settle(next_sequence)
        return True

    async def _settle(self, next_sequence: int) -> None:
        """Find the batches that timed out and are yet done; the rest can never be done."""
        unanswered, self._unanswered = self._unanswered, []
        for send in unanswered:
            if send.base_sequence >= next_sequence:
                send.outcome = "fail"
                continue
            require(send.outcome != "fail", "I12", "a send that was not done is there", group=self.group)
            self._unanswered = [send]
            await self._send_until_answered(send)
        self._unanswered.clear()
        if self._has_timed_out:
            self._has_timed_out = False  # the epoch is as good as new: nothing was sent in it but what was there


class GroupReader(GroupClient):
    """One client that asks for the end, and reads what is there."""

    async def run(self) -> None:
        """Read until the world no longer wants it."""
        while self.world.wants_load:
            await self.pause(self.world.knobs.send_gap_ms)
            asked = self.target()
            try:
                async with timeout(self.world.knobs.attempt_timeout_ms / 1000):
                    await (self._read_end(asked) if self.rng.random() < 0.7 else self._read_records(asked))
            except UnavailableError:
                self.learn(asked)
            except (TimeoutError, QuiverError):
                self._guess = None

    async def _read_end(self, asked: NodeId) -> None:
        history = self.world.history
        read = EndRead(self.group, self.world.loop.now_ns, history.acked_end(self.group))

        async def read_end(node: SimulatedNode) -> Offset:
            return await node.serve(self.group).find_offset("latest")

        end_offset = await self.world.rpc.call(asked, read_end)
        check_end_read(read, end_offset, self.world.observer.committed[self.group], node=asked)
        history.note_end(self.group, end_offset)
        history.reads_done += 1

    async def _read_records(self, asked: NodeId) -> None:
        """Read what any replica shows, wherever it begins: it must be what is committed."""
        choice = self.rng.random()

        async def read(node: SimulatedNode) -> list[Batch]:
            replica = node.serve(self.group)
            first = replica.member.log.first_offset
            offset = Offset(first + int(choice * max(replica.high_watermark - first, 0)))
            return await replica.read(offset, bytes_max=4096)

        for batch in await self.world.rpc.call(asked, read):
            self.world.observer.committed[self.group].check_read(asked, batch)
        self.world.history.reads_done += 1
