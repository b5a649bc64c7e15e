"""A layer on CUDA launches few kernels, and no size of a micro-batch has a kernel compiled anew."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.conf.errors import ConfigError
from gapless.kernels.operators.base import TorchKernels
from gapless.kernels.operators.select import make_kernels
from gapless.models.attention import flash
from gapless.models.batch import RaggedBatch, Segment
from gapless.models.graphed_stage import GraphedStage
from gapless.models.stage import Stage
from gapless.parallel.groups import Groups
from gapless.parallel.mesh import Mesh
from gapless.parallel.rendezvous import Rendezvous
from tests.support.fake_cuda import CUDA, FakeCuda
from tests.support.fake_triton import KERNELS, FakeKernel, fake_triton
from tests.support.lone_rank import ARCHITECTURES, BATCHES, lone_stage
from tests.support.tiers import first_quick

aten = torch.ops.aten
NO_KERNEL = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten._unsafe_view.default,
    torch.ops.prim.device.default,
}


class Operators(TorchDispatchMode):
    """Counts the operators that launch a kernel, attention's apart."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.names: list[str] = []
        self._in_attention = False
        self._attend = stage.attention.attend
        stage.attention.attend = self.attend  # type: ignore[method-assign]

    def attend(self, *args: Any) -> torch.Tensor:
        self._in_attention = True
        out = self._attend(*args)
        self._in_attention = False
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if not is_view and func not in NO_KERNEL and not self._in_attention:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _megatron_asks_for_groups() -> Any:
    with Groups.start(Rendezvous(0, 1, "", "cpu"), Mesh(1, 1), 60):
        yield


def launched_a_layer(name: str, tp: int, is_piecewise: bool, kernels: str) -> list[str]:
    """Return what one more layer of a middle stage launches, beside attention."""
    launched: dict[int, Counter[str]] = {}
    for num_layers in (6, 9):
        arch = dataclasses.replace(ARCHITECTURES[name], num_layers=num_layers)
        with FakeCuda() as cuda, fake_triton() as launches:
            with cuda.may_wait():
                stage = lone_stage(arch, Mesh(3, tp, tp), CUDA, torch.bfloat16, 9, kernels=kernels)
            forward = GraphedStage(stage, list).forward if is_piecewise else stage.forward
            inputs = stage.prepare(BATCHES["decodes"])
            launches.clear()
            with Operators(stage) as operators:
                forward(inputs, torch.empty(2, arch.hidden_size, dtype=torch.bfloat16, device=CUDA))
        launched[len(stage.decoder)] = Counter(operators.names) + Counter(launch.kernel for launch in launches)
    assert list(launched) == [2, 3]
    return sorted((launched[3] - launched[2]).elements())


# Beside attention: four products, two norms that add the residual, gate, rotation and cache.
MOST = 8
WITH_TORCH = {"gpt2": 11, "llama": 16, "mistral": 16, "qwen3": 21}


@pytest.mark.parametrize("is_piecewise", [False, True])
@pytest.mark.parametrize("tp", first_quick([2, 1]))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_layer_launches_few_kernels(name: str, tp: int, is_piecewise: bool) -> None:
    copies = 1 if is_piecewise else 0  # of what attention returns, to the buffer of the piece that follows
    launched = launched_a_layer(name, tp, is_piecewise, "auto")
    assert len(launched) <= MOST + copies, launched
    plain = launched_a_layer(name, tp, is_piecewise, "torch")
    assert len(plain) <= WITH_TORCH[name] + 2 * copies, plain
    assert len(plain) > len(launched), "the count sees what is fused"


@pytest.mark.parametrize("is_paged", [False, True])
def test_the_host_launches_one_graph_for_decodes_of_any_number_of_layers(
    is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where keys are not read by pages, a layer more is a graph, attention and a copy more."""
    monkeypatch.setattr(flash, "probe", lambda *_, **__: None)
    launched = []
    for num_layers in (6, 9):
        arch = dataclasses.replace(ARCHITECTURES["llama"], num_layers=num_layers)
        with FakeCuda() as cuda, fake_triton():
            with cuda.may_wait():
                block_size = 256 if is_paged else 16
                stage = lone_stage(
                    arch, Mesh(3, 1, 1), CUDA, torch.bfloat16, 9, attention="flash", block_size=block_size
                )
            with Operators(stage) as operators:
                names = operators.names
                replays = [lambda: names.append("replay")]  # noqa: B023
                forward = GraphedStage(stage, lambda works: replays * len(works)).forward  # noqa: B023
                stage.attention.attend = operators._attend  # type: ignore[method-assign]
                inputs = stage.prepare(BATCHES["decodes"])
                names.clear()
                forward(inputs, torch.empty(2, arch.hidden_size, dtype=torch.bfloat16, device=CUDA))
            launched.append(Counter(names))
    assert launched[0]["replay"] == (1 if is_paged else 3)
    more = launched[1] - launched[0]
    layer = {"replay": 1, "aten.copy_.default": 1, "aten._flash_attention_forward.default": 1}
    assert more == ({} if is_paged else layer)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_size_of_a_micro_batch_compiles_a_kernel(name: str) -> None:
    """Whether numbers of tokens are 1, multiples of 16 or others, which Triton tells apart in arguments."""
    with FakeCuda() as cuda, fake_triton() as launches:
        with cuda.may_wait():
            stage = lone_stage(ARCHITECTURES[name], Mesh(1, 1), CUDA, torch.bfloat16, 300)
        stage.attention.attend = lambda q, *_: torch.empty(len(q), 32, dtype=q.dtype, device=CUDA)  # type: ignore[method-assign]
        stage(stage.prepare(BATCHES["mixed"]))
        variants = launches.variants
        assert len(variants) <= 5
        odd_places = set()
        for chunk, num_decodes in itertools.product((0, 1, 15, 16, 600), (1, 2, 16, 33)):
            chunks = [Segment(0, chunk, range(150))] if chunk else []
            decodes = [Segment(1, 1, [200 + i]) for i in range(num_decodes)]
            tokens = chunk + num_decodes
            inputs = stage.prepare(RaggedBatch.of([1] * tokens, chunks, decodes, list(range(chunk, tokens))))
            odd_places.add(inputs.last_context.slots.storage_offset() % 2 == 1)
            stage(inputs)
        assert odd_places == {False, True}, "addresses of slots are multiples of 16, and are not"
        assert launches.variants == variants


def test_where_triton_does_not_run_torchs_operators_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    kernels = make_kernels("auto", dtype=torch.bfloat16, device=CUDA)
    assert isinstance(kernels, TorchKernels)
    assert kernels.fallback_reason.startswith("Triton does not run here (ModuleNotFoundError: ")
    with pytest.raises(ConfigError, match=r"model\.kernels=triton: Triton does not run here .*; torch runs anywhere"):
        make_kernels("triton", dtype=torch.bfloat16, device=CUDA)
    with pytest.raises(ConfigError, match=r"model\.kernels=triton: they are for CUDA; torch runs anywhere"):
        make_kernels("triton", dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="they are for float32 and bfloat16 on a CPU"):
        make_kernels("cpp", dtype=torch.bfloat16, device=CUDA)
    assert make_kernels("torch", dtype=torch.bfloat16, device=CUDA).fallback_reason == ""


def test_a_launch_that_fails_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_triton():
        monkeypatch.setattr(FakeKernel, "__getitem__", failing)
        with FakeCuda():
            kernels = make_kernels("auto", dtype=torch.bfloat16, device=CUDA)
    assert kernels.fallback_reason == "Triton does not run here (RuntimeError: Failed to find C compiler.)"


def failing(*_: object) -> None:
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")
