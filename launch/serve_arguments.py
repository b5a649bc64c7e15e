"""The words of `gapless serve` that are no KEY=VALUE: a bare MODEL, vLLM's options, and a file of keys.

Each of vLLM's options becomes the key that means the same here, and a line says which. Where nothing corresponds, the
line says what there is instead.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ..conf.build import assign, group_names, leaves, load_command, load_group, model_choice, value_text
from ..conf.errors import ConfigError
from ..conf.user_path import user_path
from .commands import Command
from .compose import FREE_TEXT, literal
from .options import OPTIONS, options_of

_log = logging.getLogger(__name__)
CONFIG = "serve.config"
_DTYPES = {"half": "float16", "float": "float32"}
_LAUNCHERS = {"external_launcher": "torchrun", "mp": "process"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BUDGETS: Mapping[str, str] = MappingProxyType(  # the key that bounds a policy's micro-batch
    {
        "token_budget": "scheduler.budget",
        "prefill_first": "scheduler.max_batched_tokens",
        "token_throttle": "scheduler.max_prefill_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class _Key:
    """The key that an option is, how its value is written there, and, for one without a value, what it says."""

    key: str
    write: Callable[[str], str] = str
    says: str | None = None


def _size(text: str) -> str:
    """Write `8k` and `8K` as vLLM reads them, 8000 and 8192."""
    match = _SIZE.fullmatch(text)
    return str(int(float(match[1]) * _UNITS[match[2]])) if match else text


def _length(text: str) -> str:
    return "null" if text in ("auto", "-1") else _size(text)


def _list(text: str) -> str:
    """Write one text, or a list in JSON, as a list of texts."""
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    return literal(found if isinstance(found, list) else [text])


_KEYS = {
    "model": _Key("model"),
    "tokenizer": _Key("model.tokenizer"),
    "revision": _Key("model.revision"),
    "dtype": _Key("model.dtype", lambda text: _DTYPES.get(text, text)),
    "quantization": _Key("model.quantization"),
    "max-model-len": _Key("model.max_model_len", _length),
    "served-model-name": _Key("serve.model_name"),
    "host": _Key("serve.host"),
    "port": _Key("serve.port"),
    "api-key": _Key("serve.api_keys", _list),
    "chat-template": _Key("serve.chat_template"),
    "allowed-origins": _Key("serve.allowed_origins", _list),
    "ssl-certfile": _Key("serve.ssl_certfile"),
    "ssl-keyfile": _Key("serve.ssl_keyfile"),
    "ssl-ca-certs": _Key("serve.ssl_ca_certs"),
    "uvicorn-log-level": _Key("serve.log_level"),
    "otlp-traces-endpoint": _Key("serve.otlp_endpoint"),
    "config": _Key(CONFIG),
    "tensor-parallel-size": _Key("parallel.tp"),
    "pipeline-parallel-size": _Key("parallel.pp"),
    "data-parallel-size": _Key("serve.replicas"),
    "distributed-executor-backend": _Key("parallel.launcher", lambda text: _LAUNCHERS.get(text, text)),
    "enable-expert-parallel": _Key("parallel.expert_parallel", says="true"),
    "max-num-seqs": _Key("scheduler.batch"),
    "max-num-batched-tokens": _Key("scheduler.chunk", _size),
    "scheduling-policy": _Key("scheduler.order"),
    "block-size": _Key("cache.block_size"),
    "num-gpu-blocks-override": _Key("cache.num_blocks"),
    "enable-prefix-caching": _Key("cache.prefix_caching", says="true"),
    "no-enable-prefix-caching": _Key("cache.prefix_caching", says="false"),
    "enforce-eager": _Key("model.cuda_graphs", says="false"),
    "seed": _Key("seed"),
}
_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"}
_SHORT |= {"-q": "quantization", "-O": "optimization-level"}
_WITH_VALUE = {  # options that nothing corresponds to: what there is instead
    "gpu-memory-utilization": "hardware.memory_gib=N is the memory in GiB that a rank may use",
    "kv-cache-memory-bytes": "cache.num_blocks=N is the number of KV blocks",
    "kv-cache-dtype": "KV blocks have the type of model.dtype",
    "swap-space": "a preempted request is computed again, not swapped",
    "cpu-offload-gb": "weights stay on the device",
    "load-format": "the format is seen from the files",
    "tokenizer-mode": "the tokenizer is that of the checkpoint",
    "optimization-level": "model.kernels and model.cuda_graphs choose what computes",
    "compilation-config": "model.kernels and model.cuda_graphs choose what computes",
    "speculative-config": "scheduler.drafts=N guesses tokens from prompt and output",
    "tool-call-parser": "the format of calls is seen from the checkpoint",
    "reasoning-parser": "the format of reasoning is seen from the checkpoint",
    "generation-config": "a request's parameters are those that it gives",
    "download-dir": "the cache of the hub is where HF_HOME says",
    "max-log-len": "prompts are never logged",
}
_ALONE = {
    "enable-chunked-prefill": "prompts are always computed in chunks; scheduler.chunk=N is their size",
    "no-enable-chunked-prefill": "scheduler=orca_best computes whole prompts",
    "async-scheduling": "micro-batches are always scheduled ahead",
    "trust-remote-code": "code of a checkpoint is never run",
    "enable-auto-tool-choice": "tools are always on",
    "enable-log-requests": "each request has its line; prompts are never logged",
    "disable-log-requests": "serve.log_level=warning leaves out the lines of requests",
    "disable-log-stats": "/metrics and the live page have the numbers",
    "disable-custom-all-reduce": "sums go by NCCL, or by shared memory on a CPU",
}


def as_overrides(arguments: Sequence[str], command: Command) -> list[str]:
    """Return the arguments with KEY=VALUE in place of a bare MODEL, of vLLM's options, and of what a file holds.

    Keys of the command line hold over those of the file, and a later one over an earlier.

    Raises:
        ConfigError: an option lacks its value, a second bare word follows, or the file is wrong.
    """
    found = _Arguments(command)
    found.read(arguments)
    overrides = found.overrides
    file = next((text.partition("=")[2] for text in reversed(overrides) if text.startswith(f"{CONFIG}=")), "null")
    return [*([] if file in ("", "null") else _of_file(file, command)), *overrides]


def key_of(option: str) -> str | None:
    """Return the key that an option of vLLM's is, written with its dashes or without; None where there is none."""
    entry = _KEYS.get(_SHORT.get(option) or option.lstrip("-").replace("_", "-"))
    return None if entry is None else entry.key


