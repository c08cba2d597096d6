"""The SDK: what programs use to talk to a cluster.

It is written against the seam in `transport`, never against sockets, so that it runs the same in a user's process,
inside a node and under simulation. It uses `record`, `model`, `errors`, `clock` and `wire` only.
"""
