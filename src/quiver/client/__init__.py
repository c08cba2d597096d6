"""The SDK: the library that programs use to talk to a cluster.

It depends on the `Transport` protocol of `routing`, never on sockets, so it runs the same in a user's process, inside a
node and under simulation. It imports only `record`, `model`, `errors`, `clock`, `tasks`, `wire` and `routing`.

`connection` is the entry point. One core serves asyncio and threads; `sync` runs it in a `thread`. A `producer` buffers
records in the `accumulator`, and its `sender` keeps each partition's batches `inflight` and in order. A `consumer`
prefetches batches (`prefetch`) and stores its `cursors`. `ranges` and `holds` serve programs that store their own
offsets; `cluster` and `overview` serve operators.
"""
