"""Sends a workload to any server of OpenAI's form over HTTP, and notes when each token came."""

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
    from ..runtime.workload import WorkItem

# Fields that not all servers take.
_FURTHER: tuple[dict[str, bool], ...] = ({"ignore_eos": True, "return_token_ids": True}, {"ignore_eos": True}, {})
_ANSWER_S = 60.0  # for what is no output


@dataclass(frozen=True, slots=True)
class Target:
    """A server: `url` as clients have it, with or without `/v1`, the model's name there, and an API key or ""."""

    url: str
    model: str = ""
    key: str = ""
    further: Mapping[str, bool] | None = None  # fields beside OpenAI's that it takes

    @property
    def name(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    def head(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Write a request; the connection ends with its answer."""
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        lines = [f"{method} {base}{path} HTTP/1.1", f"host: {self.name}", "connection: close", "accept: */*"]
        lines += [f"authorization: Bearer {self.key}"] if self.key else []
        lines += ["content-type: application/json", f"content-length: {len(body)}"] if body else []
        return "\r\n".join([*lines, "", ""]).encode() + body

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Return status and body of an answer in JSON.

        Raises:
            ConfigError: there is no such server.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, parts = await self._open(self.head(method, path, json.dumps(body).encode() if body else b""))
                text = b"".join([part async for part in parts])
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            raise ConfigError(f"url={self.url}: no OpenAI-compatible server answers there ({reason(error)})") from error
        with suppress(ValueError):
            if isinstance(found := json.loads(text), dict):
                return status, found
        return status, {"error": text[:200].decode(errors="replace")}

    async def stream(self, item: WorkItem) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a completion.

        Raises:
            OSError: the server answers otherwise, or no more.
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
        """Return the body of a request: greedy, and of exactly the item's length where the server can."""
        how: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        what = {"model": self.model, "prompt": list(item.prompt), "max_tokens": item.output_len, "temperature": 0}
        return {**what, **how, **(self.further or {})}

    async def _open(self, request: bytes) -> tuple[int, AsyncIterator[bytes]]:
        """Send a request; return the status and the answer's body, in pieces."""
        parts = urlsplit(self.url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls, limit=1 << 24)
        writer.write(request)
        words = (await reader.readline()).split()
        if len(words) < 2 or not words[1].isdigit():
            writer.close()
            raise OSError("the answer is not HTTP")
        is_chunked = False
        while (header := (await reader.readline()).strip().lower()) != b"":
            is_chunked |= header.startswith(b"transfer-encoding:") and header.endswith(b"chunked")
        return int(words[1]), _pieces(reader, writer, is_chunked)


async def _pieces(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_chunked: bool) -> AsyncIterator[bytes]:
    """Yield a body as it comes, to the end of its connection or of its chunks."""
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
    """Find out what a server serves and which fields it takes; return it, with its model's longest context if it says.

    Raises:
        ConfigError: it cannot be reached, has no model, or refuses a completion.
    """
    from ..runtime.workload import WorkItem

    target = Target(url, model or "", key)
    status, found = await target.ask("GET", "/v1/models")
    cards = found.get("data") or []
    if status != 200 or not cards:
        raise ConfigError(f"url={url}: GET /v1/models: status {status}, {found.get('error', 'no model')}")
    names = [card.get("id", "") for card in cards]
    if model is not None and model not in names:
        raise ConfigError(f"url_model={model}: the server has no such model; valid: {', '.join(names)}")
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
    """Send each request when it is due, and return what became of them; times are seconds since the start.

    Args:
        target: the server.
        items: in the order of their arrivals.
        workload: as `Clients` takes it, for its closed loop and its duration.
        on_tokens: is told of tokens as they come, and of requests that ended.

    Raises:
        PipelineError: not one was answered.
    """
    from ..runtime.workload import Clients

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
    """Read one completion. An event without token ids counts as one token, until the usage says how many there were."""
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
        raise OSError("the stream ended early")
    record.prompt_tokens = usage.get("prompt_tokens", record.prompt_tokens)
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    record.token_times = _spread(record.token_times, usage.get("completion_tokens", len(record.token_times)))


def _spread(times: list[float], count: int) -> list[float]:
    """Return the times of `count` tokens that came in events at `times`: as many in each, as far as that goes."""
    if not times or count <= len(times):
        return times
    return [times[place * len(times) // count] for place in range(count)]
