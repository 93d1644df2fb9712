"""versions.py - adze with every supported version of transformers and diffusers, before a release or on demand.

Each version has an environment under build/versions with the package and what it requires that build/venv has not;
all else, torch among it, is build/venv's. Tiny models run there, with and without adze
(python/tests/version_models.py), and the files of each version are scanned for classes that rules know. The result is
python/tests/data/versions.json and the table of docs/versions.md. `--check` runs nothing: it says whether these and
fingerprints.json agree."""

import argparse
import concurrent.futures
import gc
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from adze.patching import known_sources as sources  # noqa: E402
from adze.patching import scan  # noqa: E402

RESULT, PAGE = ROOT / "python/tests/data/versions.json", ROOT / "docs/versions.md"
SHARED = ROOT / "build/venv"
PACKAGES = ("transformers", "diffusers")
KINDS = {
    "norm": "norms",
    "act": "activations, gated MLPs",
    "rope": "attentions with rope",
    "fuse": "blocks",
    "processor": "processors",
}

WORDS = """\
# Versions

`python3 tests/versions.py` writes this page. It runs tiny models in float32 with each of these versions, with and
without adze, on torch {torch}. A model passes when its outputs agree within the tolerance that `torch.testing` has
for float32, and when the 6 greedy tokens of a language model are the same. As many modules must be replaced as in
the newest version. The minor versions below are supported. `handle.report()` says when another one is installed.
There, too, a module whose source is not known is left as it is.

`python -m adze.fingerprint --scan` lists the classes of the installed packages that look like a target: those that
rules know, those that are near to a known source and what it is, and the others. A block is also known by the
statements in it that add a residual and norm the sum. A new version is added in three steps:

1. `python -m adze.fingerprint --record` where it is installed adds it to each source of
   python/adze/patching/fingerprints.json that has not changed, and names those that have.
2. `python -m adze.fingerprint --diff FOLDER` shows how they have changed, against the version in a folder such as
   build/versions/transformers-5.23.0/lib/python3.11/site-packages. `--record --accept NAME` adds one that was
   reviewed: the rule must compute what the source computes.
3. The version is written into `supported` in the same file, and `python3 tests/versions.py` writes this page again.
"""

# Prints the requirements of some packages that the environment does not meet.
UNMET = """
import importlib.metadata as metadata, sys
from packaging.requirements import Requirement
for text in [text for name in sys.argv[1:] for text in metadata.requires(name) or ()]:
    wanted = Requirement(text)
    if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
        try:
            met = wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
        except metadata.PackageNotFoundError:
            met = False
        if not met:
            print(f"{wanted.name}{wanted.specifier}")
"""


def site_of(environment):
    return next(environment.glob("lib/python*/site-packages"))


