"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# No test may depend on how fast the machine is: a busy one would make it fail.
settings.register_profile("quiver", deadline=None)
settings.load_profile("quiver")
