"""A rule by syntax, for blocks whose source is not known: a sum and the norm that reads it become one call.

    hidden_states = residual + hidden_states              hidden_states, n = fused(residual, hidden_states, self.norm)
    residual = hidden_states                      ->      residual = hidden_states
    hidden_states = self.norm(hidden_states)              hidden_states = n

The rest of the forward is compiled unchanged: it keeps its globals, defaults, decorators and line numbers. Where the
call cannot fuse, it adds and then norms, so that the statements compute the same for any values. A forward stays as
it is when its source does not compile to the bytecode that runs, or when it does anything unusual (_odd)."""

import __future__

import ast
import functools
import inspect
import types

import torch

from .frame import Rule
from .norm_act import add_norm, norm_of_sum

_BLOCKS = ("body", "orelse", "finalbody")
_FUTURE = functools.reduce(lambda a, b: a | getattr(__future__, b).compiler_flag, __future__.all_feature_names, 0)
_NORMED = "adze_normed"


def _blocks(node):
    """Every list of statements in a function, not those of functions and classes within it."""
    for name in _BLOCKS:
        block = getattr(node, name, None)
        if isinstance(block, list) and block:
            yield block
            for statement in block:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from _blocks(statement)
    for handler in [*getattr(node, "handlers", ()), *getattr(node, "cases", ())]:
        yield from _blocks(handler)


def _assigned(statement, kind):
    """The name that a statement gives a value of this kind, where that is all it does."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, kind) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def _normed_attribute(call, names):
    """The attribute, where a call is self.attribute(one of the names)."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return None
    arguments = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
    if function.value.id != "self" or call.keywords or len(call.args) != 1 or not set(arguments) & names:
        return None
    return function.attr


def sites(function):
    """(statements, index of the sum, index of the norm, attribute of the norm) of each sum that is normed."""
    for block in _blocks(function):
        for i, statement in enumerate(block[:-1]):
            total = _assigned(statement, ast.BinOp)
            if total is None or not isinstance(statement.value.op, ast.Add) or total == "self":
                continue
            kept = _assigned(block[i + 1], ast.Name)
            keeps = kept not in (None, "self", total) and block[i + 1].value.id == total
            at = i + 2 if keeps else i + 1
            if at < len(block) and _assigned(block[at], ast.Call) is not None:
                attribute = _normed_attribute(block[at].value, {total, kept} if keeps else {total})
                if attribute is not None:
                    yield block, i, at, attribute


def _parsed(code):
    """The syntax tree of a function by its code, with the lines it has in its file; None where there is none."""
    try:
        lines, first = inspect.getsourcelines(code)
        found = ast.parse("".join(["if True:\n", *lines] if lines[0][0].isspace() else ["\n", *lines])).body
    except (OSError, SyntaxError):
        return None
    found = found[0].body if isinstance(found[0], ast.If) else found
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef):
        return None
    return ast.increment_lineno(found[0], first - 2)


def _odd(code, function):
    """Why a function must not be compiled again, or None."""
    if code.co_freevars:
        return "its forward uses names of a function or class around it"
    arguments = function.args
    if not arguments.args or arguments.args[0].arg != "self" or code.co_flags & inspect.CO_GENERATOR:
        return "its forward is no plain method"
    for node in ast.walk(function):
        names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
        for name in names:
            if isinstance(name, str) and (name.startswith("adze_") or _is_mangled(name)):
                return f"its forward has the name {name}"
        if isinstance(node, ast.Name) and node.id == "self" and not isinstance(node.ctx, ast.Load):
            return "its forward gives self another value"
        if isinstance(node, ast.Name) and node.id in ("locals", "vars", "eval", "exec", "super"):
            return f"its forward calls {node.id}"
    return None


def _is_mangled(name):
    return name.startswith("__") and not name.endswith("__")


def _imported(function, home):
    """The names in a function that its module has imported, judged by their values."""
    used = {node.id: home.get(node.id) for node in ast.walk(function) if isinstance(node, ast.Name)}

    def is_imported(value):
        if isinstance(value, (type, types.FunctionType)):
            return value.__module__ != home.get("__name__")
        return isinstance(value, types.ModuleType)

    return [name for name, value in used.items() if is_imported(value)]


