"""Building blocks to test programs that use Quiver, and Quiver itself.

`LocalCluster` is a cluster inside this process, on real sockets and files, with faults on demand; the fixture
`quiver_cluster` gives one to a test of pytest. The others run Quiver's parts without real time, network or disk.

Everything simulated is driven by one seed and gives the same run again for the same seed: a disk that
loses power, an event loop with virtual time, a network that loses and reorders messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.testing.clock import SimulatedClock
from quiver.testing.disk import SimulatedDisk, SimulatedFile
from quiver.testing.disk_faults import DiskFaults, PowerLoss
from quiver.testing.executor import SimulatedExecutor
from quiver.testing.loop import Deadlock, LimitReached, SimulatedLoop, Spinning, UnhandledError
from quiver.testing.network import NetworkFaults, SimulatedNetwork, SimulatedPort
from quiver.testing.randomness import Latency, RandomStreams
from quiver.testing.scheduling import HostAccessError
from quiver.testing.trace import Trace
from quiver.testing.transport import SimulatedRequester, SimulatedTransport, TransportFaults

if TYPE_CHECKING:
    from quiver.testing.local_cluster import LocalCluster

__all__ = [
    "Deadlock",
    "DiskFaults",
    "HostAccessError",
    "Latency",
    "LimitReached",
    "LocalCluster",
    "NetworkFaults",
    "PowerLoss",
    "RandomStreams",
    "SimulatedClock",
    "SimulatedDisk",
    "SimulatedExecutor",
    "SimulatedFile",
    "SimulatedLoop",
    "SimulatedNetwork",
    "SimulatedPort",
    "SimulatedRequester",
    "SimulatedTransport",
    "Spinning",
    "Trace",
    "TransportFaults",
    "UnhandledError",
]


def __getattr__(name: str) -> object:
    """Load the cluster when it is first used: it needs all that a node does."""
    if name != "LocalCluster":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quiver.testing.local_cluster import LocalCluster as found  # noqa: N813 - see above

    return found
