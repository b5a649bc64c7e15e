"""The server's OpenAPI document, made as it is for a request, without an engine behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from gapless import LLM
from gapless.conf.serving import ServingConfig
from gapless.launch.server.app import make_app
from gapless.launch.server.keys import Keys
from gapless.launch.server.prometheus import Metrics
from gapless.launch.server.service import Service


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    with LLM("shipped") as llm:
        unused = cast(Any, None)
        service = Service(
            config=ServingConfig(),
            keys=Keys(()),
            model="m",
            max_model_len=8,
            intake=cast(Any, llm),
            compiler=unused,
            client=unused,
            metrics=Metrics("m", 1),
            live=(),
            recorders=(),
            is_local=True,
        )
        return make_app(service).openapi()


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_each_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert "#/components/schemas/Error" in found
    assert {each.removeprefix("#/components/schemas/") for each in found} <= set(document["components"]["schemas"])


def test_each_path_says_its_errors(document: dict[str, Any]) -> None:
    error = {"$ref": "#/components/schemas/Error"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert {"200", "400", "503"} <= set(responses), path
            assert responses["400"]["content"]["application/json"]["schema"] == error
            assert ("401" in responses) == (path.startswith("/v1/") or path.endswith("tokenize")), path
            assert "422" not in responses, path
    streamed = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {"401", "404", "413", "429", "504"} <= set(streamed)
    assert "text/event-stream" in streamed["200"]["content"]
