"""Steps that authenticate a connection of the fuzzer: rightly, wrongly, half, and again as somebody else.

A login that must not succeed and does is a finding, and so is one that makes the connection speak for another user than
the credential's. Failures of one host are limited, so each connection comes from an address of its own.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from wire_session import FoundError, Session, Step

from quiver.errors import RequestError
from quiver.security.scram import ScramClient, ScramKeys
from quiver.security.tokens import new_token
from quiver.wire.envelope import IncomingResponse, decode_body
from quiver.wire.security_messages import Authenticated, ScramChallenge


@dataclass(frozen=True)
class Credentials:
    """What the users of the fuzzer have; `bad_tokens` are expired, revoked, or of a disabled user."""

    tokens: dict[str, str]
    passwords: dict[str, str]
    bad_tokens: tuple[str, ...]
    keys: dict[tuple[str, str], ScramKeys] = field(default_factory=dict)
    """By user and password, so that each is computed once."""

    def scram(self, user: str, password: str) -> ScramClient:
        """Begin an exchange."""
        keys = self.keys.setdefault((user, password), ScramKeys())
        return ScramClient(user, password, nonce=secrets.token_urlsafe(18), keys=keys)


def login_steps(credentials: Credentials) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Return the steps that use these credentials rightly, and those that do not."""

    def step(do: Callable[[Session, Credentials, random.Random], None]) -> Step:
        return lambda session, rng: do(session, credentials, rng)

    rightly = (step(use_token),) * 3 + (step(use_password),) * 2
    wrongly = map(step, (use_bad_token, damage_token, use_wrong_password, begin_only, finish_only, replay, cross))
    return rightly, tuple(wrongly)


def use_token(session: Session, credentials: Credentials, rng: random.Random) -> None:
    """Authenticate with a right token; other requests may follow before the answer."""
    user = rng.choice(list(credentials.tokens))
    number = session.ask({"type": "authenticate", "token": credentials.tokens[user]})
    session.may_speak_for(user)
    if rng.random() < 0.7:
        check_principal(session, number, user)


def use_bad_token(session: Session, credentials: Credentials, rng: random.Random) -> None:
    number = session.ask({"type": "authenticate", "token": rng.choice((*credentials.bad_tokens, new_token().text))})
    expect_refusal(session.wait(number), "a token that is not valid")


def damage_token(session: Session, credentials: Credentials, rng: random.Random) -> None:
    """Send a part of a right token, another secret with its id, or other characters around it."""
    token = credentials.tokens[rng.choice(list(credentials.tokens))]
    prefix, token_id, secret = token.split("_")
    damaged = rng.choice(
        (
            token[: rng.randrange(len(token))],
            f"{prefix}_{token_id}_{secret[1:]}{'0' if secret[0] != '0' else '1'}",
            f"{prefix}_{token_id[::-1]}_{secret}",
            f"{token}\0",
            f"{token}0",
            token.upper(),
            f"Bearer {token}",
        )
    )
    if damaged == token:
        return
    expect_refusal(session.wait(session.ask({"type": "authenticate", "token": damaged})), "a damaged token")


def use_password(session: Session, credentials: Credentials, rng: random.Random) -> None:
    """Authenticate with a right password, as the last of one or two exchanges."""
    user = rng.choice(list(credentials.passwords))
    if rng.random() < 0.3:
        begin_only(session, credentials, rng)
    client = credentials.scram(user, credentials.passwords[user])
    proof = challenge(session, client)
    if proof is not None:
        number = session.ask({"type": "finish_scram", "message": proof})
        session.may_speak_for(user)
        check_principal(session, number, user)


def use_wrong_password(session: Session, credentials: Credentials, rng: random.Random) -> None:
    """Prove another password, of a user that has one, has none, or does not exist."""
    user = rng.choice((*credentials.passwords, "dora", "nobody", "admin"))
    proof = challenge(session, credentials.scram(user, "another password"))
    if proof is not None:
        answer = session.wait(session.ask({"type": "finish_scram", "message": proof}))
        expect_refusal(answer, f"a wrong password of {user}")


def begin_only(session: Session, credentials: Credentials, rng: random.Random) -> None:
    """Begin an exchange that is not finished, or not well-formed."""
    first = credentials.scram(rng.choice((*credentials.passwords, "nobody")), "x").first
    session.wait(session.ask({"type": "begin_scram", "message": rng.choice((first, first[:-10], "n,,n=,r=", ""))}))


def finish_only(session: Session, credentials: Credentials, rng: random.Random) -> None:
    """Finish what was not begun, or with what is no proof."""
    message = rng.choice(("", "c=biws,r=x,p=AAAA", f"c=biws,r={'x' * 40},p={'A' * 43}=", "c=biws,r=x,p=!"))
    expect_refusal(session.wait(session.ask({"type": "finish_scram", "message": message})), "no proof")


def replay(session: Session, credentials: Credentials, rng: random.Random) -> None:
    """Use a right proof twice, or after another exchange was begun."""
    user = rng.choice(list(credentials.passwords))
    proof = challenge(session, credentials.scram(user, credentials.passwords[user]))
    if proof is None:
        return
    if rng.random() < 0.5:
        number = session.ask({"type": "finish_scram", "message": proof})
        session.may_speak_for(user)
        check_principal(session, number, user)
    else:
        session.wait(session.ask({"type": "begin_scram", "message": credentials.scram(user, "x").first}))
    expect_refusal(session.wait(session.ask({"type": "finish_scram", "message": proof})), "a replayed proof")


def cross(session: Session, credentials: Credentials, rng: random.Random) -> None:
    """Begin as one user, and prove the password of another."""
    victim, user = rng.sample(list(credentials.passwords), 2)
    proof = challenge(session, credentials.scram(victim, credentials.passwords[user]))
    if proof is not None:
        answer = session.wait(session.ask({"type": "finish_scram", "message": proof}))
        expect_refusal(answer, f"{user}'s password for {victim}")


# -- answers -----------------------------------------------------------------------------------------


def challenge(session: Session, client: ScramClient) -> str | None:
    """Begin an exchange; return the proof that answers the challenge, or None if there is no challenge."""
    answer = session.wait(session.ask({"type": "begin_scram", "message": client.first}))
    if answer is None or answer.failure is not None:
        return None
    try:
        return client.prove(decode_body(answer.body, ScramChallenge).message)
    except RequestError as error:
        raise FoundError(f"a challenge that no client accepts: {error}") from None


def expect_refusal(answer: IncomingResponse | None, what: str) -> None:
    if answer is not None and answer.failure is None:
        raise FoundError(f"authenticated with {what}: {bytes(answer.body)!r}")


def check_principal(session: Session, number: int, user: str) -> None:
    """Judge the answer to a right login."""
    answer = session.wait(number)
    if answer is None or answer.failure is not None:
        return  # too busy, or the connection ended
    found = msgspec.msgpack.decode(answer.body, type=Authenticated).principal
    if found != f"user:{user}":
        raise FoundError(f"the credentials of {user} authenticated {found}")
    session.speaks_for(user)
