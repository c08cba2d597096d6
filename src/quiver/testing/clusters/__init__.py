"""The model of clusters: whole nodes and real SDK clients on simulated machines.

A `SimulatedHost` is one machine that runs one `quiver.node.Node` at a time, in the `SimulatedEnvironment` that its
disk, clocks and `SimulatedDatabase` make. Clients are workloads over the real SDK; they record a history of their
calls, which `quiver.testing.history` checks. `model` runs it.
"""
