"""The identity provider of a cluster: its public keys, read again and again, and the check of its tokens.

`check` never waits. Keys are read in the background, in a thread and with a deadline; while they cannot be read, the
last good ones stay in use, and the status says why. A token with an unknown key has them read at once, at most once in
`UNKNOWN_KEY_INTERVAL_MS`, so that strangers cannot make this node ask the provider all the time.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from quiver.access.json_web_tokens import (
    KEYS_BYTES_MAX,
    Claims,
    KeySet,
    UnknownKeyError,
    check_jwt,
    parse_keys,
    require_library,
)
from quiver.clock import Clock
from quiver.config.oidc import OidcSettings
from quiver.errors import ConfigError
from quiver.logs import facts
from quiver.metrics import MetricFamily, counter, gauge
from quiver.security.bootstrap import read_text
from quiver.tasks import timeout

logger = logging.getLogger(__name__)

UNKNOWN_KEY_INTERVAL_MS: Final = 30_000
FETCH_TIMEOUT_S: Final = 10.0
"""Longest time of one attempt to read the keys."""
RETRY_MS: Final = 10_000
"""Interval of attempts after a failure, unless the settings ask for a shorter one."""


class IdentityProvider:
    """Check the tokens of the configured provider; `run` keeps its keys up to date."""

    def __init__(self, settings: OidcSettings, clock: Clock) -> None:
        """Check that everything that is needed is there; a key file is read at once.

        Raises:
            ConfigError: PyJWT is not installed, or a file cannot be used.
        """
        require_library()
        self._settings = settings
        self._clock = clock
        self._keys: KeySet = {}
        self._content = b""
        self._stamp: tuple[int, int, int] | None = None
        self._asked = asyncio.Event()
        self._asked_ms: int | None = None
        self._reading: asyncio.Future[None] | None = None
        """Done when the attempt that is under way, or was asked for, has ended."""
        self._connection: http.client.HTTPConnection | None = None
        self._read_ms: int | None = None
        self.on_change: Callable[[], None] | None = None
        """Called after the keys have changed."""
        self.problem = ""
        """Why the keys could not be read; empty if they could."""
        self.failures = 0
        self._tls = _make_context(settings) if settings.jwks_url.startswith("https://") else None
        if settings.jwks_file:
            try:
                self._keys = parse_keys(self._read_file())
            except (OSError, ValueError) as error:
                raise ConfigError(f"oidc.jwks_file {settings.jwks_file} cannot be used: {error}") from None

    # -- tokens ----------------------------------------------------------------------------------

    def check(self, text: str) -> Claims:
        """Return what a token says; if its key is unknown, the keys are read soon.

        Raises:
            UnknownKeyError: its key is not known; `is_reading` says whether waiting may help.
            BadJwtError: it is not valid.
        """
        try:
            return check_jwt(text, self._keys, self._settings)
        except UnknownKeyError:
            self._ask()
            raise

    @property
    def has_keys(self) -> bool:
        """Whether the keys were read at least once."""
        return bool(self._keys)

    @property
    def is_reading(self) -> bool:
        """Whether the keys are being read."""
        return self._reading is not None

    async def wait_read(self) -> None:
        """Wait until the attempt to read the keys that is under way has ended; at once if there is none."""
        if self._reading is not None:
            await asyncio.wait((self._reading,))

    def _ask(self) -> None:
        now_ms = self._clock.monotonic_ms()
        interval_ms = min(UNKNOWN_KEY_INTERVAL_MS, self._settings.refresh_ms)
        if self._reading is None and (self._asked_ms is None or now_ms - self._asked_ms >= interval_ms):
            self._asked_ms = now_ms
            self._reading = asyncio.get_running_loop().create_future()
            self._asked.set()

    # -- keys ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the keys at once, then periodically and when asked, until cancelled."""
        try:
            while True:
                await self._read()
                pause_ms = min(RETRY_MS, self._settings.refresh_ms) if self.problem else self._settings.refresh_ms
                with suppress(TimeoutError):
                    async with timeout(pause_ms / 1_000):
                        await self._asked.wait()
        finally:
            self._cut()
            self._finish()

    async def _read(self) -> None:
        self._asked.clear()
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_future()
        try:
            content = await self._fetch()
            if content is not None:
                self._replace(content)
            self.problem, self._read_ms = "", self._clock.monotonic_ms()
        except (OSError, ValueError, TimeoutError, http.client.HTTPException, ConfigError) as error:
            self.failures += 1
            self._stamp = None  # a file that cannot be used is read again, although it has not changed
            problem = f"the keys of {self._settings.issuer} cannot be read: {str(error) or type(error).__name__}"
            if problem != self.problem:
                logger.warning("keys of the identity provider not read", extra=facts(reason=problem))
            self.problem = problem
        finally:
            self._finish()

    def _finish(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)
        self._reading = None

    def _replace(self, content: bytes) -> None:
        keys = parse_keys(content)
        has_changed, self._content = content != self._content, content
        self._keys = keys
        if has_changed:  # also if a key was replaced under its old id
            logger.info("keys of the identity provider read", extra=facts(keys=len(keys)))
            if self.on_change is not None:
                self.on_change()

    async def _fetch(self) -> bytes | None:
        """Return the key set, or None if its file has not changed."""
        if self._settings.jwks_file:
            return await asyncio.to_thread(self._read_changed_file)
        fetching = asyncio.ensure_future(asyncio.to_thread(self._read_url))
        _, late = await asyncio.wait((fetching,), timeout=FETCH_TIMEOUT_S)
        if late:
            self._cut()
            with suppress(OSError, ValueError, http.client.HTTPException):
                await fetching  # it ends soon: its socket is shut down
            raise TimeoutError(f"no whole answer within {FETCH_TIMEOUT_S:.0f} s")
        return fetching.result()

    def _read_changed_file(self) -> bytes | None:
        found = os.stat(self._settings.jwks_file)
        return None if (found.st_mtime_ns, found.st_size, found.st_ino) == self._stamp else self._read_file()

    def _read_file(self) -> bytes:
        found = os.stat(self._settings.jwks_file)
        content = read_text(self._settings.jwks_file)
        self._stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        return content.encode()

    def _read_url(self) -> bytes:
        """Fetch the key set; redirects are not followed, and proxies of the environment are not used."""
        parts = urlsplit(self._settings.jwks_url)
        host = parts.hostname or ""
        if self._tls is None:
            connection = http.client.HTTPConnection(host, parts.port, timeout=FETCH_TIMEOUT_S)
        else:
            connection = http.client.HTTPSConnection(host, parts.port, timeout=FETCH_TIMEOUT_S, context=self._tls)
        self._connection = connection
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Accept": "application/json", "Connection": "close"})
            with connection.getresponse() as answer:
                if answer.status != http.client.OK:
                    raise ValueError(f"the server answered with status {answer.status}")
                return answer.read(KEYS_BYTES_MAX + 1)
        finally:
            self._connection = None
            connection.close()

    def _cut(self) -> None:
        """End a fetch that takes too long."""
        connection = self._connection
        found = None if connection is None else connection.sock
        if found is not None:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)

    # -- status ----------------------------------------------------------------------------------

    def metrics(self) -> Iterable[MetricFamily]:
        """Return the metrics of the provider's keys."""
        age_ms = 0 if self._read_ms is None else self._clock.monotonic_ms() - self._read_ms
        return (
            gauge("quiver_oidc_keys", "Public keys of the identity provider.", len(self._keys)),
            gauge("quiver_oidc_keys_age_seconds", "Time since its keys were read.", age_ms / 1_000),
            counter("quiver_oidc_read_failures_total", "Attempts to read its keys that failed.", self.failures),
        )


def _make_context(settings: OidcSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca_file or None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"oidc.ca_file {settings.ca_file} cannot be used: {error}") from None
