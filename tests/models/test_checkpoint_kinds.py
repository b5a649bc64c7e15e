"""Folders as people have them: read as transformers reads them, or refused in one line that says what was found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gapless.conf.architecture import Architecture
from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.models.checkpoint import Checkpoint
from gapless.models.layout import tensor_shapes
from tests.models.test_read_architecture import LLAMA

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 7\n"
Tensors = dict[str, np.ndarray[Any, Any]]


def arch_of(folder: Path) -> Architecture:
    arch = Checkpoint.open(ModelConfig(weights=str(folder))).arch
    Checkpoint.open(ModelConfig(weights=str(folder))).tensors(arch).check(arch, tensor_shapes(arch))
    return arch


@pytest.fixture
def tensors(tmp_path: Path) -> Tensors:
    """Write a model, and return its tensors."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_file({}, tmp_path / "model.safetensors")
    arch = Checkpoint.open(ModelConfig(weights=str(tmp_path))).arch
    made = {name: np.ones(shape, np.float32) for name, shape in tensor_shapes(arch).items()}
    save_file(made, tmp_path / "model.safetensors")
    return made


def shards(folder: Path, tensors: Tensors, names: list[str]) -> None:
    """Write the tensors over several files, in turn, in place of model.safetensors."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    for i, name in enumerate(names):
        save_file(dict(list(tensors.items())[i :: len(names)]), folder / name)


def index(folder: Path, tensors: Tensors, names: list[str]) -> None:
    weight_map = {key: names[i % len(names)] for i, key in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


TWO = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("with_index", [False, True])
def test_shards_are_read_and_the_makers_own_layout_beside_them_is_not(
    with_index: bool, tensors: Tensors, tmp_path: Path
) -> None:
    shards(tmp_path, tensors, TWO)
    save_file({"layers.0.attention.wq.weight": np.ones(3)}, tmp_path / "consolidated.safetensors")
    if with_index:
        index(tmp_path, tensors, TWO)
    assert arch_of(tmp_path).num_layers == 2


def pointer(name: str) -> Callable[[Path, Tensors], None]:
    return lambda folder, tensors: (folder / name).write_text(POINTER) and None


def shard_pointer(folder: Path, tensors: Tensors) -> None:
    shards(folder, tensors, TWO)
    index(folder, tensors, TWO)
    (folder / TWO[1]).write_text(POINTER)


def cut(folder: Path, tensors: Tensors) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def with_tensor(name: str, dtype: Any = np.float32) -> Callable[[Path, Tensors], None]:
    def write(folder: Path, tensors: Tensors) -> None:
        save_file(tensors | {name: np.ones((3,), dtype)}, folder / "model.safetensors")

    return write


def in_bytes(folder: Path, tensors: Tensors) -> None:
    save_file(tensors | {f"{Q}.weight": np.ones((32, 32), np.int8)}, folder / "model.safetensors")


def with_file(name: str, text: str = "{}") -> Callable[[Path, Tensors], None]:
    return lambda folder, tensors: (folder / name).write_text(text) and None


def only(name: str, text: str = "{}") -> Callable[[Path, Tensors], None]:
    def write(folder: Path, tensors: Tensors) -> None:
        for each in ("config.json", "model.safetensors"):
            (folder / each).unlink()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return write


def two_saves(folder: Path, tensors: Tensors) -> None:
    shards(folder, tensors, TWO)
    save_file(tensors, folder / "model-00001-of-00003.safetensors")


def half(folder: Path, tensors: Tensors) -> None:
    shards(folder, tensors, TWO)
    (folder / TWO[1]).unlink()


def twice(folder: Path, tensors: Tensors) -> None:
    shards(folder, tensors, ["a.safetensors", "b.safetensors"])
    save_file(tensors, folder / "b.safetensors")


def broken(name: str) -> Callable[[Path, Tensors], None]:
    def write(folder: Path, tensors: Tensors) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("../../blobs/1f")

    return write


def instead(name: str) -> Callable[[Path, Tensors], None]:
    return lambda folder, tensors: (folder / "model.safetensors").rename(folder / name) and None


def split_gguf(folder: Path, tensors: Tensors) -> None:
    only("x-00001-of-00002.gguf", POINTER)(folder, tensors)
    (folder / "x-00002-of-00002.gguf").touch()


def stale_index(folder: Path, tensors: Tensors) -> None:
    shards(folder, tensors, TWO)
    index(folder, tensors, TWO[::-1])


REFUSED: dict[str, tuple[Callable[[Path, Tensors], None], str]] = {
    "config pointer": (pointer("config.json"), r"config.json: a Git LFS pointer"),
    "weights pointer": (pointer("model.safetensors"), r"model.safetensors: a Git LFS pointer.*git lfs pull"),
    "shard pointer": (shard_pointer, r"model-00002-of-00002.safetensors: a Git LFS pointer"),
    "generation pointer": (pointer("generation_config.json"), r"generation_config.json: a Git LFS pointer"),
    "template pointer": (pointer("chat_template.jinja"), r"chat_template.jinja: a Git LFS pointer"),
    "tokenizer pointer": (pointer("tokenizer.json"), r"tokenizer.json: a Git LFS pointer"),
    "gguf pointer": (only("x.gguf", POINTER), r"x.gguf: a Git LFS pointer"),
    "cut": (cut, r"model.safetensors: not a readable safetensors file; is it cut short"),
    "gptq": (with_tensor(f"{Q}.g_idx"), "is quantized, but config.json has no quantization_config"),
    "awq": (with_tensor(f"{Q}.qzeros"), "is quantized, but config.json has no quantization_config"),
    "fp8": (with_tensor(f"{Q}.weight_scale_inv"), "is quantized, but config.json has no quantization_config"),
    "bitsandbytes": (
        with_tensor(f"{Q}.weight.absmax"),
        "is quantized, but config.json has no quantization_config",
    ),
    "int8": (in_bytes, "is quantized, but config.json has no quantization_config"),
    "gptq file": (with_file("quantize_config.json"), "quantize_config.json: bits=None: must be"),
    "adapter beside": (with_file("adapter_config.json"), "adapter_config.json, of a LoRA adapter"),
    "adapter without config": (with_file("adapter_model.safetensors"), "adapter_model.safetensors, of a LoRA adapter"),
    "adapter": (only("adapter_config.json"), "adapter_config.json, of a LoRA adapter"),
    "wrapped layers": (with_tensor(f"{Q}.base_layer.weight"), "LoRA adapter"),
    "cache scales": (
        with_tensor("model.layers.0.self_attn.k_scale"),
        "is quantized, but config.json has no quantization_config",
    ),
    "broken config": (broken("config.json"), r"config.json: a link to ../../blobs/1f: no such file"),
    "broken weights": (broken("model.safetensors"), r"model.safetensors: a link to ../../blobs/1f: no such file"),
    "pickle": (instead("model.ckpt"), r"only pickle files \(model.ckpt\)"),
    "TensorFlow": (instead("tf_model.h5"), "but tf_model.h5; convert it to safetensors"),
    "split gguf": (split_gguf, r"x-00001-of-00002.gguf: a Git LFS pointer"),
    "adapter tensors": (with_tensor(f"base_model.model.{Q}.lora_A.weight"), "LoRA adapter"),
    "native": (only("params.json"), "own layout"),
    "one folder up": (only("checkpoint-20/config.json"), r"; one is .*/checkpoint-20"),
    "two saves": (two_saves, "shards of several saves"),
    "half a save": (half, "1 of 2 shards"),
    "twice": (twice, r"is also in .*a.safetensors, as"),
    "stale index": (stale_index, "is missing, though model.safetensors.index.json names it"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_read_is_refused_by_what_it_is(kind: str, tensors: Tensors, tmp_path: Path) -> None:
    write, said = REFUSED[kind]
    write(tmp_path, tensors)
    with pytest.raises(ConfigError, match=said) as caught:
        arch_of(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_before_json_says_nothing(tensors: Tensors, tmp_path: Path) -> None:
    for name, text in (("config.json", json.dumps(LLAMA)), ("generation_config.json", '{"eos_token_id": 5}')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert arch_of(tmp_path).eos_token_ids == (5,)


@pytest.mark.parametrize("cached", ["inv_freq", "cos_cached", "sin_cached"])
def test_a_merged_model_and_buffers_of_old_checkpoints_are_read(cached: str, tensors: Tensors, tmp_path: Path) -> None:
    tensors[f"{Q.removesuffix('q_proj')}rotary_emb.{cached}"] = np.ones((3,), np.float32)
    save_file({f"base_model.model.{name}": each for name, each in tensors.items()}, tmp_path / "model.safetensors")
    assert arch_of(tmp_path).num_layers == 2


@pytest.mark.parametrize("own", [False, True])
def test_a_head_of_its_own_goes_before_a_tied_flag(own: bool, tensors: Tensors, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
    if not own:
        del tensors["lm_head.weight"]
        save_file(tensors, tmp_path / "model.safetensors")
    assert arch_of(tmp_path).tie_embeddings is not own


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"vocab_size": 101}, "vocab_size"),
        ({"num_hidden_layers": 1}, "num_hidden_layers"),
        ({"num_hidden_layers": 40}, "num_hidden_layers"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"intermediate_size": 49}, "intermediate_size"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_tensors_that_contradict_the_config_name_its_key(
    change: dict[str, Any], key: str, tensors: Tensors, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    with pytest.raises(ConfigError, match=key):
        arch_of(tmp_path)
