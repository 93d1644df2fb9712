"""The beginner's notebook in a terminal: what a kernel is, whether it is right, how fast it could be.

python examples/kernel_tour.py
"""

import json
import pathlib

NOTEBOOK = pathlib.Path(__file__).resolve().parent.parent / "notebooks/beginner.ipynb"


def main():
    """Runs the cells of the notebook. Its plots are printed as tables instead."""
    scope = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            print(f"\n{text}\n")
        else:
            code = "\n".join(
                line for line in text.splitlines() if not line.lstrip().startswith(("plt.", "import matplotlib"))
            )
            exec(compile(code, str(NOTEBOOK), "exec"), scope)
    print("elements    ", *(f"{name:>12}" for name in scope["curves"]), " GB/s")
    for n, size in enumerate(scope["sizes"]):
        print(f"{size:<12}", *(f"{values[n]:12.1f}" for values in scope["curves"].values()))


if __name__ == "__main__":
    main()
