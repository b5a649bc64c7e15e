"""The words of `gapless serve` that are no KEY=VALUE: a bare MODEL, vLLM's options, and a file of keys.

Each of vLLM's options becomes the key that means the same here, and a line says which. An option that is not needed
here is passed over with a line. Any other option of vLLM's is refused, with the reason.
"""

from __future__ import annotations

import difflib
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
from ..models.gguf.smollm2 import is_installed
from .commands import Command
from .compose import FREE_TEXT, literal
from .options import OPTIONS, options_of

_log = logging.getLogger(__name__)
CONFIG = "serve.config"
_DTYPES = {"half": "float16", "float": "float32"}
_KV_DTYPES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"}
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


def _names(text: str) -> str:
    """Write one name as it is, and several, in JSON, as a list."""
    return _list(text) if text.startswith("[") else literal(text)


_KEYS = {
    "model": _Key("model"),
    "tokenizer": _Key("model.tokenizer"),
    "revision": _Key("model.revision"),
    "dtype": _Key("model.dtype", lambda text: _DTYPES.get(text, text)),
    "quantization": _Key("model.quantization"),
    "max-model-len": _Key("model.max_model_len", _length),
    "served-model-name": _Key("serve.model_name", _names),
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
    "generation-config": _Key("serve.generation_config", lambda text: "false" if text == "vllm" else "true"),
    "config": _Key(CONFIG),
    "tensor-parallel-size": _Key("parallel.tp"),
    "pipeline-parallel-size": _Key("parallel.pp"),
    "data-parallel-size": _Key("serve.replicas"),
    "distributed-executor-backend": _Key("parallel.launcher", lambda text: _LAUNCHERS.get(text, text)),
    "enable-expert-parallel": _Key("parallel.expert_parallel", says="true"),
    "max-num-seqs": _Key("scheduler.batch"),
    "max-num-batched-tokens": _Key("scheduler.chunk", _size),
    "scheduling-policy": _Key("scheduler.order"),
    "kv-cache-dtype": _Key("cache.dtype", lambda text: _KV_DTYPES.get(text, text)),
    "block-size": _Key("cache.block_size"),
    "num-gpu-blocks-override": _Key("cache.num_blocks"),
    "enable-prefix-caching": _Key("cache.prefix_caching", says="true"),
    "no-enable-prefix-caching": _Key("cache.prefix_caching", says="false"),
    "enforce-eager": _Key("model.cuda_graphs", says="false"),
    "seed": _Key("seed"),
}
_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"}
_SHORT |= {"-q": "quantization", "-O": "optimization-level", "-cc": "compilation-config", "-sc": "speculative-config"}
_SHORT |= {"-n": "nnodes", "-r": "node-rank", "-dpn": "data-parallel-rank", "-dpl": "data-parallel-size-local"}
_SHORT |= {"-dpa": "data-parallel-address", "-dpp": "data-parallel-rpc-port", "-dpb": "data-parallel-backend"}
_WITH_VALUE = {  # options that nothing corresponds to: what there is instead
    "gpu-memory-utilization": "hardware.memory_gib=N is the memory in GiB that a rank may use",
    "kv-cache-memory-bytes": "cache.num_blocks=N is the number of KV blocks",
    "swap-space": "a preempted request is computed again, not swapped",
    "cpu-offload-gb": "weights stay on the device",
    "load-format": "the format is seen from the files",
    "tokenizer-mode": "the tokenizer is that of the checkpoint",
    "optimization-level": "model.kernels and model.cuda_graphs choose what computes",
    "compilation-config": "model.kernels and model.cuda_graphs choose what computes",
    "speculative-config": "scheduler.drafts=N guesses tokens from prompt and output",
    "tool-call-parser": "the format of calls is seen from the checkpoint",
    "reasoning-parser": "the format of reasoning is seen from the checkpoint",
    "model-impl": "the model's code is that of gapless",
    "attention-backend": "model.attention chooses what computes attention",
    "config-format": "the format is seen from the files",
    "max-parallel-loading-workers": "each rank loads its own part",
    "uvicorn-access-log-level": "serve.log_level holds for all",
    "api-server-count": "one process answers HTTP",
    "max-logprobs": "a request may ask for up to 64",
    "h11-max-incomplete-event-size": "serve.max_body_mib bounds a request",
    "h11-max-header-count": "headers have a bound of their own",
    "structured-outputs-config": "structured outputs are always on",
    "guided-decoding-backend": "structured outputs are always on",
    "max-cudagraph-capture-size": "model.cuda_graphs chooses whether there are graphs",
    "cudagraph-capture-sizes": "model.cuda_graphs chooses whether there are graphs",
    "max-seq-len-to-capture": "model.cuda_graphs chooses whether there are graphs",
    "preemption-mode": "a preempted request is computed again, not swapped",
    "prefix-caching-hash-algo": "prefixes are compared by their tokens",
    "max-num-partial-prefills": "the policy chooses how many prompts share a micro-batch",
    "max-long-partial-prefills": "the policy chooses how many prompts share a micro-batch",
    "long-prefill-token-threshold": "scheduler.max_prefill_share bounds one request's share",
    "stream-interval": "each token is an event of its own",
    "disable-access-log-for-endpoints": "serve.log_level=warning leaves out the lines of requests",
    "allowed-methods": "the API's methods are allowed",
    "allowed-headers": "the API's headers are allowed",
    "kv-sharing-fast-prefill": "prompts are computed whole",
    "download-dir": "the cache of the hub is where HF_HOME says",
    "max-log-len": "prompts are never logged",
}
_ALONE = {
    "enable-chunked-prefill": "prompts are always computed in chunks; scheduler.chunk=N is their size",
    "no-enable-chunked-prefill": "scheduler=orca_best computes whole prompts",
    "async-scheduling": "micro-batches are always scheduled ahead",
    "trust-remote-code": "code of a checkpoint is never run",
    "enable-auto-tool-choice": "tools are always on",
    "disable-uvicorn-access-log": "serve.log_level=warning leaves out the lines of requests",
    "use-tqdm-on-load": "a line says what each part of the start took",
    "enable-prompt-tokens-details": "usage always has cached_tokens",
    "disable-fastapi-docs": "/openapi.json is static",
    "disable-frontend-multiprocessing": "HTTP has a process of its own",
    "enable-request-id-headers": "answers always have X-Request-Id",
    "enable-log-requests": "each request has its line; prompts are never logged",
    "disable-log-requests": "serve.log_level=warning leaves out the lines of requests",
    "disable-log-stats": "/metrics and the live page have the numbers",
    "disable-custom-all-reduce": "sums go by NCCL, or by shared memory on a CPU",
}


