"""Secrets: never shown by anything that prints, kept in files of one user, never sent in plain text."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import stat
import traceback
from pathlib import Path

import msgspec
import pytest

from quiver.addresses import is_loopback
from quiver.errors import ConfigError, RequestError
from quiver.security.secrets import (
    SECRET_BYTES_MAX,
    PasswordSource,
    Secret,
    TokenSource,
    check_channel,
    parse_secret,
    read_password,
    read_secret,
    write_secret,
)

TEXT = "qv_0011223344556677_" + "ab" * 32


def test_secret_is_shown_by_nothing_that_prints(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret(TEXT)
    token_source = TokenSource(token=secret)
    logging.getLogger("test").warning("token %s %r", secret, token_source)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r:>20}", "%s" % secret, repr(token_source), caplog.text]  # noqa: UP031
    shown += [repr({"token": secret}), repr([secret])]
    assert not [text for text in shown if TEXT in text]
    assert secret.reveal() == TEXT


def test_secret_is_not_encoded_by_accident() -> None:
    with pytest.raises(TypeError):
        msgspec.json.encode(TokenSource(token=Secret(TEXT)))


def test_traceback_with_a_secret_does_not_show_it() -> None:
    secret = Secret(TEXT)
    with pytest.raises(ValueError, match="hidden") as raised:
        raise ValueError(secret)
    shown = traceback.TracebackException.from_exception(raised.value, capture_locals=True).format()
    assert TEXT not in "".join(shown)


def test_secret_is_a_value_and_reaches_other_processes() -> None:
    secret = Secret(TEXT)
    assert secret == Secret(TEXT) != Secret("other")
    assert secret != TEXT
    assert hash(secret) == hash(Secret(TEXT))
    assert pickle.loads(pickle.dumps(secret)) == copy.deepcopy(secret) == secret
    assert (bool(secret), bool(Secret(""))) == (True, False)


def test_written_secret_is_read_back_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = str(tmp_path / "token")
    before = os.umask(0)
    try:
        write_secret(path, Secret(TEXT))
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert read_secret(path) == TokenSource(file=path).load() == Secret(TEXT)
    with pytest.raises(RequestError, match="exists") as refused:
        write_secret(path, Secret("other"))
    assert refused.value.code == "file_exists"
    assert read_secret(path) == Secret(TEXT)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TEXT)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600") as refused:
        read_secret(str(path))
    assert refused.value.code == "bad_token_file"


@pytest.mark.parametrize("content", ["", " \n", "two words", "x" * (SECRET_BYTES_MAX + 1), "é", "a\x00b", "a\nb"])
def test_file_without_a_token_is_refused_without_repeating_its_content(tmp_path: Path, content: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="does not hold a token") as refused:
        read_secret(str(path))
    assert not content.strip() or content not in str(refused.value)


def test_missing_file_directory_and_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, sentence in (("missing", "No such file"), ("pipe", "regular file"), (".", "Is a directory")):
        with pytest.raises(ConfigError, match=sentence):
            read_secret(str(tmp_path / name))


def test_bad_token_is_refused_without_repeating_it() -> None:
    with pytest.raises(RequestError) as refused:
        parse_secret("a secret\r\nHost: x", "token")
    assert "secret\r" not in str(refused.value)
    assert parse_secret(f" {TEXT}\n", "token") == Secret(TEXT)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST."])
def test_loopback_may_be_plain_text(host: str) -> None:
    assert is_loopback(host)
    check_channel(host, is_encrypted=False)


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "broker-1", "::", "0.0.0.0", "localhost.example.org", "127.0.0.1.nip.io", ""]
)
def test_other_hosts_need_encryption(host: str) -> None:
    assert not is_loopback(host)
    check_channel(host, is_encrypted=True)
    with pytest.raises(RequestError, match="https://") as refused:
        check_channel(host, is_encrypted=False)
    assert refused.value.code == "plain_text_token"


@pytest.mark.parametrize(
    ("content", "password"),
    [
        (b"two words\n", "two words"),
        (b" x ", " x "),
        ("\u00e9\r\n".encode(), "\u00e9"),
        *((bad, None) for bad in (b"", b"\n", b"a\nb", b"\xff", b"x" * (SECRET_BYTES_MAX + 1))),
    ],
)
def test_password_file_is_one_line_of_text(tmp_path: Path, content: bytes, password: str | None) -> None:
    path = tmp_path / "password"
    path.write_bytes(content)
    path.chmod(0o600)
    if password is not None:
        assert PasswordSource("ann", file=str(path)).load() == Secret(password)
        return
    with pytest.raises(ConfigError, match="does not hold a password") as refused:
        read_password(str(path))
    assert refused.value.code == "bad_password_file"
