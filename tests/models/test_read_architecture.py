"""config.json is read as transformers 4 and 5 write it; an unsupported feature is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from gapless.conf.architecture import Architecture, RopeScaling
from gapless.conf.errors import ConfigError
from gapless.conf.experts import ExpertsConfig
from gapless.conf.schema import ModelConfig
from gapless.models.checkpoint import Checkpoint
from gapless.models.find_weights import find_weights
from gapless.models.safetensors_folder import SafetensorsFolder

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({}, folder / "model.safetensors")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def resolve(folder: Path, config: dict[str, Any], **over: Any) -> Architecture:
    return Checkpoint.open(ModelConfig(weights=str(write(folder, config)), **over)).arch


def refusal(folder: Path, config: dict[str, Any], **over: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(folder, config, **over)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    arch = resolve(tmp_path, LLAMA)
    assert (arch.num_kv_heads, arch.head_dim, arch.norm_eps, arch.rope_theta) == (4, 8, 1e-6, 10000.0)
    assert (arch.tie_embeddings, arch.qkv_bias, arch.rope_scaling, arch.sliding_window) == (False, False, None, None)
    mistral = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert resolve(tmp_path, mistral).sliding_window == 4096
    assert resolve(tmp_path, mistral | {"sliding_window": None}).sliding_window is None
    qwen3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
    assert (resolve(tmp_path, qwen3).head_dim, resolve(tmp_path, qwen3).qk_norm) == (128, True)
    assert (
        resolve(
            tmp_path,
            LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_attention_heads": 16},
        ).num_kv_heads
        == 8
    )
    null = LLAMA | {"num_key_value_heads": None}
    assert resolve(tmp_path, null).num_kv_heads == 4, "null is as many as there are heads"
    assert resolve(tmp_path, GPT2 | {"layer_norm_epsilon": 1e-3}).norm_eps == 1e-3
    gpt2 = resolve(tmp_path, GPT2)
    assert gpt2.norm_eps == 1e-5
    assert (gpt2.ffn_size, gpt2.activation, gpt2.norm, gpt2.tie_embeddings) == (128, "gelu_tanh", "layer", True)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}},
    ],
)
def test_old_and_new_rope_forms(keys: dict[str, Any], tmp_path: Path) -> None:
    arch = resolve(tmp_path, LLAMA | keys)
    assert arch.rope_theta == 5e5
    assert arch.rope_scaling == RopeScaling(
        type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32
    )


@pytest.mark.parametrize(("generation", "ids"), [(None, (2,)), ({}, (2,)), ({"eos_token_id": [7, 5]}, (7, 5))])
def test_eos_ids_of_generation_config_go_first(
    generation: dict[str, Any] | None, ids: tuple[int, ...], tmp_path: Path
) -> None:
    write(tmp_path, LLAMA, generation)
    assert Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch.eos_token_ids == ids


def test_an_eos_id_outside_the_vocabulary_names_its_file(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, {"eos_token_id": 100})
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id=100: must lie in 0 .. 99"):
        _ = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch


def test_architectures_may_be_missing(tmp_path: Path) -> None:
    assert resolve(tmp_path, {k: v for k, v in LLAMA.items() if k != "architectures"}).num_layers == 2


MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            LLAMA | {"architectures": ["XGLMForCausalLM"]},
            "architectures=['XGLMForCausalLM'] is not supported; supported: Llama",
        ),
        (LLAMA | {"architectures": ["BloomForCausalLM"]}, "architectures=['BloomForCausalLM'] (ALiBi, and a norm of"),
        (LLAMA | {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_scaling.long_factor=None"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [2]}}, "ing.mrope_section"),
        (
            LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial",
        ),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"hidden_act": "swiglu"}, "hidden_act=swiglu"),
        (LLAMA | {"hidden_size": "32"}, "hidden_size='32'"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size=None"),
        (MISTRAL | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types with linear_attention"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn"),
        (GPT2 | {"n_head": 0}, "n_head=0"),
        (GPT2 | {"n_head": 5}, "n_head=5: must divide n_embd=32"),
        (LLAMA | {"architectures": [["LlamaForCausalLM"]]}, "architectures=[['LlamaForCausalLM']]"),
        (LLAMA | {"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads=0"),
        (LLAMA | {"head_dim": 7}, "head_dim=7: must be even"),
        (LLAMA | {"hidden_act": ["silu"]}, "hidden_act=['silu']"),
        (LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope_parameters.factor=0"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor='4'"),
        (LLAMA | {"rope_theta": 0}, "rope_theta=0"),
        (LLAMA | {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "ing.low_freq_factor=4"),
        (MISTRAL | {"sliding_window": "7"}, "sliding_window='7'"),
        (MISTRAL | {"sliding_window": 7.0}, "sliding_window=7.0"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window=0"),
        (MISTRAL | {"layer_types": 3}, "layer_types=3"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": [8]}, "sliding_window=[8]"),
        (QWEN2 | {"layer_types": [{}]}, "layer_types=[{}]"),
    ],
)
def test_what_we_do_not_compute_is_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, config)
    assert said in message
    assert message.count(str(tmp_path / "config.json")) == 1


def test_max_model_len_caps_but_never_raises(tmp_path: Path) -> None:
    assert resolve(tmp_path, LLAMA, max_model_len=32).max_position == 32
    assert "at most the model's 64" in refusal(tmp_path, LLAMA, max_model_len=65)
    random = ModelConfig(architecture=resolve(tmp_path, LLAMA), max_model_len=16)
    assert Checkpoint.open(random).arch.max_position == 16


def test_a_contradicting_architecture_names_the_field(tmp_path: Path) -> None:
    other = Architecture(
        vocab_size=100,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        ffn_size=48,
        max_position=64,
    )
    assert "model.architecture.num_layers=3" in refusal(tmp_path, LLAMA, architecture=other)


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            find_weights(ModelConfig(weights=str(path)))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no such folder" in said(tmp_path / "absent")
    assert "no config.json" in said(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no safetensors file" in said(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "convert to safetensors" in said(tmp_path)
    assert "a file" in said(tmp_path / "config.json")
    (tmp_path / "model.safetensors").touch()
    assert find_weights(ModelConfig(weights=str(tmp_path))) == tmp_path
    with pytest.raises(ConfigError, match=r"config\.json: model_type=None"):
        _ = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable as JSON"):
        _ = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="not readable as JSON"):
        _ = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"dtype": "int4"}, "dtype='int4': must be one of float32"),
        ({"torch_dtype": "foo"}, "torch_dtype='foo': must be one of float32"),
        ({"eos_token_id": 100}, "eos_token_id=100: must lie in 0 .. 99"),
        ({"eos_token_id": [2, -1]}, "eos_token_id=-1: must lie in 0 .. 99"),
        ({"rope_scaling": {"type": "foo", "factor": 2.0}}, "rope_type=foo"),
        ({"rope_scaling": "linear"}, "must be an object"),
        ({"hidden_act": "mish"}, "hidden_act=mish: not supported"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: must be a number"),
    ],
)
def test_values_that_cannot_be_right_are_refused(change: dict[str, Any], line: str, tmp_path: Path) -> None:
    assert line in refusal(tmp_path, LLAMA | change)


@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16", "float32", None])
def test_the_type_of_the_weights_may_be_written_as_torch_prints_it(value: str | None, tmp_path: Path) -> None:
    write(tmp_path, LLAMA | {"torch_dtype": value})
    assert Checkpoint.open(ModelConfig(weights=str(tmp_path)), tensors=False).arch.num_layers == 2


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text('{"vocab_size": 3, "vocab_size": 4}')
    with pytest.raises(ConfigError, match=r"config.json: duplicate key 'vocab_size'"):
        _ = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", 3])
def test_an_index_names_files_of_its_own_folder(file: object, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ConfigError, match="must be the name of a file in this folder"):
        SafetensorsFolder(tmp_path)


MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_experts_are_read(tmp_path: Path) -> None:
    mixtral = resolve(tmp_path, MIXTRAL)
    assert mixtral.experts == ExpertsConfig(num_experts=8, experts_per_token=2)
    assert (mixtral.ffn_size, mixtral.sliding_window) == (48, None)
    qwen3 = resolve(tmp_path, QWEN3_MOE)
    assert qwen3.experts == ExpertsConfig(num_experts=16, experts_per_token=4, ffn_size=12, normalized=False)
    assert (qwen3.ffn_size, qwen3.qk_norm, qwen3.head_dim) == (48, True, 16)
    qwen2 = resolve(
        tmp_path,
        QWEN3_MOE
        | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": 24,
        },
    )
    shared = ExpertsConfig(
        num_experts=16, experts_per_token=4, ffn_size=12, normalized=False, shared_ffn_size=24, shared_gate=True
    )
    assert qwen2.experts == shared
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)


def test_config_json_is_enough_where_no_tensors_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert Checkpoint.open(ModelConfig(weights=str(tmp_path)), tensors=False).arch == resolve(tmp_path, MIXTRAL)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (QWEN3_MOE | {"mlp_only_layers": "0"}, "mlp_only_layers='0': must be a list of layers"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be 1 or more"),
        (QWEN3_MOE | {"num_experts_per_tok": 17}, "experts_per_token=17: must be 1 to num_experts=16"),
        (MIXTRAL | {"num_local_experts": "8"}, "num_local_experts='8': must be an integer"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act=gelu in a model of experts is not supported"),
        (
            LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
            "rope_scaling=None: must be given",
        ),
        (LLAMA | {"architectures": ["Qwen3NextForCausalLM"]}, "linear attention, which needs a per-request state"),
    ],
)
def test_experts_that_are_not_modelled_are_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, config)
