"""Take the pictures of the console's pages for the documentation, and write the table of them: `make screenshots`.

    python tests/browser/make_screenshots.py [--to docs/images] [--minutes 5] [--only queue]

Every page is taken in both themes, from a cluster of three processes with a little load, and those about access from a
secure one. A fourth node joins for the page of moves. The pictures have one pixel per pixel of the page, so that they
stay small. It needs Chromium. With --only, or another folder, the documentation is left as it is.
"""

# ruff: noqa: E402 - the folders of what is imported are added first
from __future__ import annotations

import argparse
import re
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Literal, NamedTuple

TESTS = Path(__file__).parents[1]
for _folder in ("browser/shared", "chaos", "integration", "security"):
    sys.path.insert(0, str(TESTS / _folder))

from chaos_cluster import Cluster, running_cluster
from chromium import find_chromium
from console_load import Load
from console_page import PATIENCE_MS, table
from gateway_nodes import ask
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright
from secured_cluster import SecuredCluster, secured_cluster

IMAGES = TESTS.parent / "docs" / "images"
PAGE = TESTS.parent / "docs" / "console.md"
THEMES = ("light", "dark")
WIDTH = 1280
PHONE: ViewportSize = {"width": 390, "height": 844}
SETTLING_MS = 2_500
"""Until charts are drawn, and lists are loaded for the second time."""
PREPARED_MS = 1_500
"""Until the page shows what was done on it, and not so long that all moves are over."""
SETTINGS = ("--log-index-interval-bytes", "32768")
"""One setting has another source than its default."""
TABLES = {"group": "Members", "queue": "Dead letters", "moves": "Moves", "pipelines": "Runs"}
"""What is waited for on some pages: a table by its label."""
_TABLE = re.compile(r"(?<=<!-- pictures: made by `make screenshots` -->\n).*?(?=<!-- end of pictures -->)", re.DOTALL)


class Picture(NamedTuple):
    """A page, what is to be seen on it, and what is done before it is taken."""

    name: str
    route: str
    shows: str
    height: int = 860
    prepare: Callable[[Page], None] | None = None

    def file(self, theme: str) -> str:
        return f"console-{self.name}-{theme}.png"


def show_record(page: Page) -> None:
    page.get_by_role("button", name=re.compile("Show record")).nth(5).click()


def show_changed_settings(page: Page) -> None:
    page.get_by_label("Filter").fill("log.")


OPEN = (
    Picture("overview", "", "health, charts of the last 15 minutes, nodes"),
    Picture("topics", "topics", "topics with their sizes and rates", 520),
    Picture("topic", "topics/orders", "which node leads which partition, and which replicas are in sync", 620),
    Picture("records", "topics/orders/records", "records, with one as a JSON tree", 1080, show_record),
    Picture("consumers", "consumers", "consumers, groups and their lags"),
    Picture("group", "consumers/group/billing", "members of a group, their partitions, lag"),
    Picture("queue", "consumers/group/mailer", "jobs of a work queue by partition, and its dead letters"),
    Picture("cluster", "cluster", "nodes, managers, CPU and memory"),
    Picture("events", "cluster/events", "elections and other events"),
    Picture("settings", "cluster/settings", "settings in force, and what set each", 860, show_changed_settings),
    Picture("explain", "cluster/explain/orders/0", "the explanation of a partition"),
    Picture("pipelines", "pipelines", "runs of pipelines, with verdicts and reports", 420),
)
MOVES = Picture("moves", "cluster/moves", "replicas on their way to a new node", 520)
SECURED = (
    Picture("access", "access", "users of a secure cluster", 800),
    Picture("user", "access/users/alice", "a user: tokens, roles, grants", 800),
)
PHONES = (Picture("phone", "topics/orders", "a topic on a phone"),)


class Camera:
    """Takes pictures with a browser."""

    def __init__(self, browser: Browser, directory: Path, only: str) -> None:
        self._browser = browser
        self._directory = directory
        self._only = only

    def take(
        self,
        address: str,
        pictures: tuple[Picture, ...],
        *,
        themes: tuple[str, ...] = THEMES,
        viewport: ViewportSize | None = None,
        token: str = "",
    ) -> None:
        """Take pages of the console at an address."""
        for picture in pictures:
            if self._only not in ("", picture.name):
                continue
            for theme in themes:
                with self._open(viewport or {"width": WIDTH, "height": picture.height}, theme) as page:
                    self._draw(page, f"{address}/console#/{picture.route}", picture, token)
                    path = self._directory / picture.file(theme)
                    path.write_bytes(compress(page.screenshot(animations="disabled")))
                sys.stdout.write(f"{path} {path.stat().st_size // 1024} KiB\n")

    @contextmanager
    def _open(self, viewport: ViewportSize, theme: str) -> Iterator[Page]:
        scheme: Literal["dark", "light"] = "dark" if theme == "dark" else "light"
        context = self._browser.new_context(viewport=viewport, color_scheme=scheme, ignore_https_errors=True)
        try:
            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            yield page
        finally:
            context.close()

    def _draw(self, page: Page, url: str, picture: Picture, token: str) -> None:
        page.goto(url)
        if token:
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Log in").click()
        expect(page.locator("main h1")).to_be_attached()
        expect(page.locator(".loading")).to_have_count(0)
        page.wait_for_timeout(SETTLING_MS)
        if picture.prepare is not None:
            picture.prepare(page)
            page.wait_for_timeout(PREPARED_MS)
        if picture.name in TABLES:
            expect(table(page, TABLES[picture.name])).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)


