"""Measures GPUs: `python -m benchmarks.gpu first`, `two` or `figures`, each in nine minutes; `gather` prepares for it.

`first` is for the first run on a GPU: versions, attention, tokens, CUDA graphs, host synchronizations, the sampler, and
shares of the device's peak rates. `two` needs two GPUs, and covers start, generation, exit and death of ranks.
`figures` has the paper's Table 2 and Figures 3, 4, 7, 8 and 13, a profile folder and simulations with it. Weights are
random.

Each part has a time limit and its own process, so a failure does not stop the others. A part with no time left fails.
`--device cpu --small` runs all parts at tiny sizes without a GPU. Exits with 1 if a part or a check fails, and without
CUDA.
"""

from __future__ import annotations

import sys

from . import gather


def main() -> int:
    if sys.argv[1:2] == ["gather"]:  # this Python may have only pip
        return gather.main(sys.argv[2:])
    from . import measure

    return measure.main((__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
