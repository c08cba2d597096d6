"""Building blocks to run Quiver's parts, or programs that use it, without real time, network or disk.

Everything here is driven by one seed and gives the same run again for the same seed: a disk that
loses power, an event loop with virtual time, a network that loses and reorders messages.
"""

from quiver.testing.disk import SimulatedDisk, SimulatedFile
from quiver.testing.disk_faults import DiskFaults, PowerLoss

__all__ = [
    "DiskFaults",
    "PowerLoss",
    "SimulatedDisk",
    "SimulatedFile",
]
