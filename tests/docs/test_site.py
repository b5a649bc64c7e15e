"""The site's links work in it, its references name all there is, and its check finds what is dead.

`make docs` builds it, strictly.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path, PurePosixPath

import pytest

from docs.site.api_reference import api_pages, names_shown
from docs.site.check import dead_links
from docs.site.key_reference import key_pages
from docs.site.staging import ROOT, documents, index_sections, page_of, relinked, source_text, stage
from gapless.conf.build import GROUPS, dotted_keys, group_names
from gapless.launch.commands import COMMANDS

PAGES = {path: page_of(path) for path in documents()}
README = PurePosixPath("README.md")


def turned(text: str, path: PurePosixPath = README) -> tuple[str, set[PurePosixPath]]:
    return relinked(text, path, PAGES)


def test_links_between_pages_follow_them_into_the_site() -> None:
    assert turned("[a](docs/ledger.md#idle-and-bubbles)") == ("[a](docs/ledger.md#idle-and-bubbles)", set())
    assert turned("[a](../README.md#results)", PurePosixPath("docs/serve.md")) == ("[a](../index.md#results)", set())
    assert turned("[a](docs/decisions/)") == ("[a](docs/decisions/README.md)", set())
    assert turned("[a](benchmarks/results/)") == ("[a](benchmarks/results/index.md)", set())


def test_links_to_files_lead_to_pages_that_show_them() -> None:
    text, linked = turned("[a](../runtime/scheduler/base.py) ![b](images/pb1.png)", PurePosixPath("docs/policies.md"))
    assert text == "[a](../sources/runtime/scheduler/base.py.md) ![b](images/pb1.png)"
    assert linked == {PurePosixPath("runtime/scheduler/base.py"), PurePosixPath("docs/images/pb1.png")}
    assert "class Scheduler:" in source_text(PurePosixPath("runtime/scheduler/base.py"))
    assert "- `causes.py`" in source_text(PurePosixPath("runtime/analysis/ledger"))


@pytest.mark.parametrize("text", ["[a](https://arxiv.org/abs/2308.16369)", "[a](#here)", "```text\n[a](b.md)\n```"])
def test_other_links_and_code_stay_as_they_are(text: str) -> None:
    assert turned(text) == (text, set())


def test_a_link_to_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^README\.md: docs/nothing\.md leads to nothing$"):
        turned("[a](docs/nothing.md)")


def test_the_navigation_has_every_page_of_the_index() -> None:
    entries = [entry for _, names in index_sections({"reference/api.md": ""}) for entry in names]
    pages = {str(path) for path in documents() if path.parent == PurePosixPath("docs")} - {"docs/README.md"}
    assert pages <= set(entries)
    assert {"ARCHITECTURE.md", "docs/decisions/README.md", "reference/api.md"} <= set(entries)
    assert len(entries) == len(set(entries))


def test_the_source_folder_holds_all_that_its_pages_link_to(tmp_path: Path) -> None:
    stage(tmp_path / "source", {**key_pages(), **api_pages()})
    pages = list((tmp_path / "source").rglob("*.md"))
    assert len(pages) > 80
    for page in pages:
        text = re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            file = link.partition("#")[0]
            assert not file or re.match(r"[a-z]+:", file) or (page.parent / file).is_file(), (page, link)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_has_each_key_once(name: str) -> None:
    page = key_pages()[f"reference/keys/{name}.md"]
    keys = re.findall(r"^\| \[`([\w.]+)`\]\{#([\w-]+)\} \|", page, re.MULTILINE)
    expected = {key for key, _ in dotted_keys(COMMANDS[name].config)}
    named, anchors = zip(*keys, strict=True)
    assert len(named) == len(set(named)) == len(set(anchors))
    assert set(named) <= expected
    assert len(expected) - len(named) < 20  # those that a command sets itself, as in its --help


def test_a_key_s_row_says_what_help_says() -> None:
    page = key_pages()["reference/keys/simulate.md"]
    assert "| [`scheduler.chunk`]{#scheduler-chunk} | `256` | " in page
    assert "| `model=llama2-70b` | the model; " in page


def test_the_page_of_groups_has_every_choice() -> None:
    page = key_pages()["reference/keys/groups.md"]
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert headings == [name for group in GROUPS for name in group_names(group)]


@pytest.mark.parametrize("name", sorted(names_shown()))
def test_what_the_api_shows_is_there(name: str) -> None:
    module, _, member = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), member))


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#here">b</a> <a href="https://a.org/">out</a> <p id="top"></p>')
    (tmp_path / "b.html").write_text(
        '<p id="here"></p><a href="#there">x</a><img src="c.png"><a href="a.html#top"></a>'
    )
    assert dead_links(tmp_path) == ["b.html: #there leads to no element", "b.html: c.png leads to no file"]


def test_the_site_is_not_committed() -> None:
    assert "/site/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = json.loads((ROOT / "docs/quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    assert len(cells) > 20
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


def test_the_pieces_of_a_stream_are_joined_progress_first() -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("nbclient")
    from docs.site.notebook import in_order

    pieces = [("stdout", "a "), ("stderr", "1/2\n"), ("stdout", "b\n"), ("stderr", "2/2\n")]
    shown = nbformat.v4.new_output("display_data", data={"text/plain": "figure"})
    given = [*(nbformat.v4.new_output("stream", name=name, text=text) for name, text in pieces), shown]
    errors, output, last = in_order(given)
    assert (errors.name, errors.text, output.name, output.text) == ("stderr", "1/2\n2/2\n", "stdout", "a b\n")
    assert last == shown


def test_a_notebook_that_raises_is_an_error(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("nbclient")
    from docs.site.notebook import run_notebook

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(1)\nnothing")])
    nbformat.write(notebook, tmp_path / "broken.ipynb")
    with pytest.raises(ValueError, match=r"^broken\.ipynb: (.|\n)*NameError"):
        run_notebook(tmp_path / "broken.ipynb")
