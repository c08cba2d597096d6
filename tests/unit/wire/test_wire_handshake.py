"""The handshake's decisions: who is let in, and what the others are told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import ConfigError, DecodeError
from quiver.model import NodeId
from quiver.wire.frames import Frame, FrameKind, FrameReader
from quiver.wire.handshake import (
    HANDSHAKE_BYTES_MAX,
    SENTENCE_LENGTH_MAX,
    HandshakeRefusal,
    Hello,
    IdentityOf,
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

OWN = make_hello(cluster_id="here", node=NodeId(1), incarnation=10)
OTHER = make_hello(cluster_id="here", node=NodeId(2), incarnation=20)


CLIENT = make_requester_hello(name="shell")
CALLER = make_requester_hello(name="broker", cluster_id="here", node=NodeId(2), identity="disk-2")


def know_nobody(node: NodeId) -> str | None:
    return None


def check_hello(frame: Frame, own: Hello, identity_of: IdentityOf) -> Hello | RequesterHello | HandshakeRefusal:
    return check_claims(read_hello(frame, own), own, identity_of)


def check_peer_hello(frame: Frame, own: Hello, dialled: NodeId, identity_of: IdentityOf) -> Hello | HandshakeRefusal:
    return check_peer_claims(read_hello(frame, own), own, dialled, identity_of)


def as_frame(encoded: bytes) -> Frame:
    reader = FrameReader(HANDSHAKE_BYTES_MAX)
    reader.writable()[: len(encoded)] = encoded
    reader.received(len(encoded))
    frame = reader.next_frame()
    assert frame is not None
    return frame


def hello_frame(head: bytes, payload: bytes = b"") -> Frame:
    return Frame(FrameKind.HELLO, memoryview(head), memoryview(payload))


def changed(**fields: object) -> Frame:
    return hello_frame(msgspec.msgpack.encode(msgspec.to_builtins(OTHER) | fields))


def without(*fields: str) -> Frame:
    kept = {key: value for key, value in msgspec.to_builtins(OTHER).items() if key not in fields}
    return hello_frame(msgspec.msgpack.encode(kept))


def test_node_of_the_same_cluster_is_let_in() -> None:
    assert check_hello(as_frame(encode_hello(OTHER)), OWN, know_nobody) == OTHER


def test_node_that_was_dialled_is_accepted() -> None:
    assert check_peer_hello(as_frame(encode_hello(OTHER)), OWN, NodeId(2), know_nobody) == OTHER


@pytest.mark.parametrize(
    "frame",
    [
        changed(version_min=0),
        changed(version_max=9),
        changed(version_max=9, feature_of_version_9={"nested": [1]}),
        changed(features=["tls", "zstd"]),
        without("features"),
    ],
)
def test_what_later_versions_may_add_is_no_obstacle(frame: Frame) -> None:
    assert isinstance(check_hello(frame, OWN, know_nobody), Hello)


@pytest.mark.parametrize(
    ("frame", "code", "sentence"),
    [
        (changed(cluster_id="there"), "other_cluster", "the cluster id is not this cluster's"),
        (changed(node=1), "own_node", "both sides of the connection are node 1; check the node ids"),
        (changed(node=4), "other_node", "node 3 was expected here, not node 4"),
        (
            changed(version_max=0, version_min=0),
            "bad_version",
            "versions 0 to 0 are supported there, 1 to 1 here",
        ),
        (
            changed(version_max=9, version_min=2),
            "bad_version",
            "versions 2 to 9 are supported there, 1 to 1 here",
        ),
        (
            hello_frame(msgspec.msgpack.encode({"magic": "quiver", "version_min": 7, "version_max": 8})),
            "bad_version",
            "versions 7 to 8 are supported there, 1 to 1 here",
        ),
        (Frame(FrameKind.MESSAGE, memoryview(b""), memoryview(b"")), "hello_expected", "not a message"),
        (Frame(FrameKind.REFUSAL, memoryview(b""), memoryview(b"")), "hello_expected", "not a refusal"),
        (changed(magic="kafka"), "bad_frame", "kafka"),
        (without("magic"), "bad_frame", "missing required field `magic`"),
        (without("purpose"), "bad_frame", "missing required field `purpose`"),
        (changed(purpose="gossip"), "bad_frame", "gossip"),
        (as_frame(encode_hello(CALLER)), "unexpected_frame", "the answer is a requester's hello, not a node's"),
        (without("version_min"), "bad_frame", "missing required field `version_min`"),
        (without("node"), "bad_frame", "missing required field `node`"),
        (changed(node=-1), "bad_frame", "node"),
        (changed(node=2**63), "bad_frame", "node"),
        (changed(incarnation="1"), "bad_frame", "incarnation"),
        (changed(cluster_id=""), "bad_frame", "cluster_id"),
        (changed(cluster_id="c" * 65), "bad_frame", "cluster_id"),
        (changed(features=["f"] * 17), "bad_frame", "features"),
        (hello_frame(b""), "bad_frame", "truncated"),
        (hello_frame(b"\xc1"), "bad_frame", "malformed"),
        (hello_frame(b"\x81\xa5magic\xa1\xff"), "bad_frame", "utf-8"),
        (hello_frame(b"\x81\xa1x" + b"\x91" * 60_000), "bad_frame", "recursion"),
        (hello_frame(as_frame(encode_hello(OTHER)).head.tobytes(), b"extra"), "bad_frame", "no payload"),
    ],
)
def test_stranger_is_told_why_it_is_refused(frame: Frame, code: str, sentence: str) -> None:
    judgement = check_peer_hello(frame, OWN, NodeId(3), know_nobody)
    assert isinstance(judgement, HandshakeRefusal)
    assert judgement.code == code
    assert sentence in judgement.sentence


def test_any_node_may_dial() -> None:
    assert isinstance(check_hello(changed(node=4), OWN, know_nobody), Hello)


@given(st.binary(max_size=200))
def test_arbitrary_hello_is_judged_and_nothing_else(head: bytes) -> None:
    frame = hello_frame(head)
    assert isinstance(check_hello(frame, OWN, know_nobody), HandshakeRefusal)
    assert isinstance(check_server_hello(frame, CLIENT), HandshakeRefusal)


@given(st.binary(max_size=200))
def test_arbitrary_refusal_is_a_refusal_or_a_decode_error(head: bytes) -> None:
    frame = Frame(FrameKind.REFUSAL, memoryview(head), memoryview(b""))
    with suppress(DecodeError):
        assert isinstance(decode_refusal(frame), HandshakeRefusal)


@pytest.mark.parametrize("code", RefusalCode)
def test_refusal_says_the_same_on_both_sides(code: RefusalCode) -> None:
    refusal = refuse(code, "why")
    assert decode_refusal(as_frame(encode_refusal(refusal))) == refusal


def test_codes_are_stable() -> None:
    assert [code.value for code in RefusalCode] == [
        "bad_frame",
        "unexpected_frame",
        "hello_expected",
        "hello_late",
        "bad_version",
        "other_cluster",
        "own_node",
        "other_node",
        "other_identity",
        "bad_certificate",
        "not_proven",
        "not_serving",
        "too_many_connections",
    ]


def test_refusal_repeats_only_so_much_of_what_a_stranger_sent() -> None:
    judgement = check_hello(changed(magic="ü" * 2000), OWN, know_nobody)
    assert isinstance(judgement, HandshakeRefusal)
    assert len(judgement.sentence) == SENTENCE_LENGTH_MAX
    assert decode_refusal(as_frame(encode_refusal(judgement))) == judgement


def test_largest_hello_fits_a_handshake() -> None:
    widest = "𝄞" * 64
    own = msgspec.structs.replace(OWN, cluster_id=widest)
    shared = {"cluster_id": widest, "identity": widest, "node": 2**63 - 1, "features": ("𝄞" * 32,) * 16}
    node = msgspec.structs.replace(OTHER, incarnation=2**63 - 1, **shared)
    requester = msgspec.structs.replace(CALLER, name=widest, **shared)
    assert check_hello(as_frame(encode_hello(node)), own, know_nobody) == node
    assert check_hello(as_frame(encode_hello(requester)), own, know_nobody) == requester


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_hello(cluster_id="", node=NodeId(1), incarnation=1),
        lambda: make_hello(cluster_id="c" * 65, node=NodeId(1), incarnation=1),
        lambda: make_hello(cluster_id="c", node=NodeId(-1), incarnation=1),
        lambda: make_hello(cluster_id="c", node=NodeId(1), incarnation=2**63),
        lambda: make_hello(cluster_id="c", node=NodeId(1), incarnation=1, identity="i" * 65),
        lambda: make_requester_hello(name="n" * 65),
        lambda: make_requester_hello(name="n", cluster_id="c" * 65),
        lambda: make_requester_hello(name="n", node=NodeId(-1)),
    ],
)
def test_program_that_could_not_introduce_itself_is_told_at_once(make: Callable[[], Hello | RequesterHello]) -> None:
    with pytest.raises(ConfigError, match="is not valid in the wire handshake"):
        make()


@pytest.mark.parametrize("cluster_id", ["", "here"])
def test_client_that_names_this_cluster_or_none_is_let_in(cluster_id: str) -> None:
    hello = make_requester_hello(name="shell", cluster_id=cluster_id)
    assert check_hello(as_frame(encode_hello(hello)), OWN, know_nobody) == hello
    assert check_server_hello(as_frame(encode_hello(OWN)), hello) == OWN


@pytest.mark.parametrize("hello", [make_requester_hello(name="shell", cluster_id="there")])
def test_client_of_another_cluster_is_refused_on_either_side(hello: RequesterHello) -> None:
    for judgement in (
        check_hello(as_frame(encode_hello(hello)), OWN, know_nobody),
        check_server_hello(as_frame(encode_hello(OWN)), hello),
    ):
        assert judgement == HandshakeRefusal("other_cluster", "the cluster id is not this cluster's")


def test_node_that_asks_must_name_its_cluster() -> None:
    hello = make_requester_hello(name="broker", node=NodeId(2))
    judgement = check_hello(as_frame(encode_hello(hello)), OWN, know_nobody)
    assert judgement == HandshakeRefusal("other_cluster", "the cluster id is not this cluster's")


def test_requester_takes_no_answer_but_a_node() -> None:
    judgement = check_server_hello(as_frame(encode_hello(CALLER)), CLIENT)
    assert isinstance(judgement, HandshakeRefusal)
    assert judgement.code == "unexpected_frame"


@pytest.mark.parametrize(("known", "is_refused"), [(None, False), ("disk-2", False), ("disk-1", True), ("", True)])
def test_node_with_another_disk_than_it_is_known_by_is_refused(known: str | None, is_refused: bool) -> None:
    def identity_of(node: NodeId) -> str | None:
        return known if node == 2 else "another"

    peer = msgspec.structs.replace(OTHER, identity="disk-2")
    for judgement in (
        check_hello(as_frame(encode_hello(peer)), OWN, identity_of),
        check_peer_hello(as_frame(encode_hello(peer)), OWN, NodeId(2), identity_of),
        check_hello(as_frame(encode_hello(CALLER)), OWN, identity_of),
    ):
        if is_refused:
            assert judgement == HandshakeRefusal(
                "other_identity", "node 2 is known here by another identity, or was removed"
            )
        else:
            assert not isinstance(judgement, HandshakeRefusal)


@pytest.mark.parametrize(("identity", "is_refused"), [("disk-1", False), ("disk-9", True)])
def test_node_may_ask_itself_but_not_pass_for_another(identity: str, is_refused: bool) -> None:
    own = msgspec.structs.replace(OWN, identity="disk-1")
    hello = make_requester_hello(name="broker", cluster_id="here", node=NodeId(1), identity=identity)
    assert isinstance(check_hello(as_frame(encode_hello(hello)), own, know_nobody), HandshakeRefusal) is is_refused
