"""Runs the notebooks of the documents, so that the site shows what their cells gave, and fails where one raises."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

_SECONDS = 120  # that a cell may take


def run_notebook(file: Path) -> None:
    """Run a notebook in an empty folder, and write it back with its outputs.

    Raises:
        ValueError: a cell raised, or took too long.
    """
    notebook = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=_SECONDS,
            resources={"metadata": {"path": folder}},
            extra_arguments=["--log-level=ERROR"],  # else the kernel warns that it talks to itself over TCP
        )
        try:
            client.execute()
        except (CellExecutionError, TimeoutError) as error:
            raise ValueError(f"{file.name}: {error}") from error
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = in_order(cell.outputs)
    nbformat.write(notebook, file)


def in_order(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Return what a cell gave, with the pieces of each stream in one: first standard error, which tells of progress."""
    streams = {name: [each for each in outputs if each.get("name") == name] for name in ("stderr", "stdout")}
    merged = [
        nbformat.v4.new_output("stream", name=name, text="".join(piece.text for piece in pieces))
        for name, pieces in streams.items()
        if pieces
    ]
    return [*merged, *(each for each in outputs if each.output_type != "stream")]
