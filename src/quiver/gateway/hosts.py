"""Which names in the Host header this gateway answers to.

A page of any site can make its own name resolve to this machine (DNS rebinding); its requests then look like those of
our own pages, except for the name in Host. So a gateway answers only to names that are its own: loopback names,
its advertised name, the name of its machine, and those in `gateway.allowed_hosts`. An IP address in Host was never
resolved, so it is not such an attack; a gateway that only its own machine reaches still refuses foreign ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from quiver.addresses import is_loopback

KNOWN_MAX = 1_000
"""Accepted Host headers that are cached; the cache is cleared beyond it."""
ANY = "*"
"""In `gateway.allowed_hosts`: no name is refused."""


class HostNames:
    """The names that a gateway answers to."""

    def __init__(self, *, listen_host: str, names: Iterable[str]) -> None:
        self._is_local = is_loopback(listen_host)
        self._names = frozenset(_normalize(name) for name in (listen_host, *names) if name)
        self.known: set[bytes] = set()
        """Headers that were accepted before: whoever is in it need not be checked again."""

    def accepts(self, header: bytes) -> bool:
        """Return whether a Host header names this gateway."""
        name = _normalize(_split_port(header.decode("latin-1")))
        is_own = (
            ANY in self._names
            or name in self._names
            or is_loopback(name)
            or name.endswith(".localhost")
            or (not self._is_local and _is_ip_address(name))
        )
        if is_own:
            if len(self.known) >= KNOWN_MAX:
                self.known.clear()
            self.known.add(header)
        return is_own


def _split_port(host: str) -> str:
    """Return the host without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _normalize(name: str) -> str:
    return name.strip().rstrip(".").lower()


def _is_ip_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
