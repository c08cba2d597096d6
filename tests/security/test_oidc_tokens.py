"""Tokens of an identity provider: which are accepted, and how its keys are read."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from token_provider import AUDIENCE, ISSUER, KeyServer, claims, key_set, new_key, public_jwk, sign
from wire_hosts import wait_until

from quiver.access import provider as provider_module
from quiver.access.json_web_tokens import KEYS_BYTES_MAX, BadJwtError, UnknownKeyError, check_jwt, parse_keys
from quiver.access.provider import IdentityProvider
from quiver.clock import SystemClock
from quiver.config import load_settings
from quiver.config.oidc import OidcSettings
from quiver.errors import ConfigError

KEYS = {algorithm: new_key(algorithm) for algorithm in ("RS256", "ES256", "EdDSA")}
KNOWN = parse_keys(key_set(KEYS))
SETTINGS = OidcSettings(issuer=ISSUER, audience=AUDIENCE, jwks_file="keys.json", roles_claim="realm_access.roles")


def _check(text: str, settings: OidcSettings = SETTINGS) -> Any:
    return check_jwt(text, KNOWN, settings)


def _refusal(text: str, settings: OidcSettings = SETTINGS) -> str:
    with pytest.raises(BadJwtError) as refused:
        _check(text, settings)
    assert text not in str(refused.value)
    return str(refused.value)


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", list(KEYS))
def test_good_token_names_its_user_its_roles_and_its_end(algorithm: str) -> None:
    roles = ["quiver-ops", "quiver-dev", "quiver-ops", "admin", "quiver-", "quiver-../x", 5]
    expires_s = int(time.time()) + 600
    found = _check(sign(KEYS[algorithm], algorithm, realm_access={"roles": roles}, exp=expires_s))
    assert (found.user, found.roles, found.key_id) == ("oidc.ann", ("dev", "ops"), algorithm)
    assert 0 < found.expires_ms - expires_s * 1000 <= 60_000
    several = _check(sign(KEYS[algorithm], algorithm, aud=["other", AUDIENCE], realm_access={"roles": "quiver-ops"}))
    assert several.roles == ("ops",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exp": timedelta(seconds=-60)}, "expired"),
        ({"nbf": timedelta(minutes=2)}, "not valid yet"),
        ({"iat": timedelta(minutes=2)}, "not valid yet"),
        ({"aud": "other"}, "another audience"),
        ({"aud": ["other"]}, "another audience"),
        ({"iss": ISSUER + "/"}, "another issuer"),
        ({"exp": None}, "lacks"),
        ({"iss": None}, "lacks"),
        ({"aud": None}, "lacks"),
        ({"exp": "soon"}, "malformed"),
        ({"sub": None}, "names no user"),
        ({"sub": ""}, "names no user"),
        ({"sub": "a b"}, "not one of a user here"),
        ({"sub": "auth0|5f7c8ec7"}, "letters, digits and"),
        ({"sub": "a;oidc;admin"}, "not one of a user here"),
        ({"sub": "x" * 100}, "not one of a user here"),
    ],
)
def test_token_whose_claims_are_not_right_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in _refusal(sign(KEYS["ES256"], "ES256", **changes))


@pytest.mark.parametrize("changes", [{"exp": 10**30}, {"exp": timedelta(seconds=-2)}, {"nbf": timedelta(seconds=10)}])
def test_clocks_may_differ_a_little_and_times_are_bounded(changes: dict[str, Any]) -> None:
    assert _check(sign(KEYS["EdDSA"], "EdDSA", **changes)).expires_ms <= 1 << 53


def _forge(header: dict[str, Any], signature: bytes = b"") -> str:
    def part(content: bytes) -> str:
        return base64.urlsafe_b64encode(content).rstrip(b"=").decode()

    return f"{part(json.dumps(header).encode())}.{part(json.dumps(claims()).encode())}.{part(signature)}"


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "HS256", "HS512", "RS512", "PS256", "ES384", ""])
def test_algorithm_that_is_not_that_of_the_key_is_refused(algorithm: str) -> None:
    for key_id in KEYS:
        assert "algorithm" in _refusal(_forge({"alg": algorithm, "kid": key_id, "typ": "JWT"}))


def test_public_key_is_not_the_secret_of_a_symmetric_algorithm() -> None:
    """The classic confusion: HMAC with the published key, in the forms in which an attacker has it."""
    public = KEYS["RS256"].public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for secret in (pem, pem.strip(), json.dumps(public_jwk(KEYS["RS256"], "RS256")).encode()):
        text = jwt.api_jws.PyJWS().encode(json.dumps(claims()).encode(), b"x" * 32, "HS256", {"kid": "RS256"})
        signed = text.rpartition(".")[0]
        mac = jwt.get_algorithm_by_name("HS256").sign(signed.encode(), secret)
        forged = f"{signed}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
        assert "algorithm" in _refusal(forged)


def test_token_of_another_key_is_refused() -> None:
    other = new_key("ES256")
    assert "signature" in _refusal(sign(other, "ES256"))
    assert "does not name its key" in _refusal(sign(other, None))
    for key_id in ("unknown", "x" * 200):
        with pytest.raises(UnknownKeyError):
            _check(sign(other, key_id))


@pytest.mark.parametrize("field", ["jwk", "jku", "x5u", "x5c"])
def test_key_that_a_token_brings_along_is_ignored(field: str) -> None:
    other = new_key("ES256")
    value = {"jwk": public_jwk(other, "ES256"), "x5c": ["MIIB"]}.get(field, "http://127.0.0.1:1/keys")
    for key_id in ("ES256", "unknown"):
        text = jwt.encode(claims(), other, "ES256", headers={"kid": key_id, field: value})
        with pytest.raises(BadJwtError):
            _check(text)


def test_token_without_a_key_id_needs_a_set_of_one_key() -> None:
    one = parse_keys(key_set({"": KEYS["ES256"]}))
    assert check_jwt(sign(KEYS["ES256"], None), one, SETTINGS).user == "oidc.ann"
    assert "key" in _refusal(sign(KEYS["ES256"], None))


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "a.b.c", "..", "qv", "é.é.é", "x" * 8_001, "e30.e30.e30", "eyJhbGciOiJSUzI1NiJ9." + "." * 50),
        _forge({"alg": "ES256", "kid": "ES256", "crit": ["exp"]}),
        _forge({"alg": "ES256", "kid": ["ES256"]}),
        base64.urlsafe_b64encode(b"[" * 4_000).decode() + ".e30.e30",
    ],
)
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(BadJwtError):
        _check(text)


def test_token_that_was_changed_is_refused() -> None:
    header, body, signature = sign(KEYS["ES256"], "ES256").split(".")
    changed = base64.urlsafe_b64encode(json.dumps(claims(sub="admin")).encode()).rstrip(b"=").decode()
    assert "signature" in _refusal(f"{header}.{changed}.{signature}")
    assert _refusal(f"{header}.{body}.") != ""


def test_name_without_a_prefix_and_from_another_claim() -> None:
    settings = OidcSettings(
        issuer=ISSUER, audience=AUDIENCE, jwks_file="x", name_claim="email", name_prefix="", roles_prefix=""
    )
    found = _check(sign(KEYS["ES256"], "ES256", email="ann@example.com"), settings)
    assert (found.user, found.roles) == ("ann@example.com", ())
    nested = OidcSettings(issuer=ISSUER, audience=AUDIENCE, jwks_file="x", roles_claim="https://x.y/roles")
    assert _check(sign(KEYS["ES256"], "ES256", **{"https://x.y/roles": ["quiver-a"]}), nested).roles == ("a",)


# -- key sets --------------------------------------------------------------------------------------


def test_keys_that_must_not_verify_tokens_are_left_out() -> None:
    good = public_jwk(KEYS["ES256"], "good")
    weak = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    listed = [
        good,
        {"kty": "oct", "kid": "secret", "k": "c2VjcmV0"},
        public_jwk(KEYS["ES256"], "encryption", use="enc"),
        public_jwk(KEYS["RS256"], "other", alg="RS512"),
        public_jwk(KEYS["RS256"], "confused", alg="HS256"),
        {"kty": "EC", "kid": "broken", "crv": "P-256", "x": "AA", "y": "AA"},
        {"kty": "new", "kid": "new"},
        {**public_jwk(KEYS["ES256"], "x"), "kid": 5},
        {**public_jwk(KEYS["RS256"], "list"), "alg": ["RS256"]},
        public_jwk(weak, "weak"),
    ]
    keys = parse_keys(json.dumps({"keys": listed}).encode())
    assert set(keys) == {"good", "weak"}
    with pytest.warns(jwt.warnings.InsecureKeyLengthWarning):
        text = sign(weak, "weak")
    with pytest.raises(BadJwtError, match="too short"):
        check_jwt(text, keys, SETTINGS)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"keys": []}', b'{"keys": [5]}', b" " * (KEYS_BYTES_MAX + 1)])
def test_content_that_is_no_key_set_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="key set"):
        parse_keys(content)


# -- the provider ----------------------------------------------------------------------------------


def _settings(**changes: Any) -> OidcSettings:
    return OidcSettings(**{"issuer": ISSUER, "audience": AUDIENCE, "refresh_ms": 50, **changes})


def _run(settings: OidcSettings, test: Callable[[IdentityProvider], Awaitable[None]]) -> None:
    async def main() -> None:
        provider = IdentityProvider(settings, SystemClock())
        running = asyncio.create_task(provider.run())
        try:
            await test(provider)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_keys_are_read_from_a_url_and_follow_a_rotation() -> None:
    first, second = new_key("ES256"), new_key("EdDSA")
    with KeyServer(key_set({"1": first})) as server:

        async def test(provider: IdentityProvider) -> None:
            await wait_until(lambda: provider.has_keys)
            assert provider.check(sign(first, "1")).user == "oidc.ann"
            changes: list[int] = []
            provider.on_change = lambda: changes.append(1)
            server.content = key_set({"2": second})
            await provider.wait_read()
            with pytest.raises(UnknownKeyError):
                provider.check(sign(second, "2"))
            await provider.wait_read()
            assert provider.check(sign(second, "2")).user == "oidc.ann"
            assert changes == [1]
            with pytest.raises(UnknownKeyError):  # the provider has withdrawn it
                provider.check(sign(first, "1"))

        _run(_settings(jwks_url=server.url, refresh_ms=86_400_000), test)


def test_unknown_keys_do_not_make_the_node_ask_all_the_time() -> None:
    key = new_key("ES256")
    with KeyServer(key_set({"1": key})) as server:

        async def test(provider: IdentityProvider) -> None:
            await wait_until(lambda: provider.has_keys and not provider.is_reading)
            for number in range(50):
                with pytest.raises(UnknownKeyError):
                    provider.check(sign(key, f"unknown-{number}"))
                await provider.wait_read()
            assert server.requests == 2

        _run(_settings(jwks_url=server.url, refresh_ms=86_400_000), test)


@pytest.mark.parametrize("failure", ["down", "status", "redirect", "garbage", "large"])
def test_last_good_keys_stay_in_use_while_the_provider_fails(failure: str) -> None:
    key = new_key("ES256")
    server = KeyServer(key_set({"1": key}))

    async def test(provider: IdentityProvider) -> None:
        await wait_until(lambda: provider.has_keys)
        server.status = {"status": 500, "redirect": 302}.get(failure, 200)
        server.content = {"garbage": b"<html>", "large": b" " * (KEYS_BYTES_MAX + 1)}.get(failure, server.content)
        if failure == "down":
            server.__exit__()
        await wait_until(lambda: provider.failures > 0)
        assert ISSUER in provider.problem
        assert provider.check(sign(key, "1")).user == "oidc.ann"
        if failure != "down":
            server.status, server.content = 200, key_set({"1": key})
            await wait_until(lambda: not provider.problem)

    server.__enter__()
    try:
        _run(_settings(jwks_url=server.url), test)
    finally:
        if failure != "down":
            server.__exit__()


def test_provider_that_answers_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "FETCH_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def test(provider: IdentityProvider) -> None:
            await wait_until(lambda: provider.failures > 0)
            assert not provider.has_keys

        _run(_settings(jwks_url=f"http://127.0.0.1:{silent.getsockname()[1]}/"), test)


def test_server_of_the_keys_must_have_a_certificate_of_a_trusted_authority(tmp_path: Path) -> None:
    authority, key = trustme.CA(), new_key("ES256")
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with KeyServer(key_set({"1": key}), context) as server:

        async def read(provider: IdentityProvider) -> None:
            await wait_until(lambda: provider.has_keys)

        async def refuse(provider: IdentityProvider) -> None:
            await wait_until(lambda: provider.failures > 0)
            assert "CERTIFICATE_VERIFY_FAILED" in provider.problem
            assert not provider.has_keys

        _run(_settings(jwks_url=server.url, ca_file=str(ca_file)), read)
        _run(_settings(jwks_url=server.url), refuse)


def test_key_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path, first, second = tmp_path / "keys.json", new_key("ES256"), new_key("ES256")
    path.write_bytes(key_set({"1": first}))

    async def test(provider: IdentityProvider) -> None:
        assert provider.check(sign(first, "1")).user == "oidc.ann"
        replacement = tmp_path / "new"
        replacement.write_bytes(key_set({"1": first, "2": second}))
        replacement.replace(path)
        await provider.wait_read()
        with pytest.raises(UnknownKeyError):
            provider.check(sign(second, "2"))
        await provider.wait_read()
        assert provider.check(sign(second, "2")).user == "oidc.ann"
        path.write_text("{")
        await wait_until(lambda: provider.failures > 1)
        assert provider.problem, "it stays one until the file is right again"
        assert provider.check(sign(second, "2")).user == "oidc.ann"

    _run(_settings(jwks_file=str(path)), test)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"audience": "x"}, "oidc.issuer is not set"),
        ({"issuer": "x", "jwks_file": "x"}, "oidc.audience is not set"),
        ({"issuer": "x", "audience": "x"}, "jwks_file and oidc.jwks_url"),
        ({"issuer": "x", "audience": "x", "jwks_file": "x", "jwks_url": "https://x"}, "jwks_file and oidc.jwks_url"),
        ({"issuer": "x", "audience": "x", "jwks_url": "http://10.0.0.1/keys"}, "https://"),
        ({"issuer": "x", "audience": "x", "jwks_url": "ftp://x/keys"}, "not a URL"),
        ({"issuer": "x", "audience": "x", "jwks_url": "https://"}, "not a URL"),
        ({"issuer": "x", "audience": "x", "jwks_url": "https://ann:secret@x/keys"}, "user name or password"),
        ({"issuer": "x", "audience": "x", "jwks_file": "x", "name_claim": ""}, "name_claim"),
        ({"issuer": "x", "audience": "x", "jwks_file": "x", "name_prefix": "corp/"}, "name_prefix"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        load_settings(flags={f"oidc.{name}": value for name, value in given.items()})
    assert "secret" not in str(refused.value)


def test_missing_library_and_files_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def make(**changes: Any) -> None:
        IdentityProvider(_settings(**changes), SystemClock())

    with pytest.raises(ConfigError, match=r"jwks_file .* cannot be used"):
        asyncio.run(make(jwks_file=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match=r"ca_file .* cannot be used"):
        asyncio.run(make(jwks_url="https://x/", ca_file=str(tmp_path / "missing")))
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(ConfigError, match=r"pip install 'quivermq\[oidc\]'") as refused:
        asyncio.run(make(jwks_url="https://x/"))
    assert refused.value.code == "missing_extra"
