"""Each stage prepares and computes on a fake CUDA device: no tensor lies on the wrong one, and the host never waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gapless.conf.sampling import SamplingParams
from gapless.models.graphed_stage import GraphedStage
from gapless.models.sampling import Sampler
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.fake_cuda import CUDA, FakeCuda, HostWaitError
from tests.support.lone_rank import ARCHITECTURES, BATCHES, MIXED, lone_stage


@pytest.mark.parametrize(
    ("pp", "tp"), [(1, 1), (3, 2), *(pytest.param(*grid, marks=pytest.mark.slow) for grid in ((1, 2), (3, 1)))]
)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *MIXED])
@pytest.mark.parametrize("is_piecewise", [False, True])
def test_stages_on_cuda_mix_no_devices_and_wait_for_nothing(name: str, pp: int, tp: int, is_piecewise: bool) -> None:
    arch = (ARCHITECTURES | MIXED)[name]
    for rank in range(0, pp * tp, tp):
        with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60), FakeCuda() as cuda:  # Megatron asks for groups
            with cuda.may_wait():
                stage = lone_stage(arch, Mesh(pp, tp, rank), CUDA, torch.bfloat16, 9)
            forward = GraphedStage(stage, list).forward if is_piecewise else stage.forward
            for batch in BATCHES.values():
                hidden = None
                if not stage.mesh.is_first:
                    hidden = torch.empty(batch.num_tokens, arch.hidden_size, dtype=torch.bfloat16, device=CUDA)
                out = forward(stage.prepare(batch), hidden)
                assert out.device == CUDA
                if stage.mesh.is_last:
                    assert out.shape == (len(stage.mesh.share_of(len(batch.sample_rows))), arch.vocab_size)
                    assert out.dtype == torch.float32
                else:
                    assert out.shape == (batch.num_tokens, arch.hidden_size)


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("is_piecewise", [False, True])
def test_a_cache_of_8_bits_on_cuda_waits_for_nothing(cache_dtype: str, is_piecewise: bool) -> None:
    arch = ARCHITECTURES["llama"]
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60), FakeCuda() as cuda:
        with cuda.may_wait():
            stage = lone_stage(arch, Mesh(1, 1, 0), CUDA, torch.bfloat16, 9, cache_dtype=cache_dtype)
        forward = GraphedStage(stage, list).forward if is_piecewise else stage.forward
        for batch in BATCHES.values():
            assert forward(stage.prepare(batch), None).dtype == torch.float32


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(logprobs=3),
        SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logprobs=0),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1, presence_penalty=0.3, min_tokens=9),
    ],
)
def test_sampling_waits_when_its_tokens_are_read(params: SamplingParams) -> None:
    sampler = Sampler(61)
    for request, own in enumerate((params, SamplingParams())):
        sampler.add(request, own, 7, 2, (3,))
        sampler.feed(request, 0, [5, 5, 8])
    with FakeCuda():
        pending = sampler.queue(torch.empty(2, 64, device=CUDA), [0, 1], [3, 3])
        with pytest.raises(HostWaitError, match="synchronize"):
            pending.read()


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
