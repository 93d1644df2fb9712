"""`adze pack`: builds a project of ops, makes a Hub repository of it in package/, checks and uploads that.

python3 hub/project.py DIR [--push ORGANISATION/NAME] [--dry-run]
"""

import argparse
import base64
import hashlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

REQUIRED = ("name", "id", "version", "license", "python-depends", "backend")
GLIBC = (2, 28)
LIBRARIES = re.compile(r"(lib(c|m|dl|rt|pthread)\.so\.\d|ld-linux-.*)")


class Wrong(Exception):
    """What a check found."""


class ForThisMachine(Wrong):
    """It works here, and not where others are: nothing is uploaded."""


def run(*command, **settings):
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, **settings).stdout


def variants(package):
    found = sorted(path for path in (package / "build").iterdir() if path.is_dir())
    if not found:
        raise Wrong("build/ has no variant")
    return found


def check_layout(package):
    for name in (
        "README.md",
        "CARD.md",
        "build.toml",
        "flake.nix",
        "LICENSE",
        "benchmarks/benchmark.py",
        "torch-ext",
    ):
        if not (package / name).exists():
            raise Wrong(f"{name} is missing")
    for variant in variants(package):
        if not (variant / "__init__.py").exists() or len(list(variant.glob("*.so"))) != 1:
            raise Wrong(f"{variant.name} must have __init__.py and one native part")
    tests = list((package / "tests").glob("test_*.py"))
    if not any("kernels_ci" in path.read_text() for path in tests):
        raise Wrong("tests/ has no test with the mark kernels_ci")
    return f"{len(variants(package))} variants, {len(tests)} tests"


def check_metadata(package):
    for variant in variants(package):
        metadata = json.loads((variant / "metadata.json").read_text())
        missing = [key for key in REQUIRED if key not in metadata]
        if missing:
            raise Wrong(f"{variant.name}: metadata.json lacks {', '.join(missing)}")
        if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", metadata["name"]):
            raise Wrong(f"{variant.name}: the name '{metadata['name']}' is not one of the Hub")
        if not list(variant.glob(f"{metadata['id']}.*so")):
            raise Wrong(f"{variant.name}: the native part is not called {metadata['id']}")
    return metadata["id"]


def check_digest(package):
    count = 0
    for variant in variants(package):
        files = json.loads((variant / "metadata.json").read_text())["digest"]["files"]
        there = {
            str(p.relative_to(variant)) for p in variant.rglob("*") if p.is_file() and "__pycache__" not in p.parts
        }
        if there - {"metadata.json"} != set(files):
            raise Wrong(f"{variant.name}: files differ from the digest: {sorted(there ^ set(files))}")
        for name, value in files.items():
            if base64.b64encode(hashlib.sha256((variant / name).read_bytes()).digest()).decode() != value:
                raise Wrong(f"{variant.name}: {name} is not the file of the digest")
            count += 1
    return f"{count} files"


def check_symbols(package):
    """Exports are the module's; what is needed is the C library's: torch's functions are found at run time."""
    for variant in variants(package):
        native = next(variant.glob("*.so"))
        ident = json.loads((variant / "metadata.json").read_text())["id"]
        exported = {line.split()[-1] for line in run("nm", "-D", "--defined-only", native).splitlines()}
        if f"PyInit_{ident}" not in exported:
            raise Wrong(f"{variant.name}: PyInit_{ident} is not exported")
        needed = re.findall(r"NEEDED +(\S+)", run("objdump", "-p", native))
        others = [name for name in needed if not LIBRARIES.fullmatch(name)]
        if others:
            raise Wrong(f"{variant.name}: needs {', '.join(others)}")
        undefined = run("nm", "-D", "--undefined-only", native)
        if re.search(r" _Z\w*(c10|at|torch)", undefined):
            raise Wrong(f"{variant.name}: uses C++ functions of torch")
    return "exports, libraries"


def check_glibc(package):
    newest = (0, 0)
    for variant in variants(package):
        text = run("objdump", "-T", next(variant.glob("*.so")))
        newest = max([newest, *(tuple(map(int, v.split(".")[:2])) for v in re.findall(r"GLIBC_(\d+\.\d+)", text))])
    if newest > GLIBC:
        raise ForThisMachine(
            f"needs glibc {newest[0]}.{newest[1]}, others have 2.28: `pip install ziglang`, then pack again"
        )
    return f"glibc {newest[0]}.{newest[1]}"


def check_loads(package):
    for module in ("kernels", "torch"):
        if importlib.util.find_spec(module) is None:
            return None
    code = (
        "import pathlib, sys, kernels\n"
        "kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))\n"
        "assert all(hasattr(kernel, name) for name in kernel.__all__)\n"
        "print(', '.join(name for name in kernel.__all__ if name.islower()))"
    )
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True)
    if done.returncode:
        raise Wrong(f"kernels does not load it:\n{done.stderr}")
    return done.stdout.strip()


CHECKS = {
    "layout": check_layout,
    "metadata": check_metadata,
    "digest": check_digest,
    "symbols": check_symbols,
    "glibc": check_glibc,
    "loads": check_loads,
}


def check(package):
    """Prints a line for each check; how many failed, and how many would fail elsewhere."""
    failed = here = 0
    for name, act in CHECKS.items():
        try:
            said = act(package)
            print(
                f"  {'ok' if said is not None else 'skipped':<8} {name:<9} {said or 'kernels or torch is not here'}"
            )
        except ForThisMachine as why:
            print(f"  HERE     {name:<9} {why}")
            here += 1
        except (Wrong, KeyError, OSError, subprocess.CalledProcessError) as wrong:
            print(f"  FAIL     {name:<9} {wrong}")
            failed += 1
    return failed, here


def push(package, repo, dry):
    """Uploads the folder by `hf`: the variants to the branch of the version, the card to main as well."""
    version = json.loads((variants(package)[0] / "metadata.json").read_text())["version"]
    branch = f"v{version}"
    commands = [
        ["hf", "repos", "create", repo, "--type", "kernel", "--exist-ok"],
        ["hf", "repos", "branch", "create", repo, branch, "--type", "kernel", "--exist-ok"],
        ["hf", "upload", repo, package, ".", "--type", "kernel", "--revision", branch],
        ["hf", "upload", repo, package / "README.md", "README.md", "--type", "kernel"],
    ]
    files = sorted(path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    if dry:
        size = sum(path.stat().st_size for path in files) / 1e6
        print(f"{len(files)} files, {size:.1f} MB, to {repo}, branch {branch}:")
        for path in files:
            print(f"  {path.relative_to(package)}")
        print("by these commands:")
    for command in commands:
        print("  " + " ".join(map(str, command)))
        if not dry:
            subprocess.run([*map(str, command)], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--push", help="the repository, ORGANISATION/NAME")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run and not options.push:
        parser.error("--dry-run says what --push would do: name the repository")
    if not (options.dir / "ops.h").exists() or not (options.dir / "CARD.md").exists():
        parser.error(f"{options.dir} is no project: `adze new project` makes one")
    words = ["make", "-C", options.dir, "package", f"PYTHON={sys.executable}"]
    if subprocess.run([*map(str, words), *([f"HUB_REPO={options.push}"] if options.push else [])]).returncode:
        sys.exit("adze pack: the project does not build")
    package = options.dir / "package"
    failed, here = check(package)
    if failed or (here and options.push and not options.dry_run):
        sys.exit(f"adze pack: {failed + here} checks failed{', nothing was uploaded' if options.push else ''}")
    if options.push:
        push(package, options.push, options.dry_run)


if __name__ == "__main__":
    main()
