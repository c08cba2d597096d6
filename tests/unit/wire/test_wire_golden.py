"""Golden frames: the protocol does not drift, and neither does its description."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiver.errors import NotAllowedError, NotLeaderError
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
from quiver.wire.security_messages import Authenticate, Authenticated, BeginScram, FinishScram, ScramChallenge

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
AUTHENTICATE = bytes.fromhex(
    "7c0000008b716782040074009301cd138882a474797065ac61757468656e746963617465a5746f6b"
    "656ed95471765f303132333435363738396162636465665f30303030303030303030303030303030"
    "30303030303030303030303030303030303030303030303030303030303030303030303030303030"
    "3030303030303030"
)
AUTHENTICATED = bytes.fromhex(
    "320000002ce4ac3d05002a00920182a97072696e636970616ca8757365723a776562aa657870697265735f6d73cf000001a3185c5000"
)
BEGIN_SCRAM = bytes.fromhex(
    "490000006718dcf9040041009301cd138882a474797065ab626567696e5f736372616da76d657373"
    "616765d9206e2c2c6e3d757365722c723d724f70724e476677456265525767624e456b714f"
)
CHALLENGE = bytes.fromhex(
    "6b00000060c5790705006300920181a76d657373616765d956723d724f70724e4766774562655257"
    "67624e456b714f25687659447057556132526154434166757846496c6a29684e6c46246b302c733d"
    "5732325a614a30534e5937736f457355456a623667513d3d2c693d34303936"
)
FINISH_SCRAM = bytes.fromhex(
    "94000000b576632404008c009302cd138882a474797065ac66696e6973685f736372616da76d6573"
    "73616765d96a633d626977732c723d724f70724e476677456265525767624e456b714f2568765944"
    "7057556132526154434166757846496c6a29684e6c46246b302c703d64487a625a617057496b346a"
    "55684e2b5574653979746167397a6a664d486773716d6d697a37416e6456513d"
)
PROVEN = bytes.fromhex(
    "57000000e255e12c05004f00920282a97072696e636970616ca9757365723a75736572a76d657373"
    "616765d92e763d36727269545242693233577052522f777475702b6d4d68555a556e2f6442356e4c"
    "544a52736a6c393547343d"
)
EXPIRED = bytes.fromhex(
    "74000000af91a75005006c009303c083a46b696e64ab6e6f745f616c6c6f776564a4636f6465af75"
    "6e61757468656e74696361746564a76d657373616765d9386e6f7420646f6e653a20746865206372"
    "6564656e7469616c2068617320657870697265643b2061757468656e74696361746520616761696e"
)

PRODUCE = Produce(topic_id=TopicId(7), partition_id=PartitionId(2))
LOGIN = Authenticate(token="qv_0123456789abcdef_" + "00" * 32)
NONCES = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
BEGIN = BeginScram(message="n,,n=user,r=rOprNGfwEbeRWgbNEkqO")
"""The exchange is the example of RFC 7677."""
FINISH = FinishScram(message=f"c=biws,r={NONCES},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
GOLDEN = {
    "hello": HELLO,
    "client's hello": CLIENT,
    "refusal": REFUSAL,
    "message": MESSAGE,
    "request": REQUEST,
    "response": RESPONSE,
    "failure": FAILURE,
    "authenticate": AUTHENTICATE,
    "authenticated": AUTHENTICATED,
    "begin_scram": BEGIN_SCRAM,
    "challenge": CHALLENGE,
    "finish_scram": FINISH_SCRAM,
    "proven": PROVEN,
    "expired": EXPIRED,
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
        **make_logins(),
        "hello": encode_hello(hello),
        "client's hello": encode_hello(make_requester_hello(name="shell")),
        "refusal": encode_refusal(refuse(RefusalCode.OTHER_CLUSTER, "the cluster id is not this cluster's")),
        "message": b"".join(encode_frame(FrameKind.MESSAGE, b"", [b"a message ", b"in parts"], check_payload=True)),
        "request": b"".join(encode_request(1, 5000, PRODUCE, [b"one batch"])),
        "response": b"".join(encode_response(1, PRODUCE, Produced(base_offset=Offset(4096)))),
        "failure": b"".join(encode_failure(2, failure)),
    }


def make_logins() -> dict[str, bytes]:
    expired = NotAllowedError("not done: the credential has expired; authenticate again", code="unauthenticated")
    challenge = ScramChallenge(message=f"r={NONCES},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096")
    proven = Authenticated(principal="user:user", message="v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    accepted = Authenticated(principal="user:web", expires_ms=1_800_000_000_000)
    frames = {
        "authenticate": encode_request(1, 5000, LOGIN, []),
        "authenticated": encode_response(1, LOGIN, accepted),
        "begin_scram": encode_request(1, 5000, BEGIN, []),
        "challenge": encode_response(1, BEGIN, challenge),
        "finish_scram": encode_request(2, 5000, FINISH, []),
        "proven": encode_response(2, FINISH, proven),
        "expired": encode_failure(3, describe_error(expired)),
    }
    return {name: b"".join(parts) for name, parts in frames.items()}


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
