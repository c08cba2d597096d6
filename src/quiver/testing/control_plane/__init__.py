"""The control plane of large clusters: a real manager on virtual time, and brokers without partition data."""
