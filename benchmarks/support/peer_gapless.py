"""One run of gapless for `benchmarks/peer.py`. The argument is a job in JSON.

`rounds` is a file with rounds of requests, which run one after another.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from gapless import LLM
from gapless.conf.sampling import SamplingParams


def main() -> None:
    job = json.loads(sys.argv[1])
    rounds = [each["requests"] for each in json.loads(Path(job["rounds"]).read_text())]
    overrides = {key: int(word) if word.isdigit() else word for key, word in job["overrides"].items()}
    keys = {"model.tokenizer": "none", "model.dtype": job["dtype"], "scheduler.chunk": job["chunk"]}
    keys |= {"cache.prefix_caching": False} | overrides
    seconds, outputs = [], []
    with LLM(job["model"], pp=job["pp"], tp=job["tp"], **keys) as llm:

        def generate(prompts: list[list[int]], output: int) -> list[list[int]]:
            found = llm.generate(prompts, SamplingParams(max_tokens=output, ignore_eos=True))
            return [list(one.outputs[0].token_ids) for one in found]

        first = [request["prompt"] for request in rounds[0]]
        generate(first[:1], 1)
        print("first", flush=True)
        generate(first[:4], 4)
        for requests in rounds:
            begin = time.perf_counter()
            outputs += generate([request["prompt"] for request in requests], requests[0]["output"])
            seconds.append(time.perf_counter() - begin)
    print(json.dumps({"seconds": seconds, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
