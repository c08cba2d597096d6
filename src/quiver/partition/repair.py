"""What happens when a leader cannot read its own records: the damage is repaired, and meanwhile another leads.

A reader must not be the only one to know: it would be sent back to the same bytes for ever. The node stops as for
damage that it meets itself, looks at every byte when it comes back, and fetches from the others what is bad.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quiver.errors import DamageError, UnavailableError
from quiver.replication import Member


@contextmanager
def repairing(member: Member) -> Iterator[None]:
    """Have damage repaired that is met inside; who met it is told to ask again, since another replica will lead."""
    try:
        yield
    except DamageError as error:
        member.handle_failure(error)
        message = f"not done: what this replica has stored is damaged, and is repaired from the others: {error}"
        raise UnavailableError(message, code="damaged") from error
