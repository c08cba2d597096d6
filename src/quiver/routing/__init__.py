"""The one path of a request from a client or node to another node.

- `transport`: one request to one address; `loopback` is its short cut to the node's own handler
- `retry`: deadlines, the retry budget, which failures are retried and what is said in the end
- `metadata_cache`: cached nodes, topics and leaders
- `router`: any node, a node by id, a partition's leader; sets `known_index` on every request

Clients, gateways and nodes use these. `manager.node_router` adds what only a node needs: forwarding to the primary.
"""
