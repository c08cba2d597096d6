"""`python -m quiver`: the same as the command `quiver`."""

from __future__ import annotations

from quiver.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
