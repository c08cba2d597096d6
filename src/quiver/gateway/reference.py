"""The interface for people, made from the OpenAPI document: a Markdown page for `docs/`, an HTML page for `/docs`.

`make docs` writes the former to `docs/protocol/http.md`; a test fails when the two differ. The HTML page needs nothing
from elsewhere and runs no script; what it shows is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from quiver.gateway.openapi import MEANINGS, fields_of, make_document, statuses
from quiver.gateway.routes import ALWAYS, ROUTES, Route

_RULES = """\
Any node answers any call: what it cannot do itself it hands on.
Parameters come as JSON body or as query string, on any method; ids as numbers or as strings of digits. What is given twice is refused.
Success is `{"status": "success", …}`, failure is `{"status": "failure", "code": …, "message": …}`; `code` is stable.
With 503 and 507 `"outcome": "not_done"` promises that nothing was done; with 504 `"outcome": "unknown"` admits that it perhaps was.
Nothing left to consume is 204 with an empty body.
Messages are UTF-8 text; bytes travel as `message_b64` and `key_b64`.
""".splitlines()  # noqa: E501 - a sentence a line

_MARKDOWN_HEAD = """\
# HTTP

<!-- Made by `make docs` from src/quiver/gateway/routes.py and contract.py; change it there. -->

Served by every node with the gateway role, by default at `http://127.0.0.1:8002`; over TLS if `gateway.tls` says so.
`GET /openapi.json` is the same for programs, `GET /docs` for browsers.

"""


def render_markdown() -> str:
    """Return the page `docs/protocol/http.md`."""
    schemas = make_document()["components"]["schemas"]
    parts = [_MARKDOWN_HEAD, *(f"- {rule}\n" for rule in _RULES), "\n## Statuses\n\n| status | meaning |\n|---|---|\n"]
    parts += [f"| {status} | {meaning} |\n" for status, meaning in MEANINGS.items()]
    parts.append(f"\nAny call may fail with {', '.join(map(str, ALWAYS))}; each lists what else it may fail with.\n")
    for section in dict.fromkeys(route.section for route in ROUTES):
        parts.append(f"\n## {section}\n")
        for route in ROUTES:
            if route.section == section:
                parts += _markdown_call(route, schemas)
    return "".join(parts)


def _markdown_call(route: Route, schemas: dict[str, Any]) -> Iterator[str]:
    yield f"\n### `{route.method} {route.path}`\n\n{route.summary}\n"
    given = list(fields_of(route, schemas))
    if given:
        yield "\n| parameter | type | | meaning |\n|---|---|---|---|\n"
        for name, about, required in given:
            needed = "required" if required else ""
            yield f"| `{name}` | {show_type(about, schemas)} | {needed} | {about.get('description', '')} |\n"
    answered = _answer_fields(route, schemas)
    if answered:
        yield f"\nAnswers {route.success} with:\n\n| field | type | meaning |\n|---|---|---|\n"
        for name, about in answered:
            yield f"| `{name}` | {show_type(about, schemas)} | {about.get('description', '')} |\n"
    others = [str(status) for status in statuses(route) if status not in (*ALWAYS, route.success)]
    if others:
        yield f"\nAlso: {', '.join(others)}.\n"


def _answer_fields(route: Route, schemas: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if route.answer is None:
        return []
    properties: dict[str, dict[str, Any]] = schemas[route.answer.__name__]["properties"]
    return [(name, about) for name, about in properties.items() if name != "status"]


def show_type(about: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return a schema in a few words."""
    if "$ref" in about:
        name = about["$ref"].rpartition("/")[2]
        inner = ", ".join(schemas[name].get("properties", {}))
        return f"{{{inner}}}"
    if "anyOf" in about:
        return " or ".join(show_type(one, schemas) for one in about["anyOf"] if one.get("type") != "null")
    if "enum" in about:
        return ", ".join(f"`{value}`" for value in about["enum"] if value is not None)
    kind = str(about.get("type", "any"))
    if kind == "array":
        return f"list of {show_type(about.get('items', {}), schemas)}"
    if kind == "integer" and "minimum" in about and about.get("maximum", 2**53) < 2**53:
        return f"integer, {about['minimum']} to {about['maximum']}"
    return kind


# -- HTML --------------------------------------------------------------------------------------------

STYLE = """\
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --accent: #2a6df4; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 6rem; }
h1 { margin: 0; } h2 { margin: 2.5rem 0 .5rem; border-bottom: 1px solid var(--line); }
code { font: .9em ui-monospace, monospace; background: var(--soft); border-radius: .25rem; padding: .1em .3em; }
nav a { margin-right: 1rem; } a { color: var(--accent); }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; } summary b { display: inline-block; min-width: 4.2rem; color: var(--accent); }
table { border-collapse: collapse; margin: .6rem 0; width: 100%; font-size: .93em; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; vertical-align: top; border-top: 1px solid var(--line); }
th { font-weight: 600; border-top: 0; } .sub { opacity: .7; }
"""

_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a browser may do on our pages: show them, in our style."""


def render_docs() -> str:
    """Return the page `/docs`."""
    document = make_document()
    schemas = document["components"]["schemas"]
    sections = list(dict.fromkeys(route.section for route in ROUTES))
    parts = [f"<p>{_inline(document['info']['summary'])}</p><ul>", *(f"<li>{_inline(rule)}</li>" for rule in _RULES)]
    parts += ["</ul><nav>", *(f'<a href="#{section}">{section}</a>' for section in sections)]
    parts.append('<a href="#statuses">Statuses</a><a href="/openapi.json">openapi.json</a></nav>')
    for section in sections:
        parts.append(f'<h2 id="{section}">{section}</h2>')
        parts += [_html_call(route, schemas) for route in ROUTES if route.section == section]
    parts.append('<h2 id="statuses">Statuses</h2>')
    parts.append(_table(("status", "meaning"), ((str(status), meaning) for status, meaning in MEANINGS.items())))
    return render_page(f"Quiver {document['info']['version']}: HTTP", "".join(parts))


def render_page(title: str, body: str) -> str:
    """Return a whole page of ours; `body` is HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>"
    )


def _html_call(route: Route, schemas: dict[str, Any]) -> str:
    parts = [
        f"<details><summary><b>{route.method}</b> <code>{escape(route.path)}</code> {escape(route.summary)}</summary>"
    ]
    given = [
        (f"`{name}`", show_type(about, schemas), "required" if required else "", about.get("description", ""))
        for name, about, required in fields_of(route, schemas)
    ]
    if given:
        parts.append(_table(("parameter", "type", "", "meaning"), given))
    answered = [
        (f"`{name}`", show_type(about, schemas), about.get("description", ""))
        for name, about in _answer_fields(route, schemas)
    ]
    if answered:
        parts.append(_table(("answer", "type", "meaning"), answered))
    listed = ", ".join(map(str, statuses(route)))
    parts.append(f'<p class="sub">Statuses: {listed}</p></details>')
    return "".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _inline(text: str) -> str:
    """Return text as HTML, with what stands between backticks as code."""
    pieces = text.split("`")
    return "".join(f"<code>{escape(piece)}</code>" if at % 2 else escape(piece) for at, piece in enumerate(pieces))
