"""Draws requests from the conversations of a ShareGPT JSON file.

The first turn of a conversation is a request's prompt. The length of the second turn is the length of its output.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from ...conf import strict_json
from ...conf.errors import ConfigError
from ...conf.workloads import ShareGptConfig
from ...models.tokenizer import Tokenizer
from .workload import LENGTH_STREAM, DrawnRequests

_MIN_TURN_TOKENS = 4  # conversations with shorter turns are skipped, as by `vllm bench serve`


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def draw(config: ShareGptConfig, num_requests: int | None, tokenizer: Tokenizer) -> DrawnRequests:
    """Draw `num_requests` conversations in an order given by the seed. None draws all that are long enough.

    Raises:
        ConfigError: the file is missing or is not ShareGPT's JSON, it has no usable conversation or fewer than
            `num_requests`, an object of it has a key twice, or the model has no tokenizer.
    """
    conversations = _read(Path(config.path).expanduser())
    order = np.random.default_rng((config.seed, LENGTH_STREAM)).permutation(len(conversations))
    prompts: list[list[int]] = []
    outputs: list[int] = []
    for index in order.tolist():
        if len(prompts) == num_requests:
            break
        question, answer = _turns(conversations[index], config.path)
        ids = tokenizer.encode(question)
        length = config.output_len or len(tokenizer.encode(answer))
        if len(ids) >= _MIN_TURN_TOKENS and (length >= _MIN_TURN_TOKENS or config.output_len):
            prompts.append(ids)
            outputs.append(length)
    if num_requests is not None and len(prompts) < num_requests:
        raise ConfigError(
            f"workload.num_prompts={num_requests}: {config.path} holds {len(prompts)} usable conversations"
        )
    if not prompts:
        raise ConfigError(f"{config.path}: no conversation of two turns of {_MIN_TURN_TOKENS} tokens or more in it")
    return DrawnRequests(np.array([len(ids) for ids in prompts]), np.array(outputs), prompts=prompts)


def _turns(conversation: msgspec.Raw, path: str) -> tuple[str, str]:
    """Return the texts of a conversation's first two turns.

    Raises:
        ConfigError: an object of its JSON has a key twice.
    """
    try:
        question, answer, *_ = strict_json.loads(bytes(conversation).decode())["conversations"]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return question.get("value", ""), answer.get("value", "")


def _read(path: Path) -> list[msgspec.Raw]:
    """Return the JSON of each conversation that has two turns or more."""
    if path.is_fifo():  # a command reads the file twice: for its check and for its run
        raise ConfigError(f"workload.path={path}: a pipe; give a file")
    decoder = msgspec.json.Decoder(_Conversation)
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw])
        return [row for row in rows if len(decoder.decode(row).conversations) >= 2]
    except FileNotFoundError:
        raise ConfigError(f"workload.path={path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"workload.path={path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not ShareGPT's JSON, a list of {{conversations: [{{value: ...}}]}} ({error})"
        ) from None
