"""Let these tests use the worlds that the tests of metadata and brokers are made of."""

from __future__ import annotations

import sys
from pathlib import Path

for area in ("metadata", "broker"):
    sys.path.insert(0, str(Path(__file__).parent.parent / area))
