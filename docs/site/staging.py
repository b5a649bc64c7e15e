"""The folder that Sphinx reads: the documents as they are, but for links that only a code host could follow."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
HOME = PurePosixPath("index.md")  # README.md of the root is the site's first page
AT_ROOT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
RESULTS = PurePosixPath("benchmarks/results")
FOLDERS = ("docs", "benchmarks", "models/shipped")  # whose Markdown and notebooks are pages
ORPHANS = ("docs/README.md", "models/shipped/README.md")  # pages that others lead to, outside the navigation
LEFT_OUT = ("docs/plans", "docs/site")  # work under way, and this
PICTURES = (".png", ".svg")
SOURCES = "sources"  # of the site: files of the project that pages link to, a page each
_ORPHAN = "---\norphan: true\n---\n"
_FENCE = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".json": "json",
    ".sh": "bash",
    ".conf": "nginx",
    ".Dockerfile": "docker",
    ".service": "ini",
}


def stage(target: Path, made: Mapping[str, str]) -> None:
    """Write the source folder of the site.

    Args:
        target: the folder, which is not there yet.
        made: pages made of the code, by path in the site.
    """
    pages = {path: page_of(path) for path in documents()}
    linked: set[PurePosixPath] = set()
    for path, page in pages.items():
        to = target / page
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text, files = relinked((ROOT / path).read_text(encoding="utf-8"), path, pages)
            linked |= files
            head = _ORPHAN if str(path) in ORPHANS else ""
            to.write_text(head + text + toctrees(path, made), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / path, to)
    for path in linked:
        if path.suffix in PICTURES:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target / path)
        else:
            write(target / source_page(path), source_text(path))
    for name, text in {**made, str(RESULTS / "index.md"): results_index()}.items():
        write(target / name, text)


def documents() -> list[PurePosixPath]:
    """Return the files that are pages, from the project's root."""
    found = [PurePosixPath(name) for name in AT_ROOT]
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            path = PurePosixPath(file.relative_to(ROOT).as_posix())
            if path.suffix in (".md", ".ipynb") and not any(path.is_relative_to(name) for name in LEFT_OUT):
                found.append(path)
    return found


def page_of(path: PurePosixPath) -> PurePosixPath:
    """Return where a document lies in the site's source folder."""
    return HOME if path == PurePosixPath("README.md") else path


def source_page(path: PurePosixPath) -> PurePosixPath:
    """Return the page that shows a file or a folder that is no document."""
    return PurePosixPath(SOURCES) / path.parent / f"{path.name}.md"


def relinked(
    text: str, path: PurePosixPath, pages: Mapping[PurePosixPath, PurePosixPath]
) -> tuple[str, set[PurePosixPath]]:
    """Turn the links of a document so that they work in the site; return also the files beyond the pages that it needs.

    A folder's page is its README. Links out of the project stay as they are; code is left alone.

    Raises:
        ValueError: a link leads to nothing.
    """
    linked: set[PurePosixPath] = set()

    def turned(match: re.Match[str]) -> str:
        link, hash_, anchor = match[1].partition("#")
        if not link or re.match(r"[a-z]+:", link):
            return match[0]
        goal = PurePosixPath(os.path.normpath(path.parent / link))
        if not (ROOT / goal).exists():
            raise ValueError(f"{path}: {match[1]} leads to nothing")
        page = pages.get(goal) or pages.get(goal / "README.md")
        if page is None and goal == RESULTS:
            page = RESULTS / "index.md"
        if page is None:
            linked.add(goal)
            page = goal if goal.suffix in PICTURES else source_page(goal)
        return f"]({os.path.relpath(page, page_of(path).parent)}{hash_}{anchor})"

    parts = _FENCE.split(text)  # every second one is a block of code
    parts[::2] = [_LINK.sub(turned, part) for part in parts[::2]]
    return "".join(parts), linked


def source_text(path: PurePosixPath) -> str:
    """Return a page that shows a file, or lists a folder."""
    file = ROOT / path
    head = f"{_ORPHAN}# {path}\n\n"
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if not each.name.startswith(("_", ".")))
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = _LANGUAGES.get(file.suffix, "text")
    return f"{head}````````{language}\n{file.read_text(encoding='utf-8').rstrip()}\n````````\n"


def toctrees(path: PurePosixPath, made: Mapping[str, str]) -> str:
    """Return the navigation below a page.

    That is the sections of the index of the documents for the first page, a folder's documents for its README.
    """
    if path == PurePosixPath("README.md"):
        trees = [tree(caption, entries) for caption, entries in index_sections(made)]
        return "".join(trees)
    if path == PurePosixPath("docs/decisions/README.md"):
        return tree("", names_of(path.parent))
    return ""


def results_index() -> str:
    """Return a page that leads to the results of each benchmark."""
    names = names_of(RESULTS)
    lines = "\n".join(f"- [](./{name})" for name in names)
    return f"# Results of the benchmarks\n\n{lines}\n{tree('', names)}"


def names_of(folder: PurePosixPath) -> list[str]:
    """Return the names of a folder's Markdown files but its README."""
    return sorted(file.name for file in (ROOT / folder).glob("*.md") if file.name != "README.md")


def tree(caption: str, entries: list[str]) -> str:
    """Return a hidden tree of pages."""
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *entries, "```", ""])


def index_sections(made: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections of docs/README.md with their pages, then the pages that are made of the code."""
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        links = re.findall(r"^\| \[[^]]*\]\(([^)]+)\)", section, re.MULTILINE)
        yield section.partition("\n")[0], [str(PurePosixPath(os.path.normpath(f"docs/{link}"))) for link in links]
    yield "Reference", [name for name in made if PurePosixPath(name).parent == PurePosixPath("reference")]
    yield "Measured", [str(RESULTS / "index.md")]


def write(file: Path, text: str) -> None:
    """Write a file, and its folder if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
