"""Further arguments of `gapless serve`: a positional MODEL, vLLM's options, and a file of keys.

vLLM's options are translated to the keys with the same meaning. Options that a server does not need are ignored. Both
log a line. All other vLLM options are rejected, with the reason.
"""

from __future__ import annotations

import json
import logging
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ..conf.build import assign, group_names, leaves, load_command, load_group, model_choice, value_text
from ..conf.errors import ConfigError, did_you_mean
from ..conf.user_path import user_path
from ..models.gguf.smollm2 import is_installed
from .commands import Command
from .compose import FREE_TEXT, literal
from .options import OPTIONS, options_of

_log = logging.getLogger(__name__)
CONFIG = "serve.config"
_DTYPES = {"half": "float16", "float": "float32"}
_KV_DTYPES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"}
_LAUNCHERS = {"external_launcher": "torchrun"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BUDGETS: Mapping[str, str] = MappingProxyType(  # the key that limits a policy's micro-batch
    {
        "token_budget": "scheduler.max_batched_tokens",
        "prefill_first": "scheduler.max_prefill_tokens",
        "token_throttle": "scheduler.max_prefill_tokens",
    }
)


@dataclass(frozen=True, slots=True)
class _Key:
    """The key of an option, the conversion of its value, and the key's value for a switch."""

    key: str
    write: Callable[[str], str] = str
    says: str | None = None


def _size(text: str) -> str:
    """Convert `8k` and `8K` like vLLM, to 8000 and 8192."""
    match = _SIZE.fullmatch(text)
    return str(int(float(match[1]) * _UNITS[match[2]])) if match else text


def _length(text: str) -> str:
    return "null" if text in ("auto", "-1") else _size(text)


def _list(text: str) -> str:
    """Convert a string, or a JSON list, to a list of strings."""
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    return literal(found if isinstance(found, list) else [text])


def _names(text: str) -> str:
    """Return one name unchanged, and several, a JSON list, as a list."""
    return _list(text) if text.startswith("[") else literal(text)


_WRITERS: Mapping[str, Callable[[str], str]] = MappingProxyType(  # conversions of option values
    {
        "dtype": lambda text: _DTYPES.get(text, text),
        "kv-cache-dtype": lambda text: _KV_DTYPES.get(text, text),
        "distributed-executor-backend": lambda text: _LAUNCHERS.get(text, text),
        "generation-config": lambda text: "null" if text == "vllm" else text,
        "max-model-len": _length,
        "max-num-batched-tokens": _size,
        "served-model-name": _names,
        "api-key": _list,
        "allowed-origins": _list,
        "log-level": str.lower,
    }
)
_TABLES = tomllib.loads(Path(__file__).with_name("vllm_options.toml").read_text(encoding="utf-8"))


def _reasons(table: str) -> dict[str, str]:
    """Return the options of a table, each with its reason."""
    return {option: reason for reason, options in _TABLES[table].items() for option in options.split()}


def _keys() -> dict[str, _Key]:
    cut = {option: text.partition("=") for option, text in _TABLES["keys"].items()}
    return {option: _Key(key, _WRITERS.get(option, str), says or None) for option, (key, _, says) in cut.items()}


_KEYS, _SHORT = _keys(), _TABLES["short"]
_WITH_VALUE, _ALONE, _REFUSED = _reasons("ignored"), _reasons("ignored_switches"), _reasons("refused")
_VLLM = {**_REFUSED, **_WITH_VALUE, **_ALONE, **{option: entry.key for option, entry in _KEYS.items()}}


def _name_of(word: str) -> str:
    """Return the long name of an option, without dashes, the path in its JSON or `=VALUE`."""
    name = re.split(r"[=.]", word, maxsplit=1)[0]
    if name.startswith("-") and not name.startswith("--"):
        return "optimization-level" if re.fullmatch(r"-O\d", name) else _SHORT.get(name, name)
    return name.removeprefix("--").replace("_", "-")


def as_overrides(arguments: Sequence[str], command: Command) -> list[str]:
    """Translate a positional MODEL, vLLM's options and the file of keys to KEY=VALUE.

    The command line overrides the file, and later keys override earlier ones.

    Raises:
        ConfigError: a missing option value, a second positional argument, or an invalid file.
    """
    found = _Arguments(command)
    found.read(arguments)
    overrides = found.overrides
    file = next((text.partition("=")[2] for text in reversed(overrides) if text.startswith(f"{CONFIG}=")), "null")
    return [*([] if file in ("", "null") else _of_file(file, command)), *overrides]


def with_default_model(given: Sequence[str]) -> list[str]:
    """Add `model=smollm2`, a chat model, to overrides without a model, if its package is installed."""
    is_chosen = any(re.match(r"\+*model(\.(weights|architecture)\b[^=]*)?=", text) for text in given)
    return [*given] if is_chosen or not is_installed() else ["model=smollm2", *given]


class _Arguments:
    """Reads arguments in order."""

    def __init__(self, command: Command) -> None:
        self.overrides: list[str] = []
        self._own = {name for option in options_of(command) for name in option.names}
        self._takes_value = {name for option in OPTIONS if option.values for name in option.names}
        self._model: str | None = None
        self._policy = ""

    def read(self, arguments: Sequence[str]) -> None:
        """Read all arguments."""
        left = list(arguments)
        self._policy = next((word[10:] for word in reversed(left) if word.startswith("scheduler=")), "")
        while left:
            word = left.pop(0)
            name, has_value, value = word.partition("=")
            option = _name_of(word)
            is_off = option.startswith("no-") and option not in _VLLM and option[3:] in _VLLM
            option = option[3:] if is_off else option
            if re.fullmatch(r"-O\d", name):
                has_value, value = "=", name[2:]
            if not word.startswith("-") or word == "-":
                self._bare(word)
            elif name in self._own or option not in _VLLM:
                self._check_spelling(name, option)
                self.overrides.append(word)
                if name in self._takes_value and not has_value and left and not left[0].startswith("-"):
                    self.overrides.append(left.pop(0))
            elif option in _REFUSED or is_off or option in _ALONE or (option in _KEYS and _KEYS[option].says):
                self.take(option, name, "", is_on=not is_off)
            else:
                if not has_value and (not left or left[0].startswith("--")):
                    raise ConfigError(f"{name}: missing value")
                values = [value] if has_value else [left.pop(0)]
                while (
                    option in ("api-key", "served-model-name") and self._has_model(left) and left and _is_bare(left[0])
                ):
                    values.append(left.pop(0))  # these take several values
                self.take(option, name, json.dumps(values) if len(values) > 1 else values[0])

    def _has_model(self, left: Sequence[str]) -> bool:
        """Return whether the model is given, positionally or by its key."""
        words = (*self.overrides, *left)
        return self._model is not None or any(re.match(r"(--)?model(=|$)", word) for word in words)

    def take(self, option: str, name: str, value: str, is_on: bool = True) -> None:
        """Translate a vLLM option, given as `name`, and log its key; a switch may be off."""
        shown = f"{name} {value}".rstrip() if option != "api-key" else name
        if option in _REFUSED and is_on:
            raise ConfigError(f"not supported: {name}; {_REFUSED[option]}")
        if option not in _KEYS:
            _log.info("%s: ignored; %s", shown, _VLLM[option])
            return
        entry = _KEYS[option]
        key, text = entry.key, entry.write(value) if entry.says is None else entry.says
        if entry.says is not None and not is_on:
            text = "false" if entry.says == "true" else "true"
        if option == "max-num-batched-tokens":
            key = _BUDGETS.get(self._policy, key)
        if key == "parallel.launcher" and value not in ("ray", "external_launcher"):
            _log.info("%s: ignored; %s", shown, _ALONE["worker-use-ray"])
            return
        if key == "model.quantization" and value not in ("int8", "int4", "fp8"):
            _log.info("%s: ignored; gapless detects the format of a quantized checkpoint from its files", shown)
            return
        _log.info("%s: is %s here", shown, key if option == "api-key" else f"{key}={text}")
        self.overrides.append(f"{key}={text}")

    def _check_spelling(self, name: str, option: str) -> None:
        """Check that an unknown option is not a misspelled vLLM option.

        Raises:
            ConfigError: it is.
        """
        hint = did_you_mean(f"--{option}", [f"--{each}" for each in _VLLM], 0.87) if name not in self._own else ""
        if hint and name.startswith("--"):
            raise ConfigError(f"{name}: unknown option{hint}")

    def _bare(self, word: str) -> None:
        """Read an argument without dashes: an override, or the model."""
        if not _is_bare(word):
            self.overrides.append(word)
        elif self._model is not None:
            raise ConfigError(f"{word}: unexpected argument after model {self._model}; other arguments are KEY=VALUE")
        else:
            self._model = word
            self.overrides.append(f"model={word}")
            is_name = model_choice(word) == (word, {}) and word in group_names("model")
            if is_name and "weights" not in load_group("model", word):
                _log.warning("%s: has random weights; for a checkpoint give a folder or a name with a /", word)


def _is_bare(word: str) -> bool:
    return not word.startswith(("-", "+", "~")) and ("=" not in word or Path(word).exists())


def _of_file(name: str, command: Command) -> list[str]:
    """Return the overrides in a YAML file of nested or dotted keys, or vLLM's names.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping.
    """
    path = user_path(name.strip("'\""), CONFIG)
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else "not YAML in UTF-8"
        raise ConfigError(f"{CONFIG}={name}: {reason}") from error
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ConfigError(f"{CONFIG}={name}: must be a mapping of keys, such as `serve.port: 9000`")
    found = _Arguments(command)
    mapping: dict[str, Any] = {}
    groups = load_command(command.name)[1]
    for key, value in given.items():
        option = key.replace("_", "-")
        if key in groups and not isinstance(value, dict):
            found.overrides.append(f"{key}={value_text(value)}")
        elif option in _VLLM and key != "seed" and not isinstance(value, dict):
            found.take(option, key, json.dumps(value) if isinstance(value, list) else str(value), is_on=bool(value))
        else:
            assign(mapping, key, value, command.config)
    return found.overrides + [f"{key}={_plain(key, value)}" for key, value in leaves(mapping)]


def _plain(key: str, value: Any) -> str:
    """Return a YAML value in override syntax: free text unchanged, other strings quoted."""
    return str(value) if isinstance(value, str) and key in FREE_TEXT else literal(value)
