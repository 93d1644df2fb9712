"""Kernels with variants: listed, traced, forced, checked and timed by name; and the table that `adze tune` writes.

python3 tests/variants.py build/adze PROGRAM BROKEN FOLDER

PROGRAM is `adze` whose op activation has a CPU kernel with two variants (tests/variants/op.c); in BROKEN one is
wrong.
"""

import pathlib
import re
import sys

from cli import Program, expect, verdicts

EVEN, ODD = "activation x=f32[3,4] act=relu", "activation x=f32[3,5] act=relu"


def names(adze, program):
    out = program("info", "activation")[1]
    expect(re.search(r"^plain\n +plain/even +rows of an even length\n +plain/any +every call\n$", out), out)
    adze.says(0, r"cpu\n", "info", "activation")
    adze.says(2, r"no op is called 'nosuch', it must be one of rms_norm ", "info", "nosuch")
    for line, forced, runs in ((EVEN, "", "even"), (ODD, "", "any"), (EVEN, "activation:plain/any", "any")):
        status, _, trace = program("run", line, ADZE_TRACE="1", ADZE_KERNEL=forced)
        expect(status == 0 and trace.splitlines()[-1].endswith(f" -> plain/{runs}"), f"{line}: {status} {trace}")
    for forced, text in {
        "activation:plain/even": "no kernel for this device.*of those that ADZE_KERNEL allows: plain/even",
        "activation:plain/nosuch": "plain has 2 variants, which `adze info activation` lists",
        "activation:nosuch/even": "activation has plain",
    }.items():
        status, _, error = program("run", ODD, ADZE_KERNEL=forced)
        expect(status == 2 and re.search(text, error), f"{forced}: {status} {error}")
    status, _, error = adze("run", ODD, "--device=cpu", ADZE_KERNEL="activation:cpu/even")
    expect(status == 2 and "cpu has 0 variants" in error, f"a kernel without variants: {status} {error}")


def check(program, broken):
    status, out, _ = program("check", "activation", "--device=cpu")
    expect(status == 0 and re.search(r"activation: each of 2 variants by name, [1-9]\d* cases\n", out), out)
    status, out, _ = program("check", "activation", "--device=cpu", "--kernel=plain/even")
    expect(status == 0 and re.search(r"activation.plain/even +[1-9]\d* cases", out), out)
    expect("plain/any" not in out, f"--kernel names one variant: {out}")
    program.says(2, "no kernel is called 'plain/nosuch'", "check", "--kernel=plain/nosuch")
    status, out, _ = broken("check", "activation", "--device=cpu")
    wrong = set(re.findall(r"FAIL (\S+):", out))
    expect(status == 1 and wrong == {"activation.plain", "activation.plain/any"}, f"a wrong variant: {wrong}")


def bench(program, folder):
    run = program("bench", "--quick", "--variants", "--line", EVEN, "--device=cpu")
    timed = re.findall(r"^activation +(\S+)", run[1], re.M)
    expect(timed == ["plain", "plain/even", "plain/any"], run)
    run = program("bench", "--quick", "--line", ODD, "--device=cpu")
    expect(re.findall(r"^activation +(\S+)", run[1], re.M) == ["plain"], run)
    program.says(2, "--line has an op of its own", "bench", "glu", "--line", EVEN)
    program.says(2, "no op is called 'nosuch'", "bench", "--line", "nosuch x=f32[1]")
    calls = folder / "calls"
    calls.write_text(f"# two calls\n\n{EVEN}\n{ODD}\n")
    run = program("bench", "--quick", "--line", f"@{calls}", "--device=cpu")
    expect(re.findall(r"^activation +(\S+)", run[1], re.M) == ["plain", "plain"], run)
    calls.write_text(f"{EVEN}\nnosuch x=f32[1]\n")
    program.says(2, "line 2 of .*no op is called 'nosuch'", "bench", "--line", f"@{calls}")
    calls.write_text("# no call\n")
    program.says(2, "has no line", "bench", "--line", f"@{calls}")
    program.says(2, "cannot be read", "bench", "--line", f"@{folder}/nosuch")


