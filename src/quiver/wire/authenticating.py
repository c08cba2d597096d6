"""The client's side of authentication on a connection: by token, or by password with SCRAM-SHA-256.

It runs between the greeting and the first request. A password is never sent: the client proves that it knows it, and
the node proves that it has the verifier; a node that does not is refused. The keys of the last password are kept, so
that further connections do not compute them again.
"""

from __future__ import annotations

import asyncio
import secrets

from quiver.errors import NotAllowedError, RequestError
from quiver.security.scram import ScramClient, ScramKeys
from quiver.security.secrets import CredentialSource, PasswordSource, TokenSource
from quiver.wire.requesting import RequestConnection
from quiver.wire.security_messages import Authenticate, BeginScram, FinishScram

UNAUTHENTICATED = "unauthenticated"
"""Code of a refusal for the lack of valid credentials; a refusal for the lack of a permission has another."""
UNKNOWN_REQUEST = "unknown_request"
"""Code of a refusal by a program that does not know the request."""
NONCE_BYTES = 18


class ClientAuthentication:
    """Authenticate connections of one client."""

    def __init__(self, credentials: CredentialSource) -> None:
        self._credentials = credentials
        self._keys = ScramKeys()

    def check_channel(self, host: str, *, is_encrypted: bool) -> None:
        """Raise `NotAllowedError` if the credential must not be used with a host; nothing was sent."""
        self._credentials.check_channel(host, is_encrypted=is_encrypted)

    async def run(self, connection: RequestConnection, timeout_s: float) -> None:
        """Authenticate a connection, within `timeout_s` for each of its messages.

        Raises:
            NotAllowedError: the node does not accept the credential (`unauthenticated`), or has not proven itself
                (`unproven_server`).
            ConfigError: the file of the credential cannot be used.
            RequestError: the node's messages are not valid.
        """
        try:
            if isinstance(self._credentials, TokenSource):
                request = Authenticate(token=self._credentials.load().reveal())
                await connection.call(request, (), _deadline_s(timeout_s))
            else:
                await self._prove_password(connection, self._credentials, timeout_s)
        except RequestError as error:
            if error.code != UNKNOWN_REQUEST:
                raise
            raise NotAllowedError(
                "not done: the node's program is too old to know tokens and passwords: upgrade it, or connect without",
                code=UNAUTHENTICATED,
            ) from None

    async def _prove_password(self, connection: RequestConnection, source: PasswordSource, timeout_s: float) -> None:
        nonce = secrets.token_urlsafe(NONCE_BYTES)
        client = ScramClient(source.user, source.load().reveal(), nonce=nonce, keys=self._keys)
        challenge, _ = await connection.call(BeginScram(message=client.first), (), _deadline_s(timeout_s))
        proof = await asyncio.to_thread(client.prove, challenge.message)  # it computes for long, on purpose
        done, _ = await connection.call(FinishScram(message=proof), (), _deadline_s(timeout_s))
        if not client.is_server(done.message):
            raise NotAllowedError(
                "not done: the node has not proven that it knows the password: it may be another program that "
                "listens at a node's address",
                code="unproven_server",
            )


def _deadline_s(timeout_s: float) -> float:
    return asyncio.get_running_loop().time() + timeout_s
