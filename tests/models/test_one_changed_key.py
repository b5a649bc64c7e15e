"""A real config.json of which one key is changed: transformers computes the same logits, or the key is refused by name.

Small models stand in for the real ones; their configs hold the keys that published ones hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.checkpoint import Checkpoint
from gapless.models.families.common import HARMLESS
from gapless.models.layout import tensor_shapes
from gapless.models.weights import load_stage
from gapless.parallel.mesh import Mesh
from tests.support.dense_configs import LLAMA3, YARN
from tests.support.family_configs import CONFIGS, DEEPSEEK
from tests.support.lone_rank import lone_stage
from tests.support.tiers import is_whole

ABSENT = object()
# The harmless keys, without those that some reader of a folder looks at.
UNREAD = HARMLESS - {"architectures", "model_type", "dtype", "torch_dtype", "is_decoder", "pad_token_id"}
CPU = torch.device("cpu")
TOKENS = torch.randint(64, (40,), generator=torch.Generator().manual_seed(3)).tolist()

# Keys that some published config holds, and that this one does not.
ADDED: dict[str, list[Any]] = {
    "rope_parameters": [{"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "factor": 4.0}],
    "rope_scaling": [
        *({"rope_type": kind, "factor": 4.0} for kind in ("linear", "dynamic", "yarn", "longrope", "llama3", "x")),
        YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        YARN | {"mscale": 0.7},
        YARN | {"truncate": False},
        YARN | {"finetuned": True},
        LLAMA3 | {"factor": 2.0, "rope_theta": 500.0},
        {"full_attention": {"rope_type": "default", "rope_theta": 10.0}},
        {"type": "linear", "factor": 2.0, "rope_type": "default"},
        {"type": "mrope", "mrope_section": [1, 1, 2]},
    ],
    "partial_rotary_factor": [0.5, 1.0],
    "layer_types": [
        ["full_attention"] * 2,
        ["sliding_attention"] * 2,
        ["full_attention", "sliding_attention"],
        ["full_attention"],
        ["linear_attention"] * 2,
    ],
    "original_max_position_embeddings": [64],
    "num_experts": [4],
    "quantization_config": [{"bits": 4}],
    "use_sliding_window": [True],
    "sliding_window": [9, 0],
    "max_window_layers": [0, 1],
    "scale_attn_by_inverse_layer_idx": [True],
    "scale_attn_weights": [False],
    "reorder_and_upcast_attn": [True],
    "n_inner": [64, None],
    "hidden_size": [32],
    "num_hidden_layers": [2],
    "logit_scale": [0.5],
    "final_logit_softcapping": [30.0],
    "attn_logit_softcapping": [50.0],
    "residual_multiplier": [0.2],
    "embedding_multiplier": [12.0],
    "attention_multiplier": [0.1],
    "query_pre_attn_scalar": [24],
    "qk_layernorm": [True],
    "no_rope_layers": [[1, 0]],
    "per_layer_config": [{"0": {"num_key_value_heads": 1}}],
    "is_encoder_decoder": [True],
    "add_cross_attention": [True],
    "pruned_heads": [{"0": [1]}],
    "attention_bias": [True],
    "mlp_bias": [True],
    "qkv_bias": [True],
    "rope_theta": [500, 0, None],
    "temperature": [0.6],
    "auto_map": [{"AutoModel": "x.Y"}],
}


def others(value: Any) -> Iterator[Any]:
    """Yield values to put in place of one: of the same type, of others, null, and none at all."""
    yield from (ABSENT, None)
    if isinstance(value, bool):
        yield from (not value, "true", 1)
    elif isinstance(value, int):
        yield from (value + 1, value * 2, value // 2, 0, -1, float(value), str(value), [value])
    elif isinstance(value, float):
        yield from (value * 3, int(value) or 1, 0.0, -value, str(value), [value])
    elif isinstance(value, str):
        yield from ("relu", "gelu", "mistral", "bfloat16", "nonsense", 3, [value])
    elif isinstance(value, list):
        yield from ([], value[0], [*value, "x"], ["MistralForCausalLM"], ["LlamaModel"])
    elif isinstance(value, dict):
        yield from ([], "x")
        for key, inner in value.items():
            for other in others(inner):
                yield value | {key: other} if other is not ABSENT else {k: v for k, v in value.items() if k != key}
    else:
        yield from (1, 2.5, "x", {"a": 1})


def changes(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return keys, each with a value to give it. Of a key that no reader looks at, two values are enough."""
    made = []
    for key, value in config.items():
        different = [other for other in others(value) if other != value]
        made += [(key, other) for other in (different[0:3:2] if key in UNREAD else different)]
    return made + [(key, value) for key, values in ADDED.items() for value in values]


def log_probs(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1)


