"""Opens a page in the size of a phone: it must fill a screenshot, log nothing on the console and never scroll
sideways. Its filters must leave the rows that were picked, and `adze run` must accept the command of each row.

python3 tests/page.py CHROMIUM PAGE.html build/adze
"""

import html
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

WIDTH, HEIGHT = 390, 844
# A window of a headless browser cannot be this narrow; a frame in it can.
FRAME = """<!doctype html><iframe id=f src="{page}" width={width} height={height} style="border:0"></iframe>
<script>f.onload = () => {{ const e = f.contentDocument.documentElement;
const all = [...e.querySelectorAll("tr[data-op]")], selects = [...e.querySelectorAll("select")];
const shown = () => all.filter(row => row.getClientRects().length);
let wrong = selects.length === 3 ? 0 : 1;
for (const select of selects) {{
  const name = select.name, values = [...select.options].map(o => o.value).filter(v => v);
  for (const value of values) {{
    select.value = value; select.onchange();
    const due = all.filter(row => row.dataset[name] === value);
    wrong += !due.length || shown().length !== due.length || !due.every(row => row.getClientRects().length);
  }}
  select.value = ""; select.onchange();
}}
wrong += shown().length !== all.length;
document.title = "measured " + e.scrollWidth + " " + e.scrollHeight + " " + all.length + " " + wrong; }}</script>"""


def browse(chromium, profile, *arguments):
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    common += ["--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=3000"]
    command = [chromium, *common, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, errors="replace")


def commands(page, adze):
    """The rows' commands that `adze run` does not take. It reads the line before it looks for the device."""
    bad = []
    for text in re.findall(r"<tr id=.*?<code>(.*?)</code>", page):
        words = shlex.split(html.unescape(text))
        run = subprocess.run([adze, "run", "--device", "999", words[-1]], capture_output=True, text=True)
        if words[:3] != ["adze", "run", "--device"] or len(words) != 5 or "no CUDA device 999" not in run.stderr:
            bad.append(f"{text}: {run.stderr.strip()}")
    return bad


def main(chromium, page, adze):
    page = pathlib.Path(page).resolve()
    shot = page.with_suffix(".png")
    shot.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=page.parent) as work:
        frame = pathlib.Path(work, "frame.html")
        frame.write_text(FRAME.format(page=page.as_uri(), width=WIDTH, height=HEIGHT))
        seen = browse(chromium, work, "--dump-dom", frame.as_uri())
        drawn = browse(chromium, work, f"--screenshot={shot}", "--window-size=1200,1600", page.as_uri())
    measured = re.search(r"measured (\d+) (\d+) (\d+) (\d+)", seen.stdout)
    width, height, rows, wrong = map(int, measured.groups()) if measured else (0, 0, 0, 0)
    bad = commands(page.read_text(), adze)
    dots = re.findall(r"<a href=\"#row(\d+)\"[^>]*><circle[^>]*><title>(.*?)</title>", page.read_text())
    console = re.findall(r".*CONSOLE.*", seen.stderr + drawn.stderr)
    verdicts = [
        (height > 100, f"the page is {height} high" if measured else "the page did not load: " + seen.stderr[-500:]),
        (0 < width <= WIDTH, f"the page is {width} wide on a screen of {WIDTH}"),
        (rows > 0 and wrong == 0, f"{wrong} choices of a filter show other rows than theirs, of {rows}"),
        (not bad, "commands that adze run does not take: " + "; ".join(bad)),
        (len(dots) == 2 * rows and all(name.strip() for _, name in dots), "a dot has no name, or leads to no row"),
        (not console, "the console says: " + " ".join(console)),
        (shot.exists() and shot.stat().st_size > 20000, "the screenshot is empty"),
        (not re.search(r"""(src|href)=["']?(https?:)?//""", page.read_text()), "the page asks for what is not in it"),
    ]
    failures = [what for good, what in verdicts if not good]
    print(*failures, f"{len(verdicts) - len(failures)} passed, {len(failures)} failed", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
