"""Prints python/adze/operators/header.py: what Python must know of include/adze.h. `make docs` calls it.

python3 bind/header.py [FILE ...]    headers of more ops, of a project
"""

import pathlib
import re
import sys

HEADER = pathlib.Path(__file__).resolve().parent.parent / "include/adze.h"
OTHERS = {"BF16": "bfloat16", "F8E4M3": "float8_e4m3fn", "BOOL": "bool", "U8": "uint8"}  # F32 is float32, I8 is int8


def rounding(text):
    """The bits of .rounding: the block of defines that holds ADZE_ROUND_NORM."""
    block = next(block for block in re.findall(r"(?:^#define .*\n)+", text, re.M) if "ADZE_ROUND_NORM" in block)
    return {name: int(value) for name, value in re.findall(r"^#define ADZE_(\w+) +(\d+)", block, re.M)}


def flags(text):
    """The bits of .call.flags: the block of defines that holds ADZE_CONST_WEIGHTS."""
    block = next(block for block in re.findall(r"(?:^#define .*\n)+", text, re.M) if "ADZE_CONST_WEIGHTS" in block)
    return {name: int(value) for name, value in re.findall(r"^#define ADZE_(\w+) +(\d+)u", block, re.M)}


def dtypes(text):
    """The values of adze_dtype, by the names that NumPy and PyTorch have for them; they have none for 4 bits."""
    body = re.search(r"typedef enum adze_dtype \{(.*?)\}", text, re.S)[1]
    found = {}
    for name, value in re.findall(r"ADZE_(\w+) = (\d+)", body):
        kind = re.fullmatch(r"([FI])(\d+)", name)
        if name in OTHERS:
            found[OTHERS[name]] = int(value)
        elif kind and int(kind[2]) >= 8:
            found[("float" if kind[1] == "F" else "int") + kind[2]] = int(value)
    return found


def comment(text, op):
    """The comment above the args of an op."""
    alias = re.search(rf"^typedef (adze_\w+_args) adze_{op}_args;", text, re.M)
    struct = alias[1] if alias else f"adze_{op}_args"
    above = text[: text.index(f"typedef struct {struct} {{")].rstrip()
    lines = above[above.rindex("/*") + 2 :].removesuffix("*/").strip().splitlines()
    return "\n".join(line.removeprefix("   ").rstrip() for line in lines)


def main():
    text = HEADER.read_text() + "".join(pathlib.Path(path).read_text() for path in sys.argv[1:])
    ops = re.findall(r"^ADZE_API adze_status adze_(\w+)\(adze_stream \w+, const adze_\1_args \*args\);", text, re.M)
    print('"""include/adze.h for Python: constants, and what it says of each op. `make docs` writes this file."""\n')
    for name, values in (("ROUNDING", rounding(text)), ("FLAGS", flags(text)), ("DTYPES", dtypes(text))):
        print(f"{name} = {{", *(f'    "{key}": {value},' for key, value in values.items()), "}", sep="\n")
    print("OPS = {", *(f'    "{op}": """\\\n{comment(text, op)}""",' for op in ops), "}", sep="\n")


if __name__ == "__main__":
    main()
