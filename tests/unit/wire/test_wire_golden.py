"""Golden frames: the protocol does not drift, and neither does its description."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.model import NodeId
from quiver.record.checksum import crc32c
from quiver.wire.frames import Kind, encode_frame
from quiver.wire.handshake import RefusalCode, encode_hello, encode_refusal, make_hello, refuse

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol" / "wire.md"

HELLO = bytes.fromhex(
    "68000000f4bf50f70100600087a56d61676963a6717569766572ab76657273696f6e5f6d696e01ab"
    "76657273696f6e5f6d617801aa636c75737465725f6964a764656d6f2d3031a46e6f646501ab696e"
    "6361726e6174696f6ecf0000018f34069e00a8666561747572657390"
)
REFUSAL = bytes.fromhex(
    "4b0000005131a9b10200430082a4636f6465ad6f746865725f636c7573746572a873656e74656e63"
    "65d92474686520636c7573746572206964206973206e6f74207468697320636c75737465722773"
)
MESSAGE = bytes.fromhex("1a000000a7381e480301000061206d65737361676520696e207061727473")


def dump(data: bytes) -> str:
    """Return `data` as sixteen bytes a line: position, hexadecimal, text."""
    lines = []
    for at in range(0, len(data), 16):
        part = data[at : at + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:04x}  {part[:8].hex(' '):23}  {part[8:].hex(' '):23}  |{text}|")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("made", "golden"),
    [
        (encode_hello(make_hello(cluster_id="demo-01", node=NodeId(1), incarnation=1714564800000)), HELLO),
        (encode_refusal(refuse(RefusalCode.OTHER_CLUSTER, "the cluster id is not this cluster's")), REFUSAL),
        (b"".join(encode_frame(Kind.MESSAGE, b"", [b"a message ", b"in parts"], check_payload=True)), MESSAGE),
    ],
    ids=["hello", "refusal", "message"],
)
def test_program_still_writes_the_golden_bytes(made: bytes, golden: bytes) -> None:
    assert made.hex() == golden.hex()


@pytest.mark.parametrize("golden", [HELLO, REFUSAL, MESSAGE], ids=["hello", "refusal", "message"])
def test_golden_header_states_what_follows(golden: bytes) -> None:
    assert int.from_bytes(golden[0:4], "little") == len(golden) - 4
    assert int.from_bytes(golden[4:8], "little") == crc32c(golden[8:])


@pytest.mark.parametrize("golden", [HELLO, REFUSAL, MESSAGE], ids=["hello", "refusal", "message"])
def test_document_shows_the_frames_as_they_are(golden: bytes) -> None:
    assert f"```\n{dump(golden)}\n```" in DOCUMENT.read_text(encoding="utf-8")


def test_document_names_every_refusal_code() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [code for code in RefusalCode if f"| `{code}` |" not in text] == []


def test_document_names_every_kind() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [kind for kind in Kind if f"| {kind.value} | {kind.name.lower()} |" not in text] == []
