"""Takes up the requests of a journal, where the server before has left them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...conf.sampling import SamplingParams
from ...runtime.engine.output_text import OutputText, named_prompt
from ...runtime.engine.outputs import CompletionOutput
from ...runtime.serving.journal import Progress, Saved
from .answers import Asked
from .endpoints import ROUTES, check, set_standing
from .engine_client import Call
from .errors import ApiError
from .journaling import Journaling, progress_of
from .read_body import decode, validated
from .service import Service


async def resume(service: Service, journaling: Journaling, saved: Sequence[Saved]) -> list[Callable[[], None]]:
    """Read the requests again, and put their outputs together as far as they have come.

    Returns:
        By unfinished output, what sends it to the engine. They must run in this order once the engine takes requests,
        before any other request is taken: their numbers are the lowest.
    """
    submits: list[Callable[[], None]] = []
    for each in saved:
        submits += await _take_up(service, journaling, each)
    journaling.begin()
    return submits


async def _take_up(service: Service, journaling: Journaling, saved: Saved) -> list[Callable[[], None]]:
    accepted = saved.accepted
    call = Call()
    try:
        asked = await _ask(service, saved)
    except ApiError as error:  # this server takes less than the one before
        resumed = journaling.resume(accepted, call, lambda: saved.outputs.values())
        resumed.fail(error)
        return []
    call.has_structured_outputs = asked.params.structured_outputs is not None
    resumed = journaling.resume(accepted, call, lambda: progress_of(accepted, asked, call))
    set_standing(call, service, service.keys.marked(accepted.owner), asked.body)
    submits: list[Callable[[], None]] = []
    for number, (prompt, params) in zip(accepted.numbers, asked.outputs, strict=True):
        text = _text(service, call, prompt, params, saved.outputs.get(number) or Progress(number))
        if not text.completion.finished:
            submits.append(partial(service.client.resume, call, number, text, prompt, params))
    resumed.follow(asked, call)
    return submits


async def _ask(service: Service, saved: Saved) -> Asked:
    """Read a request as when it came.

    Raises:
        ApiError: it would not be accepted now.
    """
    route = ROUTES[saved.accepted.path]
    try:
        body = validated(route.body, decode(saved.accepted.body))
    except ApiError as error:
        raise ApiError(400, f"the journal's body of the request is not valid any more: {error}") from error
    asked = await check(service, await route.ask(service, body))
    asked.answer.id, asked.answer.created = saved.accepted.id, saved.accepted.created
    return asked


def _text(
    service: Service, call: Call, prompt: Sequence[int], params: SamplingParams, progress: Progress
) -> OutputText:
    """Make the next output of a call, and add what it has got."""
    tokenizer = service.intake.tokenizer
    output = CompletionOutput(len(call.outputs), cached_tokens=progress.cached)
    call.outputs.append(output)
    if progress.prompt_logprobs is not None:
        call.prompt_logprobs[output.index] = named_prompt(tokenizer, prompt, progress.prompt_logprobs)
    text = OutputText(output, params, tokenizer)
    last = len(progress.tokens) - 1
    for place, token in enumerate(progress.tokens):
        logprobs = progress.logprobs[place] if progress.logprobs else None
        text.add(token, logprobs, progress.reason if place == last else None)
    if progress.reason is not None and not output.finished:  # it ended without a token
        text.finish(progress.reason)
    return text
