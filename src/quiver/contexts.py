"""Names a cluster: turns what a user said into addresses, TLS files and credentials, the same way for every client.

The command line, `quiver.connect`, the Spark data source, pipelines and the classic library all call `resolve`. Each
value comes from the first of these that has it: an argument, a context that an argument names, the environment
(`QUIVER_URL`, `QUIVER_CA_FILE`, `QUIVER_CERT_FILE`, `QUIVER_KEY_FILE`, `QUIVER_TOKEN_FILE`, `QUIVER_USER`,
`QUIVER_PASSWORD_FILE`), the context in use (`QUIVER_CONTEXT`, or `quiver context use`), the default. The context in use
is ignored once an argument or `QUIVER_URL` names the cluster: its token is for its own cluster.

A client proves who it is by a token, or by a user's password. The first source that has either decides which; those
after it add what is missing, such as the file of a password, but not the other kind.

The scheme of an address decides about encryption: `https://` is never plain text and `http://` is never encrypted. An
address without a scheme, or with `quiver://`, is encrypted if TLS was asked for or a TLS file was given. A token is
sent in plain text to no other machine; `find_credentials` refuses that before anything is sent.

Contexts name files of tokens and passwords, never these. They live in one file that only its owner can read:
`$XDG_CONFIG_HOME/quiver/contexts.json`. It is replaced as a whole, so that a crash leaves the old or the new one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from quiver.errors import ConfigError, NotFoundError, RequestError
from quiver.model import LABEL_PATTERN
from quiver.security.secrets import CredentialSource, PasswordSource, Secret, TokenSource, parse_secret

DEFAULT_URL: Final = "http://127.0.0.1:8002"
URL_VARIABLE: Final = "QUIVER_URL"
CONTEXT_VARIABLE: Final = "QUIVER_CONTEXT"
_FILE_VARIABLES: Final = {
    "ca_file": "QUIVER_CA_FILE",
    "certificate_file": "QUIVER_CERT_FILE",
    "key_file": "QUIVER_KEY_FILE",
    "token_file": "QUIVER_TOKEN_FILE",
    "password_file": "QUIVER_PASSWORD_FILE",
}
USER_VARIABLE: Final = "QUIVER_USER"
VARIABLES: Final = frozenset((URL_VARIABLE, CONTEXT_VARIABLE, USER_VARIABLE, *_FILE_VARIABLES.values()))
"""The environment variables of clients; a node ignores them."""

FILE_VERSION: Final = 1
_FILE_BYTES_MAX: Final = 1 << 20


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A cluster under a name: its addresses, TLS files, and the file of a token, or a user and that of a password."""

    addresses: tuple[str, ...]
    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    token_file: str = ""
    user: str = ""
    password_file: str = ""


class ContextFile(msgspec.Struct, frozen=True, kw_only=True):
    """All contexts of a user, and the name of the one in use; empty if none is."""

    version: int = FILE_VERSION
    current: str = ""
    contexts: dict[str, Context] = {}


class ClusterTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of a cluster, whether to use TLS, its files, and where the addresses were found."""

    addresses: tuple[str, ...]
    is_tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    token_file: str = ""
    user: str = ""
    password_file: str = ""
    source: str = "argument"


def resolve(
    addresses: str | Iterable[str] | None = None,
    *,
    context: str = "",
    tls: bool = False,
    ca_file: str = "",
    certificate_file: str = "",
    key_file: str = "",
    token_file: str = "",
    user: str = "",
    password_file: str = "",
    environment: Mapping[str, str] | None = None,
) -> ClusterTarget:
    """Return the cluster that the arguments, the environment and the contexts name; None or empty means "not said".

    Raises:
        RequestError: the addresses are empty or contradict each other or the TLS arguments (`bad_address`), or one
            source has a token and a user (`bad_credentials`).
        NotFoundError: there is no context of that name (`unknown_context`).
        ConfigError: the file of contexts cannot be read.
    """
    environment = os.environ if environment is None else environment
    given = () if addresses is None else split_addresses(addresses)
    if addresses is not None and not given:
        raise RequestError("not done: no address given: pass at least one host:port of a node", code="bad_address")
    said = Context(
        addresses=given,
        tls=tls,
        ca_file=ca_file,
        certificate_file=certificate_file,
        key_file=key_file,
        token_file=token_file,
        user=user,
        password_file=password_file,
    )
    sources = [("argument", said)]
    if context:
        sources.append((f"context {context!r}", find_context(context, environment)))
    url = split_addresses(environment.get(URL_VARIABLE, ""))
    files = {field: environment.get(variable, "") for field, variable in _FILE_VARIABLES.items()}
    sources.append(("environment", msgspec.structs.replace(_said(url, environment), **files)))
    if not context:
        sources.extend(_context_in_use(environment, is_needed=not given and not url))
    sources.append(("default", Context(addresses=(DEFAULT_URL,))))
    return _combine(sources)


def _said(url: tuple[str, ...], environment: Mapping[str, str]) -> Context:
    return Context(addresses=url, user=environment.get(USER_VARIABLE, ""))


def _context_in_use(environment: Mapping[str, str], *, is_needed: bool) -> Iterable[tuple[str, Context]]:
    if not is_needed:
        return
    if name := environment.get(CONTEXT_VARIABLE, ""):
        yield f"context {name!r} of {CONTEXT_VARIABLE}", find_context(name, environment)
    elif name := load_contexts(environment).current:
        yield f"context {name!r}", find_context(name, environment)


def _combine(sources: list[tuple[str, Context]]) -> ClusterTarget:
    """Take each value from the first source that has it; the scheme of the addresses decides about TLS."""
    at = next(number for number, (_, one) in enumerate(sources) if one.addresses)
    name, chosen = sources[at]
    contexts = [one for _, one in sources]
    secure, plain = (_with_scheme(chosen.addresses, scheme) for scheme in ("https", "http"))
    if secure and plain:
        raise RequestError(f"{secure} and {plain} disagree about TLS: use https:// for all", code="bad_address")
    asked_at = next((number for number, one in enumerate(contexts) if _asks_for_tls(one)), len(contexts))
    if plain and asked_at <= at:
        raise RequestError(
            f"{plain} is plain text, but TLS is asked for ({sources[asked_at][0]}): write https://, or leave out the "
            "TLS files",
            code="bad_address",
        )
    is_tls = bool(secure) or (not plain and asked_at < len(contexts))
    is_by_token = _is_by_token(sources)
    return ClusterTarget(
        addresses=chosen.addresses,
        is_tls=is_tls,
        ca_file=_first(one.ca_file for one in contexts) if is_tls else "",
        certificate_file=_first(one.certificate_file for one in contexts) if is_tls else "",
        key_file=_first(one.key_file for one in contexts) if is_tls else "",
        token_file=_first(one.token_file for one in contexts) if is_by_token else "",
        user="" if is_by_token else _first(one.user for one in contexts),
        password_file="" if is_by_token else _first(one.password_file for one in contexts),
        source=name,
    )


def _is_by_token(sources: Iterable[tuple[str, Context]]) -> bool:
    """Return whether the first source that has a credential has a token, and not a user or password."""
    for name, one in sources:
        has_password = bool(one.user or one.password_file)
        if one.token_file and has_password:
            raise RequestError(
                f"a token file and a user or password file are both given ({name}): give one of them",
                code="bad_credentials",
            )
        if one.token_file or has_password:
            return not has_password
    return False


def find_credentials(
    target: ClusterTarget, *, token: str | Secret = "", password: str | Secret = ""
) -> CredentialSource | None:
    """Return the token or password of a client, or the file that holds it; None: connect without one.

    A `token` or `password` overrides a file; a password is that of the target's user.

    Raises:
        RequestError: the token is not one (`bad_secret`), a password has no user or a user no password, or both kinds
            are given (`bad_credentials`), or an HTTP address, which takes tokens only, is given with a password.
        NotAllowedError: it would be sent in plain text to another machine (`plain_text_token`, `plain_text_password`).
        ConfigError: the file cannot be read, is readable by others, or holds no such secret.
    """
    found: CredentialSource | None = None
    if token and password:
        raise RequestError("a token and a password are both given: give one of them", code="bad_credentials")
    if token:
        found = TokenSource(token=parse_secret(token, "the token") if isinstance(token, str) else token)
    elif password or target.user or target.password_file:
        found = _password_source(target, Secret(password) if isinstance(password, str) else password)
    elif target.token_file:
        found = TokenSource(file=target.token_file)
    if found is not None:
        for address in target.addresses:
            found.check_channel(_host_of(address), is_encrypted=target.is_tls)
        found.load()  # refuses a file that cannot be used before anything is dialled
    return found


def _password_source(target: ClusterTarget, password: Secret) -> PasswordSource:
    if not target.user:
        raise RequestError(
            f"a password is given without a user: pass user or --username, or set {USER_VARIABLE}",
            code="bad_credentials",
        )
    if not password and not target.password_file:
        raise RequestError(
            f"user {target.user[:80]!r} is given without a password: pass password_file or --password-file, or set "
            f"{_FILE_VARIABLES['password_file']}",
            code="bad_credentials",
        )
    if http := _with_scheme(target.addresses, "http") or _with_scheme(target.addresses, "https"):
        raise RequestError(
            f"{http} is an HTTP address, which takes tokens only: with a password, give the wire address of a node, "
            "such as host:9002, and turn on TLS (tls, --tls, ca_file)",
            code="bad_address",
        )
    return (
        PasswordSource(target.user, password=password)
        if password
        else PasswordSource(target.user, file=target.password_file)
    )


def _host_of(address: str) -> str:
    """Return the host in an address of any form; a malformed one is refused when it is parsed."""
    rest = address.rpartition("://")[2].partition("/")[0]
    if rest.startswith("["):
        return rest[1:].partition("]")[0]
    return rest if rest.count(":") > 1 else rest.partition(":")[0]


def _with_scheme(addresses: Iterable[str], scheme: str) -> str:
    return next((one for one in addresses if one.lower().startswith(f"{scheme}://")), "")


def _asks_for_tls(one: Context) -> bool:
    return one.tls or bool(one.ca_file or one.certificate_file or one.key_file)


def _first(values: Iterable[str]) -> str:
    return next(filter(None, values), "")


def split_addresses(addresses: str | Iterable[str]) -> tuple[str, ...]:
    """Return single addresses; one text may hold several, separated by commas."""
    texts = (addresses,) if isinstance(addresses, str) else addresses
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


# The file.


def contexts_path(environment: Mapping[str, str] | None = None) -> str:
    """Return the path of the file of contexts."""
    environment = os.environ if environment is None else environment
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME") or "~", ".config")
    return os.path.join(os.path.expanduser(home), "quiver", "contexts.json")


def load_contexts(environment: Mapping[str, str] | None = None) -> ContextFile:
    """Return all contexts; none if there is no file.

    Raises:
        ConfigError: the file cannot be read, or a newer version of Quiver wrote it.
    """
    path = contexts_path(environment)
    try:
        with open(path, "rb") as file:
            found = msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=ContextFile)
    except FileNotFoundError:
        return ContextFile()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; correct or remove it") from None
    if found.version > FILE_VERSION:
        raise ConfigError(f"{path} has version {found.version}, which needs a newer Quiver; this one reads 1")
    return found


def find_context(name: str, environment: Mapping[str, str] | None = None) -> Context:
    """Return the context of a name.

    Raises:
        NotFoundError: there is none (`unknown_context`).
    """
    known = load_contexts(environment).contexts
    if name not in known:
        names = ", ".join(sorted(known)) or "none; `quiver context add` makes one"
        raise NotFoundError(f"unknown context {name!r}; known are: {names}", code="unknown_context")
    return known[name]


def add_context(name: str, context: Context, *, is_used: bool) -> None:
    """Store a context under a name, and use it from now on if `is_used`; it replaces the one of that name.

    Raises:
        RequestError: the name or the addresses are not valid.
    """
    if not re.fullmatch(LABEL_PATTERN, name):
        raise RequestError(f"bad name {name[:80]!r}: use letters, digits, dots, dashes, underscores", code="bad_name")
    _combine([(f"context {name!r}", context)])
    files = {field: os.path.abspath(path) for field in _FILE_VARIABLES if (path := getattr(context, field))}
    stored = load_contexts()
    contexts = stored.contexts | {name: msgspec.structs.replace(context, **files)}
    store_contexts(ContextFile(current=name if is_used or not stored.current else stored.current, contexts=contexts))


def use_context(name: str) -> None:
    """Use a context whenever nothing else names a cluster; the empty name means none."""
    if name:
        find_context(name)
    store_contexts(msgspec.structs.replace(load_contexts(), current=name))


def remove_context(name: str) -> None:
    """Remove a context; if it was in use, none is in use afterwards."""
    find_context(name)
    stored = load_contexts()
    left = {other: one for other, one in stored.contexts.items() if other != name}
    store_contexts(ContextFile(current="" if stored.current == name else stored.current, contexts=left))


def store_contexts(contexts: ContextFile) -> None:
    """Replace the file; only its owner can read it."""
    path = contexts_path()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    next_path = f"{path}.{os.getpid()}"
    descriptor = os.open(next_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(msgspec.json.format(msgspec.json.encode(contexts), indent=2) + b"\n")
        file.flush()
        os.fsync(descriptor)
    os.replace(next_path, path)
