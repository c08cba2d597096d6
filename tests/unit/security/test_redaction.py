"""Passwords in URLs of databases are not shown."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from quiver.cli.config import config
from quiver.config import redact_url

PASSWORD = "s3cr:et@word"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", ""),
        ("sqlite:////var/lib/x.sqlite", "sqlite:////var/lib/x.sqlite"),
        ("postgresql+psycopg://u@h/d", "postgresql+psycopg://u@h/d"),
        ("postgresql+psycopg://u:p@h:5432/d", "postgresql+psycopg://u:<hidden>@h:5432/d"),
        ("postgresql+psycopg://u:p@q@h/d?x=1", "postgresql+psycopg://u:<hidden>@h/d?x=1"),
        ("postgresql+psycopg://h/d?user=u&password=p&x=1", "postgresql+psycopg://h/d?user=u&password=<hidden>&x=1"),
        ("postgresql+psycopg://h/d?sslpassword=p", "postgresql+psycopg://h/d?sslpassword=<hidden>"),
        ("u:p@h", "<hidden>"),
        ("127.0.0.1:9002", "127.0.0.1:9002"),
    ],
)
def test_password_of_a_url_is_hidden(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_settings_are_shown_without_the_password(as_json: tuple[str, ...]) -> None:
    url = f"postgresql+psycopg://quiver:{PASSWORD}@db.example/quiver"
    result = CliRunner().invoke(config, ["show", "--metadata-db", url, *as_json])
    assert result.exit_code == 0, result.output
    assert "s3cr" not in result.output
    assert "word" not in result.output.split("db.example")[0].rpartition("quiver:")[2]
    assert "db.example" in result.output
