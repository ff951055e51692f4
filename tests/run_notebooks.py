"""Executes the notebooks; as a script it writes their outputs into them, without noise.

`python tests/run_notebooks.py [NAME ...]` refreshes `notebooks/NAME.ipynb`, by default all of them.
"""

import os
import sys
from pathlib import Path

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
TIMEOUT = 600
"""Seconds for one cell; a whole notebook takes under two minutes on an idle machine."""


def execute(path):
    """The executed notebook; the first cell that raises ends it with `CellExecutionError`."""
    import nbformat
    from nbclient import NotebookClient

    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"  # or importing jupyter_core warns
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(NOTEBOOKS)}}
    ).execute()
    return clean(notebook)


def clean(notebook):
    """Remove what differs between two runs, and join what a stream printed in pieces."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined(cell.outputs)
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = None
    return notebook


def _joined(outputs):
    """Neighbouring pieces of one stream become one output."""
    joined = []
    for output in outputs:
        last = joined[-1] if joined else None
        is_stream = output.output_type == "stream" and last is not None
        if is_stream and last.output_type == "stream" and last.name == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def paths(names=()):
    """The notebooks of these names, in order; without names all of them."""
    return sorted(p for p in NOTEBOOKS.glob("*.ipynb") if not names or p.stem in names)


def main():
    import nbformat

    for path in paths(sys.argv[1:]):
        print(path.name)
        nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
