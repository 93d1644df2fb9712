"""The sources that rules are made for: fingerprints.json, with the name and the versions each was seen in."""

import functools
import importlib.metadata
import json
import pathlib
from typing import NamedTuple

TABLE = pathlib.Path(__file__).with_name("fingerprints.json")


class Source(NamedTuple):
    """A row of the table: one source of one function. Sources of a name differ from version to version."""

    hash: str
    package: str
    name: str  # module:qualname, where the package and what all its modules' names begin with are left out
    versions: tuple[str, ...]  # oldest first
    structure: str  # the fingerprint of the same text without its names
    statements: tuple[str, ...]  # a short fingerprint of each statement: how near another source is


def read():
    """The whole table: the versions that are supported, by package, and the sources."""
    table = json.loads(TABLE.read_text())
    sources = []
    for source, package, name, versions, structure, statements in table["sources"]:
        sources.append(Source(source, package, name, tuple(versions.split()), structure, tuple(statements.split())))
    return table["supported"], sources


def write(supported, sources):
    """A line for each source, so that what a version adds is easy to review."""
    rows = sorted(sources, key=lambda s: (s.package, s.name, version_key(s.versions[0]), s.hash))
    lines = [
        json.dumps([s.hash, s.package, s.name, " ".join(s.versions), s.structure, " ".join(s.statements)])
        for s in rows
    ]
    body = ",\n".join(lines)
    TABLE.write_text(f'{{"supported": {json.dumps(supported)},\n"sources": [\n{body}\n]}}\n')


def version_key(version):
    """For sorting: the numbers that a version begins with."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


@functools.cache
def _table():
    supported, sources = read()
    by_name = {}
    for source in sources:
        by_name.setdefault(source.name, []).append(source)
    return supported, by_name


def hashes(names):
    """The fingerprints of some names, with spaces between them. `name@version` is the one source of that version."""
    found = set()
    for name in names.split():
        name, _, version = name.partition("@")
        sources = [s for s in _table()[1].get(name, ()) if not version or version in s.versions]
        if not sources:
            raise KeyError(f"fingerprints.json has no source of {name}" + (f" in {version}" if version else ""))
        found.update(source.hash for source in sources)
    return frozenset(found)


def by_hash(names):
    """{names: value} as {fingerprint: value}."""
    return {source: value for name, value in names.items() for source in hashes(name)}


def supported(package):
    """The releases of a package that the tests are run with, oldest first: one for each minor version."""
    return _table()[0][package]


def outside(package):
    """A sentence for a package whose installed minor version is not among the supported ones; None if it is."""
    releases = supported(package)
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if version_key(installed)[:2] in {version_key(release)[:2] for release in releases}:
        return None
    first, last = (".".join(map(str, version_key(release)[:2])) for release in (releases[0], releases[-1]))
    return (
        f"{package} {installed} is not among the versions that adze is tested with ({first} to {last}): "
        "what it has changed is left as it is"
    )
