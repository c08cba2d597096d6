"""Data directories as commands are given them: a node's own, or the one in which `quiver up` keeps several."""

from __future__ import annotations

import os

from quiver.environment import schema_name
from quiver.errors import ConfigError
from quiver.metadata import Database, open_database, sqlite_url
from quiver.storage import NodeIdentity, SystemDisk
from quiver.storage.data_directory import IDENTITY_NAME, load_identity, metadata_database


def find_nodes(data: str) -> dict[str, NodeIdentity]:
    """Return the nodes whose directories these are, by directory, in order of their ids.

    Raises:
        ConfigError: there is none.
    """
    candidates = [data, *(entry.path for entry in os.scandir(data) if entry.is_dir())] if os.path.isdir(data) else []
    disk = SystemDisk()
    found = {path: identity for path in candidates if (identity := load_identity(disk, path)) is not None}
    if not found:
        raise ConfigError(f"{data} holds no node's data: neither {IDENTITY_NAME} nor directories that do")
    return dict(sorted(found.items(), key=lambda item: item[1].node))


def open_node_database(data: str, identity: NodeIdentity, url: str) -> Database:
    """Return the database of a node's metadata: at `url`, or, if that is empty, in its data directory."""
    return open_database(url or sqlite_url(metadata_database(data)), schema=schema_name(identity.node))
