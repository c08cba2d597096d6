"""SCRAM-SHA-256 (RFC 5802, RFC 7677): prove a password without sending it. No I/O; nonces are given.

The server stores a verifier, from which the password cannot be read and with which nobody can log in: salt, iterations,
`StoredKey` and `ServerKey`. The messages are the texts of the RFC, without channel binding: TLS protects the exchange.

A user that does not exist gets a challenge like any other, with a salt that is always the same for that name, and fails
at the end, as a wrong password does.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import stringprep
import unicodedata
from typing import Annotated

import msgspec
from msgspec import Meta

from quiver.errors import RequestError

ITERATIONS = 100_000
"""Iterations of a new verifier. They slow down guessing from a stolen verifier; the client pays for them at login."""
ITERATIONS_MIN = 4_096
"""The least that RFC 7677 allows."""
ITERATIONS_MAX = 10_000_000
"""The most that a stored verifier may have."""
CLIENT_ITERATIONS_MAX = 1_000_000
"""The most that a client computes at the word of a server: about a second."""
PASSWORD_LENGTH_MIN = 8
"""Characters of a new password, by NIST SP 800-63B and ASVS; one that exists may be shorter."""
SALT_BYTES = 16
KEY_BYTES = 32
NONCE_LENGTH_MIN, NONCE_LENGTH_MAX = 16, 128
PASSWORD_LENGTH_MAX = 1_000
MESSAGE_LENGTH_MAX = 1_000
_GS2_HEADER = "n,,"
_CHANNEL = base64.b64encode(_GS2_HEADER.encode()).decode()

HexKey = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
HexSalt = Annotated[str, Meta(pattern=r"\A([0-9a-f]{2}){8,64}\Z")]

_CLIENT_FIRST = re.compile(r"n,,n=((?:[^,=\x00]|=2C|=3D)+),r=([\x21-\x2b\x2d-\x7e]+)")
_SERVER_FIRST = re.compile(r"r=([\x21-\x2b\x2d-\x7e]+),s=([A-Za-z0-9+/=]+),i=([0-9]{1,9})")
_CLIENT_FINAL = re.compile(r"(c=([A-Za-z0-9+/=]+),r=([\x21-\x2b\x2d-\x7e]+)),p=([A-Za-z0-9+/=]+)")


class ScramVerifier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server stores of a password; salt and keys in hexadecimal."""

    salt: HexSalt
    iterations: Annotated[int, Meta(ge=ITERATIONS_MIN, le=ITERATIONS_MAX)]
    stored_key: HexKey
    server_key: HexKey

    def __repr__(self) -> str:
        return f"ScramVerifier(iterations={self.iterations}, <hidden>)"


def make_verifier(password: str, *, salt: bytes, iterations: int = ITERATIONS) -> ScramVerifier:
    """Return the verifier of a password. It takes long on purpose: call it in a thread.

    Raises:
        RequestError: the password is empty, too long, or has characters that SCRAM does not allow.
    """
    salted = _salt(password, salt, iterations)
    return ScramVerifier(
        salt=salt.hex(),
        iterations=iterations,
        stored_key=hashlib.sha256(_hmac(salted, b"Client Key")).hexdigest(),
        server_key=_hmac(salted, b"Server Key").hex(),
    )


def make_new_verifier(password: str) -> ScramVerifier:
    """Return the verifier of a new password, with a random salt. It takes long on purpose: call it in a thread.

    Raises:
        RequestError: the password is too short or too long, or has characters that SCRAM does not allow.
    """
    if len(password) < PASSWORD_LENGTH_MIN:
        raise _bad(f"a new password has {PASSWORD_LENGTH_MIN} to {PASSWORD_LENGTH_MAX} characters")
    return make_verifier(password, salt=secrets.token_bytes(SALT_BYTES))


def decoy_verifier(user: str, secret: bytes) -> ScramVerifier:
    """Return a verifier that no password fits, for a user that does not exist: always the same for the same name."""
    return ScramVerifier(
        salt=_hmac(secret, b"salt" + user.encode())[:SALT_BYTES].hex(),
        iterations=ITERATIONS,
        stored_key=_hmac(secret, b"stored" + user.encode()).hex(),
        server_key=_hmac(secret, b"server" + user.encode()).hex(),
    )


