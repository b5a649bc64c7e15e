"""`build`: strict from mapping to dataclass and back, every error one line with the dotted key."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.architecture import Architecture
from gapless.conf.build import (
    GROUPS,
    build,
    compose_engine,
    defaults,
    dotted_keys,
    fields,
    group_names,
    leaf_fields,
    leaves,
    load_command,
    load_group,
    locate,
    model_choice,
    to_mapping,
    unknown_key,
)
from gapless.conf.clusters import ClusterConfig
from gapless.conf.difference import DiffConfig
from gapless.conf.errors import ConfigError
from gapless.conf.policies import POLICY_CONFIGS, EqualTimeConfig, OrcaBestConfig, SarathiConfig, SchedulerConfig
from gapless.conf.profiling import ProfileConfig
from gapless.conf.sampling import SamplingParams
from gapless.conf.schema import (
    BenchConfig,
    CacheConfig,
    EngineConfig,
    GenerateConfig,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    ReportConfig,
    ServeConfig,
    SimulateConfig,
)
from gapless.conf.tuning import CapacityConfig, TuneConfig
from gapless.conf.workloads import WORKLOAD_CONFIGS, WorkloadConfig, ZipfConfig
from gapless.launch.commands import COMMANDS, Command

ARCHITECTURE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 64,
    "max_position": 128,
}


def error(cls: type, mapping: dict[str, Any], key: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        build(cls, mapping, key)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_nested_mapping_becomes_dataclasses() -> None:
    config = build(
        EngineConfig,
        {
            "model": {
                "name": "m",
                "architecture": ARCHITECTURE
                | {"rope_scaling": {"type": "linear", "factor": 2}, "eos_token_ids": [1, 2]},
            },
            "parallel": {"pp": 2, "launcher": "ray", "layers": [1, 1]},
            "scheduler": {"name": "sarathi", "chunk": 48},
        },
    )
    architecture = config.model.architecture
    assert architecture is not None
    assert architecture.rope_scaling is not None
    assert repr(architecture.rope_scaling.factor) == "2.0"
    assert architecture.eos_token_ids == (1, 2)
    assert config.parallel.layers == (1, 1)
    assert config.scheduler == SarathiConfig(chunk=48)
    assert config.cache == CacheConfig()


@pytest.mark.parametrize("name", POLICY_CONFIGS)
def test_policy_is_picked_by_its_name(name: str) -> None:
    assert type(build(SchedulerConfig, {"name": name}, "scheduler")) is POLICY_CONFIGS[name]


@pytest.mark.parametrize(
    ("cls", "key", "mapping", "line"),
    [
        (
            SchedulerConfig,
            "scheduler",
            {"name": "sarathi", "chunk": "abc"},
            "scheduler.chunk='abc': must be an integer or auto",
        ),
        (
            SchedulerConfig,
            "scheduler",
            {"name": "sarathi", "chunk": "5"},
            "scheduler.chunk='5': must be an integer or auto",
        ),
        (
            SchedulerConfig,
            "scheduler",
            {"name": "sarathi", "chunk": True},
            "scheduler.chunk=True: must be an integer or auto",
        ),
        (
            SchedulerConfig,
            "scheduler",
            {"name": "sarathi", "chunk": 1.0},
            "scheduler.chunk=1.0: must be an integer or auto",
        ),
        (
            SchedulerConfig,
            "scheduler",
            {"name": "sarathi", "chunk": None},
            "scheduler.chunk=None: must be an integer or auto",
        ),
        (
            SchedulerConfig,
            "scheduler",
            {"name": "sarathi", "tile": "x"},
            "scheduler.tile='x': must be null or an integer",
        ),
        (SchedulerConfig, "scheduler", {"name": "sarathi", "chunk": 0}, "scheduler.chunk=0: must be auto or 1 or more"),
        (
            SchedulerConfig,
            "scheduler",
            {"name": "sarathi", "chnk": 1},
            "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?",
        ),
        (
            SchedulerConfig,
            "scheduler",
            {"name": "orca_best", "chunk": 1},
            "scheduler.chunk: unknown key of policy orca_best; sarathi, equal_time have it",
        ),
        (SchedulerConfig, "scheduler", {"name": "sarati"}, "scheduler.name='sarati': unknown; did you mean 'sarathi'?"),
        (
            SchedulerConfig,
            "scheduler",
            {"name": "sarathi", "max_batched_tokens": 1},
            "scheduler.max_batched_tokens: unknown key of policy sarathi; token_budget has it",
        ),
        (
            SchedulerConfig,
            "scheduler",
            {},
            "scheduler.name: missing; valid: equal_time, orca_best, orca_worst, prefill_first, request_level, sarathi, "
            "token_budget, token_throttle",
        ),
        (WorkloadConfig, "workload", {"name": "zipff"}, "workload.name='zipff': unknown; did you mean 'zipf'?"),
        (
            WorkloadConfig,
            "workload",
            {"name": "fixed", "theta": 1},
            "workload.theta: unknown key of workload fixed; zipf has it",
        ),
        (
            WorkloadConfig,
            "workload",
            {"name": "fixed", "inputlen": 1},
            "workload.inputlen: unknown key; did you mean 'workload.input_len'?",
        ),
        (
            WorkloadConfig,
            "workload",
            {"name": "fixed", "input_len": None},
            "workload=fixed: give two of input_len, output_len and pd_ratio, and null for the third",
        ),
        (WorkloadConfig, "workload", {"name": "trace"}, "workload.path='': must be the trace file"),
        (
            WorkloadConfig,
            "workload",
            {"name": "zipf", "min_len": 9, "max_len": 8},
            "workload.max_len=8: must be min_len=9 or more",
        ),
        (
            BenchConfig,
            "",
            {"model": {"weights": "shipped"}, "policies": [{"name": "sarathi"}, {"name": "orca"}]},
            "policies[1].name='orca': unknown; did you mean 'orca_best'?",
        ),
        (
            BenchConfig,
            "",
            {"model": {"weights": "shipped"}, "policies": ["sarathi"]},
            "policies[0]='sarathi': must be a mapping of keys",
        ),
        (
            BenchConfig,
            "",
            {"model": {"weights": "shipped"}, "slo": {"ttft": 1}},
            "slo.ttft: unknown key; did you mean 'slo.ttft_ms'?",
        ),
        (ReportConfig, "", {"runs": [1]}, "runs=[1]: must be a list of strings"),
        (
            HardwareConfig,
            "hardware",
            {"device": "cda"},
            "hardware.device='cda': must be cpu or cuda; did you mean 'cuda'?",
        ),
        (HardwareConfig, "hardware", {"memory_gib": "2"}, "hardware.memory_gib='2': must be a number"),
        (HardwareConfig, "hardware", {"memory_gib": float("nan")}, "hardware.memory_gib=nan: must be a finite number"),
        (HardwareConfig, "hardware", {"memory_gib": False}, "hardware.memory_gib=False: must be a number"),
        (ClusterConfig, "cluster", {"network_adapters": 0}, "cluster.network_adapters=0: must be null or 1 or more"),
        (
            ClusterConfig,
            "cluster",
            {"nodes_per_rck": 4},
            "cluster.nodes_per_rck: unknown key; did you mean 'cluster.nodes_per_rack'?",
        ),
        (
            ClusterConfig,
            "cluster",
            {"all_reduce_algorithms": ["rng"]},
            "cluster.all_reduce_algorithms='rng': must be ring, tree or two_level; did you mean 'ring'?",
        ),
        (
            ClusterConfig,
            "cluster",
            {"all_reduce_algorithms": {}},
            "cluster.all_reduce_algorithms={}: must be ring, tree or two_level",
        ),
        (
            ClusterConfig,
            "cluster",
            {"spine": {"gigabytes_per_s": 10.0}},
            "cluster.spine.least_us: missing; it has no default",
        ),
        (ClusterConfig, "cluster", {"oversubscription": 0.5}, "cluster.oversubscription=0.5: must be 1 or more"),
        (ModelConfig, "model", {"name": 7, "weights": "shipped"}, "model.name=7: must be a string"),
        (ModelConfig, "model", {"architecture": 3}, "model.architecture=3: must be null or a mapping of keys"),
        (
            ModelConfig,
            "model",
            {"architecture": {"vocab_size": 3}},
            "model.architecture.hidden_size: missing; it has no default",
        ),
        (
            ParallelConfig,
            "parallel",
            {"pp": 2, "launcher": "ray", "layers": [1, "2"]},
            "parallel.layers=[1, '2']: must be null, a list of integers, first, middle or last",
        ),
        (
            ParallelConfig,
            "parallel",
            {"pp": 2, "launcher": "ray", "layers": [1]},
            "parallel.layers=[1]: must be 2 counts of 1 or more, one per stage",
        ),
        (SamplingParams, "sampling", {"ignore_eos": "yes"}, "sampling.ignore_eos='yes': must be true or false"),
        (SamplingParams, "sampling", {"stop": [1]}, "sampling.stop=[1]: must be a list of strings"),
        (
            SamplingParams,
            "sampling",
            {"temprature": 1},
            "sampling.temprature: unknown key; did you mean 'sampling.temperature'?",
        ),
        (
            SamplingParams,
            "sampling",
            {"seed": 1 << 63},
            f"sampling.seed={1 << 63}: must be null or a 64-bit integer",
        ),
        (EngineConfig, "", {"model": {"weights": "shipped"}, "seed": -1}, "seed=-1: must be 0 to 4294967295"),
        (
            EngineConfig,
            "",
            {"model": {"weights": "shipped"}, "seed": 1 << 32},
            "seed=4294967296: must be 0 to 4294967295",
        ),
        (EngineConfig, "", {"model": {"weights": "shipped"}, "modle": {}}, "modle: unknown key; did you mean 'model'?"),
        (
            GenerateConfig,
            "",
            {"model": {"weights": "shipped"}, "chunk": 4},
            "chunk: unknown key; did you mean 'scheduler.chunk'?",
        ),
    ],
)
def test_each_error_is_one_line(cls: type, key: str, mapping: dict[str, Any], line: str) -> None:
    assert error(cls, mapping, key) == line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"max_tokens": None}, "sampling.max_tokens=None: must be an integer"),
        ({"max_tokens": 1.5}, "sampling.max_tokens=1.5: must be an integer"),
        ({"seed": "7"}, "sampling.seed='7': must be an integer"),
        ({"logprobs": True}, "sampling.logprobs=True: must be an integer"),
        ({"temperature": "hot"}, "sampling.temperature='hot': must be a number"),
        ({"top_p": None}, "sampling.top_p=None: must be a number"),
    ],
)
def test_sampling_params_made_by_hand_are_checked_alike(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == line


def test_numbers_of_numpy_and_bare_values_are_taken() -> None:
    assert build(SamplingParams, {"top_k": np.int64(3), "temperature": np.float64(0.5)}) == SamplingParams(
        top_k=3, temperature=0.5
    )
    assert build(SamplingParams, {"stop": "END", "stop_token_ids": 7}) == SamplingParams(
        stop=("END",), stop_token_ids=(7,)
    )


ENGINES = st.builds(
    EngineConfig,
    model=st.builds(
        ModelConfig,
        name=st.text(),
        weights=st.just("shipped"),
        architecture=st.none() | st.just(Architecture(**ARCHITECTURE)),
        max_model_len=st.none() | st.integers(2, 99),
    ),
    hardware=st.builds(HardwareConfig, memory_gib=st.floats(0.1, 99), tile=st.integers(1, 256)),
    parallel=st.builds(
        ParallelConfig,
        pp=st.just(2),
        launcher=st.just("ray"),
        layers=st.none() | st.just((1, 3)),
        depth=st.none() | st.integers(1, 9),
    ),
    scheduler=st.builds(SarathiConfig, chunk=st.integers(1, 4096))
    | st.sampled_from([policy() for policy in POLICY_CONFIGS.values()]),  # type: ignore[call-arg]
    seed=st.integers(0, 2**32 - 1),
)


@pytest.mark.parametrize("name", WORKLOAD_CONFIGS)
def test_workload_is_picked_by_its_name(name: str) -> None:
    path = {"path": "x"} if name in ("trace", "sharegpt") else {}
    assert type(build(WorkloadConfig, {"name": name} | path, "workload")) is WORKLOAD_CONFIGS[name]


def test_policies_are_built_each_by_its_name() -> None:
    config = build(
        BenchConfig,
        {
            "model": {"weights": "shipped"},
            "workload": {"name": "zipf", "theta": 1},
            "policies": [{"name": "sarathi", "chunk": 8}, {"name": "orca_best"}],
        },
    )
    assert config.policies == (SarathiConfig(chunk=8), OrcaBestConfig())
    assert config.workload == ZipfConfig(theta=1.0)
    assert build(BenchConfig, to_mapping(config)) == config


def test_each_key_of_a_family_is_listed_once() -> None:
    keys = [key for key, _ in dotted_keys(BenchConfig)]
    assert len(keys) == len(set(keys))
    assert {"scheduler.chunk", "scheduler.max_batched_tokens", "workload.theta", "slo.ttft_ms", "policies"} < set(keys)
    assert not [key for key, _ in dotted_keys(GenerateConfig) if key.startswith("workload")]


@given(ENGINES)
def test_to_mapping_and_back(config: EngineConfig) -> None:
    assert build(EngineConfig, to_mapping(config)) == config


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([(cls, key) for cls in (GenerateConfig, BenchConfig) for key, _ in dotted_keys(cls)]), JUNK)
def test_any_value_anywhere_builds_or_is_one_line(place: tuple[type[EngineConfig], str], value: Any) -> None:
    cls, key = place
    mapping = to_mapping(cls(model=ModelConfig(weights="shipped", architecture=Architecture(**ARCHITECTURE))))
    *parents, leaf = key.split(".")
    node = mapping
    for name in parents:
        node[name] = node.get(name) or {}
        node = node[name]
    node[leaf] = value
    line = ""
    try:
        build(cls, mapping)
    except ConfigError as failure:
        line = str(failure)
    assert line == "" or ((parents or [leaf])[0] in line and len(line.splitlines()) == 1)


@pytest.mark.parametrize("group", [group for group in GROUPS if group != "engine"])
def test_every_choice_of_a_group_builds(group: str) -> None:
    names = group_names(group)
    assert names
    for name in names:
        mapping = load_group(group, name)
        if group == "model" and name == "folder":
            mapping["weights"] = "shipped"
        if "path" in mapping:
            mapping["path"] = "x"
        cls = {
            "model": ModelConfig,
            "hardware": HardwareConfig,
            "cluster": ClusterConfig,
            "parallel": ParallelConfig,
            "scheduler": SchedulerConfig,
            "workload": WorkloadConfig,
        }[group]
        config = build(cls, mapping, group)
        if group != "parallel":
            assert config.name == name  # type: ignore[attr-defined]
        if group in ("scheduler", "workload"):
            assert set(mapping) == {f.name for f in dataclasses.fields(config)}  # type: ignore[arg-type]
        if group in ("model", "cluster"):
            defaulted = dict(leaves(defaults(cls)))
            assert not {key for key, value in leaves(mapping) if key != "name" and defaulted.get(key, ...) == value}


def test_parallel_choices_mean_their_names() -> None:
    grids = {name: build(ParallelConfig, load_group("parallel", name)) for name in group_names("parallel")}
    assert {name: (grid.tp, grid.pp) for name, grid in grids.items()} == {
        "local": (1, 1),
        "pp2": (1, 2),
        "tp2": (2, 1),
        "tp2_pp2": (2, 2),
        "tp4": (4, 1),
        "tp4_pp2": (4, 2),
        "tp8": (8, 1),
        "tp8_pp2": (8, 2),
        "tp8_pp8": (8, 8),
    }
    assert {name for name, grid in grids.items() if grid.started_by != "ray"} == {"local"}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_command_s_yaml_says_what_the_schema_does_not(command: Command) -> None:
    own, choices = load_command(command.name)
    names = set(fields(command.config))
    assert set(choices) <= set(GROUPS) & names
    known = dict(leaves(defaults(command.config)))
    assert not {key: value for key, value in leaves(own) if known[key] == value}


@pytest.mark.parametrize("cls", [GenerateConfig, BenchConfig, SimulateConfig, CapacityConfig, ReportConfig, DiffConfig])
def test_defaults_are_those_of_the_schema(cls: type) -> None:
    given = defaults(cls)
    least: dict[str, Any] = {"model": {"weights": "shipped"}} if issubclass(cls, EngineConfig) else {}
    least |= {"slo": {"ttft_p99_ms": 1.0}} if issubclass(cls, CapacityConfig) else {}
    assert build(cls, given | least) == build(cls, least)


@pytest.mark.parametrize(("group", "members"), [("scheduler", POLICY_CONFIGS), ("workload", WORKLOAD_CONFIGS)])
def test_each_member_of_a_family_is_a_choice_with_the_schema_s_defaults(group: str, members: dict[str, type]) -> None:
    assert group_names(group) == sorted(members)
    for name, cls in members.items():
        mapping = load_group(group, name)
        path = {"path": "x"} if "path" in mapping else {}
        assert build(cls, mapping | path, group) == cls(**path)


def test_unknown_choice_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^scheduler=sarati: unknown; did you mean 'sarathi'\?$"):
        load_group("scheduler", "sarati")


def test_model_choice_tells_names_from_folders(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert model_choice("shipped") == ("shipped", {})
    assert model_choice("nothing-such") == ("nothing-such", {})
    expected = ("folder", {"weights": str(tmp_path / "mine"), "name": "mine"})
    assert model_choice("mine") == model_choice("./mine") == model_choice(tmp_path / "mine") == expected
    (tmp_path / "shipped").mkdir()
    assert model_choice("shipped") == ("shipped", {})
    assert model_choice("./shipped")[0] == "folder"


def test_locate_makes_folders_absolute(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").touch()
    config = EngineConfig(model=ModelConfig(weights="mine", tokenizer="file"))
    assert locate(config).model == ModelConfig(weights=str(tmp_path / "mine"), tokenizer=str(tmp_path / "file"))
    ids_only = ModelConfig(tokenizer="none", weights="shipped")
    assert locate(EngineConfig(model=ids_only)).model == ids_only
    for model, line in [
        (ModelConfig(weights="shiped"), "model.weights=shiped: no such folder; did you mean 'shipped'?"),
        (ModelConfig(weights="file"), "model.weights=file: is a file; give its folder"),
        (ModelConfig(weights="mine", tokenizer="no"), "model.tokenizer=no: no such folder or tokenizer.json"),
    ]:
        with pytest.raises(ConfigError) as caught:
            locate(EngineConfig(model=model))
        assert str(caught.value) == line


def test_compose_engine_takes_dotted_overrides() -> None:
    config = compose_engine(
        model="shipped",
        pp=2,
        overrides={"scheduler.chunk": 48, "cache.num_blocks": 64, "hardware.memory_gib": 2, "parallel.layers": (1, 1)},
    )
    assert config.parallel.started_by == "ray"
    assert (config.scheduler, config.cache.num_blocks, config.hardware.memory_gib, config.parallel.layers) == (
        EqualTimeConfig(chunk=48),
        64,
        2.0,
        (1, 1),
    )
    assert compose_engine(model="shipped").parallel == ParallelConfig()


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("scheduler.chnk", 1, "scheduler.chnk: unknown key; did you mean 'scheduler.chunk'?"),
        ("chunk", 1, "chunk: unknown key; did you mean 'scheduler.chunk'?"),
        ("modle.weights", "x", "modle.weights: unknown key; did you mean 'model.weights'?"),
        ("scheduler.chunk.x", 1, "scheduler.chunk.x: unknown key; scheduler.chunk has a value, not keys"),
        ("scheduler.chunk", "48", "scheduler.chunk='48': must be an integer or auto"),
        (
            "sampling.top_k",
            1,
            "sampling.top_k: unknown key; valid: cache, cluster, hardware, model, parallel, scheduler, seed",
        ),
    ],
)
def test_compose_engine_errors(key: str, value: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_engine(model="shipped", overrides={key: value})
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("cls", "key", "mapping", "line"),
    [
        (HardwareConfig, "hardware", {"memory_gib": float("inf")}, "hardware.memory_gib=inf: must be a finite number"),
        (HardwareConfig, "hardware", {"memory_gib": 10**400}, "hardware.memory_gib: must be a number below 2e+308"),
        (
            HardwareConfig,
            "hardware",
            {"tile": 10**20},
            f"hardware.tile={10**20}: must be an integer of at most 2147483647",
        ),
        (
            SamplingParams,
            "sampling",
            {"max_tokens": 10**20},
            f"sampling.max_tokens={10**20}: must be an integer of at most 2147483647",
        ),
        (
            SamplingParams,
            "sampling",
            {"stop_token_ids": [10**20]},
            f"sampling.stop_token_ids={10**20}: must be an integer of at most 2147483647",
        ),
        (
            SamplingParams,
            "sampling",
            {"seed": 10**19},
            f"sampling.seed={10**19}: must be null or a 64-bit integer",
        ),
        (SamplingParams, "sampling", {"n": 100000}, "sampling.n=100000: must be 1 to 16384"),
        (SamplingParams, "sampling", {"stop": ["a\ud800"]}, "sampling.stop='a\\ud800': must be valid UTF-8 text"),
    ],
)
def test_numbers_are_finite_and_bounded_and_texts_are_unicode(
    cls: type, key: str, mapping: dict[str, Any], line: str
) -> None:
    assert error(cls, mapping, key) == line


def test_no_key_takes_a_number_that_nothing_can_hold() -> None:
    """Infinity is left to `request_rate` and `burstiness`, where it has a meaning."""
    commands = (GenerateConfig, BenchConfig, SimulateConfig, CapacityConfig, TuneConfig, ProfileConfig)
    leaves = {(key, owner): hint for cls in commands for key, hint, owner in leaf_fields(cls)}
    tried = 0
    for (key, owner), hint in leaves.items():
        group, _, name = key.rpartition(".")
        options = {getattr(option, "__args__", (option,))[0] for option in typing.get_args(hint) or (hint,)}
        wrong = [math.inf, -math.inf, math.nan, 10**400] if float in options else [10**20, -(10**20), 10**400]
        if not options & {int, float} or name == "seed":  # seeds have bounds and tests of their own
            continue
        for value in wrong:
            if value == math.inf and key in ("workload.request_rate", "workload.burstiness"):
                continue
            with pytest.raises(ConfigError) as caught:
                build(owner, {name: value}, group)
            assert str(caught.value).startswith(key), (key, value)
            assert "missing" not in str(caught.value), (key, value)
            tried += 1
    assert tried > 400


@pytest.mark.parametrize("key", ["workload.qps", "slo.foo", "serve.xyz", "parallel.zzz"])
def test_a_key_like_no_other_is_answered_with_its_siblings(key: str) -> None:
    """A long parent alone makes no two keys alike."""
    parent = key.partition(".")[0]
    hint = unknown_key(ServeConfig if parent == "serve" else SimulateConfig, key)
    assert hint.startswith(f"; valid: {parent}.")
    assert all(each.startswith(f"{parent}.") for each in hint.removeprefix("; valid: ").split(", "))


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("tensor_parallel_size", "parallel.tp"),
        ("pipeline-parallel-size", "parallel.pp"),
        ("max_num_seqs", "scheduler.batch"),
        ("gpu_memory_utilization", "hardware.memory_gib"),
        ("max-model-len", "model.max_model_len"),
        ("kv-cache-dtype", "cache.dtype"),
    ],
)
def test_a_name_of_vllm_is_answered_with_the_key(key: str, ours: str) -> None:
    """As a keyword of `LLM`, and as a key of the command line, whether with dashes or not."""
    assert unknown_key(ServeConfig, key) == f"; did you mean '{ours}'?"
    with pytest.raises(ConfigError, match=f"; did you mean '{ours}'"):
        compose_engine(model="shipped", overrides={key: 2})
