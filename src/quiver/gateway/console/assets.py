"""The files of the console, which are part of the package, and the headers that keep its page from harm.

The page loads only its own files, runs no inline script, and may call the nodes of its cluster and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Final

import msgspec

from quiver.errors import NotFoundError
from quiver.gateway.http import HttpResponse

PAGE: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Files with other suffixes are not served."""
_HEADERS: Final = (
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Permissions-Policy", "camera=(), microphone=(), geolocation=(), payment=()"),
)
TO_CONSOLE: Final = HttpResponse(status=302, content_type=_TYPES[".txt"], headers=(("Location", "/console"),))
"""What browsers get at `/`."""


class ConsoleAssets:
    """Answer with the files of the console."""

    def __init__(self, sources: Callable[[], Sequence[str]]) -> None:
        """Serve the files; the page may call the origins that `sources` returns, those of the cluster's nodes."""
        self._sources = sources

    def page(self) -> HttpResponse:
        """Return the page."""
        policy = content_security_policy(self._sources())
        page = load_assets()[PAGE]
        return msgspec.structs.replace(page, headers=(("Content-Security-Policy", policy), *_HEADERS))

    def file(self, name: str) -> HttpResponse:
        """Return one of its files."""
        found = load_assets().get(name)
        if found is None or name == PAGE:
            raise NotFoundError(f"the console has no file {name!r}", code="unknown_path")
        return found


def content_security_policy(sources: Sequence[str]) -> str:
    """Return the policy of the page."""
    callable_origins = " ".join(("'self'", *sources))
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            f"connect-src {callable_origins}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


@lru_cache(maxsize=1)
def load_assets() -> dict[str, HttpResponse]:
    """Return all files by name; read once."""
    found: dict[str, HttpResponse] = {}
    for entry in files("quiver.gateway.console").joinpath("static").iterdir():
        content_type = _TYPES.get(entry.name[entry.name.rfind(".") :])
        if content_type is not None:
            found[entry.name] = HttpResponse(status=200, body=entry.read_bytes(), content_type=content_type)
    return found