class ScramServer:
    """The server's side of one exchange: `challenge` answers the first message, `finish` the second."""

    def __init__(self, first: str, *, nonce: str) -> None:
        """Read the client's first message.

        Raises:
            RequestError: it is not one.
        """
        match = _CLIENT_FIRST.fullmatch(first[:MESSAGE_LENGTH_MAX])
        if match is None or not NONCE_LENGTH_MIN <= len(match[2]) <= NONCE_LENGTH_MAX:
            raise _bad("the client's first message must be 'n,,n=<user>,r=<nonce>'")
        self.user = match[1].replace("=2C", ",").replace("=3D", "=")
        self._first_bare = first[len(_GS2_HEADER) :]
        self._nonce = match[2] + nonce
        self._challenge = ""
        self.verifier: ScramVerifier | None = None
        """What the proof is checked against, once the client was challenged."""

    def challenge(self, verifier: ScramVerifier) -> str:
        """Return the server's first message."""
        self.verifier = verifier
        salt = base64.b64encode(bytes.fromhex(verifier.salt)).decode()
        self._challenge = f"r={self._nonce},s={salt},i={verifier.iterations}"
        return self._challenge

    def finish(self, final: str) -> str | None:
        """Return the server's last message if the client has proven the password, else None.

        Raises:
            RequestError: the message is not a client's last one.
        """
        match = _CLIENT_FINAL.fullmatch(final[:MESSAGE_LENGTH_MAX])
        if match is None or self.verifier is None:
            raise _bad("the client's last message must be 'c=biws,r=<nonce>,p=<proof>'")
        proof = _decode(match[4])
        exchanged = f"{self._first_bare},{self._challenge},{match[1]}".encode()
        stored_key = bytes.fromhex(self.verifier.stored_key)
        client_key = _xor(proof, _hmac(stored_key, exchanged)) if len(proof) == KEY_BYTES else bytes(KEY_BYTES)
        is_proven = hmac.compare_digest(hashlib.sha256(client_key).digest(), stored_key)
        if not is_proven or match[2] != _CHANNEL or match[3] != self._nonce:
            return None
        signature = _hmac(bytes.fromhex(self.verifier.server_key), exchanged)
        return f"v={base64.b64encode(signature).decode()}"


class ScramKeys:
    """Derives the salted form of passwords; the last one is kept, so that it need not be computed again."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[tuple[str, bytes, int], bytes] | None = None

    def derive(self, password: str, salt: bytes, iterations: int) -> bytes:
        """Return the salted password; raises `RequestError` for one that cannot be used. Threads may call it."""
        last = self._last  # one reference: another thread may replace it
        if last is not None and last[0] == (password, salt, iterations):
            return last[1]
        salted = _salt(password, salt, iterations)
        self._last = ((password, salt, iterations), salted)
        return salted


class ScramClient:
    """The client's side of one exchange."""

    def __init__(self, user: str, password: str, *, nonce: str, keys: ScramKeys | None = None) -> None:
        self._password = password
        self._keys = keys or ScramKeys()
        self._nonce = nonce
        self._bare = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
        self._signature = b""

    @property
    def first(self) -> str:
        """Return the first message."""
        return _GS2_HEADER + self._bare

    def prove(self, challenge: str) -> str:
        """Return the last message, which answers the server's challenge. It takes long on purpose.

        Raises:
            RequestError: the challenge is not valid, or the password cannot be used.
        """
        match = _SERVER_FIRST.fullmatch(challenge[:MESSAGE_LENGTH_MAX])
        if match is None or not match[1].startswith(self._nonce) or match[1] == self._nonce:
            raise _bad("the server's first message is not valid")
        iterations = int(match[3])
        if not ITERATIONS_MIN <= iterations <= CLIENT_ITERATIONS_MAX:
            raise _bad(
                f"the server asks for {iterations} iterations, which this client refuses: it computes "
                f"{ITERATIONS_MIN} to {CLIENT_ITERATIONS_MAX}; set the password again, or check what listens there"
            )
        salted = self._keys.derive(self._password, _decode(match[2]), iterations)
        client_key = _hmac(salted, b"Client Key")
        without_proof = f"c={_CHANNEL},r={match[1]}"
        exchanged = f"{self._bare},{challenge},{without_proof}".encode()
        proof = _xor(client_key, _hmac(hashlib.sha256(client_key).digest(), exchanged))
        self._signature = _hmac(_hmac(salted, b"Server Key"), exchanged)
        return f"{without_proof},p={base64.b64encode(proof).decode()}"

    def is_server(self, final: str) -> bool:
        """Return whether the server's last message proves that it knows the verifier."""
        expected = f"v={base64.b64encode(self._signature).decode()}"
        return bool(self._signature) and hmac.compare_digest(final.encode(), expected.encode())


def _salt(password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", _prepare(password), salt, iterations)


def _prepare(password: str) -> bytes:
    """Return a password by SASLprep (RFC 4013): the same bytes however a keyboard composes its characters."""
    if not 0 < len(password) <= PASSWORD_LENGTH_MAX:
        raise _bad(f"a password has 1 to {PASSWORD_LENGTH_MAX} characters")
    mapped = (" " if stringprep.in_table_c12(one) else one for one in password if not stringprep.in_table_b1(one))
    prepared = unicodedata.ucd_3_2_0.normalize("NFKC", "".join(mapped))
    if not prepared or any(is_in(one) for one in prepared for is_in in _PROHIBITED):
        raise _bad("the password has characters that are not allowed, such as control characters")
    return prepared.encode()


_PROHIBITED = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(one ^ other for one, other in zip(left, right, strict=True))


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise _bad("a value is not valid Base64") from None


def _bad(sentence: str) -> RequestError:
    return RequestError(f"not done: {sentence}", code="bad_scram")
