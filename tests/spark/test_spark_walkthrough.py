"""A newcomer follows the pages on Spark and logs and the README's pipelines, from a wheel in a new environment."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from walkthrough import ROOT, SPARK_PAGE, Walk, commands


@pytest.mark.timeout(1800)
def test_spark_page_works_as_it_stands(newcomer: Path, tmp_path: Path) -> None:
    walk = Walk(newcomer, tmp_path, 22_900, variables={})
    scripts = re.findall(r"^```python\n(.*?)^```$", SPARK_PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for name, script in zip(("first_read.py", "copy_logs.py"), scripts, strict=False):
        shown = script.replace("127.0.0.1:8002", f"127.0.0.1:{walk.ports[8002]}")
        (walk.directory / name).write_text(shown)
    with gzip.open(walk.directory / "events.jsonl.gz", "wt") as file:
        file.write('{"user": "a", "at": 1, "what": "b"}\n')
    pq.write_table(pa.table({"key": [b"c"], "value": [b"d"]}), walk.directory / "more.parquet")
    with walk.cluster():
        walk.run("seq 100000 | quiver produce logs")
        for page in (SPARK_PAGE, ROOT / "docs/logs.md", ROOT / "README.md"):
            for command in commands(page, "spark"):
                walk.run(command)
