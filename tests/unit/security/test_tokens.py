"""Tokens: their form, their hashes, and that their secrets are not shown."""

from __future__ import annotations

import pytest

from quiver.errors import RequestError
from quiver.security.tokens import hash_secret, is_hash, matches, new_token, parse_token


def test_new_token_parses_into_its_parts() -> None:
    token = new_token()
    assert token.text == f"qv_{token.id}_{token.secret}"
    assert parse_token(f"{token.text}\n") == token
    assert len(bytes.fromhex(token.secret)) == 32


def test_tokens_differ() -> None:
    tokens = [new_token() for _ in range(100)]
    assert len({token.id for token in tokens}) == len({token.secret for token in tokens}) == 100


@pytest.mark.parametrize(
    "text",
    [
        "",
        "qv_",
        "qv_12_34",
        f"qv_{'A' * 16}_{'0' * 64}",
        f"qv_{'0' * 16}_{'0' * 63}",
        f"QV_{'0' * 16}_{'0' * 64}",
        "x\0",
    ],
)
def test_other_text_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(RequestError, match="not a token") as refused:
        parse_token(text)
    assert refused.value.code == "bad_token"
    assert not text or text not in refused.value.message.replace("qv_<id>_<secret>", "")


def test_only_the_secret_of_the_token_has_its_hash() -> None:
    token, other = new_token(), new_token()
    stored = hash_secret(token.secret)
    assert is_hash(stored)
    assert not is_hash(token.text)
    assert matches(token.secret, stored)
    assert not matches(other.secret, stored)
    assert not matches(token.secret, "")
    assert not matches("\u20ac", stored)


def test_secret_is_not_shown() -> None:
    token = new_token()
    assert token.secret not in repr(token)
    assert token.secret not in f"{[token]}"
