"""Executes notebooks and keeps their outputs: printed text, values and plots. It needs no Jupyter, so that a machine
which has none can do it. What a cell writes to standard error stays in the terminal.

    python notebooks/execute.py notebooks/beginner.ipynb ... [--to FOLDER]

Without --to the notebooks themselves are written. One that fails is not written.
"""

import argparse
import ast
import base64
import contextlib
import io
import json
import pathlib
import time


class Outputs(io.TextIOBase):
    """The outputs of cells, in their order. It is their standard output."""

    def __init__(self):
        self.found = []

    def write(self, text):
        if not self.found or self.found[-1]["output_type"] != "stream":
            self.found.append({"name": "stdout", "output_type": "stream", "text": ""})
        self.found[-1]["text"] += text
        return len(text)

    def value(self, value, count):
        data = {"text/plain": [repr(value)]}
        self.found.append({"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"})

    def figures(self):
        """What plt.show() does here: every open figure as a PNG."""
        from matplotlib import pyplot

        for number in pyplot.get_fignums():
            figure, png = pyplot.figure(number), io.BytesIO()
            figure.savefig(png, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
            data = {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": [str(figure)]}
            self.found.append({"data": data, "metadata": {}, "output_type": "display_data"})
            pyplot.close(figure)

    def taken(self):
        """Those since the last time, as notebooks have them: text by lines."""
        found, self.found = self.found, []
        for output in found:
            if output["output_type"] == "stream":
                output["text"] = output["text"].splitlines(keepends=True)
        return found


def run_cell(source, scope, outputs, count, name):
    """Executes a cell, whose last expression is a value that is shown."""
    parsed = ast.parse(source, name)
    last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(outputs):
        exec(compile(parsed, name, "exec"), scope)
        value = eval(compile(ast.Expression(last.value), name, "eval"), scope) if last else None
        if value is not None:
            outputs.value(value, count)


def execute(notebook, name):
    """The notebook with the outputs of this run."""
    scope, outputs = {"__name__": "__main__"}, Outputs()
    try:
        from matplotlib import pyplot
    except ImportError:
        pass  # a notebook that draws nothing needs none
    else:
        pyplot.switch_backend("Agg")  # no window
        pyplot.show = lambda *args, **kwargs: outputs.figures()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, 1):
        run_cell("".join(cell["source"]), scope, outputs, count, f"{name}, cell {count}")
        cell["outputs"], cell["execution_count"] = outputs.taken(), count
    return notebook


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=pathlib.Path, metavar="NOTEBOOK")
    parser.add_argument("--to", type=pathlib.Path, metavar="FOLDER", help="write the executed notebooks there")
    options = parser.parse_args()
    for path in options.notebooks:
        begin = time.monotonic()
        executed = execute(json.loads(path.read_text()), path.name)
        to = options.to / path.name if options.to else path
        to.write_text(json.dumps(executed, indent=1, ensure_ascii=False) + "\n")
        print(f"{to}: {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
