"""Writes a kernel repository for the Hugging Face Hub: one backend's variants, and the sources. `make hub` calls it.

A variant is a folder that the kernels library loads as it is: Python files, the native part, metadata.json. The
sources are laid out for kernel-builder, which compiles .cpp and .cu: C files are renamed, and compiled as C (-xc).
With --project the ops are those of a project that `adze new` made, and ROOT is where adze is installed.
"""

import argparse
import ast
import base64
import hashlib
import importlib.util
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE, HUB = ROOT / "python/adze", ROOT / "hub"
VERSION = 1  # of the package's interface: the Hub's branch v1
SOURCES = ["include/*.h", "src/**/*.[ch]", "src/**/*.cu*", "bind/*.[ch]"]
INCLUDE = [".", "src/cuda", "include", "src", "bind"]  # where a project's files are looked for
OPS_PY = """import torch
from . import {id}
ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str):
    return f"{id}::{{op_name}}"
"""
SHARED = [f"operators/{name}.py" for name in ("header", "description", "functions")]
FRAMEWORKS = {  # variant: its Python dependencies, the suffix of the native part, files of the package
    "torch-stable-abi210": ([], ".abi3.so", [*SHARED, "operators/fake.py", "operators/ops.py"]),
    "tvm-ffi01": (["tvm-ffi"], ".so", [*SHARED, "hosts/tvm_ffi.py"]),
}
TORCH = "torch-stable-abi210"
INIT_PY = """\"\"\"{name}: {title}.{doc}\"\"\"

{imports}

__all__ = [
{names}
]
"""
DOCS = {
    TORCH: "Functions return new tensors, those of activations write `out`.",
    "tvm-ffi01": "They are called through TVM FFI with NumPy arrays or torch tensors.",
}
C_FLAGS = ["-xc", "-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-pthread"]
CPU_FLAGS = ["-O3", "-Wno-psabi", "-fno-math-errno", "-ffp-contract=fast", "-DADZE_ISA="]
CUDA_FLAGS = [
    "-O3",
    "-DADZE_CUDA=1",
    "-Xcompiler=-fvisibility=hidden,-fno-threadsafe-statics,-fno-exceptions",
]


class Package:
    """What is packed: adze itself, or a project of ops."""

    def __init__(self, project=None, name="adze"):
        self.project = project.resolve() if project else None
        self.name, self.module = name.replace("_", "-"), name.replace("-", "_")
        self.title = "transformer kernels for CUDA and CPUs" if not project else f"kernels: {', '.join(self.ops())}"

    def ops(self):
        """The ops of a project, as its list has them."""
        return re.findall(r"X\((\w+)\)", re.search(r"define ADZE_OPS\(X\)(.*)", self.list())[1])

    def list(self):
        return (self.project / "ops.h").read_text().replace("\\\n", " ")

    def headers(self):
        return sorted(path for path in self.project.glob("*.h") if path.name != "ops.h") if self.project else []

    def sources(self):
        """(path, its path in the repository)."""
        found = {str(path.relative_to(ROOT)): path for pattern in SOURCES for path in ROOT.glob(pattern)}
        if self.project:
            own = {}
            for pattern in ("*.h", "src/**/*.[ch]", "src/**/*.cu*"):
                own |= {str(path.relative_to(self.project)): path for path in self.project.glob(pattern)}
            found = needed(found | own, own)
        return sorted(found.items())


def needed(found, own):
    """Of the files {path in the repository: file} those of `own`, the public headers, the bindings, src/*.c, and what
    these need: the headers that they include, and the files that define a function which they name."""
    texts = {path: file.read_text() for path, file in found.items()}
    taken, words = set(), set()

    def take(path):
        if path in taken:
            return
        taken.add(path)
        words.update(re.findall(r"\w+", texts[path]))
        words.update(f"adze_{name}_cpu" for name in re.findall(r"ADZE_CPU_FN\((\w+)\)", texts[path]))
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', texts[path], re.M):
            for folder in (pathlib.PurePath(path).parent, *map(pathlib.PurePath, INCLUDE)):
                if str(folder / name) in texts:
                    take(str(folder / name))
                    break

    for path in texts:
        if path in own or re.match(r"(include|bind)/|src/[^/]*\.c$", path):
            take(path)
    defined = {path: names_defined(path, texts[path]) for path in texts if re.search(r"\.(c|cu)$", path)}
    count = 0
    while count != len(taken):
        count = len(taken)
        for path, names in defined.items():
            if names & words:
                take(path)
    return {path: found[path] for path in taken}