def make_environment(package, version):
    """The Python of build/versions/<package>-<version>, which is made where it is not there."""
    environment = ROOT / f"build/versions/{package}-{version}"
    python, complete = environment / "bin/python", environment / "complete"
    if complete.exists():
        return python
    subprocess.run([SHARED / "bin/python", "-m", "venv", "--clear", "--without-pip", environment], check=True)
    site = site_of(environment)
    wanted, names = [f"{package}=={version}"], []
    while wanted:
        # Into a folder, and without dependencies: pip then leaves build/venv alone, and fetches no torch.
        command = [SHARED / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--target", site, *wanted], check=True)
        (site / "shared.pth").write_text(f"import site; site.addsitedir({str(site_of(SHARED))!r})\n")
        names = [requirement.split("=")[0].split("<")[0].split(">")[0].split("!")[0] for requirement in wanted]
        said = subprocess.run([python, "-c", UNMET, *names], check=True, capture_output=True, text=True).stdout
        wanted = said.split()
    complete.touch()
    return python


def run_models(package, version):
    """What python/tests/version_models.py says in the environment of a version."""
    python = make_environment(package, version)
    environment = dict(os.environ, PYTHONPATH=f"{ROOT / 'python'}:{ROOT / 'python/tests'}", OMP_NUM_THREADS="1")
    script = ROOT / "python/tests/version_models.py"
    said = subprocess.run([python, script, package], capture_output=True, text=True, env=environment)
    if said.returncode:
        return {"version": version, "torch": "", "models": {"(all)": said.stderr.strip().rpartition("\n")[2]}}
    return json.loads(said.stdout.splitlines()[-1])


def scan_files(package, version):
    """How many classes of a version's files are known, near to a known one, and unknown."""
    command = [SHARED / "bin/python", ROOT / "tests/versions.py", "--scan", package, version]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(said.stdout.splitlines()[-1])


def try_version(pair):
    return run_models(*pair) | {"classes": scan_files(*pair)}


def print_counts(package, version):
    from adze.patching.frame import rules_for

    gc.disable()  # syntax trees have no cycles, and there are millions of nodes
    folder = site_of(ROOT / f"build/versions/{package}-{version}")
    findings = scan.scan(scan.Package(package, folder / package, version), rules_for(package), near=False)
    print(json.dumps(scan.counts(findings)))


def faults(results):
    """What is wrong: a model that failed, or that has other modules replaced than in the newest version."""
    found = []
    for package, versions in results.items():
        newest = versions[list(versions)[-1]]["models"]
        for version, result in versions.items():
            if result["version"] != version:
                found.append(f"{package} {version}: {result['version']} was imported")
            for name in newest.keys() | result["models"].keys():
                replaced, expected = result["models"].get(name, "has not run"), newest.get(name)
                if isinstance(replaced, str):
                    found.append(f"{package} {version}: {name}: {replaced}")
                elif not isinstance(expected, str) and replaced != expected:
                    found.append(f"{package} {version}: {name}: {replaced}, and {expected} in the newest version")
    return found


def page(results):
    """docs/versions.md"""
    torch = sorted({result["torch"] for versions in results.values() for result in versions.values()})
    lines = [WORDS.format(torch=", ".join(torch)).rstrip()]
    for package, versions in results.items():
        kinds = [kind for kind in KINDS if any(kind in result["classes"] for result in versions.values())]
        lines += ["", f"## {package}", ""]
        lines.append(f"| version | models passed | modules replaced | {' | '.join(KINDS[kind] for kind in kinds)} |")
        lines.append("|---" * (3 + len(kinds)) + "|")
        for version in reversed(versions):
            result = versions[version]
            passed = [m for m in result["models"].values() if not isinstance(m, str)]
            replaced = sum(n for counts in passed for rule, n in counts.items() if rule != "left")
            cells = [version, f"{len(passed)} of {len(result['models'])}", str(replaced)]
            for kind in kinds:
                states = result["classes"].get(kind, {"known": 0})
                cells.append(f"{states['known']} of {sum(states.values())} known")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def check():
    """Sentences on what does not agree with what."""
    results, found = json.loads(RESULT.read_text()), []
    for package in PACKAGES:
        if list(results[package]) != sources.supported(package):
            listed = f"{' '.join(results[package])} in {RESULT.relative_to(ROOT)}"
            found.append(f"{package}: {' '.join(sources.supported(package))} are supported, {listed}")
    if PAGE.read_text() != page(results):
        found.append(f"{PAGE.relative_to(ROOT)} is not made of {RESULT.relative_to(ROOT)}")
    return found + faults(results)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--page", action="store_true", help="write docs/versions.md from the last result")
    parser.add_argument("--scan", nargs=2, metavar=("PACKAGE", "VERSION"), help="print what is known of a version")
    options = parser.parse_args()
    if options.scan:
        return print_counts(*options.scan)
    if options.check:
        sys.exit("\n".join(check()) or 0)
    if options.page:
        return PAGE.write_text(page(json.loads(RESULT.read_text())))
    if not (SHARED / "bin/python").exists():
        sys.exit("build/venv is not here: tests/setup.sh makes it")
    results = {package: {} for package in PACKAGES}
    pairs = [(package, version) for package in PACKAGES for version in sources.supported(package)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for (package, version), result in zip(pairs, pool.map(try_version, pairs), strict=True):
            results[package][version] = result
            passed = sum(not isinstance(counts, str) for counts in result["models"].values())
            known = ", ".join(f"{s['known']}/{sum(s.values())} {kind}" for kind, s in result["classes"].items())
            models = f"{passed} of {len(result['models'])} models passed"
            print(f"{package} {version}: {models}; known: {known}", flush=True)
    wrong = faults(results)
    print(*wrong, sep="\n")
    if not wrong:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
        PAGE.write_text(page(results))
    models = sum(len(result["models"]) for versions in results.values() for result in versions.values())
    print(f"{models - len(wrong)} passed, {len(wrong)} failed, 0 skipped")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
