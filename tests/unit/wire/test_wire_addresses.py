"""Addresses as text."""

from __future__ import annotations

import pytest

from quiver.errors import RequestError
from quiver.wire import Address, format_address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("broker-1:9092", ("broker-1", 9092)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_address_is_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert format_address(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "[]:1",
        "host:x",
        "host:-1",
        "host:65536",
        "host:²",
        "::1:80",
        "[::1]",
        "[host:1",
        "h]:1",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_address(text)
    assert refused.value.code == "bad_address"