_MULTIMODAL = "models take text only"
_POOLING = "models generate text only; there are no embeddings, scores or classes"
_SPECULATIVE = "there is no draft model; scheduler.drafts=N guesses tokens from prompt and output"
_LORA = "LoRA adapters are not loaded; merge one into its checkpoint"
_ONE_PLACE = "one command starts all hosts; parallel.ray_address=auto, or torchrun (docs/cluster.md)"
_REPLICAS = "serve.replicas=N runs N pipelines behind one address"
_OWN_CODE = "code of a user or a plug-in is not loaded into the server"
_DISAGGREGATED = "a server prefills and decodes itself; gapless simulate has prefill pools"
_REFUSED: Mapping[str, str] = MappingProxyType(  # options that change what the server does, and why they are refused
    {
        option: reason
        for reason, options in (
            (_LORA, "enable-lora enable-lora-bias lora-modules max-loras max-lora-rank max-cpu-loras lora-dtype"),
            (_LORA, "lora-extra-vocab-size fully-sharded-loras long-lora-scaling-factors default-mm-loras"),
            (_LORA, "enable-tower-connector-lora enable-prompt-adapter max-prompt-adapters prompt-adapters"),
            (_LORA, "qlora-adapter-name-or-path max-prompt-adapter-token lora-target-modules specialize-active-lora"),
            (_MULTIMODAL, "limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type"),
            (_MULTIMODAL, "mm-shm-cache-max-object-size-mb mm-encoder-tp-mode mm-encoder-attn-backend mm-encoder-only"),
            (
                _MULTIMODAL,
                "interleave-mm-strings skip-mm-profiling video-pruning-rate media-io-kwargs enable-mm-embeds",
            ),
            (_MULTIMODAL, "disable-mm-preprocessor-cache allowed-local-media-path allowed-media-domains"),
            (_MULTIMODAL, "disable-chunked-mm-input"),
            (_POOLING, "runner convert task override-pooler-config pooler-config logits-processor-pattern"),
            (_POOLING, "enable-flash-late-interaction"),
            (
                _SPECULATIVE,
                "speculative-model num-speculative-tokens speculative-max-model-len ngram-prompt-lookup-max",
            ),
            (_SPECULATIVE, "ngram-prompt-lookup-min speculative-disable-by-batch-size spec-decoding-acceptance-method"),
            (_SPECULATIVE, "speculative-model-quantization speculative-draft-tensor-parallel-size"),
            (_ONE_PLACE, "nnodes node-rank master-addr master-port headless worker-cls worker-extension-cls"),
            (_ONE_PLACE, "ray-workers-use-nsight"),
            (_REPLICAS, "data-parallel-rank data-parallel-start-rank data-parallel-size-local data-parallel-address"),
            (
                _REPLICAS,
                "data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb",
            ),
            (_REPLICAS, "data-parallel-supervisor-port"),
            (_OWN_CODE, "middleware tool-parser-plugin reasoning-parser-plugin logits-processors io-processor-plugin"),
            (_OWN_CODE, "scheduler-cls tool-server"),
            (_DISAGGREGATED, "kv-transfer-config kv-events-config ec-transfer-config tokens-only"),
            ("KV blocks stay on the device", "kv-offloading-size kv-offloading-backend"),
            ("weights of a rank stay on its device", "offload-backend offload-group-size cpu-offload-params"),
            ("the context is that of the checkpoint, its rope_scaling included", "rope-scaling rope-theta"),
            ("change the checkpoint's config.json", "hf-overrides hf-config-path"),
            ("one revision holds for weights and tokenizer", "tokenizer-revision code-revision"),
            ("the token of the hub is what HF_TOKEN holds", "hf-token"),
            ("prompts as token ids need no tokenizer: model.tokenizer=none", "skip-tokenizer-init"),
            ("prompts as embeddings are not taken", "enable-prompt-embeds"),
            ("a server has no sleep mode; stop it and start it again", "enable-sleep-mode"),
            ("experts stay where they are", "enable-eplb eplb-config num-redundant-experts expert-placement-strategy"),
            ("experts of one layer are computed by the ranks of its stage", "all2all-backend enable-elastic-ep"),
            ("contexts are not split over ranks", "decode-context-parallel-size prefill-context-parallel-size"),
            ("two batches are not overlapped in a stage; parallel.pp fills stages", "enable-dbo ubatch-size"),
            ("scales of the KV cache are computed as it is written", "calculate-kv-scales"),
            ("sliding windows stay on", "disable-sliding-window"),
            ("Mamba layers are not supported", "mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size"),
            ("Mamba layers are not supported", "mamba-cache-mode"),
            ("the server listens on TCP; serve.host=127.0.0.1 keeps it on this machine", "uds"),
            ("let a reverse proxy cut the path (docs/deploy.md)", "root-path"),
            ("put a reverse proxy in front for that (docs/deploy.md)", "ssl-ciphers enable-ssl-refresh"),
            ("serve.ssl_ca_certs alone asks clients for certificates", "ssl-cert-reqs"),
            ("clients send keys in a header, not cookies", "allow-credentials"),
            ("answers have the role assistant", "response-role"),
            ("a client's template is not run", "trust-request-chat-template"),
            ("clients send chat_template_kwargs with a request", "default-chat-template-kwargs"),
            ("the template decides how content is read", "chat-template-content-format"),
            ("log-probabilities have tokens as texts", "return-tokens-as-token-ids logprobs-mode"),
            ("a request's sampling parameters are those that it gives", "override-generation-config"),
            ("clients ask by stream_options.include_usage", "enable-force-include-usage"),
            ("texts are never logged", "enable-log-outputs"),
            ("serve.log_level and serve.log_format say what is logged", "log-config-file"),
            ("/metrics has all metrics", "show-hidden-metrics-for-version collect-detailed-traces"),
            ("gapless profile and POST /record measure a server", "profiler-config"),
            ("/tokenize and /v1/models have what there is", "enable-tokenizer-info-endpoint"),
            ("hardware=NAME says what ranks run on", "device override-neuron-config"),
            ("keys of gapless take its place", "additional-config model-loader-extra-config kernel-config"),
            ("gRPC is not served", "grpc"),
        )
        for option in options.split()
    }
)

