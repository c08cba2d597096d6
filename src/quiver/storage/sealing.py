"""Encrypt the entries and snapshots of one log with AES-256-GCM.

A **sealed** batch keeps its header readable (term, index, offsets, timestamps, counts, sizes): recovery, truncation
and the sparse index work on sealed logs without any key, and so does `quiver log verify`. Its payload is encrypted
together with the producer's checksum; the header's checksums cover the encrypted bytes, so that a torn tail and damage
are told apart exactly as in a plain log.

    sealed payload = nonce (12) · encrypted (producer's checksum · payload) · tag (16)

The rules that make this sound:
- every log directory has its own random data key (`data_key.py`), so no entry of another log, of another replica or of
  an earlier life of this one can be opened here;
- the header is authenticated with the payload: an entry cannot be moved to another index, term or offset;
- a nonce is never derived from a position: after a truncation other bytes are written to the same index and position.
  It is random, 96 bits, for each write. The key changes every `ENTRIES_PER_KEY` indexes, so that one key seals about
  a million batches (times the rewrites of the same indexes): a repetition has a probability below 2⁻⁵⁷ for each key,
  where NIST SP 800-38D allows 2⁻³² and 2³² messages;
- a log is sealed entirely or not at all: a plain entry in a sealed log is damage.

Only `cryptography` does cryptography. The module is loaded only by nodes that have keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from quiver.errors import DecodeError
from quiver.model import Buffer
from quiver.record.batch import Batch
from quiver.record.header import (
    ENCODING_SEALED,
    HEADER_BYTES,
    PAYLOAD_CRC_POSITION,
    BatchHeader,
    finish_sealed,
    read_header,
    seal_header,
    unseal,
)

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
ENTRIES_PER_KEY: Final = 1 << 20
"""Number of consecutive indexes whose entries are sealed with the same derived key."""
_KEYS_CACHED: Final = 32
_AUTHENTICATED = slice(8, PAYLOAD_CRC_POSITION)
"""Bytes of a sealed batch's header that the tag covers: all but the two checksums."""


class LogCipher:
    """Seals and opens the entries and snapshots of one log directory. Safe to use from several threads."""

    def __init__(self, data_key: bytes, *, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        """Take the directory's data key; the keys that encrypt are derived from it by HKDF-SHA-256."""
        self._data_key = data_key
        self._random_bytes = random_bytes
        self._entry_keys: dict[int, AESGCM] = {}
        self._snapshot_key = self._derive(b"quiver snapshots 1")

    def seal_batch(self, data: Buffer, index: int) -> bytes:
        """Return the sealed form of a stamped batch, `SEALED_EXTRA_BYTES` longer; each call gives other bytes."""
        nonce = self._random_bytes(NONCE_BYTES)
        head = seal_header(data)
        plain = memoryview(data)[PAYLOAD_CRC_POSITION:]
        return finish_sealed(head, nonce, self._key_of(index).encrypt(nonce, plain, bytes(head[_AUTHENTICATED])))

    def open_batch(self, data: Buffer, header: BatchHeader) -> Batch:
        """Return the batch whose sealed form is `data`, with its header.

        Raises:
            DecodeError: it is not sealed, it was changed, or another key sealed it.
        """
        if header.encoding != ENCODING_SEALED:
            raise DecodeError(f"entry {header.index} is not encrypted, but its log is")
        view = memoryview(data)
        nonce, sealed = view[HEADER_BYTES : HEADER_BYTES + NONCE_BYTES], view[HEADER_BYTES + NONCE_BYTES :]
        try:
            opened = self._key_of(header.index).decrypt(nonce, sealed, view[_AUTHENTICATED])
        except InvalidTag:
            raise DecodeError(
                f"entry {header.index} cannot be decrypted: it was changed, or belongs to another log"
            ) from None
        plain = unseal(view, opened)
        return Batch(plain, read_header(plain))

    def seal_snapshot(self, state: Buffer, authenticated: bytes) -> bytes:
        """Return the sealed form of a snapshot's state; `authenticated` are the bytes of its header."""
        nonce = self._random_bytes(NONCE_BYTES)
        return nonce + self._snapshot_key.encrypt(nonce, state, authenticated)

    def open_snapshot(self, sealed: Buffer, authenticated: bytes) -> bytes:
        """Return the state whose sealed form is given.

        Raises:
            DecodeError: it was changed, or another key sealed it.
        """
        view = memoryview(sealed)
        try:
            return self._snapshot_key.decrypt(view[:NONCE_BYTES], view[NONCE_BYTES:], authenticated)
        except (InvalidTag, ValueError):
            raise DecodeError("snapshot: cannot be decrypted: it was changed, or belongs to another log") from None

    def _key_of(self, index: int) -> AESGCM:
        number = index // ENTRIES_PER_KEY
        key = self._entry_keys.get(number)
        if key is None:
            key = self._derive(b"quiver entries 1 " + number.to_bytes(8, "little"))
            if len(self._entry_keys) >= _KEYS_CACHED:
                self._entry_keys.clear()
            self._entry_keys[number] = key
        return key

    def _derive(self, info: bytes) -> AESGCM:
        return AESGCM(HKDFExpand(algorithm=SHA256(), length=KEY_BYTES, info=info).derive(self._data_key))
