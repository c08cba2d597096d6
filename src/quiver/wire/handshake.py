"""The handshake: both ends of a connection check protocol version, cluster and identity. Pure.

The dialling side sends a `Hello` if it is a node that will send Raft messages, or a `RequesterHello` if it is a client
or a node that will send requests. The accepting side answers with its own `Hello`, which accepts the connection, or
with a `HandshakeRefusal`, which gives the reason and ends the connection. The dialling side may send once it has the
`Hello`.

Between nodes that share a secret instead of certificates, the hello has a nonce. The accepting side then answers with a
`Challenge` first, the dialling side with its `ProofOfNode`, and the hello that accepts the connection has the accepting
side's proof. Nothing about this node or its cluster is sent before. A client is told only what it needs: versions.

Rules: the first frame is a hello or the connection ends; `magic`, `version_min` and `version_max` keep their names
and meanings in every version, unknown fields are ignored; refusal codes are stable, sentences are for people. A node
whose identity differs from the known one is refused: its disk is not the one that voted. Each side names the feature
levels that its program knows, and gets only fields that it knows; a hello without them is of level 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from quiver.errors import ConfigError, DecodeError
from quiver.features import LEVEL_MAX, LEVEL_MIN
from quiver.model import NodeId
from quiver.wire.frames import Frame, FrameKind, encode_frame

VERSION_MIN = 1
VERSION_MAX = 1
"""The protocol versions that this program supports."""

HANDSHAKE_BYTES_MAX = 4 * 1024
"""Largest frame of a handshake: the most memory that an unknown client can occupy."""
SENTENCE_LENGTH_MAX = 300
UNTOLD = "-"
"""Stands for the cluster's id in the hello to a client, who needs to know none: the field must not be empty."""

_Version = Annotated[int, Meta(ge=0, le=0xFFFF)]
_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Feature = Annotated[str, Meta(min_length=1, max_length=32)]
_Identity = Annotated[str, Meta(max_length=64)]
_Nonce = Annotated[str, Meta(max_length=64)]
_Proof = Annotated[str, Meta(max_length=64)]
_Features = Annotated[tuple[_Feature, ...], Meta(max_length=16)]
_T = TypeVar("_T")
_StructType = TypeVar("_StructType", bound=msgspec.Struct)

IdentityOf = Callable[[NodeId], str | None]
"""Return the known identity of a node; None if it is not known yet."""


class _Versions(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a hello that is the same in every version."""

    magic: Literal["quiver"]
    version_min: _Version
    version_max: _Version
    level_min: _Version = LEVEL_MIN
    level_max: _Version = LEVEL_MIN
    """The feature levels that the sender's program knows."""


class Hello(_Versions, frozen=True, kw_only=True, tag_field="purpose", tag="messages"):
    """The dialling or answering node, and the protocol versions that it supports.

    `incarnation` is different for each start of the process, `identity` for each new data directory.
    """

    cluster_id: Annotated[str, Meta(min_length=1, max_length=64)]
    node: _Number
    incarnation: _Number
    identity: _Identity = ""
    features: _Features = ()
    nonce: _Nonce | msgspec.UnsetType = msgspec.UNSET
    """A random number, if the sender proves by a secret that it is the node; different for each connection."""
    proof: _Proof | msgspec.UnsetType = msgspec.UNSET
    """In the answer to a node that has proved itself: the proof of the answering node."""


class RequesterHello(_Versions, frozen=True, kw_only=True, tag_field="purpose", tag="requests"):
    """The sender of requests: a client, which may leave `cluster_id` empty, or a node, which gives its id."""

    cluster_id: Annotated[str, Meta(max_length=64)] = ""
    name: Annotated[str, Meta(max_length=64)] = ""
    node: _Number | None = None
    identity: _Identity = ""
    features: _Features = ()
    nonce: _Nonce | msgspec.UnsetType = msgspec.UNSET


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag_field="purpose", tag="challenge"):
    """Asks the dialling node to prove that it knows the secret."""

    nonce: Annotated[str, Meta(min_length=32, max_length=64)]


class ProofOfNode(msgspec.Struct, frozen=True, kw_only=True, tag_field="purpose", tag="proof"):
    """The dialling node's answer to a challenge."""

    proof: _Proof


class _Purpose(msgspec.Struct, frozen=True):
    purpose: str = ""


