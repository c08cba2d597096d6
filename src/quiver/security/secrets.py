"""Secrets in memory and in files: tokens, passwords.

`Secret` holds the text of a secret; nothing that prints, formats, logs or encodes it shows the text. `reveal` is the
only way to get it, called where it is sent. Files of secrets belong to one user: `read_secret` refuses a file that
others can read, and `write_secret` makes one that they cannot. No error of this module repeats a secret.
"""

from __future__ import annotations

import hmac
import os
import stat
from typing import Final, NoReturn

import msgspec

from quiver.addresses import is_loopback
from quiver.errors import ConfigError, NotAllowedError, RequestError

HIDDEN: Final = "<hidden>"
"""Shown in place of a secret."""
SECRET_BYTES_MAX: Final = 8_000
"""Largest secret: a signed token of an identity provider fits."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Secret:
    """A text that is never shown; equal to another one with the same text. It can be pickled, for Spark's executors."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text; call it only where the secret is used."""
        return self._text

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"

    def __str__(self) -> str:
        return HIDDEN

    def __format__(self, spec: str) -> str:
        return format(HIDDEN, spec)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (self._text,)


class TokenSource(msgspec.Struct, frozen=True):
    """Where a client's token comes from: its text, or a file, which is read again for each connection."""

    token: Secret | None = None
    file: str = ""

    def load(self) -> Secret:
        """Return the token.

        Raises:
            ConfigError: the file cannot be read, is readable by others, or holds no token.
        """
        return read_secret(self.file) if self.token is None else self.token

    def check_channel(self, host: str, *, is_encrypted: bool) -> None:
        """Refuse to send a token as `check_channel` does."""
        check_channel(host, is_encrypted=is_encrypted)


class PasswordSource(msgspec.Struct, frozen=True):
    """A user, and where the password comes from: its text, or a file, which is read again for each connection."""

    user: str
    password: Secret | None = None
    file: str = ""

    def load(self) -> Secret:
        """Return the password.

        Raises:
            ConfigError: the file cannot be read, is readable by others, or holds no password.
        """
        return read_password(self.file) if self.password is None else self.password

    def check_channel(self, host: str, *, is_encrypted: bool) -> None:
        """Refuse to prove a password as `check_channel` does."""
        check_channel(host, is_encrypted=is_encrypted, kind="password")


CredentialSource = TokenSource | PasswordSource
"""Where that comes from by which a client proves who it is."""


def parse_secret(text: str, name: str) -> Secret:
    """Return a secret without the white space around it; `name` says in an error what it is.

    Raises:
        RequestError: it is empty, or has characters that cannot be sent in a header (`bad_secret`).
    """
    stripped = text.strip()
    if not stripped or len(stripped) > SECRET_BYTES_MAX or any(not "!" <= one <= "~" for one in stripped):
        raise RequestError(
            f"{name} must be one word of printable ASCII characters, at most {SECRET_BYTES_MAX}", code="bad_secret"
        )
    return Secret(stripped)


def read_secret(path: str) -> Secret:
    """Return the secret in a file that only its owner can read.

    Raises:
        ConfigError: the file cannot be read, is readable by others, or holds no secret; the message says what to do.
    """
    content = _read_private(path, "token")
    try:
        return parse_secret(content.decode("ascii"), f"the content of {path}")
    except (RequestError, UnicodeDecodeError):
        _refuse(f"{path} does not hold a token: write the token, and nothing else, into it")


def read_password(path: str) -> Secret:
    """Return the password in a file that only its owner can read: its only line, spaces included.

    Raises:
        ConfigError: the file cannot be read, is readable by others, or holds no password.
    """
    content = _read_private(path, "password")
    try:
        line = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        line = ""
    if not line or len(content) > SECRET_BYTES_MAX or "\n" in line:
        _refuse(f"{path} does not hold a password: write the password in one line of UTF-8 text into it", "password")
    return Secret(line)


def _read_private(path: str, kind: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                _refuse(f"{path} is not a regular file: give the path of a file that holds the {kind}", kind)
            if found.st_mode & _OTHERS:
                mode = stat.S_IMODE(found.st_mode)
                _refuse(f"{path} can be read or changed by others (mode {mode:04o}): run `chmod 600 {path}`", kind)
            return file.read(SECRET_BYTES_MAX + 2)
    except OSError as error:
        _refuse(f"the {kind} file {path} cannot be read: {error.strerror or error}", kind)


def write_secret(path: str, secret: Secret) -> None:
    """Write a secret to a new file that only its owner can read; it is on disk afterwards.

    Raises:
        RequestError: the file exists (`file_exists`); it is not changed.
        OSError: it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RequestError(f"{path} exists: name another file, or remove it first", code="file_exists") from None
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(secret.reveal().encode() + b"\n")
        file.flush()
        os.fsync(descriptor)


def check_channel(host: str, *, is_encrypted: bool, kind: str = "token") -> None:
    """Refuse to send a secret to a host in plain text, unless it is this machine itself.

    A password is not sent, but who reads its proof in plain text can try passwords until one fits.

    Raises:
        NotAllowedError: the connection is neither encrypted nor a loopback one (`plain_text_token` or
            `plain_text_password`); nothing was sent.
    """
    if not is_encrypted and not is_loopback(host):
        raise NotAllowedError(
            f"not sent: a {kind} is never sent in plain text to another machine, and {host} is not a loopback "
            f"address: write https:// or turn on TLS (tls, --tls, ca_file), or connect without a {kind}",
            code=f"plain_text_{kind}",
        )


def _refuse(sentence: str, kind: str = "token") -> NoReturn:
    raise ConfigError(sentence, code=f"bad_{kind}_file") from None
