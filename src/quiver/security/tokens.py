"""Tokens: `qv_<id>_<secret>`. Pure, except for the random numbers of a new token.

The id names the token in lists, logs and metadata; it is not secret. The secret is 256 random bits, so a single SHA-256
of it is enough to store: there is nothing that a dictionary could guess, and a slow hash would only slow down each
connection. The text of a token exists only where it is made and where it is used; a node keeps the hash.

Both parts are lower-case hexadecimal: a double click selects the whole token, and the underscores separate it without
ambiguity.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import NamedTuple

from quiver.errors import RequestError

TOKEN_PREFIX = "qv_"  # noqa: S105 - not a secret; it lets scanners of repositories recognize tokens
ID_BYTES = 8
SECRET_BYTES = 32
"""256 bits of randomness."""
HASH_LENGTH = 64
"""Characters of a hash: SHA-256 in hexadecimal."""

_TOKEN = re.compile(rf"{TOKEN_PREFIX}([0-9a-f]{{{2 * ID_BYTES}}})_([0-9a-f]{{{2 * SECRET_BYTES}}})")
_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_HASH = re.compile(rf"[0-9a-f]{{{HASH_LENGTH}}}")


class Token(NamedTuple):
    """A token in parts. Its representation hides the secret."""

    id: str
    secret: str
    text: str

    def __repr__(self) -> str:
        return f"Token(id={self.id!r}, secret=<hidden>)"


def new_token() -> Token:
    """Return a new random token."""
    return join_token(secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES))


def parse_token(text: str) -> Token:
    """Return the parts of a token; surrounding white space is ignored, as files end with a line break.

    Raises:
        RequestError: the text is not a token; the message does not repeat it.
    """
    match = _TOKEN.fullmatch(text.strip())
    if match is None:
        raise RequestError(f"not a token: expected {TOKEN_PREFIX}<id>_<secret>", code="bad_token")
    return join_token(match[1], match[2])


def hash_secret(secret: str) -> str:
    """Return the hash of a token's secret, which is what nodes store."""
    return hashlib.sha256(secret.encode()).hexdigest()


def is_token_id(text: str) -> bool:
    """Return whether a text has the form of a token's id."""
    return _ID.fullmatch(text) is not None


def is_hash(text: str) -> bool:
    """Return whether a text has the form of a stored hash."""
    return _HASH.fullmatch(text) is not None


def matches(secret: str, stored_hash: str) -> bool:
    """Return whether a secret has the stored hash, in time that does not depend on where they differ."""
    return hmac.compare_digest(hash_secret(secret).encode(), stored_hash.encode())


def join_token(token_id: str, secret: str) -> Token:
    """Return the token of an id and a secret, both hexadecimal."""
    return Token(token_id, secret, f"{TOKEN_PREFIX}{token_id}_{secret}")
