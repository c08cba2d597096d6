"""The package without its extra: reading and building batches needs neither numpy nor pyarrow."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["numpy"] = sys.modules["pyarrow"] = None  # any import of them fails
from quiver.record import Batch, Compression, build_batch
for compression in Compression:
    built = build_batch(["a", None] * 50, timestamp=1, keys=["k"] * 100, compression=compression)
    assert Batch.decode(built).values() == [b"a", None] * 50
try:
    import quiver.record.arrow
except ImportError:
    print("works without")
"""


def test_package_works_without_numpy_and_pyarrow() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("works without\n", "")


def test_package_does_not_import_numpy_or_pyarrow() -> None:
    script = "import sys, quiver.record; print(sorted({'numpy', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
