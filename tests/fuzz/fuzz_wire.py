"""Fuzz the reading of frames, handshakes, requests and responses: ``python tests/fuzz/fuzz_wire.py -runs=200000``.

Any bytes, in any pieces, are cut into the same frames, or refused with `DecodeError` at the same place, as by a
reader that knows nothing of pieces; every frame is then judged as a connection's first, and read as a refusal, a
request, a response and a cancel; a request that can be read is written again and must be read the same. Anything else
is a finding. A checksum stops almost every mutation at the door, so most inputs get right ones.
"""

from __future__ import annotations

import struct
import sys

import atheris

with atheris.instrument_imports(include=["quiver"]):
    from quiver.errors import DecodeError, NotLeaderError, QuiverError
    from quiver.model import NodeId, Offset, PartitionId, TopicId
    from quiver.record.checksum import crc32c
    from quiver.wire.envelope import (
        decode_body,
        decode_cancel,
        decode_request,
        decode_response,
        describe_error,
        encode_cancel,
        encode_failure,
        encode_request,
        encode_response,
        restore_error,
    )
    from quiver.wire.frames import Frame, FrameKind, FrameReader
    from quiver.wire.handshake import (
        HandshakeRefusal,
        Hello,
        RefusalCode,
        RequesterHello,
        check_claims,
        check_peer_claims,
        check_server_hello,
        decode_refusal,
        encode_hello,
        encode_refusal,
        make_hello,
        make_requester_hello,
        read_hello,
        refuse,
    )
    from quiver.wire.messages import CreateTopicRequest, Fetch, Fetched, Produce, Produced

FRAME_BYTES_MAX = 20_000
OWN = make_hello(cluster_id="test", node=NodeId(1), incarnation=1)
CLIENT = make_requester_hello(name="fuzz")
PRODUCE = Produce(topic_id=TopicId(1), partition_id=PartitionId(2))
SEEDS = [
    encode_hello(make_hello(cluster_id="test", node=NodeId(2), incarnation=2)),
    encode_hello(make_hello(cluster_id="other", node=NodeId(1), incarnation=2**63 - 1)),
    encode_refusal(refuse(RefusalCode.BAD_VERSION, "why")),
    encode_hello(CLIENT),
    b"".join(encode_request(1, 1000, PRODUCE)),
    b"".join(encode_request(2, 1000, Fetch(topic_id=TopicId(1), partition_id=PartitionId(1), offset=Offset(3)))),
    b"".join(encode_request(3, 1000, CreateTopicRequest(topic="t", request_id="once"))),
    b"".join(encode_response(1, PRODUCE, Produced(base_offset=Offset(9), is_duplicate=True))),
    b"".join(encode_failure(1, describe_error(NotLeaderError("no", leader=NodeId(3), retry_after_ms=5)))),
    b"".join(encode_cancel(1)),
]


