"""The reference of the HTTP API: OpenAPI 3.1 document, Markdown page and HTML page. Pure.

All are generated from the table of routes and the contract's structs, so a parameter's bounds in the document are those
that its decoder enforces. `make docs` writes the Markdown to `docs/protocol/http.md`; a test fails when they differ.
The HTML page at `/docs` loads nothing from elsewhere and runs no script; its content is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from html import escape
from http import HTTPStatus
from typing import Any

import msgspec

from quiver.gateway.access_contract import GrantBody
from quiver.gateway.console.contract import ConfigureTopicBody, ResetBody
from quiver.gateway.contract import (
    BatchRecord,
    CreateTopicBody,
    FailureAnswer,
    Parameters,
    ProduceBatchBody,
    ProduceBody,
)
from quiver.gateway.group_contract import GroupResetBody
from quiver.gateway.http_route import ALWAYS, HttpRoute
from quiver.gateway.queue_contract import ExtendBody, NackBody, RejectBody, SettleBody
from quiver.gateway.routes import ROUTES

API_VERSION = "1"
"""The version of this API; that of the program is only in `/status`."""
_REFERENCE = "#/components/schemas/{name}"

MEANINGS = {
    200: "Done.",
    201: "Created.",
    204: "No message.",
    400: "Malformed.",
    401: "Not authenticated: the credentials are missing or not valid.",
    403: "Not allowed.",
    404: "Unknown topic, partition, producer, consumer, group or broker, or a record that retention has deleted.",
    408: "The request took too long to arrive.",
    409: "Conflicts with the current state: exists already, out of sequence, fenced.",
    413: "Too large.",
    421: "The node does not answer to the name in the Host header.",
    422: "A value outside its bounds.",
    429: "Not done: over a quota. Retry after `Retry-After` seconds.",
    431: "The request's headers are too large.",
    503: "Not done: unavailable now. Retry after `Retry-After` seconds.",
    504: "Unknown: timed out; the call may have taken effect.",
    507: "Not done: the disk is nearly full.",
}
"""The meaning of each status, on every route."""

LINKS: dict[str, dict[str, dict[str, Any]]] = {
    "register_producer": {
        "produce": {"requestBody": {"topic": "$request.body#/topic", "producer_id": "$response.body#/producer_id"}},
        "produce_batch": {
            "requestBody": {"topic": "$request.body#/topic", "producer_id": "$response.body#/producer_id"}
        },
    },
    "register_consumer": {
        name: {"parameters": {"topic": "$request.body#/topic", "consumer_id": "$response.body#/consumer_id"}}
        for name in ("consume", "consume_batch", "get_size")
    },
    "receive_jobs": {
        name: {
            "requestBody": {
                "topic": "$request.body#/topic",
                "group": "$request.body#/group",
                "receipt": "$response.body#/jobs/0/receipt",
            }
        }
        for name in ("ack_jobs", "nack_jobs", "extend_jobs", "reject_jobs")
    },
    "create_topic": {
        name: {"parameters": {"topic": "$response.body#/topic"}}
        for name in ("describe_topic", "delete_topic", "list_partitions")
    },
}
"""OpenAPI links, by route: which other routes use values of its answer, and as which parameters."""


_NO_NAME = {"properties": {"name": {"const": ""}, "is_prefix": {"const": False}}}
_SOME_NAME = {
    "anyOf": [
        {"required": ["name"], "properties": {"name": {"minLength": 1}}},
        {"required": ["is_prefix"], "properties": {"is_prefix": {"const": True}}},
    ]
}
RULES: dict[type, tuple[dict[str, Any], ...]] = {
    GrantBody: (
        {
            "if": {"required": ["kind"], "properties": {"kind": {"const": "cluster"}}},
            "then": _NO_NAME,
            "else": _SOME_NAME,
        },
    ),
    ConfigureTopicBody: (
        {
            "anyOf": [
                {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
                for name in ("retention", "partitions")
            ]
        },
    ),
    BatchRecord: (
        {
            "oneOf": [
                {"required": ["message"], "not": {"required": ["message_b64"]}},
                {"required": ["message_b64"], "properties": {"message": {"type": "null"}}},
            ]
        },
    ),
}
"""By struct, further rules as JSON Schema has them."""
CHOICES: dict[type, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys((SettleBody, NackBody, ExtendBody, RejectBody), (("receipt", "receipts"),)),
    CreateTopicBody: (("topic_name", "topic"),),
    ProduceBody: (("message", "message_b64"),),
    ProduceBatchBody: (("messages", "messages_b64", "records"),),
    GroupResetBody: (("to", "offset", "timestamp", "shift"),),
    ResetBody: (("to", "offset", "time_ms"),),
}
"""By parameters, the names of which exactly one must be given; null counts as not given."""
_PRODUCE = (ProduceBody, ProduceBatchBody)
EXCLUSIVE: dict[type, tuple[tuple[str, str], ...]] = dict.fromkeys(
    (*_PRODUCE, BatchRecord), (("key", "key_b64"), ("headers", "headers_b64"), ("deliver_at", "delay_ms"))
)
"""By parameters, the pairs of which at most one may be given; headers in both are refused if they share a name."""
COMPANIONS: dict[type, tuple[str, str]] = {
    **dict.fromkeys(_PRODUCE, ("sequence", "partition_id")),
    GroupResetBody: ("partition_id", "topic"),
}
"""By parameters, a name that needs another one beside it."""


def make_document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    schemas = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quiver",
            "version": API_VERSION,
            "summary": "A distributed, partitioned, replicated queue for log messages.",
            "description": "Parameters may be sent as JSON body or as query string, on any method; ids as numbers or "
            "strings of digits.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": section} for section in dict.fromkeys(route.section for route in ROUTES)],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }


def statuses(route: HttpRoute) -> list[int]:
    """Return every status that a route may return, sorted."""
    nothing = (204,) if route.has_nothing else ()
    return sorted({route.success, *nothing, *ALWAYS, *route.failures})


def fields_of(route: HttpRoute, schemas: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield a route's parameters: name, schema, and whether it is required."""
    schema = schemas.get(route.parameters.__name__, {})
    for name, about in schema.get("properties", {}).items():
        yield name, about, name in schema.get("required", ())


