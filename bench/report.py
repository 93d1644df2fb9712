"""docs/performance.md, and the table of README.md between its two marks, from the recorded runs in bench/results.

python3 bench/report.py            writes both
python3 bench/report.py --check    fails when one of them is stale
"""

import json
import math
import pathlib
import sys

from sweep_report import summary_text, worst

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results -->", "<!-- /results -->"
NAMES = {
    "adze": "adze",
    "eager": "torch eager",
    "torch": "torch function",
    "compile": "torch.compile",
    "liger": "Liger",
    "flash": "flash attention",
    "cudnn": "cuDNN",
    "efficient": "efficient attention",
    "dequantised": "torch eager, dequantised before",
    "int8pack": "torch int8",
}
README_ROWS = 6
OWN = "adze's own"
PARTS = {
    "launch": "cudaLaunchKernelEx, an empty kernel",
    "launch, PDL": "the same, with programmatic dependent launch",
    "launch, PDL, parameters": "the same, with 192 bytes of parameters",
    "C, no elements": "adze_rms_norm from C, no elements (nothing is launched)",
    "C, one row": "adze_rms_norm from C",
    "operator in C++": "an operator in C++ that allocates its output",
    "torch.ops.adze": "torch.ops.adze.rms_norm",
    OWN: "adze's own",
}

INTRO = """# Performance

Written by `python3 bench/report.py` from the runs in [bench/results](../bench/results); over 600 lines, since it has
every row.

`adze bench` verifies each call against its definition and then times it with cold caches: inputs and outputs rotate
through more memory than the cache holds. On a GPU the calls run in a captured CUDA graph. *us* is the time of a
call with programmatic dependent launch, *alone* the time without it. *Spread* is the distance between the
quartiles. *Share* is the share of the ceiling: the bandwidth that plain loops reach in the same run with the same
mix of reads and writes. Comparisons with PyTorch are made in one process. The variants take turns, and all rotate
through the same memory.

The models have random weights. *Error / eager's* is the error of the outputs against the same model in a wider
dtype (float32 for bf16), divided by the error of eager. *Equal* is the share of output elements that have eager's
value; for generate() it is the share of greedy tokens. *Tokens equal* is the share of greedy tokens of a decode of
several tokens. With `numerics="match"` every op rounds where the model rounds. A sum may be added in another order,
so near-ties can fall the other way. One greedy token that differs changes all tokens after it.
"""


def runs():
    """The recorded runs, by folder (a machine) and in the order of their dates."""
    found = {}
    for path in sorted((ROOT / "bench" / "results").glob("*/*.json")):
        run = json.loads(path.read_text())
        run["path"] = path.relative_to(ROOT)
        found.setdefault(path.parent.name, []).append(run)
    for group in found.values():
        group.sort(key=lambda run: run["date"])
    return found


def number(value):
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def percent(share):
    return "-" if share is None else f"{100 * share:.0f} %"


def equal_share(share):
    """A share of equal elements, rounded down: 100 % means all of them."""
    return "100 %" if share == 1 else f"{math.floor(1e4 * share) / 100:.2f} %"


def relative_error(row):
    return f"{row['error'] / max(row['eager_error'], 1e-30):.2f}" if "error" in row else "-"


def table(head, rows):
    left, right = "---", "---:"
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join([left] + [right] * (len(head) - 1)) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def source(run):
    """A project's program names the commit of the adze that it was built with."""
    commit = f"commit {run['commit']}" if "commit" in run else f"commit of adze {run['adze_commit']}"
    return f"[{run['path'].name}](../{run['path']}), {commit}, {run['date'][:10]}"


def called(row):
    """What names the call of a row: its line, or in comparisons the op, the case and the dtype."""
    return row["line"] if "line" in row else (row["op"], row["case"], row["dtype"])


def accuracy(found, row):
    """Cells of a timed call: the share of elements equal to eager's, and the error with eager's in brackets."""
    measured = found.get(called(row))
    if measured is None:
        return ["-", "-"]
    return [equal_share(measured["equal"]), both(measured, "error")]


