"""A worked example (examples/): its project made by `adze new project`, packed, and its benchmark.py run.

    make all python && python3 bench/example.py qwen3_8b [--json FILE] [--tiny] [--skip-model] [--keep FOLDER]

The command is the one of the example's README. The project's kernels have the sources of this build, so its objects
are taken as they are, and only what is missing is compiled. benchmark.py loads the package with `kernels`, and times
the kernels alone and in the model. --json writes what bench/facts.py reads as
bench/results/GPU/PROJECT-COMMIT.json. Other options are those of benchmark.py (templates/model).
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/README.md"))


def run(*command, folder=ROOT, quiet=True, **env):
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} if quiet else {}
    names = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run([*map(str, command)], cwd=folder, env=names | env, **settings)
    if done.returncode:
        sys.exit(f"{done.stdout if quiet else ''}example.py: {' '.join(map(str, command))} failed")


def command_of(example):
    """The words of the README's command after `adze`: new project NAME ..."""
    text = (ROOT / "examples" / example / "README.md").read_text()
    return re.search(r"^adze (new project .*)$", text, re.M)[1].split()


def words_of_make():
    """`kernels` takes a package of the backend that torch has."""
    ask = "import torch; print(torch.version.cuda or '')"
    cuda = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    return ["B=build"] if cuda else ["B=build-cpu", "CUDA=0"]


def take_objects(project, build, to):
    """The objects of the project's ops. Their times are later than those of the sources, which are the same."""
    made = {"%s.o": "src/cpu/*.c", "%s.cu.o": "src/cuda/*.cu"}
    for form, pattern in made.items():
        for source in project.glob(pattern):
            folder = source.parent.relative_to(project)
            if source.read_text() != (ROOT / folder / source.name).read_text():
                continue
            for found in [build / folder / (form % source.stem), *(build / folder).glob(f"{source.stem}.*.o")]:
                if found.exists():
                    (project / to / folder).mkdir(parents=True, exist_ok=True)
                    shutil.copy(found, project / to / folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for the installation and the project (none)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="what make has built (build/)")
    options, others = parser.parse_known_args()
    if not (options.build / "adze").exists():
        parser.error(f"{options.build}/adze is not there: `make all python` builds it")
    others = [str(pathlib.Path(word).absolute()) if before in ("--json", "--turn") else word
              for before, word in zip([None, *others], others, strict=False)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        place = options.keep.absolute() if options.keep else pathlib.Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        words = command_of(options.example)
        project = place / words[2]
        run("make", "install", f"B={options.build}", f"PREFIX={place / 'adze'}")
        shutil.rmtree(project, ignore_errors=True)
        run(place / "adze/bin/adze", *words, folder=place)
        make = words_of_make()
        take_objects(project, options.build, make[0].removeprefix("B="))
        run("make", "package", *make, f"PYTHON={sys.executable}", folder=project)
        path = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
        run(sys.executable, "benchmark.py", *others, folder=project, quiet=False, PYTHONPATH=path)


if __name__ == "__main__":
    main()
