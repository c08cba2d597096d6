"""The model of consensus groups: real Raft members, drivers, logs and partition replicas, without a broker around them.

Checkers watch every event from the inside (`quiver.testing.checkers`), so this model finds broken rules at the step
that breaks them, at thousands of seeds an hour. `model` runs it; a `Profile` of `swarm` leans the seeds towards one
family of faults.
"""
