"""Key rings: read from a file or a command, refused with a sentence that repeats no key."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from quiver.errors import ConfigError, DecodeError, RequestError
from quiver.security.key_ring import KeyRing, load_key_ring, make_key_line, parse_key_ring

SECRET = "ab" * 32


def test_first_key_wraps_and_all_unwrap() -> None:
    old = parse_key_ring(make_key_line("2025"), "test")
    wrapped = old.wrap(b"d" * 32, "42")
    both = parse_key_ring(f"{make_key_line('2026')}\n\n# the old one\n2025 {SECRET}\n", "test")
    assert both.names == ("2026", "2025")
    assert both.wrap(b"d" * 32, "42").key == "2026"
    assert old.unwrap(wrapped, "42") == b"d" * 32
    with pytest.raises(DecodeError, match="'2025' does not open it"):
        both.unwrap(wrapped, "42")
    with pytest.raises(DecodeError):
        old.unwrap(wrapped, "43")


def test_wrapping_twice_gives_other_bytes() -> None:
    keys = KeyRing({"a": bytes(32)})
    assert keys.wrap(b"d" * 32, "1").wrapped != keys.wrap(b"d" * 32, "1").wrapped


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has 0 keys"),
        ("# nothing\n", "has 0 keys"),
        (f"a {SECRET}\na {SECRET[::-1]}", "line 2: there is another key 'a'"),
        (f"a {SECRET[:-2]}", "line 1: it must be the name of a key and 64 hexadecimal digits"),
        (f"{SECRET}", "line 1: it must be"),
        (f"a {SECRET} more", "line 1: it must be"),
        (f"a/b {SECRET}", "line 1: it must be"),
        (f"a {SECRET[:-1]}x", "line 1: it must be"),
    ],
)
def test_bad_text_is_refused_without_repeating_it(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_key_ring(text, "keys")
    assert sentence in caught.value.message
    assert SECRET[:8] not in caught.value.message


def test_ring_shows_names_only() -> None:
    assert repr(parse_key_ring(f"a {SECRET}", "keys")) == "KeyRing(a)"


def test_bad_name_of_a_new_key_is_refused() -> None:
    with pytest.raises(RequestError, match="no name of a key"):
        make_key_line("a b")


def test_file_must_belong_to_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a {SECRET}\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key_ring(file=str(path), command="")
    path.chmod(0o600)
    ring = load_key_ring(file=str(path), command="")
    assert ring is not None
    assert ring.names == ("a",)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_key_ring(file=str(tmp_path / "missing"), command="")
    with pytest.raises(ConfigError, match="directory"):
        load_key_ring(file=str(tmp_path), command="")
    with pytest.raises(ConfigError, match="not both"):
        load_key_ring(file=str(path), command="true")
    assert load_key_ring(file="", command="") is None


def test_command_prints_the_keys_and_runs_without_a_shell() -> None:
    command = shlex.join((sys.executable, "-c", f"print('a {SECRET}')"))
    ring = load_key_ring(file="", command=command)
    assert ring is not None
    assert ring.names == ("a",)
    with pytest.raises(ConfigError, match="ended with status 3"):
        load_key_ring(file="", command=shlex.join((sys.executable, "-c", "raise SystemExit(3)")))
    with pytest.raises(ConfigError, match="cannot be run"):
        load_key_ring(file="", command="/nonexistent/command")
    with pytest.raises(ConfigError, match="cannot be run"):
        load_key_ring(file="", command="true; echo a")
