"""python -m adze.fingerprint --scan, --record and --diff: what of the installed packages rules know.

Packages are read and not imported: their files hold all that a fingerprint needs, and it takes seconds."""

import argparse
import ast
import difflib
import functools
import gc
import importlib.metadata
import importlib.util
import pathlib
import re
import sys
from typing import NamedTuple

from . import known_sources
from .fingerprint import fingerprint_node, statements_node, structure_node

PACKAGES = {  # where each has the functions that a rule may be made for
    "torch": ("nn/modules/normalization.py", "nn/modules/activation.py"),
    "transformers": ("activations.py", "models/*/modeling_*.py"),
    "diffusers": ("models/**/*.py",),
}
TRANSPARENT = ("auto_docstring", "torch.no_grad", "deprecate_kwarg")  # decorators that a patch keeps
KINDS = ("norm", "act", "rope", "fuse", "processor")
_OF_TORCH = ("nn.LayerNorm", "torch.nn.LayerNorm", "nn.RMSNorm", "torch.nn.RMSNorm")  # norms that rules know
NEAR = 0.6  # of the statements


class Module:
    """One file: its functions, its classes, and what it imports."""

    def __init__(self, dotted, path):
        self.dotted = dotted
        self.functions, self.classes, self.imports = {}, {}, {}
        self._read(ast.parse(path.read_text()).body, dotted.split("."))

    def _read(self, body, parts):
        for node in body:
            if isinstance(node, ast.ImportFrom):
                home = parts[: -node.level] if node.level else []
                home = ".".join([*home, *(node.module.split(".") if node.module else [])])
                self.imports.update({alias.asname or alias.name: (home, alias.name) for alias in node.names})
            elif isinstance(node, ast.ClassDef):
                methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
                self.classes[node.name] = ([ast.unparse(base) for base in node.bases], methods)
            elif isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, (ast.If, ast.Try)):
                self._read([*node.body, *node.orelse], parts)


class Package:
    """A package as it lies in a folder."""

    def __init__(self, name, folder, version):
        self.name, self.folder, self.version = name, pathlib.Path(folder), version
        self._modules = {}

    def module(self, dotted):
        """The module of this dotted name within the package, or None."""
        if dotted not in self._modules:
            path = self.folder.joinpath(*dotted.split(".")[1:])
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._modules[dotted] = Module(dotted, path) if path.is_file() else None
        return self._modules[dotted]

    @functools.cached_property
    def modules(self):
        paths = [path for pattern in PACKAGES[self.name] for path in sorted(self.folder.glob(pattern))]
        dotted = [".".join([self.name, *path.relative_to(self.folder).with_suffix("").parts]) for path in paths]
        return [self.module(name) for name in dotted if not name.endswith(".__init__")]

    def resolve(self, module, name, depth=8):
        """(module, node of a function or entry of a class) that a name is in a module, through imports."""
        if module is None or depth == 0:
            return None, None
        for held in (module.functions, module.classes):
            if name in held:
                return module, held[name]
        if name in module.imports:
            home, name = module.imports[name]
            return self.resolve(self.module(home) if home.startswith(self.name) else None, name, depth - 1)
        return None, None

    def method(self, module, cls, name, depth=8):
        """(module, node) of a method of a class, own or inherited within the package."""
        home, entry = self.resolve(module, cls)
        if not isinstance(entry, tuple) or depth == 0:
            return None, None
        bases, methods = entry
        if name in methods:
            return home, methods[name]
        for base in bases:
            found = self.method(home, base, name, depth - 1)
            if found[1] is not None:
                return found
        return None, None

    def functions(self):
        """Every function and method: (its name in the table, its node)."""
        for module in self.modules:
            for name, node in module.functions.items():
                yield table_name(self, module, name), node
            for cls, (_, methods) in module.classes.items():
                for name, node in methods.items():
                    yield table_name(self, module, f"{cls}.{name}"), node


def table_name(package, module, qualname):
    """As in Source: llama:LlamaRMSNorm.forward, flux:FluxAttention.forward, torch.nn:LayerNorm.forward."""
    if package.name == "torch":
        return f"torch.nn:{qualname}"
    name = module.dotted.rpartition(".")[2].removeprefix("modeling_").removeprefix("transformer_")
    return f"{name}:{qualname}"


