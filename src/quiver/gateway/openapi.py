"""The interface as an OpenAPI 3.1 document, made from the table of routes and the contract's structs. Pure.

Nothing is described twice: a parameter's bounds and sentence are those that its reader holds it to.
"""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import msgspec

from quiver import __version__
from quiver.gateway.contract import Failure, Parameters
from quiver.gateway.routes import ALWAYS, ROUTES, Route

_REFERENCE = "#/components/schemas/{name}"

MEANINGS = {
    200: "Done.",
    201: "Made.",
    204: "There is nothing.",
    400: "Malformed.",
    403: "Not allowed.",
    404: "Unknown topic, partition, producer, consumer or broker, or a record that retention has removed.",
    408: "The request took too long to arrive.",
    409: "Not in the present state: exists already, out of sequence, fenced.",
    413: "Too large.",
    422: "A value that is never allowed.",
    431: "The request's head is too large.",
    503: "Not done: not available now. Try again after `Retry-After` seconds.",
    504: "Perhaps done: gave up waiting.",
    507: "Not done: the disk is nearly full.",
}
"""What each status says, for every route that has it."""

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
    "create_topic": {
        name: {"parameters": {"topic": "$response.body#/topic"}}
        for name in ("describe_topic", "delete_topic", "list_partitions")
    },
}
"""By route, what its answer leads to: by the name of the other route, what goes where."""


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
            "version": __version__,
            "summary": "A distributed, partitioned, replicated queue for log messages.",
            "description": "Parameters may be sent as JSON body or as query string, on any method; ids as numbers or "
            "as strings of digits.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": section} for section in dict.fromkeys(route.section for route in ROUTES)],
        "paths": paths,
        "components": {"schemas": schemas},
    }


def statuses(route: Route) -> list[int]:
    """Return every status that a route may answer with, in order."""
    nothing = (204,) if route.has_nothing else ()
    return sorted({route.success, *nothing, *ALWAYS, *route.failures})


def fields_of(route: Route, schemas: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield a route's parameters: name, schema, and whether it must be given."""
    schema = schemas.get(route.parameters.__name__, {})
    for name, about in schema.get("properties", {}).items():
        yield name, about, name in schema.get("required", ())


def _schemas() -> dict[str, Any]:
    kinds: list[type] = [Failure]
    for route in ROUTES:
        kinds += [route.parameters] if route.parameters is not Parameters else []
        kinds += [route.answer] if route.answer is not None else []
    return msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=_REFERENCE)[1]


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.section],
        "responses": {str(status): _response(route, status) for status in statuses(route)},
    }
    in_path = {segment[1:-1] for segment in route.path.split("/") if segment.startswith("{")}
    listed = [
        {"name": name, "in": "path" if name in in_path else "query", "required": required, "schema": about}
        for name, about, required in fields_of(route, schemas)
        if name in in_path or route.method == "GET"
    ]
    if listed:
        operation["parameters"] = listed
    elif route.parameters is not Parameters:
        content = {"application/json": {"schema": _refer(route.parameters)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _response(route: Route, status: int) -> dict[str, Any]:
    response: dict[str, Any] = {"description": MEANINGS[status]}
    if status == HTTPStatus.NO_CONTENT:
        return response
    if status != route.success:
        response["content"] = {"application/json": {"schema": _refer(Failure)}}
    elif route.answer is not None:
        response["content"] = {route.content_type: {"schema": _refer(route.answer)}}
    elif route.content_type == "application/json":
        response["content"] = {route.content_type: {"schema": {"type": "object"}}}
    else:
        response["content"] = {route.content_type.partition(";")[0]: {"schema": {"type": "string"}}}
    if status == route.success and route.name in LINKS:
        response["links"] = {name: {"operationId": name, **link} for name, link in LINKS[route.name].items()}
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        response["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return response


def _refer(kind: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}
