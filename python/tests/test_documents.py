"""Code blocks, commands and figures of the skill and of docs/: blocks compile or run, commands name what there is,
figures are those of a recorded run, of a commit, or of a cited document."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ADZE = ROOT / "build/adze"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
EXAMPLES = sorted((ROOT / "examples").glob("*/README.md"))
DOCS = [*sorted((ROOT / "docs").glob("*.md")), *EXAMPLES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PRELUDES = {  # what a block of Python finds; the words of its fence name them
    "": "import torch, adze\n",
    "transformers": """import torch, transformers
config = transformers.LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, eos_token_id=None, pad_token_id=0)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
""",
    "diffusers": f"""import sys, torch, adze
sys.path.insert(0, {str(ROOT / "examples")!r})
import diffusers_injection
model, step = diffusers_injection.random_ltx(torch.float32, "cpu")
""",
}
PRELUDES["kernels"] = PRELUDES[""]
PRELUDES["kernels-layers"] = PRELUDES["transformers"]
PRELUDES["docs/python.md"] = PRELUDES["transformers"] + "import adze\n"
PRELUDES["docs/generate.md"] = PRELUDES["transformers"]


def installed_skill(folder):
    subprocess.run([ADZE, "skills", "add", "--dest", folder], check=True, capture_output=True)
    return folder / "adze-kernels"


@pytest.fixture(scope="session")
def skill(tmp_path_factory):
    return installed_skill(tmp_path_factory.mktemp("skill"))


def fenced(text):
    """(words of the fence, code) of each block; blocks in lists are indented."""
    for found in re.finditer(r"^( *)```([^\n`]*)\n(.*?)^\1```", text, re.M | re.S):
        yield found[2].split(), textwrap.dedent(found[3])


def blocks():
    """Those of the skill, as it is in the tree, and of docs/: (name, words, code)."""
    for path in [*sorted((ROOT / "skills").rglob("*.md")), *DOCS]:
        for number, (words, code) in enumerate(fenced(path.read_text())):
            yield f"{path.relative_to(ROOT)}:{number}", words, code


PYTHON = [(name, words, code) for name, words, code in blocks() if words and words[0] == "python"]


def prelude(name, words):
    return PRELUDES[words[1]] if len(words) > 1 else PRELUDES.get(name.partition(":")[0], PRELUDES[""])


# Imports what documents need, then runs each in a process forked from there: a line of the input has its folder and
# its script, and the line that answers its exit status.
FORKING = """
import json, os, sys
warm = json.loads(sys.stdin.readline())
for code in warm:
    try:
        exec(code, {})
    except ImportError:
        pass
