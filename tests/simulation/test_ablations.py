"""Each safeguard matters to the simulator, too: switch it off, and within 300 seeds a checker notices.

Three families: the core's own safeguards by name; safeguards of the driver, the log and the partition, taken
out here by replacing one function; and bugs that the simulator has found, put back in. A profile per family
leans the seeds towards the faults that matter; with everything in place the same profiles find nothing.
`docs/reliability.md` records how many seeds it took.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from quiver.errors import StorageError
from quiver.model import ConsumerId, Index, NodeId, Offset, ProducerId
from quiver.partition.cursors import CursorMoves
from quiver.partition.entries import TrimEntry, build_entry
from quiver.partition.maintenance import Maintenance
from quiver.partition.producers import Deduplicator
from quiver.partition.proposal_gate import ProposalGate
from quiver.partition.replica import Replica
from quiver.partition.state import PartitionState
from quiver.raft import Configuration, Entry, SendEntries
from quiver.record import Batch
from quiver.replication.applier import Applier
from quiver.replication.log_compactor import LogCompactor, MakeState
from quiver.replication.member import Member
from quiver.replication.persistence import Persistence
from quiver.replication.sender import MemberSender
from quiver.storage import recovery
from quiver.storage.disk import File
from quiver.storage.flush import Flush, SegmentWrite, write_all
from quiver.storage.hardstate import HardStateFile, StoredHardState
from quiver.storage.writer import LogWriter
from quiver.testing.disk import SimulatedFile
from quiver.testing.groups.model import GroupModel
from quiver.testing.groups.node import SimulatedNode
from quiver.testing.groups.swarm import MIXED, Profile
from quiver.testing.groups.world import GroupWorld
from quiver.testing.raft_ablations import REPLACEMENTS, Safeguard
from quiver.testing.randomness import Latency
from quiver.testing.simulator.runner import run_seed
from quiver.testing.simulator.world import JITTERY, NEAR, QUICK_DISK

SEEDS_MAX = 300
"""Seeds until a checker must have noticed: about one in a hundred notices the rarest."""
FIRST_SEEDS = {
    "append_consistency_check": 21,
    "bug_failed_sync_is_trusted_after_restart": 3,
    "bug_offsets_ignore_what_waits": 2,
    "configuration_is_not_saved": 9,
    "damage_is_taken_for_a_torn_tail": 15,
    "dedup_does_not_wait_for_the_new_term": 5,
    "dedup_ignores_what_is_in_flight": 3,
    "durable_term_check": 21,
    "fence_is_not_replicated": 2,
    "hard_state_is_not_saved": 3,
    "hard_state_is_not_waited_for": 59,
    "ignore_old_term_responses": 1,
    "joint_quorum": 3,
    "match_from_request": 314,
    "one_pending_change": 5,
    "read_after_own_term_commit": 3,
    "read_index_round": 2018,
    "recover_until_no_vote": 5,
    "snapshot_conflict_drops_log": 4,
    "vote_persistence": 3,
}
"""Seeds that notice, to begin with: from 0 on, all of these would take minutes. When another change of the program
moves what a seed does, a later one notices instead."""
PROFILE_SEEDS = int(os.environ.get("QUIVER_PROFILE_SEEDS", "2"))
"""Seeds per profile that must find nothing; `make sim` runs more."""
_OWN_DEFECTS = ("AttributeError", "NameError", "TypeError")
"""Findings that mean that what replaces a safeguard does not fit the program any more."""

ELECTIONS = Profile(
    favoured=("kill", "isolate", "split", "pause", "cut_one_way", "transfer"),
    p_other=0.15,
    voters=(3, 3, 5),
    p_stable=0.0,
)
POWER = Profile(
    favoured=("power_loss", "power_loss_at_operation", "power_loss_all", "kill"),
    p_other=0.15,
    voters=(3, 3, 1),
    p_stable=0.0,
)
DELAYS = Profile(
    favoured=("clog", "swizzle", "slow_network", "doubling_network", "isolate", "transfer", "slow_disk"),
    p_other=0.1,
    voters=(3, 3, 5),
    p_stable=0.0,
    keep_order=0.0,
)
MEMBERS = Profile(
    favoured=("add_member", "remove_member", "swap_member", "demote_member", "isolate", "split", "kill"),
    p_other=0.1,
    voters=(3,),
    spares=(1, 2),
    p_stable=0.0,
)
SWAPS = Profile(
    favoured=("swap_member", "isolate", "pause", "slow_disk"),
    p_other=0.0,
    voters=(3,),
    spares=(2,),
    p_stable=0.0,
    gap_ms=(150, 400),
)
DIVERGENCE = Profile(
    favoured=("isolate", "split", "kill", "burst", "power_loss"),
    p_other=0.05,
    voters=(3, 5),
    p_stable=0.0,
    producers=(4,),
    in_flight=(5,),
    append_bytes=(1024,),
    p_trims=0.0,
)
SLOW_WRITES = Profile(
    favoured=("isolate", "split", "burst"),
    p_other=0.0,
    voters=(3,),
    spares=(0,),
    groups=(1,),
    p_stable=0.0,
    producers=(4,),
    in_flight=(5,),
    gap_ms=(150, 300),
    send_gaps_ms=(50,),
    snapshot_entries=(1_000_000,),
    networks=(NEAR,),
    disks=(Latency(0.2, 5.0, 0.3, 600.0),),  # a flush outlasts an election, so that what it writes is overwritten
    election_timeouts_ms=(150,),
    p_trims=0.0,
)
CONFLICTING_SNAPSHOTS = Profile(
    favoured=("isolate", "split", "burst"),
    p_other=0.0,
    voters=(3,),
    spares=(0,),
    groups=(1,),
    p_stable=0.0,
    producers=(8,),
    in_flight=(5,),
    gap_ms=(300, 600),
    send_gaps_ms=(300,),
    snapshot_entries=(3,),  # so often that a snapshot ends below the tail of a leader that was cut off
    snapshot_poll_ms=20,
    segment_bytes=(1024,),
    networks=(NEAR,),
    disks=(QUICK_DISK,),
    election_timeouts_ms=(150,),
    p_trims=0.0,
)
LATE_SNAPSHOTS = Profile(
    favoured=("isolate", "kill", "snapshot", "slow_network"),
    p_other=0.0,
    voters=(3,),
    p_stable=0.0,
    snapshot_entries=(5, 20),
    segment_bytes=(1024,),
    producers=(2, 4),
    keep_order=0.0,
    p_double=(0.3,),
    networks=(JITTERY,),
    p_trims=0.0,
)
SNAPSHOTS = Profile(
    favoured=("snapshot", "isolate", "split", "burst", "pause", "kill", "doubling_network"),
    p_other=0.1,
    voters=(3,),
    p_stable=0.0,
    snapshot_entries=(5, 20),
    segment_bytes=(1024,),
    producers=(4,),
    in_flight=(5,),
    keep_order=0.0,
    p_trims=0.0,
)
DAMAGE = Profile(favoured=("bit_flip", "kill", "power_loss"), p_other=0.1, voters=(3,), p_stable=0.0, factor=12)
DAMAGE_AND_OUTAGES = Profile(
    favoured=("bit_flip", "kill_all"),
    p_other=0.0,
    voters=(3,),
    spares=(0,),
    groups=(1,),
    p_stable=0.0,
    gap_ms=(60, 120),  # down again before what was lost is back
    producers=(1,),
    send_gaps_ms=(100,),
    p_trims=0.0,
)
DISKS = Profile(
    favoured=("sync_error", "power_loss", "power_loss_all", "write_error", "full_disk"),
    p_other=0.1,
    voters=(1, 3, 3),
    p_stable=0.0,
)
READS = Profile(
    favoured=("pause", "isolate", "split", "transfer", "kill"), p_other=0.1, voters=(3, 5), p_stable=0.0, readers_more=4
)
RETRIES = Profile(
    favoured=("kill", "transfer", "pause", "lossy_network", "doubling_network"),
    p_other=0.1,
    voters=(3,),
    p_stable=0.0,
    producers=(4,),
    in_flight=(5,),
)
CONSUMERS = Profile(
    favoured=("kill", "power_loss", "transfer", "pause", "isolate"),
    p_other=0.1,
    voters=(3,),
    p_stable=0.0,
    p_trims=1.0,
    consumers=(4, 8),
)
TRIMS = Profile(
    favoured=("kill", "isolate", "snapshot", "burst", "power_loss"),
    p_other=0.1,
    voters=(3,),
    p_stable=0.0,
    p_trims=1.0,
    segment_bytes=(1024,),
    producers=(4,),
    in_flight=(5,),
)
EPOCHS = Profile(
    favoured=("kill", "isolate", "pause", "transfer", "lossy_network", "slow_network"),
    p_other=0.1,
    voters=(3,),
    p_stable=0.0,
    producers=(4,),
    in_flight=(5,),
)
CALM = Profile(favoured=("pause",), p_other=0.05, voters=(3, 5), p_stable=1.0, chaos_ms=(2_000, 4_000))
WIPED = Profile(favoured=("kill",), forbidden=("wiped_disk",), p_other=0.0, voters=(3,), p_stable=0.0)
LOST = Profile(favoured=("lost_disk", "kill"), p_other=0.1, voters=(3,), p_stable=0.0, factor=12)

Break = Callable[[], Any]


@dataclass(frozen=True)
class Ablation:
    """One thing that is switched off, and where to look for the consequences."""

    name: str
    profile: Profile
    off: Safeguard | None = None
    replaced: tuple[tuple[object, str, Any], ...] = ()

    @property
    def first_seed(self) -> int:
        return FIRST_SEEDS.get(self.name, 0)


def core(off: Safeguard, profile: Profile) -> Ablation:
    return Ablation(off.value, profile, off=off, replaced=REPLACEMENTS[off])


def without(name: str, profile: Profile, *replaced: tuple[object, str, Any]) -> Ablation:
    return Ablation(name, profile, replaced=replaced)


# -- what is put in the place of a safeguard -----------------------------------------------------------


def save_only_once(file: HardStateFile, state: StoredHardState) -> None:
    if not file._sequence:
        _save(file, state)


def go_on_before_saved(member: Member, work: Callable[[], None], then: Callable[[], None]) -> None:
    member._executor.submit(work)
    then()


def write_without_sync(flush: Flush, file: File, write: SegmentWrite) -> None:
    buffers = write.buffers if write.footer is None else [*write.buffers, write.footer]
    write_all(file, buffers, write.position)
    if write.is_new:
        flush._disk.sync_directory(flush._directory)


def write_without_names(flush: Flush, file: File, write: SegmentWrite) -> None:
    buffers = write.buffers if write.footer is None else [*write.buffers, write.footer]
    write_all(file, buffers, write.position)
    file.sync()


def sync_ignoring_errors(file: SimulatedFile) -> None:
    with suppress(OSError):
        _sync(file)


def never_damage(*_: object) -> bool:
    return False


def say_it_has(*_: object) -> bool:
    return True


def open_without_writing_again(writer: LogWriter) -> None:
    active = writer.segments[-1]
    if not active.is_sealed:
        file = writer._disk.open(f"{writer._directory}/{active.name}")
        file.sync()
        file.close()
        writer._planner.reset_active(active.size_bytes)


async def be_ready_at_once(gate: ProposalGate) -> None:
    if not gate._member.is_leader:
        await gate._member.read_barrier()
    if gate.term != gate._member.term:
        gate.term = gate._member.term
        for forget in gate.on_new_term:
            forget()


def forget_producers(state: PartitionState, saved: bytes) -> None:
    _restore_partition(state, saved)
    state.producers.replace(())


def nothing_in_flight(_: Deduplicator, __: ProducerId) -> list[Any]:
    return []


async def read_local_end(replica: Replica, _: object) -> Offset:
    return replica.high_watermark


async def read_everything(replica: Replica, first_offset: Offset, *, bytes_max: int) -> list[Batch]:
    log = replica.member.log
    return await log.read_records(first_offset, end_offset=log.end_offset, bytes_max=bytes_max)


def restore_index_alone(applier: Applier, state: bytes, index: Index) -> None:
    applier.index = index
    applier._end_index = max(applier._end_index, Index(index + 1))


def forget_configurations(persistence: Persistence, entries: Sequence[Entry], **_: object) -> None:
    del persistence, entries


def forget_recovery(persistence: Persistence, commit_index: Index) -> Callable[[], None]:
    persistence.clear_recovery()
    return _plan_save(persistence, commit_index)


def come_back_under_the_old_id(world: GroupWorld, node: SimulatedNode) -> None:
    voters = tuple(NodeId(number + 1) for number in range(world.knobs.voters))
    node.wipe()
    for group in world.groups:
        node.bootstrap(group, Configuration(voters=voters))
    node.start()


def end_offset_of_log(member: Member) -> Offset:
    return member._log.end_offset


def fail_without_a_note(member: Member, error: StorageError) -> None:
    member._host.fail(error)


def send_no_probe(sender: MemberSender, permission: SendEntries, batches: list[Batch]) -> None:
    if batches or permission.first_index < permission.end_index:
        _send_append(sender, permission, batches)
    else:
        sender._carry_out(
            sender._raft.sent(permission.to, ticket=permission.ticket, end_index=permission.first_index, size_bytes=0)
        )


def lose_late(member: Member, output: Any, *rest: Any) -> None:
    lost, output.proposals_lost = output.proposals_lost, None
    _carry_out(member, output, *rest)
    output.proposals_lost = lost


def lose_when_finished(member: Member, output: Any) -> None:
    if output.proposals_lost is not None:
        member._pending.lose(output.proposals_lost)
    _finish(member, output)


def move_before_it_is_committed(moves: CursorMoves, wanted: Mapping[ConsumerId, Offset]) -> asyncio.Future[None]:
    _move(moves, wanted)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    return done


def plan_from_what_is_committed(moves: CursorMoves, consumer_id: ConsumerId) -> Offset | None:
    return moves._state.cursor(consumer_id)


@asynccontextmanager
async def quiesce_without_waiting(gate: ProposalGate) -> AsyncIterator[None]:
    await gate.wait_ready()
    yield


async def trim_to_the_end(maintenance: Maintenance, now_ms: int) -> None:
    del now_ms
    state = maintenance._state
    await maintenance._gate.wait_ready()
    maintenance._gate.propose(build_entry(TrimEntry(state.applied_index, state.end_offset)))


def blank_that_seems_whole(last_index: Index, end_offset: Offset) -> bytes:
    state = PartitionState()
    state.applied_index, state.end_offset, state.first_offset = last_index, end_offset, end_offset
    return PartitionState.snapshot(state)


async def fence_here_alone(replica: Replica, producer_id: ProducerId, epoch: int) -> int:
    await replica._gate.wait_ready()
    replica._state.producers.fence(producer_id, epoch, Index(0))
    return replica._deduplicator.expected_sequence(producer_id, epoch)


async def trim_before_it_is_saved(compactor: LogCompactor, first_index: Index, make_state: MakeState) -> None:
    del make_state
    await compactor._log.truncate_prefix(first_index)
    compactor._raft.compacted(compactor._log.first_index)


def send_the_newest_state(persistence: Persistence, needed_index: Index) -> Any:
    """Send a checkpoint instead of what stands at the log's start: state without the records."""
    checkpoint = persistence._snapshots.load_checkpoint()[0]
    return checkpoint or _load_snapshot(persistence, needed_index)


