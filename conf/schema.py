"""Config schema: the keys of each command with their types, defaults and ranges.

`conf/build.py` builds these dataclasses from a plain mapping (from hydra, or from overrides of the Python API). Each
validates itself on construction and raises `ConfigError` with the dotted key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from .architecture import Architecture
from .clusters import ClusterConfig
from .costs import AttentionKernels, CostsConfig
from .errors import ConfigError, check
from .policies import EqualTimeConfig, SchedulerConfig
from .ranges import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, Within, check_ranges
from .sampling import SamplingParams
from .serving import ServingConfig
from .simulation import SimulationConfig
from .workloads import FixedConfig, SloConfig, WorkloadConfig

E = TypeVar("E", bound="EngineConfig")
_MAX_RANKS = 65_536
_WHOLE_BATCHES = ("request_level", "orca_worst")  # policies without continuous batching


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
NAMED_WEIGHTS = ("random", "shipped", "smollm2")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(weights: str) -> bool:
    """Return whether `weights` is a Hugging Face Hub name, `ORGANISATION/MODEL`, and not an existing path."""
    is_file = weights.endswith(".gguf")
    return _HUB_NAME.fullmatch(weights) is not None and not is_file and not Path(weights).exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model: its architecture, weights and tokenizer.

    If `weights` is a folder or a GGUF file, the architecture is read from it. With `tokenizer=none`, prompts must be
    token ids.
    """

    name: str = "custom"
    """a label for reports"""
    weights: str = "random"
    """random, shipped (the small model in the package), smollm2, a Hugging Face folder, a Hub name
    (ORGANISATION/MODEL), or a GGUF file"""
    revision: str | None = None
    """branch, tag or commit of a Hub model; null: the main branch"""
    tokenizer: str | None = None
    """a folder or tokenizer.json; null: the one next to the weights, else UTF-8 bytes"""
    generation_config: str | None = "auto"
    """a folder or generation_config.json with default sampling values; auto: the one next to the weights; null: none"""
    dtype: Dtype = "auto"
    """auto: bfloat16 on CUDA, and on CPUs with AVX-512 BF16 or AMX if the checkpoint has 16 bits or fewer; else
    float32"""
    quantization: Literal["int8", "int4", "fp8"] | None = None
    """quantize weights on load; null: as in the checkpoint, which may be quantized itself; fp8: simulations only"""
    attention: Literal["auto", "flash", "sdpa", "xformers"] = "auto"
    """attention backend; auto: flash (torch's FlashAttention) on CUDA in half precision, C++ on CPU (model.kernels),
    else sdpa"""
    kernels: Literal["auto", "cpp", "triton", "torch"] = "auto"
    """backend of a layer's small operators; auto: Triton on CUDA, C++ on CPUs with a compiler (float16: torch)"""
    cuda_graphs: bool = True
    """on CUDA, launch a stage's kernels between two attention layers as one CUDA graph, for up to 512 tokens"""
    max_model_len: Annotated[int | None, Within(2)] = None
    """maximum length of prompt plus output; null: the model's maximum"""
    architecture: Architecture | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "model.")
        right = "random, shipped, smollm2, a folder, a Hub name or a GGUF file"
        check("model.weights", self.weights, bool(self.weights), right)
        if self.weights == "random" and self.architecture is None:
            raise ConfigError(
                f"model={self.name}: weights=random needs an architecture; choose a model by name or set model.weights"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """The device of a rank (paper 4.3.1: `memory_gib`; 4.4: `tile`)."""

    name: str = "cpu"
    """a label for reports"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device of every rank"""
    memory_gib: Annotated[float, Within(0, 1_000_000, open=True)] = 4.0
    """M_G, memory of a rank for weights and KV cache; on real CUDA devices for CUDA graphs and sampling too"""
    tile: Annotated[int, AT_LEAST_ONE] = 16
    """GEMM tile size in rows; 128 on an A100 or A6000"""
    attention: AttentionKernels = "flashinfer"
    """attention kernel library of a simulated device"""
    costs: CostsConfig | None = None  # constants of the analytic cost model; null: unknown

    @property
    def speed(self) -> float | None:
        """Relative speed of the device for layers; None without constants.

        It is a weighted geometric mean of memory bandwidth (3/4) and GEMM throughput (1/4). By it an H100 is 2.1 times
        as fast as an A100. In simulations with micro-batches of 256 tokens, splits of Llama 2 70B (tp 4 and 8) and
        GPT-3 (tp 8) by this speed are within 1% of the fastest split.
        """
        if self.costs is None:
            return None
        return float(self.costs.gemm.memory_gigabytes_per_s**0.75 * self.costs.gemm.sustained_tflops**0.25)

    def __post_init__(self) -> None:
        check_ranges(self, "hardware.")
        if self.costs is not None:
            known = self.costs.attention.known
            wanted = f"{', '.join(known)}: the cost model has no other kernels for this device"
            check("hardware.attention", self.attention, self.attention in known, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The rank grid, the pipeline depth, and how the ranks are started.

    If `depth` is null, `SchedulerConfig.depth` chooses it. `replicate_embedding` saves the first stage an all-reduce,
    which would make it slower than the others.
    """

    pp: Annotated[int, Within(1, _MAX_RANKS)] = 1
    """pipeline stages"""
    tp: Annotated[int, Within(1, _MAX_RANKS)] = 1
    """tensor-parallel ranks per stage"""
    expert_parallel: bool = False
    """expert parallelism over the tp ranks; false: every expert is tensor-parallel"""
    layers: tuple[int, ...] | Literal["first", "middle", "last"] | None = None
    """layers of each stage ([5,7]); null: balanced by the times of layers, LM head and sampler, and the speed of each
    stage's devices; first, middle, last: equal counts, with the remainder on the first stages, those before the last,
    or the last stages"""
    stage_speeds: tuple[float, ...] | None = None
    """relative speed of each stage's devices ([1,1.9]), for layers=null; null: from hardware"""
    depth: Annotated[int | None, Within(1, 10_000)] = None
    """pipeline depth, the micro-batches in flight; null: pp; equal_time: up to pp + 1 with several stages; a single
    process on CUDA looks one micro-batch ahead"""
    replicate_embedding: bool | None = None
    """replicate the embedding on each rank of stage 0; null: if it takes little memory"""
    launcher: str | None = None
    """launcher of the ranks: local (one rank, in this process), process (one process per rank, on this machine's CPUs),
    ray or torchrun; null: local for one rank, else ray"""
    threads: Annotated[int | None, Within(1, 4096)] = None
    """CPU threads per rank; null: the node's fast cores, within its CPU quota, divided by its ranks"""
    host: str = "127.0.0.1"
    """address that the sockets bind to"""
    ray_address: str | None = None
    """null: start Ray on this machine; auto or an address: join that cluster"""
    start_timeout_s: Annotated[float, POSITIVE] = 120.0
    """start timeout: seconds without progress of any rank, after which the run fails"""
    step_timeout_s: Annotated[float, POSITIVE] = 300.0
    """seconds without progress after which a stage is considered hung; learned stage times may shorten this"""
    max_recoveries: Annotated[int, Within(0, 1_000_000)] = 5
    """maximum recoveries within recovery_window_s; one more fault ends the run; 0: no recovery"""
    recovery_window_s: Annotated[float, POSITIVE] = 600.0
    """window of max_recoveries in seconds"""
    spares: Annotated[int, Within(0, _MAX_RANKS)] = 0
    """standby processes that replace dead ranks, with all imports done"""
    resplit_after_s: Annotated[float | None, NOT_NEGATIVE] = 30.0
    """seconds after which the layers of a stage that cannot be placed in the cluster go to the others; null: never"""

    def __post_init__(self) -> None:
        check_ranges(self, "parallel.")
        if isinstance(self.layers, tuple):
            counts = list(self.layers)
            are_counts = len(counts) == self.pp and min(counts) >= 1
            check("parallel.layers", counts, are_counts, f"{self.pp} counts of 1 or more, one per stage")
        if self.stage_speeds is not None:
            speeds = list(self.stage_speeds)
            are_speeds = len(speeds) == self.pp and min(speeds) > 0
            check("parallel.stage_speeds", speeds, are_speeds, f"{self.pp} numbers above 0, one per stage")
        if self.launcher == "local":
            grid = f"{self.world_size} ranks (pp={self.pp} x tp={self.tp})"
            right = f"process, ray or torchrun for {grid}; local runs one rank"
            check("parallel.launcher", "local", self.world_size == 1, right)

    def layer_counts(self, num_layers: int) -> tuple[int, ...] | None:
        """Return the number of layers per stage for `num_layers` in total; None: the balanced split."""
        if self.layers is None or isinstance(self.layers, tuple):
            return self.layers
        each, more = divmod(num_layers, self.pp)
        first = {"first": 0, "middle": self.pp - 1 - more, "last": self.pp - more}[self.layers]
        return tuple(each + (first <= stage < first + more) for stage in range(self.pp))

    @property
    def started_by(self) -> str:
        """The launcher; null resolved."""
        return self.launcher or ("local" if self.world_size == 1 else "ray")

    @property
    def world_size(self) -> int:
        """The number of ranks of one pipeline, pp x tp, without spares."""
        return self.pp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: Annotated[int | None, AT_LEAST_ONE] = None
    """tokens per KV block; null: 256 with FlashAttention, which reads such blocks in place, else 16"""
    num_blocks: Annotated[int | None, AT_LEAST_ONE] = None
    """KV blocks per rank; null: all that fit after the weights (the minimum over the ranks)"""
    dtype: Literal["auto", "int8", "fp8"] = "auto"
    """data type of keys and values; auto: model.dtype; int8, fp8: 8 bits with a scale per token and head"""
    prefix_caching: bool = True
    """share the KV blocks of common prompt prefixes between requests"""

    def __post_init__(self) -> None:
        check_ranges(self, "cache.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to start; base class of the configs of commands that run requests."""

    INSTEAD: ClassVar[Mapping[str, str]] = {}  # keys that a command sets itself, and their alternatives

    model: ModelConfig
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=EqualTimeConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    seed: Annotated[int, Within(0, (1 << 32) - 1)] = 0
    """seed of random weights, of sampling if sampling.seed is null, and of simulated jitter and stragglers"""

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def block_size(self) -> int:
        """Tokens per KV block: `cache.block_size`, or the preferred size of the device's attention backend."""
        is_half = self.hardware.device == "cuda" and self.model.dtype != "float32"
        is_flash = self.model.attention in ("auto", "flash") and self.cache.dtype == "auto"
        wanted = 256 if is_half and is_flash else 16
        return self.cache.block_size or wanted


def recast(config: EngineConfig, cls: type[E], **changes: Any) -> E:
    """Return a config of another class with the fields that both have in common, and some changes."""
    own = {each.name: each.type for each in fields(config)}
    shared = {each.name: getattr(config, each.name) for each in fields(cls) if own.get(each.name) == each.type}
    return cls(**(shared | changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(EngineConfig):
    """`gapless generate`: prompts in, texts out."""

    prompt: str | None = None
    """a single prompt"""
    prompts: str | None = None
    """a text file (one prompt per line), a .jsonl file (objects with prompt, messages or prompt_token_ids, and any key
    of sampling), `shipped` (code) or `questions`; without prompt and prompts: standard
    input, one prompt per line"""
    chat: bool | None = None
    """apply the model's chat template to each text, as a user message; null: if the model has one"""
    outputs: str | None = None
    """output file, JSONL; null: outputs.jsonl in the run folder"""
    print_texts: bool = True
    """print the first few texts; `outputs` has all"""
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(EngineConfig):
    """`gapless chat`: a conversation in the terminal."""

    system: str | None = None
    """system message; null: the chat template's default"""
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check("sampling.n", self.sampling.n, self.sampling.n == 1, "1, as a chat has one answer at a time")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """`gapless serve`: an HTTP server."""

    serve: ServingConfig = field(default_factory=ServingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonConfig(EngineConfig):
    """One workload run with each of `policies`, which `scheduler=a,b,c` sets."""

    workload: WorkloadConfig = field(default_factory=FixedConfig)
    policies: tuple[SchedulerConfig, ...] = ()
    """configs of the compared policies, set by scheduler=NAME,NAME; empty: only scheduler"""
    repeats: Annotated[int, Within(1, 10_000)] = 1
    """runs per policy"""
    slo: SloConfig = field(default_factory=SloConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(ComparisonConfig):
    """`gapless bench`: a comparison on one started pipeline."""

    interleave: bool = True
    """interleave the repeats of the policies (a b a b); false: one policy after the other (a a b b)"""
    warmup: bool = True
    """run a few short warm-up requests first, which do not count"""
    url: str | None = None
    """benchmark this OpenAI-compatible server instead of an own pipeline, as http://127.0.0.1:8000; model gives the
    vocabulary; null: none"""
    url_model: str | None = None
    """model name on that server; null: its first"""

    def __post_init__(self) -> None:
        ComparisonConfig.__post_init__(self)
        is_url = self.url is None or re.fullmatch(r"https?://[^/\s]+\S*", self.url) is not None
        check("url", self.url, is_url, "null or http://HOST:PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig(ComparisonConfig):
    """`gapless simulate`: a comparison on simulated pipelines. Repeats have different seeds."""

    cache: CacheConfig = field(default_factory=lambda: CacheConfig(block_size=16))
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    engine: str | None = None
    """engine whose defaults are used; choose it by engine=NAME"""

    def __post_init__(self) -> None:
        ComparisonConfig.__post_init__(self)
        devices, stages = self.simulation.devices, self.parallel.pp
        right = f"null or {stages} names of hardware, one per stage"
        check("simulation.devices", devices and list(devices), devices is None or len(devices) == stages, right)
        if self.simulation.disaggregation.is_on:
            _check_disaggregation(self)


def _check_disaggregation(config: SimulateConfig) -> None:
    """Check that the config is compatible with a prefill pool.

    Raises:
        ConfigError: a policy does not batch continuously.
    """
    pool = "simulation.disaggregation.prefill_replicas"
    for policy in (*config.policies, config.scheduler):
        right = f"a policy with continuous batching if {pool} is set"
        check("scheduler", policy.name, policy.name not in _WHOLE_BATCHES, right)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """`gapless report FOLDER ...`: the report of one run, or the comparison of several."""

    runs: tuple[str, ...] = ()
    """run folders, or folders of several runs (a sweep or a benchmark); the positional arguments"""
    import_: Literal["kineto"] | None = None
    """import traces of another engine: torch profiler traces"""
    out: str | None = None
    """output folder; null: the run folder, a new folder next to several, or `imported` next to traces"""
    figures: bool = True
    """also write PNG figures"""
    sort: str = "output_throughput"
    """metric of summary.json that ranks several runs"""
    slo: SloConfig = field(default_factory=SloConfig)
