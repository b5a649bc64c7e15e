"""One run of gapless for `benchmarks/peer.py`. Its argument is the job, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from gapless import LLM
from gapless.conf.sampling import SamplingParams


def main() -> None:
    job = json.loads(sys.argv[1])
    (requests,) = (each["requests"] for each in json.loads(Path(job["rounds"]).read_text()))
    prompts, output = [request["prompt"] for request in requests], requests[0]["output"]
    overrides = {key: int(word) if word.isdigit() else word for key, word in job["overrides"].items()}
    keys = {"model.tokenizer": "none", "scheduler.chunk": job["chunk"], **overrides}
    with LLM(job["model"], pp=job["pp"], tp=job["tp"], **keys) as llm:
        llm.generate([prompts[0]], SamplingParams(max_tokens=1, ignore_eos=True))
        print("first", flush=True)
        llm.generate(prompts[:4], SamplingParams(max_tokens=4, ignore_eos=True))
        begin = time.perf_counter()
        found = llm.generate(prompts, SamplingParams(max_tokens=output, ignore_eos=True))
        seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "outputs": [list(one.outputs[0].token_ids) for one in found]}), flush=True)


if __name__ == "__main__":
    main()
