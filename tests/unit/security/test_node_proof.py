"""The proof that a node belongs to the cluster: its secret file, and what each part of the proof protects from."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from quiver.errors import ConfigError
from quiver.model import NodeId
from quiver.security.node_proof import ACCEPTING, DIALLING, is_proof, load_node_secret, make_proof
from quiver.security.secrets import Secret
from quiver.wire.frames import Frame, FrameReader
from quiver.wire.handshake import (
    HANDSHAKE_BYTES_MAX,
    HandshakeRefusal,
    Hello,
    decode_challenge,
    encode_hello,
    make_hello,
    make_requester_hello,
    read_hello,
)
from quiver.wire.proving import DiallingHandshake, NodeChallenge, NodeSecret

OURS = NodeSecret(Secret("a" * 64))
THEIRS = NodeSecret(Secret("b" * 64))
HERE = "127.0.0.1:9002"
OWN = make_hello(cluster_id="c", node=NodeId(1), incarnation=1, identity="disk-1")


def as_frame(encoded: bytes) -> Frame:
    reader = FrameReader(HANDSHAKE_BYTES_MAX)
    reader.writable()[: len(encoded)] = encoded
    reader.received(len(encoded))
    frame = reader.next_frame()
    assert frame is not None
    return frame


def challenge(dialling: DiallingHandshake, secret: NodeSecret = OURS, endpoint: str = HERE) -> NodeChallenge:
    frame = as_frame(dialling.opening)
    hello = read_hello(frame, OWN)
    assert not isinstance(hello, HandshakeRefusal)
    return NodeChallenge(secret, hello, bytes(frame.head), endpoint)


def answer(dialling: DiallingHandshake, asked: NodeChallenge, endpoint: str = HERE) -> Frame:
    proof = dialling.answer(as_frame(asked.frame), endpoint)
    assert proof is not None
    return as_frame(proof)


def dial(secret: NodeSecret | None = OURS) -> DiallingHandshake:
    return DiallingHandshake(make_requester_hello(name="n", cluster_id="c", node=NodeId(2)), secret)


def accepted(frame: bytes) -> Hello:
    hello = read_hello(as_frame(frame), OWN)
    assert isinstance(hello, Hello)
    return hello


def test_both_sides_prove_themselves() -> None:
    dialling = dial()
    asked = challenge(dialling)
    assert asked.check(answer(dialling, asked)) is None
    assert dialling.check(accepted(encode_hello(asked.prove(OWN)))) is None


def test_another_secret_proves_nothing() -> None:
    dialling = dial(THEIRS)
    asked = challenge(dialling)
    refusal = asked.check(answer(dialling, asked))
    assert refusal is not None
    assert refusal.code == "not_proven"
    answered = dialling.check(accepted(encode_hello(asked.prove(OWN))))
    assert answered is not None
    assert answered.code == "not_proven"


def test_recorded_proof_is_refused_on_another_connection() -> None:
    dialling = dial()
    recorded = answer(dialling, challenge(dialling))
    again = challenge(dialling)  # the same hello, as the attacker has recorded it
    assert again.check(recorded) is not None


def test_relayed_proof_is_refused() -> None:
    """Somebody who listens where node 3 is expected passes node 1's proof on to node 2, at another address."""
    dialling = dial()
    asked = challenge(dialling, endpoint="127.0.0.1:9003")
    assert asked.check(answer(dialling, asked, endpoint="127.0.0.1:9004")) is not None


def test_own_proof_cannot_be_reflected() -> None:
    dialling = dial()
    asked = challenge(dialling)
    proof = answer(dialling, asked)
    given = bytes(proof.head).decode("latin-1")[-64:]
    assert dialling.check(accepted(encode_hello(make_hello(cluster_id="c", node=NodeId(1), incarnation=1)))) is not None
    assert not is_proof(
        given, OURS.secret, ACCEPTING, dialling.opening[12:], decode_challenge(as_frame(asked.frame)).nonce
    )


def test_accepting_side_proves_its_own_id() -> None:
    dialling = dial()
    asked = challenge(dialling)
    answer(dialling, asked)
    proven = asked.prove(OWN)
    assert dialling.check(OWN) is not None
    assert dialling.check(msgspec.structs.replace(proven, node=3)) is not None
    assert dialling.check(msgspec.structs.replace(proven, identity="disk-3")) is not None
    assert dialling.check(proven) is None


@pytest.mark.parametrize(("is_upgrading", "is_accepted"), [(True, True), (False, False)])
def test_node_of_an_earlier_program_is_accepted_only_during_the_upgrade(is_upgrading: bool, is_accepted: bool) -> None:
    dialling = dial(NodeSecret(OURS.secret, lambda: is_upgrading))
    assert (dialling.check(OWN) is None) is is_accepted


def test_client_proves_nothing_and_ignores_challenges() -> None:
    client = DiallingHandshake(make_requester_hello(name="shell"), None)
    assert client.answer(as_frame(challenge(dial()).frame), HERE) is None
    assert client.check(OWN) is None


def test_parts_of_a_proof_cannot_be_shifted() -> None:
    assert make_proof(OURS.secret, DIALLING, "ab", "c") != make_proof(OURS.secret, DIALLING, "a", "bc")
    assert not is_proof("", OURS.secret, DIALLING)
    assert not is_proof("\u20ac", OURS.secret, DIALLING)


# The file.


def test_secret_is_made_once_and_only_for_its_owner(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path)}
    first = load_node_secret(environment=environment)
    path = tmp_path / ".local" / "state" / "quiver" / "node-secret"
    assert len(bytes.fromhex(first.reveal())) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_node_secret(environment=environment) == first
    assert os.listdir(path.parent) == ["node-secret"]


def test_nodes_that_start_together_share_the_secret(tmp_path: Path) -> None:
    found: list[Secret] = []
    path = str(tmp_path / "secret")
    threads = [threading.Thread(target=lambda: found.append(load_node_secret(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({secret.reveal() for secret in found}) == 1
    assert os.listdir(tmp_path) == ["secret"]


def test_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    load_node_secret(str(path))
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_node_secret(str(path))


def test_secret_needs_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for environment in ({}, {"HOME": "/proc/no/such"}, {"HOME": "relative"}):
        load_node_secret(environment=environment)
    private = tmp_path / f"quiver-{os.getuid()}"
    assert [path.name for path in private.iterdir()] == ["node-secret"]
    private.chmod(0o755)
    with pytest.raises(ConfigError, match="does not belong to this user alone"):
        load_node_secret(environment={})


def test_file_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set security\.node_secret_file"):
        load_node_secret(str(tmp_path / "missing" / "secret"))
