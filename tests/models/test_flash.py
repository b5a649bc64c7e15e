"""FlashAttention: what its operator is given computes what SDPA does, on CUDA without a wait, by few calls a layer.

On a CPU an operator that follows its contract takes its place (`tests/support/flash_operator.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.conf.errors import ConfigError
from gapless.kernels.operators.base import TorchKernels
from gapless.kernels.operators.cpp import CppKernels
from gapless.models.attention import flash
from gapless.models.attention.backend import AttentionSizes
from gapless.models.attention.flash import FlashBackend
from gapless.models.attention.probe import probe, probed_sizes
from gapless.models.attention.sdpa import SdpaBackend
from gapless.models.attention.select import make_backend, why_not
from gapless.models.attention.xformers import XformersBackend
from gapless.models.batch import Decodes, RaggedBatch, Segment
from gapless.models.graphed_stage import GraphedStage
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.fake_cuda import CUDA, FakeCuda
from tests.support.flash_operator import flash_on_cpu
from tests.support.lone_rank import ARCHITECTURES, BATCHES, MIXED, lone_stage
from tests.support.tiers import first_quick

CPU = torch.device("cpu")
FLASH = "aten._flash_attention_forward.default"
TORCH = TorchKernels()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with flash_on_cpu():
        yield


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Take the place of what the probe finds on a GPU: the last of a list, at first that all is right."""
    found: list[str | None] = [None]
    monkeypatch.setattr(flash, "probe", lambda *_, **__: found[-1])
    return found


