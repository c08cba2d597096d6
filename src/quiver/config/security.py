"""The settings of security, and the rule that decides how a node is protected. Pure.

Development mode is a rule about addresses: a node that only its own machine can reach needs no credentials. A node that
other machines can reach starts with TLS and credentials, or not at all, unless its operator says `insecure`. Nothing
else in the program looks at addresses to decide what is allowed: it asks for the `SecurityMode`.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from quiver.addresses import is_loopback, parse_address
from quiver.errors import ConfigError
from quiver.security.files import ADMIN_NAME, CA_KEY_NAME, CA_NAME, CERTIFICATE_NAME, KEY_NAME

if TYPE_CHECKING:
    from quiver.config.settings import Settings


class SecurityMode(StrEnum):
    """How a node is protected."""

    DEVELOPMENT = "development"
    """Only this machine reaches it: no credentials. Nodes prove to each other that one user started them."""
    SECURE = "secure"
    """TLS everywhere, nodes have certificates, everybody else needs credentials."""
    INSECURE = "insecure"
    """The operator gave up protection: whoever reaches a port may do everything."""


class NodeProof(StrEnum):
    """What shows that the sender of a node's hello is that node."""

    CERTIFICATE = "certificate"
    """A certificate that names it."""
    SECRET = "secret"  # noqa: S105 - a name
    """A secret that the nodes of one user on one machine share."""
    NONE = "none"
    """Nothing: its word is enough."""


class SecuritySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Protection of the node."""

    mode: Annotated[
        Literal["auto", "secure", "insecure"],
        Meta(
            description="`auto` needs no credentials while every address of the node is a loopback address, and is "
            "`secure` otherwise. `secure` refuses to start without TLS and credentials. `insecure` lets everybody who "
            "can reach a port do everything; for closed networks only, and shown in `quiver status`."
        ),
    ] = "auto"
    directory: Annotated[
        str,
        Meta(
            description="Directory of this node that `quiver security init` or `quiver security join` made. It turns "
            "TLS on, with its ca.pem, node.pem and node.key, and gives admin_file and ca_key_file, as far as these "
            "are not set."
        ),
    ] = ""
    admin_file: Annotated[
        str,
        Meta(
            description="File with the id and the hash of the first administrator's token. The managers that form the "
            "cluster need it; afterwards it is not read."
        ),
    ] = ""
    ca_key_file: Annotated[
        str,
        Meta(
            description="PEM file with the key of the certificate authority, on managers only: with it, the primary "
            "signs the certificates of new nodes. Without it, sign them where the key is, with `quiver security init`."
        ),
    ] = ""
    node_secret_file: Annotated[
        str,
        Meta(
            description="File with the secret by which nodes without certificates prove that they belong together; "
            "it is created if it is missing. Empty in development mode: one file for all nodes of the user."
        ),
    ] = ""


class AuditSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log of authentications, denials and administrative changes."""

    file: Annotated[
        str,
        Meta(
            description="File of JSON lines, one for each event, readable by its owner alone. Empty: `audit.log` in "
            "the data directory of a secure node, and none otherwise."
        ),
    ] = ""
    file_bytes_max: Annotated[
        int,
        Meta(
            ge=1_024,
            le=2**40,
            description="Bytes of the file at which it is renamed to `.1` and another one begins.",
        ),
    ] = 64 * 1024 * 1024
    files_max: Annotated[int, Meta(ge=1, le=1_000, description="Files that are kept, the current one included.")] = 10


