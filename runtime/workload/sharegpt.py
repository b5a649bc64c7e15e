"""Conversations of a ShareGPT JSON: the first turn is the prompt, the second says how long the output is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from ...conf.errors import ConfigError
from ...conf.workloads import ShareGptConfig
from ...models.tokenizer import Tokenizer
from .workload import LENGTHS, Drawn

SHORTEST = 4  # tokens: shorter turns are passed over, as `vllm bench serve` does


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def draw(config: ShareGptConfig, num: int | None, tokenizer: Tokenizer) -> Drawn:
    """`num` conversations in the seed's order (null: all that are long enough), as token ids of the model.

    Raises:
        ConfigError: no such file, no such JSON, no usable conversation or fewer than `num`, or no tokenizer.
    """
    conversations = _read(Path(config.path).expanduser())
    order = np.random.default_rng((config.seed, LENGTHS)).permutation(len(conversations))
    prompts: list[list[int]] = []
    outputs: list[int] = []
    for index in order:
        if len(prompts) == num:
            break
        question, answer, *_ = conversations[index]
        ids = tokenizer.encode(question)
        length = config.output_len or len(tokenizer.encode(answer))
        if len(ids) >= SHORTEST and (length >= SHORTEST or config.output_len):
            prompts.append(ids)
            outputs.append(length)
    if num is not None and len(prompts) < num:
        raise ConfigError(f"workload.num_prompts={num}: {config.path} holds {len(prompts)} usable conversations")
    if not prompts:
        raise ConfigError(f"{config.path}: no conversation of two turns of {SHORTEST} tokens or more in it")
    return Drawn(np.array([len(ids) for ids in prompts]), np.array(outputs), prompts=prompts)


def _read(path: Path) -> list[list[str]]:
    """The turns of each conversation that has two or more."""
    if path.is_fifo():  # it is read twice: checked before the run folder is made, then run
        raise ConfigError(f"workload.path={path}: a pipe; give a file")
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[_Conversation])
    except FileNotFoundError:
        raise ConfigError(f"workload.path={path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"workload.path={path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: not ShareGPT's JSON, a list of {{conversations: [{{value: ...}}]}} ({error})"
        ) from None
    return [[turn.value for turn in row.conversations] for row in rows if len(row.conversations) >= 2]