_move = CursorMoves.move
_load_snapshot = Persistence.load_snapshot
_save = HardStateFile.save
_sync = SimulatedFile.sync
_restore_partition = PartitionState.restore
_plan_save = Persistence.plan_save
_send_append = MemberSender._send_append
_carry_out = Member._carry_out
_finish = Member._finish

ABLATIONS = [
    core(Safeguard.VOTE_PERSISTENCE, POWER),
    core(Safeguard.COMMIT_OWN_TERM_ONLY, ELECTIONS),
    core(Safeguard.NOOP_ON_ELECTION, ELECTIONS),
    core(Safeguard.PRE_VOTE, CALM),
    core(Safeguard.CHECK_QUORUM, CALM),
    core(Safeguard.LEADER_STICKINESS, CALM),
    core(Safeguard.LOG_FRESHNESS_ON_VOTE, ELECTIONS),
    core(Safeguard.ACK_ONLY_DURABLE, POWER),
    core(Safeguard.LEADER_COUNTS_ONLY_DURABLE, POWER),
    core(Safeguard.TRUNCATE_ONLY_ON_CONFLICT, DELAYS),
    core(Safeguard.MATCH_FROM_REQUEST, DIVERGENCE),
    core(Safeguard.IGNORE_OLD_TERM_RESPONSES, DELAYS),
    core(Safeguard.READ_INDEX_ROUND, READS),
    core(Safeguard.READ_AFTER_OWN_TERM_COMMIT, READS),
    core(Safeguard.JOINT_QUORUM, SWAPS),
    core(Safeguard.CONFIG_ON_APPEND, MEMBERS),
    core(Safeguard.ONE_PENDING_CHANGE, MEMBERS),
    core(Safeguard.LEARNER_NOT_COUNTED, MEMBERS),
    core(Safeguard.DURABLE_TERM_CHECK, SLOW_WRITES),
    core(Safeguard.APPEND_CONSISTENCY_CHECK, ELECTIONS),
    core(Safeguard.TERM_STEP_DOWN, ELECTIONS),
    core(Safeguard.SINGLE_VOTE_PER_TERM, ELECTIONS),
    core(Safeguard.SNAPSHOT_IGNORES_OLDER, LATE_SNAPSHOTS),
    core(Safeguard.SNAPSHOT_CONFLICT_DROPS_LOG, CONFLICTING_SNAPSHOTS),
    core(Safeguard.RECOVER_UNTIL_NO_VOTE, DAMAGE),
    core(Safeguard.BLANK_MEMBER_NO_VOTE, WIPED),
    core(Safeguard.COMMIT_NEVER_BEYOND_MATCHED, ELECTIONS),
    core(Safeguard.TRANSFER_STOPS_PROPOSALS, CALM),
    core(Safeguard.STRANGERS_UNHEEDED, CALM),
    without("hard_state_is_not_saved", POWER, (HardStateFile, "save", save_only_once)),
    without("hard_state_is_not_waited_for", POWER, (Member, "_block", go_on_before_saved)),
    without("log_is_not_synced", POWER, (Flush, "_write_segment", write_without_sync)),
    without("names_are_not_synced", POWER, (Flush, "_write_segment", write_without_names)),
    without("failed_sync_is_ignored", DISKS, (SimulatedFile, "sync", sync_ignoring_errors)),
    without("damage_is_taken_for_a_torn_tail", DAMAGE, (recovery, "is_damage", never_damage)),
    without("configuration_is_not_saved", MEMBERS, (Persistence, "add_configurations", forget_configurations)),
    without("recovery_is_not_saved", DAMAGE_AND_OUTAGES, (Persistence, "plan_save", forget_recovery)),
    without("snapshot_is_restored_without_its_state", SNAPSHOTS, (Applier, "restore", restore_index_alone)),
    without("lost_disk_comes_back_under_its_id", LOST, (GroupWorld, "replace", come_back_under_the_old_id)),
    without("dedup_does_not_wait_for_the_new_term", RETRIES, (ProposalGate, "_catch_up", be_ready_at_once)),
    without("dedup_is_not_in_snapshots", SNAPSHOTS, (PartitionState, "restore", forget_producers)),
    without("dedup_ignores_what_is_in_flight", RETRIES, (Deduplicator, "_unsettled", nothing_in_flight)),
    without("reads_do_not_ask_the_quorum", READS, (Replica, "find_offset", read_local_end)),
    without("readers_see_what_is_not_committed", READS, (Replica, "read", read_everything)),
    without("cursor_moves_before_it_is_committed", CONSUMERS, (CursorMoves, "move", move_before_it_is_committed)),
    without("cursors_on_their_way_are_ignored", CONSUMERS, (CursorMoves, "planned", plan_from_what_is_committed)),
    without("summary_does_not_wait_for_what_is_in_flight", TRIMS, (ProposalGate, "quiesce", quiesce_without_waiting)),
    without("trim_without_a_summary", TRIMS, (Maintenance, "_trim", trim_to_the_end)),
    without("state_at_the_log_s_start_is_taken_for_whole", TRIMS, (PartitionState, "blank", blank_that_seems_whole)),
    without("log_is_trimmed_before_its_start_is_saved", TRIMS, (LogCompactor, "trim", trim_before_it_is_saved)),
    without("checkpoint_is_sent_as_a_snapshot", TRIMS, (Persistence, "load_snapshot", send_the_newest_state)),
    without("fence_is_not_replicated", EPOCHS, (Replica, "begin_epoch", fence_here_alone)),
    without("configuration_is_saved_after_its_entry", MEMBERS, (Persistence, "_began_with", say_it_has)),
    without(
        "bug_failed_sync_is_trusted_after_restart", DISKS, (LogWriter, "prepare_active", open_without_writing_again)
    ),
    without(
        "bug_lost_proposals_are_told_late",
        DELAYS,
        (Member, "_carry_out", lose_late),
        (Member, "_finish", lose_when_finished),
    ),
    without("bug_offsets_ignore_what_waits", MEMBERS, (Member, "_planned_end_offset", end_offset_of_log)),
    without("bug_damage_met_while_reading_stays", DAMAGE, (Member, "handle_failure", fail_without_a_note)),
    without("bug_restarted_member_is_not_probed", CALM, (MemberSender, "_send_append", send_no_probe)),
]


