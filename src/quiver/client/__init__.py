"""The SDK: what programs use to talk to a cluster.

It is written against the seam in `transport`, never against sockets, so that it runs the same in a user's process,
inside a node and under simulation. It uses `record`, `model`, `errors`, `clock` and `wire` only.

`connection` is the way in. One core serves asyncio and threads: what the client knows (`directory`), how it asks and
tries again (`router`, `retry`), how records go out (`producer`, `accumulator`, `sender`, `parcels`) and come in
(`consumer`, `prefetch`, `cursors`). `sync` runs that core in a thread.
"""