def _schemas() -> dict[str, Any]:
    kinds: list[type] = [FailureAnswer]
    for route in ROUTES:
        kinds += [route.parameters] if route.parameters is not Parameters else []
        kinds += [route.answer] if route.answer is not None else []
    schemas = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=_REFERENCE)[1]
    for kind in dict.fromkeys((*CHOICES, *EXCLUSIVE, *COMPANIONS, *RULES)):
        schemas[kind.__name__]["allOf"] = list(_rules_of(kind))
    return schemas


def _rules_of(kind: type) -> Iterator[dict[str, Any]]:
    """Yield what a struct cannot say about parameters that depend on each other."""
    absent, present = {"type": "null"}, {"not": {"type": "null"}}
    for names in CHOICES.get(kind, ()):
        yield {
            "oneOf": [
                {
                    "required": [name],
                    "properties": {other: present if other == name else absent for other in names},
                }
                for name in names
            ]
        }
    for names in EXCLUSIVE.get(kind, ()):
        yield {"anyOf": [{"properties": {name: absent}} for name in names]}
    yield from RULES.get(kind, ())
    if kind in COMPANIONS:
        name, needed = COMPANIONS[kind]
        yield {
            "anyOf": [
                {"properties": {name: absent}},
                {"required": [needed], "properties": {needed: present}},
            ]
        }