def compress(png: bytes) -> bytes:
    """Return the same picture in fewer bytes: the browser compresses in a hurry."""
    chunks, data, at = [], b"", 8
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        at += size + 12
        if kind == b"IDAT":
            data += content
        else:
            chunks.append((kind, content))
    chunks.insert(-1, (b"IDAT", zlib.compress(zlib.decompress(data), 9)))
    parts = [
        struct.pack(">I", len(one)) + kind + one + struct.pack(">I", zlib.crc32(kind + one)) for kind, one in chunks
    ]
    return png[:8] + b"".join(parts)


def make_moves(cluster: Cluster) -> Picture:
    """Add a node; return a picture that has replicas moved to it in one theme, and away from it in the other."""
    joined = cluster.add_broker(4)
    joined.start()
    joined.wait_ready()
    paths = cycle(("/cluster/rebalance", "/brokers/4/drain"))

    def begin(page: Page) -> None:
        status, answer = ask(cluster.nodes[0].http, "POST", next(paths), {})
        assert status == 200, answer

    return MOVES._replace(prepare=begin)


def add_users(secured: SecuredCluster) -> None:
    secured.must("POST", "/topics", {"topic_name": "orders"})
    secured.must("POST", "/roles", {"role": "readers"})
    secured.must("POST", "/acls", {"subject": "role:readers", "verb": "read", "kind": "topic", "name": "orders"})
    for user in ("alice", "bob", "metrics"):
        secured.must("POST", "/users", {"user": user})
    secured.must("POST", "/roles/readers/users/alice")
    secured.must("POST", "/acls", {"subject": "user:alice", "verb": "write", "kind": "topic", "name": "notes"})
    for lasting_ms in (3 * 24 * 3_600_000, 90 * 24 * 3_600_000):
        secured.must("POST", "/tokens", {"user": "alice", "lasting_ms": lasting_ms})


def write_table(page: Path) -> None:
    """Write the table of all pictures into the page, which has a place for it."""
    lines = ["| page | light | dark |", "|---|---|---|"]
    for picture in (*OPEN, MOVES, *SECURED):
        cells = [f"![{picture.shows}, {theme}](images/{picture.file(theme)})" for theme in THEMES]
        lines.append(f"| {picture.name} | {cells[0]} | {cells[1]} |")
    text, count = _TABLE.subn("\n".join(lines) + "\n", page.read_text())
    assert count == 1, f"{page} has no place for the table"
    page.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Take the pictures of the console for the documentation.")
    parser.add_argument("--to", type=Path, default=IMAGES, help="folder of the pictures")
    parser.add_argument("--minutes", type=float, default=5.0, help="load before the first picture, for the charts")
    parser.add_argument("--only", default="", help="name of a picture, such as queue")
    given = parser.parse_args()
    chromium = find_chromium()
    if not chromium:
        sys.stderr.write("error: there is no Chromium: apt-get install chromium\n")
        return 2
    given.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quiver-") as name:
        scratch = Path(name)
        for folder in ("open", "secured"):
            (scratch / folder).mkdir()
        with (
            running_cluster(scratch / "open", settings=SETTINGS) as cluster,
            secured_cluster(scratch / "secured") as secured,
            Load(cluster.nodes[0].wire, scratch),
        ):
            add_users(secured)
            time.sleep(given.minutes * 60)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
                camera = Camera(browser, given.to, given.only)
                address = f"http://{cluster.nodes[0].http}"
                camera.take(address, OPEN)
                camera.take(address, PHONES, themes=("dark",), viewport=PHONE)
                camera.take(secured.url, SECURED, token=secured.secrets[0])
                if given.only in ("", "moves"):
                    camera.take(address, (make_moves(cluster),))
                browser.close()
    if not given.only and given.to.resolve() == IMAGES:
        write_table(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
