"""A network with one host for each node, whose links can be cut in each direction by itself.

Each node lives in a network namespace behind a bridge; clients reach all of them from the bridge's own address. A cut
is a wrong entry in the neighbour table: packets leave and nobody takes them, as on a real network, and connections
do not learn of it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from chaos_namespace import is_inside, run_ip

_NOBODY = "02:00:00:00:00:99"


class Network:
    """The hosts of so many nodes, numbered from 1. Only inside of namespaces of one's own."""

    def __init__(self, hosts: int, *, network: str = "10.99.0") -> None:
        assert is_inside()
        self._network = network
        self._cuts: set[tuple[int, int]] = set()
        subprocess.check_call(["mount", "-t", "tmpfs", "tmpfs", "/run"])  # where `ip netns` keeps its names
        run_ip("link", "set", "lo", "up")
        run_ip("link", "add", "bridge0", "type", "bridge")
        run_ip("address", "add", f"{network}.254/24", "dev", "bridge0")
        run_ip("link", "set", "bridge0", "up")
        for number in range(1, hosts + 1):
            self._add_host(number)

    def _add_host(self, number: int) -> None:
        space = _space(number)
        run_ip("netns", "add", space)
        run_ip("link", "add", f"veth{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
        run_ip("link", "set", f"veth{number}", "master", "bridge0", "up")
        run_ip("-n", space, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        run_ip("-n", space, "link", "set", "eth0", "up")
        run_ip("-n", space, "link", "set", "lo", "up")

    def address(self, number: int) -> str:
        """Return the address of a node's host."""
        return f"{self._network}.{number}"

    def prefix(self, number: int) -> tuple[str, ...]:
        """Return what makes a command run on a node's host."""
        return ("ip", "netns", "exec", _space(number))

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Lose everything that the first of each pair sends to the second, from now on."""
        for sender, receiver in pairs:
            entry = (self.address(receiver), "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
            run_ip("-n", _space(sender), "neighbour", "replace", *entry)
            self._cuts.add((sender, receiver))

    def heal(self) -> None:
        """Let everything through again."""
        for sender, receiver in self._cuts:
            run_ip("-n", _space(sender), "neighbour", "del", self.address(receiver), "dev", "eth0")
        self._cuts.clear()


def _space(number: int) -> str:
    return f"node{number}"