@contextmanager
def switched_off(ablation: Ablation) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, replacement in ablation.replaced:
            patch.setattr(owner, name, replacement)
        yield


def seeds_to_catch(ablation: Ablation, seeds_max: int = SEEDS_MAX) -> tuple[int, str] | None:
    """Return how many seeds it took until a checker noticed, and what it said."""
    with switched_off(ablation):
        for count in range(1, seeds_max + 1):
            seed = ablation.first_seed + count - 1
            report = run_seed(GroupModel(ablation.profile), seed)
            if report.finding is not None:
                return count, report.finding
    return None


@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda ablation: ablation.name)
def test_ablation_is_caught(ablation: Ablation) -> None:
    caught = seeds_to_catch(ablation)
    assert caught is not None
    assert not caught[1].startswith(_OWN_DEFECTS), caught[1]


def test_first_seeds_are_of_ablations() -> None:
    assert FIRST_SEEDS.keys() <= {ablation.name for ablation in ABLATIONS}


def test_every_safeguard_of_the_core_is_switched_off_once() -> None:
    # No node of these groups loses its replica by a change of members, and is added again; see `test_broker_moves`.
    elsewhere = Safeguard.JOINING_MEMBER_NO_VOTE
    expected = [safeguard for safeguard in Safeguard if safeguard is not elsewhere]
    assert [ablation.off for ablation in ABLATIONS if ablation.off is not None] == expected


