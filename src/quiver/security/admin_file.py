"""The file with the id and the hash of the first administrator's token; it is not secret."""

from __future__ import annotations

from pathlib import Path

from quiver.errors import ConfigError
from quiver.security.tokens import is_hash, is_token_id


def load_admin_file(path: str) -> tuple[str, str]:
    """Return the id and the hash of a token from a file.

    Raises:
        ConfigError: the file cannot be read, or does not hold them.
    """
    try:
        return parse_admin(Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(f"security.admin_file cannot be read: {error}") from None


def parse_admin(text: str) -> tuple[str, str]:
    """Return the id and the hash of a token, which are separated by a colon or white space; raises `ConfigError`."""
    token_id, _, secret_hash = text.strip().replace(":", " ").partition(" ")
    secret_hash = secret_hash.strip()
    if not is_token_id(token_id) or not is_hash(secret_hash):
        raise ConfigError(
            "security.admin_file does not hold the id and the hash of a token; make it with quiver security init"
        )
    return token_id, secret_hash
