"""The files from which a secure cluster starts, in directories that only their owner can read.

    <directory>/            ca.pem, ca.key, admin.token, admin.hash     stays with the operator
    <directory>/node-<id>/  ca.pem, node.pem, node.key, admin.hash      goes to the node; `ca.key` too, on managers
                            quiver.toml, the node's settings            from the command line only

Nothing that exists is overwritten, except a node's certificate when it is renewed. Running it again adds what is
missing, such as a node.
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from quiver.errors import ConfigError, RequestError
from quiver.security.certificates import NODE_DAYS, Authority, make_authority, make_key, make_request
from quiver.security.files import (
    ADMIN_NAME,
    CA_KEY_NAME,
    CA_NAME,
    CERTIFICATE_NAME,
    KEY_NAME,
    SETTINGS_NAME,
    TOKEN_NAME,
)
from quiver.security.node_settings import NodeSettings
from quiver.security.secrets import Secret
from quiver.security.tokens import hash_secret, new_token

FILE_BYTES_MAX = 64 * 1024


@dataclass(slots=True)
class MadeFiles:
    """What was done."""

    has_new_authority: bool = False
    made: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


def node_directory(directory: str, node: int) -> str:
    """Return the directory of a node's files."""
    return f"{directory}/node-{node}"


def initialize(
    directory: str,
    nodes: Mapping[int, Sequence[str]],
    *,
    days: int = NODE_DAYS,
    can_sign: bool = True,
) -> MadeFiles:
    """Make the authority, the administrator's token and the files of nodes, by id and hosts, as far as missing.

    With `can_sign`, nodes that are made together with the authority get its key.

    Raises:
        ConfigError: a file cannot be read or written.
        RequestError: a node's host is not valid; nothing was made for that node.
    """
    try:
        _make_directory(directory)
        result = MadeFiles(has_new_authority=not os.path.exists(f"{directory}/{CA_NAME}"))
        if result.has_new_authority:
            certificate, key = make_authority(f"authority of {os.path.basename(os.path.abspath(directory))}")
            _write(f"{directory}/{CA_KEY_NAME}", key.reveal())
            _write(f"{directory}/{CA_NAME}", certificate)
        if not os.path.exists(f"{directory}/{ADMIN_NAME}"):
            token = new_token()
            _write(f"{directory}/{TOKEN_NAME}", f"{token.text}\n")
            _write(f"{directory}/{ADMIN_NAME}", f"{token.id} {hash_secret(token.secret)}\n")
        authority = load_authority(f"{directory}/{CA_NAME}", f"{directory}/{CA_KEY_NAME}")
        for node, hosts in nodes.items():
            if not os.path.exists(f"{node_directory(directory, node)}/{CERTIFICATE_NAME}"):
                with_key = can_sign and result.has_new_authority
                _make_node(directory, node, hosts, authority, days=days, with_key=with_key)
                result.made.append(node)
            else:
                result.kept.append(node)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: {error.strerror}") from None
    return result


def load_authority(certificate_file: str, key_file: str) -> Authority:
    """Return the authority of two files.

    Raises:
        ConfigError: they cannot be read, or do not belong together.
    """
    return Authority(read_text(certificate_file), Secret(read_text(key_file)))


def read_text(path: str) -> str:
    """Return a small text file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open(path, encoding="ascii") as file:
            return file.read(FILE_BYTES_MAX)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"{path} cannot be read: {reason}") from None


def check_directory(directory: str) -> None:
    """Check that `save_node` can write to a directory, before something is used up for what it writes.

    Raises:
        ConfigError: one of the files exists, or this user cannot write there.
    """
    for name in (KEY_NAME, CA_NAME, CERTIFICATE_NAME):
        if os.path.lexists(f"{directory}/{name}"):
            raise ConfigError(f"not done: {directory}/{name} exists: name another directory, or remove the file first")
    found = os.path.abspath(directory)
    while not os.path.exists(found):
        found = os.path.dirname(found)
    if not os.path.isdir(found) or not os.access(found, os.W_OK | os.X_OK):
        raise ConfigError(f"not done: this user cannot write to {found}: name another directory")


def save_node(directory: str, *, key: Secret, certificate: str, authority: str) -> None:
    """Write the files of a node that has joined; the directory must not have any of them.

    Raises:
        ConfigError: one exists, or cannot be written.
    """
    try:
        _make_directory(directory)
        for name, content in ((KEY_NAME, key.reveal()), (CA_NAME, authority), (CERTIFICATE_NAME, certificate)):
            _write(f"{directory}/{name}", content)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: {error.strerror}") from None


def renew_certificate(path: str, authority: Authority, *, days: int = NODE_DAYS, hosts: Sequence[str] = ()) -> None:
    """Replace a node's certificate by one for the same key and hosts, and further ones; the file keeps its owner.

    Raises:
        ConfigError: the file cannot be read or replaced.
        RequestError: another authority issued the certificate, or a host is not valid.
    """
    certificate = authority.renew(read_text(path), days=days, hosts=hosts)
    try:
        owner = os.stat(path)
        with suppress(FileNotFoundError):
            os.unlink(f"{path}.new")  # left by a crash
        _write(f"{path}.new", certificate)
        if owner.st_uid != os.geteuid():
            os.chown(f"{path}.new", owner.st_uid, owner.st_gid)  # root renews for the node's user
        os.replace(f"{path}.new", path)  # a node that reloads finds the old one or the new one, whole
    except OSError as error:
        raise ConfigError(f"not done: {error.filename or path}: {error.strerror}") from None


def write_settings(directory: str, settings: NodeSettings) -> None:
    """Write the settings of a node into its directory, unless they exist.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with suppress(FileExistsError):
            _write(f"{directory}/{SETTINGS_NAME}", settings.text())
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: {error.strerror}") from None


def find_managers(directory: str) -> str:
    """Return the managers, as in `node.join`, that the settings of nodes in a directory name; empty if none do."""
    for path in sorted(glob.glob(f"{glob.escape(directory)}/node-*/{SETTINGS_NAME}")):
        with suppress(tomllib.TOMLDecodeError, KeyError, TypeError):
            return str(tomllib.loads(read_text(path))["node"]["join"])
    return ""


def _make_node(
    directory: str, node: int, hosts: Sequence[str], authority: Authority, *, days: int, with_key: bool
) -> None:
    own = node_directory(directory, node)
    key = make_key()
    certificate = authority.issue(node, hosts, make_request(key, node), days=days)  # first: it may refuse the hosts
    if os.path.exists(f"{own}/{KEY_NAME}"):
        raise RequestError(f"{own} has a key but no certificate: move it away, or remove it", code="file_exists")
    _make_directory(own)
    _write(f"{own}/{KEY_NAME}", key.reveal())
    _write(f"{own}/{CA_NAME}", authority.certificate)
    _write(f"{own}/{ADMIN_NAME}", read_text(f"{directory}/{ADMIN_NAME}"))
    if with_key:
        _write(f"{own}/{CA_KEY_NAME}", read_text(f"{directory}/{CA_KEY_NAME}"))
    _write(f"{own}/{CERTIFICATE_NAME}", certificate)  # last: it shows that the directory is complete


def _make_directory(path: str) -> None:
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.chmod(path, 0o700)


def _write(path: str, content: str) -> None:
    """Write a new file that only its owner can read; it is on disk afterwards."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)
        file.flush()
        os.fsync(descriptor)