def both(row, key):
    return f"{row[key]:.2f} ({row['eager_' + key]:.2f})"


def accuracies(recorded):
    """The rows of a machine's newest accuracy run, by what names their calls."""
    newest = [run["rows"] for run in recorded if "adze_accuracy" in run][-1:]
    return {called(row): row for rows in newest for row in rows}


ACCURACY = ["equal to eager", "error, ulp (eager's)"]


def bench_section(run, found):
    machine, ceilings = run["machine"], run["ceilings"]
    gpu = bool(machine["gpu"])
    where = f"{machine['gpu']}, sm_{machine['sm']}, {machine['sm_count']} SMs, driver {run['driver']}"
    if not gpu:
        where = f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads"
    text = f"### {pathlib.Path(run.get('program', 'adze')).name} bench: {where}\n\n{source(run)}."
    if run["clocks"]:
        text += f" Clocks: {run['clocks']}."
    text += (
        f" Ceilings, GB/s: read {ceilings['read']:.5g}, two reads to one write {ceilings['two_reads']:.5g}, "
        f"copy {ceilings['copy']:.5g}, write {ceilings['write']:.5g}.\n\n"
    )
    for op in dict.fromkeys(row["op"] for row in run["rows"]):
        rows = [row for row in run["rows"] if row["op"] == op]
        known = any(called(row) in found for row in rows)
        head = [op, "kernel", "dtype", "us"] + (["alone"] if gpu else []) + ["spread", "GB/s", "share"]
        head += ACCURACY if known else []
        cells = []
        for row in rows:
            cell = [row["case"], row["kernel"], row["dtype"], number(row["us"])]
            cell += [number(row["us_alone"])] if gpu else []
            cell += [f"{100 * row['spread']:.1f} %", number(row["gbps"]), f"{100 * row['share']:.0f} %"]
            cell += accuracy(found, row) if known else []
            cells.append(cell)
        text += table(head, cells) + "\n"
    return text


def compare_table(rows, key, found):
    names = [name for name in NAMES if any(name in row[key] for row in rows)]
    known = any(called(row) in found for row in rows)
    cells = []
    for row in rows:
        peers = {name: us for name, us in row[key].items() if name != "adze"}
        times = [number(row[key].get(name)) for name in names]
        ratio = f"{min(peers.values()) / row[key]['adze']:.2f}"
        cells.append([f"{row['op']} {row['case']} {row['dtype']}", *times, ratio])
        cells[-1] += accuracy(found, row) if known else []
    head = ["us", *[NAMES[name] for name in names], "best peer / adze"]
    return table(head + (ACCURACY if known else []), cells)


