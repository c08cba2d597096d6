"""The settings of an identity provider whose tokens (JWT) nodes accept. Pure."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from quiver.addresses import is_loopback
from quiver.errors import ConfigError

_NAME_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,98}")
"""What the name of a user, which has 100 characters at most, can begin with."""


class OidcSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tokens of an OpenID Connect provider."""

    issuer: Annotated[
        str,
        Meta(
            description="Issuer whose tokens are accepted, exactly as in their claim `iss`, such as "
            "`https://login.example.com/realms/main`. Empty: only the cluster's own tokens are. Needs "
            "`pip install 'quivermq[oidc]'`; the same on all nodes."
        ),
    ] = ""
    audience: Annotated[
        str,
        Meta(description="What the claim `aud` of a token must name: the id by which the provider knows this cluster."),
    ] = ""
    jwks_file: Annotated[
        str, Meta(description="File with the provider's public keys (JWKS); read again when it changes.")
    ] = ""
    jwks_url: Annotated[
        str,
        Meta(
            description="URL of the provider's public keys (JWKS), instead of jwks_file: `https://`, or `http://` on "
            "this machine. While it cannot be read, the keys that were read last stay in use."
        ),
    ] = ""
    ca_file: Annotated[
        str,
        Meta(description="PEM file with the authorities that verify the server of jwks_url; empty: the system's."),
    ] = ""
    refresh_ms: Annotated[
        int,
        Meta(
            ge=1_000,
            le=86_400_000,
            description="Interval at which the keys are read. A token with an unknown key has them read at once, at "
            "most every 30 s.",
        ),
    ] = 600_000
    name_claim: Annotated[
        str, Meta(description="Claim that names the user; one that users cannot choose for themselves.")
    ] = "sub"
    name_prefix: Annotated[
        str,
        Meta(
            description="Put before that name, so that no name of the provider is that of another user. Empty: the "
            "provider can name every user of the cluster, the administrator included."
        ),
    ] = "oidc."
    roles_claim: Annotated[
        str,
        Meta(
            description="Claim that lists roles, with dots between the names of nested objects, such as "
            "`realm_access.roles`. Empty: users have the roles that the cluster gives them."
        ),
    ] = ""
    roles_prefix: Annotated[
        str,
        Meta(
            description="Begins the values of roles_claim that name roles of the cluster, and is removed: "
            "`quiver-ops` gives the role `ops`, if it exists. Others are ignored."
        ),
    ] = "quiver-"

    def __post_init__(self) -> None:
        if not self.issuer:
            if self.audience or self.jwks_file or self.jwks_url:
                raise ConfigError("oidc.issuer is not set, but other settings of oidc are: set it, or none")
            return
        if not self.audience:
            raise ConfigError("oidc.audience is not set: without it, tokens for other services would be accepted")
        if bool(self.jwks_file) == bool(self.jwks_url):
            raise ConfigError("set one of oidc.jwks_file and oidc.jwks_url: the keys that sign the provider's tokens")
        if self.jwks_url:
            _check_url(self.jwks_url)
        if not self.name_claim:
            raise ConfigError("oidc.name_claim is empty: name the claim that names the user, such as sub")
        if self.name_prefix and not _NAME_PREFIX.fullmatch(self.name_prefix):
            raise ConfigError(
                f"oidc.name_prefix {self.name_prefix[:80]!r} cannot begin the name of a user: use letters, digits and "
                "._@- only, a letter or digit first"
            )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host, port, scheme = parts.hostname, parts.port, parts.scheme
    except ValueError:
        host, port, scheme, parts = None, None, "", urlsplit("")
    if not host or port == 0 or scheme not in ("http", "https") or parts.fragment:
        raise ConfigError("oidc.jwks_url is not a URL: write https://host/path")
    if parts.username is not None or parts.password is not None:  # not repeated: it is a secret
        raise ConfigError("oidc.jwks_url holds a user name or password, which is not supported")
    if scheme == "http" and not is_loopback(host):
        raise ConfigError(
            f"oidc.jwks_url is plain text, and {host} is another machine: whoever is in between could replace the "
            "keys; write https://"
        )