CALL = "call {form} {rows} {dim} 0 0 {before} rms_norm x=bf16[{rows},{dim}]\n"
HEAD = "adze tune rms_norm\nSMs {sms}\ncard {card}\ndate 2026-01-02\ndriver 580.1\ncommit abc\n"


def table(adze, folder):
    """The rows that recorded times give, and what of an earlier table stays."""
    times, path = folder / "times.txt", folder / "tuned.h"
    path.unlink(missing_ok=True)
    text = HEAD.format(sms=100, card="Card A")
    for rows, slow in ((1, 4.0), (16, 4.0), (256, 8.0), (4096, 80.0)):
        text += CALL.format(form=7, rows=rows, dim=64, before="8x1")
        text += f"time 8x1 {slow} 0.01\ntime any {2 * slow} 0.01\n"
        fast = {1: 3.95, 16: 3.0, 256: 7.0, 4096: 79.9}[rows]
        text += f"time 4x2 {fast} {0.2 if rows == 256 else 0.01}\n"
    text += CALL.format(form=9, rows=10, dim=64, before="nosuch") + "time 8x1 1 0\n"
    times.write_text(text)
    adze.says(0, r"8x1 +4\.00 us, 4x2 3\.00 us is faster", "tune", "rms_norm", "--times", str(times))
    expect(not path.exists(), "a table nobody asked for")
    adze.says(0, r"nosuch +was not timed", "tune", "rms_norm", "--times", str(times), "--table", str(path))
    rows = re.findall(r"^TUNED\(rms_norm, 7, (\d+), (\d+), 64, 0, 0, \"(\S+)\", \"8x1\",", path.read_text(), re.M)
    # Gains of 1 %, of less than the spread, and of 0.1 % are none; ranges meet half way.
    want = [("1", "4", "8x1"), ("5", "64", "4x2"), ("65", "1024", "8x1"), ("1025", "8192", "8x1")]
    expect(rows == want, f"{rows} instead of {want}")
    expect('CARD("Card A", 100, rms_norm, "2026-01-02", "580.1", "abc")\n' in path.read_text(), path.read_text())
    expect(path.read_text().count("TUNED(rms_norm") == 4, path.read_text())
    first = path.read_text()
    # Another card is added; the same card and op are replaced.
    times.write_text(
        HEAD.format(sms=99, card="Card A") + CALL.format(form=1, rows=2, dim=8, before="a") + "time a 1 0\n"
    )
    adze("tune", "rms_norm", "--times", str(times), "--table", str(path))
    both = path.read_text()
    expect(both.startswith(first) and both.count('\nCARD("') == 2, both)
    times.write_text(text)
    adze("tune", "rms_norm", "--times", str(times), "--table", str(path))
    again = path.read_text()
    expect(sorted(again.splitlines()) == sorted(both.splitlines()) and again != both, again)
    adze.says(2, "has times of rms_norm, not of glu", "tune", "glu", "--times", str(times))
    first_call = text[text.index("call") :].split("\n")[0]
    sizes = [re.sub(r"^(call \d+) \d+", rf"\1 {size}", first_call) + "\n" for size in (-1, 1 << 41, (1 << 63) - 1)]
    ends = [text.replace("Card A", 'Card "A'), text.replace("8x1", "8\\x1"), text + first_call + " */ #error\n"]
    tails = ["time 8x1 -1 0\n", *sizes]
    for damaged in (
        *("", "adze tune rms_norm\n", text.replace("time", "tame"), "\0\1" * 99, *ends),
        *(text + tail for tail in tails),
    ):
        times.write_text(damaged)
        adze.says(2, "was not written by adze tune --record", "tune", "rms_norm", "--times", str(times))
    other = folder / "other.h"
    other.write_text("int x;\n")
    times.write_text(text)
    adze.says(2, "is left as it is", "tune", "rms_norm", "--times", str(times), "--table", str(other))
    expect(other.read_text() == "int x;\n", "a file that is no table was changed")
    adze.says(2, "cannot be read", "tune", "rms_norm", "--times", str(folder / "nosuch"))
    missing = str(folder / "nosuch" / "file")
    adze.says(2, "cannot be written", "tune", "rms_norm", "--times", str(times), "--table", missing)
    # The table of the tree has the head that is written today.
    shipped = (pathlib.Path(__file__).parent.parent / "src/tuned.h").read_text()
    expect(shipped.startswith(first[: first.index('CARD("')]), "src/tuned.h was not written by this `adze tune`")


