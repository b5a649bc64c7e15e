"""Each stage prepares and computes on a fake CUDA device: no tensor lies on the wrong one, and the host never waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist

from gapless.conf.schema import Architecture
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.stage import Stage
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from gapless.parallel.split import split_layers
from tests.support.fake_cuda import CUDA, FakeCuda, HostWaitError

LLAMA = Architecture(
    vocab_size=61, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, max_position=64,
)  # fmt: skip
ARCHITECTURES = {
    "gpt2": dataclasses.replace(
        LLAMA, num_kv_heads=4, norm="layer", position="learned", activation="gelu_tanh", gated_ffn=False, qkv_bias=True,
        attention_out_bias=True, ffn_bias=True, tie_embeddings=True,
    ),
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, sliding_window=6),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True),
}  # fmt: skip

CHUNK, MIDDLE = Segment(0, 5, [3, 1]), Segment(5, 4, [0, 2, 5])
DECODES = [Segment(9, 1, [4, 6, 7]), Segment(3, 1, [8])]
BATCHES = {
    "first chunk": RaggedBatch.of([1] * 5, [CHUNK], [], []),
    "chunks": RaggedBatch.of([1] * 9, [MIDDLE, CHUNK], [], [8]),
    "one decode": RaggedBatch.of([1], [], DECODES[:1], [0]),
    "decodes": RaggedBatch.of([1] * 2, [], DECODES, [0, 1]),
    "mixed": RaggedBatch.of([1] * 6, [MIDDLE], DECODES, [4, 5]),
    "a draft": RaggedBatch.of([1] * 7, [CHUNK], DECODES, [2, 3, 4, 5, 6]),
}


class OneRank:
    """The size of a process group of which this process is the only rank here."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class FakeGroups(Groups):
    """The groups of one rank whose peers are absent: a sum is the own share, a gather the own share again."""

    def __init__(self, mesh: Mesh) -> None:
        group = cast(dist.ProcessGroup, OneRank(mesh.tp, mesh.tp_rank))
        super().__init__(mesh, CUDA, group, group, owned=False)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        return x

    def all_gather(self, x_RV: torch.Tensor) -> torch.Tensor:
        return torch.cat([x_RV] * self.mesh.tp, dim=1)


def make_stage(arch: Architecture, mesh: Mesh) -> Stage:
    layers = split_layers(arch, mesh.pp, None)[mesh.stage]
    return Stage(
        arch, FakeGroups(mesh), layers, dtype=torch.bfloat16, attention="sdpa", num_blocks=9, block_size=4,
    )  # fmt: skip


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stages_on_cuda_mix_no_devices_and_wait_for_nothing(name: str, pp: int, tp: int) -> None:
    arch = ARCHITECTURES[name]
    for rank in range(0, pp * tp, tp):
        with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60), FakeCuda() as cuda:  # Megatron asks for groups
            with cuda.may_wait():
                stage = make_stage(arch, Mesh(pp, tp, rank))
            for batch in BATCHES.values():
                hidden = None
                if not stage.mesh.is_first:
                    hidden = torch.empty(batch.num_tokens, arch.hidden_size, dtype=torch.bfloat16, device=CUDA)
                out = stage(stage.prepare(batch), hidden)
                assert out.device == CUDA
                if stage.mesh.is_last:
                    assert out.shape == (len(batch.sample_rows), arch.vocab_size)
                    assert out.dtype == torch.float32
                else:
                    assert out.shape == (batch.num_tokens, arch.hidden_size)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[[0, 1]],
        lambda x: bool((x > 0).all()),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: x.copy_(torch.ones(4), non_blocking=True),
        lambda x: torch.ones(4).to(CUDA, non_blocking=True),
        lambda x: torch.tensor([1.0], device=CUDA),
        lambda x: x + torch.ones(4),
        lambda x: x.index_select(0, torch.zeros(1, dtype=torch.int64)),
    ],
)
def test_the_fake_device_refuses_what_waits_or_mixes(wait: Callable[[torch.Tensor], object]) -> None:
    with FakeCuda(), pytest.raises((HostWaitError, RuntimeError)) as caught:
        wait(torch.ones(4, device=CUDA))
    assert "not linked" not in str(caught.value)  # torch's word for a missing driver
