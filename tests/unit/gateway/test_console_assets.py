"""The files of the console: complete, unchanged, and nothing in them that the page may not do."""

from __future__ import annotations

import hashlib
import re

import pytest

from quiver.errors import NotFoundError
from quiver.gateway.console.assets import PAGE, ConsoleAssets, content_security_policy, load_assets

OWN = sorted(name for name in load_assets() if name.endswith((".js", ".css", ".html")) and "vendor-" not in name)


def test_libraries_are_those_that_were_fetched() -> None:
    lines = load_assets()["vendor-checksums.txt"].body.decode().splitlines()
    listed = {line.split()[1]: line.split()[0] for line in lines}
    written = {name for name in load_assets() if name.startswith("vendor-") and not name.endswith(".txt")}
    assert set(listed) == written
    for name, checksum in listed.items():
        assert hashlib.sha256(load_assets()[name].body).hexdigest() == checksum, f"{name}: run make console"


def test_licenses_of_all_libraries_are_there() -> None:
    licenses = load_assets()["vendor-licenses.txt"].body.decode()
    for line in load_assets()["vendor-checksums.txt"].body.decode().splitlines():
        assert line.split()[2].replace("@", " ") in licenses


@pytest.mark.parametrize("name", OWN)
def test_file_names_no_other_host_and_only_files_that_exist(name: str) -> None:
    text = load_assets()[name].body.decode()
    assert not re.search(r"(?:https?:)?//(?!127)[a-z0-9-]+\.[a-z]", text.replace("http://www.w3.org/", ""))
    for found in re.findall(r'from "\./([^"]+)"|(?:href|src)="/console/([^"]+)"', text):
        assert "".join(found) in load_assets()


def test_page_has_no_inline_script_or_style() -> None:
    text = load_assets()[PAGE].body.decode()
    assert "style=" not in text
    assert "<style" not in text
    assert not re.search(r"<script(?![^>]* src=)", text)
    assert not re.search(r"\son\w+=", text)


def test_policy_allows_the_page_itself_and_the_nodes() -> None:
    policy = content_security_policy(["https://node-2:8002"])
    assert "default-src 'none'" in policy
    assert "connect-src 'self' https://node-2:8002" in policy
    assert "unsafe" not in policy


def test_only_files_of_the_console_are_served() -> None:
    assets = ConsoleAssets(list)
    assert assets.file("app.js").content_type.startswith("text/javascript")
    for name in ("", "index.html", "../assets.py", "assets.py", "vendor-preact.d.ts", "app.js/"):
        with pytest.raises(NotFoundError):
            assets.file(name)
