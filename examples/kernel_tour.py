"""The beginner's notebook in a terminal: what a kernel is, whether it is right, how fast it could be.

python examples/kernel_tour.py
"""

import json
import pathlib

NOTEBOOK = pathlib.Path(__file__).resolve().parent.parent / "notebooks/beginner.ipynb"


class NoPlots:
    """Takes every call of matplotlib's and draws nothing: the curves are printed as a table."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def main():
    scope = {"__name__": "__main__", "plt": NoPlots()}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            print(f"\n{text}\n")
        else:
            code = text.replace("import matplotlib.pyplot as plt\n", "")
            exec(compile(code, str(NOTEBOOK), "exec"), scope)
    print("elements    ", *(f"{name:>12}" for name in scope["curves"]), " GB/s")
    for n, size in enumerate(scope["sizes"]):
        print(f"{size:<12}", *(f"{values[n]:12.1f}" for values in scope["curves"].values()))


if __name__ == "__main__":
    main()
