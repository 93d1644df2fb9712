"""Looks at a page as a phone does: it must fill a screenshot, say nothing on the console and never scroll sideways.

python3 tests/page.py CHROMIUM PAGE.html
"""

import pathlib
import re
import subprocess
import sys
import tempfile

WIDTH, HEIGHT = 390, 844
# A window of a headless browser cannot be this narrow; a frame in it can.
FRAME = """<!doctype html><iframe id=f src="{page}" width={width} height={height} style="border:0"></iframe>
<script>f.onload = () => {{ const e = f.contentDocument.documentElement;
document.title = "measured " + e.scrollWidth + " " + e.scrollHeight; }}</script>"""


def browse(chromium, profile, *arguments):
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    common += ["--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=3000"]
    command = [chromium, *common, f"--user-data-dir={profile}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, errors="replace")


def main(chromium, page):
    page = pathlib.Path(page).resolve()
    shot = page.with_suffix(".png")
    shot.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=page.parent) as work:
        frame = pathlib.Path(work, "frame.html")
        frame.write_text(FRAME.format(page=page.as_uri(), width=WIDTH, height=HEIGHT))
        seen = browse(chromium, work, "--dump-dom", frame.as_uri())
        drawn = browse(chromium, work, f"--screenshot={shot}", "--window-size=1200,1600", page.as_uri())
    measured = re.search(r"measured (\d+) (\d+)", seen.stdout)
    width, height = map(int, measured.groups()) if measured else (0, 0)
    console = re.findall(r".*CONSOLE.*", seen.stderr + drawn.stderr)
    verdicts = [
        (height > 100, f"the page is {height} high" if measured else "the page did not load: " + seen.stderr[-500:]),
        (0 < width <= WIDTH, f"the page is {width} wide on a screen of {WIDTH}"),
        (not console, "the console says: " + " ".join(console)),
        (shot.exists() and shot.stat().st_size > 20000, "the screenshot is empty"),
        (not re.search(r"""(src|href)=["']?(https?:)?//""", page.read_text()), "the page asks for what is not in it"),
    ]
    failures = [what for good, what in verdicts if not good]
    print(*failures, f"{len(verdicts) - len(failures)} passed, {len(failures)} failed", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
