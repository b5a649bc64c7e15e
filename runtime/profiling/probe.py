"""When each operator of a stage begins and ends, seen from outside of its layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...models.attention.backend import AttentionBackend
from ...models.batch import RaggedBatch
from ...models.decoder import DecoderLayer
from ...models.stage import Stage

LAYER_OPERATORS = ("preproj", "attn", "postproj", "ffn_ln1", "ffn_ln2")


class Probe:
    """Watches a stage's modules through hooks; operators run as they do in a run, one after the other, in each layer.

    On a CPU a mark is the clock's time. On CUDA it is an event: where the host lags behind, the gap counts to the
    operator that waits for its launch, and since marks themselves take the host's time there, parts are scaled to what
    the same micro-batch takes without them.
    """

    def __init__(self, stage: Stage) -> None:
        self._is_cuda = stage.device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._is_marking = True
        self._num_layers = len(stage.decoder)
        if stage.embedding is not None:
            self._watch("embedding", stage.embedding)
        for layer in stage.decoder:
            assert isinstance(layer, DecoderLayer)
            self._watch("layer", layer)
            self._watch("preproj", layer.attention.qkv)
            layer.attention.backend = _Watched(layer.attention.backend, self._mark_inner)
            self._watch("postproj", layer.attention.out)
            self._watch("ffn_ln1", layer.ffn.fc1)
            self._watch("ffn_ln2", layer.ffn.fc2)

    def _watch(self, name: str, module: nn.Module) -> None:
        def mark(*_: object) -> None:
            self._mark_inner(name)

        module.register_forward_pre_hook(mark)
        module.register_forward_hook(mark)

    def _mark_inner(self, name: str) -> None:
        if self._is_marking:
            self._mark(name)

    def _mark(self, name: str) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def measure(self, compute: Callable[[], object]) -> dict[str, float]:
        """Seconds of one micro-batch: of a layer's operators and `others` averaged over the layers, `embedding`,
        `micro_batch` (what comes before the first layer, embedding apart), `head` (what comes after the last) and
        `total`."""
        parts = self._marked(compute)
        if not self._is_cuda:
            return parts
        self._is_marking = False
        self._run(compute)
        self._is_marking = True
        scale = self._since(self._marks[-1][1]) / parts["total"]
        return {name: seconds * scale for name, seconds in parts.items()}

    def _run(self, compute: Callable[[], object]) -> None:
        self._marks.clear()
        self._mark("begin")
        compute()
        self._mark("end")
        if self._is_cuda:
            torch.cuda.synchronize()

    def _marked(self, compute: Callable[[], object]) -> dict[str, float]:
        self._run(compute)
        since = self._since
        began: dict[str, float] = {}
        spent: dict[str, float] = {}
        first = last = 0.0
        for name, mark in self._marks:
            at = since(mark)
            if name not in began:
                began[name] = at
                if name == "layer" and "layer" not in spent:
                    first = at
            else:
                spent[name] = spent.get(name, 0.0) + at - began.pop(name)
                last = at if name == "layer" else last
        end = began["end"]
        each = {name: spent[name] / self._num_layers for name in LAYER_OPERATORS}
        embedding = spent.get("embedding", 0.0)
        others = (last - first) / self._num_layers - sum(each.values())
        return each | {
            "others": others, "embedding": embedding, "step": first - embedding, "head": end - last, "total": end
        }  # fmt: skip

    def _since(self, mark: Any) -> float:
        """Seconds from the first mark."""
        begin = self._marks[0][1]
        return begin.elapsed_time(mark) / 1e3 if self._is_cuda else mark - begin


class _Watched:
    """An attention backend between two marks."""

    def __init__(self, backend: AttentionBackend, mark: Callable[[str], None]) -> None:
        self._backend = backend
        self._mark = mark

    def plan(self, batch: RaggedBatch) -> Any:
        return self._backend.plan(batch)

    def attend(self, q_TKGD: torch.Tensor, keys_SKD: torch.Tensor, values_SKD: torch.Tensor, plan: Any) -> torch.Tensor:
        self._mark("attn")
        out = self._backend.attend(q_TKGD, keys_SKD, values_SKD, plan)
        self._mark("attn")
        return out
