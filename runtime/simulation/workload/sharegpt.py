"""Draws requests from the conversations of a ShareGPT JSON file.

The first turn of a conversation is a request's prompt. The length of the second turn is the length of its output.
"""

from __future__ import annotations

import codecs
import zlib
from pathlib import Path

import msgspec
import numpy as np

from ....conf import strict_json
from ....conf.errors import ConfigError, reason
from ....conf.row_files import open_rows
from ....conf.user_path import user_path
from ....conf.workloads import ShareGptConfig
from ....models.tokenizer import Tokenizer
from .workload import LENGTH_STREAM, DrawnRequests

_WRONG = "not ShareGPT's JSON, a list of {conversations: [{value: ...}]}"
_MIN_TURN_TOKENS = 4  # conversations with shorter turns are skipped, as by `vllm bench serve`


class _Conversation(msgspec.Struct):
    conversations: list[msgspec.Raw] | msgspec.UnsetType | None = msgspec.UNSET


def draw(config: ShareGptConfig, num_requests: int | None, tokenizer: Tokenizer) -> DrawnRequests:
    """Draw `num_requests` conversations in an order given by the seed. None draws all that are long enough.

    Raises:
        ConfigError: the file is missing or is not ShareGPT's JSON, it has no usable conversation or fewer than
            `num_requests`, a JSON object in it has a duplicate key, or the model has no tokenizer.
    """
    conversations = _read(user_path(config.path, "workload.path"))
    order = np.random.default_rng((config.seed, LENGTH_STREAM)).permutation(len(conversations))
    prompts: list[list[int]] = []
    outputs: list[int] = []
    for index in order.tolist():
        if len(prompts) == num_requests:
            break
        turns = _turns(conversations[index], config.path)
        if turns is None:
            continue
        question, answer = turns
        ids = tokenizer.encode(question)
        length = config.output_len or len(tokenizer.encode(answer))
        if len(ids) >= _MIN_TURN_TOKENS and (length >= _MIN_TURN_TOKENS or config.output_len):
            prompts.append(ids)
            outputs.append(length)
    if num_requests is not None and len(prompts) < num_requests:
        raise ConfigError(f"workload.num_prompts={num_requests}: {config.path} has {len(prompts)} usable conversations")
    if not prompts:
        raise ConfigError(f"{config.path}: has no conversation with two turns of at least {_MIN_TURN_TOKENS} tokens")
    return DrawnRequests(np.array([len(ids) for ids in prompts]), np.array(outputs), prompts=prompts)


def _turns(conversation: msgspec.Raw, path: str) -> tuple[str, str] | None:
    """Return the texts of a conversation's first two turns; None if either has none.

    Raises:
        ConfigError: a JSON object has a duplicate key.
    """
    try:
        turns = strict_json.loads(bytes(conversation).decode())["conversations"][:2]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    question, answer = (turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns)
    return (question, answer) if isinstance(question, str) and isinstance(answer, str) else None


def _read(path: Path) -> list[msgspec.Raw]:
    """Return the JSON of each conversation with two or more turns, from a JSON array or JSON Lines."""
    decoder = msgspec.json.Decoder(_Conversation | None)
    try:
        with open_rows(path, "workload.path") as file:
            data = file.read().removeprefix(codecs.BOM_UTF8)
        if data.lstrip().startswith(b"["):
            rows = msgspec.json.decode(data, type=list[msgspec.Raw])
        else:
            rows = [msgspec.Raw(line) for line in data.splitlines() if line.strip()]
        found = [(row, decoder.decode(row)) for row in rows]
        if found and all(one is not None and one.conversations is msgspec.UNSET for _, one in found):
            has = ", ".join(msgspec.json.decode(found[0][0]))[:80]
            raise ConfigError(f"{path}: {_WRONG}; its first object has {has or 'nothing'}")
        return [row for row, one in found if one is not None and len(one.conversations or ()) >= 2]
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"workload.path={path}: cannot be read ({reason(error)})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {_WRONG} ({error})") from None
