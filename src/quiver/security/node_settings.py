"""The settings file of a node: what `quiver security init` and `quiver security join` write for it. Pure.

The file is complete: a node starts with it and nothing else. It is a node's own afterwards; nothing rewrites it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from quiver.addresses import format_address

WIRE_PORT: Final = 9002
HTTP_PORT: Final = 8002
CLUSTER: Final = "quiver"
DIRECTORY: Final = "/etc/quiver"
"""Where a node's host has its files; the systemd unit reads the settings there."""
DATA: Final = "/var/lib/quiver"

_TEXT = """\
# Settings of node {node}, made by `quiver security`; it is yours to change. `quiver config show` prints all there are.
[node]
id = {node}
cluster = {cluster}
data = {data}
{addresses}
join = {managers}
{roles}
[security]
directory = {directory}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What the settings of a node say."""

    node: int
    hosts: Sequence[str]
    """Where others reach it, the first one first."""
    managers: str
    """As in `node.join`."""
    cluster: str = CLUSTER
    directory: str = DIRECTORY
    is_manager: bool = True

    def text(self) -> str:
        """Return the file."""
        return _TEXT.format(
            node=self.node,
            cluster=_quote(self.cluster),
            data=_quote(DATA),
            addresses=_listeners(self.hosts[0]),
            managers=_quote(self.managers),
            roles="" if self.is_manager else 'roles = "broker,gateway"\n',
            directory=_quote(self.directory),
        )


def format_managers(hosts: Mapping[int, Sequence[str]]) -> str:
    """Return the nodes as `node.join` names them, each by its first host."""
    return ",".join(f"{node}@{format_address((names[0], WIRE_PORT))}" for node, names in sorted(hosts.items()))


def _listeners(host: str) -> str:
    """Return the addresses. A host name is only advertised: its machine may resolve it to a loopback address."""
    try:
        ip_address(host)
    except ValueError:
        lines = [f'wire = "0.0.0.0:{WIRE_PORT}"', f'http = "0.0.0.0:{HTTP_PORT}"', f"advertise = {_quote(host)}"]
    else:
        ports = {"wire": WIRE_PORT, "http": HTTP_PORT}
        lines = [f"{key} = {_quote(format_address((host, port)))}" for key, port in ports.items()]
    return "\n".join(lines)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a basic string of TOML is written as one of JSON
