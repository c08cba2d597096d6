"""`quiver security key`: the keys that encrypt the data keys of encrypted topics."""

from __future__ import annotations

import os

import click

from quiver.cli.options import examples, json_option, load_keys
from quiver.cli.output import print_json, print_table
from quiver.errors import RequestError
from quiver.security.key_ring import make_key_line, parse_key_ring, read_key_file
from quiver.security.secrets import Secret, write_secret
from quiver.storage import SystemDisk
from quiver.storage.data_directory import replicas
from quiver.storage.data_key import DATA_KEY_NAME, rewrap, wrapping_key_of
from quiver.storage.groups import GROUPS_FOLDER

key_file_option = click.option(
    "--encryption-key-file",
    "key_file",
    required=True,
    metavar="FILE",
    help="The node's key file; the first key in it is the one to use.",
)


@click.group(
    epilog=examples(
        "quiver security key add /etc/quiver/keys --name 2026", "quiver security key list /var/lib/quiver/node-1"
    )
)
def key() -> None:
    """Make, replace and list the keys of encrypted topics.

    To replace a key: add another one to the key file of each node, restart the nodes one by one, run `rewrap` on each,
    and remove the old key from the files once `list` names it no more.
    """


@key.command(epilog="Example: quiver security key add /etc/quiver/keys --name 2026")
@click.argument("file")
@click.option("--name", required=True, help="Name of the key: letters, digits, '.', '_' and '-'.")
def add(*, file: str, name: str) -> None:
    """Add a new random key to FILE, before the others; without FILE, make it, with mode 0600.

    Keep a copy of FILE where the data is not: without it, encrypted topics cannot be read by anybody.
    """
    line = make_key_line(name)
    if not os.path.lexists(file):
        write_secret(file, Secret(line))
        _sync_name(file)
        click.echo(f"made {file}: set encryption.key_file to it on the node, and keep a copy elsewhere")
        return
    before = read_key_file(file)
    _check_owner(file)
    if name in parse_key_ring(before, file).names:
        raise RequestError(f"not done: {file} has a key {name!r} already", code="key_exists")
    replacement = f"{file}.new"
    write_secret(replacement, Secret(f"{line}\n{before.rstrip()}"))
    os.replace(replacement, file)  # whole or not at all: it holds keys that have no other copy
    _sync_name(file)
    click.echo(f"added {name} to {file}: restart the node, then run quiver security key rewrap")


@key.command("list", epilog="Example: quiver security key list /var/lib/quiver/node-1 --json")
@click.argument("data", type=click.Path(exists=True, file_okay=False))
@json_option
def list_keys(*, data: str, as_json: bool) -> None:
    """Say which keys the encrypted replicas in a node's directory DATA need."""
    disk = SystemDisk()
    needed: dict[str, int] = {}
    for directory in find_encrypted(data):
        name = wrapping_key_of(disk, directory) or ""
        needed[name] = needed.get(name, 0) + 1
    if as_json:
        print_json(needed)
        return
    print_table(("key", "replicas"), sorted(needed.items()))


@key.command(
    "rewrap", epilog="Example: quiver security key rewrap /var/lib/quiver/node-1 --encryption-key-file /etc/quiver/keys"
)
@click.argument("data", type=click.Path(exists=True, file_okay=False))
@key_file_option
def rewrap_keys(*, data: str, key_file: str) -> None:
    """Encrypt the data keys in a node's directory DATA by the first key of the file.

    The node may run, if it was started with that key in its file. Records are not touched. After a failure run it
    again.
    """
    keys = load_keys(key_file)
    disk = SystemDisk()
    found = find_encrypted(data)
    for directory in found:
        _check_owner(f"{directory}/{DATA_KEY_NAME}")
    done = sum(rewrap(disk, directory, keys) for directory in found)
    click.echo(f"{done} of {len(found)} data keys are now encrypted by {keys.first}, the others were already")


def _sync_name(file: str) -> None:
    """Make the name of a key file durable, before a node encrypts anything by its new key."""
    SystemDisk().sync_directory(os.path.dirname(os.path.abspath(file)))


def _check_owner(file: str) -> None:
    """Demand that this user owns a file: the node could not read one that another user puts in its place."""
    owner = os.stat(file).st_uid
    if owner != os.geteuid():
        raise RequestError(
            f"not done: {file} belongs to another user, and the node could not read what you write there: run this "
            f"as that user, with `sudo -u '#{owner}'`",
            code="wrong_user",
        )


def find_encrypted(data: str) -> list[str]:
    """Return the directories of a node's encrypted replicas."""
    groups = f"{replicas(data.rstrip('/'))}/{GROUPS_FOLDER}"
    if not os.path.isdir(groups):
        raise RequestError(f"{data} holds no replicas: name a node's --data directory", code="no_replicas")
    found = (f"{groups}/{name}" for name in sorted(os.listdir(groups)) if name.isdecimal())
    return [directory for directory in found if os.path.exists(f"{directory}/{DATA_KEY_NAME}")]