def tune(adze, program, folder):
    adze.says(2, "an op is missing", "tune")
    adze.says(2, "no op is called 'nosuch'", "tune", "nosuch")
    adze.says(2, "tune needs a CUDA device", "tune", "rms_norm", "--device=cpu")
    adze.says(2, "a call of another op", "tune", "glu", "--line", EVEN)
    adze.says(2, "with --times nothing is", "tune", "activation", "--line", EVEN, "--times", "x")
    for seconds in ("soon", "0", "-1", "5x", "nan"):
        adze.says(2, "--seconds must be a number above 0", "tune", "activation", "--seconds", seconds)
    empty = ["tune", "activation", "--line", "activation x=f32[4,0] act=silu", "--quick", "--device=cpu"]
    program.says(0, r"^-- activation x=f32\[4,0\] act=silu: it moves no bytes", *empty)
    # A grid of calls, each with the variants that take it; the record of it is read again.
    record = folder / "record.txt"
    status, out, error = program(
        "tune", "activation", "--line", EVEN, "--quick", "--record", str(record), "--device=cpu"
    )
    calls = re.findall(r"^call \d+ (\d+) 4 0 0 even (.*)\ntime even .*\ntime any .*", record.read_text(), re.M)
    expect(status == 0 and len(calls) > 1, f"{status} {out} {error}")
    for rows, line in calls:
        expect(line == f"activation x=f32[{rows},4] act=relu", f"the line of {rows} rows is {line}")
    program.says(0, r"\neven ", "tune", "activation", "--times", str(record), "--table", str(folder / "grid.h"))
    status, out, _ = program("tune", "activation", "--line", ODD, "--quick", "--device=cpu")
    expect(status == 0 and re.search(r"^any .*1 variants", out, re.M), out)
    # Of a file the lines of this op; none is timed twice, listed ones come first, and a table may be made of them.
    calls, made = folder / "calls.txt", folder / "lines.h"
    calls.write_text(f"# calls\n{EVEN}\nsoftmax x=f32[4,4]\n{EVEN}\n{ODD}\n")
    status, out, error = program(
        *("tune", "activation", "--line", f"@{calls}", "--quick", "--device=cpu"),
        *("--record", str(record), "--table", str(made)),
    )
    listed = re.findall(r"^call .*? (activation .*)$", record.read_text(), re.M)
    expect(status == 0 and listed[:2] == [EVEN, ODD] and len(set(listed)) == len(listed), f"{out} {error} {listed}")
    expect(made.read_text().count("TUNED(activation") == len(listed), made.read_text())
    calls.write_text("softmax x=f32[4,4]\n")
    program.says(2, "the file has no call of this op", "tune", "activation", "--line", f"@{calls}", "--device=cpu")
    # Without time calls are left out.
    status, out, _ = program("tune", "activation", "--line", EVEN, "--quick", "--device=cpu", "--seconds", "1e-9")
    expect(status == 0 and re.search(r"^\d+ calls are left out: 1e-9 seconds are over$", out, re.M), out)


def main(adze, program, broken, folder):
    adze, program, broken, folder = Program(adze), Program(program), Program(broken), pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names(adze, program)
    check(program, broken)
    bench(program, folder)
    table(adze, folder)
    tune(adze, program, folder)
    print(f"{sum(verdicts)} passed, {len(verdicts) - sum(verdicts)} failed")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
