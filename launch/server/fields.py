"""What becomes of the fields of a request's body that a path does not compute: ignored, refused, or unknown.

A field that a body of `requests.py` has is computed, and stands in none of these tables.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ApiError

_log = logging.getLogger(__name__)
_MOST_NAMED = 20  # unknown fields that an answer names
_MOST_SAID = 1000  # that the log names
_NOTHING: tuple[Any, ...] = (False, 0, "", [])  # {} is none of them: an object may enable by being there
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused, in words for the client.

    Values of `_NOTHING` pass, as they ask for nothing; so do those in `also`, and the value of the field `same_as`.
    """

    text: str
    also: tuple[Any, ...] = ()
    same_as: str = ""


IGNORED = {  # why it changes no output: the fields
    "labels of the sender": (
        *("client_metadata", "metadata", "request_id", "safety_identifier", "user_profile_id", "workspace_id"),
    ),
    "marks of what is cached, as all prompts are": ("cache_control",),
    "hints about speed and price": (
        *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("inference_geo", "service_tier", "speed"),
    ),
    "of tools that this server has not": ("max_tool_calls",),
    "without effect without tools": ("parallel_tool_calls",),
    "without effect on a model of text": ("media_io_kwargs", "mm_processor_kwargs"),
    "without effect without a chat template": ("add_generation_prompt", "reasoning_effort"),
    "without effect without beam search": ("early_stopping", "length_penalty"),
    "settings of models and tokenizers that this one is not": (
        *("include_reasoning", "reasoning", "spaces_between_special_tokens", "verbosity"),
    ),
    "what does not fit is refused": ("truncation",),
    "there is one backend": ("guided_decoding_backend",),
}
_IGNORED = frozenset(name for names in IGNORED.values() for name in names)
_NOT_OFFERED = Refusal("this server does not offer it", ({},))
_ELSEWHERE = Refusal("not on this path", ({},))
_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_STRUCTURED = Refusal("use structured_outputs")
REFUSED = {
    **dict.fromkeys(("tools", "tool_choice"), Refusal("not on this path", ("none", "auto"))),
    **dict.fromkeys(("functions", "function_call"), Refusal("use tools and tool_choice", ("none", "auto"))),
    "web_search_options": Refusal("this server has no tools of its own"),
    "use_beam_search": Refusal("this server samples; it has no beam search"),
    "best_of": Refusal("must be n, or absent", same_as="n"),
    "n": Refusal("must be 1 here", (1,)),
    **dict.fromkeys(("audio", "image", "image_config"), Refusal("this model writes only text")),
    "modalities": Refusal("this model writes only text", (["text"],)),
    **dict.fromkeys(("background", "background_options", "conversation", "previous_response_id", "store", "thread"),
                    Refusal("this server keeps no answers")),
    **dict.fromkeys(("add_special_tokens", "chat_template", "chat_template_kwargs"), _ELSEWHERE),
    **dict.fromkeys(("continue_final_message", "documents", "thinking_token_budget"), _ELSEWHERE),
    **dict.fromkeys(("output_config", "output_format", "stop_sequences", "system", "thinking"), _ELSEWHERE),
    "context_management": Refusal("this server edits no conversation", ({}, {"edits": []}, _KEEP_ALL)),
    **dict.fromkeys(("access_programs", "container", "diagnostics", "mcp_servers", "moderation"), _NOT_OFFERED),
    "stop": Refusal("use stop_sequences"),
    "stream_options": Refusal("not on this path", ({},)),
    **dict.fromkeys(("include", "input", "instructions", "messages", "prompt", "text", "top_logprobs"), _ELSEWHERE),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), Refusal("another path's name; this "
        "one has max_tokens (completions), max_completion_tokens (chats) or max_output_tokens (responses)")),
    "logprobs": Refusal("use top_logprobs and include"),
    "response_format": Refusal("use text.format (responses) or output_config.format (messages)"),
    **dict.fromkeys(("echo", "prompt_logprobs", "repetition_detection", "suffix"), _NOT_OFFERED),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), _NOT_OFFERED),
    **dict.fromkeys(("kv_transfer_params", "logits_processors", "prompt_embeds", "vllm_xargs"), _NOT_OFFERED),
    "truncation_side": Refusal("prompts are cut at the left", ("left",)),
    **dict.fromkeys(("ebnf", "grammar", "json_schema", "regex"), _STRUCTURED),
}  # fmt: skip


GUIDED = {  # vLLM's older fields: the keys of structured_outputs
    f"guided_{name}": name for name in ("json", "json_object", "regex", "choice", "grammar", "whitespace_pattern")
}


def current(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a body with vLLM's older `guided_*` as `structured_outputs`."""
    guided = {GUIDED[name]: value for name, value in given.items() if name in GUIDED}
    inner = given.get("structured_outputs", {})
    return given | {"structured_outputs": guided | inner} if guided and isinstance(inner, dict) else given


def whole(value: Any) -> Any:
    """Return a value with numbers such as 1.0 as integers, also in lists."""
    if isinstance(value, list) and value and isinstance(value[0], float | int | list):
        return value if set(map(type, value)) == {int} else [whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class UnknownFields:
    """Says once in the log which fields of requests nobody knows here."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def note(self, path: str, names: Sequence[str], is_strict: bool) -> None:
        """Take the unknown fields of a request to a path.

        Raises:
            ApiError: there are some, and the server is strict.
        """
        if names and is_strict:
            raise ApiError(400, f"{names[0]}: nobody knows this field here (serve.strict=true)", param=names[0])
        for name in names:
            self._say("%s: a request has the unknown field %s, which is ignored", path, name)

    def note_tools(self, path: str, kinds: Sequence[str]) -> list[str]:
        """Take the types of tools that are left out of a request; return them as a header can hold them."""
        names = [kind if _NAME.fullmatch(kind) else "?" for kind in kinds[:_MOST_NAMED]]
        for name in names:
            self._say("%s: a request has a %s, which is left out: this server has no such tool", path, name)
        return names

    def _say(self, text: str, path: str, name: str) -> None:
        if (path, name) not in self._said and len(self._said) < _MOST_SAID:
            self._said.add((path, name))
            _log.warning(text, path, name)


def check_fields(computed: Collection[str], given: Mapping[str, Any]) -> list[str]:
    """Check the names in a body; return those that nobody knows here, as a header can hold them.

    Args:
        computed: the fields that the path computes.
        given: the body. Fields that are null count as absent, also within others.

    Raises:
        ApiError: a field asks for what this server does not do.
    """
    unknown = []
    for name, value in given.items():
        if value is None or name in computed or name in _IGNORED:
            continue
        refusal = REFUSED.get(name)
        if refusal is None:
            unknown.append(name if _NAME.fullmatch(name) else "?")
        elif _present(value) not in (*_NOTHING, *refusal.also) and (
            not refusal.same_as or value != given.get(refusal.same_as, 1)
        ):
            raise ApiError(400, f"{name}: {refusal.text}", param=name)
    return unknown[:_MOST_NAMED]


def _present(value: Any) -> Any:
    """Return a value without the keys that are null."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