class RefusalCode(StrEnum):
    """Why a connection is ended; stable."""

    BAD_FRAME = "bad_frame"
    UNEXPECTED_FRAME = "unexpected_frame"
    HELLO_EXPECTED = "hello_expected"
    HELLO_LATE = "hello_late"
    BAD_VERSION = "bad_version"
    OTHER_CLUSTER = "other_cluster"
    OWN_NODE = "own_node"
    OTHER_NODE = "other_node"
    OTHER_IDENTITY = "other_identity"
    BAD_CERTIFICATE = "bad_certificate"
    NOT_PROVEN = "not_proven"
    NOT_SERVING = "not_serving"
    TOO_MANY_CONNECTIONS = "too_many_connections"


class HandshakeRefusal(msgspec.Struct, frozen=True):
    """The last frame of a connection: a code for programs, a sentence for people."""

    # A plain string: a later version may know codes that this one does not.
    code: Annotated[str, Meta(max_length=64)]
    sentence: Annotated[str, Meta(max_length=SENTENCE_LENGTH_MAX)]


def refuse(code: RefusalCode, sentence: str) -> HandshakeRefusal:
    """Return a refusal; a sentence that quotes too much of the received bytes is truncated."""
    return HandshakeRefusal(code, sentence[:SENTENCE_LENGTH_MAX])


def make_hello(*, cluster_id: str, node: NodeId, incarnation: int, identity: str = "") -> Hello:
    """Return the hello of this node.

    Raises:
        ConfigError: a value is not valid in a hello.
    """
    fields = {"cluster_id": cluster_id, "node": node, "incarnation": incarnation, "identity": identity}
    return _build_hello(Hello, {"purpose": "messages", **fields})


def hide_node(own: Hello) -> Hello:
    """Return the hello that a client gets: protocol versions and feature levels, nothing about node and cluster."""
    return msgspec.structs.replace(own, cluster_id=UNTOLD, node=0, incarnation=0, identity="")


def make_requester_hello(
    *, name: str, cluster_id: str = "", node: NodeId | None = None, identity: str = ""
) -> RequesterHello:
    """Return the hello of a client, or of a node that sends requests.

    Raises:
        ConfigError: a value is not valid in a hello.
    """
    fields = {"cluster_id": cluster_id, "name": name, "node": node, "identity": identity}
    return _build_hello(RequesterHello, {"purpose": "requests", **fields})