def _operation(route: HttpRoute, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.section],
        "responses": {str(status): _response(route, status) for status in statuses(route)},
    }
    in_path = {segment[1:-1] for segment in route.path.split("/") if segment.startswith("{")}
    fields = list(fields_of(route, schemas))
    is_listed = route.method == "GET" or (route.method == "DELETE" and bool(in_path))
    listed = [
        {"name": name, "in": "path" if name in in_path else "query", "required": required, "schema": about}
        for name, about, required in fields
        if name in in_path or is_listed
    ]
    if listed:
        operation["parameters"] = listed
    if not is_listed and len(fields) > len(listed):
        schema = _refer(route.parameters)
        if listed:
            schema = _body_without(in_path, schemas[route.parameters.__name__])
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _body_without(in_path: set[str], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a body next to parameters in the path, which it must not repeat."""
    return {
        **{key: about for key, about in schema.items() if key != "title"},
        "properties": {name: about for name, about in schema["properties"].items() if name not in in_path},
        "required": [name for name in schema.get("required", ()) if name not in in_path],
    }


def _response(route: HttpRoute, status: int) -> dict[str, Any]:
    response: dict[str, Any] = {"description": MEANINGS[status]}
    if status == HTTPStatus.NO_CONTENT:
        return response
    if status != route.success:
        response["content"] = {"application/json": {"schema": _refer(FailureAnswer)}}
    elif route.answer is not None:
        response["content"] = {route.content_type: {"schema": _refer(route.answer)}}
    elif route.content_type == "application/json":
        response["content"] = {route.content_type: {"schema": {"type": "object"}}}
    else:
        response["content"] = {route.content_type.partition(";")[0]: {"schema": {"type": "string"}}}
    if status == route.success:
        file = {"schema": {"type": "string", "format": "binary"}}
        response["content"].update({one.partition(";")[0]: file for one in route.file_types})
    if status == route.success and route.name in LINKS:
        response["links"] = {name: {"operationId": name, **link} for name, link in LINKS[route.name].items()}
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        response["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return response


def _refer(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


_RULES = (
    "Any node answers any call and forwards what it cannot do itself.",
    "Parameters are sent as JSON body or as query string, on any method; ids as numbers or strings of digits.",
    "A parameter that is given twice is refused, also within the JSON body.",
    'Success is `{"status": "success", …}`.',
    'Failure is `{"status": "failure", "code": …, "message": …}`; `code` is stable.',
    'With 429, 503 and 507, `"outcome": "not_done"` guarantees that nothing was done.',
    "The Host header must name the node: a loopback name, its advertised name, or one in `gateway.allowed_hosts`.",
    "Web pages of other sites may not make calls that change state.",
    'With 504, `"outcome": "unknown"` means that the call may have taken effect.',
    "Without a message to consume or a job to receive, the answer is 204 with an empty body.",
    "Messages are UTF-8 text; other bytes are sent as base64 in `message_b64` and `key_b64`.",
)
"""One item of a list each, on the page and in the reference."""

_MARKDOWN_HEAD = """\
# HTTP

<!-- Generated by `make docs` from src/quiver/gateway/routes.py and contract.py; change it there. -->

Every node with the gateway role serves this API, by default at `http://127.0.0.1:8002`; over TLS with `gateway.tls`.
`GET /openapi.json` returns it for programs, `GET /docs` for browsers.

"""


def render_markdown() -> str:
    """Return the page `docs/protocol/http.md`."""
    schemas = make_document()["components"]["schemas"]
    parts = [_MARKDOWN_HEAD, *(f"- {rule}\n" for rule in _RULES), "\n## Statuses\n\n| status | meaning |\n|---|---|\n"]
    parts += [f"| {status} | {meaning} |\n" for status, meaning in MEANINGS.items()]
    parts.append(f"\nAny call may fail with {', '.join(map(str, ALWAYS))}; each call lists its other statuses.\n")
    for section in dict.fromkeys(route.section for route in ROUTES):
        parts.append(f"\n## {section}\n")
        for route in ROUTES:
            if route.section == section:
                parts += _markdown_call(route, schemas)
    return "".join(parts)


def _markdown_call(route: HttpRoute, schemas: dict[str, Any]) -> Iterator[str]:
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


def _answer_fields(route: HttpRoute, schemas: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if route.answer is None:
        return []
    properties: dict[str, dict[str, Any]] = schemas[route.answer.__name__]["properties"]
    return [(name, about) for name, about in properties.items() if name != "status"]


def show_type(about: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return a schema as short text."""
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
"""Lets browsers render our pages with our style and nothing else."""


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
    return render_page("Quiver: HTTP", "".join(parts))


def render_page(title: str, body: str) -> str:
    """Return a complete HTML page; `body` is HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>"
    )


def _html_call(route: HttpRoute, schemas: dict[str, Any]) -> str:
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
    """Return text as HTML, with text in backticks as code."""
    pieces = text.split("`")
    return "".join(f"<code>{escape(piece)}</code>" if at % 2 else escape(piece) for at, piece in enumerate(pieces))
