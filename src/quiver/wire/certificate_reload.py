"""Reloads the files of TLS while a node runs, and warns before its certificate expires.

The contexts that connections are made with stay the same objects; new files are loaded into them, so that new
connections use them and open ones are not interrupted. Files are looked at periodically, and at once on SIGHUP. Files
that cannot be used, such as a certificate whose key has not been replaced yet, change nothing: they are reported once,
and looked at again. Authorities are added; one that was removed from the file is trusted until the node restarts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import ssl
from contextlib import suppress

from quiver.clock import Clock
from quiver.config import TlsSettings
from quiver.errors import ConfigError
from quiver.logs import facts
from quiver.model import NodeId
from quiver.security.bootstrap import read_text
from quiver.security.certificates import expiry_s, list_names
from quiver.tasks import timeout
from quiver.wire.tls import load_files, make_client_context, node_name, rehearse_handshake

logger = logging.getLogger(__name__)

POLL_S = 10.0
"""Interval at which the files are looked at."""
WARN_S = 30 * 24 * 3600
"""How long before its end a certificate is warned about."""
WARN_INTERVAL_MS = 24 * 3600 * 1000

_Stamp = tuple[tuple[int, int, int], ...]


class CertificateReloader:
    """Keeps the TLS contexts of one node up to date with its files."""

    def __init__(self, settings: TlsSettings, clock: Clock, *, node: NodeId, host: str) -> None:
        """`host` is the name or address at which other nodes and clients dial this node."""
        self._settings = settings
        self._node, self._host = node, host
        self._clock = clock
        self._contexts: list[ssl.SSLContext] = []
        self._loaded = self._stamp()
        self._failed: _Stamp | None = None
        self._warned_ms: int | None = None
        self._is_asked = asyncio.Event()
        self.reloads = 0
        self.problem = ""
        """Why other nodes and clients refuse the certificate, then `; ` and what to do; empty if they do not."""

    def track(self, *contexts: ssl.SSLContext | None) -> None:
        """Keep these contexts up to date."""
        self._contexts += [context for context in contexts if context is not None]

    def reload_now(self) -> None:
        """Look at the files soon, whether or not they seem to have changed."""
        self._loaded = ()
        self._is_asked.set()

    async def run(self) -> None:
        """Watch the files until cancelled; returns at once without TLS."""
        if not self._settings.is_enabled:
            return
        self.rehearse()
        while True:
            self.check()
            self.warn_before_expiry()
            try:
                async with timeout(POLL_S):
                    await self._is_asked.wait()
            except TimeoutError:
                pass
            self._is_asked.clear()

    def check(self) -> None:
        """Load the files if they have changed."""
        stamp = self._stamp()
        if stamp in (self._loaded, self._failed):
            return
        try:
            make_client_context(self._settings)  # a rehearsal: a failure must leave no context half loaded
            for context in self._contexts:
                load_files(context, self._settings)
        except ConfigError as error:
            self._failed = stamp
            about = facts(error=error.message, next_step="keep the former one")
            logger.warning("certificate not reloaded", extra=about)
            return
        self._loaded, self._failed, self._warned_ms = stamp, None, None
        self.reloads += 1
        logger.info("certificate reloaded", extra=facts(file=self._settings.certificate_file))
        self.rehearse()

    def rehearse(self) -> None:
        """Find out, before others do, whether they refuse the certificate, and warn if they do."""
        before, self.problem = self.problem, ""
        with suppress(ConfigError):  # `check` reports files that cannot be used
            self.problem = self._find_problem()
        if self.problem and self.problem != before:
            logger.warning("certificate is refused by others", extra=facts(node=self._node, problem=self.problem))

    def _find_problem(self) -> str:
        """Dial this node in memory by each of its names: peers dial its node name, requests its host."""
        file = self._settings.certificate_file
        for name in (node_name(self._node), self._host) if file else ():
            if reason := rehearse_handshake(self._settings, name):
                names = ", ".join(list_names(read_text(file))) or "no host"
                return (
                    f"others refuse its certificate {file}: they dial {name!r}, and it names {names} "
                    f"({reason.rstrip('.')}); {self._advise(name, reason)}"
                )
        return ""

    def _advise(self, name: str, reason: str) -> str:
        file = self._settings.certificate_file
        if "mismatch" not in reason:
            return f"use a certificate of the authority in {self._settings.ca_file or 'the system'}"
        if name != self._host:
            return f"make one for this node where ca.key is: quiver security init {self._node}@{self._host}"
        command = f"quiver security renew {shlex.quote(file)} --host {shlex.quote(name)}"
        return f"add the name where ca.key is: {command}; or set node.advertise to a name that it has"

    def warn_before_expiry(self) -> None:
        """Log a warning once a day while the certificate is about to expire, or has."""
        if not self._settings.certificate_file:
            return
        now_ms = self._clock.wall_ms()
        if self._warned_ms is not None and now_ms - self._warned_ms < WARN_INTERVAL_MS:
            return
        try:
            left_s = expiry_s(read_text(self._settings.certificate_file)) - now_ms / 1000
        except ConfigError:
            return  # `check` reports it
        if left_s < WARN_S:
            self._warned_ms = now_ms
            about = facts(file=self._settings.certificate_file, days_left=int(left_s // 86_400), next_step="renew it")
            logger.warning("certificate expires soon", extra=about)

    def _stamp(self) -> _Stamp:
        """Return what differs after a file was replaced or changed."""
        files = filter(None, (self._settings.certificate_file, self._settings.key_file, self._settings.ca_file))
        return tuple(map(_stamp_of, files))


def _stamp_of(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
