"""Where lakes are: a directory, or a prefix in an object store, named by a path or a URL.

A `Place` travels to tasks, so it never has credentials: every process takes them from its own environment, by the
usual variables of each store, such as `AWS_ACCESS_KEY_ID` or `GOOGLE_APPLICATION_CREDENTIALS`.
Commits and files use the same client, that of `deltalake`, so they always agree about credentials and endpoints.

A text with a scheme that is not known is refused: as a path it would name a local directory `s3:`, or one in the
working directory, and nobody would look for the data there.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec
from pyarrow.fs import FileSystem, PyFileSystem

from quiver.errors import RequestError

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_ENDPOINT_OPTIONS: Final = {
    "s3": "aws_endpoint_url",
    "gs": "google_base_url",
    "az": "azure_storage_endpoint",
    "abfss": "azure_storage_endpoint",
}
SCHEMES: Final = ("file", *_ENDPOINT_OPTIONS)


class Place(msgspec.Struct, frozen=True):
    """A directory or a prefix in an object store. Hashable, picklable, without credentials."""

    url: str
    """An absolute path, or a URL of an object store; without a slash at its end."""
    endpoint: str = ""
    """URL of the store's server; empty: the one that the environment names, else the public one."""

    def __str__(self) -> str:
        return self.url

    @property
    def is_local(self) -> bool:
        """Return whether it is a directory of this machine."""
        return self.url.startswith("/")

    def storage_options(self) -> dict[str, str]:
        """Return the options of `deltalake`; empty for a directory."""
        if self.is_local:
            return {}
        scheme = urlsplit(self.url).scheme
        # A commit must never replace another: the store itself refuses to create an object that exists.
        options = {"aws_conditional_put": "etag"} if scheme == "s3" else {}
        if self.endpoint:
            options[_ENDPOINT_OPTIONS[scheme]] = self.endpoint
            options["allow_http"] = str(self.endpoint.startswith("http://")).lower()
        return options

    def locate(self, path: str) -> tuple[str, FileSystem | None]:
        """Return where a file of the place is, as pyarrow's Parquet functions take it: path and file system."""
        return (os.path.join(self.url, path), None) if self.is_local else (path, _open(self, os.getpid()))


@cache
def _open(place: Place, _process: int) -> FileSystem:
    """Return this process's client of an object store; a forked child never uses its parent's."""
    from deltalake.fs import DeltaStorageHandler

    return PyFileSystem(DeltaStorageHandler(place.url, place.storage_options()))


def parse_place(text: str, *, option: str, endpoint: str = "") -> Place:
    """Parse a path or URL that a user gave for an option; raise `RequestError` (`bad_option`) if it is invalid."""
    scheme = _scheme_of(text)
    if scheme is None or scheme == "file":
        if endpoint:
            raise _bad(f"endpoint is only valid for an object store, and {option} {text} is a directory")
        return Place(parse_path(text, option=option))
    if scheme not in SCHEMES:
        raise _bad(f"{option} {text}: unsupported scheme {scheme}; use a path, or one of {_listed()}")
    parts = _split(text, option)
    holder, _, host = parts.netloc.rpartition("@")
    # Only abfss has a part before the @, the container; elsewhere it would be a secret.
    if not host or ":" in holder or bool(holder) != (scheme == "abfss"):
        raise _bad(f"{option} is not a valid URL: {_FORMS[scheme]}; credentials belong into the environment")
    return Place(f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}", _check_endpoint(endpoint))


def parse_path(text: str, *, option: str) -> str:
    """Return the absolute path of a local file or directory, given as path or `file://` URL; refuse other URLs."""
    scheme = _scheme_of(text)
    if not text:
        raise _bad(f"{option} is empty")
    if scheme is None:
        return os.path.abspath(os.path.expanduser(text))
    if scheme != "file":
        raise _bad(f"{option} {text} must be a path of this machine or a file:// URL; scheme {scheme} is unsupported")
    parts = _split(text, option)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise _bad(f"{option} {text} is not a valid URL: file:///absolute/path, without a host")
    return os.path.abspath(unquote(parts.path))


def parse_output_file(text: str, *, option: str) -> str:
    """Return the path of a file that is written when the work is done; refuse now what could not be written then."""
    path = parse_path(text, option=option)
    if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):
        raise _bad(f"{option} {text} cannot be written: its directory must exist and be writable")
    return path


_FORMS: Final = {
    "s3": "s3://BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "az": "az://CONTAINER/PREFIX",
    "abfss": "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX",
}


def _scheme_of(text: str) -> str | None:
    found = _SCHEME.match(text)
    return found[1].lower() if found else None


def _split(text: str, option: str) -> SplitResult:
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise _bad(f"{option} is not a valid URL: {error}") from None
    if "://" not in text or parts.query or parts.fragment:
        raise _bad(f"{option} is not a valid URL: SCHEME://NAME/PATH, without ? and #")
    return parts


def _check_endpoint(endpoint: str) -> str:
    if not endpoint:
        return ""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise _bad("endpoint must be https://HOST:PORT, or http://HOST:PORT for a server without TLS")
    return endpoint.rstrip("/")


def _listed() -> str:
    return ", ".join(f"{scheme}://" for scheme in SCHEMES)


def _bad(sentence: str) -> RequestError:
    return RequestError(sentence, code="bad_option")
