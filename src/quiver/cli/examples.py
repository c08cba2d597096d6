"""Examples at the end of a command's help."""

from __future__ import annotations


def examples(*commands: str) -> str:
    """Return an epilog that shows commands as they are typed, one per line."""
    if len(commands) == 1:
        return f"Example: {commands[0]}"
    # The character that click takes for "leave these lines as they are".
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)