def _build_hello(of_type: type[_T], fields: Mapping[str, object]) -> _T:
    versions = {
        "magic": "quiver",
        "version_min": VERSION_MIN,
        "version_max": VERSION_MAX,
        "level_min": LEVEL_MIN,
        "level_max": LEVEL_MAX,
    }
    try:
        return msgspec.convert({**versions, **fields}, of_type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a value is not valid in the wire handshake: {error}") from None


def check_claims(
    hello: Hello | RequesterHello | HandshakeRefusal, own: Hello, identity_of: IdentityOf
) -> Hello | RequesterHello | HandshakeRefusal:
    """Check what the dialling side says about itself: return its hello, or the refusal.

    Refusals tell something about this node: a node must have proved itself before.
    """
    match hello:
        case Hello():
            return _check_node(hello, own, identity_of)
        case RequesterHello():
            return _check_requester(hello, own, identity_of)
        case HandshakeRefusal():
            return hello


def check_peer_claims(
    hello: Hello | RequesterHello | HandshakeRefusal, own: Hello, dialled: NodeId, identity_of: IdentityOf
) -> Hello | HandshakeRefusal:
    """Check what a dialled node says about itself: return its hello, or the refusal."""
    if isinstance(hello, RequesterHello):
        return refuse(RefusalCode.UNEXPECTED_FRAME, "the answer is a requester's hello, not a node's")
    if isinstance(hello, HandshakeRefusal):
        return hello
    checked = _check_node(hello, own, identity_of)
    if isinstance(checked, Hello) and hello.node != dialled:
        return refuse(RefusalCode.OTHER_NODE, f"node {dialled} was expected here, not node {hello.node}")
    return checked


def check_server_hello(frame: Frame, own: RequesterHello) -> Hello | HandshakeRefusal:
    """Check the answer to a requester: return the node's hello, or the refusal."""
    hello = read_hello(frame, own)
    if isinstance(hello, RequesterHello):
        return refuse(RefusalCode.UNEXPECTED_FRAME, "the answer is a requester's hello, not a node's")
    if isinstance(hello, Hello) and own.cluster_id and hello.cluster_id not in (own.cluster_id, UNTOLD):
        return _refuse_cluster()
    return hello


def read_hello(frame: Frame, own: _Versions) -> Hello | RequesterHello | HandshakeRefusal:
    """Read a hello of a version that both sides support; what it says is not checked yet."""
    if frame.kind is not FrameKind.HELLO:
        return refuse(RefusalCode.HELLO_EXPECTED, f"the first frame must be a hello, not a {frame.kind.name.lower()}")
    try:
        # In two steps, since another version's hello may differ in all but these fields.
        theirs = _decode(frame, _Versions)
        if theirs.version_min > own.version_max or theirs.version_max < own.version_min:
            there, here = (f"{each.version_min} to {each.version_max}" for each in (theirs, own))
            return refuse(RefusalCode.BAD_VERSION, f"versions {there} are supported there, {here} here")
        return _decode_hello(frame)
    except DecodeError as error:
        return refuse(RefusalCode.BAD_FRAME, error.message)


def _check_node(hello: Hello, own: Hello, identity_of: IdentityOf) -> Hello | HandshakeRefusal:
    if hello.cluster_id != own.cluster_id:
        return _refuse_cluster()
    if hello.node == own.node:
        return refuse(RefusalCode.OWN_NODE, f"both sides of the connection are node {own.node}; check the node ids")
    if not _is_known_as(identity_of(NodeId(hello.node)), hello.identity):
        return _refuse_identity(hello.node)
    return hello


def _check_requester(hello: RequesterHello, own: Hello, identity_of: IdentityOf) -> RequesterHello | HandshakeRefusal:
    if hello.node is None:
        return hello if hello.cluster_id in ("", own.cluster_id) else _refuse_cluster()
    if hello.cluster_id != own.cluster_id:
        return _refuse_cluster()
    # A node may send requests to itself: it may not know that an address is its own.
    known = own.identity if hello.node == own.node else identity_of(NodeId(hello.node))
    return hello if _is_known_as(known, hello.identity) else _refuse_identity(hello.node)


def _is_known_as(known: str | None, identity: str) -> bool:
    return known is None or known == identity


def _refuse_cluster() -> HandshakeRefusal:
    # The sentence does not name this cluster's id: a client of another cluster must not learn it.
    return refuse(RefusalCode.OTHER_CLUSTER, "the cluster id is not this cluster's")


def _refuse_identity(node: int) -> HandshakeRefusal:
    return refuse(RefusalCode.OTHER_IDENTITY, f"node {node} is known here by another identity, or was removed")


def encode_hello(hello: Hello | RequesterHello) -> bytes:
    """Return a hello as a frame."""
    return _encode(FrameKind.HELLO, hello)


def encode_step(step: Challenge | ProofOfNode) -> bytes:
    """Return a step between two hellos as a frame."""
    return _encode(FrameKind.HELLO, step)


def is_challenge(frame: Frame) -> bool:
    """Return whether a frame of the accepting side is a challenge, rather than its hello or a refusal."""
    try:
        return frame.kind is FrameKind.HELLO and _decode(frame, _Purpose).purpose == "challenge"
    except DecodeError:
        return False


def decode_challenge(frame: Frame) -> Challenge:
    """Return the challenge that a frame carries.

    Raises:
        DecodeError: it does not carry one.
    """
    return _decode(frame, Challenge)


def decode_proof(frame: Frame) -> ProofOfNode:
    """Return the proof that a frame carries.

    Raises:
        DecodeError: it does not carry one.
    """
    if frame.kind is not FrameKind.HELLO:
        raise DecodeError(f"a proof was expected, not a {frame.kind.name.lower()}")
    return _decode(frame, ProofOfNode)


def encode_refusal(refusal: HandshakeRefusal) -> bytes:
    """Return a refusal as a frame."""
    return _encode(FrameKind.REFUSAL, refusal)


def decode_refusal(frame: Frame) -> HandshakeRefusal:
    """Return the refusal that a frame of that kind carries.

    Raises:
        DecodeError: it does not carry one.
    """
    return _decode(frame, HandshakeRefusal)


def _encode(kind: FrameKind, body: msgspec.Struct) -> bytes:
    return b"".join(encode_frame(kind, msgspec.msgpack.encode(body)))


def _decode(frame: Frame, of_type: type[_StructType]) -> _StructType:
    return _decode_with(msgspec.msgpack.Decoder(of_type), frame)


def _decode_hello(frame: Frame) -> Hello | RequesterHello:
    return _decode_with(_HELLO_DECODER, frame)


def _decode_with(decoder: msgspec.msgpack.Decoder[_T], frame: Frame) -> _T:
    if frame.payload:
        raise DecodeError(f"a {frame.kind.name.lower()} has no payload, but this one has {len(frame.payload)} bytes")
    try:
        return decoder.decode(frame.head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a valid {frame.kind.name.lower()}: {error}") from None


_HELLO_DECODER: msgspec.msgpack.Decoder[Hello | RequesterHello] = msgspec.msgpack.Decoder(Hello | RequesterHello)