class _Arguments:
    """Reads arguments one after the other."""

    def __init__(self, command: Command) -> None:
        self.overrides: list[str] = []
        self._own = {name for option in options_of(command) for name in (option.name, option.short) if name}
        self._takes_value = {option.name for option in OPTIONS if option.value or option.values}
        self._takes_value |= {option.short for option in OPTIONS if option.name in self._takes_value}
        self._model: str | None = None
        self._policy = ""

    def read(self, arguments: Sequence[str]) -> None:
        """Take all arguments."""
        left = list(arguments)
        self._policy = next((word[10:] for word in reversed(left) if word.startswith("scheduler=")), "")
        while left:
            word = left.pop(0)
            name, has_value, value = word.partition("=")
            option = _SHORT.get(name) or name.removeprefix("--").replace("_", "-")
            is_known = option in _KEYS or option in _WITH_VALUE or option in _ALONE
            if not word.startswith("-") or word == "-":
                self._bare(word)
            elif name in self._own or not is_known or not (name in _SHORT or name.startswith("--")):
                self.overrides.append(word)
                if name in self._takes_value and not has_value and left and not left[0].startswith("-"):
                    self.overrides.append(left.pop(0))
            elif option in _ALONE or (option in _KEYS and _KEYS[option].says is not None):
                self.take(option, name, "")
            else:
                if not has_value and (not left or left[0].startswith("--")):
                    raise ConfigError(f"{name}: needs a value")
                values = [value] if has_value else [left.pop(0)]
                while option in ("api-key", "served-model-name") and self._model and left and _is_bare(left[0]):
                    values.append(left.pop(0))  # vLLM takes several
                self.take(option, name, json.dumps(values) if len(values) > 1 else values[0])

    def take(self, option: str, name: str, value: str, is_on: bool = True) -> None:
        """Take an option of vLLM's, which the user wrote as `name`, and say what it is here; a switch may be off."""
        shown = f"{name} {value}".rstrip() if option != "api-key" else name
        if option not in _KEYS:
            _log.info("%s: nothing corresponds; %s", shown, _WITH_VALUE.get(option) or _ALONE[option])
            return
        entry = _KEYS[option]
        key, text = entry.key, entry.write(value) if entry.says is None else entry.says
        if entry.says is not None and not is_on:
            text = "false" if entry.says == "true" else "true"
        if option == "max-num-batched-tokens":
            key = _BUDGETS.get(self._policy, key)
        elif option == "served-model-name" and value.startswith("["):
            text = json.loads(value)[0]
        if key == "parallel.launcher" and value not in ("ray", "external_launcher"):
            _log.info("%s: nothing corresponds; several ranks start by Ray, or by torchrun", shown)
            return
        if key == "model.quantization" and value not in ("int8", "int4", "fp8"):
            _log.info("%s: nothing to say; a quantized checkpoint is read as it is", shown)
            return
        _log.info("%s: is %s here", shown, key if option == "api-key" else f"{key}={text}")
        self.overrides.append(f"{key}={text}")

    def _bare(self, word: str) -> None:
        """Take a word without a mark: an override, or the model."""
        if not _is_bare(word):
            self.overrides.append(word)
        elif self._model is not None:
            raise ConfigError(f"{word}: a second model, beside {self._model}; other words are KEY=VALUE")
        else:
            self._model = word
            self.overrides.append(f"model={word}")
            is_name = model_choice(word) == (word, {}) and word in group_names("model")
            if is_name and "weights" not in load_group("model", word):
                _log.warning("%s: a shape with random weights; a checkpoint is a folder or a name with a /", word)