def names_defined(path, text):
    """The functions that other files may call. The files of an op name each other by macros: they are needed
    together, but for a kernel of the CPU, which needs no other file."""
    op = re.fullmatch(rf"src/(ops|cpu|cuda)/({'|'.join(library_ops())})(?:_amx|_amx_int8|_bf16|_vnni)?\.cu?", path)
    if op:
        return {f"adze_op_{op[2]}", f"adze_{op[2]}_cuda"} | ({f"adze_{op[2]}_cpu"} if op[1] == "cpu" else set())
    return set(re.findall(r'^(?!static|template|typedef|__)(?:extern "C" )?[A-Za-z_][\w ]*[ *&]+(\w+)\(', text, re.M))


def library_ops():
    """Those of adze.h."""
    return re.findall(r"^ADZE_API adze_status adze_(\w+)\(adze_stream \w+, const adze_\1_args \*args\);",
                      (ROOT / "include/adze.h").read_text(), re.M)  # fmt: skip


def release():
    number = int(re.search(r"define ADZE_VERSION (\d+)", (ROOT / "include/adze.h").read_text())[1])
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def isas(kind="ISAS"):
    """The Makefile's: (its name, the macro of its machine, GCC's word for the flags). ONLY: those of few ops."""
    text = (ROOT / "Makefile").read_text()
    flags = dict(re.findall(r"^FLAGS\.(\w+) *:= (.*)$", text, re.M))
    for machine, names in re.findall(rf"^{kind}\.(?!all)(\w+) *:= (.*)$", text, re.M):
        for name in names.split():
            yield name, f"__{machine}__", ",".join(re.sub("^-m", "", flag) for flag in flags[name].split())


def tree(package):
    """Seven hexadecimal digits that identify this tree: git's, marked when files are changed, or a hash of the
    sources."""
    git = ["git", "-C", str(package.project or ROOT)]
    found = subprocess.run([*git, "rev-parse", "HEAD^{tree}"], capture_output=True, text=True)
    if found.returncode:
        return hashlib.sha256(b"".join(path.read_bytes() for _, path in package.sources())).hexdigest()[:7]
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    return found.stdout[:7] + ("_dirty" if changed.stdout else "")


def provenance(package):
    """Who built it, from which commit, and where that is: keys of metadata.json."""
    git = ["git", "-C", str(package.project or ROOT)]
    known = {"provenance": {"kernel-builder": {"version": f"adze {release()}"}}}
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0:
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout
        known["provenance"]["kernel"] = {"commit": head.stdout.strip(), "dirty": bool(changed)}
    url = subprocess.run([*git, "remote", "get-url", "origin"], capture_output=True, text=True).stdout.strip()
    return known | ({"source": url} if url.startswith("https://") and "@" not in url else {})


def link(options, ident, folder):
    """The bindings under their own name, with the library: one file for both frameworks."""
    cc, ld = shlex.split(options.cc), shlex.split(options.ld)
    if ld == cc[:1] and importlib.util.find_spec("ziglang"):
        ld = [sys.executable, "-m", "ziglang", "cc", "-target", f"{options.arch}-linux-gnu.2.28"]
    elif ld == cc[:1]:
        print("hub: ziglang is not installed: the native part needs this machine's glibc or a newer one")
    names = ["-fexceptions", f"-I{ROOT / 'bind'}", f"-DADZE_NAMESPACE={ident}", f"-DADZE_MODULE={ident}"]
    place = options.project or ROOT  # the compiler's flags name folders below it
    bindings, library = folder / "bind.o", folder / "native"
    files = sorted(map(str, (ROOT / "bind").glob("*.c")))
    subprocess.run([*cc, *names, "-nostdlib", "-r", *files, "-o", bindings], cwd=place, check=True)
    script = f"-Wl,--version-script={ROOT / 'bind/exports.map'}"
    command = [*ld, "-shared", "-s", script, bindings, *options.lib, "-o", library, *shlex.split(options.libs)]
    subprocess.run(command, cwd=place, check=True)
    return library


def archs(options):
    """75 is 7.5. An architecture that is included as PTX serves every newer GPU."""
    ptx = options.ptx.split()
    return [re.sub(r"(\d[af]?)$", r".\1", a) + ("+PTX" if a in ptx else "") for a in options.archs.split()]


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).digest() for p in files}
    return {"algorithm": "sha256", "files": {name: base64.b64encode(h).decode() for name, h in hashes.items()}}


def op_names(package):
    """The functions of the ops and the bits of rounding, as the header has them."""
    spec = importlib.util.spec_from_file_location("header", PACKAGE / "operators/header.py")
    header = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(header)
    return [*(public_names(package.project / "functions.py") if package.project else header.OPS), *header.ROUNDING]


