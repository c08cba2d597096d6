"""Building blocks to run Quiver's parts, or programs that use it, without real time, network or disk.

Everything here is driven by one seed and gives the same run again for the same seed: a disk that
loses power, an event loop with virtual time, a network that loses and reorders messages.
"""

from quiver.testing.clock import SimulatedClock
from quiver.testing.disk import SimulatedDisk, SimulatedFile
from quiver.testing.disk_faults import DiskFaults, PowerLoss
from quiver.testing.executor import SimulatedExecutor
from quiver.testing.latency import Latency
from quiver.testing.loop import Deadlock, LimitReached, SimulatedLoop, UnhandledError
from quiver.testing.network import NetworkFaults, SimulatedNetwork, SimulatedPort
from quiver.testing.randomness import RandomStreams
from quiver.testing.refusal import HostAccessError
from quiver.testing.trace import Trace
from quiver.testing.transport import SimulatedRequester, SimulatedTransport, TransportFaults

__all__ = [
    "Deadlock",
    "DiskFaults",
    "HostAccessError",
    "Latency",
    "LimitReached",
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
    "Trace",
    "TransportFaults",
    "UnhandledError",
]
