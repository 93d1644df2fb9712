"""Builds build/site from docs/ with mkdocs: `make site` calls it. The pages are readable without it.

Links that leave docs/ lead to the repository, and pictures of recorded runs are drawn from bench/results.
"""

import html
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build/site-src"
REPOSITORY = "https://github.com/adze-kernels/adze/blob/main"
TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES = {path.name for path in (ROOT / "docs").glob("*.md")} | set(TOP.values())


def link(target, folder):
    """Where a link of a page leads in the site."""
    if re.match(r"\w+:|#", target):
        return target
    path, mark, part = target.partition("#")
    full = (folder / path).resolve()
    own = str(full.relative_to(ROOT)) if full.is_relative_to(ROOT) else path
    page = TOP.get(own) or (full.name if full.parent == ROOT / "docs" and full.name in PAGES else None)
    return f"{page}{mark}{part}" if page else f"{REPOSITORY}/{own}{mark}{part}"


def page(path):
    text = path.read_text()
    return re.sub(r"\]\(([^)\s]+)\)", lambda found: f"]({link(found[1], path.parent)})", text)


def bars(rows, unit, title):
    """A picture of horizontal bars: rows are (name, value)."""
    most, height = max(value for _, value in rows), 22
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{height * len(rows) + 40}"',
        f'font-family="sans-serif" font-size="12"><text y="16" font-weight="bold">{html.escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(rows):
        y = 30 + number * height
        color = "#2a6f97" if "adze" in name else "#a9b4bd"
        lines.append(
            f'<text x="0" y="{y + 13}">{html.escape(name)}</text>'
            f'<rect x="260" y="{y}" width="{400 * value / most:.1f}" height="16" fill="{color}"/>'
            f'<text x="{268 + 400 * value / most:.1f}" y="{y + 13}">{value:.1f} {unit}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def pictures():
    """One of each recorded model: its variants and their times; and the share of the ceiling of each norm."""
    made = []
    for path in sorted((ROOT / "bench/results").rglob("*.json")):
        run = json.loads(path.read_text())
        name = f"{path.parent.name}-{path.stem}.svg"
        where = f"{run['machine'].get('gpu') or 'CPU'}, {run['date'][:10]}"
        if "adze_models" in run:
            for number, what in enumerate(dict.fromkeys(row["what"] for row in run["rows"])):
                rows = [(row["variant"], row["ms"]) for row in run["rows"] if row["what"] == what]
                file = name.replace(".svg", f"-{number}.svg")
                (WORK / file).write_text(bars(rows, "ms", f"{run['model']}, {what} ({where})"))
                made.append((file, f"{run['model']}, {what}", path))
            for number, row in enumerate(row for row in run["rows"] if "kernels" in row):
                title = f"{run['model']}, {row['what']}, {row['variant']}: the GPU's time"
                whole = sum(kernel["us"] for kernel in row["kernels"])
                rows = [(kernel["kernel"], 100 * kernel["us"] / whole) for kernel in row["kernels"][:12]]
                file = name.replace(".svg", f"-kernels-{number}.svg")
                (WORK / file).write_text(bars(rows, "%", f"{title} ({where})"))
                made.append((file, title, path))
        elif "adze_bench" in run:
            ops = [row["op"] for row in run["rows"]]
            op = "rms_norm" if "rms_norm" in ops else ops[0]
            rows = [(f"adze {row['case']}", 100 * row["share"]) for row in run["rows"] if row["op"] == op]
            (WORK / name).write_text(bars(rows, "%", f"{op}, share of the copy ceiling ({where})"))
            made.append((name, f"{op}, share of the ceiling", path))
    return made


def main():
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    for path in (ROOT / "docs").glob("*.md"):
        (WORK / path.name).write_text(page(path))
    for name, target in TOP.items():
        (WORK / target).write_text(page(ROOT / name))
    drawn = "\n\n".join(
        f"![{what}]({file})\n\n[{path.name}]({REPOSITORY}/{path.relative_to(ROOT)})"
        for file, what, path in pictures()
    )
    performance = WORK / "performance.md"
    performance.write_text(performance.read_text().replace("\n## ", f"\n## Pictures\n\n{drawn}\n\n## ", 1))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", ROOT / "mkdocs.yml"]
    sys.exit(subprocess.run([*map(str, command)]).returncode)


if __name__ == "__main__":
    main()
