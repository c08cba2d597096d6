"""`quiver security`: certificates and tokens from which a secure cluster starts."""

from __future__ import annotations

import asyncio
import os
from tempfile import NamedTemporaryFile

import click

from quiver.addresses import parse_address
from quiver.cli.options import connect, examples, find_ca_file, url_option
from quiver.cli.quantities import DurationType
from quiver.config import TlsSettings
from quiver.errors import ConflictError, RequestError
from quiver.security.bootstrap import check_directory, initialize, node_directory, read_text, save_node
from quiver.security.certificates import NODE_DAYS, fingerprint, make_key, make_request
from quiver.security.files import TOKEN_NAME
from quiver.security.joining import format_join_token, join_user, parse_join_token
from quiver.security.secrets import Secret, TokenSource, read_secret, write_secret
from quiver.wire import RequestPool
from quiver.wire.security_messages import NodeSigned, SignNode

_NODE_MAX = 2**31
JOIN_TIMEOUT_MS = 30_000
"""Longest time until the primary has signed."""


@click.group(
    epilog=examples("quiver security init 1@10.0.0.1 2@10.0.0.2 3@10.0.0.3", "quiver security init --renew 1@10.0.0.1")
)
def security() -> None:
    """Set up TLS and the first administrator."""


@security.command(
    epilog=examples(
        "quiver security init 1@10.0.0.1 2@10.0.0.2 3@10.0.0.3",
        "quiver security init broker-1 broker-2,10.0.0.2 broker-3 --directory ./production",
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


@security.command(
    "join-token",
    epilog=examples(
        "quiver security join-token 4@10.0.0.4 --out join.token", "quiver security join-token 5@broker-5,10.0.0.5"
    ),
)
@click.argument("node")
@click.option("--lasting", type=DurationType(), default="1h", show_default=True, help="Time until it expires.")
@click.option("--out", "output", metavar="FILE", required=True, help="New file, mode 0600, for the token.")
@url_option
def join_token(*, node: str, lasting: int, output: str, url: str) -> None:
    """Make a token with which NODE, given as ID@HOST, gets its certificate from the primary, once.

    Copy the file to the new host and run `quiver security join` there. The token is good for this id and these hosts
    only. It needs --ca-file (or QUIVER_CA_FILE, or a context): the token carries the authority's certificate.
    """
    ((number, hosts),) = parse_nodes((node,)).items()
    user = join_user(number, hosts)
    authority = read_text(find_ca_file(url))
    if os.path.lexists(output):
        raise RequestError(f"not done: {output} exists: name another file, or remove it first", code="file_exists")
    with connect(url) as cluster:
        try:
            cluster.access.create_user(user)
        except ConflictError as error:
            if error.code != "user_exists":  # from an earlier token, which may have expired or be lost
                raise
        token = cluster.access.create_token(user, lasting=lasting / 1000)
    write_secret(output, format_join_token(authority, token.secret))
    click.echo(f"wrote {output}: on the new host, run quiver security join {output} ADDRESS, with a manager's address")


@security.command(epilog="Example: quiver security join join.token 10.0.0.1:9002 --directory /etc/quiver/security")
@click.argument("token_file")
@click.argument("address")
@click.option("--directory", default="./quiver-security", show_default=True, help="Directory to make for the node.")
def join(*, token_file: str, address: str, directory: str) -> None:
    """Get the certificate of this new node with the join token in TOKEN_FILE, from the manager at ADDRESS.

    The private key is made here and never sent. ADDRESS is the wire address of any manager. Nothing is sent to a host
    that does not prove to belong to the cluster that made the token.
    """
    authority, token = parse_join_token(read_secret(token_file))
    check_directory(directory)  # first: the token works once
    key = make_key()
    signed = asyncio.run(_ask_to_sign(address, authority, token, make_request(key, 0)))
    save_node(directory, key=key, certificate=signed.certificate, authority=signed.authority)
    click.echo(f"made {directory}: set security.directory to it and start the node; {token_file} is used up")


async def _ask_to_sign(address: str, authority: str, token: Secret, csr: str) -> NodeSigned:
    with NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(authority)
        file.flush()
        tls = TlsSettings(is_enabled=True, ca_file=file.name)
        async with RequestPool(name="quiver security join", tls=tls, credentials=TokenSource(token)) as pool:
            signed, _ = await pool.call(address, SignNode(csr=csr), timeout_ms=JOIN_TIMEOUT_MS)
    if fingerprint(signed.authority) != fingerprint(authority):
        raise RequestError("not done: the answer names another authority than the join token", code="other_authority")
    return signed


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
