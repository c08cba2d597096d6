"""Authentication: find out who a connection speaks for, by token, by password (SCRAM) or by certificate.

An unknown id, a wrong secret, an expired token and a disabled user get the same answer at the same cost. Failures are
limited per host with a token bucket: when it is empty, nothing is checked. Every attempt is in the audit log.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from quiver.access.audit import AuditEvent, AuditLog
from quiver.access.first_admin import is_missing
from quiver.addresses import parse_address
from quiver.clock import Clock
from quiver.errors import NotAllowedError, OverloadedError, RequestError, UnavailableError
from quiver.metadata import View
from quiver.security.identity import ConnectionIdentity, Credential
from quiver.security.permissions import Permissions
from quiver.security.principal import ANONYMOUS, Principal, user_principal
from quiver.security.scram import ScramServer, decoy_verifier
from quiver.security.tokens import HASH_LENGTH, Token, matches, parse_token
from quiver.wire.requests import Request
from quiver.wire.security_messages import Authenticate, Authenticated, BeginScram, FinishScram, ScramChallenge
from quiver.wire.serving import Answer, Caller, RequestHandler

FAILURES_MAX = 10
"""Failures of one host in a row that are checked at full speed."""
FAILURES_PER_S = 1.0
"""Failures of one host that are checked in the long run."""
HOSTS_MAX = 10_000
"""Hosts whose failures are counted; beyond it, counting begins again."""
IDENTITIES_MAX = 4_096
"""Identities of HTTP requests that are cached; beyond it, they begin again."""
_NO_HASH = "0" * HASH_LENGTH
_NO_TOKEN = Token("", "0" * HASH_LENGTH, "")


class Authenticator:
    """Authenticate connections by this node's copy of the metadata."""

    def __init__(self, *, view: Callable[[], View], clock: Clock, audit: AuditLog, is_open: bool = True) -> None:
        self._view = view
        self._is_open = is_open
        """Whether nobody needs to authenticate; otherwise there are users, or this node does not know them yet."""
        self._clock = clock
        self._audit = audit
        self._decoy_secret = secrets.token_bytes(32)
        self._failures: dict[str, tuple[float, int]] = {}
        """By host, the failures that still count, and since when."""
        self._identities: dict[bytes, ConnectionIdentity] = {}
        """By the hash of an HTTP header and the host; the access control checks their credentials again."""
        self._principals: dict[bytes, Principal] = {}
        """By the hash of an HTTP header: those of `_identities`."""

    def handlers(self) -> dict[type[Request[Any]], RequestHandler]:
        """Return the handlers of the requests for authentication, for `dispatch`."""
        return {Authenticate: self._authenticate, BeginScram: self._begin_scram, FinishScram: self._finish_scram}

    # -- on the wire -----------------------------------------------------------------------------

    async def _authenticate(self, caller: Caller, request: Authenticate, _: memoryview) -> Answer:
        principal, credential = self.check_token(request.token, address=caller.address)
        _become(caller.identity, principal, credential)
        return Authenticated(principal=str(principal), expires_ms=credential.expires_ms), ()

    async def _begin_scram(self, caller: Caller, request: BeginScram, _: memoryview) -> Answer:
        self._require_patience(caller.address)
        exchange = ScramServer(request.message, nonce=secrets.token_urlsafe(18))
        user = self._view().users.get(exchange.user)
        verifier = user.verifier if user is not None else None
        caller.identity.scram = exchange
        return ScramChallenge(
            message=exchange.challenge(verifier or decoy_verifier(exchange.user, self._decoy_secret))
        ), ()

    async def _finish_scram(self, caller: Caller, request: FinishScram, _: memoryview) -> Answer:
        self._require_patience(caller.address)
        exchange, caller.identity.scram = caller.identity.scram, None
        if exchange is None:
            raise RequestError("not done: begin_scram comes before finish_scram", code="bad_scram")
        answer = exchange.finish(request.message)
        user = self._view().users.get(exchange.user)
        if answer is None or user is None or user.verifier is None or not user.is_enabled:
            raise self._fail(caller.address, "scram", exchange.user)
        if user.verifier != exchange.verifier:  # the password was changed since: the proof is of the old one
            raise self._fail(caller.address, "scram", exchange.user)
        principal = user_principal(user.name)
        credential = Credential(kind="scram", stamp=user.verifier.stored_key)
        self._succeed(caller.address, principal, credential)
        _become(caller.identity, principal, credential)
        return Authenticated(principal=str(principal), message=answer), ()

    # -- tokens ----------------------------------------------------------------------------------

    def check_token(self, text: str, *, address: str) -> tuple[Principal, Credential]:
        """Return who a token belongs to.

        Raises:
            NotAllowedError: it is not valid (`unauthenticated`).
            OverloadedError: too many failures from this host; not checked.
            UnavailableError: this node does not know who there is yet; not checked.
        """
        self._require_patience(address)
        try:
            token = parse_token(text)
        except RequestError:
            token = _NO_TOKEN  # checked like any other, so that it costs the same
        view = self._view()
        row = view.tokens.get(token.id)
        is_right = matches(token.secret, _NO_HASH if row is None else row.secret_hash)
        user = None if row is None else view.users.get(row.user)
        if row is None or user is None or not is_right or not user.is_enabled:
            raise self._fail(address, "token", token.id)
        if row.expires_ms is not None and row.expires_ms <= self._clock.wall_ms():
            raise self._fail(address, "token", token.id)
        principal = user_principal(user.name)
        credential = Credential(kind="token", id=row.token_id, stamp=row.secret_hash, expires_ms=row.expires_ms)
        self._succeed(address, principal, credential)
        return principal, credential

    # -- HTTP and certificates -------------------------------------------------------------------

    def identify_http(self, authorization: bytes | None, connection: ConnectionIdentity) -> ConnectionIdentity:
        """Return the identity of an HTTP request by its `Authorization` header, else that of its connection.

        It is cached by header and host.

        Raises:
            NotAllowedError: the header is not a valid bearer token (`unauthenticated`).
            OverloadedError: too many failures from this host; not checked.
            UnavailableError: this node does not know who there is yet; not checked.
        """
        if authorization is None:
            return connection
        address = connection.address
        host = address.rpartition(":")[0]  # a part of the cache's key: it needs no parsing
        header = hashlib.sha256(authorization).digest()
        key = header + host.encode()
        known = self._identities.get(key)
        if known is not None:
            return known
        scheme, _, text = authorization.decode("latin-1").partition(" ")
        principal, credential = self.check_token(text if scheme.lower() == "bearer" else "", address=address)
        identity = ConnectionIdentity(address=address)
        _become(identity, principal, credential)
        if len(self._identities) >= IDENTITIES_MAX:
            self._identities.clear()
            self._principals.clear()
        self._identities[key], self._principals[header] = identity, principal
        return identity

    def principal_of(self, authorization: bytes | None, connection: ConnectionIdentity) -> Principal:
        """Return the principal of an `Authorization` header that was valid before; anonymous for any other.

        Without a header it is the principal of the connection.
        """
        if authorization is None:
            return connection.principal
        return self._principals.get(hashlib.sha256(authorization).digest(), ANONYMOUS)

    # -- failures --------------------------------------------------------------------------------

    def _require_patience(self, address: str) -> None:
        if not self._is_open and is_missing(self._view()):
            raise UnavailableError(
                "not done: this node does not know the cluster's users yet, or the first administrator was not created "
                "yet (security.admin_file); retry",
                code="not_ready",
            )
        host, now_ms = _host(address), self._clock.monotonic_ms()
        count, since_ms = self._failures.get(host, (0.0, now_ms))
        count -= (now_ms - since_ms) / 1000 * FAILURES_PER_S
        if count >= FAILURES_MAX:
            wait_ms = int((count - FAILURES_MAX + 1) / FAILURES_PER_S * 1000)
            raise OverloadedError(
                f"not done: too many failed authentications from {host}; wait",
                code="too_many_failures",
                retry_after_ms=wait_ms,
            )

    def _fail(self, address: str, kind: str, detail: str) -> NotAllowedError:
        host, now_ms = _host(address), self._clock.monotonic_ms()
        count, since_ms = self._failures.get(host, (0.0, now_ms))
        if len(self._failures) >= HOSTS_MAX:
            self._failures.clear()
        self._failures[host] = (max(0.0, count - (now_ms - since_ms) / 1000 * FAILURES_PER_S) + 1, now_ms)
        self._audit.record(
            AuditEvent(
                kind="authentication",
                address=address,
                outcome="unauthenticated",
                detail=f"{kind} {detail[:64]}".strip(),
            )
        )
        return NotAllowedError(
            "not done: the credentials are not valid: unknown, wrong, expired or revoked", code="unauthenticated"
        )

    def _succeed(self, address: str, principal: Principal, credential: Credential) -> None:
        detail = f"{credential.kind} {credential.id}".strip()
        self._audit.record(
            AuditEvent(kind="authentication", principal=str(principal), address=address, outcome="done", detail=detail)
        )


def _become(identity: ConnectionIdentity, principal: Principal, credential: Credential) -> None:
    identity.principal, identity.credential = principal, credential
    # Not None: a request that is under way may ask for them, and must not get more than it was let in with.
    identity.permissions, identity.version = Permissions(principal, ()), None


def _host(address: str) -> str:
    try:
        return parse_address(address)[0]
    except RequestError:
        return address