_VLLM = {**_REFUSED, **_WITH_VALUE, **_ALONE, **{option: entry.key for option, entry in _KEYS.items()}}


def answer_to(option: str) -> str | None:
    """Return what becomes of an option of vLLM's, as docs/from_vllm.md has it; None if vLLM has no such option."""
    option = _name_of(option)
    if (entry := _KEYS.get(option)) is not None:
        return f"is {entry.key}={entry.says}" if entry.says else f"is {entry.key}"
    if option in _REFUSED:
        return f"not supported; {_REFUSED[option]}"
    return f"nothing corresponds; {_VLLM[option]}" if option in _VLLM else None


def _name_of(word: str) -> str:
    """Return the long name of an option, without dashes, the path in its JSON or `=VALUE`."""
    name = re.split(r"[=.]", word, maxsplit=1)[0]
    if name.startswith("-") and not name.startswith("--"):
        return "optimization-level" if re.fullmatch(r"-O\d", name) else _SHORT.get(name, name)
    return name.removeprefix("--").replace("_", "-")


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


def with_default_model(given: Sequence[str]) -> list[str]:
    """Add `model=smollm2`, which chats, to overrides that name no model, if its package is installed."""
    is_chosen = any(re.match(r"\+*(model(\.(weights|architecture)\b[^=]*)?|experiment)=", text) for text in given)
    return [*given] if is_chosen or not is_installed() else ["model=smollm2", *given]


