"""Whole clusters under simulation: real nodes and real clients, and everything going wrong around them.

`simulation` runs one seed from its drawn shape (`swarm`) through chaos, healing and comparison. A `SimulatedHost` is
one machine with one `quiver.node.Node` at a time on it, in the `SimulatedEnvironment` that its disk, clocks and
`SimulatedDatabase` make. Clients are programs over the real SDK, which write down what they were told for the judge.
"""
