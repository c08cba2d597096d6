"""The keys of a node that encrypt the data keys of its logs: where they come from, and how they wrap a data key.

A key ring is a text of lines ``name key``, the key as 64 hexadecimal digits; empty lines and lines that begin with
``#`` are ignored. The first key wraps new data keys; all of them unwrap. So a key is replaced by putting another one
before it, wrapping all data keys again, and removing the old one. The text is in a file that only its owner can read,
or is what a command prints, such as the client of a key management service.

No error of this module repeats a key. Loaded only by nodes and commands that have keys: it needs `cryptography`.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from quiver.errors import ConfigError, DecodeError, RequestError
from quiver.model import LABEL_PATTERN

KEY_BYTES: Final = 32
KEYS_MAX: Final = 64
COMMAND_TIMEOUT_S: Final = 30
_NONCE_BYTES: Final = 12
_TEXT_BYTES_MAX: Final = 64 * 1024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class WrappedKey(msgspec.Struct, frozen=True):
    """A data key, encrypted by the key with this name."""

    key: str
    nonce: bytes
    wrapped: bytes


class KeyRing:
    """The keys of a node by name, the one for new data keys first. Shows names only."""

    __slots__ = ("_keys", "random_bytes")

    def __init__(self, keys: Mapping[str, bytes], *, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self.random_bytes = random_bytes
        """The source of data keys and nonces; only simulations have another than the operating system's."""
        self._keys = {name: AESGCM(key) for name, key in keys.items()}

    def __repr__(self) -> str:
        return f"KeyRing({', '.join(self.names)})"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the keys, in their order."""
        return tuple(self._keys)

    @property
    def first(self) -> str:
        """Return the name of the key that wraps new data keys."""
        return self.names[0]

    def wrap(self, data_key: bytes, owner: str) -> WrappedKey:
        """Encrypt a data key by the first key, for `owner` only."""
        nonce = self.random_bytes(_NONCE_BYTES)
        wrapped = self._keys[self.first].encrypt(nonce, data_key, _authenticated(self.first, owner))
        return WrappedKey(self.first, nonce, wrapped)

    def unwrap(self, wrapped: WrappedKey, owner: str) -> bytes:
        """Return a data key that was wrapped for `owner`.

        Raises:
            ConfigError: the key that wrapped it is not in the ring (`unknown_key`).
            DecodeError: it was changed, or was wrapped for another owner, or by another key with the same name.
        """
        key = self._keys.get(wrapped.key)
        if key is None:
            raise ConfigError(
                f"it was encrypted by the key {wrapped.key!r}, and this node has only {', '.join(self.names)}: add "
                "that key to the file of encryption.key_file or the output of encryption.key_command",
                code="unknown_key",
            )
        try:
            return key.decrypt(wrapped.nonce, wrapped.wrapped, _authenticated(wrapped.key, owner))
        except (InvalidTag, ValueError):
            raise DecodeError(
                f"the key {wrapped.key!r} does not open it: it was changed or moved here, or another key has that name"
            ) from None


def make_key_line(name: str) -> str:
    """Return the line of a new random key.

    Raises:
        RequestError: the name is not valid.
    """
    if not re.fullmatch(LABEL_PATTERN, name):
        raise RequestError(f"{name!r} is no name of a key: use letters, digits, '.', '_' and '-', at most 64")
    return f"{name} {os.urandom(KEY_BYTES).hex()}"


def parse_key_ring(text: str, source: str) -> KeyRing:
    """Return the keys of a text; `source` says in an error where it is from.

    Raises:
        ConfigError: it has no key, or a line that is none.
    """
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, key = _parse_line(line, f"{source}, line {number}")
        if keys.setdefault(name, key) != key:
            raise ConfigError(f"{source}, line {number}: there is another key {name!r}", code="bad_key")
    if not keys or len(keys) > KEYS_MAX:
        raise ConfigError(
            f"{source} has {len(keys)} keys and must have 1 to {KEYS_MAX}: make one with `quiver security key`",
            code="bad_key",
        )
    return KeyRing(keys)


def _parse_line(line: str, source: str) -> tuple[str, bytes]:
    words = line.split()
    try:
        key = bytes.fromhex(words[1]) if len(words) == 2 else b""
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES or not re.fullmatch(LABEL_PATTERN, words[0]):
        raise ConfigError(
            f"{source}: it must be the name of a key and {2 * KEY_BYTES} hexadecimal digits, as `quiver security key` "
            "makes it",
            code="bad_key",
        )
    return words[0], key


def load_key_ring(*, file: str, command: str) -> KeyRing | None:
    """Return the keys in a file or in the output of a command; None if neither is set. Blocks.

    Raises:
        ConfigError: both are set, or the keys cannot be read; the message says what to do.
    """
    if file and command:
        raise ConfigError("set encryption.key_file or encryption.key_command, not both")
    if file:
        return parse_key_ring(read_key_file(file), file)
    if command:
        return parse_key_ring(_run(command), "the output of encryption.key_command")
    return None


def read_key_file(path: str) -> str:
    """Return the text of a key file.

    Raises:
        ConfigError: it cannot be read, or others than its owner can.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as opened:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path} is not a regular file", code="bad_key_file")
            if mode & _OTHERS:
                raise ConfigError(
                    f"{path} can be read or changed by others (mode {stat.S_IMODE(mode):04o}): run `chmod 600 {path}`",
                    code="bad_key_file",
                )
            content = opened.read(_TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be read: {error.strerror or error}", code="bad_key_file"
        ) from None
    return _decode(content, path)


def _run(command: str) -> str:
    name = "encryption.key_command"
    try:
        words = shlex.split(command)
        # The operator's own command, from the node's settings; no shell takes part.
        done = subprocess.run(  # noqa: S603
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{name} did not end within {COMMAND_TIMEOUT_S} seconds", code="bad_key_command") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be run: {error}", code="bad_key_command") from None
    if done.returncode:
        raise ConfigError(
            f"{name} ended with status {done.returncode}; its standard error says why", code="bad_key_command"
        )
    return _decode(done.stdout, f"the output of {name}")


def _decode(content: bytes, source: str) -> str:
    if len(content) > _TEXT_BYTES_MAX:
        raise ConfigError(f"{source} has more than {_TEXT_BYTES_MAX} bytes", code="bad_key")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{source} must be plain ASCII text", code="bad_key") from None


def _authenticated(key: str, owner: str) -> bytes:
    return f"quiver data key 1\0{key}\0{owner}".encode()
