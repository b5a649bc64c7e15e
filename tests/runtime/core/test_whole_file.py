"""Text files of a run folder are written whole, or stay what they were."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gapless.runtime.analysis.run_folder.files import gzip_file
from gapless.runtime.core.whole_file import write_text


def test_a_write_that_breaks_off_leaves_the_older_file_and_names_it(tmp_path: Path) -> None:
    file, before = tmp_path / "report.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_text(file, "whole")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # as a disk that fills up
    try:
        with pytest.raises(OSError, match=r"\(2,097,152 bytes needed\)") as error:
            write_text(file, "a" * (2 << 20))
        with pytest.raises(OSError, match="data") as compressed, gzip_file(tmp_path / "data") as to:
            to.write(os.urandom(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == str(file)
    assert compressed.value.filename == str(tmp_path / "data")
    assert file.read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]


def test_the_next_writer_of_a_file_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    file = tmp_path / "report[1].html"
    code = f"""if True:
        import os
        from pathlib import Path
        from gapless.runtime.core.whole_file import whole_file
        with whole_file(Path({str(file)!r})) as part:
            part.write_text("half")
            os.kill(os.getpid(), 9)"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    kept = [".other.1.part", f".{file.name}.{os.getppid()}.part", f".{file.name}.part"]
    for name in kept:
        (tmp_path / name).touch()
    write_text(file, "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, file.name])
