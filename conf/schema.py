"""The schema of a run: every key that a config may hold, its type, its default and its range.

`conf/build.py` turns a plain mapping (from hydra, or from the Python API's overrides) into these dataclasses; each
checks itself on construction and raises `ConfigError` with the dotted key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from .costs import CostsConfig
from .errors import ConfigError, check
from .policies import SarathiConfig, SchedulerConfig
from .sampling import SamplingParams
from .simulation import SimulationConfig
from .workloads import FixedConfig, SloConfig, WorkloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies stretch: `linear` divides them; `llama3` divides the slow ones and blends between."""

    type: Literal["linear", "llama3"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The shape of a decoder-only transformer; what `config.json` says, under one set of names."""

    vocab_size: int
    hidden_size: int  # H
    num_layers: int
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # D
    ffn_size: int  # H2 of the paper
    max_position: int  # L, the longest sequence that the model supports
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    position: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_ffn: bool = True
    qkv_bias: bool = False
    attention_out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head's query and key (Qwen3)
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it (Mistral)
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        key = "model.architecture"
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "ffn_size",
            "max_position",
        ):
            check(f"{key}.{name}", getattr(self, name), getattr(self, name) >= 1, "1 or more")
        check(
            f"{key}.num_kv_heads",
            self.num_kv_heads,
            self.num_heads % self.num_kv_heads == 0,
            f"a divisor of num_heads={self.num_heads}",
        )
        check(
            f"{key}.sliding_window",
            self.sliding_window,
            self.sliding_window is None or self.sliding_window >= 1,
            "null or 1 or more",
        )

    @property
    def layer_params(self) -> int:
        """Parameters of one decoder layer (norms left out: under 0.1%)."""
        H, D = self.hidden_size, self.head_dim
        attention = H * D * (self.num_heads + 2 * self.num_kv_heads) + self.num_heads * D * H
        return attention + (3 if self.gated_ffn else 2) * H * self.ffn_size

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding; the LM head holds as many again where it is not tied."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        head = 0 if self.tie_embeddings else self.embedding_params
        learned = self.max_position * self.hidden_size if self.position == "learned" else 0
        return self.num_layers * self.layer_params + self.embedding_params + head + learned


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model: an architecture, and where its weights and tokenizer come from.

    `weights` is `random`, `shipped` (the small model in the package) or a local Hugging Face folder. With a folder the
    architecture is read from its `config.json`. `max_model_len` caps the context below the model's own.
    """

    name: str = "custom"
    weights: str = "random"
    tokenizer: str | None = None  # a folder or tokenizer.json; null: beside the weights, or bytes; none: ids only
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on CPU, bfloat16 on CUDA
    attention: Literal["auto", "sdpa", "xformers"] = "auto"  # auto: xformers on CUDA where it runs, else sdpa
    max_model_len: int | None = None
    architecture: Architecture | None = None

    def __post_init__(self) -> None:
        check(
            "model.max_model_len",
            self.max_model_len,
            self.max_model_len is None or self.max_model_len >= 2,
            "null or 2 or more",
        )
        check("model.weights", self.weights, bool(self.weights), "random, shipped or a folder")
        if self.weights == "random" and self.architecture is None:
            raise ConfigError(
                f"model={self.name}: weights=random needs an architecture; choose a model by name or set model.weights"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """One rank's device. `memory_gib` is M_G of the paper: what a rank may use for weights and KV cache."""

    name: str = "cpu"
    device: Literal["cpu", "cuda"] = "cpu"
    memory_gib: float = 4.0
    tile: int = 16  # rows that a matmul is padded to (paper 4.4): 128 on an A100 or A6000
    devices_per_node: int = 8
    costs: CostsConfig | None = None  # constants of the analytic cost model; null: none are known

    def __post_init__(self) -> None:
        check("hardware.devices_per_node", self.devices_per_node, self.devices_per_node >= 1, "1 or more")
        check("hardware.memory_gib", self.memory_gib, self.memory_gib > 0, "above 0")
        check("hardware.tile", self.tile, self.tile >= 1, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The rank grid, how deep the pipeline is filled, and who starts the ranks.

    `depth` micro-batches are in flight at once (null: `pp`). `layers` gives each stage's layer count (null: balanced,
    embedding and head weighed in). With `replicate_embedding` each rank of the first stage holds the whole table: its
    all-reduce would make that stage slower than the others (null: where that takes little memory). Sockets bind to
    `host`.
    """

    pp: int = 1
    tp: int = 1
    layers: tuple[int, ...] | None = None
    depth: int | None = None
    replicate_embedding: bool | None = None
    launcher: str = "local"
    threads: int | None = None  # CPU threads a rank; null: cores of the node over its ranks
    host: str = "127.0.0.1"
    ray_address: str | None = None  # null: start Ray on this machine; "auto" or an address: join that cluster
    start_timeout_s: float = 120.0
    step_timeout_s: float = 300.0  # no progress for so long is a hung stage

    def __post_init__(self) -> None:
        check("parallel.pp", self.pp, self.pp >= 1, "1 or more")
        check("parallel.tp", self.tp, self.tp >= 1, "1 or more")
        check("parallel.depth", self.depth, self.depth is None or self.depth >= 1, "null or 1 or more")
        check("parallel.threads", self.threads, self.threads is None or self.threads >= 1, "null or 1 or more")
        check("parallel.start_timeout_s", self.start_timeout_s, self.start_timeout_s > 0, "above 0")
        check("parallel.step_timeout_s", self.step_timeout_s, self.step_timeout_s > 0, "above 0")
        if self.layers is not None:
            check(
                "parallel.layers",
                list(self.layers),
                len(self.layers) == self.pp and min(self.layers) >= 1,
                f"{self.pp} counts of 1 or more, one a stage",
            )
        if self.launcher == "local":
            check(
                "parallel.launcher",
                "local",
                self.world_size == 1,
                f"ray or torchrun for {self.world_size} ranks (pp={self.pp} x tp={self.tp}); local runs one rank",
            )

    @property
    def world_size(self) -> int:
        return self.pp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. `num_blocks` null fills the memory that the weights leave (the minimum over the ranks)."""

    block_size: int = 16
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        check("cache.block_size", self.block_size, self.block_size >= 1, "1 or more")
        check("cache.num_blocks", self.num_blocks, self.num_blocks is None or self.num_blocks >= 1, "null or 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine needs to start; every command that runs requests holds one."""

    INSTEAD: ClassVar[Mapping[str, str]] = {}  # keys that a command sets by itself, and what to give instead

    model: ModelConfig
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SarathiConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check("seed", self.seed, 0 <= self.seed < 1 << 32, "0 to 4294967295")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(EngineConfig):
    """`gapless generate`: prompts in, texts out. `prompts=shipped` are the package's own."""

    prompt: str | None = None
    prompts: str | None = None  # a text file (a prompt a line) or JSONL ({"prompt": ..., sampling keys}); null: stdin
    outputs: str | None = None  # null: outputs.jsonl in the run folder
    print_texts: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonConfig(EngineConfig):
    """One workload through each of `policies`: what `scheduler=a,b,c` becomes; empty: `scheduler` alone. `repeats` > 1
    runs each so often."""

    workload: WorkloadConfig = field(default_factory=FixedConfig)
    policies: tuple[SchedulerConfig, ...] = ()
    repeats: int = 1
    slo: SloConfig = field(default_factory=SloConfig)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check("repeats", self.repeats, self.repeats >= 1, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(ComparisonConfig):
    """`gapless bench`: on one started pipeline. With `interleave` repeats go by turns (a b a b), else one after the
    other (a a b b)."""

    interleave: bool = True
    warmup: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig(ComparisonConfig):
    """`gapless simulate`: the same over simulated pipelines. Repeats differ by their seed. `experiment` names a figure
    or table of the paper that runs instead of the workload."""

    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    experiment: str | None = None

    def __post_init__(self) -> None:
        ComparisonConfig.__post_init__(self)
        devices = self.simulation.devices
        check("simulation.devices", devices and list(devices), devices is None or len(devices) == self.parallel.pp,
              f"null or {self.parallel.pp} names of hardware, one a stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """`gapless report FOLDER ...`: `runs` are run folders or folders that hold some (a sweep's, a benchmark's)."""

    runs: tuple[str, ...] = ()
    out: str | None = None  # where the report goes; null: into the folder, or a new one beside several
    figures: bool = True  # PNGs for papers too
    sort: str = "output_throughput"  # the key of summary.json by which several runs are ranked
    slo: SloConfig = field(default_factory=SloConfig)
