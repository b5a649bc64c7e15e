"""Body fields that a path does not support: ignored, refused or unknown.

A field of a body class is supported on its path, whatever these tables contain.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ApiError

_log = logging.getLogger(__name__)
_MOST_NAMED = 20  # unknown fields listed in an answer
_MOST_SAID = 1000  # unknown fields listed in the log
_NOTHING: tuple[Any, ...] = (False, 0, "", [])  # not {}: an empty object may enable a feature
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused, as a text for the client.

    Values in `_NOTHING` pass because they request nothing; so do values in `also` and the value of the field `same_as`.
    """

    text: str
    also: tuple[Any, ...] = ()
    same_as: str = ""


IGNORED = {  # why they do not affect outputs: the fields
    "labels set by the client": (
        *("client_metadata", "metadata", "request_id", "safety_identifier", "user_profile_id", "workspace_id"),
    ),
    "cache hints; all prompts are cached": ("cache_control",),
    "hints about speed and price": (
        *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("inference_geo", "service_tier", "speed"),
    ),
    "for tools that this server does not have": ("max_tool_calls",),
    "no effect without tools": ("parallel_tool_calls",),
    "no effect on a text model": ("media_io_kwargs", "mm_processor_kwargs"),
    "no effect without a chat template": ("add_generation_prompt", "reasoning_effort"),
    "no effect without beam search": ("early_stopping", "length_penalty"),
    "settings of other models and tokenizers": (
        *("include_reasoning", "reasoning", "spaces_between_special_tokens", "verbosity"),
    ),
    "prompts that do not fit are rejected": ("truncation",),
    "there is only one backend": ("guided_decoding_backend",),
}
_IGNORED = frozenset(name for names in IGNORED.values() for name in names)
_NOT_OFFERED = Refusal("not supported", ({},))
_ELSEWHERE = Refusal("not supported on this path", ({},))
_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
_STRUCTURED = Refusal("use structured_outputs")
REFUSED = {
    **dict.fromkeys(("tools", "tool_choice"), Refusal("not supported on this path", ("none", "auto"))),
    **dict.fromkeys(("functions", "function_call"), Refusal("use tools and tool_choice", ("none", "auto"))),
    "web_search_options": Refusal("this server has no hosted tools"),
    "use_beam_search": Refusal("beam search is not supported"),
    "best_of": Refusal("must equal n, or be absent", same_as="n"),
    "n": Refusal("must be 1 on this path", (1,)),
    **dict.fromkeys(("audio", "image", "image_config"), Refusal("this model generates only text")),
    "modalities": Refusal("this model generates only text", (["text"],)),
    **dict.fromkeys(("background", "background_options", "conversation", "previous_response_id", "store", "thread"),
                    Refusal("this server does not store responses")),
    **dict.fromkeys(("add_special_tokens", "chat_template", "chat_template_kwargs"), _ELSEWHERE),
    **dict.fromkeys(("continue_final_message", "documents", "thinking_token_budget"), _ELSEWHERE),
    **dict.fromkeys(("output_config", "output_format", "stop_sequences", "system", "thinking"), _ELSEWHERE),
    "context_management": Refusal("this server does not edit conversations", ({}, {"edits": []}, _KEEP_ALL)),
    **dict.fromkeys(("access_programs", "container", "diagnostics", "mcp_servers", "moderation"), _NOT_OFFERED),
    "stop": Refusal("use stop_sequences"),
    "stream_options": Refusal("not supported on this path", ({},)),
    **dict.fromkeys(("include", "input", "instructions", "messages", "prompt", "text", "top_logprobs"), _ELSEWHERE),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), Refusal("not on this path; use "
        "max_tokens (completions), max_completion_tokens (chats) or max_output_tokens (responses)")),
    "logprobs": Refusal("use top_logprobs and include"),
    "response_format": Refusal("use text.format (responses) or output_config.format (messages)"),
    **dict.fromkeys(("echo", "prompt_logprobs", "repetition_detection", "suffix"), _NOT_OFFERED),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), _NOT_OFFERED),
    **dict.fromkeys(("kv_transfer_params", "logits_processors", "prompt_embeds", "vllm_xargs"), _NOT_OFFERED),
    "truncation_side": Refusal("prompts are truncated on the left", ("left",)),
    **dict.fromkeys(("ebnf", "grammar", "json_schema", "regex"), _STRUCTURED),
}  # fmt: skip


GUIDED = {  # vLLM's legacy fields: the keys of structured_outputs
    f"guided_{name}": name for name in ("json", "json_object", "regex", "choice", "grammar", "whitespace_pattern")
}


def current(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a body with vLLM's legacy `guided_*` converted to `structured_outputs`."""
    guided = {GUIDED[name]: value for name, value in given.items() if name in GUIDED}
    inner = given.get("structured_outputs", {})
    return given | {"structured_outputs": guided | inner} if guided and isinstance(inner, dict) else given


def whole(value: Any) -> Any:
    """Convert integral floats such as 1.0 to integers, also in lists."""
    if isinstance(value, list) and value and isinstance(value[0], float | int | list):
        return value if set(map(type, value)) == {int} else [whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class UnknownFields:
    """Logs unknown fields of requests, each once."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def note(self, path: str, names: Sequence[str], is_strict: bool) -> None:
        """Log the unknown fields of a request.

        Raises:
            ApiError: there are some, and the server is strict.
        """
        if names and is_strict:
            raise ApiError(400, f"{names[0]}: unknown field (serve.strict=true)", param=names[0])
        for name in names:
            self._say("%s: ignoring unknown field %s", path, name)

    def note_tools(self, path: str, kinds: Sequence[str]) -> list[str]:
        """Log the types of tools that are left out of a request; return them as header-safe names."""
        names = [kind if _NAME.fullmatch(kind) else "?" for kind in kinds[:_MOST_NAMED]]
        for name in names:
            self._say("%s: ignoring tool of type %s, which this server does not have", path, name)
        return names

    def _say(self, text: str, path: str, name: str) -> None:
        if (path, name) not in self._said and len(self._said) < _MOST_SAID:
            self._said.add((path, name))
            _log.warning(text, path, name)


def check_fields(computed: Collection[str], given: Mapping[str, Any]) -> list[str]:
    """Check the field names of a body; return the unknown ones as header-safe names.

    Args:
        computed: the fields that the path supports.
        given: the body. Null fields count as absent, also when nested.

    Raises:
        ApiError: a field requests an unsupported feature.
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
    """Return a value without its null keys."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