PROFILES = {
    "elections": ELECTIONS,
    "power": POWER,
    "delays": DELAYS,
    "members": MEMBERS,
    "swaps": SWAPS,
    "divergence": DIVERGENCE,
    "slow_writes": SLOW_WRITES,
    "conflicting_snapshots": CONFLICTING_SNAPSHOTS,
    "late_snapshots": LATE_SNAPSHOTS,
    "damage_and_outages": DAMAGE_AND_OUTAGES,
    "snapshots": SNAPSHOTS,
    "damage": DAMAGE,
    "disks": DISKS,
    "reads": READS,
    "retries": RETRIES,
    "consumers": CONSUMERS,
    "trims": TRIMS,
    "epochs": EPOCHS,
    "calm": CALM,
    "wiped": WIPED,
    "lost": LOST,
    "mixed": MIXED,
}


@pytest.mark.parametrize("name", PROFILES)
def test_nothing_is_found_with_every_safeguard_on(name: str) -> None:
    for seed in range(PROFILE_SEEDS):
        finding = run_seed(GroupModel(PROFILES[name]), seed).finding
        if PROFILES[name].forbidden and finding is not None and finding.startswith("F3"):
            continue  # what it does is beyond what we promise to survive: a group may rightly stop, but never lie
        assert finding is None, f"{finding} (seed {seed}, profile {name})"
