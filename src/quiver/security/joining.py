"""Join tokens: with one, a new node gets its certificate from the primary, once. Pure.

A join token is the token of a user who may do one thing, to get the certificate of one node, and whose name says of
which: `join-4@10.0.0.4`. So it is stored as a hash, replicated, and expires, as every token; and it works once, because
the primary deletes the user before it returns the certificate. The text that an operator copies to the new host also
has the certificate of the authority, so that the host never talks to anybody else, and what the host's settings need:

    qvj_<authority's certificate, DER in base64url>.<token>.<node, hosts, cluster and managers, JSON in base64url>
"""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Sequence
from typing import Final

import msgspec

from quiver.errors import NotAllowedError, RequestError
from quiver.security.secrets import Secret
from quiver.security.tokens import parse_token

USER_PREFIX: Final = "join-"
TEXT_PREFIX: Final = "qvj_"
NAME_LENGTH_MAX: Final = 100
_USER: Final = re.compile(rf"{USER_PREFIX}([1-9][0-9]{{0,9}})((?:@[A-Za-z0-9._-]+)+)")


class JoiningNode(msgspec.Struct, frozen=True, kw_only=True):
    """The node that a join token is for, and where it finds the cluster. Nothing of it is secret."""

    node: int
    hosts: tuple[str, ...]
    cluster: str
    managers: str
    """As in `node.join`."""


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator copies to a new host."""

    authority: str
    """The authority's certificate, as PEM."""
    token: Secret
    joining: JoiningNode


def join_user(node: int, hosts: Sequence[str]) -> str:
    """Return the name of the user whose token gets the certificate of a node with these hosts.

    Raises:
        RequestError: the hosts do not fit into a name.
    """
    name = f"{USER_PREFIX}{node}@{'@'.join(hosts)}"
    if not _USER.fullmatch(name) or len(name) > NAME_LENGTH_MAX:
        raise RequestError(
            f"a join token has a node's id and a few host names or IPv4 addresses, {NAME_LENGTH_MAX} characters in "
            "all; for others, make the certificate with quiver security init",
            code="bad_node",
        )
    return name


def parse_join_user(principal: str) -> tuple[str, int, list[str]]:
    """Return the user of a join token, its node and its hosts, from a principal such as `user:join-4@10.0.0.4`.

    Raises:
        NotAllowedError: the principal has no join token.
    """
    user = principal.removeprefix("user:")
    match = _USER.fullmatch(user)
    if match is None or user == principal:
        raise NotAllowedError("not done: a certificate is signed for the holder of a join token only")
    return user, int(match[1]), match[2].split("@")[1:]


def format_join_token(token: JoinToken) -> Secret:
    """Return the text of a join token."""
    authority = _encode(ssl.PEM_cert_to_DER_cert(token.authority))
    return Secret(f"{TEXT_PREFIX}{authority}.{token.token.reveal()}.{_encode(msgspec.json.encode(token.joining))}")


def parse_join_token(text: Secret) -> JoinToken:
    """Return what the text of a join token says.

    Raises:
        RequestError: the text is no join token; the message does not repeat it.
    """
    try:
        if not text.reveal().strip().startswith(TEXT_PREFIX):
            raise ValueError
        authority, token, joining = text.reveal().strip().removeprefix(TEXT_PREFIX).split(".")
        return JoinToken(
            authority=ssl.DER_cert_to_PEM_cert(_decode(authority)),
            token=Secret(parse_token(token).text),
            joining=msgspec.json.decode(_decode(joining), type=JoiningNode),
        )
    except (ValueError, RequestError):
        raise RequestError("not a join token: make one with quiver security join-token", code="bad_token") from None


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
