"""How nodes without certificates prove to each other that they belong together: a shared secret, which is never sent.

Both sides of a connection contribute a random nonce, and each sends an HMAC-SHA-256 of what both have said. A recorded
proof is worth nothing on another connection. The proof also covers the address at which the accepting side was reached,
as both ends see it, so that somebody who listens where a node used to be cannot pass the proofs of its peers on.

The secret is 256 random bits in a file that only its owner can read: the nodes of one user on one machine share it
without being configured. It protects against other users of the machine and everybody who can only reach the port; it
does not encrypt anything, which is why it is for loopback addresses.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from quiver.errors import ConfigError
from quiver.security.secrets import Secret, read_secret, write_secret

NONCE_BYTES: Final = 32
SECRET_BYTES: Final = 32
FILE_NAME: Final = "node-secret"
DIALLING: Final = b"quiver node proof 1, dialling side"
ACCEPTING: Final = b"quiver node proof 1, accepting side"
"""What keeps the proof of one side from being used as that of the other."""


def new_nonce() -> str:
    """Return a random number that is used once."""
    return secrets.token_hex(NONCE_BYTES)


def make_proof(secret: Secret, side: bytes, *said: bytes | str) -> str:
    """Return the proof of one side over everything that was said, in order."""
    code = hmac.new(secret.reveal().encode(), side, hashlib.sha256)
    for part in said:
        content = part.encode() if isinstance(part, str) else part
        code.update(len(content).to_bytes(8, "big"))  # so that no two lists of parts give the same bytes
        code.update(content)
    return code.hexdigest()


def is_proof(given: str, secret: Secret, side: bytes, *said: bytes | str) -> bool:
    """Return whether a proof is that of `side` over what was said, in time that does not depend on where it differs."""
    return hmac.compare_digest(given.encode(), make_proof(secret, side, *said).encode())


def load_node_secret(path: str = "", *, environment: Mapping[str, str] | None = None) -> Secret:
    """Return the secret of a file, by default of the user's own; make the file if it is missing.

    Raises:
        ConfigError: it cannot be read or made, or others can read it.
    """
    path = path or _default_path(os.environ if environment is None else environment)
    if not os.path.exists(path):
        try:
            _make_secret(path)
        except OSError as error:
            raise ConfigError(
                f"the secret of this machine's nodes cannot be kept in {path}: {error.strerror}; set "
                "security.node_secret_file to a file that this user can write"
            ) from None
    return read_secret(path)


def _make_secret(path: str) -> None:
    """Make the file unless another node does so now: nodes that start together must all read the same, whole secret."""
    temporary = f"{path}.{secrets.token_hex(8)}"
    write_secret(temporary, Secret(secrets.token_hex(SECRET_BYTES)))
    try:
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _default_path(environment: Mapping[str, str]) -> str:
    """Return where the user's own secret is: with the state of programs, or else in a private temporary directory."""
    state = environment.get("XDG_STATE_HOME", "")
    home = environment.get("HOME", "")
    if not os.path.isabs(state) and os.path.isabs(home):
        state = f"{home}/.local/state"
    if os.path.isabs(state):
        directory = f"{state}/quiver"
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError:
            pass  # no home, or a read-only one, as services and containers have
        else:
            if os.access(directory, os.W_OK | os.X_OK):
                return f"{directory}/{FILE_NAME}"
    return f"{_private_temporary()}/{FILE_NAME}"


def _private_temporary() -> str:
    directory = f"{tempfile.gettempdir()}/quiver-{os.getuid()}"
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made: {error.strerror}; set security.node_secret_file") from None
    found = os.lstat(directory)  # not `stat`: another user may have put a link there
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{directory} does not belong to this user alone: remove it, or set security.node_secret_file"
        )
    return directory
