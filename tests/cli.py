"""The program as a user sees it: options, exit statuses, lines that are wrong, files that cannot be written.

python3 tests/cli.py build/adze FOLDER
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

verdicts = []


def expect(good, what):
    verdicts.append(bool(good))
    if not good:
        print("FAIL", what)


class Program:
    def __init__(self, path):
        self.path = path

    def __call__(self, *arguments, **settings):
        """Exit status, standard output and standard error."""
        run = subprocess.run(
            [self.path, *arguments], capture_output=True, text=True, timeout=300, env={**os.environ, **settings}
        )
        return run.returncode, run.stdout, run.stderr

    def says(self, status, text, *arguments):
        """The program ends with this status; what it says, wherever it says it, has a match of the text."""
        got, out, error = self(*arguments)
        good = got == status and re.search(text, out + error)
        expect(good, f"adze {' '.join(arguments)}: status {got} instead of {status}, or not '{text}':\n{out}{error}")


def options(adze):
    version = r"^adze \d+\.\d+\.\d+\n$"
    adze.says(0, version, "--version")
    adze.says(2, r"no command is called 'nosuch'", "nosuch")
    adze.says(2, r"adze COMMAND --help", *[])
    for word in ("-h", "--help"):
        adze.says(0, r"adze check .*\n", word)
        for command in ("info", "check", "bench", "run", "tune", "new", "skills"):
            adze.says(0, rf"^adze {command} ", command, word)
    for command in ("info", "check", "bench", "run", "tune", "new", "skills"):
        adze.says(0, version, command, "--version")
        adze.says(2, rf"adze {command}: '--nosuch' is not an option", command, "--nosuch")
        adze.says(2, rf"adze {command}: '--nosuch=1' is not an option", command, "--nosuch=1")
    for command in ("check", "bench", "run"):
        adze.says(2, r"no device is called 'nosuch'; it is cpu, cuda or a number", command, "--device=nosuch")
        adze.says(2, r"no device is called ''", command, "--device=")
        adze.says(2, r"no device is called '-1'", command, "--device", "-1")
        adze.says(2, r"'--device' needs a value", command, "--device")
        adze.says(2, r"'--device' is given twice", command, "--device=cpu", "--device", "cpu")
    for words in (["skills", "add", "--dest="], ["new", "op", "my_op", "--dir", ""], ["bench", "--html="]):
        adze.says(2, rf"adze {'new op' if words[0] == 'new' else words[0]}: --\w+ is empty", *words)
    adze.says(2, r"'--self' takes no value", "check", "--self=1")
    adze.says(2, r"'glu' is a second word", "check", "rms_norm", "glu")
    adze.says(2, r"no op is called 'nosuch'", "check", "nosuch")
    adze.says(2, r"no op is called 'nosuch'", "check", "nosuch", "--self")
    adze.says(2, r"no op is called 'nosuch'", "bench", "nosuch")
    adze.says(2, r"no kernel is called 'nosuch'", "check", "--kernel=nosuch")
    adze.says(2, r"--require is 'tpu', it must be cuda", "check", "--require=tpu")
    adze.says(2, r"--device cpu leaves out what --require=cuda asks for", "check", "--device=cpu", "--require=cuda")
    adze.says(2, r"--dtype is 'f64', it must be bf16\|f16\|f32", "bench", "--dtype=f64")
    adze.says(2, r"--quick and --full", "bench", "--quick", "--full")
    adze.says(2, r"'y' is a second word", "info", "x", "y")
    adze.says(0, r"\n[1-9]\d* passed, 0 failed", "check", "rope_table", "--device=cpu", "--kernel=cpu")
    full = ["check", "softmax", "--device=cpu", "--kernel=cpu", "-v"]
    dtypes = [re.findall(r"x=(\w+)\[7,123\]\n", adze(*words)[1]) for words in (full, [*full, "--brief"])]
    expect(len(dtypes[0]) == 3 and len(dtypes[1]) == 1, f"--brief checks one dtype of a case: {dtypes}")
    few = ["check", "attention", "--device=cpu", "--kernel=cpu", "--brief", "--small", "-v"]
    adze.says(0, r"q=\w+\[2,4,5,64\][^$]*--   attention: [1-9]\d? calls above 4 Mflop left out\n", *few)


def devices(adze):
    """A device that is asked for and is not there is a failure, and is not called anything else."""
    gone = r"(no CUDA device 999|without CUDA)"
    adze.says(1, gone + r"\n0 passed, 1 failed, 0 skipped", "check", "rms_norm", "--device=999")
    adze.says(2, gone, "bench", "rms_norm", "--device=999")
    adze.says(2, gone, "run", "rms_norm x=bf16[4,8]", "--device=999")
    if "cuda: no device" in adze("info")[1]:
        adze.says(1, r"CUDA.*\n0 passed, 1 failed, 0 skipped", "check", "rms_norm", "--device=cuda")
        adze.says(1, r"FAIL +cuda kernels are required", "check", "rope_table", "--require=cuda")
        adze.says(1, r"FAIL +self: kernels that wait too late", "check", "--self", "gated_add", "--require=cuda")
        adze.says(1, r"FAIL +self: kernels that wait too late", "check", "--self", "gated_add", "--device=cuda")
        adze.says(0, r"--   self: kernels that wait too late skipped", "check", "--self", "gated_add")


def lines(adze):
    bad = {
        "": "no op is called '', it must be one of rms_norm, .*rope_table",
        "nosuch x=bf16[4,8]": "no op is called 'nosuch', it must be one of rms_norm, ",
        "rms_norm": "x is none",
        "rms_norm y=bf16[4,8]": "rms_norm has no field 'y', it must be one of out, sum, x, .*out_dtype",
        "rms_norm x=bf16[4,8] x=bf16[4,8]": "a field is given twice",
        "rms_norm x=bf17[4,8]": "a dtype is expected, one of none, f32, f16, bf16, ",
        "rms_norm x=bf16[4,8": "',' or ']' is expected",
        "rms_norm x=bf16[4,8]z": "a space is expected at 'z'",
        "rms_norm x=bf16[4:8,8]": "strides are given for some dimensions only",
        "rms_norm x=bf16[1,2,3,4,5,6]": "at most 5 dimensions",
        "rms_norm x=bf16[99999999999999999999]": "does not fit 64 bits",
        "rms_norm x=bf16[9223372036854775807,9223372036854775807]": "the sizes does not fit 64 bits at the end",
        "rms_norm x=bf16[-1,8]": "negative size",
        "rms_norm x=bf16[2:1099511627776,8:1]": "x has a negative size or reaches too far",
        "rms_norm x=bf16[4,8]@weight": "a tensor is placed in one that is not given",
        "rms_norm x=bf16[4,8]@nosuch": "no other tensor has this name",
        "rms_norm x=bf16[1000000000]": "too large to be verified",
        # Views that are broadcast have little memory, whatever their sizes.
        "embed table=f32[1099511627776:0,8:1] ids=i64[4]": "table has more than 1099511627776 elements",
        "embed table=f32[4294967296:0,4294967296:1] ids=i64[4]": "table has more than 1099511627776 elements",
        "quantize x=bf16[1099511627776,0] dtype=5 group=32": "or is empty and has more than 67108864 rows",
        "embed table=f32[109951162777:0,8:1] ids=i64[4]": "too large to be verified: it has 8796093022",
        "attention q=f32[1,1,1,8] k=f32[1:0,1:0,9999999999:0,8:1] v=f32[1:0,1:0,9999999999:0,8:1]": (
            "too large to be verified"
        ),
        "rms_norm x=bf16[1048576,1048576]": "larger than half the memory",
        "rms_norm x=bf16[4,8] values:nosuch": "values: is 'nosuch', it must be one of tiny, .*special",
        "rms_norm x=bf16[4,8] values:": "values: is ''",
        "rms_norm x=bf16[4,8] values:tiny values:zero": "values: is given twice",
        "rms_norm x=bf16[4,8] flags=nosuch": "flags must be a whole number or one of const_weights, batch_invariant",
        "rms_norm x=bf16[4,8] flags=": "a whole number is expected",
        "rms_norm x=bf16[4,8] flags=128": (
            "flags is 0x80, it must be 0 or a sum of ADZE_CONST_WEIGHTS .*ADZE_BATCH_INVARIANT .*and ADZE_CONST_CACHE"
        ),
        "rms_norm x=bf16[4,8] flags=1 flags=1": "flags is given twice",
        "glu x=bf16[4,8] act=nosuch": "act must be a whole number or one of silu",
    }
    for line, text in bad.items():
        adze.says(2, text, "run", line, "--device=cpu")
    adze.says(2, "a line is missing", "run")
    # What ADZE_TRACE prints is a line again, with its flags and where its tensors lie.
    line = "rms_norm out=bf16[4,8] x=bf16[4,8]@out weight=f32[8]@+1 eps=1e-6 rounding=1 flags=const_weights"
    for _ in range(2):
        status, _, trace = adze("run", line, "--device=cpu", ADZE_TRACE="1")
        last = trace.strip().split("\n")[-1]
        expect(status == 0 and last.startswith("rms_norm out=bf16[4:8,8:1]"), f"the trace of {line} is {trace}")
        expect(" flags=const_weights -> cpu" in last and "x=bf16[4:8,8:1]@out" in last, f"it leaves out: {last}")
        line = last
    status, _, trace = adze("run", "rms_norm x=bf16[4,8]", "--device=cpu", ADZE_TRACE="1")
    expect(status == 0 and "flags" not in trace, f"flags nobody gave: {trace}")
    # A large call is filled with the memory of fewer rows, also where a batch does not follow the rows before it.
    line = "rms_norm x=f32[4:1050000,2049:512,512:1]"
    status, text, _ = adze("run", line, "--device=cpu")
    expect(status == 0 and "fewer rows" in text and "right" in text, f"{line} is verified as {text}")


def memory(adze):
    """Small calls take no more than is needed to leave the cache twice over."""
    cache = int(re.search(r"last cache (\d+) KB", adze("info")[1])[1])
    limit = 2 * (4 * cache + (16 << 10)) + (256 << 10)
    for shape in ("4,8", "1,8", "1,1"):
        arguments = [adze.path, "run", f"rms_norm x=bf16[{shape}]", "--device=cpu"]
        child = os.posix_spawn(adze.path, arguments, os.environ)
        _, status, used = os.wait4(child, 0)
        status = os.waitstatus_to_exitcode(status)
        expect(status == 0, f"a call of [{shape}] ends with {status}")
        expect(used.ru_maxrss < limit, f"a call of [{shape}] takes {used.ru_maxrss} KB, {limit} would do")


def files(adze, folder):
    missing = str(folder / "nosuch" / "file")
    for option in ("--json", "--html"):
        adze.says(2, f"^adze bench: '{re.escape(missing)}' cannot be written\n$", "bench", option, missing)
    record = folder / "unused.json"
    record.unlink(missing_ok=True)
    adze.says(2, "cannot be written", "bench", "--json", str(record), "--html", missing)
    expect(not record.exists(), "a record was begun that is never written")
    record.write_text("what is there stays")
    adze.says(2, "cannot be written", "bench", "--json", str(record), "--html", missing)
    expect(record.read_text() == "what is there stays", "a file was cleared before the run")
    adze.says(2, "cannot be read", "bench", "--against", missing)
    for text in ("", "{}\n", "\0\1\2" * 1000, '{"adze_bench": 1,\n'):
        record.write_text(text)
        adze.says(2, "was not written by adze bench --json", "bench", "--against", str(record))
    for command in (["info"], ["--help"], ["check", "rope_table", "--device=cpu"]):
        with open("/dev/full", "w") as full:
            run = subprocess.run([adze.path, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
        good = run.returncode == 1 and "standard output cannot be written" in run.stderr
        expect(good, f"a full disk: {run.returncode}, {run.stderr}")


def folders(adze, folder):
    """A project with all ops, under the longest names; folders whose names are too long."""
    ops = "rms_norm layer_norm glu activation softmax gated_add rope gemm attention quantize".split()
    names = [f"{'own' * 13}"[: 39 - len(op)] + "_" + op for op in ops]
    for k, words in enumerate((ops, [f"{name}={op}" for name, op in zip(names, ops, strict=True)])):
        made = folder / f"project{k}"
        shutil.rmtree(made, ignore_errors=True)
        new = ["new", "project", "all-ops", "--model=llama", "--op", ",".join(words), "--dir"]
        adze.says(0, r"all-ops, kernels for llama, in ", *new, str(made))
        readme = made / "README.md"
        shown = [readme.exists() and name in readme.read_text() for name in (ops, names)[k]]
        expect(all(shown), f"README.md of a project names of its ops {shown}")
    adze.says(2, r"^adze new project: --dir is longer than 1024\n$", *new, "d/" * 600)
    adze.says(2, r"^adze new op: --dir is longer than 1024\n$", "new", "op", "my_op", "--dir", "d/" * 600)
    adze.says(2, r"^adze skills: --dest is longer than 4096\n$", "skills", "add", "--dest", "d/" * 3000)


def calls(adze, folder):
    """The line of an option, or those of a file, are calls whatever is between their words and after an arrow."""
    record, file = folder / "calls.json", folder / "calls.txt"
    line = "rms_norm x=f32[4,8] eps=1e-06 rounding=1"
    bench = ["bench", "--quick", "--device=cpu", "--json", str(record), "--line"]
    for text in (line.replace(" ", " " * 200), " \t" + line.replace(" ", "\t"), line + ' -> "cpu" \\'):
        file.write_text(f"# comment\n\n \n{text}\r\n")
        for option in (text, f"@{file}"):
            status, _, error = adze(*bench, option)
            rows = json.loads(record.read_text())["rows"]
            expect(status == 0 and [row["line"] for row in rows] == [line], f"{text}: {rows} {error}")
    many = line + "".join(f" x{i}=f32[1]" for i in range(100))
    adze.says(2, r"^adze bench: a line has at most 1023 characters", "bench", "--line", many)
    for text in (many + "\n", "a" * 100000, "\0" * 100000, line + "\0\n" + line):
        file.write_text(text)
        adze.says(2, rf"^adze bench: line 1 of '{file}': a line has at most 1023 ch", "bench", "--line", f"@{file}")


def markdown(adze, folder):
    """The table of an op's fields: a note that names one field of a declaration stands at that field only."""
    header = pathlib.Path(folder, "include/adze.h")
    header.parent.mkdir(parents=True, exist_ok=True)
    text = pathlib.Path(__file__).parent.parent.joinpath("include/adze.h").read_text()
    for note, at_eps, at_offset in (
        ("weight_offset: one", "", "weight_offset: one"),
        ("eps: one", "eps: one", ""),
        ("0: none", "0: none", "0: none"),
    ):
        changed, declarations = re.subn(
            r"float eps, weight_offset;.*", f"float eps, weight_offset; /* {note} */", text
        )
        expect(declarations, "adze.h declares no `float eps, weight_offset;`")
        header.write_text(changed)
        out = adze("info", "--markdown", str(header))[1]
        rows = set(re.findall(r"\| `(eps|weight_offset)` \| float \| (.*) \|", out.split("## group_norm")[0]))
        expect(rows == {("eps", at_eps), ("weight_offset", at_offset)}, f"fields with the note '{note}': {rows}")


def main(path, folder):
    adze, folder = Program(path), pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    options(adze)
    devices(adze)
    lines(adze)
    memory(adze)
    files(adze, folder)
    calls(adze, folder)
    folders(adze, folder)
    markdown(adze, folder)
    print(f"{sum(verdicts)} passed, {len(verdicts) - sum(verdicts)} failed")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
