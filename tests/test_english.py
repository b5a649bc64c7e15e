"""Pages and docstrings use the field's terms: none has a phrase of the table below."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("conf", "kernels", "launch", "models", "parallel", "runtime")
PAGES = (
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "plans" not in path.parts),
)
SIZES = r"ms|us|bytes|[GM]B|times|command|connection|copy|page"
INSTEAD = {  # a phrase, as a regular expression: what to write
    r"(?:layers?|models?|mixtures) of experts": "MoE layer, MoE model",
    r"(?:sums? of|summed over) (?:the )?ranks": "all-reduce",
    r"rides? along|riding along": "piggybacked decodes",
    r"rounded (?:at load|as (?:it is|they are) loaded)": "quantized on load",
    rf"(?:{SIZES}) an? (?:GPU|layer|micro-batch|node|rank|request|row|stage|step|token)": "per: 2 ms per token",
    r"what of (?:it|its|that|them)|(?:stands?|stood) beside": "repeat the noun; compared with",
    r"by chance|(?:is|are) sure|has to be told": "the term: random, confidence interval, must be specified",
    r"runs? that ha(?:s|ve) no end|without end": "unbounded, online, streaming",
}


def docstrings(path: Path) -> str:
    """Return the docstrings of a source."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


def texts() -> dict[str, str]:
    """Return the prose of each page, and the docstrings of each source of the package."""
    code = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
    pages = {path: code.sub("", path.read_text(encoding="utf-8")) for path in PAGES}
    sources = {path: docstrings(path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}
    return {str(path.relative_to(ROOT)): text for path, text in (pages | sources).items()}


@pytest.mark.parametrize("phrase", INSTEAD)
def test_no_text_has_a_phrase_that_readers_stumble_over(phrase: str) -> None:
    pattern = re.compile(rf"\b(?:{phrase})\b".replace(" ", r"\s+"))
    found = [(name, match.group()) for name, text in texts().items() for match in pattern.finditer(text)]
    assert found == [], f"write instead: {INSTEAD[phrase]}"
