"""Writes the tables of recorded runs in the skill (measured-facts.md) and in the examples; --check only compares.

python3 bench/facts.py [--check]
"""

import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FACTS = ROOT / "skills/adze-kernels/references/measured-facts.md"
HEAD = """# Measured facts

Written by `python3 bench/facts.py` of adze's repository from the runs recorded there. Bandwidths and times belong to
the machine and the date; measure your own before you decide by them.

| fact | value | machine | date | how it was measured |
|---|---|---|---|---|
"""
BENCH = "`adze bench`: cold, in a CUDA graph, verified first"
COMPARE = "`bench/compare_torch.py`: one process, variants take turns, the same cold memory"
CEILINGS = {
    "read": "read",
    "copy": "copy (read + write)",
    "two_reads": "two reads to one write",
    "write": "write",
}
CALLS = ("1x4096 weight", "128x4096 weight", "8192x4096 weight", "32768x4096 weight", "131072x128 weight")
COMPARED = (("rms_norm", "8192x4096"), ("rms_norm", "1x4096"), ("gemm", "1x4096x4096"))
STEPS = ("eager", "eager + graph", "compile", "adze fast + graph", "adze fast + compile")


def newest(kind):
    """The latest run of each machine that has this mark, and what it is about; compare-gemm is not about compare."""
    found = {}
    for path in sorted((ROOT / "bench/results").rglob("*.json")):
        run = json.loads(path.read_text())
        if kind in run and "gpu" in run["machine"] and run["machine"]["gpu"]:
            about = run.get("script"), run.get("model"), run.get("settings", {}).get("batch_size")
            key = (path.parent.name, re.sub(r"-[0-9a-f]{7}$", "", path.stem), *about)
            if key not in found or found[key][1]["date"] < run["date"]:
                found[key] = path.relative_to(ROOT), run
    return found.values()


def bench_facts(path, run):
    if "program" in run:  # a project's: its own op
        for row in run["rows"]:
            name, share = f"{row['op']} {row['dtype']} {row['case']}", f"{100 * row['share']:.0f} % of its ceiling"
            yield f"{name}, chained (PDL)", f"{row['us']:.2f} us, {share}", BENCH
        return
    for key, name in CEILINGS.items():
        yield f"plain loop, {name}", f"{run['ceilings'][key]:.0f} GB/s", BENCH
    for row in run["rows"]:
        if row["op"] == "rms_norm" and row["case"] in CALLS and row["dtype"] == "bf16":
            name = f"rms_norm bf16 {row['case']}"
            yield f"{name}, chained (PDL)", f"{row['us']:.2f} us, {100 * row['share']:.0f} % of its ceiling", BENCH
            if row["rows"] == 1:
                yield f"{name}, alone", f"{row['us_alone']:.2f} us", BENCH


def compare_facts(path, run):
    for row in run["rows"]:
        if (row["op"], row["case"]) in COMPARED and row["dtype"] == "bf16":
            times = ", ".join(f"{name} {us:.2f} us" for name, us in sorted(row["us"].items(), key=lambda kv: kv[1]))
            yield f"{row['op']} bf16 {row['case']}", times, COMPARE


def model_facts(path, run):
    settings = {"batch": run["settings"].get("batch_size"), "context": run["settings"].get("context")}
    model = ", ".join([run["model"], *(f"{name} {value}" for name, value in settings.items() if value)])
    for row in run["rows"]:
        if row["variant"] in STEPS:
            yield (
                f"{model}, {row['what']}, {row['variant']}",
                f"{row['ms']:.2f} ms" + (f", {row['launches']} launches" if "launches" in row else ""),
                f"`bench/{run['script']}.py`, random weights",
            )


def attention_facts(path, run):
    how = "`bench/attention.py`: cold, in CUDA graphs, variants take turns, verified first"
    for row in run["rows"]:
        if row["what"] == "prefill":
            rates = ", ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
            yield f"attention prefill bf16, {row['case']}", f"{rates} TFLOP/s", how
        else:
            times = ", ".join(f"{name} {us:.2f} us" for name, us in row["us"].items())
            yield f"attention decode bf16, {row['case']}", times, how


def sweep_facts(path, run):
    summary = run["summary"]
    how = "`bench/compare_torch.py --sweep`: calls drawn at random from a seed"
    of = f" of {run['settings']['op']}" if "op" in run["settings"] else ""
    yield f"{summary['drawn']} random calls{of}, best peer / adze, median", f"{summary['median']:.2f}", how


KINDS = {
    "adze_bench": bench_facts,
    "adze_compare": compare_facts,
    "adze_attention": attention_facts,
    "adze_models": model_facts,
    "adze_sweep": sweep_facts,
}


