"""Runs Vidur in its own processes: its interpreter executes `benchmarks/support/vidur_script.py`."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless.runtime.simulation.workload import Workload

SCRIPT = Path(__file__).parent / "vidur_script.py"
TP = 2
MAX_CONTEXT = 4096  # tokens, the longest context whose attention was measured
MAX_TOKENS = 65_536  # the largest micro-batch that Vidur learns times for
ATTENTION = "attention_codellama-34b_tp2"  # both models have these heads
REVISION = "0" * 40
DATE = "2023-01-01"  # Vidur replays traces of one date; any date will do
_TASK: dict[str, object] = {  # defaults of a task for `vidur_script.py`
    "seed": 0,
    "tp": TP,
    "block_size": 16,
    "date": DATE,
    "context": MAX_CONTEXT,
    "network": "local/dgx",
    "most_tokens": MAX_TOKENS,
    "trace": "",
    "policy": "sarathi",
    "tokens": 512,
    "follow": False,
    "batch_size_cap": 128,
    "num_blocks": 1024,
    "metrics": False,
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model: Vidur's `name`, the `measured` file of its linear operators, and `overrides` of `gapless simulate`."""

    short: str
    name: str
    measured: str
    overrides: str

    @property
    def dataset(self) -> str:
        return self.measured.removeprefix("mlp_")


CODELLAMA = Model(
    "34B",
    "codellama/CodeLlama-34b-Instruct-hf",
    "mlp_codellama-34b-instruct-hf",
    "model=llama2-70b model.name=codellama-34b model.architecture.num_layers=48 model.architecture.ffn_size=22016 "
    "model.architecture.rope_theta=1000000",
)
LLAMA = Model("70B", "meta-llama/Llama-2-70b-hf", "mlp_llama-2-70b-hf", "model=llama2-70b")


class Vidur:
    """Puts measurements into Vidur's download cache, and runs Vidur.

    Args:
        python: an interpreter with Vidur.
        data: folder of a device's measurements.
        cache: folder of measurements and trained predictors.
        scratch: folder for the files of a run.
    """

    def __init__(self, python: Path, data: Path, cache: Path, scratch: Path) -> None:
        self._python, self._cache, self._scratch = python, cache.resolve(), scratch
        for model in (CODELLAMA, LLAMA):
            about = {"model": model.name, "device_sku": "a100"}
            self._lay_out("compute", model.dataset, data, about, {"mlp": model.measured, "attention": ATTENTION})
        files = {"all_reduce": "dgx_all_reduce", "send_recv": "dgx_send_recv"}
        self._lay_out("network", "dgx", data, {"sku": "a100_dgx"}, files)

    def version(self) -> str:
        code = "from importlib.metadata import version; print(version('vidur'))"
        run = subprocess.run([self._python, "-I", "-c", code], check=True, capture_output=True, text=True)
        return run.stdout.strip()

    def simulate(
        self, model: Model, pp: int, workload: Workload, **keys: object
    ) -> tuple[npt.NDArray[np.float64], float]:
        """Simulate; returns [requests, 3], arrival, first token and end in simulated seconds, and the CPU seconds.

        `keys` are those of `_TASK`.
        """
        trace = self._scratch / "trace.csv"
        columns = zip(workload.arrivals.tolist(), workload.input_lens, workload.output_lens, strict=True)
        lines = [f"{DATE},{arrival!r},{prompt},{output}" for arrival, prompt, output in columns]
        trace.write_text("\n".join(["Date,Time,PromptTokenCount,CompletionTokenCount", *lines]) + "\n")
        result = self._run(model, pp, trace=str(trace), **keys)
        return np.array(result["requests"]), result["seconds"]

    def operators(
        self, model: Model, pp: int, micro_batches: Sequence[Sequence[tuple[int, int]]]
    ) -> list[dict[str, float]]:
        """Predict the milliseconds of each operator of a layer for each micro-batch.

        A micro-batch is a list of (new tokens, context including them), one pair per request.
        """
        times: list[dict[str, float]] = self._run(model, pp, micro_batches=micro_batches)["times"]
        return times

    def _run(self, model: Model, pp: int, **keys: object) -> dict[str, Any]:
        folders = {"cache": str(self._cache), "output": str(self._scratch / "output")}
        task = _TASK | folders | {"model": model.name, "pp": pp, "compute": f"local/{model.dataset}"} | keys
        task_file, result_file = self._scratch / "task.json", self._scratch / "result.json"
        task_file.write_text(json.dumps(task))
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        command = [self._python, "-I", SCRIPT, task_file, result_file]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"Vidur failed:\n{run.stdout[-2000:]}{run.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result

    def _lay_out(self, kind: str, dataset: str, data: Path, about: dict[str, str], files: dict[str, str]) -> None:
        """Write measurements in the layout of huggingface_hub's cache of downloads."""
        folder = self._cache / "profiling_data" / kind / f"datasets--local--{dataset}"
        snapshot = folder / "snapshots" / REVISION
        for parent in (snapshot, folder / "refs"):
            parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(REVISION)
        (snapshot / "config.json").write_text(json.dumps(about))
        for name, source in files.items():
            with lzma.open(snapshot / f"{name}.csv.xz", "wb") as file:
                file.write(gzip.decompress((data / f"{source}.csv.gz").read_bytes()))