def compare_section(run, found):
    machine = run["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    text = f"### Compared with PyTorch {machine['torch']}: {where}\n\n{source(run)}.\n\n"
    reused = [row for row in run["rows"] if "us_reused" in row]
    if reused:
        text += "As a user calls it, with a fresh output (page faults are part of it):\n\n"
    text += compare_table(run["rows"], "us", found) + "\n"
    if reused:
        text += "Into memory that was used before:\n\n" + compare_table(reused, "us_reused", found) + "\n"
    return text


def models_section(run):
    """Whole models and blocks: a step's wall time, the GPU's share of it, the share of outputs that are equal to
    eager's, and the error against the same model in a wider dtype relative to eager's error."""
    machine = run["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    context = run["settings"].get("context")
    model = f"{run['model']}, context {context}" if context else run["model"]
    text = f"### {model}, {pathlib.Path(run['script']).stem}: {where}\n\n{source(run)}.\n\n"
    eager = {row["what"]: row["ms"] for row in run["rows"] if row["variant"] == "eager"}
    tokens = any("whole_equal" in row for row in run["rows"])
    cells = []
    for row in run["rows"]:
        ratio = f"{eager[row['what']] / row['ms']:.2f}" if row["what"] in eager else "-"
        cells.append([f"{row['what']}, {row['variant']}", number(row["ms"]), f"{100 * row['spread']:.1f} %", ratio])
        cells[-1] += [number(row.get("busy_ms")), str(row.get("launches", "-"))]
        cells[-1] += [relative_error(row), percent(row.get("equal"))]
        cells[-1] += [percent(row.get("whole_equal"))] if tokens else []
    head = ["step", "ms", "spread", "eager / it", "GPU ms", "launches", "error / eager's", "equal"]
    text += table(head + (["tokens equal"] if tokens else []), cells)
    text += "".join(kernels_table(row) for row in run["rows"] if "kernels" in row)
    return text + "".join(f"\nLeft out: {x['what']}, {x['variant']}: {x['reason']}\n" for x in run["left_out"]) + "\n"


def kernels_table(row):
    """Where the GPU's time goes in a step: the kernels that have a hundredth of it or more."""
    whole = sum(kernel["us"] for kernel in row["kernels"])
    shares = [(kernel["kernel"], kernel["us"] / whole) for kernel in row["kernels"]]
    cells = [[name, percent(share)] for name, share in shares if share >= 0.01]
    return f"\n{row['what']}, {row['variant']}:\n\n" + table(["kernel", "share of the GPU's time"], cells)


ATTENTION_INTRO = """\
Both are verified against float64 first. The calls are cold and in captured graphs. *torch* is the backend that
PyTorch chooses by itself. A backend that does not take a call has no value. *fp8 cache*: keys and values of 8 bits.
"""


def attention_section(run):
    """Prompts and decode steps, against the backends of torch's attention."""
    machine = run["machine"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    text = f"### Attention compared with PyTorch {machine['torch']}: {where}\n\n{source(run)}."
    text += f" Driver {run['driver']}, clocks: {run['clocks']}." if run["clocks"] else ""
    text += f"\n\n{ATTENTION_INTRO}\n"
    for what, key, unit in ("prefill", "tflops", "TFLOP/s"), ("decode", "us", "us"):
        rows = [row for row in run["rows"] if row["what"] == what]
        names = list(dict.fromkeys(name for row in rows for name in row[key]))
        cells = [
            [f"{row['case']} ({row['model']})", *(number(row[key].get(name)) for name in names)]
            + ([number(row["gbps"])] if what == "decode" else [])
            + [f"{row['ratio']:.2f}"]
            for row in rows
        ]
        head = [f"{unit}, {what}", *names, *(["adze, GB/s"] if what == "decode" else []), "best peer / adze, time"]
        text += table(head, cells) + "\n" if cells else ""
    return text


CPU_INTRO = """\
Both are verified against float64 first, and the least time of each in turns counts. *Share* is the share of the
bandwidth that plain reads of as much memory reach, for calls that memory limits.
"""


def cpu_section(run):
    """Products and attention on a CPU, against torch's."""
    machine = run["machine"]
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] > 1 else "")
    text = f"### Products and attention compared with PyTorch {machine['torch']}: {machine['cpu']}, {threads}\n\n"
    text += f"{source(run)}.\n\n{CPU_INTRO}\n"
    cells = [
        [f"{row['op']}, {row['case']}", row["dtype"], number(row["us"]["adze"]), number(row["us"]["torch"])]
        + [number(row.get("gbps")), percent(row.get("share")), f"{row['ratio']:.2f}"]
        for row in run["rows"]
    ]
    return text + table(["call", "dtype", "adze, us", "torch, us", "GB/s", "share", "torch / adze"], cells) + "\n"


def project_section(run):
    """A project that `adze new project` made: what its benchmark.py says."""
    machine = run["machine"]
    where = machine.get("gpu") or machine["cpu"]
    text = f"### {run['adze_project']}, benchmark.py: {where}\n\n{source(run)}, PyTorch {machine['torch']}, "
    text += f"kernels from {run['kernels']}.\n\n"
    names = list(dict.fromkeys(name for row in run["rows"] for name in row["us"]))
    cells = [[row["case"], *(number(row["us"].get(name)) for name in names)] for row in run["rows"]]
    text += table(["us", *names], cells) + "\n"
    whole = run.get("end_to_end")
    if whole:
        text += (
            table(["ms", *whole["ms"]], [[f"{whole['model']}, a step", *map(number, whole["ms"].values())]]) + "\n"
        )
    if whole and "generate" in whole:
        made = whole["generate"]
        cells = [
            [name, number(way["prompt"]), number(way["token"]), percent(way["equal"])]
            for name, way in made["ways"].items()
            if name.startswith("generate()")  # what has the project's kernels; generate.py has the others
        ]
        text += table(["ms", f"prompt of {made['prompt']}", "a token", "tokens equal"], cells) + "\n"
    return text


def sweep_section(run):
    """The slowest of the random calls, relative to their peers, and how many miss the targets."""
    machine, settings = run["machine"], run["settings"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    what = f"calls of {settings['op']}" if "op" in settings else "calls"
    text = f"### Random {what} compared with PyTorch {machine['torch']}: {where}\n\n{source(run)}."
    if run["clocks"]:
        text += f" Driver {run['driver']}, clocks: {run['clocks']}."
    text += f" Seed {settings['seed']}, copy {run['copy_gbps']:.5g} GB/s."
    if any("compile" in row.get("us", {}) for row in run["rows"]):
        text += f" torch.compile is {'with' if settings['tuned'] else 'without'} max_autotune."
    text += f"\n\n{summary_text(run['summary'])}\n\n"
    cells = []
    for row in worst(run["rows"]):
        cell = [f"`{row['line']}`", "yes" if row["aligned"] else "no"]
        if "ratio" in row:
            cell += [number(row["us"]["adze"]), f"{number(row['us'][row['best']])} ({NAMES[row['best']]})"]
            cell += [f"{100 * row['share']:.0f} %", f"{row['ratio']:.2f}"]
        else:
            cell += ["-", "-", "-", "-" if row["error"] <= 1 else "wrong"]
        cells.append(cell)
    head = [f"the {len(cells)} worst, us", "rows aligned to 16 bytes", "adze", "best of the others", "share of copy"]
    return text + table([*head, "best peer / adze"], cells) + "\n"


ACCURACY_INTRO = """\
adze as `adze.patch` calls it and the model's own torch code, both compared with the same formula in float64. Inputs
have the statistics of activations: heavy tails, outlier channels of 50 to 100 times the others' size, one row in 16
of a thousandth of the others' norm. *Equal* is the share of elements that are equal to eager's. *Error* is the root
mean square of the difference from float64 and *max* the largest difference, in units in the last place (ulp) of the
dtype; eager's are in brackets. Where an element is smaller than the mean of its row, the ulp is that of the mean.
The tables of times have the same columns for the calls that they list. Those calls round as their lines say. A call
without `rounding` rounds once, as with `numerics="fast"`: its error is smaller than eager's, and fewer elements are
equal.
"""


def accuracy_section(run):
    """Calls of models, and the log-probability of a text."""
    machine, settings = run["machine"], run["settings"]
    where = machine.get("gpu") or f"{machine['cpu']}, {machine['threads']} threads"
    text = f"### Accuracy, PyTorch {machine['torch']}: {where}\n\n{source(run)}.\n\n{ACCURACY_INTRO}\n"
    cells = [
        [row["model"], row["dtype"], equal_share(row["equal"]), both(row, "error"), both(row, "max")]
        for row in run["rows"]
        if "model" in row
    ]
    text += table(["call", "dtype", "equal", "error (eager's)", "max (eager's)"], cells)
    text += (
        f"\nThe log-probability of a text ({settings['text']}, {settings['bytes']} bytes) under a small Llama, "
        "trained on the bytes of the other documents of this repository. *Difference* is the mean log-probability of "
        "a byte minus that of eager in float32, in nats. *Error of a byte* is the root mean square of that "
        "difference over the bytes. *Greedy* is the share of positions at which the most probable byte is the "
        "same.\n\n"
    )
    cells = [
        [
            f"{row['dtype']}, {row['variant']}",
            f"{row['bits']:.4f}",
            f"{row['difference']:+.1e}",
            f"{row['error']:.1e}",
        ]
        + [equal_share(row["greedy_equal"]), equal_share(row["greedy_equal_f32"])]
        for row in run["texts"]
    ]
    head = ["text", "bits per byte", "difference", "error of a byte", "greedy, as eager of the dtype"]
    return text + table([*head, "greedy, as float32"], cells) + "\n"


def host_section(run):
    """What a call costs the host: adze's operator, an operator in C++, and adze's Python function."""
    machine, rows = run["machine"], run["rows"]
    where = f"{machine['cpu']}, tensors on the {'GPU' if 'gpu' in machine else 'CPU'}"
    text = f"### Host cost of a call, PyTorch {machine['torch']}: {where}\n\n{source(run)}. Median of processes.\n\n"
    cells = [
        [row["case"], *(f"{row[key]:.0f}" for key in ("C++", "adze", "function")), f"{row['ratio']:.2f}"]
        for row in rows
    ]
    text += table(["ns", "operator in C++", "torch.ops.adze", "adze.rms_norm", "adze / C++"], cells) + "\n"
    if "parts" not in run:
        return text
    parts = run["parts"]
    text += table(
        ["one row, in parts", "ns"], [[PARTS[name], f"{parts[name]:.0f}"] for name in PARTS if name in parts]
    )
    launch = parts.get("launch, PDL, parameters")
    taken = f"{parts['operator in C++']:.0f} are what an operator in C++ takes that launches nothing"
    taken += f", {launch:.0f} are the launch" if launch else ""
    return text + (
        f"\nOf the {parts['torch.ops.adze']:.0f} ns of torch.ops.adze {taken}: adze's own are {parts[OWN]:.0f}, "
        f"{100 * parts[OWN] / parts['torch.ops.adze']:.0f} %.\n\n"
    )


def performance(found):
    text = INTRO
    for group, recorded in found.items():
        text += f"\n## {group}\n\n"
        known = accuracies(recorded)
        for run in recorded:
            if "adze_host_cost" in run:
                text += host_section(run)
            elif "adze_sweep" in run:
                text += sweep_section(run)
            elif "adze_accuracy" in run:
                text += accuracy_section(run)
            elif "adze_attention" in run:
                text += attention_section(run) if "what" in run["rows"][0] else ""
            elif "adze_project" in run:
                text += project_section(run)
            elif "adze_cpu" in run:
                text += cpu_section(run)
            elif "adze_models" in run:
                text += models_section(run) if "ms" in run["rows"][0] else ""
            else:
                text += compare_section(run, known) if "adze_compare" in run else bench_section(run, known)
    if not found:
        text += "\nNo run is recorded yet.\n"
    return text.rstrip() + "\n"


def readme_table(found):
    """Steps of models, then the newest comparison of several ops: on a GPU, or on a CPU where that is all."""
    compared = [(run, group) for group in found.values() for run in group if "adze_compare" in run]
    several = {id(run): len({row["op"] for row in run["rows"]}) > 1 for run, _ in compared}
    compared.sort(key=lambda pair: ("gpu" in pair[0]["machine"], several[id(pair[0])], pair[0]["date"]))
    if not compared:
        return ""
    run, group = compared[-1]
    machine, rows = run["machine"], [row for row in run["rows"] if "best" in row]
    chosen = [rows[i * len(rows) // README_ROWS] for i in range(README_ROWS)] if len(rows) > README_ROWS else rows
    where, measured, cells = machine.get("gpu") or machine["cpu"], accuracies(group), []
    known = any(called(row) in measured for row in chosen)
    for row in chosen:
        best = f"{number(row['us'][row['best']])} ({NAMES[row['best']]})"
        eager = number(row["us"].get("eager", row["us"].get("torch")))
        cells.append(
            [f"{row['op']} {row['case']}", number(row["us"]["adze"]), best, eager, f"{row['ratio']:.2f}x"],
        )
        cells[-1] += accuracy(measured, row) if known else []
    head = [f"us, {where}, {rows[0]['dtype']}", "adze", "best of the others", "torch eager", "best / adze"]
    head += ACCURACY if known else []
    models = "".join(part + "\n" for part in (models_table(found), generate_table(found)) if part)
    return models + table(head, cells) + text_sentence(group)


def text_sentence(recorded):
    """The log-probability of a text with and without adze.patch, of a machine's newest accuracy run."""
    runs = [run for run in recorded if "adze_accuracy" in run]
    if not runs:
        return ""
    bits = {(row["dtype"], row["variant"]): f"{row['bits']:.4f}" for row in runs[-1]["texts"]}
    return (
        f"\nA text has {bits['bf16', 'adze']} bits per byte under a small Llama in bf16 with `adze.patch`, "
        f"{bits['bf16', 'eager']} without it, and {bits['f32', 'eager']} in float32\n"
        "([how the accuracy was measured](docs/performance.md)).\n"
    )


def models_table(found):
    """Steps of whole models on a GPU in the variants that users choose from. A step is shown where plain adze.patch
    and its strongest peer, torch.compile, were timed in the same run; adze.generate has a table of its own. The error
    is that of plain adze.patch."""
    columns = {
        "eager": "eager",
        "adze": "adze.patch",
        "compile": "torch.compile",
        "adze + compile": "adze.patch + torch.compile",
        "adze + graph": "adze.patch + adze.graph",
        "adze fast + graph": 'the same, numerics="fast"',
    }
    needed = {"eager", "adze", "compile"}
    runs = [run for group in found.values() for run in group if "adze_models" in run and "gpu" in run["machine"]]
    cells, where = [], ""
    for run in runs:
        steps = {}
        for row in run["rows"]:
            steps.setdefault(row["what"], {})[row["variant"]] = row
        for what, variants in steps.items():
            ms = {variant: row.get("ms") for variant, row in variants.items()}
            if ms.keys() >= needed and "adze.generate" not in ms:
                batch = run["settings"].get("batch_size")
                name = f"{run['model']}, {f'a step, batch {batch}' if batch else what}"
                cells.append([name, *(number(ms.get(variant)) for variant in columns)])
                cells[-1].append(relative_error(variants["adze"]))
                where = run["machine"]["gpu"]
    return table([f"ms, {where}", *columns.values(), "error / eager's"], cells) if cells else ""


def generate_table(found):
    """Language models through adze.generate, where it was timed against transformers' own generate()."""
    columns = {
        "eager": "generate()",
        "compile": "generate(), static cache, compiled",
        "adze fast": 'generate(), adze.patch(numerics="fast")',
        "adze.generate": "adze.generate",
        "adze.generate, int8": "the same, int8",
        "adze.generate, int4-g128": "the same, int4-g128",
    }
    runs = [run for group in found.values() for run in group if run.get("script") == "generate"]
    steps, where = {}, ""
    for run in runs:
        of_run, context = {}, run["settings"].get("context")
        for row in run["rows"]:
            what = row["what"].removeprefix("generate(), ")
            what += "" if what.startswith("prompt of") else f", context {context}"
            of_run.setdefault(f"{run['model']}, {what}", {})[row["variant"]] = row.get("ms")
        for what, ms in of_run.items():
            # of two runs the one with more peers, then the later one
            if "adze.generate" in ms and len(ms) >= len(steps.get(what, ())):
                steps[what], where = ms, run["machine"]["gpu"]
    cells = [[what, *(number(ms.get(variant)) for variant in columns)] for what, ms in steps.items()]
    return table([f"ms, {where}", *columns.values()], cells) if cells else ""


def main():
    found = runs()
    readme = (ROOT / "README.md").read_text()
    if BEGIN not in readme or END not in readme:
        raise SystemExit(f"README.md has no {BEGIN} ... {END}")
    before, after = readme.split(BEGIN)[0], readme.split(END)[1]
    wanted = {
        ROOT / "docs" / "performance.md": performance(found),
        ROOT / "README.md": f"{before}{BEGIN}\n{readme_table(found)}{END}{after}",
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python3 bench/report.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
