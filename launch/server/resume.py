"""Resumes the requests of a journal after a restart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...conf.sampling import SamplingParams
from ...runtime.engine.output_text import OutputText, named_prompt
from ...runtime.engine.outputs import CompletionOutput
from ...runtime.serving.journal import Progress, Saved
from .answers import Asked
from .engine_client import Call
from .errors import ApiError
from .generate import check, set_standing
from .journaling import Journaling, progress_of
from .read_body import decode, validated
from .routes import GENERATING
from .service import Service


async def resume(service: Service, journaling: Journaling, saved: Sequence[Saved]) -> list[Callable[[], None]]:
    """Parse the requests again, and restore their outputs so far.

    Returns:
        For each unfinished output, a function that submits it to the engine. Call them in order, once the engine
        accepts requests and before it gets any others, because their numbers are the lowest.
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
    except ApiError as error:  # this server is configured more strictly than the previous one
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
    """Parse a saved request as on arrival.

    Raises:
        ApiError: it would not be accepted now.
    """
    route = GENERATING[saved.accepted.path]
    assert route.body is not None
    assert route.ask is not None
    try:
        body = validated(route.body, decode(saved.accepted.body))
    except ApiError as error:
        raise ApiError(400, f"the journaled request is no longer valid: {error}") from error
    asked = await check(service, await route.ask(service, body))
    asked.answer.id, asked.answer.created = saved.accepted.id, saved.accepted.created
    return asked


def _text(
    service: Service, call: Call, prompt: Sequence[int], params: SamplingParams, progress: Progress
) -> OutputText:
    """Create the next output of a call, and restore its progress."""
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
