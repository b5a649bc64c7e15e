"""Models in GGUF compute the tokens of `transformers`, from any slice and type of tensors that a rank reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st

from gapless.conf.architecture import Architecture
from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.models.checkpoint import Checkpoint
from gapless.models.gguf.config import config_values
from gapless.models.gguf.file import open_gguf
from gapless.models.gguf.weights import _TYPES
from gapless.models.layout import tensor_shapes
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.models.test_tokens import FAMILIES, check, job, prompts_of, reference
from tests.support import expert_models
from tests.support.expert_models import LATENT
from tests.support.gguf_files import ARCHITECTURES, write_gguf
from tests.support.stage_driver import run

WIDE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
}


def model_of(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn_like(buffer)
    return model


OF_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 64}
# What no file can say: windows of Mistral and Qwen, scores that are scaled otherwise, other layers without positions.
LEFT_OUT = ("mistral-window", "ministral", "mistral", "qwen2-window", "qwen2-windows", "gemma2", "gemma3", "smollm3")
LEFT_OUT += ("olmo", "olmo3", "starcoder2", "gpt_neox")  # biases, YaRN's own factors, a window, exact GELU
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
IN_GGUF: dict[str, transformers.PretrainedConfig] = {
    name: config for name, config in FAMILIES.items() if config.model_type in ARCHITECTURES and name not in LEFT_OUT
} | {
    "gemma2": transformers.Gemma2Config(
        **WIDE, head_dim=16, query_pre_attn_scalar=16, sliding_window=9, attn_logit_softcapping=2.0
    ),
    "smollm3": transformers.SmolLM3Config(**WIDE | {"num_hidden_layers": 5}, pad_token_id=None),
    "mixtral": transformers.MixtralConfig(**WIDE, num_local_experts=6, num_experts_per_tok=2),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **WIDE, **OF_EXPERTS, num_experts=8, shared_expert_intermediate_size=96, norm_topk_prob=False
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(**WIDE, **OF_EXPERTS, num_experts=8, head_dim=16, norm_topk_prob=True),
    "glm4-moe": transformers.Glm4MoeConfig(
        **WIDE, **OF_EXPERTS, head_dim=16, n_routed_experts=8, n_shared_experts=2, routed_scaling_factor=1.5
    ),
    "minimax-m2": transformers.MiniMaxM2Config(
        **WIDE, num_experts_per_tok=3, num_local_experts=8, head_dim=16, rotary_dim=8
    ),
    "falcon-one": transformers.FalconConfig(
        vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.25
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **WIDE | {"num_hidden_layers": 7}, head_dim=16, query_pre_attn_scalar=16, sliding_window=9
    ),
    "llama-yarn": transformers.LlamaConfig(**WIDE, rope_parameters=YARN),
    "gpt-neox": transformers.GPTNeoXConfig(
        **{key: value for key, value in WIDE.items() if key != "num_key_value_heads"}, hidden_act="gelu_fast"
    ),
    "olmo3": transformers.Olmo3Config(
        **WIDE | {"num_hidden_layers": 4},
        sliding_window=9,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "olmo": transformers.OlmoConfig(**WIDE, pad_token_id=None),
    "starcoder2": transformers.Starcoder2Config(**WIDE, sliding_window=None),
    "exaone4-whole": transformers.Exaone4Config(**WIDE, sliding_window=None, layer_types=["full_attention"] * 2),
    "olmoe": transformers.OlmoeConfig(**WIDE, num_experts_per_tok=3, num_experts=8),
    "deepseek-v2": transformers.DeepseekV2Config(
        **LATENT | {"q_lora_rank": None}, topk_method="group_limited_greedy", n_group=4, topk_group=2
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **LATENT, n_group=4, topk_group=2, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
    ),
    "gpt-oss": transformers.GptOssConfig(
        **WIDE, num_experts_per_tok=3, num_local_experts=8, head_dim=16, sliding_window=9, rope_parameters=YARN
    ),
    **{name: expert_models.FAMILIES[name] for name in ("ernie-moe", "granite-moe")},
    "dots1": transformers.Dots1Config(
        **WIDE, **OF_EXPERTS, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, sliding_window=None
    ),
}
OTHER_NAMES = {  # what else a model may be saved as
    "mistral3": transformers.MistralConfig(
        **WIDE, sliding_window=None, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}
    ),
    "internlm2": transformers.LlamaConfig(**WIDE),
    "minicpm": transformers.GraniteConfig(
        **WIDE, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.25, logits_scaling=2.0
    ),
}


@pytest.mark.parametrize("name", [*IN_GGUF, *OTHER_NAMES])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = model_of((IN_GGUF | OTHER_NAMES)[name])
    file = write_gguf(tmp_path / "model.gguf", model, arch=name if name in OTHER_NAMES else None)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
        run(groups, job(tmp_path / "out.npz", weights=str(file)))
    check(tmp_path / "out.npz", *reference(model, prompts_of(101)))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.PreTrainedModel, Path]:
    return model_of(transformers.LlamaConfig(**WIDE)), tmp_path_factory.mktemp("wide")


def opened(file: Path) -> tuple[Any, Architecture]:
    arch = Checkpoint.open(ModelConfig(weights=str(file))).arch
    return Checkpoint.open(ModelConfig(weights=str(file))).tensors(arch), arch


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_a_quantized_tensor_is_what_gguf_makes_of_it(
    kind: Kind, wide: tuple[transformers.PreTrainedModel, Path]
) -> None:
    model, folder = wide
    source, arch = opened(write_gguf(folder / f"{kind.name}.gguf", model, kind))
    source.check(arch, tensor_shapes(arch))
    name = "model.layers.1.mlp.up_proj.weight"
    expected = gguf.dequantize(gguf.quantize(model.state_dict()[name].numpy(), kind), kind)
    assert torch.equal(source.read(name, slice(0, 128), slice(0, 64)), torch.from_numpy(expected))


@given(data=st.data())
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_any_slice_is_that_of_the_whole_tensor(
    family: str, data: st.DataObject, wide: tuple[transformers.PreTrainedModel, Path]
) -> None:
    model, folder = wide
    file = folder / f"slices-{family}.gguf"
    if family == "gpt2":
        model = model_of(FAMILIES["gpt2"])
    if not file.exists():
        write_gguf(file, model)
    source, arch = opened(file)
    tensors = model.state_dict()
    name = data.draw(st.sampled_from(sorted(tensor_shapes(arch))))
    rows = data.draw(st.tuples(*[st.integers(0, tensors[name].shape[0])] * 2).map(sorted).filter(lambda r: r[0] < r[1]))
    columns = None
    expected = tensors[name][slice(*rows)]
    if tensors[name].dim() == 2:
        limits = st.tuples(*[st.integers(0, tensors[name].shape[1])] * 2)
        columns = slice(*data.draw(limits.map(sorted).filter(lambda r: r[0] < r[1])))
        expected = expected[:, columns]
    assert torch.equal(source.read(name, slice(*rows), columns), expected)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_a_slice_of_blocks_of_256_is_that_of_the_whole_tensor(kind: Kind, tmp_path: Path) -> None:
    """`gguf` cannot write these types: the blocks hold arbitrary bits, and scales that are finite."""
    config = transformers.LlamaConfig(**WIDE | {"hidden_size": 256, "intermediate_size": 512})
    model = model_of(config)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    name = "blk.0.ffn_down.weight"
    data = np.random.default_rng(0).integers(0, 256, (256, 512 // block * block_bytes), dtype=np.uint8)
    data.reshape(-1, block_bytes)[:, [-1, 1, 3]] &= 0x3B  # halves of float16 without the largest exponent
    file = tmp_path / "model.gguf"
    write_gguf(file, model, blocks={name: (data, kind)})
    source, _ = opened(file)
    whole = torch.from_numpy(gguf.dequantize(data, kind))
    assert whole.isfinite().all()
    for columns in (slice(0, 512), slice(256, 512), slice(100, 300)):
        found = source.read("model.layers.0.mlp.down_proj.weight", slice(3, 99), columns)
        assert torch.equal(found, whole[3:99, columns])


def test_all_types_that_are_named_can_be_read() -> None:
    for name in _TYPES:
        kind = Kind[name]
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        assert gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind).shape[-1] >= 1


def checked(file: Path) -> None:
    source, arch = opened(file)
    source.check(arch, tensor_shapes(arch))


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        checked(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    file = write_gguf(
        tmp_path / "model.gguf", model_of(IN_GGUF["glm4-moe"]), change=lambda writer: writer.add_nextn_predict_layers(1)
    )
    source, arch = opened(file)
    source.check(arch, tensor_shapes(arch))
    assert arch.num_layers == 1


def test_what_is_wrong_with_a_file_is_named(wide: tuple[transformers.PreTrainedModel, Path], tmp_path: Path) -> None:
    model, _ = wide
    file = tmp_path / "model.gguf"
    extra = {"blk.0.attn_q.scale": np.ones(4, np.float32)}
    write_gguf(file, model, more=extra)
    assert refusal(file) == f"{file}: tensor blk.0.attn_q.scale is not part of the architecture in its fields"

    write_gguf(file, model, more={"output_norm.weight": np.ones(63, np.float32)})
    assert refusal(file) == f"{file}: tensor output_norm.weight has shape [63], not [64]"

    write_gguf(file, model)
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert "lies beyond the end of the file" in refusal(file)

    write_gguf(file, model_of(IN_GGUF["qwen2"]), change=lambda writer: writer.add_expert_count(8))
    assert refusal(file).startswith(
        f"{file}: qwen2.expert_count: no experts in this architecture; supported: llama, qwen"
    )
    write_gguf(file, model, change=lambda writer: writer.add_expert_count(8))
    assert refusal(file) == f"{file}: the field llama.expert_used_count is missing"
    mixtral = model_of(IN_GGUF["mixtral"])
    write_gguf(file, mixtral, more={"blk.1.ffn_up_exps.weight": np.ones((5, 128, 64), np.float32)})
    assert refusal(file) == f"{file}: tensor blk.1.ffn_up_exps.weight has shape [5, 128, 64], not [6, 128, 64]"
    write_gguf(file, model, change=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))
    assert refusal(file) == f"{file}: rope.scaling.type='longrope' is not supported (supported: none, linear, yarn)"
    write_gguf(file, model, arch="mistral3", change=lambda writer: writer.add_attn_temperature_scale(0.5))
    assert refusal(file) == f"{file}: mistral3.attention.temperature_scale=0.5 is not supported"
    write_gguf(file, model_of(IN_GGUF["granite"]), change=lambda writer: writer.add_rope_scaling_finetuned(False))
    assert refusal(file) == f"{file}: granite.rope.scaling.finetuned=false (no positions) is not supported"
    write_gguf(
        file,
        model_of(IN_GGUF["glm4-moe"]),
        change=lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
    )
    assert refusal(file) == f"{file}: glm4moe.expert_gating_func=1 is not supported (supported: 2)"
    write_gguf(file, model, blocks={"blk.1.ffn_up.weight": (np.zeros((128, 36), np.uint8), Kind.NVFP4)})
    said = f"{file}: tensor blk.1.ffn_up.weight has type NVFP4; must be one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, "
    assert refusal(file) == f"{said}Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4"


def joined(arrays: dict[str, Any], whole: str, *parts: str, axis: int = 0) -> dict[str, Any]:
    """Put tensors together that other files have apart."""
    found = dict(arrays)
    for name in arrays:
        if f".{parts[0]}." in name:
            found[name.replace(parts[0], whole)] = np.concatenate(
                [found.pop(name.replace(parts[0], part)) for part in parts], axis=axis
            )
    return found


def one_kv_b(arrays: dict[str, Any]) -> dict[str, Any]:
    """Put the keys and values that are made of latents into one tensor, as the first files of DeepSeek have them."""
    keys = {name: arrays[name].swapaxes(1, 2) for name in arrays if "attn_k_b" in name}
    found = joined(arrays | keys, "attn_kv_b", "attn_k_b", "attn_v_b", axis=1)
    return {name: array.reshape(-1, array.shape[-1]) if "attn_kv_b" in name else array for name, array in found.items()}


JOINED: dict[str, Any] = {
    "phi": lambda arrays: joined(arrays, "attn_qkv", "attn_q", "attn_k", "attn_v"),
    "llama-biased": lambda arrays: joined(arrays, "attn_qkv", "attn_q", "attn_k", "attn_v"),
    "granite-moe": lambda arrays: joined(arrays, "ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", axis=1),
    "qwen3-moe": lambda arrays: joined(arrays, "ffn_gate_up_exps", "ffn_gate_exps", "ffn_up_exps", axis=1),
    "deepseek-v3": one_kv_b,
}


@pytest.mark.parametrize("name", JOINED)
def test_tensors_may_be_joined_or_apart(name: str, tmp_path: Path) -> None:
    model = model_of(IN_GGUF[name])
    apart, together = tmp_path / "apart.gguf", tmp_path / "together.gguf"
    write_gguf(apart, model)
    write_gguf(together, model, tensors=JOINED[name])
    assert open_gguf(apart).tensors.keys() != open_gguf(together).tensors.keys()
    (one, arch), (other, _) = opened(apart), opened(together)
    for source in (one, other):
        source.check(arch, tensor_shapes(arch))
    for tensor, shape in tensor_shapes(arch).items():
        rows, columns = slice(shape[0] // 3, shape[0]), slice(1, shape[1]) if len(shape) == 2 else None
        assert torch.equal(one.read(tensor, rows, columns), other.read(tensor, rows, columns)), tensor


def test_the_first_files_of_deepseek_say_the_width_of_a_key_in_another_field(tmp_path: Path) -> None:
    file = open_gguf(write_gguf(tmp_path / "model.gguf", model_of(IN_GGUF["deepseek-v3"])))
    expected = config_values(file)
    for key in ("deepseek2.attention.key_length", "deepseek2.attention.value_length"):
        file.fields[key] = file.fields.pop(f"{key}_mla")
    file.fields["deepseek2.attention.head_count_kv"] = file.fields["deepseek2.attention.head_count"]
    assert config_values(file) == expected


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.F16])
def test_numbers_of_16_bits_compute_as_those_of_a_folder(kind: Kind, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    dtype = {Kind.BF16: torch.bfloat16, Kind.F16: torch.float16}[kind]
    model = model_of(transformers.LlamaConfig(**WIDE)).to(dtype)
    model.save_pretrained(tmp_path)
    file = write_gguf(tmp_path / "model.gguf", model, kind)
    for weights in (tmp_path, file):
        with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60) as groups:
            run(groups, job(tmp_path / f"{weights.suffix}.npz", weights=str(weights), dtype="bfloat16"))
    one, other = np.load(tmp_path / ".npz"), np.load(tmp_path / ".gguf.npz")
    assert np.array_equal(one["logits"], other["logits"])
