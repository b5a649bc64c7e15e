"""Measures GPUs: `python -m benchmarks.gpu first`, `two` or `figures`, each in nine minutes; `gather` comes before.

`first` is for the first contact with a GPU: versions, attention, tokens, CUDA graphs, what the host waits for, the
sampler, and shares of what the device reaches. `two` needs two GPUs: ranks that start, generate, end and die. `figures`
has the paper's Table 2 and Figures 3, 4, 7, 8 and 13, a profile folder and simulations with it. Weights are random.

Each part has a limit and a process of its own, and none stops the others. What the time does not reach fails.
`--device cpu --small` runs a list at tiny sizes without a GPU. It exits with 1 if a part or a check fails, and without
CUDA.
"""

from __future__ import annotations

import sys

from . import gather


def main() -> int:
    if sys.argv[1:2] == ["gather"]:  # by a Python that may have nothing but pip
        return gather.main(sys.argv[2:])
    from . import measure

    return measure.main((__doc__ or "").splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
