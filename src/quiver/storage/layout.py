"""Where things lie in a node's data directory; `docs/operations/cluster.md` tells it to people."""

from __future__ import annotations


def metadata_log(data: str) -> str:
    """Return the directory of the node's copy of the managers' log."""
    return f"{data}/metadata"


def metadata_database(data: str) -> str:
    """Return the SQLite file that the managers' log is applied to."""
    return f"{data}/metadata.sqlite"


def replicas(data: str) -> str:
    """Return the directory that holds one directory for each replica."""
    return f"{data}/groups"