for line in sys.stdin:
    folder, script = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        said = os.open("said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        exec(script, {})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def runs():
    """runs(folder, script) is the exit status and the output of a script of Python."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    forking = subprocess.Popen(
        [sys.executable, "-c", FORKING], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def send(*words):
        print(json.dumps(words), file=forking.stdin, flush=True)

    def run(folder, script):
        send(str(folder), script)
        return int(forking.stdout.readline()), (folder / "said").read_text()

    with forking:
        send(*PRELUDES.values())
        yield run
        forking.stdin.close()


@pytest.mark.parametrize("document", sorted({name.partition(":")[0] for name, _, _ in PYTHON}))
def test_python(document, tmp_path, runs):
    """The blocks of a document run one after the other, each with its prelude, in one process."""
    pytest.importorskip("torch")
    mine = [block for block in PYTHON if block[0].partition(":")[0] == document]
    for name, _, code in mine:
        compile(code, name, "exec")
    run = [block for block in mine if "gpu" not in block[1] and "from_pretrained(" not in block[2]]
    for module in ("transformers", "diffusers", "kernels"):
        if any(module in "".join(words[1:]) for _, words, _ in run):
            pytest.importorskip(module)
    if any("build/hub/adze" in code for _, _, code in run):
        hub = [
            "B=build/hub-cpu",
            "K=build",
            "CUDA=0",
            f"HUB={tmp_path / 'build/hub/adze'}",
            f"HUB_PY={sys.executable}",
        ]
        clean = {
            name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
        }
        subprocess.run(["make", "-C", ROOT, *hub, "hub-backend"], check=True, capture_output=True, env=clean)
    script = "".join(
        f"\nscope = {{}}\nexec(compile({prelude(name, words) + code!r}, {name!r}, 'exec'), scope)\n"
        for name, words, code in run
    )
    status, said = runs(tmp_path, script)
    assert status == 0, said[-3000:]


def test_c_of_docs(tmp_path):
    for name, words, code in blocks():
        if words[:1] == ["c"] and "sources" not in words:
            whole = f"#include <adze.h>\n#include <stdio.h>\nint main(void)\n{{\n{code}\n}}\n"
            source = tmp_path / "block.c"
            source.write_text(code if "main(" in code else whole)
            flags = ["-std=c11", "-Wall", "-Wextra", "-Wno-unused", "-fsyntax-only", "-Iinclude"]
            done = subprocess.run(["cc", *flags, source], cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, f"{name}: {done.stderr}"


def test_what_is_cut_is_in_the_sources(skill):
    """Blocks of the installed skill are lines of files that the build compiles; none has a `cut` left."""
    sources = {}
    for path in sorted(ROOT.glob("skills/*/references/*.md")):
        for words, code in fenced(path.read_text()):
            if "sources" in words:
                assert all(line.startswith("cut ") for line in code.splitlines()), f"{path}: pasted code"
                for line in code.splitlines():
                    sources.setdefault(line.split()[1], None)
    assert len(sources) >= 8
    everything = "".join((ROOT / path).read_text() for path in sources)
    checked = 0
    for path in sorted((skill / "references").glob("*.md")):
        for words, code in fenced(path.read_text()):
            if "sources" in words:
                for part in code.split("\n\n"):
                    assert part.strip() in everything, f"{path.name}: {part}"
                    checked += 1
    assert checked >= 15


def test_cuda_sources_of_the_templates_compile(tmp_path):
    """The files that templates are cut from, in one translation unit for each dtype's instances."""
    if not NVCC:
        pytest.skip("nvcc is not here")
    text = (ROOT / "skills/adze-kernels/references/kernel-templates.md").read_text()
    headers = sorted(set(re.findall(r"^cut src/cuda/(\w+\.cuh) ", text, re.M)))
    unit = "".join(f'#include "{header}"\n' for header in headers)
    unit += """
template <typename T>
__global__ void each(T *p)
{
    unit<T, VEC<T>> u;
    u.fetch(p);
    float f[VEC<T>];
    u.get(f);
    for (float &v : f)
        v = warp_sum<32>(act_gelu<sizeof(T) == 2>(v)) + warp_max<32>(v);
    u.set(f);
    u.put(p);
}
template __global__ void each<float>(float *);
template __global__ void each<f16>(f16 *);
template __global__ void each<bf16>(bf16 *);
"""
    source = tmp_path / "templates.cu"
    source.write_text(unit)
    flags = ["-std=c++17", "-arch=sm_90a", "-cubin", "-DADZE_CUDA=1", "-Iinclude", "-Isrc", "-Isrc/cuda"]
    done = subprocess.run(
        [NVCC, *flags, source, "-o", tmp_path / "templates.cubin"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


# ---- Commands ----

TARGETS = set(
    re.findall(
        r"^([a-z][a-z-]*)(?: [a-z-]+)*:(?!=)",
        (ROOT / "Makefile").read_text() + (ROOT / "templates/project.mk").read_text(),
        re.M,
    )
)
TOOLS = set("pip nsys ncu cuobjdump export cd git uv cc vllm kernels jetson_clocks nvpmodel".split())


def commands(text):
    """Lines of sh blocks and of indented blocks that begin with a word of a shell."""
    for words, code in fenced(text):
        if words[:1] == ["sh"]:
            yield from ((line, "gpu" not in words) for line in code.splitlines() if line.strip())
    plain = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    for block in re.findall(r"(?:^|\n\n)((?:    [^ \n].*\n)+)", plain):
        for line in textwrap.dedent(block).splitlines():
            if re.match(r"(make|tests/|python3? |pip |adze |build/|\w+=\S* )", line):
                yield line, False


def named(line):
    """What a command names that is not there."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"^\w+=", words[0]):
        words.pop(0)
    if not words:
        return None
    head = words[0]
    if head in ("make",):
        unknown = [w for w in words[1:] if re.fullmatch(r"[a-z][a-z-]*", w) and w not in TARGETS]
        return unknown[0] if unknown else None
    if head in ("python", "python3"):
        script = next((w for w in words[1:] if w.endswith(".py")), None)
        place = script and (script if "/" in script else None)
        there = not place or (ROOT / place).exists()
        scripts = {pathlib.Path(p).name for p in (ROOT / "skills/adze-kernels/scripts.list").read_text().split()}
        return None if there or pathlib.Path(place).name in scripts and place.startswith("scripts/") else place
    if head.startswith(("tests/", "bench/")):
        return None if (ROOT / head).exists() else head
    if head in ("adze", "build/adze"):
        known = subprocess.run([ADZE, "--help"], capture_output=True, text=True).stdout
        return None if len(words) == 1 or re.search(rf"^  adze {words[1]}\b", known, re.M) else words[1]
    return None if head in TOOLS or head.startswith(("build/", "./", "path/")) else head


@pytest.mark.parametrize("path", [*sorted((ROOT / "skills").rglob("*.md")), *DOCS], ids=lambda p: p.name)
def test_commands(path, tmp_path):
    env = {**os.environ, "PATH": f"{ADZE.parent}:{os.environ['PATH']}"}
    for line, runs in commands(path.read_text()):
        assert named(line) is None, f"{line}: there is no {named(line)}"
        if runs:
            done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


# ---- Links ----


def anchors(text):
    """The anchors that GitHub gives to the headings of a page."""
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.+)$", text, re.M)}


def broken_links(path, text):
    """Links of a page to files and headings that are not there."""
    plain = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", plain)):
        file, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = path.parent / file if file else path
        known = target.exists() and (not anchor or anchor in anchors(text if target == path else target.read_text()))
        broken += [] if known else [link]
    return broken


@pytest.mark.parametrize("path", [*sorted((ROOT / "skills").rglob("*.md")), *DOCS, ROOT / "CHANGELOG.md"], ids=str)
def test_links(path):
    text = path.read_text()
    assert not broken_links(path, text)
    defined = set(re.findall(r"^\[([\w-]+)\]: \S+$", text, re.M))
    cited = set(re.findall(r"(?<![\w`!])\[([a-z][\w-]*)\](?![(:\w])", re.sub(r"`[^`\n]*`|```.*?```", "", text)))
    assert not defined or cited == defined


def test_a_broken_link_is_found():
    text = "# A page\n\n[a](docs/python.md) [b](docs/nosuch.md) [c](#a-page) [d](#nosuch) [e](https://nosuch)\n"
    text += "[f](docs/python.md#measuring-your-own-model) [g](docs/python.md#nosuch) `[h](nosuch)`\n"
    wrong = ["docs/nosuch.md", "#nosuch", "docs/python.md#nosuch"]
    assert broken_links(ROOT / "README.md", text) == wrong


@pytest.mark.parametrize("path", [*sorted((ROOT / "skills").rglob("*.md")), *DOCS], ids=lambda p: p.name)
def test_no_table_is_empty(path):
    assert not re.search(r"^\|(-+:?\|)+\n(?!\|)", path.read_text() + "\n", re.M)


# ---- Figures ----

FIGURE = re.compile(r"(?<![\w.#-])(\d+(?:\.\d+)?) ?(us|ms|s|GB/s|TB/s|TFLOP/s|%)(?![\w/])")
RUN = re.compile(r"(?:([0-9a-f]{7}):)?(bench/results/[\w./-]+\.json)")


def git(*words):
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def recorded(block):
    """Every number of the runs and of the commits that a block cites; None where one cannot be read here."""
    found, texts = [], ""
    for commit, path in RUN.findall(block):
        if not commit and not (ROOT / path).exists():
            continue  # a run that was replaced: nothing holds its figures, unless its commit is cited
        text = git("show", f"{commit}:{path}") if commit else (ROOT / path).read_text()
        if text is None:
            return None
        found += numbers(json.loads(text))
    for commit in re.findall(r"commit ([0-9a-f]{7})", block):
        said = git("log", "-1", "--format=%B", commit)
        if said is None:
            return None
        texts += said
    return found + [float(n) for n in re.findall(r"\d+(?:\.\d+)?", texts)]


def holds(values, figure, unit):
    digits = len(figure.partition(".")[2])
    scaled = {"%": 100, "TB/s": 1e-3}.get(unit, 1)
    return any(
        round(v * s, digits) == float(figure) or abs(v * s - float(figure)) <= 0.5 * 10**-digits
        for v in values
        for s in {1, scaled}
    )


def sections(text):
    """Paragraphs; a table belongs to the paragraph above it."""
    plain = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    parts = re.split(r"\n\s*\n", plain)
    for number, part in enumerate(parts):
        if part.lstrip().startswith("|") and number:
            yield parts[number - 1] + "\n" + part
        elif number + 1 == len(parts) or not parts[number + 1].lstrip().startswith("|"):
            yield part


def wrong_figures(text):
    links = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)", text, re.M))
    wrong = []
    for part in sections(text):
        figures = FIGURE.findall(part)
        if not figures:
            continue
        cited = any(f"[{name}]" in part for name in links) or "https://" in part
        values = recorded(part)
        if values is None or (cited and not values):
            continue
        wrong += [
            f"{n} {unit}: {part.strip()[:70]}" for n, unit in figures if not holds(values, n, unit) and not cited
        ]
    return wrong


# A threshold is no measurement.
THRESHOLD = re.compile(r"\b(below|above|under|more than) \d+ %|\b\d+ % (or|and) more\b")


@pytest.mark.parametrize("path", [*sorted((ROOT / "skills").rglob("*.md")), *EXAMPLES], ids=lambda p: p.name)
def test_figures(path):
    assert not wrong_figures(THRESHOLD.sub("", path.read_text().replace("more\nthan", "more than")))


def test_a_figure_that_nobody_recorded_is_found():
    run = min((ROOT / "bench/results/h200").glob("*.json"))
    value = next(v for v in numbers(json.loads(run.read_text())) if v > 10 and v != round(v, 1))
    cited = "It took {:.2f} us (bench/results/h200/" + run.name + ").\n"
    assert not wrong_figures(cited.format(value))
    assert wrong_figures(cited.format(value + 1e6))
    assert wrong_figures("It reaches 97 % of the ceiling.\n")
    assert wrong_figures("It reaches 96 %, below 97 %.\n")
    assert wrong_figures("It took 3.17 us (bench/results/h200/replaced.json).\n")


def test_front_matter():
    text = (ROOT / "skills/adze-kernels/SKILL.md").read_text()
    front = text.split("---\n")[1]
    for key in ("name: adze-kernels", "description: ", "allowed-tools: ", "argument-hint: ", "user-invocable: true"):
        assert re.search(rf"^{key}", front, re.M), key
    assert len(text) < 2700  # about 600 tokens
    for name in re.findall(r"references/([\w-]+)\.md", text):
        assert (ROOT / f"skills/adze-kernels/references/{name}.md").exists(), name