def installed(name):
    """The installed package of this name, or None."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Package(name, spec.submodule_search_locations[0], importlib.metadata.version(name).split("+")[0])


@functools.cache
def _hash(node):
    return fingerprint_node(node)


@functools.cache
def _names(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def kind_of(cls, forward):
    """The kind of op that a class seems to call for, by its name and what its forward uses, or None."""
    if cls.endswith(("AttnProcessor", "AttnProcessor2_0")):
        return "processor"
    cls = cls.replace("PreLayerNorm", "")  # in the names of models
    if re.search(r"norm", cls, re.I) and not re.search(r"batch|instance|spectral", cls, re.I):
        return "norm"
    if any(name.startswith(("apply_rotary", "apply_rope")) for name in _names(forward)):
        return "rope"
    attributes = {n.attr for n in ast.walk(forward) if isinstance(n, ast.Attribute)}
    if re.search(r"(Activation|GELU|SiLU|GELUTanh)$", cls) or {"down_proj", "gate_proj"} <= attributes:
        return "act"
    if re.search(r"(Layer|Block)$", cls) and any("norm" in name.lower() for name in attributes):
        return "fuse"
    return None


def _fits(package, rule, module, cls, home, forward):
    """What patching._mismatch asks, of files: [(part of the rule that is not known, its node or None)], or None where
    the rule is for something else."""
    if rule.matches is not None:
        return None
    if "forward" in rule.fingerprints:
        if _hash(forward) not in rule.fingerprints["forward"]:
            return None
    elif not {what.split("/")[0] for what in rule.fingerprints} <= _names(forward):
        return None
    wrong = []
    for what, known in rule.fingerprints.items():
        if what == "forward":
            continue
        if what.startswith("self."):
            _, node = package.method(module, cls, what[5:])
        else:
            at, node = home, None
            for name in what.split("/"):
                at, node = package.resolve(at, name)
        if not isinstance(node, ast.FunctionDef) or _hash(node) not in known:
            wrong.append((what, node if isinstance(node, ast.FunctionDef) else None))
    return wrong


class Nearest(NamedTuple):
    """The known source that another is nearest to."""

    name: str
    package: str
    version: str
    apart: int  # statements that differ; 0 where names alone do
    of: int

    def __str__(self):
        what = f"{self.apart} of {self.of} statements differ" if self.apart else "the same but for its names"
        return f"near {self.name} of {self.package} {self.version}: {what}"


def nearest(node, table, name=None):
    """The nearest of the known sources, if one is near; of two, the one with the same name."""
    structure, statements = structure_node(node), statements_node(node)
    best = None
    for source in table:
        matcher = difflib.SequenceMatcher(None, source.statements, statements, autojunk=False)
        if source.structure != structure and matcher.quick_ratio() < NEAR:
            continue
        share = matcher.ratio()
        near = source.structure == structure or (share >= NEAR and len(statements) > 3)
        rank = share, source.name == name
        if near and (best is None or rank > best[0]):
            total = max(len(source.statements), len(statements))
            apart = 0 if source.structure == structure else max(round((1 - share) * total), 1)
            best = rank, Nearest(source.name, source.package, source.versions[-1], apart, total)
    return best and best[1]


class Finding(NamedTuple):
    name: str  # as in the table
    kind: str
    state: str  # "known", "near" or "unknown"
    detail: str  # the rules, what it is near to, or what of it is not known


def scan(package, rules, near=True):
    """What the rules know of each class of a package that they might care for. near: also to which source the others
    are near."""
    _, table = known_sources.read()
    table = [source for source in table if source.package == package.name]
    processors = {source.hash for source in table if source.name.endswith(".__call__")}
    for module in package.modules:
        for cls in module.classes:
            method = "__call__" if kind_of(cls, ast.Pass()) == "processor" else "forward"
            home, node = package.method(module, cls, method)
            kind = node and kind_of(cls, node)
            if not kind:
                continue
            name = table_name(package, module, f"{cls}.{method}")
            others = [ast.unparse(d) for d in node.decorator_list]
            others = [other for other in others if other.partition("(")[0] not in TRANSPARENT]
            if others:
                yield Finding(name, kind, "unknown", f"decorated by {', '.join(others)}")
            elif kind == "processor" and _hash(node) in processors:
                yield Finding(name, kind, "known", "by rules for its attention")
            else:
                judged = [(rule, _fits(package, rule, module, cls, home, node)) for rule in rules]
                known, detail = _by_rules(package, module, cls, node, judged)
                if known or not near:
                    yield Finding(name, kind, "known" if known else "unknown", detail)
                else:
                    yield Finding(name, kind, *_otherwise(name, node, judged, table))


def _by_rules(package, module, cls, node, judged):
    """Whether a class is known, and by which rules."""
    fitting = [rule.name for rule, wrong in judged if wrong == []]
    if not fitting:
        from .residual_norm import RULES as STATEMENTS

        rules = [rule for rule, _ in judged]
        fitting = [rule.name for rule in rules if rule in STATEMENTS and _norms(package, rules, module, cls, node)]
    return bool(fitting), ", ".join(fitting)


def _norms(package, rules, module, cls, node):
    """The norms that read a sum in a forward, and that a rule knows by the class its constructor makes them of."""
    from .residual_norm import sites

    wanted = {attribute for _, _, _, attribute in sites(node)}
    home, init = package.method(module, cls, "__init__") if wanted else (None, None)
    found = []
    for statement in ast.walk(init) if init else ():
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        made = {target.attr for target in targets if isinstance(target, ast.Attribute)} & wanted
        if made and isinstance(statement.value, ast.Call):
            name = ast.unparse(statement.value.func)
            at, forward = package.method(home, name, "forward")
            fits = [rule for rule in rules if rule.facts and rule.op == "norm"] if forward else []
            if name in _OF_TORCH or any(_fits(package, rule, home, name, at, forward) == [] for rule in fits):
                found += made
    return found


def _otherwise(name, node, judged, table):
    """The state of a class that no rule knows: near to a source that is known, or unknown; and the detail."""
    wrong = min(((len(wrong), *wrong[0], rule) for rule, wrong in judged if wrong), key=lambda w: w[0], default=None)
    if wrong is None:
        method = name.rpartition(".")[2]
        near = nearest(node, [source for source in table if source.name.endswith(f".{method}")], name)
        return ("near", str(near)) if near else ("unknown", _hash(node))
    _, what, part, rule = wrong
    near = part and nearest(part, [source for source in table if source.hash in rule.fingerprints[what]])
    return ("near", f"{what} is {near}") if near else ("unknown", f"{what} is {part and _hash(part)}")


def counts(findings):
    """{kind: {state: number of classes}}"""
    made = {kind: {"known": 0, "near": 0, "unknown": 0} for kind in KINDS}
    for finding in findings:
        made[finding.kind][finding.state] += 1
    return {kind: states for kind, states in made.items() if any(states.values())}


def print_scan(packages):
    try:
        from .frame import LIBRARIES, rules_for
    except ImportError as error:  # rules are made of the ops, and these come with the native part
        sys.exit(f"python -m adze.fingerprint --scan: {error}")

    gc.disable()  # syntax trees have no cycles, and there are millions of nodes

    for package in packages:
        print(f"{package.name} {package.version}")
        findings = list(scan(package, rules_for(*({package.name} & set(LIBRARIES)))))
        for finding in sorted(findings, key=lambda f: (KINDS.index(f.kind), f.state, f.name)):
            print(f"  {finding.kind:9}  {finding.state:7}  {finding.name}  {finding.detail}")
        for kind, states in counts(findings).items():
            print(f"  {kind:9}  " + ", ".join(f"{n} {state}" for state, n in states.items()))
        if package.name in LIBRARIES and package.version not in known_sources.supported(package.name):
            print("  the tests are run with " + ", ".join(known_sources.supported(package.name)))


def record(packages, accepted=()):
    """Adds the versions of these packages to the sources they have. Returns the names whose source has changed, with
    the node; the new and the changed sources of accepted names are added. Raises ValueError where no package has an
    accepted name."""
    supported, table = known_sources.read()
    changed, missing = {}, set(accepted)
    for package in packages:
        here = dict(package.functions())
        own = {source.hash for source in table if source.package == package.name}
        for name in {source.name for source in table if source.package == package.name} | set(accepted):
            if name not in here:
                continue
            node = here[name]
            missing.discard(name)
            found = [i for i, s in enumerate(table) if (s.name, s.hash) == (name, _hash(node))]
            if found:
                versions = sorted({*table[found[0]].versions, package.version}, key=known_sources.version_key)
                table[found[0]] = table[found[0]]._replace(versions=tuple(versions))
            elif name in accepted:
                table.append(_source(package, name, node))
            elif _hash(node) not in own:
                changed[name] = node
    if missing:
        versions = ", ".join(f"{package.name} {package.version}" for package in packages)
        raise ValueError(f"--accept {' '.join(sorted(missing))}: not in {versions}; --scan lists the names")
    known_sources.write(supported, table)
    return changed


def _source(package, name, node):
    return known_sources.Source(
        _hash(node), package.name, name, (package.version,), structure_node(node), tuple(statements_node(node))
    )


def normalised(node):
    """The text that a fingerprint is of, for people: without annotations, decorators and docstring."""
    node = ast.parse(ast.unparse(node)).body[0]
    node.decorator_list, node.returns = [], None
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            inner.annotation = None
        if isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def diff(old, new, names):
    """The normalised sources of some names in two versions of a package, as unified diffs."""
    before, after = dict(old.functions()), dict(new.functions())
    lines = []
    for name in names:
        texts = [normalised(found[name]).splitlines() if name in found else [] for found in (before, after)]
        titles = [f"{name} {package.version}" for package in (old, new)]
        lines += difflib.unified_diff(*texts, *titles, lineterm="", n=99)
    return lines


def _at(package, folder):
    """Another version of a package, in a folder that pip or unzip has made."""
    folder = pathlib.Path(folder)
    found = sorted(folder.glob(f"{package.name}-*.dist-info"))
    if len(found) != 1:
        sys.exit(f"{folder} holds {len(found)} versions of {package.name}, and must hold one")
    version = found[0].name.removeprefix(f"{package.name}-").removesuffix(".dist-info")
    return Package(package.name, folder / package.name, version)


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m adze.fingerprint", description=__doc__)
    does = parser.add_mutually_exclusive_group(required=True)
    does.add_argument("--scan", action="store_true", help="list what is known, near to it, and unknown")
    does.add_argument("--record", action="store_true", help="add the versions that are here to fingerprints.json")
    does.add_argument("--diff", metavar="FOLDER", help="show what known sources were in the version in this folder")
    parser.add_argument("--package", action="append", choices=sorted(PACKAGES), help="default: all that are here")
    parser.add_argument("--of", metavar="FOLDER", help="of the version in this folder, not the installed one")
    parser.add_argument(
        "--accept",
        nargs="*",
        default=[],
        metavar="NAME",
        help="with --record: also add the sources of these functions, as --scan names them "
        "(llama:LlamaRMSNorm.forward); read each first: its rule must compute what the source computes",
    )
    options = parser.parse_args(arguments)
    if options.accept and not options.record:
        parser.error("--accept goes with --record")
    packages = [found for name in options.package or PACKAGES if (found := installed(name)) is not None]
    if options.of:
        packages = [_at(package, options.of) for package in packages]
    if options.scan:
        print_scan(packages)
    elif options.record:
        try:
            changed = record(packages, options.accept)
        except ValueError as error:
            sys.exit(f"python -m adze.fingerprint: {error}")
        for name in options.accept:
            print(f"known: {name}")
        for name, node in sorted(changed.items()):
            print(f"changed: {name} is {_hash(node)} now; --diff shows it, --accept {name} adds it")
    else:
        for package in packages:
            names = sorted({source.name for source in known_sources.read()[1] if source.package == package.name})
            print(*diff(_at(package, options.diff), package, names), sep="\n")
