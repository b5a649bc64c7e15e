"""Clients that stream completions from an OpenAI-compatible server and record when each token arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from .server import Server


@dataclass
class Stream:
    """One request: its scheduled time and the arrival time of each token, in seconds since the load started."""

    due: float
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from the scheduled time to the first token, including any delay in the client."""
        return self.token_times[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens; 0 between tokens of one event."""
        return [after - before for before, after in pairwise(self.token_times)]


def stream_all(server: Server, prompts: Sequence[Sequence[int]], tokens: int, due: Sequence[float]) -> list[Stream]:
    """Send each prompt at its scheduled time (open loop); return all streams once they have ended.

    Args:
        server: running.
        prompts: token ids.
        tokens: output tokens of each request.
        due: seconds from the start, ascending.
    """
    return asyncio.run(_stream_all(server, prompts, tokens, due))


async def _stream_all(
    server: Server, prompts: Sequence[Sequence[int]], tokens: int, due: Sequence[float]
) -> list[Stream]:
    requests = [request_of(prompt, tokens) for prompt in prompts]
    streams = [Stream(each) for each in due]
    began = time.perf_counter()
    running = []
    for request, stream in zip(requests, streams, strict=True):
        await asyncio.sleep(began + stream.due - time.perf_counter())
        running.append(asyncio.create_task(read(server, request, stream, began)))
    events = await asyncio.gather(*running)
    for stream, of_stream in zip(streams, events, strict=True):
        note(stream, of_stream, tokens)
    return streams


def request_of(prompt: str | Sequence[int], tokens: int, **sampling: float) -> bytes:
    """Return the bytes of a request that streams `tokens` tokens, greedy by default."""
    how = {"ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True, **sampling}
    text = prompt if isinstance(prompt, str) else list(prompt)
    return http_post("/v1/completions", json.dumps({"prompt": text, "max_tokens": tokens, **how}).encode())


def http_post(path: str, body: bytes) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def read(server: Server, request: bytes, stream: Stream, began: float) -> list[tuple[float, bytes]]:
    """Read a stream to its end; return its undecoded events with their times. Decoding waits for all streams to end."""
    events: list[tuple[float, bytes]] = []
    try:
        reader, writer = await asyncio.open_connection(server.host, server.port, limit=1 << 20)
        writer.write(request)
        status = await reader.readline()
        if b" 200 " not in status:
            stream.error = (status + await reader.read(-1)).decode(errors="replace")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                events.append((time.perf_counter() - began, line))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    except OSError as error:
        stream.error = f"{type(error).__name__}: {error}"
    return events


def note(stream: Stream, events: list[tuple[float, bytes]], tokens: int) -> None:
    """Add the tokens of `events` to their stream, and an error unless there are `tokens`."""
    for seconds, line in events:
        event = json.loads(line.removeprefix(b"data: "))
        ids = event["choices"][0]["token_ids"] if "choices" in event else []
        stream.token_ids += ids
        stream.token_times += [seconds] * len(ids)
    if not stream.error and len(stream.token_ids) != tokens:
        stream.error = f"{len(stream.token_ids)} tokens instead of {tokens}; the last event: {events[-1:]}"