def key_of(option: str) -> str | None:
    """Return the key that an option of vLLM's is, written with its dashes or without; None where there is none."""
    entry = _KEYS.get(_name_of(option))
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
                    raise ConfigError(f"{name}: needs a value")
                values = [value] if has_value else [left.pop(0)]
                while (
                    option in ("api-key", "served-model-name") and self._has_model(left) and left and _is_bare(left[0])
                ):
                    values.append(left.pop(0))  # vLLM takes several
                self.take(option, name, json.dumps(values) if len(values) > 1 else values[0])

    def _has_model(self, left: Sequence[str]) -> bool:
        """Return whether the model is known, or named with its key among the words that are left."""
        return self._model is not None or any(re.match(r"(--)?model(=|$)", word) for word in left)

    def take(self, option: str, name: str, value: str, is_on: bool = True) -> None:
        """Take an option of vLLM's, which the user wrote as `name`, and say what it is here; a switch may be off."""
        shown = f"{name} {value}".rstrip() if option != "api-key" else name
        if option in _REFUSED and is_on:
            raise ConfigError(f"not supported: {name}; {_REFUSED[option]}")
        if option not in _KEYS:
            _log.info("%s: nothing corresponds; %s", shown, _VLLM[option])
            return
        entry = _KEYS[option]
        key, text = entry.key, entry.write(value) if entry.says is None else entry.says
        if entry.says is not None and not is_on:
            text = "false" if entry.says == "true" else "true"
        if option == "max-num-batched-tokens":
            key = _BUDGETS.get(self._policy, key)
        if key == "parallel.launcher" and value not in ("ray", "external_launcher"):
            _log.info("%s: nothing corresponds; several ranks start by Ray, or by torchrun", shown)
            return
        if key == "model.quantization" and value not in ("int8", "int4", "fp8"):
            _log.info("%s: nothing to say; a quantized checkpoint is read as it is", shown)
            return
        _log.info("%s: is %s here", shown, key if option == "api-key" else f"{key}={text}")
        self.overrides.append(f"{key}={text}")

    def _check_spelling(self, name: str, option: str) -> None:
        """Check that an unknown option is not one of vLLM's with another letter.

        Raises:
            ConfigError: it is.
        """
        near = difflib.get_close_matches(option, _VLLM, n=1, cutoff=0.85) if name not in self._own else ()
        if near and name.startswith("--"):
            raise ConfigError(f"{name}: unknown option; did you mean '--{near[0]}'?")

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
        elif option in _VLLM and key != "seed" and not isinstance(value, dict):
            found.take(option, key, json.dumps(value) if isinstance(value, list) else str(value), is_on=bool(value))
        else:
            assign(mapping, key, value, command.config)
    return found.overrides + [f"{key}={_plain(key, value)}" for key, value in leaves(mapping)]


def _plain(key: str, value: Any) -> str:
    """Write a value of YAML as an override has it: free text as it is, other text quoted."""
    return str(value) if isinstance(value, str) and key in FREE_TEXT else literal(value)
