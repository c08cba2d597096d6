"""Quiver: a distributed, partitioned, Raft-replicated queue for log messages."""

__version__ = "0.1.0"
