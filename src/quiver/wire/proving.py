"""The two sides of a handshake in which nodes prove by a shared secret that they belong together.

`DiallingHandshake` is the side that dialled, `NodeChallenge` the other. Nodes with certificates, which TLS has checked
before the first frame, and clients exchange no proofs.

Invariant: nothing that identifies this node or its cluster is sent to a node that has not proved itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from quiver.errors import DecodeError
from quiver.security.node_proof import ACCEPTING, DIALLING, is_proof, make_proof, new_nonce
from quiver.security.secrets import Secret
from quiver.wire.frames import HEADER_BYTES, Frame
from quiver.wire.handshake import (
    Challenge,
    HandshakeRefusal,
    Hello,
    ProofOfNode,
    RefusalCode,
    RequesterHello,
    decode_challenge,
    decode_proof,
    encode_hello,
    encode_step,
    is_challenge,
    refuse,
)


def _refuse_all() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class NodeSecret:
    """The secret of this cluster's nodes on this machine."""

    secret: Secret
    accepts_unproven: Callable[[], bool] = _refuse_all
    """Whether nodes of programs that know no proofs are accepted: while the cluster is being upgraded from them."""


class DiallingHandshake:
    """What the dialling side sends and checks until the handshake is done."""

    def __init__(self, hello: Hello | RequesterHello, secret: NodeSecret | None) -> None:
        self._secret = secret
        if secret is not None:
            hello = msgspec.structs.replace(hello, nonce=new_nonce())
        self.opening = encode_hello(hello)
        """The first frame."""
        self._said: tuple[bytes | str, ...] = ()
        """What both sides have said, once this side was challenged."""

    def answer(self, frame: Frame, endpoint: str) -> bytes | None:
        """Return the answer to a challenge, None to any other frame; `endpoint` is the address that was reached.

        Raises:
            DecodeError: the challenge is malformed.
        """
        if self._secret is None or self._said or not is_challenge(frame):
            return None
        self._said = (self.opening[HEADER_BYTES:], decode_challenge(frame).nonce, endpoint)
        return encode_step(ProofOfNode(proof=make_proof(self._secret.secret, DIALLING, *self._said)))

    def check(self, hello: Hello) -> HandshakeRefusal | None:
        """Return why the other side is not the node that its hello names; None if it has proved it."""
        if self._secret is None:
            return None
        if not self._said:
            return None if self._secret.accepts_unproven() else refuse_unproven(hello.node)
        said = (*self._said, str(hello.node), hello.identity)
        is_proven = is_proof(hello.proof or "", self._secret.secret, ACCEPTING, *said)
        return None if is_proven else refuse_unproven(hello.node)


class NodeChallenge:
    """What the accepting side asks a node that dialled, and how it checks the answer."""

    def __init__(self, secret: NodeSecret, hello: Hello | RequesterHello, head: bytes, endpoint: str) -> None:
        self.hello = hello
        """What the dialling side says about itself; true once it has proved it."""
        self._secret = secret.secret
        challenge = Challenge(nonce=new_nonce())
        self._said: tuple[bytes | str, ...] = (head, challenge.nonce, endpoint)
        self.frame = encode_step(challenge)
        """The frame to send."""

    def check(self, frame: Frame) -> HandshakeRefusal | None:
        """Return why the dialling side is refused; None if the frame proves that it is the node of its hello."""
        try:
            given = decode_proof(frame).proof
        except DecodeError as error:
            return refuse(RefusalCode.BAD_FRAME, error.message)
        is_proven = is_proof(given, self._secret, DIALLING, *self._said)
        return None if is_proven else refuse_unproven(self.hello.node)

    def prove(self, own: Hello) -> Hello:
        """Return this node's hello with its own proof."""
        proof = make_proof(self._secret, ACCEPTING, *self._said, str(own.node), own.identity)
        return msgspec.structs.replace(own, proof=proof)


def refuse_unproven(node: int | None) -> HandshakeRefusal:
    """Return the refusal of a node that did not prove to be one of this cluster's."""
    return refuse(
        RefusalCode.NOT_PROVEN,
        f"node {node} did not prove that it belongs to this cluster: run nodes without certificates as one user of one "
        "machine, or give all of them the same security.node_secret_file",
    )
