"""Addresses as text: `host:port`, an IPv6 host in brackets. Pure."""

from __future__ import annotations

from ipaddress import ip_address

from quiver.errors import RequestError

Address = tuple[str, int]
"""Host and port."""

PORT_MAX = 0xFFFF


def parse_address(text: str) -> Address:
    """Parse an address such as `broker-1:9092` or `[::1]:9092` into host and port.

    Raises:
        RequestError: the text is not a valid address; the code is `bad_address`.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if is_bracketed else host
    is_valid = colon and name and port.isdecimal() and port.isascii() and int(port) <= PORT_MAX
    if not is_valid or (":" in name) is not is_bracketed or "[" in name or "]" in name:
        raise RequestError(f"not an address of the form host:port or [host]:port: {text[:300]!r}", code="bad_address")
    return name, int(port)


def format_address(address: Address) -> str:
    """Return an address in the form that `parse_address` accepts."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine itself: `localhost`, 127.0.0.0/8 or ::1. Other names are not looked up."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return False
