"""SCRAM-SHA-256: the RFC's own example, both sides against each other, and what each side refuses."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.errors import RequestError
from quiver.security.scram import (
    ITERATIONS_MIN,
    ScramClient,
    ScramKeys,
    ScramServer,
    decoy_verifier,
    make_new_verifier,
    make_verifier,
)

NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
VERIFIER = make_verifier("pencil", salt=SALT, iterations=ITERATIONS_MIN)


def test_exchange_is_the_example_of_rfc_7677() -> None:
    client = ScramClient("user", "pencil", nonce=NONCE)
    assert client.first == "n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    server = ScramServer(client.first, nonce=SERVER_NONCE)
    assert server.user == "user"
    challenge = server.challenge(VERIFIER)
    assert challenge == f"r={NONCE}{SERVER_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    final = client.prove(challenge)
    assert final == f"c=biws,r={NONCE}{SERVER_NONCE},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    answer = server.finish(final)
    assert answer == "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert client.is_server(answer)


@given(password=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=40))
def test_only_the_password_of_the_verifier_is_accepted(password: str) -> None:
    client = ScramClient("user", password, nonce=NONCE)
    server = ScramServer(client.first, nonce=SERVER_NONCE)
    answer = server.finish(client.prove(server.challenge(VERIFIER)))
    assert (answer is not None) is (password == "pencil")
    assert answer is None or client.is_server(answer)


@given(user=st.text(st.characters(min_codepoint=1, codec="utf-8"), min_size=1, max_size=40))
def test_names_arrive_unchanged(user: str) -> None:
    assert ScramServer(ScramClient(user, "x", nonce=NONCE).first, nonce="s").user == user


def test_passwords_are_normalized() -> None:
    assert make_verifier("I\u00adX", salt=SALT, iterations=ITERATIONS_MIN) == make_verifier(
        "IX", salt=SALT, iterations=ITERATIONS_MIN
    )


@pytest.mark.parametrize("password", ["", "\x07", "x" * 1_001, "\u00ad"])
def test_passwords_that_cannot_be_typed_are_refused(password: str) -> None:
    with pytest.raises(RequestError, match="password"):
        make_verifier(password, salt=SALT, iterations=ITERATIONS_MIN)


def test_unknown_user_gets_a_constant_challenge_and_fails_at_the_end() -> None:
    decoy = decoy_verifier("nobody", b"secret")
    assert decoy == decoy_verifier("nobody", b"secret")
    assert decoy.salt != decoy_verifier("other", b"secret").salt
    client = ScramClient("nobody", "pencil", nonce=NONCE)
    server = ScramServer(client.first, nonce=SERVER_NONCE)
    assert server.finish(client.prove(server.challenge(decoy))) is None


@pytest.mark.parametrize(
    "first", ["", "n,,n=user", "n,,n=user,r=short", "y,,n=user,r=" + "x" * 20, "n,,n=a=b,r=" + NONCE]
)
def test_malformed_first_message_is_refused(first: str) -> None:
    with pytest.raises(RequestError, match="first message"):
        ScramServer(first, nonce="s")


def _final(proof: bytes) -> str:
    return f"c=biws,r={NONCE}s,p={base64.b64encode(proof).decode()}"


@given(proof=st.binary(min_size=1, max_size=60))
def test_no_proof_is_guessed(proof: bytes) -> None:
    server = ScramServer(f"n,,n=user,r={NONCE}", nonce="s")
    server.challenge(VERIFIER)
    assert server.finish(_final(proof)) is None


@given(final=st.text(max_size=200))
def test_malformed_last_message_is_refused(final: str) -> None:
    server = ScramServer(f"n,,n=user,r={NONCE}", nonce="s")
    server.challenge(VERIFIER)
    with pytest.raises(RequestError, match="last message"):
        server.finish(final)


def test_new_passwords_are_not_short() -> None:
    with pytest.raises(RequestError, match="8 to 1000"):
        make_new_verifier("x" * 7)


def test_keys_are_computed_again_for_another_password_salt_or_number_of_iterations() -> None:
    keys, seen = ScramKeys(), set()
    for password, salt, iterations in (("a", SALT, 4096), ("b", SALT, 4096), ("b", b"x" * 16, 4096), ("b", SALT, 4097)):
        derived = keys.derive(password, salt, iterations)
        assert derived == keys.derive(password, salt, iterations) == ScramKeys().derive(password, salt, iterations)
        seen.add(derived)
    assert len(seen) == 4


@pytest.mark.parametrize("iterations", [1, 1_000_001, 999_999_999])
def test_client_does_not_work_for_a_server_that_asks_too_little_or_too_much(iterations: int) -> None:
    client = ScramClient("user", "pencil", nonce=NONCE)
    with pytest.raises(RequestError, match="iterations"):
        client.prove(f"r={NONCE}x,s=W22ZaJ0SNY7soEsUEjb6gQ==,i={iterations}")


def test_client_rejects_a_server_without_the_verifier() -> None:
    client = ScramClient("user", "pencil", nonce=NONCE)
    assert not client.is_server("v=")
    client.prove(f"r={NONCE}x,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096")
    assert not client.is_server("v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
