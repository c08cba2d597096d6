"""Forged Raft messages: whoever sends them, they brick no group, and a group that one bricked is cured by a restart."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from wire_attacker import Attacker

from quiver.errors import DecodeError
from quiver.metadata import METADATA_GROUP
from quiver.model import GroupId, Index, Offset, Term
from quiver.raft import Heartbeat, VoteRequest
from quiver.record import Batch, build_control_batch
from quiver.replication.codec import AppendHead, GroupMessage, PlainMessage, decode_envelope, encode_envelope
from quiver.storage import HardStateFile, SystemDisk
from quiver.storage.data_directory import metadata_log, replicas
from quiver.testing import LocalCluster
from quiver.wire.envelope import decode_body, decode_response
from quiver.wire.messages import GetMetadata, MetadataFound

LAST_TERM = Term((1 << 64) - 1)
MANY_TERMS = Term(1 << 40)
FORGERIES: list[PlainMessage] = [
    Heartbeat(MANY_TERMS, Index(0), 1),
    VoteRequest(MANY_TERMS, Index(1 << 40), MANY_TERMS, transfer=True),
    Heartbeat(LAST_TERM, Index(0), 1),
    VoteRequest(LAST_TERM, Index(1 << 40), LAST_TERM, transfer=True),
]


def metadata(address: str) -> MetadataFound:
    with Attacker(address) as attacker:
        attacker.say_hello()
        attacker.request(1, GetMetadata(is_stale_ok=True))
        frame = attacker.next_frame()
        assert frame is not None
        return decode_body(decode_response(frame).body, MetadataFound)


@pytest.mark.parametrize("message", FORGERIES, ids=lambda message: f"{type(message).__name__}-{message.term:#x}")
def test_message_of_a_node_that_is_no_member_brings_no_term(cluster: LocalCluster, message: PlainMessage) -> None:
    topic = f"logs-{type(message).__name__}-{message.term:x}"
    with cluster.connect() as client:
        client.create_topic(topic, partitions=1)
        with client.producer(topic) as producer:
            producer.send(b"before").result()
            (before,) = (found for found in metadata(cluster.addresses[0]).topics if found.topic == topic)
            for address in cluster.addresses:
                with Attacker(address) as attacker:
                    attacker.pretend(4242, cluster_id=client.cluster_id)
                    for group in (METADATA_GROUP, before.partitions[0].group):
                        attacker.forge(group, message)
            producer.send(b"after").result()
        client.create_topic(f"{topic}-after")
    (after,) = (found for found in metadata(cluster.addresses[0]).topics if found.topic == topic)
    assert after.partitions[0].epoch < MANY_TERMS


@pytest.mark.parametrize("message", FORGERIES[2:], ids=lambda message: type(message).__name__)
def test_last_term_is_not_even_decoded(message: PlainMessage) -> None:
    envelope = b"".join(encode_envelope(1, [GroupMessage(GroupId(1), plain=message)], ()))
    with pytest.raises(DecodeError, match="Expected `int` <="):
        decode_envelope(memoryview(envelope))


@pytest.mark.parametrize("terms", [(3, 2), (2, 5)], ids=["back", "beyond-the-leader-s"])
def test_entries_that_no_leader_sends_are_refused(terms: tuple[int, int]) -> None:
    batches = [
        Batch.stamped(
            build_control_batch(b"\x01", timestamp=0),
            term=Term(term),
            index=Index(1 + at),
            base_offset=Offset(0),
            append_timestamp=0,
        )
        for at, term in enumerate(terms)
    ]
    payload = b"".join(bytes(batch.data) for batch in batches)
    head = AppendHead(Term(4), Index(0), Term(0), Index(0), 1)
    envelope = b"".join(encode_envelope(1, [GroupMessage(GroupId(1), len(payload), append=head)], [payload]))
    (received,) = decode_envelope(memoryview(envelope))[1]
    with pytest.raises(DecodeError, match="term"):
        received.as_message()


def test_node_starts_on_a_term_that_was_forged_before_there_were_bounds(tmp_path: Path) -> None:
    with LocalCluster(nodes=1, directory=str(tmp_path)) as cluster:
        with cluster.connect() as client:
            client.create_topic("logs", partitions=1)
            with client.producer("logs") as producer:
                producer.send(b"before").result()
        cluster.stop(1)
        data = f"{tmp_path}/node-1"
        groups = [metadata_log(data), *(str(path.parent) for path in Path(replicas(data)).rglob("hardstate"))]
        assert len(groups) > 1
        for directory in groups:
            poison(directory)
        cluster.start(1)
        with cluster.connect() as client, client.producer("logs") as producer:
            assert producer.send(b"after").result().offset == 1


def poison(directory: str) -> None:
    """Save the last term of all, as a forged heartbeat once did."""
    file = HardStateFile(SystemDisk(), directory)
    state = file.load()
    assert state is not None
    file.save(msgspec.structs.replace(state, term=LAST_TERM, vote=None))
