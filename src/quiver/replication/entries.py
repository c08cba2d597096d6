"""Raft entries as batches: how the core's entries are encoded in the partition log.

A proposed entry *is* a batch, stamped with its term, index and base offset; its bytes are not encoded again on the way
to followers or to disk. The entries that the core creates itself become control batches. The first byte of their
payload is their kind.
"""

from __future__ import annotations

import msgspec

from quiver.errors import DecodeError, UnknownVersionError
from quiver.model import Index, Offset, Term
from quiver.raft import Configuration, Entry, EntryKind
from quiver.record import Batch, build_control_batch

CONTROL_NOOP = b"\x01"
CONTROL_CONFIG = b"\x02"
CONTROL_STATE = b"\x03"
"""A control batch of the layer above, such as cursor moves: an ordinary proposal to Raft."""

CONFIGURATION_VERSION = 1
"""Version of an encoded configuration, in its field `version`; absent means 1."""

_configuration_decoder = msgspec.msgpack.Decoder(Configuration)


class KnownConfiguration(msgspec.Struct, frozen=True, array_like=True):
    """A configuration, with index and term of its entry."""

    index: Index
    term: Term
    configuration: Configuration


def encode_configuration(configuration: Configuration) -> bytes:
    """Return a configuration's bytes."""
    return msgspec.msgpack.encode(configuration)


def encode_own_entry(entry: Entry, *, base_offset: Offset, timestamp: int) -> Batch:
    """Return the control batch for an entry that the core created itself."""
    payload = CONTROL_NOOP
    if entry.configuration is not None:
        payload = CONTROL_CONFIG + encode_configuration(entry.configuration)
    built = build_control_batch(payload, timestamp=timestamp)
    return Batch.stamped(built, term=entry.term, index=entry.index, base_offset=base_offset, append_timestamp=timestamp)


def decode_entry(batch: Batch) -> Entry:
    """Return the core's view of a batch.

    Raises:
        UnknownVersionError: the kind of a control batch or the version of its configuration is unknown.
        DecodeError: its configuration is malformed.
    """
    header = batch.header
    if not header.is_control:
        return Entry(header.index, header.term, data=batch.data)
    payload = batch.payload()  # not copied: a state snapshot may have many megabytes
    match bytes(payload[:1]):
        case b"\x01":
            return Entry(header.index, header.term, EntryKind.NOOP, batch.data)
        case b"\x02":
            configuration = _decode_configuration(bytes(payload[1:]))
            return Entry(header.index, header.term, EntryKind.CONFIG, batch.data, configuration)
        case b"\x03":
            return Entry(header.index, header.term, EntryKind.DATA, batch.data)
        case kind:
            raise UnknownVersionError(f"a control batch of unknown kind {kind!r}: upgrade this node")


def _decode_configuration(data: bytes) -> Configuration:
    try:
        version = _version_decoder.decode(data).version
        if version <= CONFIGURATION_VERSION:
            return _configuration_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DecodeError(f"malformed configuration in a control batch: {error}") from None
    raise UnknownVersionError(f"a configuration of version {version} in a control batch: upgrade this node")


class _Versioned(msgspec.Struct, frozen=True):
    version: int = CONFIGURATION_VERSION


_version_decoder = msgspec.msgpack.Decoder(_Versioned)
