"""`quiver security`: certificates and tokens from which a secure cluster starts."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Mapping, Sequence
from tempfile import NamedTemporaryFile

import click

from quiver.addresses import format_address, parse_address
from quiver.cli.options import connect, examples, find_ca_file, url_option
from quiver.cli.output import format_time
from quiver.cli.quantities import DurationType
from quiver.cli.security_key import key
from quiver.config import TlsSettings
from quiver.errors import ConflictError, RequestError, UnavailableError
from quiver.security.bootstrap import (
    MadeFiles,
    check_directory,
    find_managers,
    initialize,
    load_authority,
    node_directory,
    read_text,
    renew_certificate,
    save_node,
    write_settings,
)
from quiver.security.certificates import NODE_DAYS, expiry_s, fingerprint, make_key, make_request
from quiver.security.files import CA_KEY_NAME, CA_NAME, SETTINGS_NAME, TOKEN_NAME
from quiver.security.joining import JoiningNode, JoinToken, format_join_token, join_user, parse_join_token
from quiver.security.node_settings import DIRECTORY, HTTP_PORT, NodeSettings, format_managers
from quiver.security.secrets import TokenSource, read_secret, write_secret
from quiver.wire import RequestPool
from quiver.wire.security_messages import NodeSigned, SignNode

_NODE_MAX = 2**31
JOIN_TIMEOUT_MS = 30_000
"""Longest time until the primary has signed."""


@click.group(
    epilog=examples(
        "quiver security init 1@10.0.0.1 2@10.0.0.2 3@10.0.0.3", "quiver security renew /etc/quiver/node.pem"
    )
)
def security() -> None:
    """Set up TLS, the first administrator, and the keys of encrypted topics."""


security.add_command(key)


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
@click.option(
    "--no-signing",
    is_flag=True,
    help="Keep the authority's key out of the nodes' directories; new nodes are then added by this command only.",
)
def init(nodes: tuple[str, ...], directory: str, *, days: int, no_signing: bool) -> None:
    """Make a certificate authority, the certificates and settings of NODES and the token of the first administrator.

    A node is ID@HOST, with further host names after commas; without ID@, nodes are numbered from 1. The nodes of the
    first run are the managers. Copy node-<id> to each host as /etc/quiver. Nothing that exists is overwritten: run it
    again to add nodes.
    """
    hosts = parse_nodes(nodes)
    made = initialize(directory, hosts, days=days, can_sign=not no_signing)
    managers = format_managers(hosts) if made.has_new_authority else find_managers(directory)
    for node in made.made:
        settings = NodeSettings(
            node=node, hosts=hosts[node], managers=managers, is_manager=made.has_new_authority or not managers
        )
        write_settings(node_directory(directory, node), settings)
    _print_made(made, hosts, directory)


def _print_made(made: MadeFiles, hosts: Mapping[int, Sequence[str]], directory: str) -> None:
    if made.has_new_authority:
        click.echo(f"made the authority in {directory}; keep ca.key there: its holder can pose as any node")
    for node in made.kept:
        click.echo(f"kept {node_directory(directory, node)}: it exists; quiver security renew replaces its certificate")
    for node in made.made:
        click.echo(f"made {node_directory(directory, node)}: node.pem, node.key, {SETTINGS_NAME}")
    if made.made:
        click.echo(f"copy each to its host as {DIRECTORY}, which must not exist there, such as:")
    for node in made.made:
        click.echo(f"  scp -r {shlex.quote(node_directory(directory, node))} root@{hosts[node][0]}:{DIRECTORY}")
    click.echo(f"start each: quiver node --settings-file {DIRECTORY}/{SETTINGS_NAME}")
    if made.has_new_authority:
        urls = " ".join(f"https://{format_address((names[0], HTTP_PORT))}" for names in hosts.values())
        files = [shlex.quote(f"{directory}/{name}") for name in (CA_NAME, TOKEN_NAME)]
        click.echo("then, as the administrator:")
        click.echo(f"  quiver context add prod {urls} --ca-file {files[0]} --token-file {files[1]} --use")


@security.command(
    epilog=examples(
        "quiver security renew /etc/quiver/node.pem",
        "quiver security renew node-4.pem --directory ./quiver-security",
        "quiver security renew /etc/quiver/node.pem --host broker-1.example.com",
    )
)
@click.argument(
    "certificates", metavar="CERTIFICATE...", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False)
)
@click.option("--directory", help="Directory with ca.pem and ca.key.  [default: that of the certificate]")
@click.option(
    "--days", type=click.IntRange(1, 3650), default=NODE_DAYS, show_default=True, help="Validity of certificates."
)
@click.option(
    "--host", "hosts", metavar="NAME", multiple=True, help="Further name or address at which the node is dialled."
)
def renew(certificates: tuple[str, ...], *, directory: str | None, days: int, hosts: tuple[str, ...]) -> None:
    """Replace each CERTIFICATE of a node by one that is valid for longer; key and hosts stay.

    It needs the key of the authority: run it on a manager, or where `quiver security init` ran. A node reloads its
    certificate within ten seconds.
    """
    if hosts and len(certificates) > 1:
        raise RequestError("not done: --host is for one node: name one certificate", code="bad_node")
    for path in certificates:
        own = directory or os.path.dirname(path) or "."
        renew_certificate(path, load_authority(f"{own}/{CA_NAME}", f"{own}/{CA_KEY_NAME}"), days=days, hosts=hosts)
        expires = format_time(int(expiry_s(read_text(path)) * 1000))
        click.echo(f"renewed {path}, expires: {expires}; the node that has it reloads it")


@security.command(
    "join-token",
    epilog=examples(
        "quiver security join-token 4@10.0.0.4 --out join.token",
        "quiver security join-token 5@broker-5,10.0.0.5 --out join.token",
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
    if "@" not in node:
        raise RequestError(f"not done: {node!r} has no id: give ID@HOST, with an id that no node had", code="bad_node")
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
        voters = [one for one in cluster.managers().managers if one.is_voter]
        managers = ",".join(f"{one.node}@{one.wire_address}" for one in voters)
        joining = JoiningNode(node=number, hosts=tuple(hosts), cluster=cluster.cluster_id, managers=managers)
    write_secret(output, format_join_token(JoinToken(authority=authority, token=token.secret, joining=joining)))
    click.echo(f"wrote {output}: copy it to the new host, and run there:")
    click.echo(f"  quiver security join {shlex.quote(os.path.basename(output))} --directory {DIRECTORY}")


@security.command(epilog="Example: quiver security join join.token --directory /etc/quiver")
@click.argument("token_file")
@click.option("--directory", default=DIRECTORY, show_default=True, help="Directory to make for the node.")
def join(*, token_file: str, directory: str) -> None:
    """Get the certificate and the settings of this new node with the join token in TOKEN_FILE.

    The private key is made here and never sent. Nothing is sent to a host that does not prove to belong to the cluster
    that made the token.
    """
    token = parse_join_token(read_secret(token_file))
    check_directory(directory)  # first: the token works once
    key = make_key()
    signed = asyncio.run(_ask_to_sign(token, make_request(key, 0)))
    save_node(directory, key=key, certificate=signed.certificate, authority=signed.authority)
    joining = token.joining
    settings = NodeSettings(
        node=joining.node,
        hosts=joining.hosts,
        managers=joining.managers,
        cluster=joining.cluster,
        directory=os.path.abspath(directory),
        is_manager=False,
    )
    write_settings(directory, settings)
    click.echo(f"made {directory}; {token_file} is used up. Start the node, as the user who owns {directory}:")
    click.echo(f"  quiver node --settings-file {shlex.quote(f'{directory}/{SETTINGS_NAME}')}")


async def _ask_to_sign(token: JoinToken, csr: str) -> NodeSigned:
    """Ask the managers, one after the other, until one answers: each forwards to the primary."""
    addresses = [manager.partition("@")[2] for manager in token.joining.managers.split(",")]
    with NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(token.authority)
        file.flush()
        tls = TlsSettings(is_enabled=True, ca_file=file.name)
        source = TokenSource(token.token)
        async with RequestPool(name="quiver security join", tls=tls, credentials=source) as pool:
            for at, address in enumerate(addresses, start=1):
                try:
                    signed, _ = await pool.call(address, SignNode(csr=csr), timeout_ms=JOIN_TIMEOUT_MS)
                    break
                except UnavailableError:  # not done there
                    if at == len(addresses):
                        raise
    if fingerprint(signed.authority) != fingerprint(token.authority):
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
