"""Brokers: host the replicas that the metadata assigns to a node, and serve the clients' partition requests.

`Broker` is the public interface. Every node has one, since it also sends the node's heartbeats; a node without the
broker role is assigned no replicas.
"""

from quiver.broker.broker import Broker, BrokerStatus
from quiver.broker.heartbeats import BrokerRegistration

__all__ = ["Broker", "BrokerRegistration", "BrokerStatus"]
