"""Join tokens: with one, a new node gets its certificate from the primary, once. Pure.

A join token is the token of a user who may do one thing, to get the certificate of one node, and whose name says of
which: `join-4@10.0.0.4`. So it is stored as a hash, replicated, and expires, as every token; and it works once, because
the primary deletes the user before it returns the certificate. The text that an operator copies to the new host also
has the certificate of the authority, so that the host never talks to anybody else:

    qvj_<authority's certificate, DER in base64url>.<token>
"""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Sequence
from typing import Final

from quiver.errors import NotAllowedError, RequestError
from quiver.security.secrets import Secret
from quiver.security.tokens import parse_token

USER_PREFIX: Final = "join-"
TEXT_PREFIX: Final = "qvj_"
NAME_LENGTH_MAX: Final = 100
_USER: Final = re.compile(rf"{USER_PREFIX}([1-9][0-9]{{0,9}})((?:@[A-Za-z0-9._-]+)+)")


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


def format_join_token(authority: str, token: Secret) -> Secret:
    """Return the text of a join token; `authority` is the authority's certificate as PEM."""
    der = base64.urlsafe_b64encode(ssl.PEM_cert_to_DER_cert(authority)).decode().rstrip("=")
    return Secret(f"{TEXT_PREFIX}{der}.{token.reveal()}")


def parse_join_token(text: Secret) -> tuple[str, Secret]:
    """Return the authority's certificate as PEM, and the token.

    Raises:
        RequestError: the text is no join token; the message does not repeat it.
    """
    encoded, dot, token = text.reveal().strip().removeprefix(TEXT_PREFIX).partition(".")
    try:
        if not dot or not text.reveal().strip().startswith(TEXT_PREFIX):
            raise ValueError
        der = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        return ssl.DER_cert_to_PEM_cert(der), Secret(parse_token(token).text)
    except (ValueError, RequestError):
        raise RequestError("not a join token: make one with quiver security join-token", code="bad_token") from None
