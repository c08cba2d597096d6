"""`quiver security`: certificates and tokens from which a secure cluster starts."""

from __future__ import annotations

import click

from quiver.addresses import parse_address
from quiver.cli.options import examples
from quiver.errors import RequestError
from quiver.security.bootstrap import initialize, node_directory
from quiver.security.certificates import NODE_DAYS
from quiver.security.files import TOKEN_NAME

_NODE_MAX = 2**31


@click.group(
    epilog=examples("quiver security init 1@10.0.0.1 2@10.0.0.2 3@10.0.0.3", "quiver security init --renew 1@10.0.0.1")
)
def security() -> None:
    """Set up TLS and the first administrator."""


@security.command(
    epilog=examples(
        "quiver security init 1@10.0.0.1 2@10.0.0.2 3@10.0.0.3",
        "quiver security init broker-1 broker-2,10.0.0.2 broker-3 --directory /root/quiver-security",
        "quiver security init 4@10.0.0.4    # a further node of the same cluster",
    )
)
@click.argument("nodes", nargs=-1, required=True)
@click.option(
    "--directory", default="./quiver-security", show_default=True, help="Directory to make, or to add nodes to."
)
@click.option(
    "--days", type=click.IntRange(1, 3650), default=NODE_DAYS, show_default=True, help="Validity of certificates."
)
@click.option("--renew", is_flag=True, help="Replace the certificates of nodes that exist; keys and hosts stay.")
@click.option(
    "--no-signing",
    is_flag=True,
    help="Keep the authority's key out of the nodes' directories; new nodes are then added by this command only.",
)
def init(nodes: tuple[str, ...], directory: str, *, days: int, renew: bool, no_signing: bool) -> None:
    """Make a certificate authority, the certificates of NODES and the token of the first administrator.

    A node is ID@HOST, with further host names after commas; without ID@, nodes are numbered from 1. Copy node-<id> to
    each host and set security.directory to it there. Nothing that exists is overwritten: run it again to add nodes.
    """
    made = initialize(directory, parse_nodes(nodes), days=days, can_sign=not no_signing, is_renewed=renew)
    if made.has_new_authority:
        click.echo(f"made the authority in {directory}; keep ca.key there: its holder can pose as any node")
    for node in made.made:
        click.echo(f"made {node_directory(directory, node)}: copy it to the node and set security.directory to it")
    for node in made.renewed:
        click.echo(f"renewed {node_directory(directory, node)}/node.pem: copy it to the node, which reloads it")
    for node in made.kept:
        click.echo(f"kept {node_directory(directory, node)}: it exists; --renew replaces its certificate")
    click.echo(
        f"the administrator's token is in {directory}/{TOKEN_NAME}: export QUIVER_TOKEN_FILE={directory}/{TOKEN_NAME}"
    )


def parse_nodes(texts: tuple[str, ...]) -> dict[int, list[str]]:
    """Return the hosts of nodes by id; a text is `ID@HOST[,HOST…]`, or `HOST[,HOST…]` for the next id from 1.

    Raises:
        RequestError: a text is neither, or an id comes twice.
    """
    found: dict[int, list[str]] = {}
    for at, text in enumerate(texts, start=1):
        number, separator, hosts = text.rpartition("@")
        node = int(number) if number.isdecimal() and number.isascii() else 0
        if separator and not 0 < node <= _NODE_MAX:
            raise RequestError(f"{text!r} is no node: give ID@HOST, with a number from 1 as ID", code="bad_node")
        node = node or at
        if node in found:
            raise RequestError(f"node {node} is given twice", code="bad_node")
        found[node] = [_without_port(host) for host in hosts.split(",")]
    return found


def _without_port(host: str) -> str:
    """Return a host that was copied with its port from a list of managers."""
    host = host.strip()
    try:
        return parse_address(host)[0]
    except RequestError:
        return host.strip("[]")
