"""Sends a workload to an OpenAI-compatible HTTP server and records when each token arrived."""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..conf.errors import ConfigError, reason
from ..conf.workloads import WorkloadConfig
from ..runtime.core.request_record import RequestRecord
from ..runtime.pipeline.protocol import PipelineError
from .event_stream import EventReader

if TYPE_CHECKING:
    from ..runtime.core.work_item import WorkItem

# Extensions that only some servers accept.
_FURTHER: tuple[dict[str, bool], ...] = ({"ignore_eos": True, "return_token_ids": True}, {"ignore_eos": True}, {})
_ANSWER_S = 60.0  # timeout of requests other than streams


@dataclass(frozen=True, slots=True)
class Target:
    """A server: its base `url`, with or without `/v1`, the served model name, and an API key or ""."""

    url: str
    model: str = ""
    key: str = ""
    further: Mapping[str, bool] | None = None  # extensions that it accepts

    @property
    def name(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def head(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return the bytes of a request that closes its connection."""
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        lines = [f"{method} {base}{path} HTTP/1.1", f"host: {self.name}", "connection: close", "accept: */*"]
        lines += [f"authorization: Bearer {self.key}"] if self.key else []
        lines += ["content-type: application/json", f"content-length: {len(body)}"] if body else []
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Send a request; return the status and the JSON body.

        Raises:
            ConfigError: no server responds.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, parts = await self._open(self.head(method, path, json.dumps(body).encode() if body else b""))
                text = b"".join([part async for part in parts])
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            raise ConfigError(f"url={self.url}: no OpenAI-compatible server responds ({reason(error)})") from error
        with suppress(ValueError):
            if isinstance(found := json.loads(text), dict):
                return status, found
        return status, {"error": text[:200].decode(errors="replace")}

    async def stream(self, item: WorkItem) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a completion.

        Raises:
            OSError: an error status, or the connection failed.
        """
        status, body = await self._open(self.head("POST", "/v1/completions", json.dumps(self.body(item)).encode()))
        if status != 200:
            text = b"".join([part async for part in body])
            raise OSError(f"status {status}: {text[:200].decode(errors='replace')}")
        events = EventReader()
        async for part in body:
            for data in events.push(part):
                if data.lstrip().startswith("{"):  # not [DONE]
                    yield json.loads(data)

    def body(self, item: WorkItem, *, stream: bool = True) -> dict[str, Any]:
        """Return the request body: greedy, with exactly the item's output length if the server supports it."""
        how: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        what = {"model": self.model, "prompt": list(item.prompt), "max_tokens": item.output_len, "temperature": 0}
        return {**what, **how, **(self.further or {})}

    async def _open(self, request: bytes) -> tuple[int, AsyncIterator[bytes]]:
        """Send a request; return the status and an iterator over the body."""
        parts = urlsplit(self.url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=1 << 24)
        writer.write(request)
        words = (await reader.readline()).split()
        if len(words) < 2 or not words[1].isdigit():
            writer.close()
            raise OSError("the response is not HTTP")
        is_chunked = False
        while (header := (await reader.readline()).strip().lower()) != b"":
            is_chunked |= header.startswith(b"transfer-encoding:") and header.endswith(b"chunked")
        return int(words[1]), _pieces(reader, writer, is_chunked)


async def _pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_chunked: bool) -> AsyncIterator[bytes]:
    """Yield the parts of a body until the connection closes or the last chunk."""
    try:
        while True:
            if is_chunked:
                size = int((await reader.readline()).partition(b";")[0] or b"0", 16)
                data = (await reader.readexactly(size + 2))[:-2] if size else b""
            else:
                data = await reader.read(1 << 16)
            if not data:
                return
            yield data
    finally:
        writer.close()


async def find_target(url: str, model: str | None, key: str, vocabulary: int) -> tuple[Target, int | None]:
    """Query the served model and accepted extensions; return the target and the model's context length, if reported.

    Raises:
        ConfigError: the server cannot be reached, has no model, or rejects a completion.
    """
    from ..runtime.core.work_item import WorkItem

    target = Target(url, model or "", key)
    status, found = await target.ask("GET", "/v1/models")
    cards = found.get("data") or []
    if status != 200 or not cards:
        raise ConfigError(f"url={url}: GET /v1/models: status {status}, {found.get('error', 'no model')}")
    names = [card.get("id", "") for card in cards]
    if model is not None and model not in names:
        raise ConfigError(f"url_model={model}: not served; valid: {', '.join(names)}")
    card = cards[names.index(model) if model is not None else 0]
    item = WorkItem([min(3, vocabulary - 1)] * 2, 1, 0.0)
    for further in _FURTHER:
        target = replace(target, model=card["id"], further=further)
        status, found = await target.ask("POST", "/v1/completions", target.body(item, stream=False))
        if status == 200:
            return target, card.get("max_model_len")
    raise ConfigError(f"url={url}: POST /v1/completions: status {status}, {found.get('error')}")


async def send_all(
    target: Target, items: Sequence[WorkItem], workload: WorkloadConfig | None, on_tokens: Callable[[int, int], None]
) -> list[RequestRecord]:
    """Send each request when it is due, and return their records; times are seconds since the start.

    Args:
        target: the server.
        items: in the order of their arrivals.
        workload: for a closed loop and the duration, as in `Clients`.
        on_tokens: called with numbers of new tokens and of finished requests.

    Raises:
        PipelineError: all requests failed.
    """
    from ..runtime.engine.clients import Clients

    clients, answered = Clients(items, workload), asyncio.Event()
    began = time.perf_counter()
    records: list[RequestRecord] = []
    errors: list[str] = []
    tasks = []

    async def send(item: WorkItem, record: RequestRecord) -> None:
        try:
            await _read(target, item, record, began, on_tokens)
        except (OSError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
            record.finish_reason = "error"
            errors.append(reason(error))
        finally:
            record.finished = time.perf_counter() - began
            on_tokens(0, 1)
            clients.answered(record.finished)
            answered.set()

    while (due := clients.due) < math.inf or not clients.are_done:
        answered.clear()
        if due == math.inf:
            await answered.wait()
            continue
        await asyncio.sleep(began + due - time.perf_counter())
        item = clients.take()
        records.append(RequestRecord(len(records), len(item.prompt), due, user=item.user))
        tasks.append(asyncio.create_task(send(item, records[-1])))
    await asyncio.gather(*tasks)
    if len(errors) == len(records):
        raise PipelineError(f"{target.url}: all {len(records)} requests failed; the first: {errors[0]}")
    return records


async def _read(
    target: Target, item: WorkItem, record: RequestRecord, began: float, on_tokens: Callable[[int, int], None]
) -> None:
    """Read one completion. An event without token ids counts as one token until the usage reports the total."""
    record.first_dispatched = time.perf_counter() - began
    usage: dict[str, Any] = {}
    async for event in target.stream(item):
        now = time.perf_counter() - began
        if "error" in event:
            raise OSError(str(event["error"]))
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids")
            count = len(ids) if ids is not None else int(bool(choice.get("text")))
            record.token_times += [now] * count
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            on_tokens(count, 0)
    if record.finish_reason is None:
        raise OSError("the stream ended before the response was complete")
    record.prompt_tokens = usage.get("prompt_tokens", record.prompt_tokens)
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    record.token_times = _spread(record.token_times, usage.get("completion_tokens", len(record.token_times)))


def _spread(times: list[float], count: int) -> list[float]:
    """Return the times of `count` tokens that arrived in events at `times`, spread evenly over the events."""
    if not times or count <= len(times):
        return times
    return [times[place * len(times) // count] for place in range(count)]