def public_names(path):
    """What a file defines at its top, but for names that begin with an underscore."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets]
    return [name for name in names if not name.startswith("_")]


def write_init(package, framework, folder):
    """__init__.py: its names are written out, so that they can be read without importing anything."""
    names = op_names(package)
    if framework == TORCH:
        homes = {"ops": names}
        if (folder / "activations.py").exists():
            homes["activations"] = public_names(folder / "activations.py")
        if (folder / "layers.py").exists():
            homes[""] = ["layers"]
    else:
        homes = {"tvm_ffi": names}
    homes = dict(sorted(homes.items()))
    imports = [f"from .{home} import {', '.join(sorted(names))}" for home, names in homes.items()]
    names = sorted(name for names in homes.values() for name in names)
    text = INIT_PY.format(
        name=package.name,
        title=package.title,
        doc="" if package.project else " " + DOCS[framework],
        imports="\n".join(imports),
        names="\n".join(f'    "{name}",' for name in names),
    )
    (folder / "__init__.py").write_text(text)


def project_functions(package):
    """functions.py with the functions of a project in the place of adze's."""
    text = (PACKAGE / "operators/functions.py").read_text()
    first, last = text.index("\n\n\n", text.index("def returns(")) + 3, text.index("# ---- For hosts ----")
    return text[:first] + (package.project / "functions.py").read_text().rstrip() + "\n\n\n" + text[last:]


def write_python(package, framework, folder):
    """The Python files of a variant, all in one folder."""
    if framework == TORCH and not package.project:
        shutil.copytree(HUB / "torch-ext", folder, ignore=shutil.ignore_patterns("__pycache__"))
    folder.mkdir(parents=True, exist_ok=True)
    for path in FRAMEWORKS[framework][2]:
        text = (PACKAGE / path).read_text()
        text = re.sub(r"^from \.\.operators(\.| )", lambda found: "from ." + found[1].strip("."), text, flags=re.M)
        (folder / pathlib.Path(path).name).write_text(text)
    if package.project:
        made = [sys.executable, ROOT / "bind/header.py", *package.headers()]
        (folder / "header.py").write_text(subprocess.run(made, check=True, capture_output=True, text=True).stdout)
        (folder / "functions.py").write_text(project_functions(package))
        if framework == TORCH and (package.project / "layers.py").exists():
            shutil.copy(package.project / "layers.py", folder)
    write_init(package, framework, folder)