def fuzz_one(data: bytes) -> None:
    """Read one input in the way that its first byte chooses, in pieces whose sizes the second chooses."""
    if len(data) < 2:
        return
    choice, pieces, rest = data[0], 1 + data[1] * data[1], data[2:]
    match choice % 4:
        case 0:
            check(rest, pieces)
        case 1:
            check(fix_checksums(rest), pieces)
        case 2:
            check(forge(kind=choice // 4 % 8, head=rest) * 2, pieces)
        case _:
            check(mutate_seed(SEEDS[choice // 4 % len(SEEDS)], rest), pieces)


def check(stream: bytes, piece_bytes: int) -> None:
    """Compare the two readers, then judge what they found."""
    frames, is_refused = read(stream, piece_bytes)
    expected, is_refused_naively = read_naively(stream)
    assert [(int(frame.kind), bytes(frame.head), bytes(frame.payload)) for frame in frames] == expected
    assert is_refused == is_refused_naively
    for frame in frames:
        hello = read_hello(frame, OWN)
        assert isinstance(check_claims(hello, OWN, identity_of), Hello | RequesterHello | HandshakeRefusal)
        assert isinstance(check_peer_claims(hello, OWN, NodeId(2), identity_of), Hello | HandshakeRefusal)
        assert isinstance(check_server_hello(frame, CLIENT), Hello | HandshakeRefusal)
        for read_frame in (decode_refusal, decode_cancel, check_request, check_response):
            try:
                read_frame(frame)
            except DecodeError:
                continue


def identity_of(node: NodeId) -> str | None:
    """Know some nodes."""
    return "disk" if node % 2 else None


def check_request(frame: Frame) -> None:
    """Read a request; one that is understood means the same when it is written and read again."""
    asked = decode_request(frame)
    if isinstance(asked.request, QuiverError):
        return
    encoded = encode_request(asked.correlation_id, asked.timeout_ms, asked.request, [asked.payload])
    (again,), is_refused = read(b"".join(encoded), FRAME_BYTES_MAX)
    assert not is_refused
    assert decode_request(again) == asked


def check_response(frame: Frame) -> None:
    """Read a response as two that it could be, and its failure as an error."""
    answered = decode_response(frame)
    if answered.failure is not None:
        assert isinstance(restore_error(answered.failure), QuiverError)
    for kind in (Produced, Fetched):
        try:
            decode_body(answered.body, kind)
        except DecodeError:
            continue


def read(stream: bytes, piece_bytes: int) -> tuple[list[Frame], bool]:
    """Read with the real reader, at most so many bytes at a time."""
    reader, frames, rest = FrameReader(FRAME_BYTES_MAX), [], memoryview(stream)
    try:
        while rest:
            room = reader.writable()
            count = min(len(room), len(rest), piece_bytes)
            room[:count], rest = rest[:count], rest[count:]
            reader.received(count)
            while (frame := reader.next_frame()) is not None:
                frames.append(frame)
    except DecodeError:
        return frames, True
    return frames, False


def read_naively(stream: bytes) -> tuple[list[tuple[int, bytes, bytes]], bool]:
    """Read as `docs/protocol/wire.md` says, all at once."""
    frames: list[tuple[int, bytes, bytes]] = []
    while len(stream) >= 4:
        end = 4 + int.from_bytes(stream[:4], "little")
        if not 12 <= end <= FRAME_BYTES_MAX:
            return frames, True
        if len(stream) < end:
            break
        checksum, kind, flags, head_bytes = struct.unpack("<IBBH", stream[4:12])
        checked = stream[8:end] if flags & 1 else stream[8 : 12 + head_bytes]
        if 12 + head_bytes > end or crc32c(checked) != checksum or kind not in set(FrameKind) or flags > 1:
            return frames, True
        frames.append((kind, stream[12 : 12 + head_bytes], stream[12 + head_bytes : end]))
        stream = stream[end:]
    return frames, False


def fix_checksums(stream: bytes) -> bytes:
    """Make every frame's checksum right, and kinds and lengths likely."""
    fixed, at = bytearray(stream), 0
    while at + 12 <= len(fixed):
        length = 8 + int.from_bytes(fixed[at : at + 2], "little") % (len(fixed) - at - 11)
        struct.pack_into("<I", fixed, at, length)
        fixed[at + 8] = fixed[at + 8] % 8
        fixed[at + 9] = fixed[at + 9] % 3
        head_bytes = int.from_bytes(fixed[at + 10 : at + 12], "little") % (length - 5)
        struct.pack_into("<H", fixed, at + 10, head_bytes)
        end = at + 4 + length if fixed[at + 9] & 1 else at + 12 + head_bytes
        struct.pack_into("<I", fixed, at + 4, crc32c(bytes(fixed[at + 8 : end])))
        at += 4 + length
    return bytes(fixed)


def forge(*, kind: int, head: bytes) -> bytes:
    """Return a frame with this head and a right checksum."""
    checked = struct.pack("<BBH", kind, 0, len(head) & 0xFFFF) + head[:0xFFFF]
    return struct.pack("<II", 4 + len(checked), crc32c(checked)) + checked


def mutate_seed(seed: bytes, choices: bytes) -> bytes:
    """Change single bytes of a valid head: pairs of a place and a value."""
    head = bytearray(seed[12:])
    for at, value in zip(choices[::2], choices[1::2], strict=False):
        head[at % len(head)] = value
    return forge(kind=seed[8], head=bytes(head))


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz_one)
    atheris.Fuzz()
