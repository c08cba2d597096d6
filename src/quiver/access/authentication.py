"""Authentication: find out who a connection speaks for, by token, by password (SCRAM) or by certificate.

An unknown id, a wrong secret, an expired token and a disabled user get the same answer at the same cost. A token that
is not one of the cluster's is one of its identity provider, if it has one: the answer says what is wrong with it, since
its holder can read it. Failures are limited per host with a token bucket: when it is empty, nothing is checked. Every
attempt is in the audit log.

A token that this node does not accept may be one that it has not applied yet: it catches up with the primary before it
refuses one (`SharedCatchUp`), whatever is wrong with it, so that the time tells nothing. Until then it counts as a
failure of its host.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quiver.access.audit import AUTHENTICATE, AuditEvent, AuditLog
from quiver.access.first_admin import is_missing
from quiver.access.json_web_tokens import BadJwtError, UnknownKeyError
from quiver.access.provider import IdentityProvider
from quiver.access.shared_catch_up import SharedCatchUp
from quiver.addresses import parse_address
from quiver.clock import Clock
from quiver.errors import NotAllowedError, OverloadedError, RequestError, UnavailableError
from quiver.metadata import View
from quiver.security.identity import ConnectionIdentity, Credential
from quiver.security.permissions import Permissions
from quiver.security.principal import ANONYMOUS, Principal, user_principal
from quiver.security.scram import ScramServer, ScramVerifier, decoy_verifier
from quiver.security.tokens import HASH_LENGTH, TOKEN_PREFIX, Token, matches, parse_token
from quiver.tasks import timeout
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
KEYS_UNKNOWN = "keys_unknown"
"""Code of a refusal while the keys of the identity provider are read."""
_NO_TOKEN = Token("", "0" * HASH_LENGTH, "")


class UnappliedTokenError(NotAllowedError):
    """A token is not accepted by what this node knows now: catch up, then check it again."""


class Authenticator:
    """Authenticate connections by this node's copy of the metadata."""

    def __init__(
        self,
        *,
        view: Callable[[], View],
        clock: Clock,
        audit: AuditLog,
        is_open: bool = True,
        provider: IdentityProvider | None = None,
        catch_up: SharedCatchUp | None = None,
    ) -> None:
        self._provider = provider
        self._shared_catch_up = catch_up
        if provider is not None:
            provider.on_change = self._forget
        self._view = view
        self._is_open = is_open
        """Whether nobody needs to authenticate; otherwise there are users, or this node does not know them yet."""
        self._clock = clock
        self._audit = audit
        self._decoy_secret = secrets.token_bytes(32)
        self._decoys_of: object = None
        """The users, tokens and grants for which `_decoy_secret` was made."""
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
        identity, request_id = caller.identity, str(caller.correlation_id or "")
        try:
            self._log_in(identity, request.token, request_id, is_final=False)
        except UnappliedTokenError:
            await self.catch_up(caller.address)
            self._log_in(identity, request.token, request_id)
        except UnavailableError as error:
            if self._provider is None or error.code != KEYS_UNKNOWN:
                raise
            with suppress(TimeoutError):
                async with timeout(caller.wait_ms(self._clock.monotonic_ms()) / 1_000):
                    await self._provider.wait_read()
            self._log_in(identity, request.token, request_id)
        expires_ms = None if identity.credential is None else identity.credential.expires_ms
        return Authenticated(principal=str(identity.principal), expires_ms=expires_ms), ()

    async def _begin_scram(self, caller: Caller, request: BeginScram, _: memoryview) -> Answer:
        self._require_patience(caller.address)
        exchange = ScramServer(request.message, nonce=secrets.token_urlsafe(18))
        user = self._view().users.get(exchange.user)
        verifier = user.verifier if user is not None else None
        caller.identity.scram = exchange
        return ScramChallenge(message=exchange.challenge(verifier or self._decoy(exchange.user))), ()

    async def _finish_scram(self, caller: Caller, request: FinishScram, _: memoryview) -> Answer:
        self._require_patience(caller.address)
        request_id = str(caller.correlation_id or "")
        exchange, caller.identity.scram = caller.identity.scram, None
        if exchange is None:
            raise RequestError("not done: begin_scram comes before finish_scram", code="bad_scram")
        answer = exchange.finish(request.message)
        user = self._view().users.get(exchange.user)
        if answer is None or user is None or user.verifier is None or not user.is_enabled:
            raise self._fail(caller.address, "scram", exchange.user, request_id=request_id)
        if user.verifier != exchange.verifier:  # the password was changed since: the proof is of the old one
            raise self._fail(caller.address, "scram", exchange.user, request_id=request_id)
        principal = user_principal(user.name)
        credential = Credential(kind="scram", stamp=user.verifier.stored_key)
        self._succeed(caller.address, principal, credential, request_id)
        _become(caller.identity, principal, credential)
        return Authenticated(principal=str(principal), message=answer), ()

    def _decoy(self, user: str) -> ScramVerifier:
        """Return what a user without a password is challenged with: the same on all nodes, and after a restart.

        Otherwise a name whose salt differs between two nodes would be one that does not exist. The secret of it is what
        the cluster stores of the credentials of its first user, which nobody but administrators could know.
        """
        view = self._view()
        if self._decoys_of is not view.access:
            self._decoys_of = view.access
            first = min(view.users.values(), key=lambda one: (one.created_ms, one.name), default=None)
            if first is not None:
                stored = sorted(one.secret_hash for one in view.tokens.values() if one.user == first.name)
                stored += [] if first.verifier is None else [first.verifier.server_key]
                if stored:
                    self._decoy_secret = hashlib.sha256("\n".join(("decoy", *stored)).encode()).digest()
        return decoy_verifier(user, self._decoy_secret)

    # -- tokens ----------------------------------------------------------------------------------

    async def catch_up(self, address: str) -> None:
        """Wait, within bounds, until this node has applied the tokens that there are now.

        The token for which it waits counts as a failure of its host meanwhile: many tokens at a time are limited as
        many in a row are.
        """
        if self._shared_catch_up is None:
            return
        self._count_failures(address, 1)
        try:
            await self._shared_catch_up.wait()
        finally:
            self._count_failures(address, -1)

    def _log_in(self, identity: ConnectionIdentity, text: str, request_id: str, *, is_final: bool = True) -> None:
        """Make a connection speak for whom a token belongs to; raises as `check_token` and `check_jwt` do."""
        if self._provider is not None and not text.startswith(TOKEN_PREFIX):
            principal, credential, roles = self.check_jwt(
                self._provider, text, address=identity.address, request_id=request_id
            )
            _become(identity, principal, credential, roles)
        else:
            principal, credential = self.check_token(
                text, address=identity.address, request_id=request_id, is_final=is_final
            )
            _become(identity, principal, credential)

    def check_jwt(
        self, provider: IdentityProvider, text: str, *, address: str, request_id: str = ""
    ) -> tuple[Principal, Credential, tuple[str, ...]]:
        """Return who a token of the identity provider belongs to, and the roles that it gives.

        Raises:
            NotAllowedError: it is not valid (`unauthenticated`).
            OverloadedError: too many failures from this host; not checked.
            UnavailableError: the keys of the provider are not known yet.
        """
        self._require_patience(address)
        try:
            claims = provider.check(text)
        except BadJwtError as error:
            if isinstance(error, UnknownKeyError) and (provider.is_reading or not provider.has_keys):
                raise UnavailableError(
                    "not done: the keys of the identity provider are not known yet; retry", code=KEYS_UNKNOWN
                ) from None
            sentence = f"not done: the token of the identity provider is not valid: {error}"
            raise self._fail(address, "oidc", str(error), sentence, request_id=request_id) from None
        user = self._view().users.get(claims.user)
        if user is not None and not user.is_enabled:
            raise self._fail(address, "oidc", claims.user, request_id=request_id)
        principal = user_principal(claims.user)
        credential = Credential(kind="oidc", id=claims.key_id[:64], expires_ms=claims.expires_ms)
        self._succeed(address, principal, credential, request_id)
        return principal, credential, claims.roles

    def check_token(
        self, text: str, *, address: str, request_id: str = "", is_final: bool = True
    ) -> tuple[Principal, Credential]:
        """Return who a token belongs to.

        Raises:
            NotAllowedError: it is not valid (`unauthenticated`).
            OverloadedError: too many failures from this host; not checked.
            UnappliedTokenError: it is not valid by what this node knows yet; not decided. Unless `is_final`.
            UnavailableError: this node does not know who there is yet; not checked.
        """
        self._require_patience(address)
        try:
            token = parse_token(text)
        except RequestError:
            token, is_final = _NO_TOKEN, True  # checked like any other, so that it costs the same
        found = self._find_token(token)
        if found is None:
            if not is_final and self._shared_catch_up is not None:
                raise UnappliedTokenError("not done: the credentials are not known here yet", code="unauthenticated")
            raise self._fail(address, "token", token.id, request_id=request_id)
        self._succeed(address, *found, request_id)
        return found

    def _find_token(self, token: Token) -> tuple[Principal, Credential] | None:
        """Return who a token belongs to by the metadata of this node; None if it is not valid."""
        view = self._view()
        row = view.tokens.get(token.id)
        is_right = matches(token.secret, _NO_HASH if row is None else row.secret_hash)
        user = None if row is None else view.users.get(row.user)
        if row is None or user is None or not is_right or not user.is_enabled:
            return None
        if row.expires_ms is not None and row.expires_ms <= self._clock.wall_ms():
            return None
        credential = Credential(kind="token", id=row.token_id, stamp=row.secret_hash, expires_ms=row.expires_ms)
        return user_principal(user.name), credential

    # -- HTTP and certificates -------------------------------------------------------------------

    def identify_http(
        self,
        authorization: bytes | None,
        connection: ConnectionIdentity,
        request_id: Callable[[], str] = str,
        *,
        is_final: bool = True,
    ) -> ConnectionIdentity:
        """Return the identity of an HTTP request by its `Authorization` header, else that of its connection.

        It is cached by header and host.

        Raises:
            NotAllowedError: the header is not a valid bearer token (`unauthenticated`).
            OverloadedError: too many failures from this host; not checked.
            UnappliedTokenError: the token is not valid by what this node knows yet; not decided. Unless `is_final`.
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
        identity = ConnectionIdentity(address=address)
        token = text.strip() if scheme.lower() == "bearer" else TOKEN_PREFIX
        self._log_in(identity, token, request_id(), is_final=is_final)
        principal = identity.principal
        if len(self._identities) >= IDENTITIES_MAX:
            self._forget()
        self._identities[key], self._principals[header] = identity, principal
        return identity

    def principal_of(self, authorization: bytes | None, connection: ConnectionIdentity) -> Principal:
        """Return the principal of an `Authorization` header that was valid before; anonymous for any other.

        Without a header it is the principal of the connection.
        """
        if authorization is None:
            return connection.principal
        return self._principals.get(hashlib.sha256(authorization).digest(), ANONYMOUS)

    def _forget(self) -> None:
        """Check HTTP credentials again: there are too many, or a key of the identity provider was withdrawn."""
        self._identities.clear()
        self._principals.clear()

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

    def _count_failures(self, address: str, change: int) -> None:
        host, now_ms = _host(address), self._clock.monotonic_ms()
        count, since_ms = self._failures.get(host, (0.0, now_ms))
        if len(self._failures) >= HOSTS_MAX:
            self._failures.clear()
        count = max(0.0, count - (now_ms - since_ms) / 1000 * FAILURES_PER_S)
        self._failures[host] = (max(0.0, count + change), now_ms)

    def _fail(
        self,
        address: str,
        kind: str,
        detail: str,
        sentence: str = "not done: the credentials are not valid: unknown, wrong, expired or revoked",
        *,
        request_id: str = "",
    ) -> NotAllowedError:
        self._count_failures(address, 1)
        self._audit.record(
            AuditEvent(
                kind="authentication",
                verb=AUTHENTICATE,
                address=address,
                request_id=request_id,
                outcome="unauthenticated",
                detail=f"{kind} {detail[:64]}".strip(),
            )
        )
        return NotAllowedError(sentence, code="unauthenticated")

    def _succeed(self, address: str, principal: Principal, credential: Credential, request_id: str) -> None:
        detail = f"{credential.kind} {credential.id}".strip()
        self._audit.record(
            AuditEvent(
                kind="authentication",
                verb=AUTHENTICATE,
                principal=str(principal),
                address=address,
                request_id=request_id,
                outcome="done",
                detail=detail,
            )
        )


def _become(
    identity: ConnectionIdentity, principal: Principal, credential: Credential, roles: tuple[str, ...] | None = None
) -> None:
    identity.principal, identity.credential, identity.roles = principal, credential, roles
    # Not None: a request that is under way may ask for them, and must not get more than it was let in with.
    identity.permissions, identity.version = Permissions(principal, ()), None


def _host(address: str) -> str:
    try:
        return parse_address(address)[0]
    except RequestError:
        return address
