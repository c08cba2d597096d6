"""Brokers: hold the replicas that the metadata puts on a node, and answer what clients ask of partitions.

`Broker` is the way in. Every node has one, since it also tells the primary that the node lives; one without the role of
a broker is given no replicas.
"""

from quiver.broker.broker import Broker, BrokerStatus
from quiver.broker.reporter import Introduction

__all__ = ["Broker", "BrokerStatus", "Introduction"]