def _compiled(function, original, names=()):
    """The code of a factory, whose parameters are `names` and which returns the function that replaces the original;
    and the code of that function."""
    code = original.__code__
    function.decorator_list, function.returns = [], None
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    # The default values are copied from the original later. Here only their number counts.
    function.args.defaults = [ast.Constant(None) for _ in function.args.defaults]
    function.args.kw_defaults = [default and ast.Constant(None) for default in function.args.kw_defaults]
    of = ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[])
    made = ast.Return(ast.Name(function.name, ast.Load()))
    factory = ast.FunctionDef("factory", of, [function, made], [])
    factory.type_params = []
    # Python compiles a call of an imported module's attribute to other bytecode, so it must see the imports here too.
    imports = [ast.Import([ast.alias(name)]) for name in _imported(function, original.__globals__)]
    seen = [ast.If(ast.Constant(False), imports, [])] if imports else []
    tree = ast.Module([ast.copy_location(node, function) for node in (*seen, factory)], [])
    ast.fix_missing_locations(tree)
    flags = code.co_flags & _FUTURE
    whole = compile(tree, code.co_filename, "exec", flags=flags, dont_inherit=True)
    outer = next(c for c in whole.co_consts if isinstance(c, types.CodeType))
    return whole, next(c for c in outer.co_consts if isinstance(c, types.CodeType))


def _same_code(a, b):
    """Whether two code objects have the same instructions."""
    if isinstance(a, types.CodeType) and isinstance(b, types.CodeType):
        fields = "code names varnames freevars cellvars argcount posonlyargcount kwonlyargcount".split()
        return (
            all(getattr(a, f"co_{field}") == getattr(b, f"co_{field}") for field in fields)
            and len(a.co_consts) == len(b.co_consts)
            and all(map(_same_code, a.co_consts, b.co_consts))
        )
    return type(a) is type(b) and repr(a) == repr(b)


@functools.lru_cache(1024)
def norms_of_sums(original):
    """The attributes of the norms in a function that read a sum made just before; () for a function that must not be
    compiled again."""
    function = _parsed(original.__code__)
    if function is None:
        return ()
    attributes = tuple(attribute for _, _, _, attribute in sites(function))
    if not attributes or _odd(original.__code__, function) is not None:
        return ()
    return attributes if _same_code(_compiled(function, original)[1], original.__code__) else ()


def _fused(norm, read):
    """A function (a, b, child) that returns child(a + b), and a + b as well if that is read. It is one launch where
    the child is a plain norm, else two steps."""

    def sum_and_norm(a, b, child):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            normed, total = add_norm(child, norm, b, a)
            return total, normed
        total = a + b
        return total, child(total)

    def norm_alone(a, b, child):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return norm_of_sum(child, norm, b, a)
        return child(a + b)

    return sum_and_norm if read else norm_alone


@functools.lru_cache(1024)
def _rewritten(original, attributes):
    """The code of a factory of the rewritten function, in which each sum and its norm are one call, and the factory's
    parameters: [(name, attribute of the norm, whether the sum itself is read)]. Layers of a class share the code."""
    function, given = _parsed(original.__code__), []
    for number, (block, i, at, attribute) in enumerate(list(sites(function))):
        if attribute not in attributes:
            continue
        total, last = block[i], block[at]
        name = f"adze_fused_{number}"
        call = ast.Call(ast.Name(name, ast.Load()), [total.value.left, total.value.right, last.value.func], [])
        read = at > i + 1 or last.targets[0].id != total.targets[0].id
        given.append((name, attribute, read))
        if read:
            pair = [ast.Name(total.targets[0].id, ast.Store()), ast.Name(_NORMED, ast.Store())]
            block[i] = ast.copy_location(ast.Assign([ast.Tuple(pair, ast.Store())], call), total)
            last.value = ast.Name(_NORMED, ast.Load())
        else:
            block[i] = ast.copy_location(ast.Pass(), total)
            last.value = call
    return _compiled(function, original, [name for name, _, _ in given])[0], given


def _build(module, ctx):
    original = ctx.original
    attributes = dict.fromkeys(norms_of_sums(original))
    facts = {name: ctx.facts(getattr(module, name, None), "norm") for name in attributes}
    known = frozenset(name for name, fact in facts.items() if not isinstance(fact, str))
    if not known:
        return "; ".join(f"{name}: {fact}" for name, fact in facts.items())
    factory, given = _rewritten(original, known)
    namespace = {}
    exec(factory, original.__globals__, namespace)
    made = namespace["factory"](**{name: _fused(facts[attribute], read) for name, attribute, read in given})
    made.__defaults__, made.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
    return made


def _matches(function):
    return isinstance(function, types.FunctionType) and bool(norms_of_sums(function))


RULES = [Rule("add + norm, by statements", "fuse", {}, _build, matches=_matches)]
