"""Writes the run folder of a recorded window: a process of its own, so that neither the engine nor the front waits.

Usage: python -m gapless.launch.server.write_recording PARTS FOLDER. PARTS is the file that `recorder.py` wrote: a frame
with the config and the versions as JSON, then a frame for each part. It prints the window in words, as a JSON list.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...parallel.frames import FrameBuffer
from ...runtime.ledger.advice import Advice
from ...runtime.ledger.ledger import Ledger
from ...runtime.report.run_words import words_of_run
from ...runtime.report.write_folder import write_run_folder
from ...runtime.run_folder.read import RunFolder
from ...runtime.run_folder.titles import title_of
from ...runtime.serving.recording import join_parts
from ..advising import kept_advice, quick_advice

_READ_BYTES = 1 << 20
_NICENESS = 10  # the stages come first


def main() -> None:
    parts, folder = Path(sys.argv[1]), Path(sys.argv[2])
    os.nice(_NICENESS)
    frames = _frames(parts)
    about = msgspec.json.decode(next(frames))
    record = join_parts(frames)
    config = about["config"]
    ledger = Ledger(record)
    write_run_folder(
        folder, record, config=config, versions=about["versions"], ledger=ledger, advise=_advise,
        title=f"{title_of(config)}, recorded while it served",
    )  # fmt: skip
    parts.unlink()
    words = words_of_run(record, ledger, config, kept_advice(folder))
    sys.stdout.buffer.write(msgspec.json.encode(words))


def _advise(folder: RunFolder) -> list[Advice] | None:
    return quick_advice(folder, share=1.0)  # a recording is made to be explained


def _frames(file: Path) -> Iterator[bytes]:
    buffer = FrameBuffer()
    with file.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            for _, payload in buffer.feed(data):
                yield payload


if __name__ == "__main__":
    main()
