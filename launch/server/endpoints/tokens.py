"""The model's tokenizer: text to token ids and back."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..errors import ApiError
from ..json_response import json_response
from ..prompting import encode_text, render
from ..requests import DetokenizeBody, TokenizeBody
from ..service import Service


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a prompt or a chat."""
    body: TokenizeBody = request.state.body
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
    if body.prompt is None:
        text, _ = await render(service, body, body.tool_set)
        tokens = await encode_text(service, text, False, body.prompt_field)
    else:
        tokens = await encode_text(service, body.prompt, body.add_special_tokens, "prompt")
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": service.max_model_len})


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids."""
    body: DetokenizeBody = request.state.body
    if wrong := [token for token in body.tokens if not 0 <= token < 1 << 31]:
        raise ApiError(400, f"tokens: {wrong[0]} is not a token id", param="tokens")
    return json_response({"prompt": service.intake.tokenizer.decode(body.tokens, skip_special=False)})


async def tokenizer_info(service: Service, request: Request) -> Response:
    """Return the tokenizer's tokenizer_config.json, without its chat template."""
    config = service.intake.tokenizer_config
    return json_response({key: value for key, value in config.items() if key != "chat_template"})
