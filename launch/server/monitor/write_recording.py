"""Writes the run folder of a recorded window, in a separate process, so that neither the engine nor the front waits.

Usage: python -m gapless.launch.server.monitor.write_recording PARTS FOLDER. PARTS is the file that `recorder.py` wrote:
a frame with the config and the versions as JSON, then one frame per part. It prints the summary in words, as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from ....parallel.frames import FrameBuffer
from ....runtime.analysis.explain.analysed_run import AnalysedRun
from ....runtime.analysis.live.recording import join_parts
from ....runtime.analysis.report.write_folder import write_run_folder
from ....runtime.analysis.run_folder.run_info import RunInfo
from ....runtime.analysis.run_folder.titles import title_of
from ...advising import quick_advice
from .live_window import WindowWords

_READ_BYTES = 1 << 20
_NICENESS = 10  # lower priority than the stages


def main() -> None:
    """Write the run folder of a recording, print its summary in words, and delete the file of parts."""
    parts, folder = Path(sys.argv[1]), Path(sys.argv[2])
    os.nice(_NICENESS)
    frames = _frames(parts)
    about = msgspec.json.decode(next(frames))
    record = join_parts(frames)
    info = RunInfo(about["config"], about["versions"], f"{title_of(about['config'])}, recorded while it served")
    run = AnalysedRun.of(record, info, partial(quick_advice, share=1.0))  # the user wants an explanation
    write_run_folder(folder, run)
    parts.unlink()
    sys.stdout.buffer.write(msgspec.json.encode(WindowWords.of(run)))


def _frames(file: Path) -> Iterator[bytes]:
    buffer = FrameBuffer()
    with file.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            for _, payload in buffer.feed(data):
                yield payload


if __name__ == "__main__":
    main()
