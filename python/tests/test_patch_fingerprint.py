"""Fingerprints: what they ignore, what they see, that they are the same everywhere, and what they reach."""

import functools
import subprocess
import sys

import pytest

from adze.patching.fingerprint import (
    decorated_like,
    described,
    fingerprint,
    fingerprint_source,
    main,
    undecorated,
    unwrapped,
)

BASE = "def forward(self, x, *, eps=1e-6):\n    y = x.pow(2).mean(-1, keepdim=True)\n    return x * rsqrt(y + eps)\n"
SAME = {
    "a docstring": BASE.replace("    y =", '    """Norm."""\n    y =', 1),
    "annotations": BASE.replace("x, *, eps=1e-6)", "x: Tensor, *, eps: float = 1e-6) -> Tensor"),
    "an annotated value": BASE.replace("y =", "y: Tensor ="),
    "a decorator": "@torch.no_grad()\n" + BASE,
    "comments and spaces": BASE.replace("\n    return", "\n\n    # why\n    return ( ").rstrip() + " )\n",
    "another name": BASE.replace("forward", "run"),
    "an indent": "    " + BASE.replace("\n    ", "\n        "),
}
OTHER = {
    "a default": BASE.replace("1e-6", "1e-5"),
    "a parameter": BASE.replace("x, *", "x, z, *"),
    "a constant": BASE.replace("pow(2)", "pow(3)"),
    "an operation": BASE.replace("x * rsqrt", "x / rsqrt"),
    "an order": BASE.replace("x * rsqrt(y + eps)", "rsqrt(y + eps) * x"),
    "a keyword": BASE.replace(", keepdim=True", ""),
    "a statement": BASE.replace("    return", "    y = y.float()\n    return"),
}


@pytest.mark.parametrize("what", SAME)
def test_ignores(what):
    assert fingerprint_source(SAME[what]) == fingerprint_source(BASE)


@pytest.mark.parametrize("what", OTHER)
def test_sees(what):
    assert fingerprint_source(OTHER[what]) != fingerprint_source(BASE)


# Much of the grammar; the value was the same on Python 3.10, 3.11, 3.12 and 3.13.
GRAMMAR = '''
async def f(a, /, b: int = 1, *c, d=None, **e):
    """Words."""
    x: int
    x: int = b if a else -b
    async with a as g, b:
        y = [i async for i in c if i not in d]
    def inner(z):
        """More words."""
        nonlocal x
        return lambda q=2: (q, *c, {**e}, f"{z!r:>{b}} {a[1:2, ..., None]}", b"\\x00", 1.5, 2j, "it's", True)
    try:
        x += a @ b; (n := x)
    except (ValueError, TypeError) as error:
        raise RuntimeError from error
    finally:
        del y
    while x < n <= 3 and not d:
        x -= 1
        if x: continue
        else: break
    return {k: v for k, v in e.items()}, {1, 2}, await a(*c, **e)
'''


def test_is_the_same_on_every_python():
    assert fingerprint_source(GRAMMAR) == "9c84e6f0a822"


def _decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class _Methods:
    def plain(self, x):
        return x + 1

    @_decorated
    def wrapped(self, x):
        return x + 1


def test_sees_through_bindings_and_not_through_wrappers():
    expected = fingerprint_source("def f(self, x): return x + 1")
    assert fingerprint(_Methods.plain) == fingerprint(_Methods().plain) == expected
    assert fingerprint(_Methods.wrapped) == fingerprint_source("def f(*args): return function(*args)")
    assert described(_Methods.wrapped) == f"wrapped by {__name__}.wrapper" and described(_Methods.plain) == expected
    assert fingerprint(functools.partial(_Methods.plain, x=2)) is None


def test_decorators_of_the_list_can_be_taken_off_and_put_back():
    torch = pytest.importorskip("torch")

    def with_gradients(x):
        return x, torch.is_grad_enabled()

    decorated = torch.no_grad()(torch.no_grad()(with_gradients))
    assert undecorated(decorated) is with_gradients
    again = decorated_like(decorated, lambda x: (-x, torch.is_grad_enabled()))
    assert again(2) == (-2, False) and decorated(2) == (2, False)
    assert undecorated(_Methods.wrapped) is _Methods.wrapped
    assert decorated_like(_Methods.wrapped, with_gradients) is with_gradients


def test_no_source_is_no_fingerprint():
    assert fingerprint(len) is None
    assert fingerprint(None) is None
    assert fingerprint(eval("lambda x: x")) is None


def test_sees_through_the_modules_that_kernels_makes_of_functions():
    layer = pytest.importorskip("kernels.layer.layer")

    def rotate(x):
        return -x

    made = layer._create_func_module(rotate)()
    assert unwrapped(made) is rotate
    assert fingerprint(made) == fingerprint(rotate)


def test_command():
    command = [sys.executable, "-m", "adze.fingerprint", "adze.fingerprint:unwrapped"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"{fingerprint(unwrapped)} adze.fingerprint:unwrapped\n"


@pytest.mark.parametrize("name", ["nosuch", "json:", "nosuch:f", "json:nosuch", "json:JSONEncoder.nosuch"])
def test_a_name_of_nothing(name):
    with pytest.raises(SystemExit, match=rf"adze.fingerprint: '{name}' is not found: "):
        main([name])