def text():
    lines = []
    for kind, facts in KINDS.items():
        for path, run in newest(kind):
            for fact, value, how in facts(path, run):
                where = f"{run['machine']['gpu']} | {run['date'][:10]} | {how}; {path}"
                lines.append(f"| {fact} | {value} | {where} |")
    return HEAD + "\n".join(lines) + "\n"


def times(path, rows, unit):
    """A table of what was timed: rows of (what, {variant: time})."""
    variants = list(dict.fromkeys(variant for _, values in rows for variant in values))
    lines = [f"{path}:", "", f"| | {' | '.join(variants)} |", "|---|" + "---:|" * len(variants)]
    for what, values in rows:
        cells = [f"{values[v]:.2f} {unit}" if v in values else "-" for v in variants]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def attention_tables(models):
    """Prompts in TFLOP/s and decode steps in us, of these models."""
    for path, run in newest("adze_attention"):
        rows = [row for row in run["rows"] if row["model"] in models]
        for what, key, unit in ("prefill", "tflops", "TFLOP/s"), ("decode", "us", "us"):
            found = [(f"attention {row['case']}", row[key]) for row in rows if row["what"] == what]
            if found:
                yield times(path, found, unit)


def project_tables(project):
    """What the project's own benchmark.py recorded: kernels alone, then the model and generate()."""
    for path, run in newest("adze_project"):
        if run["adze_project"] != project:
            continue
        began = run["kernels"] == "adze"
        which = "as `--installed adze` has them, from the same sources" if began else f"from {run['kernels']}"
        yield f"The project's own benchmark.py, kernels alone, then in the model ({which}):"
        yield times(path, [(row["case"], row["us"]) for row in run["rows"]], "us")
        if "end_to_end" in run:
            whole = run["end_to_end"]
            yield times(path, [(f"{whole['model']}, a step", whole["ms"])], "ms")
            made = whole.get("generate")
            parts = {f"prompt of {made['prompt']}": "prompt", "a token": "token"} if made else {}
            ways = {name: way for name, way in made["ways"].items() if name.startswith("generate()")} if made else {}
            rows = [(what, {name: way[key] for name, way in ways.items()}) for what, key in parts.items()]
            if rows:
                yield times(path, rows, "ms")


def example(model, ops, script, attention, project):
    """The kernels alone and the model end to end, as the newest runs have them. What has no run yet has no table."""
    parts = ["Kernels alone, bf16, cold, in a CUDA graph:"]
    for path, run in newest("adze_compare"):
        rows = [(f"{r['op']} {r['case']}", r["us"]) for r in run["rows"] if (r["op"], r["case"]) in ops]
        if rows:
            parts.append(times(path, rows, "us"))
    parts += attention_tables(attention)
    parts.append("End to end, patched by `adze.patch` (random weights):")
    for path, run in newest("adze_models"):
        if run["model"] == model and run["script"] in script and run["settings"].get("batch_size") in (None, 1):
            found = {}
            for row in run["rows"]:
                found.setdefault(row["what"], {})[row["variant"]] = row["ms"]
            parts.append(times(path, list(found.items()), "ms"))
    parts += project_tables(project)
    return "\n\n".join(parts)


EXAMPLES = {
    "examples/ltx_video/README.md": (
        "LTX-Video 2B",
        [
            ("rms_norm", "2048x2048"),
            ("rms_norm", "4096x2048"),
            ("layer_norm + modulate", "4992x2048"),
            ("rope", "512x128"),
        ],
        ["generate_video"],
        ["LTX-Video"],
        "ltx-video-kernels",
    ),
    "examples/qwen3_8b/README.md": (
        "qwen3-8b",
        [
            ("rms_norm", "1x4096"),
            ("rms_norm", "128x4096"),
            ("rms_norm", "8192x4096"),
            ("rms_norm + residual", "1x4096"),
            ("gemm", "1x4096x4096"),
            ("gemm", "16x4096x4096"),
        ],
        ["qwen3", "generate"],
        ["Llama", "Qwen3-8B"],
        "qwen3-8b-kernels",
    ),
}


def documents():
    """{path: its text}"""
    written = {FACTS: text()}
    for name, about in EXAMPLES.items():
        head, _, rest = (ROOT / name).read_text().partition("<!-- results -->")
        written[ROOT / name] = (
            f"{head}<!-- results -->\n{example(*about)}\n<!-- /results -->{rest.partition('<!-- /results -->')[2]}"
        )
    return written


def main():
    for path, said in documents().items():
        if "--check" not in sys.argv:
            path.write_text(said)
        elif path.read_text() != said:
            sys.exit(f"{path.name} is not what the recorded runs say: run python3 bench/facts.py")


if __name__ == "__main__":
    main()
