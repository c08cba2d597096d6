"""The names of the files in a node's security directory, which `security.directory` names. Pure."""

from __future__ import annotations

from typing import Final

CA_NAME: Final = "ca.pem"
CA_KEY_NAME: Final = "ca.key"
CERTIFICATE_NAME: Final = "node.pem"
KEY_NAME: Final = "node.key"
ADMIN_NAME: Final = "admin.hash"
"""The id and the hash of the first administrator's token."""
SETTINGS_NAME: Final = "quiver.toml"
"""The settings with which the node starts."""
TOKEN_NAME: Final = "admin.token"  # noqa: S105 - a file's name
"""The token itself, which stays with the operator."""
