"""Let these tests use the worlds of metadata that the metadata's own tests are made of."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "metadata"))
