"""Reading a large body stops no other stream."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext

import pytest
from starlette.requests import Request

from gapless.launch.server.errors import ApiError
from gapless.launch.server.read_body import read
from gapless.launch.server.requests import CompletionBody, DetokenizeBody


def request_of(content: bytes) -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": content, "more_body": False}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


@pytest.mark.parametrize("kind", [CompletionBody, DetokenizeBody])
@pytest.mark.parametrize("last", [1, 1.0, "x"])
def test_the_loop_turns_while_a_large_body_is_read(kind: type[CompletionBody | DetokenizeBody], last: object) -> None:
    """A body of token ids, as one with a whole number in it or with what is none."""
    field = kind.prompt_field if kind is CompletionBody else "tokens"
    content = json.dumps({"model": "m", field: [*[1] * 200_000, last]}).encode()

    async def turns() -> int:
        count, is_read = 0, False

        async def turn() -> None:
            nonlocal count
            while not is_read:
                count += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(turn())
        with pytest.raises(ApiError, match=field) if last == "x" else nullcontext():
            assert getattr(await read(request_of(content), kind), field)[-1] == 1
        is_read = True
        await beside
        return count

    assert asyncio.run(turns()) > 1
