"""The table of endpoints, and the OpenAPI document that is made of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gapless.launch.server.openapi import document
from gapless.launch.server.routes import ROUTES

PAGE = Path(__file__).parents[2] / "docs/serve.md"
DOCUMENT = document(ROUTES)
DOCUMENTED = [route for route in ROUTES if route.is_documented]


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_each_reference_leads_to_a_schema() -> None:
    found = set(references(DOCUMENT))
    assert "#/components/schemas/Error" in found
    assert {each.removeprefix("#/components/schemas/") for each in found} <= set(DOCUMENT["components"]["schemas"])


@pytest.mark.parametrize("route", DOCUMENTED, ids=lambda route: f"{route.method} {route.path}")
def test_an_operation_has_its_texts_parameters_and_errors(route: Any) -> None:
    operation = DOCUMENT["paths"][route.path.replace(":path", "")][route.method.lower()]
    responses = operation["responses"]
    assert {"200", "400", "503"} <= set(responses)
    assert "422" not in responses
    assert responses["400"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert ("401" in responses) == ("security" in operation) == route.needs_key
    assert ("requestBody" in operation) == (route.body is not None)
    assert "\n" not in operation["summary"]
    assert operation["summary"][-1:].isalnum()
    given = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"]
    assert all(f"{{{name}" in route.path for name in given)
    assert len(given) == route.path.count("{")


def test_a_path_that_generates_may_stream_or_be_overloaded() -> None:
    streamed = DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]
    assert {"401", "404", "413", "429", "504"} <= set(streamed)
    assert "text/event-stream" in streamed["200"]["content"]


def test_only_pages_health_and_metrics_are_open() -> None:
    opened = {route.path for route in ROUTES if not route.needs_key}
    assert opened == {
        *("/", "/health", "/health/live", "/health/ready", "/load", "/metrics", "/page/{name}"),
        *("/recordings/{token}/{name}", "/version"),
    }


@pytest.mark.parametrize("path", [route.path for route in DOCUMENTED if "{" not in route.path])
def test_the_page_has_each_path(path: str) -> None:
    assert re.search(rf"`((GET|POST) )?{re.escape(path)}[?`]", PAGE.read_text()), path


def test_no_two_rows_are_one_endpoint() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
