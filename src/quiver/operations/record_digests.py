"""The digest of a partition's records, added up batch by batch; see `docs/protocol/digest.md`. Needs pyarrow."""

from __future__ import annotations

from quiver.errors import ConfigError
from quiver.model import Offset
from quiver.record import Batch


class RecordDigest:
    """Adds up the records from `first_offset` to `end_offset`; `shift` is added to each record's offset first."""

    def __init__(self, first_offset: int, end_offset: int, *, shift: int = 0) -> None:
        try:
            from quiver.record import arrow, digest
        except ImportError:
            raise ConfigError("a backup needs pyarrow to compare records: pip install 'quivermq[arrow]'") from None
        self._to_arrow, self._digest = arrow.to_arrow, digest
        self._first, self._end, self._shift = Offset(first_offset), Offset(end_offset), shift
        self._sum = digest.Digest()

    def add(self, batch: Batch) -> None:
        """Add the batch's records that are in the range."""
        records = self._to_arrow(batch, self._first, self._end)
        if not len(records):
            return
        lanes = self._digest.bind(self._digest.digest_contents(records), self._digest.offsets_of(records) + self._shift)
        low, high = (int(lane.sum()) for lane in lanes)
        self._sum += self._digest.Digest(len(records), low, high)

    @property
    def count(self) -> int:
        """Return how many records were added."""
        return self._sum.count

    @property
    def text(self) -> str:
        """Return the digest as 32 hexadecimal digits."""
        return self._sum.text
