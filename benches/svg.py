"""Plain SVG for charts in docs/: light and dark colors of its own, and no program needed to draw or to look at it."""

from __future__ import annotations

from xml.sax.saxutils import escape

_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2328}.t{font-weight:600;font-size:15px}.s{font-size:11px;fill:#59636e}"
    ".a{fill:#0b5cad}.b{fill:#7fb2e5}.c{fill:#a3541b}.d{fill:#e3ac81}line{stroke:#1f2328;stroke-width:1}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}line{stroke:#e6edf3}"
    ".a{fill:#58a6ff}.b{fill:#2f5d92}.c{fill:#f0a35e}.d{fill:#8a5a30}}"
)


def picture(title: str, body: str, *, width: int, height: int) -> str:
    """Return a picture with a title; `body` may use the classes of shades `a` to `d` and of small text `s`."""
    title = escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{title}"><style>{_STYLE}</style><text class="t" x="8" y="20">{title}</text>'
        f"{body}</svg>\n"
    )


def number(value: float) -> str:
    """Return a figure with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
