"""Families that transformers lacks or wraps: computed as the model of it that has the same weights."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.models.checkpoint import Checkpoint
from gapless.models.families import NAME_BY_MODEL_TYPE, READERS, starcoder2
from tests.models.test_one_changed_key import TOKENS, log_probs, ours
from tests.support import expert_models, hf_models, models_page
from tests.support.dense_configs import SIZES
from tests.support.family_configs import CONFIGS


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return log_probs(model(torch.tensor([TOKENS])).logits[0])


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


INTERNLM2 = SIZES | {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "attn_implementation": "eager",
    "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
    "bias": False,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}
NAMES = {
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
}


def test_internlm2_is_a_llama_whose_queries_keys_and_values_are_one_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        for of, own in NAMES.items():
            name = name.replace(of, own)
        tensors[name] = tensor
    for i in range(SIZES["num_hidden_layers"]):
        parts = [tensors.pop(f"model.layers.{i}.self_attn.{of}_proj.weight").view(2, -1, 8, 32) for of in "qkv"]
        tensors[f"model.layers.{i}.attention.wqkv.weight"] = torch.cat(parts, 1).view(-1, 32)
    torch.testing.assert_close(ours(save(tmp_path, INTERNLM2, tensors))[0], logits(model), atol=1e-4, rtol=1e-4)


def test_minicpm_is_a_granite_by_other_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        **SIZES,
        embedding_multiplier=6.0,
        residual_multiplier=1.4 / 2**0.5,
        attention_multiplier=8**-0.5,
        logits_scaling=4.0,
    )
    model = transformers.GraniteForCausalLM(config).eval()
    own = SIZES | {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "dim_model_base": 8,
        "scale_depth": 1.4,
        "scale_emb": 6,
    }
    torch.testing.assert_close(ours(save(tmp_path, own, model.state_dict()))[0], logits(model), atol=1e-4, rtol=1e-4)


def reads_images(text: dict[str, Any]) -> transformers.Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=61,
        eoi_token_index=62,
        image_token_index=63,
        eos_token_id=[1, 2],
    )
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def test_the_text_of_a_gemma_that_reads_images_is_computed(tmp_path: Path) -> None:
    text = {key: value for key, value in CONFIGS["gemma3_text"].items() if key not in ("architectures", "torch_dtype")}
    model = reads_images(text)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found, eos = ours(tmp_path)
    torch.testing.assert_close(found, logits(model), atol=1e-4, rtol=1e-4)
    assert eos == {1, 2}
    for change, said in (
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"some_new_multiplier": 2.0}, "some_new_multiplier"),
        (
            {"text_config": config["text_config"] | {"model_type": "gemma9_text"}},
            "gemma9_text",
        ),
        ({"text_config": config["text_config"] | {"some_new_scale": 2.0}}, "some_new_scale"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=said):
            _ = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch


def test_a_published_gemma_that_reads_images_says_little_of_its_text(tmp_path: Path) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = Checkpoint.open(ModelConfig(weights=str(tmp_path)), tensors=False).arch
    assert (arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.vocab_size) == (8, 4, 256, 262208)
    assert [(kind.window, kind.rope_theta, count) for kind, count in arch.kinds.items()] == [
        (1024, 1e4, 29),
        (None, 1e6, 5),
    ]
    assert arch.kind(5).rope_scaling is not None
    assert arch.tie_embeddings


def test_every_family_is_compared_with_transformers() -> None:
    compared = {type(make()).model_type for make in hf_models.CONFIGS.values()}
    compared |= {config.model_type for config in expert_models.FAMILIES.values()}
    assert compared == set(CONFIGS)
    here = {"InternLM2ForCausalLM", "MiniCPMForCausalLM"}
    assert {NAME_BY_MODEL_TYPE[kind] for kind in compared} | here == set(READERS)


def test_the_family_that_the_page_of_models_shows_is_the_package_s() -> None:
    page = models_page.PAGE.read_text(encoding="utf-8")
    shown = textwrap.dedent(page.partition("   ```python\n")[2].partition("   ```\n")[0])
    file = Path(starcoder2.__file__).read_text(encoding="utf-8")
    assert file.partition("\n\n")[2] == shown


def test_the_page_of_models_has_the_table_of_now() -> None:
    page = models_page.PAGE.read_text(encoding="utf-8")
    assert page == models_page.with_table(page), "python -m tests.support.models_page writes it"
