"""Builds the site: `python -m docs.site`, or `make docs`.

It puts the documents and the pages that it makes of the code into `build/docs/source`, runs the notebooks there, then
Sphinx, for which a warning is an error, and checks every link of the pages that come out in `site/`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from .api_reference import api_pages
from .check import dead_links
from .key_reference import key_pages
from .notebook import run_notebook
from .staging import ROOT, stage


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the documents as a site, and check its links.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site; default: site")
    parser.add_argument("--work", type=Path, default=ROOT / "build/docs", help="folder for what it is made of")
    out, work = (path.resolve() for path in vars(parser.parse_args()).values())
    source = work / "source"
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    paths = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]  # notebooks call gapless
    os.environ |= {"PATH": os.pathsep.join(paths), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    try:
        stage(source, {**key_pages(), **api_pages()})
        for notebook in source.rglob("*.ipynb"):
            run_notebook(notebook)
    except ValueError as error:  # a link leads to nothing, a cell raised
        print(error, file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "--fail-on-warning", "--keep-going"]
    command += ["-c", str(Path(__file__).parent), "-d", str(work / "doctrees"), str(source), str(out)]
    environment = os.environ | {"GAPLESS_COMPILED": "0"}  # autodoc reads docstrings and signatures of sources
    if code := subprocess.run(command, cwd=work, env=environment).returncode:
        return code
    dead = dead_links(out)
    for line in dead:
        print(line, file=sys.stderr)
    pages = len(list(out.rglob("*.html")))
    print(f"{out}: {pages} pages, {f'{len(dead)} dead links' if dead else 'no dead link'}")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
