"""Reads the corpus of the shipped model: the Python standard library of the running interpreter."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from pathlib import Path

SKIPPED_FOLDERS = {
    "__pycache__",
    "config",
    "encodings",
    "ensurepip",
    "idlelib",
    "idle_test",
    "lib-dynload",
    "lib2to3",
    "msilib",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
SKIPPED_FILES = {
    "antigravity.py",
    "html/entities.py",
    "locale.py",
    "re/_casefix.py",
    "stringprep.py",
    "this.py",
}


def corpus_files(stdlib: Path) -> list[Path]:
    """Return the modules to learn from, in a stable order."""
    found = []
    for path in sorted(stdlib.rglob("*.py")):
        rel = path.relative_to(stdlib)
        if any(p in SKIPPED_FOLDERS or p.startswith("config-") for p in rel.parts[:-1]):
            continue
        # _sysconfigdata* describes the machine Python was built on.
        if rel.as_posix() in SKIPPED_FILES or rel.name.startswith("_sysconfigdata"):
            continue
        found.append(path)
    return found


def tidy(text: str) -> str:
    """Expand tabs, drop trailing blanks and carriage returns."""
    lines = [line.rstrip() for line in text.expandtabs(8).splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def docstring_pages(module: str, tree: ast.Module) -> str:
    """Format the docstrings of one module as a documentation page."""
    parts: list[str] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in getattr(node, "body", []):
            if isinstance(child, ast.ClassDef):
                bases = ", ".join(ast.unparse(b) for b in child.bases)
                heading = f"class {prefix}{child.name}" + (f"({bases})" if bases else "")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                heading = f"{prefix}{child.name}({ast.unparse(child.args)})"
            else:
                continue
            doc = ast.get_docstring(child)
            if doc and len(doc) > 20:
                parts.append(f"{heading}\n\n{doc}\n")
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    doc = ast.get_docstring(tree)
    if doc:
        parts.append(f"{module}\n\n{doc}\n")
    visit(tree, "")
    return tidy("\n".join(parts)) if parts else ""


def is_validation(name: str) -> bool:
    """Select about 1 file in 50 by a hash of its name, so the split is stable."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 50 == 35


def load_corpus() -> tuple[list[str], list[str]]:
    """Return the training and the validation documents."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    valid: list[str] = []
    for path in corpus_files(stdlib):
        rel = path.relative_to(stdlib).as_posix()
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        docs = [tidy(source)]
        module = rel.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        docs.append(docstring_pages(module, tree))
        side = valid if is_validation(rel) else train
        side.extend(d for d in docs if len(d) > 100)
    topics = stdlib / "pydoc_data" / "topics.py"
    if topics.exists():
        for node in ast.parse(topics.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for name, page in ast.literal_eval(node.value).items():
                    (valid if is_validation("topics/" + name) else train).append(tidy(page))
    return train, valid
