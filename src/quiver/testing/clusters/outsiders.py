"""Clients without a session that use the cursors of a group with members, as HTTP clients do.

While no member has a partition they are served as any consumer, and the history judges what they get. M6: none is
served in a partition that a member has begun before, and still has afterwards.
"""

from __future__ import annotations

from contextlib import suppress

from quiver.client.group_admin import find_group
from quiver.errors import FencedError, QuiverError
from quiver.model import ConsumerId, PartitionId
from quiver.testing.clusters.consumers import ConsumeWorkload
from quiver.testing.clusters.members import MemberWorkload
from quiver.testing.clusters.processes import LEVEL
from quiver.testing.simulator.report import violated


class OutsiderWorkload(ConsumeWorkload):
    """Takes whatever is next at the cursors of the group, of which it is no member."""

    group_id: ConsumerId | None = None

    async def begin(self) -> None:
        """Do nothing: members make the group."""

    async def end(self) -> None:
        """Do nothing: members consume what is left."""

    async def step(self) -> None:
        """Take some records of a partition, if there is the group."""
        if not self._find_group():
            self.progress += 1
            return
        await super().step()

    def _find_group(self) -> bool:
        """Look for the group once; whoever is asked knows it from then on."""
        view = self.world.view()
        if self.group_id is None and view is not None and view.feature_level >= LEVEL:
            row = view.consumer(self._group)
            if row is not None and view.topic(self.topic.name) is not None and row.registrations:
                self.group_id = row.consumer_id
                self.cluster.router.cache.record_index(view.index)
        return self.group_id is not None

    @property
    def _group(self) -> str:
        assert self.world.knobs.members is not None, "this world has a group"
        return self.world.knobs.members.group

    async def _take(self, partition_id: PartitionId) -> int:
        """Take some records, unless members have the partition; return how many came."""
        assert self.group_id is not None
        epoch = self._begun_epoch(partition_id)
        count = 1 + self.rng.randrange(3)
        argument = {"consumer": self._group, "max": count, "offset": None}
        call = self.invoke("consume", self.key(partition_id), argument)
        take = self._take_some if self.rng.random() < 0.5 else self._take_each
        try:
            records = await take(self.group_id, partition_id, count)
        except QuiverError as error:
            self.fail(call, error)
            self.progress += isinstance(error, FencedError)
            return 0
        self.succeed(call, records)
        self.world.counts["outsider served"] += 1
        with suppress(QuiverError):  # then nobody knows
            await self._require_free(partition_id, epoch)
        return len(records)

    def _begun_epoch(self, partition_id: PartitionId) -> int:
        """Return the highest epoch that a member has begun in a partition; 0: none."""
        place = (self.topic.name, int(partition_id))
        members = [client for client in self.world.clients if isinstance(client, MemberWorkload)]
        return max((member.begun_epoch(place) for member in members), default=0)

    async def _require_free(self, partition_id: PartitionId, epoch: int) -> None:
        """M6: a member that had begun a partition before this client was served does not have it any more."""
        found = await find_group(self.cluster.router, self._group)
        for member in found.members:
            for one in (*member.owned, *member.revoking):
                if epoch and (one.topic, one.partition_id, one.epoch) == (self.topic.name, partition_id, epoch):
                    facts = {"member": member.member_id, "partition": int(partition_id), "epoch": epoch}
                    violated("M6", "a client without a session was served beside a member", **facts)
