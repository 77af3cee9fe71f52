"""Makes the notebooks of the scripts with cells, with their output.

    python examples/make_notebooks.py     in an empty folder; 2 minutes on 2 cores

A script is the source: its cells begin with `# %%`, those of text with `# %% [markdown]`.
"""

import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path

import matplotlib

FOLDER = Path(__file__).parent
NOTEBOOKS = ("compare_methods", "use_models")


def split_cells(text: str) -> list[tuple[str, str]]:
    """Returns (kind, source) of each cell: markdown or code."""
    cells = []
    for part in re.split(r"^# %%", text, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", body.strip()))
    return cells


def run_cell(source: str, names: dict) -> list[dict]:
    """Returns what a cell prints and draws, as a notebook stores it."""
    import matplotlib.pyplot as plt

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "cell", "exec"), names)
    outputs = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    for number in plt.get_fignums():
        drawn = io.BytesIO()
        plt.figure(number).savefig(drawn, dpi=80)
        image = base64.b64encode(drawn.getvalue()).decode()
        data = {"image/png": image, "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return outputs


def make_notebook(name: str) -> None:
    """Runs a script cell by cell and writes its notebook."""
    names, cells, count = {"__name__": "notebook"}, [], 0
    for number, (kind, source) in enumerate(split_cells((FOLDER / f"{name}.py").read_text())):
        lines = source.splitlines(keepends=True)
        cell = {"cell_type": kind, "id": f"{name}-{number}", "metadata": {}, "source": lines}
        if kind == "code":
            count += 1
            cell |= {"execution_count": count, "outputs": run_cell(source, names)}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    book = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    (FOLDER / f"{name}.ipynb").write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    matplotlib.use("Agg")
    for name in sys.argv[1:] or NOTEBOOKS:
        make_notebook(name)
