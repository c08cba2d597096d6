"""Golden frames: the protocol does not drift, and neither does its description."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.errors import NotLeaderError
from quiver.model import NodeId, Offset, PartitionId, TopicId
from quiver.record.checksum import crc32c
from quiver.wire.envelope import describe_error, encode_failure, encode_request, encode_response
from quiver.wire.frames import FrameKind, FrameReader, encode_frame
from quiver.wire.handshake import (
    HANDSHAKE_BYTES_MAX,
    Hello,
    RefusalCode,
    RequesterHello,
    check_claims,
    encode_hello,
    encode_refusal,
    make_hello,
    make_requester_hello,
    read_hello,
    refuse,
)
from quiver.wire.messages import Produce, Produced

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol" / "wire.md"

HELLO = bytes.fromhex(
    "a1000000ff75f772010099008ba7707572706f7365a86d65737361676573a56d61676963a6717569"
    "766572ab76657273696f6e5f6d696e01ab76657273696f6e5f6d617801a96c6576656c5f6d696e01"
    "a96c6576656c5f6d617802aa636c75737465725f6964a764656d6f2d3031a46e6f646501ab696e63"
    "61726e6174696f6ecf0000018f34069e00a86964656e74697479a83566306339613165a866656174"
    "7572657390"
)
HELLO_LEVEL_1 = bytes.fromhex(
    "8b0000003b3d16920100830089a7707572706f7365a86d65737361676573a56d61676963a6717569"
    "766572ab76657273696f6e5f6d696e01ab76657273696f6e5f6d617801aa636c75737465725f6964"
    "a764656d6f2d3031a46e6f646501ab696e6361726e6174696f6ecf0000018f34069e00a86964656e"
    "74697479a83566306339613165a8666561747572657390"
)
CLIENT = bytes.fromhex(
    "88000000699bc80a010080008ba7707572706f7365a87265717565737473a56d61676963a6717569"
    "766572ab76657273696f6e5f6d696e01ab76657273696f6e5f6d617801a96c6576656c5f6d696e01"
    "a96c6576656c5f6d617802aa636c75737465725f6964a0a46e616d65a57368656c6ca46e6f6465c0"
    "a86964656e74697479a0a8666561747572657390"
)
CLIENT_LEVEL_1 = bytes.fromhex(
    "72000000fad06bdd01006a0089a7707572706f7365a87265717565737473a56d61676963a6717569"
    "766572ab76657273696f6e5f6d696e01ab76657273696f6e5f6d617801aa636c75737465725f6964"
    "a0a46e616d65a57368656c6ca46e6f6465c0a86964656e74697479a0a8666561747572657390"
)
REFUSAL = bytes.fromhex(
    "4b0000005131a9b10200430082a4636f6465ad6f746865725f636c7573746572a873656e74656e63"
    "65d92474686520636c7573746572206964206973206e6f74207468697320636c75737465722773"
)
MESSAGE = bytes.fromhex("1a000000a7381e480301000061206d65737361676520696e207061727473")
REQUEST = bytes.fromhex(
    "3c000000a101876404002b009301cd138883a474797065a770726f64756365a8746f7069635f6964"
    "07ac706172746974696f6e5f6964026f6e65206261746368"
)
RESPONSE = bytes.fromhex("1a00000005ccde0b05001200920181ab626173655f6f6666736574cd1000")
FAILURE = bytes.fromhex(
    "490000009504db1a050041009302c084a46b696e64aa6e6f745f6c6561646572a4636f6465aa6e6f"
    "745f6c6561646572a76d657373616765ac6e6f64652033206c65616473a66c656164657203"
)

PRODUCE = Produce(topic_id=TopicId(7), partition_id=PartitionId(2))
GOLDEN = {
    "hello": HELLO,
    "client's hello": CLIENT,
    "refusal": REFUSAL,
    "message": MESSAGE,
    "request": REQUEST,
    "response": RESPONSE,
    "failure": FAILURE,
}


def dump(data: bytes) -> str:
    """Return `data` as sixteen bytes a line: position, hexadecimal, text."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:04x}  {part[:8].hex(' '):23}  {part[8:].hex(' '):23}  |{text}|")
    return "\n".join(lines)


def make_frames() -> dict[str, bytes]:
    hello = make_hello(cluster_id="demo-01", node=NodeId(1), incarnation=1714564800000, identity="5f0c9a1e")
    failure = describe_error(NotLeaderError("node 3 leads", leader=NodeId(3)))
    return {
        "hello": encode_hello(hello),
        "client's hello": encode_hello(make_requester_hello(name="shell")),
        "refusal": encode_refusal(refuse(RefusalCode.OTHER_CLUSTER, "the cluster id is not this cluster's")),
        "message": b"".join(encode_frame(FrameKind.MESSAGE, b"", [b"a message ", b"in parts"], check_payload=True)),
        "request": b"".join(encode_request(1, 5000, PRODUCE, [b"one batch"])),
        "response": b"".join(encode_response(1, PRODUCE, Produced(base_offset=Offset(4096)))),
        "failure": b"".join(encode_failure(2, failure)),
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_program_still_writes_the_golden_bytes(name: str) -> None:
    assert make_frames()[name].hex() == GOLDEN[name].hex()


def test_hello_of_a_program_before_feature_levels_is_of_level_1() -> None:
    own = make_hello(cluster_id="demo-01", node=NodeId(2), incarnation=1, identity="other")
    for golden in (HELLO_LEVEL_1, CLIENT_LEVEL_1):
        reader = FrameReader(HANDSHAKE_BYTES_MAX)
        reader.writable()[: len(golden)] = golden
        reader.received(len(golden))
        frame = reader.next_frame()
        assert frame is not None
        hello = check_claims(read_hello(frame, own), own, lambda _: None)
        assert isinstance(hello, Hello | RequesterHello)
        assert (hello.level_min, hello.level_max) == (1, 1)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_header_states_what_follows(name: str) -> None:
    golden = GOLDEN[name]
    checked_end = 12 + int.from_bytes(golden[10:12], "little") if golden[9] == 0 else len(golden)
    assert int.from_bytes(golden[0:4], "little") == len(golden) - 4
    assert int.from_bytes(golden[4:8], "little") == crc32c(golden[8:checked_end])


@pytest.mark.parametrize("name", GOLDEN)
def test_document_shows_the_frames_as_they_are(name: str) -> None:
    assert f"```\n{dump(GOLDEN[name])}\n```" in DOCUMENT.read_text(encoding="utf-8")


def test_document_names_every_refusal_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [code for code in RefusalCode if f"| `{code}` |" not in text] == []


def test_document_names_every_kind() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [kind for kind in FrameKind if f"| {kind.value} | {kind.name.lower()} |" not in text] == []
