"""How a cluster is named: the order of arguments, environment and contexts, and what decides about TLS."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from quiver import classic, connect_async
from quiver.cli import main
from quiver.config import load_settings
from quiver.contexts import (
    DEFAULT_URL,
    Context,
    ContextFile,
    add_context,
    contexts_path,
    find_credentials,
    load_contexts,
    remove_context,
    resolve,
    use_context,
)
from quiver.errors import ConfigError, NotAllowedError, NotFoundError, RequestError
from quiver.security.secrets import PasswordSource, Secret, TokenSource

PROD = Context(addresses=("https://prod-1:8002", "https://prod-2:8002"), ca_file="/etc/prod.pem")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("URL", "CONTEXT", "CA_FILE", "CERT_FILE", "KEY_FILE", "TOKEN_FILE", "USER", "PASSWORD_FILE"):
        monkeypatch.delenv(f"QUIVER_{variable}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "variables", "addresses", "source"),
    [
        ({}, {}, (DEFAULT_URL,), "default"),
        ({}, {"QUIVER_URL": "a:1, b:2"}, ("a:1", "b:2"), "environment"),
        ({"addresses": ["c:3", "d:4,e:5"]}, {"QUIVER_URL": "a:1"}, ("c:3", "d:4", "e:5"), "argument"),
        ({"context": "prod"}, {"QUIVER_URL": "a:1"}, PROD.addresses, "context 'prod'"),
        ({"context": "prod", "addresses": "https://x"}, {}, ("https://x",), "argument"),
        ({}, {"QUIVER_CONTEXT": "prod"}, PROD.addresses, "context 'prod' of QUIVER_CONTEXT"),
        ({}, {"QUIVER_CONTEXT": "prod", "QUIVER_URL": "https://a:1"}, ("https://a:1",), "environment"),
    ],
)
def test_first_source_that_names_the_cluster_wins(
    home: Path, arguments: dict[str, Any], variables: dict[str, str], addresses: tuple[str, ...], source: str
) -> None:
    add_context("prod", PROD, is_used=False)
    use_context("")
    found = resolve(**arguments, environment={"XDG_CONFIG_HOME": str(home), **variables})
    assert (found.addresses, found.source) == (addresses, source)
    assert found.is_tls == any(address.startswith("https") for address in addresses)


def test_context_in_use_names_the_cluster_until_something_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    add_context("prod", PROD, is_used=False)  # the first one is used
    assert (resolve().addresses, resolve().ca_file, resolve().is_tls) == (PROD.addresses, "/etc/prod.pem", True)
    assert resolve("127.0.0.1:9002") == resolve("127.0.0.1:9002", environment={"XDG_CONFIG_HOME": "/nowhere"})
    monkeypatch.setenv("QUIVER_URL", "http://a:1")
    assert (resolve().addresses, resolve().is_tls, resolve().ca_file) == (("http://a:1",), False, "")


@pytest.mark.parametrize("url", ["http://a", "https://a,http://b"])
def test_url_and_tls_that_contradict_each_other_are_refused(url: str) -> None:
    with pytest.raises(RequestError, match="https://") as refused:
        resolve(url, ca_file="ca.pem")
    assert refused.value.code == "bad_address"
    with pytest.raises(RequestError):
        add_context("odd", Context(addresses=tuple(url.split(",")), tls=True), is_used=False)
    assert load_contexts() == ContextFile()


def test_https_is_tls_and_http_is_not_whatever_comes_later(home: Path) -> None:
    environment = {"QUIVER_CA_FILE": "ca.pem", "QUIVER_CERT_FILE": "c.pem", "QUIVER_KEY_FILE": "k.pem"}
    plain = resolve("http://a", environment=environment)
    assert (plain.is_tls, plain.ca_file) == (False, "")
    for address in ("https://a", "HTTPS://a", "a:1", "quiver://a"):
        found = resolve(address, environment=environment)
        assert (found.is_tls, found.ca_file, found.certificate_file, found.key_file) == (
            True,
            "ca.pem",
            "c.pem",
            "k.pem",
        )
    assert resolve("https://a", environment={}).is_tls
    assert not resolve("a:1", environment={}).is_tls


@pytest.mark.parametrize("addresses", ["", " , ", []])
def test_address_that_is_given_and_empty_is_refused(addresses: Any) -> None:
    with pytest.raises(RequestError, match="no address given"):
        resolve(addresses)


def test_file_is_private_and_holds_absolute_paths(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    add_context("prod", Context(addresses=("a:1",), ca_file="ca.pem"), is_used=True)
    path = Path(contexts_path())
    assert path == home / "quiver" / "contexts.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_contexts().contexts["prod"].ca_file == str(home / "ca.pem")
    assert list(path.parent.iterdir()) == [path]


def test_context_that_does_not_exist_is_named_with_those_that_do() -> None:
    with pytest.raises(NotFoundError, match="unknown context 'x'; known are: none"):
        resolve(context="x")
    add_context("prod", PROD, is_used=False)
    for act in (lambda: use_context("x"), lambda: remove_context("x"), lambda: resolve(context="x")):
        with pytest.raises(NotFoundError, match="known are: prod"):
            act()
    with pytest.raises(RequestError, match="bad name"):
        add_context("../x", PROD, is_used=False)


@pytest.mark.parametrize("text", ["{", '{"contexts": 3}', '{"version": 2}'])
def test_file_that_cannot_be_read_is_an_error_with_its_path(text: str) -> None:
    add_context("prod", PROD, is_used=False)
    Path(contexts_path()).write_text(text)
    with pytest.raises(ConfigError, match=r"contexts\.json"):
        resolve()
    assert resolve("a:1").addresses == ("a:1",)  # not needed, not read


def test_variables_of_clients_are_no_settings_of_a_node() -> None:
    environment = {"QUIVER_URL": "a:1", "QUIVER_CONTEXT": "x", "QUIVER_CA_FILE": "x", "QUIVER_CERT_FILE": "x"}
    assert load_settings(environment={**environment, "QUIVER_KEY_FILE": "x"}) == load_settings()
    with pytest.raises(ConfigError, match="QUIVER_URI"):
        load_settings(environment={"QUIVER_URI": "a:1"})


def test_commands_keep_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["context", *arguments]) == code
        return capsys.readouterr().out

    assert run("list").startswith("no contexts in ")
    assert run("add", "prod", "https://a:1", "https://b:2", "--ca-file", "/ca.pem") == "added prod, in use now\n"
    assert run("add", "local", "http://127.0.0.1:8002") == "added local; in use is prod\n"
    assert [line.split() for line in run("list").splitlines()[1:]] == [
        ["-", "local", "http://127.0.0.1:8002", "-", "-", "-"],
        ["*", "prod", "https://a:1,https://b:2", "/ca.pem", "-", "-"],
    ]
    assert json.loads(run("show", "--json"))["addresses"] == ["https://a:1", "https://b:2"]
    assert "source: context 'prod'" in run("show")
    assert run("use", "local") == "in use: local\n"
    assert json.loads(run("list", "--json"))["current"] == "local"
    assert run("remove", "local") == "removed local\n"
    assert "source: default" in run("show")
    assert run("use", "local", code=2) == ""
    for bad in (",", "ftp://a", "https://ann:secret@a:1", "http://a:0"):
        assert run("add", "odd", bad, code=2) == ""
    assert "odd" not in load_contexts().contexts


def test_secret_in_an_address_is_refused_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--url", "https://ann:secret@a:1"]) == 2
    assert "secret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("context", ["prod", "unknown"])
def test_context_of_the_environment_is_ignored_once_the_cluster_is_named(home: Path, context: str) -> None:
    add_context("prod", PROD, is_used=False)
    environment = {"XDG_CONFIG_HOME": str(home), "QUIVER_CONTEXT": context}
    assert not resolve("a:1", environment=environment).is_tls
    found = resolve(environment=environment | {"QUIVER_URL": "b:2"})
    assert (found.addresses, found.is_tls, found.ca_file) == (("b:2",), False, "")


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("url", ["https://a:1", "HTTPS://a:1"])
def test_classic_library_never_speaks_plain_text_to_https(
    monkeypatch: pytest.MonkeyPatch, url: str, is_copied: bool
) -> None:
    if is_copied:  # into a program where Quiver is not installed
        monkeypatch.setitem(sys.modules, "quiver.contexts", None)
    texts, tls, _ = classic._find_cluster(url, "")
    assert texts == [url]
    assert tls is not None
    assert classic._find_cluster("http://a:1", "")[1] is None


def test_doctor_tells_a_wrong_context_from_a_cluster_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--context", "nope"]) == 2
    shown = capsys.readouterr().err
    assert "unknown context 'nope'" in shown
    assert "no node" not in shown


# Tokens.

TOKEN = "qv_0011223344556677_" + "ab" * 32


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return str(path)


def test_token_file_comes_from_the_first_source_that_names_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_context("prod", Context(addresses=("https://a:1",), token_file="prod.token"), is_used=True)
    assert resolve().token_file == str(Path("prod.token").absolute())
    assert resolve("https://a:1").token_file == ""  # it may be another cluster
    assert resolve("https://a:1", context="prod").token_file.endswith("prod.token")
    monkeypatch.setenv("QUIVER_TOKEN_FILE", "/environment")
    assert resolve("https://a:1").token_file == resolve().token_file == "/environment"
    assert resolve(context="prod").token_file.endswith("prod.token")
    assert resolve(token_file="/argument").token_file == "/argument"
    assert not resolve(token_file="/argument").is_tls or resolve().is_tls  # a token does not decide about TLS


def test_token_overrides_a_file_and_is_hidden(token_file: str) -> None:
    target = resolve("https://a:1", token_file=token_file)
    for found in (
        find_credentials(target),
        find_credentials(target, token=TOKEN),
        find_credentials(target, token=Secret(TOKEN)),
    ):
        assert found is not None
        assert found.load().reveal() == TOKEN
        assert TOKEN not in repr(found)
    assert find_credentials(resolve("https://a:1")) is None
    with pytest.raises(RequestError) as refused:
        find_credentials(target, token="two words")
    assert "two words" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "is_sent"),
    [
        ("http://127.0.0.1:8002", True),
        ("localhost:9002", True),
        ("quiver://[::1]:9002", True),
        ("::1", True),
        ("https://a:1", True),
        ("http://a:1", False),
        ("a:1", False),
        ("quiver://10.0.0.1", False),
        ("http://127.0.0.1:8002,a:1", False),
        ("[2001:db8::1]:9002", False),
    ],
)
def test_token_goes_to_another_machine_only_with_tls(address: str, is_sent: bool) -> None:
    if is_sent:
        assert find_credentials(resolve(address), token=TOKEN) is not None
        return
    with pytest.raises(NotAllowedError, match="never sent in plain text") as refused:
        find_credentials(resolve(address), token=TOKEN)
    assert refused.value.code == "plain_text_token"


@pytest.mark.parametrize(
    "command", [["status"], ["topic", "list"], ["context", "add", "x", "https://a:1"], ["pipeline", "ingest", "x"]]
)
@pytest.mark.parametrize("given", [["--token", TOKEN], [f"--token={TOKEN}"], ["--token"]])
def test_token_on_the_command_line_is_refused_and_not_repeated(
    capsys: pytest.CaptureFixture[str], command: list[str], given: list[str]
) -> None:
    assert main([*command, *given]) == 2
    shown = "".join(capsys.readouterr())
    assert "--token-file" in shown
    assert TOKEN not in shown


def test_context_with_a_token_file_that_others_can_read_is_refused(
    capsys: pytest.CaptureFixture[str], token_file: str
) -> None:
    assert main(["context", "add", "prod", "https://a:1", "--token-file", token_file]) == 0
    assert load_contexts().contexts["prod"].token_file == token_file
    assert main(["context", "show"]) == 0
    assert main(["context", "list", "--json"]) == 0
    assert TOKEN not in "".join(capsys.readouterr())
    Path(token_file).chmod(0o644)
    assert main(["context", "add", "other", "https://a:1", "--token-file", token_file]) == 2
    assert "chmod 600" in capsys.readouterr().err
    assert main(["status", "--context", "prod"]) == 2
    assert "chmod 600" in capsys.readouterr().err


@pytest.mark.parametrize("is_copied", [False, True])
def test_classic_library_never_sends_a_token_in_plain_text(monkeypatch: pytest.MonkeyPatch, is_copied: bool) -> None:
    if is_copied:
        monkeypatch.setitem(sys.modules, "quiver.contexts", None)
    load = classic._find_cluster("https://a:1", "", token=TOKEN)[2]
    assert load is not None
    assert load() == TOKEN
    assert classic._find_cluster("http://127.0.0.1:1", "", token=TOKEN)[2] is not None
    with pytest.raises((NotAllowedError, ValueError), match="plain text"):
        classic.Producer("http://a:1", token=TOKEN)


def test_copy_of_the_classic_library_refuses_a_token_file(monkeypatch: pytest.MonkeyPatch, token_file: str) -> None:
    assert classic.Producer("https://a:1", token_file=token_file)._http._token == TOKEN
    monkeypatch.setitem(sys.modules, "quiver.contexts", None)
    with pytest.raises(ValueError, match="pass token"):
        classic.Producer("https://a:1", token_file=token_file)


# Passwords.

PASSWORD = "correct horse battery"


@pytest.fixture
def password_file(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    path.chmod(0o600)
    return str(path)


def test_first_source_with_credentials_decides_between_token_and_password(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_context("prod", Context(addresses=("a:1",), tls=True, user="ann", password_file="ann.password"), is_used=True)
    assert (resolve().user, resolve().password_file) == ("ann", str(Path("ann.password").absolute()))
    assert resolve("b:1").user == ""  # it may be another cluster
    monkeypatch.setenv("QUIVER_TOKEN_FILE", "/token")
    assert (resolve().user, resolve().password_file, resolve().token_file) == ("", "", "/token")
    found = resolve(user="bob", password_file="/bob")
    assert (found.user, found.password_file, found.token_file) == ("bob", "/bob", "")
    monkeypatch.delenv("QUIVER_TOKEN_FILE")
    monkeypatch.setenv("QUIVER_PASSWORD_FILE", "/environment")
    assert (resolve("b:1", user="bob").user, resolve("b:1", user="bob").password_file) == ("bob", "/environment")
    with pytest.raises(RequestError, match="give one of them") as refused:
        resolve(user="bob", token_file="/token")
    assert refused.value.code == "bad_credentials"


def test_password_needs_a_user_and_a_user_needs_a_password(password_file: str) -> None:
    by_file = find_credentials(resolve("a:1", tls=True, user="ann", password_file=password_file))
    by_text = find_credentials(resolve("a:1", tls=True, user="ann"), password=PASSWORD)
    for found in (by_file, by_text):
        assert isinstance(found, PasswordSource)
        assert (found.user, found.load().reveal()) == ("ann", PASSWORD)
        assert PASSWORD not in repr(found)
    for target, given in (
        (resolve("a:1", tls=True, user="ann"), {}),
        (resolve("a:1", tls=True), {"password": PASSWORD}),
        (resolve("a:1", tls=True, password_file=password_file), {}),
        (resolve("a:1", tls=True, user="ann"), {"password": PASSWORD, "token": TOKEN}),
    ):
        with pytest.raises(RequestError) as refused:
            find_credentials(target, **given)
        assert refused.value.code == "bad_credentials"
        assert PASSWORD not in str(refused.value)
    overridden = find_credentials(resolve("a:1", tls=True, user="ann"), token=TOKEN)
    assert isinstance(overridden, TokenSource), "the user may be that of a context"
    with pytest.raises(RequestError, match="both given"):
        connect_async("a:1", tls=True, token=TOKEN, user="ann")
    with pytest.raises(RequestError, match="both given"):
        connect_async("a:1", tls=True, token=TOKEN, password_file=password_file)


@pytest.mark.parametrize(
    ("address", "code"),
    [("a:1", "plain_text_password"), ("https://a:1", "bad_address"), ("http://127.0.0.1:1", "bad_address")],
)
def test_password_is_for_the_wire_protocol_and_encrypted(address: str, code: str) -> None:
    with pytest.raises(RequestError) as refused:
        find_credentials(resolve(address, user="ann"), password=PASSWORD)
    assert refused.value.code == code
    assert find_credentials(resolve("127.0.0.1:1", user="ann"), password=PASSWORD) is not None


@pytest.mark.parametrize("command", [["status"], ["context", "add", "x", "a:1"], ["pipeline", "ingest", "x"]])
def test_password_on_the_command_line_is_refused_and_not_repeated(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, "--password", PASSWORD]) == 2
    shown = "".join(capsys.readouterr())
    assert "--password-file" in shown
    assert PASSWORD not in shown


def test_context_with_a_password_file_that_others_can_read_is_refused(
    capsys: pytest.CaptureFixture[str], password_file: str
) -> None:
    given = ["a:1", "--tls", "--username", "ann", "--password-file", password_file]
    assert main(["context", "add", "prod", *given]) == 0
    assert load_contexts().contexts["prod"].user == "ann"
    Path(password_file).chmod(0o640)
    assert main(["context", "add", "other", *given]) == 2
    assert "chmod 600" in capsys.readouterr().err
