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
import shutil
import subprocess
import sys

BUILD_MK = pathlib.Path(__file__).resolve().parents[1] / "build.mk"  # of the installation
REQUIRED = ("name", "id", "version", "license", "python-depends", "backend")
GLIBC = (2, 28)
LIBRARIES = re.compile(r"(lib(c|m|dl|rt|pthread)\.so\.\d|ld-linux-.*)")


class Wrong(Exception):
    """What a check found."""


class Skipped(Exception):
    """Why a check cannot be made here."""


class NotForOthers(Wrong):
    """It works here, and others would not get what they should: it is not uploaded."""


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
        raise NotForOthers(
            f"needs glibc {newest[0]}.{newest[1]}, others have 2.28: `pip install ziglang`, then pack again"
        )
    return f"glibc {newest[0]}.{newest[1]}"


def backends(package):
    """cpu, or cu and a version, of each variant."""
    return [re.search(r"-(cpu|cu\d+)-", variant.name)[1] for variant in variants(package)]


def check_cuda(package):
    """Whether a variant has the project's CUDA kernels, and nvcc optimised what adze's library adds to them."""
    found = backends(package)
    if all(name == "cpu" for name in found):
        own = [path.name for path in (package / "src/cuda").glob("*.cu") if path.name != "device.cu"]
        if own:
            raise NotForOthers(f"no variant has {own[0]}: pack on a machine with nvcc, without CUDA=0")
        return "no kernel for CUDA"
    if BUILD_MK.exists() and re.search(r"^ADZE_OPTIMISED := 0$", BUILD_MK.read_text(), re.M):
        raise NotForOthers(
            "adze was built with CUDA_OPT=0: what the package takes from its library is not optimised. "
            "`make install` adze again without it, then pack again"
        )
    return "optimised"


def check_commit(package):
    """Whether the commit that the metadata names has the sources that were built."""
    for variant in variants(package):
        kernel = json.loads((variant / "metadata.json").read_text())["provenance"].get("kernel")
        if not kernel:
            return "the project is in no git repository: the metadata names no commit"
        if kernel["dirty"]:
            raise NotForOthers(f"files differ from commit {kernel['commit'][:12]}: commit them, then pack again")
    return kernel["commit"][:12]


def here():
    """The backend that `kernels` chooses on this machine, such as cu130 or cpu; None without kernels or torch."""
    if any(importlib.util.find_spec(module) is None for module in ("kernels", "torch")):
        return None
    code = "import torch; print('cu' + torch.version.cuda.replace('.', '') if torch.version.cuda else 'cpu')"
    return run(sys.executable, "-c", code).strip()


def serves(package, backend):
    """Whether a variant is for this backend: one of CUDA serves its major version."""
    return any(name[:4] == backend[:4] for name in backends(package))


def check_loads(package):
    backend = here()
    if backend is None:
        raise Skipped("kernels or torch is not here")
    if not serves(package, backend):
        raise Skipped(f"the torch of this machine is for {backend}, and no variant is")
    code = (
        "import pathlib, sys, kernels\n"
        "kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))\n"
        "assert all(hasattr(kernel, name) for name in kernel.__all__)\n"
        "print(', '.join(name for name in kernel.__all__ if name.islower()))"
    )
    done = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True)
    if done.returncode:
        raise Wrong(f"kernels does not load it: {(done.stderr.strip().splitlines() or ['it was killed'])[-1]}")
    return done.stdout.strip()


CHECKS = {
    "layout": check_layout,
    "metadata": check_metadata,
    "digest": check_digest,
    "symbols": check_symbols,
    "glibc": check_glibc,
    "cuda": check_cuda,
    "commit": check_commit,
    "loads": check_loads,
}


def check(package):
    """Prints a line for each check: `no push` is what works here and must not be uploaded. How many of each."""
    failed = not_for_others = 0
    for name, act in CHECKS.items():
        try:
            word, said = "ok", act(package)
        except Skipped as why:
            word, said = "skipped", why
        except NotForOthers as why:
            word, said = "no push", why
            not_for_others += 1
        except (Wrong, KeyError, OSError, subprocess.CalledProcessError) as wrong:
            word, said = "FAIL", wrong
            failed += 1
        print(f"  {word:<8} {name:<9} {said}")
    return failed, not_for_others


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


def build(folder, make):
    """The program, which must pass its check, and the package. A torch without CUDA does not load a variant for CUDA:
    where there is one here, the package gets a variant for it too."""

    def run_make(*words, why):
        if subprocess.run([*map(str, make), *words]).returncode:
            sys.exit(f"adze pack: {why}; nothing was packed")

    run_make("all", why="the project does not build")
    run_make("check", "CHECK=--brief", why="a kernel is wrong (above, each call as the command that repeats it)")
    run_make("package", why="the package does not build")
    if here() == "cpu" and not serves(folder / "package", "cpu"):
        run_make("package", "B=build-cpu", "CUDA=0", why="the variant for the CPU does not build")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=pathlib.Path)
    parser.add_argument("--push", help="the repository, ORGANISATION/NAME")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run and not options.push:
        parser.error("--dry-run says what --push would do: name the repository")
    if not (options.dir / "ops.h").exists():
        parser.error(f"{options.dir} is no project: `adze new project` makes one")
    if not (options.dir / "CARD.md").exists():
        parser.error(
            f"{options.dir} has an op, but no card, model and tests: `adze new project NAME --model M --op OWN=OP` "
            "makes them around an op OWN that begins as a copy of OP"
        )
    build(options.dir, ["make", "-C", options.dir, f"PYTHON={sys.executable}", f"HUB_REPO={options.push or ''}"])
    package = options.dir / "package"
    failed, not_for_others = check(package)
    if failed:
        nothing = ", nothing was uploaded" if options.push else ""
        sys.exit(f"adze pack: {failed} of {len(CHECKS)} checks failed{nothing}")
    refused = []
    if not_for_others:
        refused.append("it is not yet for others (`no push` above)")
    if not shutil.which("hf"):
        refused.append("the command hf is not here (`pip install huggingface_hub`)")
    if options.push and (options.dry_run or not refused):
        push(package, options.push, options.dry_run)
    if options.push and options.dry_run:
        print("Whether `hf` is logged in, and may write there, is not checked: `hf auth whoami` says it.")
    if options.push and refused:
        nothing = "the push would be refused" if options.dry_run else "nothing was uploaded"
        sys.exit(f"adze pack: {nothing}: {'; '.join(refused)}")


if __name__ == "__main__":
    main()
