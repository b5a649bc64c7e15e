"""The schema of a run: every key that a config may hold, its type, its default and its range.

`conf/build.py` turns a plain mapping (from hydra, or from the Python API's overrides) into these dataclasses; each
checks itself on construction and raises `ConfigError` with the dotted key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from .architecture import Architecture
from .clusters import ClusterConfig
from .costs import AttentionKernels, CostsConfig
from .errors import ConfigError, check, check_each
from .policies import EqualTimeConfig, SchedulerConfig
from .sampling import SamplingParams
from .serving import ServingConfig
from .simulation import SimulationConfig
from .workloads import FixedConfig, SloConfig, WorkloadConfig

E = TypeVar("E", bound="EngineConfig")
_MAX_RANKS = 65_536
_MAX_DEPTH = 10_000
_WHOLE_BATCHES = ("request_level", "orca_worst")  # policies whose requests enter together


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
NAMED_WEIGHTS = ("random", "shipped", "smollm2")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(weights: str) -> bool:
    """Return whether `weights` is a name on the Hugging Face Hub, `ORGANISATION/MODEL`: there is no such path here."""
    is_file = weights.endswith(".gguf")
    return _HUB_NAME.fullmatch(weights) is not None and not is_file and not Path(weights).exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model: an architecture, and where its weights and tokenizer come from.

    Where `weights` is a folder or a GGUF file, the architecture is read from it. With `tokenizer=none`, prompts can
    only be token ids.
    """

    name: str = "custom"
    """a label for reports"""
    weights: str = "random"
    """random, shipped (the small model in the package), smollm2, a Hugging Face folder or its name on the hub
    (ORGANISATION/MODEL), or a GGUF file"""
    revision: str | None = None
    """of a name on the hub: a branch, tag or commit; null: the main branch"""
    tokenizer: str | None = None
    """a folder or tokenizer.json; null: the one beside the weights, else UTF-8 bytes"""
    generation_config: str | None = "auto"
    """a folder or generation_config.json with default sampling values; auto: the one beside the weights; null: none"""
    dtype: Dtype = "auto"
    """auto: bfloat16 on CUDA, and on a CPU with AVX-512 BF16 or AMX where the checkpoint has 16 bits or fewer; else
    float32"""
    quantization: Literal["int8", "int4", "fp8"] | None = None
    """rounds weights to this as they are loaded; null: they stay as the checkpoint has them, quantized ones too.
    fp8: in simulations"""
    attention: Literal["auto", "flash", "sdpa", "xformers"] = "auto"
    """auto: flash, torch's FlashAttention, on CUDA in half precision, and C++ on CPU (model.kernels), else sdpa"""
    kernels: Literal["auto", "cpp", "triton", "torch"] = "auto"
    """what computes a layer's small operators; auto: Triton on CUDA, C++ on a CPU with a compiler (float16: torch)"""
    cuda_graphs: bool = True
    """on CUDA, a stage's kernels between two layers' attention are launched as one graph, for up to 512 tokens"""
    max_model_len: int | None = None
    """longest prompt plus output; null: the model's own"""
    architecture: Architecture | None = None

    def __post_init__(self) -> None:
        check_each("model.", self, lambda length: length >= 2, "2 or more", "max_model_len")
        right = "random, shipped, smollm2, a folder, a name on the hub or a GGUF file"
        check("model.weights", self.weights, bool(self.weights), right)
        if self.weights == "random" and self.architecture is None:
            raise ConfigError(
                f"model={self.name}: weights=random needs an architecture; choose a model by name or set model.weights"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """One rank's device (paper 4.3.1: `memory_gib`; 4.4: `tile`)."""

    name: str = "cpu"
    """a label for reports"""
    device: Literal["cpu", "cuda"] = "cpu"
    """device of every rank"""
    memory_gib: float = 4.0
    """M_G, what a rank may use for weights and KV cache; a real run on CUDA for CUDA graphs and sampling too"""
    tile: int = 16
    """rows that a matmul is padded to; 128 on an A100 or A6000"""
    attention: AttentionKernels = "flashinfer"
    """library whose attention kernels a simulated device runs: flashinfer, flash_attention or xformers"""
    costs: CostsConfig | None = None  # constants of the analytic cost model; null: none are known

    @property
    def speed(self) -> float | None:
        """Relative speed at which the device computes layers; None where no constants of it are known.

        It is a weighted geometric mean of the rates of memory (3/4) and of matrix products (1/4). By it an H100 is 2.1
        times as fast as an A100. In simulations with micro-batches of 256 tokens, splits of Llama 2 70B (tp 4 and 8)
        and of GPT-3 (tp 8) by this speed are within 1% of the fastest split.
        """
        if self.costs is None:
            return None
        return float(self.costs.gemm.memory_gigabytes_per_s**0.75 * self.costs.gemm.sustained_tflops**0.25)

    def __post_init__(self) -> None:
        check("hardware.memory_gib", self.memory_gib, 0 < self.memory_gib <= 1e6, "above 0, at most 1e6")
        check("hardware.tile", self.tile, self.tile >= 1, "1 or more")
        if self.costs is not None:
            known = self.costs.attention.known
            wanted = f"{', '.join(known)}: no other times are known on this device"
            check("hardware.attention", self.attention, self.attention in known, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The rank grid, the depth to which the pipeline is filled, and what starts the ranks.

    Where `depth` is null, `SchedulerConfig.depth` chooses it. `replicate_embedding` saves the first stage an
    all-reduce, which would make it slower than the others.
    """

    pp: int = 1
    """pipeline stages"""
    tp: int = 1
    """tensor-parallel ranks per stage"""
    expert_parallel: bool = False
    """each of the tp ranks holds whole experts of a mixture of experts; false: a slice of every expert"""
    layers: tuple[int, ...] | Literal["first", "middle", "last"] | None = None
    """layers of each stage ([5,7]); null: even by the times of layers, LM head and sampler, and the speed of
    each stage's devices; first, middle, last: as many on each, what is left over on the first, those before the last,
    or the last ones"""
    stage_speeds: tuple[float, ...] | None = None
    """speed of each stage's devices relative to each other ([1,1.9]), for layers=null; null: as hardware says"""
    depth: int | None = None
    """micro-batches in flight at once; null: pp, equal_time one more over several stages, one process on CUDA a
    micro-batch ahead"""
    replicate_embedding: bool | None = None
    """each rank of stage 0 holds the whole embedding; null: where that takes little memory"""
    launcher: str | None = None
    """what starts the ranks: local (in this process, one rank), process (each in a process of its own, on this
    machine's CPUs), ray or torchrun; null: local for one rank, else ray"""
    threads: int | None = None
    """CPU threads per rank; null: the node's fast cores, within its quota, over its ranks"""
    host: str = "127.0.0.1"
    """address that the sockets bind to"""
    ray_address: str | None = None
    """null: start Ray on this machine; auto or an address: join that cluster"""
    start_timeout_s: float = 120.0
    """seconds without a sign of life of any rank at a start; then the run fails"""
    step_timeout_s: float = 300.0
    """seconds without progress after which a stage counts as hung; learned stage times may shorten this"""
    max_recoveries: int = 5
    """faults within recovery_window_s that are repaired; one more ends the run. 0: the first fault does"""
    recovery_window_s: float = 600.0
    """seconds in which faults are counted for max_recoveries"""
    spares: int = 0
    """processes that stand by to take a dead rank's place, with everything imported"""
    resplit_after_s: float | None = 30.0
    """seconds after which a stage that finds no place in the cluster gives its layers to the others; null: never"""

    def __post_init__(self) -> None:
        check_each("parallel.", self, lambda n: 1 <= n <= _MAX_RANKS, f"1 to {_MAX_RANKS}", "pp", "tp")
        check_each("parallel.", self, lambda n: 1 <= n <= _MAX_DEPTH, f"1 to {_MAX_DEPTH}", "depth")
        check_each("parallel.", self, lambda n: 1 <= n <= 4096, "1 to 4096", "threads")
        seconds = ("start_timeout_s", "step_timeout_s", "recovery_window_s")
        check_each("parallel.", self, lambda each: each > 0, "above 0", *seconds)
        check("parallel.max_recoveries", self.max_recoveries, 0 <= self.max_recoveries <= 10**6, "0 to 1000000")
        after = self.resplit_after_s
        check("parallel.resplit_after_s", after, after is None or after >= 0, "null or 0 or more")
        check("parallel.spares", self.spares, 0 <= self.spares <= _MAX_RANKS, f"0 to {_MAX_RANKS}")
        if isinstance(self.layers, tuple):
            counts = list(self.layers)
            are_counts = len(counts) == self.pp and min(counts) >= 1
            check("parallel.layers", counts, are_counts, f"{self.pp} counts of 1 or more, one a stage")
        if self.stage_speeds is not None:
            speeds = list(self.stage_speeds)
            are_speeds = len(speeds) == self.pp and min(speeds) > 0
            check("parallel.stage_speeds", speeds, are_speeds, f"{self.pp} numbers above 0, one a stage")
        if self.launcher == "local":
            grid = f"{self.world_size} ranks (pp={self.pp} x tp={self.tp})"
            right = f"process, ray or torchrun for {grid}; local runs one rank"
            check("parallel.launcher", "local", self.world_size == 1, right)

    def layer_counts(self, num_layers: int) -> tuple[int, ...] | None:
        """Return how many layers each stage has, of so many; None: the balanced split."""
        if self.layers is None or isinstance(self.layers, tuple):
            return self.layers
        each, more = divmod(num_layers, self.pp)
        first = {"first": 0, "middle": self.pp - 1 - more, "last": self.pp - more}[self.layers]
        return tuple(each + (first <= stage < first + more) for stage in range(self.pp))

    @property
    def started_by(self) -> str:
        """What starts the ranks: `launcher`, or what null stands for."""
        return self.launcher or ("local" if self.world_size == 1 else "ray")

    @property
    def world_size(self) -> int:
        """The number of ranks of one pipeline, pp x tp, without spares."""
        return self.pp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = None
    """tokens of a KV block; null: 256, which FlashAttention reads in place, where model.attention is it, else 16"""
    num_blocks: int | None = None
    """KV blocks of a rank; null: all that fit beside the weights (the minimum over the ranks)"""
    dtype: Literal["auto", "int8", "fp8"] = "auto"
    """numbers of keys and values; auto: those of model.dtype; int8, fp8: 8 bits, a scale for each token and head"""
    prefix_caching: bool = True
    """whether requests that begin with the same tokens share the KV blocks of these"""

    def __post_init__(self) -> None:
        check_each("cache.", self, lambda n: n >= 1, "1 or more", "block_size", "num_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that an engine needs to start. The config of every command that runs requests extends it."""

    INSTEAD: ClassVar[Mapping[str, str]] = {}  # keys that a command sets itself: what to give instead

    model: ModelConfig
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=EqualTimeConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    seed: int = 0
    """seed of random weights, of sampling where sampling.seed is null, and of a simulation's jitter and stragglers"""

    def __post_init__(self) -> None:
        check("seed", self.seed, 0 <= self.seed < 1 << 32, "0 to 4294967295")

    @property
    def block_size(self) -> int:
        """Tokens of a KV block: `cache.block_size`, or what the attention backend of this device wants."""
        is_half = self.hardware.device == "cuda" and self.model.dtype != "float32"
        is_flash = self.model.attention in ("auto", "flash") and self.cache.dtype == "auto"
        wanted = 256 if is_half and is_flash else 16
        return self.cache.block_size or wanted


def recast(config: EngineConfig, cls: type[E], **changes: Any) -> E:
    """Return a config of another class, of the keys that both have alike, with some changes."""
    own = {each.name: each.type for each in fields(config)}
    shared = {each.name: getattr(config, each.name) for each in fields(cls) if own.get(each.name) == each.type}
    return cls(**(shared | changes))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(EngineConfig):
    """`gapless generate`: prompts in, texts out."""

    prompt: str | None = None
    """one prompt, given here"""
    prompts: str | None = None
    """a text file (a prompt a line), a .jsonl file (objects with prompt, messages or prompt_token_ids, and any key of
    sampling; or requests of an OpenAI batch), `shipped` (code) or `questions`; without prompt and prompts: standard
    input, a prompt a line"""
    chat: bool | None = None
    """send each text as a user's message, through the model's chat template; null: where the model has one"""
    outputs: str | None = None
    """where the JSONL goes; null: outputs.jsonl in the run folder"""
    print_texts: bool = True
    """print the first few texts at the end; `outputs` holds all"""
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(EngineConfig):
    """`gapless chat`: a conversation in the terminal."""

    system: str | None = None
    """a system message that the conversation begins with; null: what the model's chat template has"""
    sampling: SamplingParams = field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check("sampling.n", self.sampling.n, self.sampling.n == 1, "1, for an answer at a time")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """`gapless serve`: an HTTP server."""

    serve: ServingConfig = field(default_factory=ServingConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonConfig(EngineConfig):
    """One workload through each of `policies`, which `scheduler=a,b,c` becomes."""

    workload: WorkloadConfig = field(default_factory=FixedConfig)
    policies: tuple[SchedulerConfig, ...] = ()
    """the config of each of several policies, as scheduler=NAME,NAME makes them; empty: only scheduler"""
    repeats: int = 1
    """runs of each policy"""
    slo: SloConfig = field(default_factory=SloConfig)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check("repeats", self.repeats, 1 <= self.repeats <= 10_000, "1 to 10000")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(ComparisonConfig):
    """`gapless bench`: a comparison on one started pipeline."""

    interleave: bool = True
    """repeats by turns (a b a b) rather than one after the other (a a b b)"""
    warmup: bool = True
    """a few short requests first, which do not count"""
    url: str | None = None
    """a server of OpenAI's form that is sent the workload, as http://127.0.0.1:8000, in place of a pipeline of one's
    own; model says the vocabulary; null: none"""
    url_model: str | None = None
    """the model's name there; null: its first"""

    def __post_init__(self) -> None:
        ComparisonConfig.__post_init__(self)
        is_url = self.url is None or re.fullmatch(r"https?://[^/\s]+\S*", self.url) is not None
        check("url", self.url, is_url, "null or http://HOST:PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig(ComparisonConfig):
    """The config of `gapless simulate`, a comparison over simulated pipelines.

    Repeats differ by their seed.
    """

    cache: CacheConfig = field(default_factory=lambda: CacheConfig(block_size=16))
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    engine: str | None = None
    """whose defaults were taken; choose them by engine=NAME"""

    def __post_init__(self) -> None:
        ComparisonConfig.__post_init__(self)
        devices, stages = self.simulation.devices, self.parallel.pp
        right = f"null or {stages} names of hardware, one a stage"
        check("simulation.devices", devices and list(devices), devices is None or len(devices) == stages, right)
        if self.simulation.disaggregation.is_on:
            _check_disaggregation(self)


def _check_disaggregation(config: SimulateConfig) -> None:
    """Check that nothing is asked for that cannot go with a prefill pool.

    Raises:
        ConfigError: a policy whose requests enter together.
    """
    pool = "simulation.disaggregation.prefill_replicas"
    for policy in (*config.policies, config.scheduler):
        right = f"a policy whose requests come and go one by one where there is {pool}"
        check("scheduler", policy.name, policy.name not in _WHOLE_BATCHES, right)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """`gapless report FOLDER ...`: the report of one run, or the comparison of several."""

    runs: tuple[str, ...] = ()
    """run folders, or folders that hold some (a sweep's, a benchmark's); the bare arguments"""
    import_: Literal["kineto", "vllm_log"] | None = None
    """read another engine's traces: of the torch profiler, or vLLM's iteration log"""
    out: str | None = None
    """folder for the report; null: the run folder, a new folder beside several, or `imported` beside traces"""
    figures: bool = True
    """write PNGs too"""
    sort: str = "output_throughput"
    """key of summary.json by which several runs are ranked"""
    slo: SloConfig = field(default_factory=SloConfig)