def write_variant(package, folder, framework, ident, backend, native):
    depends, suffix, _ = FRAMEWORKS[framework]
    shutil.rmtree(folder, ignore_errors=True)
    write_python(package, framework, folder)
    if framework == TORCH:
        (folder / "_ops.py").write_text(OPS_PY.format(id=ident))
    shutil.copy(native, folder / (ident + suffix))
    metadata = {
        "name": package.name, "id": ident, "version": VERSION, "license": "Apache-2.0", "python-depends": depends,
        "backend": backend, "digest": digest(folder), **provenance(package),
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def as_cpp(path):
    return re.sub(r"\.c$", ".cpp", path)


def write_sources(package, out):
    """The source tree that kernel-builder needs: the path of each file in the repository."""
    paths = []
    for own, path in package.sources():
        paths.append(as_cpp(own))
        (out / paths[-1]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, out / paths[-1])

    def for_isa(path, isa, machine, target, text):
        (out / path).write_text(
            f'#ifdef {machine}\n#pragma GCC target("{target}")\n#undef ADZE_ISA\n#define ADZE_ISA _{isa}\n'
            f"{text}#else\ntypedef int nothing_for_this_machine;\n#endif\n"
        )

    for path in [p for p in paths if p.startswith("src/cpu/") and p.endswith(".cpp")]:
        only = [isa for isa in isas("ONLY") if path.endswith(f"_{isa[0]}.cpp")]
        for isa in only:
            for_isa(path, *isa, (out / path).read_text())
        for isa in [] if only else isas():
            paths.append(path.replace(".cpp", f"_{isa[0]}.cpp"))
            for_isa(paths[-1], *isa, f'#include "{pathlib.Path(path).name}"\n')
    return sorted(paths)


def build_toml(package, paths, repo_id):
    """A component has one set of flags. Headers are listed too: kernel-builder copies only listed files."""

    def table(name, /, **values):
        lines = [f"[{name}]", *(f"{key.replace('_', '-')} = {json.dumps(v)}" for key, v in values.items())]
        return "\n".join(lines) + "\n"

    def pick(pattern):
        return [p for p in paths if re.fullmatch(pattern, p)]

    headers, include = pick(r"((include|src)/.*|[^/]*)\.(h|cuh)"), INCLUDE[2:]
    list_of_ops = []
    if package.project:  # every file sees the list of ops
        include, list_of_ops = INCLUDE, ["-include", "ops.h"]
    names = ["-DADZE_NAMESPACE=TORCH_EXTENSION_NAME", "-DADZE_MODULE=TORCH_EXTENSION_NAME", "-fexceptions", "-O2"]
    backends, flags = ["cpu", "cuda"], [*C_FLAGS, *list_of_ops]
    text = [
        table("general", name=package.name, version=VERSION, edition=5, license="Apache-2.0", backends=backends),
        table("torch", src=pick("bind/.*") + headers, include=include, cxx_flags=flags + names),
        table("torch.stable-abi", cpu="2.10", cuda="2.10"),
    ]
    if repo_id:
        text.insert(1, table("general.hub", repo_id=repo_id))
    for backend, cuda in ("cpu", "-DADZE_CUDA=0"), ("cuda", "-DADZE_CUDA=1"):
        common = {"backend": backend, "depends": ["torch"], "include": include}
        kernels, base = pick(r"src/cpu/.*\.cpp"), pick(r"src/(ops/)?[^/]*\.cpp")
        text += [
            table(f"kernel.{backend}_base", **common, src=base, cxx_flags=[*flags, "-O2", cuda]),
            table(
                f"kernel.{backend}_kernels",
                **common,
                src=kernels,
                cxx_flags=[*C_FLAGS, *list_of_ops, *CPU_FLAGS, cuda],
            ),
        ]
    hopper = pick(r"src/cuda/.*_sm90\.cu")
    every = [p for p in pick(r"src/cuda/.*\.cu") if p not in hopper]
    text.append(table("kernel.cuda_gpu", **common, src=every, cuda_flags=[*list_of_ops, *CUDA_FLAGS]))
    if hopper:
        only = {"cuda_capabilities": ["9.0a"], "cuda_flags": [*list_of_ops, *CUDA_FLAGS]}
        text.append(table("kernel.cuda_sm90", **common, src=hopper, **only))
    return "\n".join(text)


def write_repository(package, out, repo_id):
    for name in ("include", "src", "bind", "torch-ext", "benchmarks", "tests"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_python(package, TORCH, out / "torch-ext" / package.module)
    own = package.project or HUB
    (out / "benchmarks").mkdir()
    for path in own.glob("*.py" if package.project else "benchmark.py"):  # what a benchmark imports lies beside it
        if path.name not in ("functions.py", "layers.py", "setup.py"):
            shutil.copy(path, out / "benchmarks")
    if (own / "tests").is_dir():
        shutil.copytree(own / "tests", out / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (out / "build.toml").write_text(build_toml(package, write_sources(package, out), repo_id))
    card = (own / "CARD.md").read_text().replace("{{ release }}", release())
    card = card.replace("{{ ops }}", ", ".join(f"`{name}`" for name in op_names(package) if name.islower()))
    (out / "CARD.md").write_text(card)
    values = {"repo_id": repo_id or f"ORGANISATION/{package.name}", "version": str(VERSION)}
    (out / "README.md").write_text(re.sub(r"{{ *(\w+) *}}", lambda found: values[found[1]], card))
    for path in (own / "flake.nix", ROOT / "LICENSE"):
        shutil.copy(path, out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="the repository's folder")
    parser.add_argument(
        "--lib", required=True, nargs="+", help="libadze.a of the backend; a project's own comes first"
    )
    parser.add_argument("--arch", required=True, help="x86_64 or aarch64")
    parser.add_argument("--cc", required=True, help="the C compiler with its flags")
    parser.add_argument(
        "--ld", required=True, help="the linker; where it is the compiler, ziglang is used if it is installed"
    )
    parser.add_argument("--libs", required=True, help="what the library needs")
    parser.add_argument("--cuda", default="", help="CUDA's version as 130; none: the CPU backend")
    parser.add_argument("--archs", default="", help="GPU architectures in the library, as 75 80 90a")
    parser.add_argument("--ptx", default="", help="those that are there as PTX")
    parser.add_argument("--repo-id", default="", help="ORGANISATION/NAME on the Hub")
    parser.add_argument("--project", type=pathlib.Path, help="a project of ops, instead of adze itself")
    parser.add_argument("--name", default="adze", help="the package's")
    options = parser.parse_args()

    package = Package(options.project, options.name)
    backend = {"type": "cuda", "archs": archs(options)} if options.cuda else {"type": "cpu"}
    suffix = tree(package)
    ident = f"_{package.module}_{backend['type']}_{suffix}"
    for old in options.out.glob("build/*/metadata.json"):
        if not json.loads(old.read_text())["id"].endswith(f"_{suffix}"):
            shutil.rmtree(old.parent)
    with tempfile.TemporaryDirectory() as folder:
        native = link(options, ident, pathlib.Path(folder))
        for framework in FRAMEWORKS:
            name = f"{framework}-{'cu' + options.cuda if options.cuda else 'cpu'}-{options.arch}-linux"
            write_variant(package, options.out / "build" / name, framework, ident, backend, native)
            print(f"hub: {options.out / 'build' / name}")
    write_repository(package, options.out, options.repo_id)


if __name__ == "__main__":
    main()