def complete(settings: Settings) -> Settings:
    """Return settings in which the files of `security.directory` are named, where nothing else was."""
    directory = settings.security.directory
    if not directory:
        return settings
    tls, security = settings.tls, settings.security
    has_own = bool(tls.certificate_file)  # a certificate and its key belong together
    return msgspec.structs.replace(
        settings,
        tls=msgspec.structs.replace(
            tls,
            is_enabled=True,
            certificate_file=tls.certificate_file or f"{directory}/{CERTIFICATE_NAME}",
            key_file=tls.key_file if has_own else f"{directory}/{KEY_NAME}",
            ca_file=tls.ca_file or f"{directory}/{CA_NAME}",
        ),
        security=msgspec.structs.replace(
            security,
            admin_file=security.admin_file or f"{directory}/{ADMIN_NAME}",
            ca_key_file=security.ca_key_file or f"{directory}/{CA_KEY_NAME}",
        ),
    )


def decide_mode(settings: Settings) -> SecurityMode:
    """Return how a node with these settings is protected.

    Raises:
        ConfigError: it must be secure, and something is missing for that; the message has the command that makes it.
    """
    if settings.security.mode == "insecure":
        return SecurityMode.INSECURE
    exposed = next(list_exposed(settings), "")
    if settings.security.mode == "auto" and not exposed:
        return SecurityMode.DEVELOPMENT
    missing = next(_list_missing(settings), "")
    if missing:
        reason = exposed or "security.mode is secure"
        raise ConfigError(
            f"{reason}, but {missing}: run `{init_command(settings)}` and set security.directory on each node, or pass "
            "--insecure if only trusted machines reach it",
            code="not_secure",
        )
    return SecurityMode.SECURE


def decide_proof(settings: Settings) -> NodeProof:
    """Return what the nodes of this cluster must show to each other; raises as `decide_mode` does."""
    mode = decide_mode(settings)
    if settings.tls.is_enabled and settings.tls.client_certificates != "none":
        return NodeProof.CERTIFICATE
    if mode is SecurityMode.DEVELOPMENT or settings.security.node_secret_file:
        return NodeProof.SECRET
    return NodeProof.NONE


def list_exposed(settings: Settings) -> Iterator[str]:
    """Yield a claim for each address of a node that is not a loopback address."""
    node = settings.node
    for key, address in (("node.wire", node.wire), *_http_addresses(settings)):
        if not is_loopback(parse_address(address)[0]):
            yield f"{key} is {address}, which other machines can reach"
    if node.advertise and not is_loopback(node.advertise):
        yield f"node.advertise is {node.advertise}, which other machines can reach"
    for address in node.managers.values():
        if not is_loopback(parse_address(address)[0]):
            yield f"node.join names {address}, which is on another machine"


def _http_addresses(settings: Settings) -> list[tuple[str, str]]:
    """Return the addresses at which HTTP is served, with their keys."""
    node, gateway = settings.node, settings.gateway
    found = [("node.http", node.http), ("gateway.admin_listen", gateway.admin_listen)]
    return [(key, address) for key, address in found if address and "gateway" in node.role_names]


def _list_missing(settings: Settings) -> Iterator[str]:
    tls, node = settings.tls, settings.node
    if not tls.is_enabled or not tls.certificate_file:
        yield "the node has no certificate"
    if tls.client_certificates == "none":
        yield "tls.client_certificates is none, so that anybody could pose as a node"
    is_http_exposed = any(not is_loopback(parse_address(address)[0]) for _, address in _http_addresses(settings))
    if is_http_exposed and not settings.gateway.serves_https(tls):
        yield "gateway.tls is off, so that tokens would travel in plain text"
    if node.id in node.managers and not settings.security.admin_file:
        yield "security.admin_file is not set, so that nobody could administer the cluster"


def init_command(settings: Settings) -> str:
    """Return the command that makes the certificates and the token that a cluster with these managers needs."""
    node = settings.node
    hosts = {number: parse_address(address)[0] for number, address in node.managers.items()}
    if not node.join or node.id not in hosts:
        hosts[node.id] = node.advertise or parse_address(node.wire)[0]
    hosts = {number: "HOST" if host in ("0.0.0.0", "::") else host for number, host in hosts.items()}  # noqa: S104
    return " ".join(("quiver security init", *(f"{number}@{host}" for number, host in sorted(hosts.items()) if number)))