def batch_of(chunks: list[tuple[int, int]], decodes: list[int], block: int, *, scattered: bool) -> RaggedBatch:
    """Make a batch of chunks (start, length) and decodes (start). Requests lie in the cache in reverse order."""
    sizes = [start + length for start, length in chunks] + [start + 1 for start in decodes]
    counts = [-(-size // block) for size in sizes]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    if not scattered:
        blocks = list(range(sum(counts)))
    ends = sum(counts) - np.cumsum(counts)
    own = [blocks[end : end + count] for end, count in zip(ends, counts, strict=True)]
    tokens = sum(length for _, length in chunks) + len(decodes)
    return RaggedBatch.of(
        [0] * tokens,
        [Segment(start, length, own[i]) for i, (start, length) in enumerate(chunks)],
        [Segment(start, 1, own[len(chunks) + i]) for i, start in enumerate(decodes)],
        [],
    )


KINDS: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "mixed": ([(300, 40), (0, 33), (17, 1)], [700, 0, 256, 255]),
    "decodes": ([], [700, 511, 3, 90, 255]),
    "chunks": ([(0, 50), (290, 10)], []),
}


@pytest.mark.parametrize("window", [None, 24, 300, 9999])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("block", [4, 16, 256])
@pytest.mark.parametrize("G", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_sdpa_does(
    on_cpu: None, kind: str, G: int, block: int, scattered: bool, window: int | None
) -> None:
    batch, K, D = batch_of(*KINDS[kind], block, scattered=scattered), 2, 16
    num_blocks = 1 + max(int(np.max(s.blocks)) for s in (*batch.chunks, *batch.decodes))
    q = torch.randn(batch.num_tokens, K, G, D)
    keys, values = (torch.randn(num_blocks * block, K, D) for _ in range(2))
    exact = SdpaBackend(AttentionSizes(block_size=block, window=window))
    expected = exact.attend(q, keys, values, exact.plan(batch))
    tested = FlashBackend(AttentionSizes(block_size=block, window=window), paged=block == 256)
    plan = tested.plan(batch)
    torch.testing.assert_close(tested.attend(q, keys, values, plan), expected, atol=1e-5, rtol=1e-5)
    assert len(plan) == bool(batch.chunks) + bool(len(batch.decodes))
    assert all(("block_table" in call.options) == (block == 256) for call in plan)
    copies = [call for call in plan if call.gather is not None]
    assert not copies if block == 256 or not scattered else copies


def test_the_probe_finds_a_right_result_and_says_all_that_is_wrong(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tried(block: int, *, paged: bool) -> str | None:
        sizes = probed_sizes(AttentionSizes(block_size=1, head_dim=16, dtype=torch.bfloat16), block)
        return probe(FlashBackend(sizes, paged=paged))

    assert tried(16, paged=False) is None
    assert tried(256, paged=True) is None
    attention = flash._attention
    monkeypatch.setattr(flash, "_attention", lambda *given: attention(*given) + 0.1)
    assert tried(16, paged=False) == "its result is wrong here (mean error 0.2)"
    monkeypatch.setattr(flash, "_attention", lambda *given: attention(*given) * float("nan"))
    assert tried(16, paged=False) == "its result is wrong here (mean error nan)"

    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image\n  is available\nfor this device")

    monkeypatch.setattr(flash, "_attention", fail)
    assert tried(16, paged=False) == "RuntimeError: no kernel image is available for this device"


class Operators(TorchDispatchMode):
    """Lists the operators that launch a kernel, and their arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.constants: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self.names.append(str(func))
            given = [*args, *(kwargs or {}).values()]
            self.constants.append(tuple(each for each in given if not isinstance(each, torch.Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("G", [1, 8])
@pytest.mark.parametrize(("block", "scattered"), [(256, True), (16, False), (16, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_on_cuda_is_one_operator_a_kind(kind: str, block: int, scattered: bool, G: int, D: int) -> None:
    """A mixed batch has two calls, and one that joins them. Scattered keys are copied first, by two more a call."""
    batch, K = batch_of(*KINDS[kind], block, scattered=scattered), 2
    with FakeCuda(), torch.inference_mode():
        backend = FlashBackend(AttentionSizes(block_size=block, device=CUDA), paged=block == 256)
        plan = backend.plan(batch)
        q = torch.empty(batch.num_tokens, K, G, D, dtype=torch.bfloat16, device=CUDA)
        cache = torch.empty(256 * block, K, D, dtype=torch.bfloat16, device=CUDA)
        with Operators() as counted:
            out = backend.attend(q, cache, cache, plan)
    assert (out.shape, out.device, out.dtype) == ((batch.num_tokens, K * G * D), CUDA, torch.bfloat16)
    expected = []
    for call in plan:
        copies = call.gather is not None
        assert copies == (block == 16 and scattered)
        expected += ["aten.index_select.default"] * 2 * copies + [FLASH]
    assert counted.names == expected + ["aten.cat.default"] * (kind == "mixed")


def test_a_plan_is_one_copy_to_the_device() -> None:
    batch = batch_of(*KINDS["mixed"], 256, scattered=True)
    with FakeCuda():
        backend = FlashBackend(AttentionSizes(block_size=256, device=CUDA), paged=True)
        with Operators() as counted:
            backend.plan(batch)
    assert counted.names.count("aten._to_copy.default") == 1


def test_no_kernel_depends_on_how_many_decodes_there_are_or_how_long() -> None:
    """Over a trace of decodes that come, grow and end, only two numbers vary: tokens, of which none is compiled in."""
    generator = np.random.default_rng(0)
    constants, names = set(), set()
    with FakeCuda(), torch.inference_mode():
        backend = FlashBackend(AttentionSizes(block_size=256, device=CUDA), paged=True)
        cache = torch.empty(64 * 256, 2, 128, dtype=torch.bfloat16, device=CUDA)
        starts = generator.integers(1, 3000, 3)
        for _ in range(60):
            starts = np.concatenate([starts + 37, generator.integers(1, 3000, generator.integers(0, 9))])
            starts = starts[starts < 4000]
            batch = RaggedBatch(
                np.zeros(len(starts), dtype=np.int64),
                [],
                Decodes(starts, np.zeros((len(starts), 16), dtype=np.int32)),
                np.arange(len(starts)),
            )
            q = torch.empty(len(starts), 2, 8, 128, dtype=torch.bfloat16, device=CUDA)
            with Operators() as counted:
                backend.attend(q, cache, cache, backend.plan(batch))
            called = counted.names.index(FLASH)
            most_queries, most_keys, *rest = counted.constants[called]
            assert (most_queries, most_keys) == (1, starts.max() + 1)
            names.add(tuple(counted.names))
            constants.add(tuple(rest))
    assert len(names) == 1  # operators of torch alone, which are compiled already
    assert len(constants) == 1


def test_a_plan_over_buffers_pads_with_a_key_of_the_scratch_block() -> None:
    backend = FlashBackend(AttentionSizes(block_size=256), paged=True)
    plans = backend.fixed_plans(8, 1024, scratch_block=99)
    assert plans is not None
    given = [plans.of(rows, 1024)[0] for rows in (4, 8)]
    for starts in ([700, 511, 3, 90, 255], [600, 4, 91]):
        batch, rows = batch_of([], starts, 256, scattered=True), 8 if len(starts) > 4 else 4
        (plan,) = backend.plan(batch)
        assert plans.load([plan], rows) == 1024
        (loaded,) = plans.of(rows, 1024)
        assert loaded.options["seqused_k"].tolist() == [start + 1 for start in starts] + [1] * (rows - len(starts))
        tables = loaded.options["block_table"]
        assert torch.equal(tables[: len(starts), : plan.options["block_table"].shape[1]], plan.options["block_table"])
        assert tables[len(starts) :, 0].tolist() == [99] * (rows - len(starts))
        assert loaded.given[2:4] == (1, 1024)
    for before, rows in zip(given, (4, 8), strict=True):
        (after,) = plans.of(rows, 1024)
        for name in ("seqused_k", "block_table"):
            assert before.options[name].data_ptr() == after.options[name].data_ptr()


@pytest.mark.parametrize(
    ("chunks", "starts", "is_loaded"),
    [([], [299], True), ([(290, 1)], [], True), ([], [300], False), ([(5, 2)], [], False), ([(290, 1)], [4], False)],
)
def test_a_plan_over_buffers_takes_single_tokens_within_the_window(
    chunks: list[tuple[int, int]], starts: list[int], is_loaded: bool
) -> None:
    backend = FlashBackend(AttentionSizes(block_size=256, window=300), paged=True)
    plans = backend.fixed_plans(8, 1024, scratch_block=99)
    assert plans is not None
    assert plans.load(backend.plan(batch_of(chunks, starts, 256, scattered=True)), 2) == (300 if is_loaded else None)
    assert FlashBackend(AttentionSizes(block_size=16), paged=False).fixed_plans(8, 1024, 99) is None


def test_a_plan_over_buffers_splits_keys_by_the_least_bound_that_holds_them() -> None:
    backend = FlashBackend(AttentionSizes(block_size=256), paged=True)
    plans = backend.fixed_plans(8, 20_000, scratch_block=99)
    assert plans is not None
    assert plans.bounds == [1024, 4096, 16384, 20_000]
    for start, bound in ((0, 1024), (1023, 1024), (1024, 4096), (16_384, 20_000), (19_999, 20_000), (20_000, None)):
        assert plans.load(backend.plan(batch_of([], [start, 5], 256, scattered=True)), 2) == bound
        if bound is not None:
            assert plans.of(2, bound)[0].given[3] == bound


@pytest.mark.parametrize("is_piecewise", [False, True])
@pytest.mark.parametrize("block", first_quick([256, 4]))
@pytest.mark.parametrize("name", [*ARCHITECTURES, *MIXED])
def test_stages_with_it_mix_no_devices_and_wait_for_nothing(
    name: str, block: int, is_piecewise: bool, probed: list[str | None]
) -> None:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60), FakeCuda() as cuda:
        with cuda.may_wait():
            stage = lone_stage(
                (ARCHITECTURES | MIXED)[name], Mesh(1, 1), CUDA, torch.bfloat16, 9, attention="flash", block_size=block
            )
        assert isinstance(stage.attention, FlashBackend)
        forward = GraphedStage(stage, list).forward if is_piecewise else stage.forward
        for batch in BATCHES.values():
            assert forward(stage.prepare(batch)).shape == (len(batch.sample_rows), stage.arch.vocab_size)


def choose(name: str, dtype: torch.dtype, device: torch.device, kernels: Any = TORCH, block: int = 16) -> Any:
    return make_backend(
        name, kernels, AttentionSizes(block_size=block, num_blocks=4, dtype=dtype, device=device, head_dim=64)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_is_flash_on_cuda_in_half_precision(probed: list[str | None], dtype: torch.dtype) -> None:
    paged, copying = choose("auto", dtype, CUDA, block=512), choose("auto", dtype, CUDA)
    assert isinstance(paged, FlashBackend)
    assert paged.paged
    assert paged.about == f"flash, of torch {torch.__version__}, which reads keys by pages of 512 tokens"
    assert isinstance(copying, FlashBackend)
    assert not copying.paged
    assert copying.about.endswith("since it reads pages in steps of 256 tokens, and cache.block_size=16")
    probed.append("RuntimeError: no kernel image")
    assert isinstance(other := choose("auto", dtype, CUDA), SdpaBackend)
    assert other.about == "sdpa, since flash does not run here: RuntimeError: no kernel image"
    with pytest.raises(
        ConfigError, match=r"^model\.attention=flash: RuntimeError: no kernel image; sdpa runs anywhere$"
    ):
        choose("flash", dtype, CUDA)


def test_a_torch_without_pages_copies(probed: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(default=SimpleNamespace(_schema="aten::_flash_attention_forward(..., Tensor? seqused_k)"))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", older)
    backend = choose("auto", torch.bfloat16, CUDA, block=256)
    assert not backend.paged
    assert backend.about.endswith(f"since that of torch {torch.__version__} reads no pages")


def test_auto_is_sdpa_on_cuda_in_float32_and_says_why(probed: list[str | None]) -> None:
    backend = choose("auto", torch.float32, CUDA)
    assert isinstance(backend, SdpaBackend)
    reason = "needs model.dtype=bfloat16 or float16, not float32"
    assert backend.about == f"sdpa, since flash does not run here: {reason}"
    with pytest.raises(ConfigError, match=f"^model.attention=flash: {reason}; sdpa runs anywhere$"):
        choose("flash", torch.float32, CUDA)


def test_a_named_backend_is_taken(probed: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gapless.models.attention.xformers.why_not", lambda *_: None)
    assert isinstance(xformers := choose("xformers", torch.bfloat16, CUDA), XformersBackend)
    assert xformers.about == "xformers (model.attention=xformers)"
    assert isinstance(sdpa := choose("sdpa", torch.bfloat16, CUDA), SdpaBackend)
    assert sdpa.about == "sdpa (model.attention=sdpa)"


def test_on_a_cpu_auto_is_cpp_or_sdpa_and_no_line() -> None:
    assert isinstance(found := choose("auto", torch.float32, CPU), SdpaBackend)
    assert found.about == ""
    try:
        kernels = CppKernels(torch.float32)
    except Exception as error:
        pytest.skip(str(error))
    assert type(choose("auto", torch.float32, CPU, kernels)).__name__ == "CppBackend"
    assert isinstance(choose("sdpa", torch.float32, CPU, kernels), SdpaBackend)


@pytest.mark.parametrize("head_dim", [264, 60])
def test_heads_that_the_operator_does_not_take(head_dim: int) -> None:
    reason = f"needs heads of at most 256 in steps of 8, not {head_dim}"
    sizes = AttentionSizes(block_size=16, head_dim=head_dim, dtype=torch.bfloat16, device=CUDA)
    assert why_not("flash", sizes) == reason
    assert why_not("sdpa", sizes) is None


def test_a_build_without_the_operator_says_so() -> None:
    """A build of torch without CUDA has no FlashAttention: the probe finds out, and passes on what torch says."""
    sizes = AttentionSizes(block_size=16, head_dim=64, dtype=torch.bfloat16, device=torch.device("cuda"))
    assert "cuda" in str(why_not("flash", sizes)).lower()