def ours(folder: Path) -> tuple[torch.Tensor, set[int]]:
    """Return log-probabilities [T, V] and the end-of-sequence ids."""
    is_longrope = "longrope" in (folder / "config.json").read_text()  # whose factors go by the longest request
    arch = Checkpoint.open(ModelConfig(weights=str(folder), max_model_len=len(TOKENS) if is_longrope else None)).arch
    Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch).check(arch, tensor_shapes(arch))
    stage = lone_stage(arch, Mesh(1, 1), CPU, torch.float32, len(TOKENS) // 4, kernels="torch")
    load_stage(stage, Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch))
    chunk = Segment(0, len(TOKENS), list(range(len(TOKENS) // 4)))
    batch = RaggedBatch.of(TOKENS, [chunk], [], list(range(len(TOKENS))))
    return log_probs(stage(stage.prepare(batch))), set(arch.eos_token_ids)


def theirs(folder: Path) -> tuple[torch.Tensor, set[int]] | str:
    """Return the same by transformers, or its error."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.inference_mode():
            logits = model.eval()(torch.tensor([TOKENS]), use_cache=False).logits[0]
    except Exception as error:  # of many kinds: this one's word is that there is no reference
        return f"{type(error).__name__}: {error}"
    eos = model.generation_config.eos_token_id
    return log_probs(logits), set(eos if isinstance(eos, list) else [] if eos is None else [eos])


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.disable_progress_bar()
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(100)
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def make(folder: Path, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    write(folder, config)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.1)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    write(folder, config)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_key_that_transformers_writes_is_known_and_an_unknown_one_is_refused(family: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(family).to_dict() | CONFIGS[family] | {"layer_types": None}
    model = ModelConfig(weights=str(tmp_path))
    write(tmp_path, config)
    assert Checkpoint.open(model, tensors=False).arch.num_layers == 2
    for off in (None, False, [], {}):
        write(tmp_path, config | {"some_new_multiplier": off})
        _ = Checkpoint.open(model, tensors=False).arch
    write(tmp_path, config | {"some_new_multiplier": 2.0})
    with pytest.raises(ConfigError, match=r"config.json: some_new_multiplier=2.0 is unknown"):
        _ = Checkpoint.open(model, tensors=False).arch


@pytest.mark.parametrize("family", CONFIGS)
def test_a_changed_key_is_computed_as_transformers_does_or_refused_by_name(family: str, tmp_path: Path) -> None:
    config = CONFIGS[family]
    make(tmp_path, config)
    expected = theirs(tmp_path)
    assert not isinstance(expected, str), expected
    torch.testing.assert_close(ours(tmp_path)[0], expected[0], atol=1e-4, rtol=1e-4)
    wrong, every = [], changes(config)
    for key, value in every if is_whole() else every[::24]:
        changed = {k: v for k, v in (config | {key: value}).items() if v is not ABSENT}
        write(tmp_path, changed)
        said = f"{key}={'(left out)' if value is ABSENT else value}"
        try:
            found = ours(tmp_path)
        except ConfigError as error:
            inside = value if isinstance(value, dict) else {}
            names = (key, *inside, *(config.get(key) or {} if inside else ()), *(["rope_type"] if inside else []))
            if not any(name in str(error).removeprefix(str(tmp_path)) for name in names):
                wrong.append(f"{said}: refused without its name: {error}")
            continue
        reference = theirs(tmp_path)
        if isinstance(reference, str):
            # A number that is given as an integer, or fewer positions than were learned, changes nothing here.
            if key not in HARMLESS and "expected float, got int" not in reference and key != "n_positions":
                wrong.append(f"{said}: computed, though transformers refuses it: {reference[:150]!r}")
        elif found[1] != reference[1] or not torch.allclose(found[0], reference[0], atol=1e-3):
            wrong.append(f"{said}: other results than transformers; eos {found[1]}, {reference[1]}")
    assert not wrong, "\n".join(wrong)


def test_every_activation_is_computed_as_transformers_does_or_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, CONFIGS["llama"])
    refused = set()
    for name in transformers.activations.ACT2CLS:
        write(tmp_path, CONFIGS["llama"] | {"hidden_act": name})
        try:
            found, _ = ours(tmp_path)
        except ConfigError as error:
            refused.add(str(error).split("hidden_act=")[1])
        else:
            torch.testing.assert_close(found, theirs(tmp_path)[0], atol=1e-4, rtol=1e-4)
    assert {line.split(":")[0] for line in refused if "gelu" in line.split(":")[0]} == {"gelu_10", "quick_gelu"}


# Keys that say something only together, or whose defaults a model of two layers does not show.
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5, "mlp_only_layers": [0]}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    ("smollm3", {"no_rope_layers": [0, 0]}),
    ("smollm3", {"no_rope_layers": ABSENT, "layer_types": ABSENT, "no_rope_layer_interval": 3, "num_hidden_layers": 4}),
    ("deepseek_v3", {"first_k_dense_replace": ABSENT, "num_hidden_layers": 4}),
    ("deepseek_v3", {"rope_scaling": DEEPSEEK["rope_scaling"] | {"mscale": 0.3, "mscale_all_dim": 1.7}}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 1, "num_hidden_layers": 5}),
    ("ernie4_5_moe", {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "num_hidden_layers": 4}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": ABSENT}),
    ("falcon", {"multi_query": False, "bias": True}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("exaone4", {"sliding_window_pattern": 3, "layer_types": ABSENT, "num_hidden_layers": 4}),
    ("minimax_m2", {"rotary_dim": 4, "partial_rotary_factor": ABSENT}),
    ("cohere2", {"sliding_window_pattern": 3, "layer_types": ABSENT, "num_hidden_layers": 4}),
    ("gemma3_text", {"sliding_window_pattern": 3, "layer_types": ABSENT, "num_hidden_layers": 4}),
    ("granite", {"logits_scaling": 8.0, "residual_multiplier": 0.5}),
    ("glm4_moe", {"first_k_dense_replace": ABSENT, "num_hidden_layers": 3, "use_qk_norm": True}),
]


@pytest.mark.parametrize(("family", "changed"), TOGETHER, ids=[f"{i}-{each[0]}" for i, each in enumerate(TOGETHER)])
def test_keys_that_count_together_are_computed_as_transformers_does(
    family: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path, {k: v for k, v in (CONFIGS[family] | changed).items() if v is not ABSENT})
    expected = theirs(tmp_path)
    assert not isinstance(expected, str), expected
    torch.testing.assert_close(ours(tmp_path)[0], expected[0], atol=1e-4, rtol=1e-4)
