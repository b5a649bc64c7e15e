"""One traced run of vLLM's CPU build for `benchmarks/vllm_trace.py`, under vLLM's Python. Its argument is the job, as
JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    job = json.loads(sys.argv[1])
    rounds = json.loads(Path(job["rounds"]).read_text())
    llm = LLM(
        job["model"], skip_tokenizer_init=True, dtype="float32", max_num_batched_tokens=job["chunk"],
        max_num_seqs=job["seqs"], enable_prefix_caching=False, pipeline_parallel_size=job["stages"],
        distributed_executor_backend="mp", enable_logging_iteration_details=True, disable_log_stats=False,
        profiler_config={
            "profiler": "torch", "torch_profiler_dir": job["folder"], "torch_profiler_with_stack": False,
            "detailed_trace_annotation": True,
        },
    )  # fmt: skip

    def generate(requests: list[dict[str, Any]]) -> None:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        sampling = [
            SamplingParams(max_tokens=request["output"], ignore_eos=True, temperature=0.0, detokenize=False)
            for request in requests
        ]
        llm.generate(prompts, sampling, use_tqdm=False)

    generate(rounds[0]["requests"][:2])
    llm.start_profile()
    for each in rounds:
        time.sleep(each["pause"])
        generate(each["requests"])
    llm.stop_profile()


if __name__ == "__main__":
    main()