def _is_bare(word: str) -> bool:
    return not word.startswith(("-", "+", "~")) and ("=" not in word or Path(word).exists())


def _of_file(name: str, command: Command) -> list[str]:
    """Return the overrides that a file of keys stands for: nested or dotted keys in YAML, or vLLM's names.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    path = user_path(name.strip("'\""), CONFIG)
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else "not YAML in UTF-8"
        raise ConfigError(f"{CONFIG}={name}: {reason}") from error
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ConfigError(f"{CONFIG}={name}: must hold keys with their values, as `serve.port: 9000`")
    found = _Arguments(command)
    mapping: dict[str, Any] = {}
    groups = load_command(command.name)[1]
    for key, value in given.items():
        option = key.replace("_", "-")
        if key in groups and not isinstance(value, dict):
            found.overrides.append(f"{key}={value_text(value)}")
        elif option in {*_KEYS, *_WITH_VALUE, *_ALONE} and key != "seed" and not isinstance(value, dict):
            found.take(option, key, json.dumps(value) if isinstance(value, list) else str(value), is_on=bool(value))
        else:
            assign(mapping, key, value, command.config)
    return found.overrides + [f"{key}={_plain(key, value)}" for key, value in leaves(mapping)]


def _plain(key: str, value: Any) -> str:
    """Write a value of YAML as an override has it: free text as it is, other text quoted."""
    return str(value) if isinstance(value, str) and key in FREE_TEXT else literal(value)
