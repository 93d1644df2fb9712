"""`python -m adze skills`: installs the skills of the package where coding agents look, as `adze skills` does.

Nothing is downloaded. MANIFEST, among the files of a skill, has the SHA-256 of each (`sha256sum -c MANIFEST`).
"""

import argparse
import hashlib
import os
import pathlib
import sys

from . import __version__

BUNDLE = pathlib.Path(__file__).with_name("bundle")
AGENTS = ("claude", "codex", "opencode", "cursor")


def bundled():
    """The files that `make` wrote into one: path, bytes, whether it may be executed."""
    data, at = BUNDLE.read_bytes(), 0
    while at < len(data):
        line, _, _ = data[at : at + 400].partition(b"\n")
        size, mode, path = line.decode().split(" ", 2)
        at += len(line) + 1
        yield path, data[at : at + int(size)], mode == "x"
        at += int(size)


def skills():
    """The files of each skill: {name: {path below its folder: (bytes, executable)}}."""
    found = {}
    for path, data, executable in bundled():
        if path.startswith("skills/"):
            _, name, own = path.split("/", 2)
            found.setdefault(name, {})[own] = (data, executable)
    return found


def manifest(name, files):
    lines = [f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, (data, _) in files.items()]
    return f"# {name} of adze {__version__}\n" + "".join(lines)


def sums(text):
    """{path: checksum} of a manifest."""
    triples = (line.partition("  ") for line in text.splitlines() if not line.startswith("#"))
    return {path: value for value, _, path in triples if path and ".." not in path and not path.startswith("/")}


def installed(folder):
    path = folder / "MANIFEST"
    return path.read_text(errors="replace") if path.is_file() else None


def agent_folder(agent, everywhere):
    if not everywhere:
        return pathlib.Path(f".{agent}/skills")
    if agent == "opencode":
        return pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config") / "opencode/skills"
    return pathlib.Path.home() / f".{agent}/skills"


def same(path, value):
    return hashlib.sha256(path.read_bytes()).hexdigest() == value


def changed(folder, files):
    """Files that are there and are not as they were installed, or that others have written where one would be."""
    would_be = {path: hashlib.sha256(data).hexdigest() for path, (data, _) in files.items()}
    expected = would_be | sums(installed(folder) or "")
    return [path for path, value in expected.items() if (folder / path).exists() and not same(folder / path, value)]


def refuse(folder, files, force, what):
    """Whether files would be lost; then it has been said which."""
    lost = changed(folder, files)
    for path in lost:
        print(f"  {folder / path} is not as it was installed", file=sys.stderr)
    if lost and not force:
        print(f"adze skills: nothing was {what} {folder}; --force does it", file=sys.stderr)
    return bool(lost) and not force


def take_out(folder):
    old = sums(installed(folder) or "")
    for path in [*old, "MANIFEST"]:
        (folder / path).unlink(missing_ok=True)
        for parent in (folder / path).parents:
            if parent == folder.parent or not parent.is_dir() or any(parent.iterdir()):
                break
            parent.rmdir()
    return len(old)


def add(folder, name, files, force):
    if refuse(folder, files, force, "written to"):
        return 1
    take_out(folder)
    for path, (data, executable) in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if executable else 0o644)
        print(f"  {target}")
    (folder / "MANIFEST").write_text(manifest(name, files))
    print(f"{name}: {len(files)} files and MANIFEST, in {folder}")
    return 0


def verify(folder, name, files, force):
    old = installed(folder)
    if old is None:
        print(f"adze skills: {name} is not installed in {folder}", file=sys.stderr)
        return 1
    current = old == manifest(name, files)
    if not current:
        print(f"{folder}: not the release of this package: MANIFEST begins with '{old.partition(chr(10))[0]}'")
    wrong = [
        path for path, value in sums(old).items() if not (folder / path).exists() or not same(folder / path, value)
    ]
    for path in wrong:
        print(f"{folder / path} {'was changed' if (folder / path).exists() else 'is missing'}")
    print(f"{folder}: {len(sums(old))} files, {len(wrong)} are not as they were installed")
    return int(bool(wrong) or not current)


def remove(folder, name, files, force):
    if installed(folder) is None:
        print(f"adze skills: {name} is not installed in {folder}", file=sys.stderr)
        return 1
    if refuse(folder, {}, force, "removed from"):
        return 1
    print(f"{name}: {take_out(folder)} files removed from {folder}")
    return 0


def show(found):
    for name, files in found.items():
        text = manifest(name, files)
        print(f"{name}, of adze {__version__}, sha256 of its MANIFEST {hashlib.sha256(text.encode()).hexdigest()}")
        for folder in (agent_folder(agent, everywhere) / name for agent in AGENTS for everywhere in (False, True)):
            old = installed(folder)
            if old is not None:
                print(f"  in {folder}{'' if old == text else ', of another release'}")
    return 0


def folder(text):
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return pathlib.Path(text)


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m adze skills", description=__doc__.splitlines()[0])
    parser.add_argument("act", choices=["add", "list", "verify", "remove"])
    parser.add_argument("name", nargs="?", default="adze-kernels")
    for agent in AGENTS:
        parser.add_argument(f"--{agent}", action="store_true", help=f".{agent}/skills")
    parser.add_argument("--dest", type=folder, help="any folder")
    parser.add_argument("--global", action="store_true", dest="everywhere", help="in the home folder instead of here")
    parser.add_argument("--force", action="store_true", help="overwrite or remove files that were changed")
    options = parser.parse_args(arguments)
    found = skills()
    if options.act == "list":
        return show(found)
    if options.name not in found:
        parser.error(f"no skill is called '{options.name}': there are {', '.join(found)}")
    places = [agent_folder(agent, options.everywhere) for agent in AGENTS if getattr(options, agent)]
    places += [options.dest] if options.dest else []
    if not places:
        parser.error("a place is missing: --claude, --codex, --opencode, --cursor or --dest DIR")
    act = {"add": add, "verify": verify, "remove": remove}[options.act]
    try:
        return max(act(place / options.name, options.name, found[options.name], options.force) for place in places)
    except OSError as error:
        print(f"adze skills: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
