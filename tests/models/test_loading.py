"""A rank loads only its slices and needs little more memory than they take; a bad tensor is named in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gapless.conf.architecture import Architecture
from gapless.conf.errors import ConfigError
from gapless.conf.schema import ModelConfig
from gapless.models import weights
from gapless.models.build_stage import build_stage
from gapless.models.layout import tensor_shapes
from gapless.models.stage import Stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.tiers import HANGS_S

LLAMA = Architecture(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, max_position=64
)
GPT2 = dataclasses.replace(
    LLAMA,
    num_kv_heads=4,
    family="gpt2",
    norm="layer",
    position="learned",
    activation="gelu_tanh",
    gated_ffn=False,
    qkv_bias=True,
    attention_out_bias=True,
    ffn_bias=True,
    tie_embeddings=True,
)


def make_folder(folder: Path, arch: Architecture) -> dict[str, torch.Tensor]:
    """Write a folder of `arch` with random tensors. Its config.json is empty, since only its existence is checked."""
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(arch).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return tensors


def build_one(folder: Path | str, arch: Architecture, seed: int = 0) -> Stage:
    model = ModelConfig(weights=str(folder), architecture=arch)
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 30) as groups:
        layers = (0, arch.num_layers)
        spec = StageSpec(model=model, arch=arch, layers=layers, num_blocks=1, block_size=4, seed=seed)
        return build_stage(spec, groups)


def refusal(folder: Path, arch: Architecture) -> str:
    with pytest.raises(ConfigError) as caught:
        build_one(folder, arch)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_qkv_rows_are_interleaved_by_group(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path, LLAMA)
    qkv = build_one(tmp_path, LLAMA).decoder[1].attention.qkv.weight
    q, k, v = (tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(qkv, torch.cat([q[:16], k[:8], v[:8], q[16:], k[8:], v[8:]]))


@pytest.mark.parametrize("arch", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_names_may_lack_their_prefix(arch: Architecture, tmp_path: Path) -> None:
    tensors = make_folder(tmp_path, arch)
    whole = build_one(tmp_path, arch).state_dict()
    bare = {name.removeprefix("model.").removeprefix("transformer."): t for name, t in tensors.items()}
    bare["h.0.attn.bias" if arch is GPT2 else "layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    if arch is LLAMA:
        bare["rotary_emb.inv_freq"] = torch.ones(4)
    save_file(bare, tmp_path / "model.safetensors")
    again = build_one(tmp_path, arch).state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole if not name.endswith("_extra_state"))


@pytest.mark.parametrize("arch", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_large_tensor_is_loaded_block_by_block(
    arch: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, arch)
    whole = build_one(tmp_path, arch).state_dict()
    for rows in (1, 3, 7):
        monkeypatch.setattr(weights, "_BLOCK_BYTES", 4 * arch.hidden_size * rows)
        in_blocks = build_one(tmp_path, arch).state_dict()
        assert all(torch.equal(whole[name], in_blocks[name]) for name in whole if not name.endswith("_extra_state"))


def test_a_shorter_context_takes_fewer_learned_positions(tmp_path: Path) -> None:
    tensors = make_folder(tmp_path, GPT2)
    stage = build_one(tmp_path, dataclasses.replace(GPT2, max_position=16))
    assert stage.position_embedding is not None
    assert torch.equal(stage.position_embedding, tensors["transformer.wpe.weight"][:16])
    for name, shape in (("narrow", (64, 31)), ("short", (15, 32))):
        folder = tmp_path / name
        folder.mkdir()
        make_folder(folder, GPT2)
        save_file(tensors | {"transformer.wpe.weight": torch.ones(shape)}, folder / "model.safetensors")
        said = refusal(folder, dataclasses.replace(GPT2, max_position=16))
        assert f"tensor transformer.wpe.weight has shape {list(shape)}, not [16, 32]" in said


def test_half_precision_is_converted(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in make_folder(tmp_path, LLAMA).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    stage = build_one(tmp_path, LLAMA)
    assert stage.dtype == torch.float32
    assert torch.equal(stage.decoder[0].ffn.fc2.weight, tensors["model.layers.0.mlp.down_proj.weight"].float())


def test_what_is_wrong_with_a_checkpoint_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    make_folder(tmp_path, LLAMA)
    good = load_file(file)

    save_file({k: v for k, v in good.items() if "layers.1.mlp.up" not in k}, file)
    assert "tensor model.layers.1.mlp.up_proj.weight, of shape [48, 32], is missing" in refusal(tmp_path, LLAMA)

    save_file(good | {"model.norm.weight": torch.ones(31)}, file)
    said = refusal(tmp_path, LLAMA)
    assert said == f"{file}: tensor model.norm.weight has shape [31], not [32] (hidden_size in config.json)"

    save_file(good | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, file)
    said = refusal(tmp_path, LLAMA)
    name = "model.layers.0.self_attn.q_proj.bias"
    assert said == f"{file}: tensor {name} is not part of the architecture (attention_bias in config.json)"

    save_file(good | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, file)
    assert "tensor model.norm.weight has type I8; must be one of" in refusal(tmp_path, LLAMA)

    file.write_bytes(b"not a tensor file")
    assert f"{file}: not a readable safetensors file" in refusal(tmp_path, LLAMA)

    file.unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(good, "model-00001-of-00002.safetensors")}))
    assert "model-00001-of-00002.safetensors: missing" in refusal(tmp_path, LLAMA)
    good.pop("model.norm.weight")
    save_file(good, tmp_path / "model-00001-of-00002.safetensors")
    assert "tensor model.norm.weight is missing, though" in refusal(tmp_path, LLAMA)
    index.write_text("{}")
    assert f"{index}: not an index" in refusal(tmp_path, LLAMA)


def test_random_weights_follow_the_seed() -> None:
    states = [build_one("random", LLAMA, seed).state_dict()["decoder.0.ffn.fc1.weight"] for seed in (0, 0, 1)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert states[0].std().item() == pytest.approx(0.02, rel=0.1)
    assert states[0][:48].ne(states[0][48:]).any()  # gate and up differ


LARGE = {
    "llama": dataclasses.replace(
        LLAMA, vocab_size=16384, hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=64, ffn_size=1536
    ),
    "gpt2": dataclasses.replace(
        GPT2, vocab_size=16384, hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=2048
    ),
}
MEASURE = """
import json, sys
from gapless.conf.architecture import Architecture
from gapless.conf.schema import ModelConfig
from gapless.models.build_stage import build_stage
from gapless.models.stage_spec import StageSpec
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from safetensors.torch import save_file
import torch

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key + ":"))

folder, warm, warm_arch, arch = sys.argv[1], sys.argv[2], *(Architecture(**json.loads(a)) for a in sys.argv[3:])
with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 30) as groups:
    def build(weights, arch):
        model = ModelConfig(weights=weights, architecture=arch)
        return build_stage(
            StageSpec(model=model, arch=arch, layers=(0, arch.num_layers), num_blocks=1, block_size=4), groups
        )
    build(warm, warm_arch)  # imports
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark begins anew
    before = status("VmRSS")
    stage = build(folder, arch)
    print(sum(p.numel() * p.element_size() for p in stage.parameters()), status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's high-water mark")
@pytest.mark.parametrize("family", LARGE)
def test_peak_memory_is_little_more_than_the_shard(family: str, tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    arch, warm = LARGE[family], {"llama": LLAMA, "gpt2": GPT2}[family]
    for folder, each in ((large, arch), (small, warm)):
        folder.mkdir()
        make_folder(folder, each)
    arguments = [json.dumps(dataclasses.asdict(each)) for each in (warm, arch)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(large), str(small), *arguments],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    shard, peak = (int(word) for word in done.stdout.split())
    assert shard > 100e6
    assert peak < 1.3 * shard
    print(f"{family}: shard {shard / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
