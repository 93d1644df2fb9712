"""A name for the source of a function: the same on every Python, whatever its comments, annotations and docstring."""

import ast
import contextlib
import functools
import hashlib
import importlib
import inspect
import re
import sys
import textwrap
import types

_SKIPPED = {"ctx", "type_comment", "kind", "type_params", "decorator_list", "returns", "annotation"}
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def _text(node):
    if isinstance(node, ast.AST):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            node = ast.Assign(targets=[node.target], value=node.value)
        fields = []
        for name, value in ast.iter_fields(node):
            if name in _SKIPPED or value is None or value == []:
                continue
            if (
                name == "body"
                and isinstance(value, list)
                and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            ):
                value = _without_docstring(value)
            if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty strings in some
                value = [part for part in value if getattr(part, "value", None) != ""]
            fields.append(f"{name}={_text(value)}")
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_text(item) for item in node)}]"
    return repr(node)


def _without_docstring(body):
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def fingerprint_source(source, name=None):
    """Of the function called `name` in a source text, or of the first one: 12 hexadecimal digits."""
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and name in (None, node.name):
            return fingerprint_node(node)
    raise ValueError("no function in this source")


def fingerprint_node(node):
    """Of a function in a syntax tree."""
    return _digest(_text(node.args) + _text(_without_docstring(node.body)))


def _digest(text, digits=12):
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def structure_node(node):
    """Of a function in a syntax tree without the names in it: the same whatever they are."""
    text = _text(node.args) + _text(_without_docstring(node.body))
    return _digest(re.sub(r"\b(id|arg|attr|name)='[^']*'", r"\1", text))


def statements_node(node):
    """Four hexadecimal digits for the arguments of a function and for each of its statements, nested ones by their
    heads and then their own statements."""
    found = [_digest(_text(node.args), 4)]

    def walk(body):
        for statement in body:
            blocks = {name: value for name, value in ast.iter_fields(statement) if name in _BLOCKS}
            head = type(statement)(**{n: v for n, v in ast.iter_fields(statement) if n not in blocks})
            found.append(_digest(_text(head), 4))
            for block in blocks.values():
                walk(block)

    walk(_without_docstring(node.body))
    return found


# Decorators that adze keeps: the module and the name of the function that one makes, and fingerprints of its source.
DECORATORS = {
    ("torch.utils._contextlib", "decorate_context"): frozenset(
        ["675da31de468"]
    ),  # torch.no_grad() and other contexts
    ("transformers.utils.deprecation", "wrapped_func"): frozenset(["64b6bfaa1956"]),  # deprecate_kwarg
    ("transformers.modeling_rope_utils", "wrapper"): frozenset(
        ["1c01844fede3"]
    ),  # dynamic_rope_update: it may change the frequencies before each call
    ("transformers.modeling_layers", "forward_with_checkpointing"): frozenset(
        ["faf896ea459b"]
    ),  # of every layer, from 5.23 on: it asks whether the class has it, which a patch leaves as it is
}


def unwrapped(fn):
    """The function itself: without a binding, or the module that `kernels` makes of it.

    A function that wraps another is not unwrapped: what it does in addition to the call would be lost."""
    while True:
        if isinstance(fn, types.MethodType):
            fn = fn.__func__
        elif not isinstance(fn, types.FunctionType) and _held_function(fn) is not None:
            fn = _held_function(fn)
        else:
            return fn


def _held_function(module):
    """The function behind a module whose forward only calls it, as `kernels` makes for functions."""
    cls = type(module)
    forward = getattr(cls, "forward", None)
    cells = getattr(forward, "__closure__", None) or ()
    held = [c.cell_contents for c in cells if isinstance(c.cell_contents, types.FunctionType)]
    if not cls.__module__.startswith("kernels.") or len(held) != 1:
        return None
    own = module.__dict__
    replaced = own.get("forward")  # by a kernel of the Hub, or by somebody else
    if replaced is not None and getattr(replaced, "__func__", None) is not forward:
        return None
    return None if own.get("_forward_hooks") or own.get("_forward_pre_hooks") else held[0]


def _cells(function):
    """The values of a function's closure, by name."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            values[name] = cell.cell_contents
    return values


def _decorated(function):
    """The function that a decorator of the list has wrapped; None where there is none, or it is another decorator."""
    inner = getattr(function, "__wrapped__", None)
    if not isinstance(function, types.FunctionType) or not isinstance(inner, types.FunctionType):
        return None
    maker = function.__globals__.get("__name__"), function.__code__.co_name
    if fingerprint(function) not in DECORATORS.get(maker, ()):
        return None
    return inner if [value for value in _cells(function).values() if value is inner] == [inner] else None


def undecorated(fn):
    """unwrapped(fn) without the decorators of the list, which decorated_like puts back."""
    fn = unwrapped(fn)
    while (inner := _decorated(fn)) is not None:
        fn = inner
    return fn


def decorated_like(function, made):
    """A function with the decorators of the list that another has; their own functions are made again around it."""
    inner = _decorated(function)
    if inner is None:
        return made
    made = decorated_like(inner, made)
    held = _cells(function)
    cells = [
        types.CellType(made) if held.get(name) is inner else cell
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    ]
    again = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    again.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(again, made)
    return again


@functools.cache
def _of_code(code):
    lines, _ = inspect.getsourcelines(code)
    return fingerprint_source("".join(lines))


def fingerprint(fn):
    """12 hexadecimal digits for the source of a function, or None where there is no Python source."""
    code = getattr(unwrapped(fn), "__code__", None)
    try:
        return None if code is None else _of_code(code)
    except (OSError, SyntaxError, ValueError):
        return None


def described(fn):
    """A function as text for a report: its fingerprint, or the function that wraps it."""
    fn = undecorated(fn)
    if not hasattr(fn, "__wrapped__"):
        return fingerprint(fn)
    home = getattr(fn, "__globals__", {}).get("__name__")
    return f"wrapped by {home}.{fn.__code__.co_name}" if home else f"wrapped by a {type(fn).__name__}"


def main(names):
    for name in names:
        module, colon, path = name.partition(":")
        try:
            if not (module and colon and path):
                raise ImportError("it must be module:function or module:Class.forward")
            found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            sys.exit(f"python -m adze.fingerprint: {name!r} is not found: {error}")
        print(fingerprint(undecorated(found)), name)
