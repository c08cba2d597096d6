"""Tokens of an OpenID Connect provider: signed JSON web tokens (RFC 7519), checked by PyJWT with `cryptography`.

Only signatures by a public key are accepted, by a fixed list of algorithms: `none` and the HMAC algorithms, for which a
public key could be used as the secret, are never tried. The key decides about the algorithm, not the token. Issuer,
audience and expiry are required. Nothing of a token is believed before its signature was verified, except the id of
the key.

PyJWT is an extra: it is imported when a provider is configured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from quiver.config.oidc import OidcSettings
from quiver.errors import ConfigError

if TYPE_CHECKING:
    from jwt import PyJWK

ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
LEEWAY_S: Final = 30
"""How far the clocks of provider and node may differ."""
TOKEN_LENGTH_MAX: Final = 8_000
KEYS_MAX: Final = 100
"""Keys of a set that are used."""
KEYS_BYTES_MAX: Final = 256 * 1024
"""Largest key set."""
ROLES_MAX: Final = 32
"""Roles of one token that count."""
EXPIRES_MS_MAX: Final = 1 << 53
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
"""What the metadata allows as the name of a user or role."""
_KEY_ID: Final = re.compile(r"[\x21-\x7e]{1,200}")


class BadJwtError(Exception):
    """A token is not valid; the message says why, and repeats nothing of it."""


class UnknownKeyError(BadJwtError):
    """No known key has the token's key id; the provider may have changed its keys."""


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What a valid token says."""

    user: str
    roles: tuple[str, ...]
    expires_ms: int
    """When the token is not valid any more, leeway included."""
    key_id: str


KeySet = Mapping[str, "PyJWK"]
"""Public keys by id; a key without one has the empty id."""


def require_library() -> None:
    """Raise `ConfigError`, with the command to run, unless PyJWT is installed."""
    try:
        import jwt  # noqa: F401
    except ImportError:
        raise ConfigError(
            "oidc.issuer is set, but PyJWT is not installed: run `pip install 'quivermq[oidc]'`", code="missing_extra"
        ) from None


def parse_keys(content: bytes) -> KeySet:
    """Return the usable keys of a JWKS document; others, such as secret keys and those for encryption, are left out.

    Raises:
        ValueError: it is not a key set, is too large, or holds no usable key; the message says which.
    """
    from jwt import PyJWK
    from jwt.exceptions import PyJWTError

    if len(content) > KEYS_BYTES_MAX:
        raise ValueError(f"the key set is larger than {KEYS_BYTES_MAX} bytes")
    try:
        listed = msgspec.json.decode(content, type=_KeySetDocument).keys
    except msgspec.DecodeError as error:
        raise ValueError(f"not a key set (JWKS): {error}") from None
    keys: dict[str, PyJWK] = {}
    for one in listed[:KEYS_MAX]:
        key_id, use = one.get("kid", ""), one.get("use", "sig")
        if one.get("kty") not in ("RSA", "EC", "OKP") or use != "sig" or not isinstance(key_id, str) or "d" in one:
            continue
        try:
            key = PyJWK(one)
        except (PyJWTError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            continue  # malformed, or of a kind that is not known here: the others are used all the same
        if key.algorithm_name in ALGORITHMS:
            keys[key_id] = key
    if not keys:
        raise ValueError(f"the key set has no public key for one of {', '.join(ALGORITHMS)}")
    return keys


class _KeySetDocument(msgspec.Struct, frozen=True):
    keys: list[dict[str, Any]]


def check_jwt(text: str, keys: KeySet, settings: OidcSettings) -> Claims:
    """Return what a token says, after everything about it was verified.

    Raises:
        UnknownKeyError: none of the keys has its key id.
        BadJwtError: it is not valid.
    """
    import jwt

    if len(text) > TOKEN_LENGTH_MAX:
        raise BadJwtError(f"it is longer than {TOKEN_LENGTH_MAX} characters")
    key = _find_key(text, keys)
    try:
        claims = jwt.decode(
            text,
            key,
            algorithms=[key.algorithm_name],
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=LEEWAY_S,
            options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
        )
    except jwt.PyJWTError as error:
        raise BadJwtError(_reason(error)) from None
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise BadJwtError("its claims are not valid") from None
    return Claims(
        user=_read_name(claims, settings),
        roles=_read_roles(claims, settings),
        expires_ms=min((int(claims["exp"]) + LEEWAY_S) * 1_000, EXPIRES_MS_MAX),
        key_id=key.key_id or "",
    )


def _find_key(text: str, keys: KeySet) -> PyJWK:
    import jwt

    try:
        header = jwt.get_unverified_header(text)
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        raise BadJwtError("it is not a JSON web token") from None
    if "crit" in header:
        raise BadJwtError("it demands extensions (crit), of which none is supported")
    key_id = header.get("kid", "")
    if not key_id and len(keys) == 1:
        key = next(iter(keys.values()))
    else:
        found = keys.get(key_id) if isinstance(key_id, str) else None
        if found is None:
            if isinstance(key_id, str) and _KEY_ID.fullmatch(key_id):
                raise UnknownKeyError("it is signed with a key that the provider does not publish")
            raise BadJwtError("it does not name its key (kid)")
        key = found
    if header.get("alg") != key.algorithm_name:
        raise BadJwtError(f"its algorithm is not that of its key, {key.algorithm_name}")
    return key


def _reason(error: Exception) -> str:
    import jwt

    reasons = {
        jwt.ExpiredSignatureError: "it has expired",
        jwt.ImmatureSignatureError: "it is not valid yet (nbf, iat)",
        jwt.InvalidAudienceError: "it is for another audience (aud)",
        jwt.InvalidIssuerError: "it is by another issuer (iss)",
        jwt.InvalidSignatureError: "its signature is wrong",
        jwt.InvalidKeyError: "the key that signed it is too short",
        jwt.MissingRequiredClaimError: "it lacks one of the claims exp, iss and aud",
    }
    return next((text for kind, text in reasons.items() if isinstance(error, kind)), "it is malformed")


def _read_name(claims: Mapping[str, Any], settings: OidcSettings) -> str:
    name = _find(claims, settings.name_claim)
    if not isinstance(name, str) or not name:
        raise BadJwtError(f"its claim {settings.name_claim} names no user")
    user = settings.name_prefix + name
    if not _NAME.fullmatch(user):
        raise BadJwtError(
            f"the name in its claim {settings.name_claim} is not one of a user here, which has letters, digits and "
            "._@- only, 100 at most: another claim may have one (oidc.name_claim)"
        )
    return user


def _read_roles(claims: Mapping[str, Any], settings: OidcSettings) -> tuple[str, ...]:
    if not settings.roles_claim:
        return ()
    found = _find(claims, settings.roles_claim)
    values = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    prefix = settings.roles_prefix
    roles = (one[len(prefix) :] for one in values if isinstance(one, str) and one.startswith(prefix))
    return tuple(sorted({role for role in roles if _NAME.fullmatch(role)}))[:ROLES_MAX]


def _find(claims: Mapping[str, Any], path: str) -> Any:
    """Return a claim by its name, or by the names of nested objects with dots between them; None if there is none."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
