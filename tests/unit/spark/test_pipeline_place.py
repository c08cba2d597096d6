"""Places of lakes: which paths and URLs name one, which are refused, and that none of them is taken for a directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.cli import main
from quiver.errors import RequestError, StorageError
from quiver.spark.pipelines import make_job
from quiver.spark.pipelines.lake import open_lake
from quiver.spark.pipelines.place import parse_output_file, parse_path, parse_place


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("/srv/lake/", "/srv/lake"),
        ("lake:7", os.path.abspath("lake:7")),
        ("file:///srv/my%20lake", "/srv/my lake"),
        ("file://localhost/srv/lake", "/srv/lake"),
        ("~/lake", os.path.expanduser("~/lake")),
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://bucket/lake", "gs://bucket/lake"),
        ("az://container/lake", "az://container/lake"),
        ("abfss://container@account.dfs.core.windows.net/lake", "abfss://container@account.dfs.core.windows.net/lake"),
    ],
)
def test_paths_and_urls_of_object_stores_name_places(text: str, url: str) -> None:
    assert parse_place(text, option="to").url == url


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "to is empty"),
        ("hdfs://host/lake", "unsupported scheme hdfs; use a path, or one of file://, s3://, gs://, az://, abfss://"),
        ("s3a://bucket/lake", "unsupported scheme s3a"),
        ("http://host/lake", "unsupported scheme http"),
        ("s3:/bucket/lake", "not a valid URL"),
        ("s3:///lake", "s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/lake", "credentials belong into the environment"),
        ("s3://bucket/lake?region=x", "without . and #"),
        ("abfss://container/lake", "abfss://CONTAINER@ACCOUNT"),
        ("file://host/lake", "without a host"),
    ],
)
def test_other_urls_are_refused_and_secrets_are_not_repeated(text: str, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as told:
        parse_place(text, option="to")
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "ftp://host", "http://", "http://me:secret@host"])
def test_endpoint_that_is_no_server_is_refused(endpoint: str) -> None:
    with pytest.raises(RequestError, match="endpoint must be https://HOST:PORT"):
        parse_place("s3://bucket/lake", option="to", endpoint=endpoint)


def test_only_an_endpoint_that_says_http_allows_connections_without_tls() -> None:
    plain, secure = (
        parse_place("s3://bucket/lake", option="to", endpoint=f"{scheme}://host:9000/").storage_options()
        for scheme in ("http", "https")
    )
    assert plain == {"aws_conditional_put": "etag", "aws_endpoint_url": "http://host:9000", "allow_http": "true"}
    assert secure["allow_http"] == "false"
    with pytest.raises(RequestError, match="only valid for an object store"):
        parse_place("/srv/lake", option="to", endpoint="http://host:9000")


@pytest.mark.parametrize(
    ("job", "options"),
    [
        ("archive", {"topic": "logs", "to": "swift://x/lake"}),
        ("replay", {"topic": "logs", "from": "swift://x/lake"}),
        ("audit", {"topic": "logs", "archive": "swift://x/lake"}),
        ("audit", {"topic": "logs", "report": "s3://bucket/report.md"}),
        ("audit", {"topic": "logs", "endpoint": "http://host"}),
        ("analyze", {"topic": "logs", "report": "s3://bucket/report.html"}),
        ("analyze", {"topic": "logs", "report": "/no/such/directory/report.html"}),
        ("ingest", {"topic": "logs", "paths": ["s3://bucket/logs"]}),
        ("archive", {"topic": "logs", "to": "s3://bucket/lake", "format": "parquet"}),
    ],
    ids=str,
)
def test_jobs_refuse_places_that_they_cannot_use_before_anything_is_done(job: str, options: dict[str, object]) -> None:
    with pytest.raises(RequestError) as told:
        make_job(job, options)
    assert told.value.code == "bad_option"


def test_command_refuses_another_scheme_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", "archive", "--topic", "logs", "--to", "ftp://host/lake"]) == 2
    assert "unsupported scheme ftp; use a path, or one of file://" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_local_paths_are_given_as_paths_or_file_urls(tmp_path: Path) -> None:
    assert parse_path(f"file://{tmp_path}/a.log", option="path") == f"{tmp_path}/a.log"
    assert parse_output_file(f"{tmp_path}/report.md", option="report") == f"{tmp_path}/report.md"
    with pytest.raises(RequestError, match="scheme gs is unsupported"):
        parse_path("gs://bucket/a.log", option="path")
    with pytest.raises(RequestError, match="cannot be written"):
        parse_output_file(str(tmp_path), option="report")


_EMPTY_STORE = """
from http.server import BaseHTTPRequestHandler, HTTPServer

class Empty(BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, flush=True)
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Empty)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def store() -> Iterator[subprocess.Popen[str]]:
    """A server without buckets, as a process: `deltalake` blocks all threads of this one while it waits."""
    server = subprocess.Popen([sys.executable, "-c", _EMPTY_STORE], stdout=subprocess.PIPE, text=True)
    yield server
    server.kill()
    server.communicate()


@pytest.mark.parametrize(
    "url", ["s3://bucket/lake", "gs://bucket/lake", "az://bucket/lake", "abfss://bucket@me.dfs.core.windows.net/lake"]
)
def test_every_kind_of_store_is_asked_at_its_endpoint_with_credentials_of_the_environment(
    url: str, store: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    for name, value in {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AZURE_STORAGE_ACCOUNT_NAME": "me",
        "AZURE_STORAGE_ACCOUNT_KEY": "aHVudGVyMg==",
        "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
    }.items():
        monkeypatch.setenv(name, value)
    assert store.stdout is not None
    place = parse_place(url, option="to", endpoint=f"http://127.0.0.1:{store.stdout.readline().strip()}")
    with pytest.raises(StorageError, match=r"cannot be used: .*404 Not Found") as told:
        open_lake(place)
    assert not re.search(r"hunter2|aHVudGVyMg|[\x1b\n]", str(told.value))
    assert re.search(r"bucket.*_delta_log", store.stdout.readline())
    assert list(tmp_path.iterdir()) == []
