"""The benchmark as a program: what it writes, what it compares, what it refuses. Speed is not tested here.

python3 tests/bench.py build/adze FOLDER
"""

import html
import json
import pathlib
import re
import subprocess
import sys

# On a machine with other work, a quick run may measure a call that is faster than the ceiling of a moment before.
NOISE = "a call cannot be faster than memory"


def main(adze, folder):
    folder = pathlib.Path(folder)
    verdicts = []

    def expect(good, what):
        verdicts.append(bool(good))
        if not good:
            print("FAIL", what)

    def bench(*arguments):
        run = subprocess.run([adze, "bench", "--quick", *arguments], capture_output=True, text=True, timeout=900)
        errors = [e for e in re.findall(r"^(?:ERROR|FAIL).*", run.stdout, re.M) if NOISE not in e]
        return run.returncode, errors, run.stdout + run.stderr

    # Heads that lie within tokens: a call with fewer of them does not repeat in memory.
    within = "bf16[1:4669440,8:64,6080:768,64:1]"
    tables = "cos=bf16[6080:31,31:1] sin=bf16[6080:31,31:1] pairs=1 rotary_dim=62 heads_first=1"
    status, errors, text = bench("--device", "cpu", "--line", f"rope q={within} {tables}")
    expect(status == 0 and "1x8x6080x64" in text, f"heads within tokens: bench ended with {status}: {text}")

    # Products of narrower numbers have a ceiling of their own: calls that take them exceed that of floats.
    names = subprocess.run([adze, "info", "gemm"], capture_output=True, text=True).stdout
    status, errors, text = bench("--device", "cpu", "--line", "gemm x=bf16[64,2048] w=bf16[2048,2048]")
    expect(
        status == 0 and ("bf16 or bytes" in text) == bool(re.search(r"^cpu_(amx|vnni|bf16)", names, re.M)),
        f"narrow numbers: bench ended with {status}: {text}",
    )

    recorded, page = folder / "bench.json", folder / "bench.html"
    status, errors, text = bench("--json", str(recorded), "--html", str(page))
    print(text)
    expect(status in (0, 1) and not errors, f"bench ended with {status}: {errors}")
    report = json.loads(recorded.read_text())
    ops = {line.split()[0] for line in re.findall(r"^[a-z_]+ .*%.*$", text, re.M)}
    expect(report["rows"] and {row["op"] for row in report["rows"]} == ops, "the table and the JSON differ")
    expect(all(row["us"] > 0 and row["gbps"] > 0 for row in report["rows"]), "a row without a time")
    expect(all(report["ceilings"][name] > 0 for name in ("read", "copy", "float_gflops")), "no ceilings")
    expect(
        all((row["gflops"] > 0) == (row["op"] in ("gemm", "attention")) for row in report["rows"]),
        "only products have gflops",
    )
    shown = page.read_text()
    expect("<svg" in shown, "the page has no picture")
    device = "0" if report["machine"]["sm"] else "cpu"
    shown_lines = [html.unescape(line) for line in re.findall(r"<tr id=.*?<code>(.*?)</code>", shown)]
    expect(
        shown_lines == [f"adze run --device {device} '{row['line']}'" for row in report["rows"]],
        "rows without a command",
    )
    left_out = re.search(r"id=\"left-out\".*?</details>", shown, re.S)[0]
    expect("timed with bf16" in left_out, "the page does not say which dtype was timed")
    expect(
        not [row for row in report["rows"] if f"<code>{row['line']}</code>" in left_out], "a row is called left out"
    )
    too_large = re.search(r"^(\d+) lines above", text, re.M)
    expect(
        left_out.count("it takes ") == (int(too_large[1]) if too_large else 0),
        "a line that was too large has no name",
    )

    def peers(name, changed):
        row = next(row for row in report["rows"] if row["op"] == "rope_table")
        record = {"adze_compare": 1, "machine": report["machine"] | {"torch": "2"}, "commit": "abc", "date": "today"}
        us = {"adze": 1.0, "eager": 2500.0, "liger": 7.25}
        record["rows"] = [
            {"op": "rope_table", "dtype": row["dtype"], "bytes": row["read"] + row["written"], "us": us}
        ]
        (folder / name).write_text(json.dumps(record | changed, indent=1))
        return str(folder / name)

    with_peers = folder / "peers.html"
    status, errors, text = bench("rope_table", "--html", str(with_peers), "--peers", peers("peers.json", {}))
    expect(status in (0, 1) and not errors, f"with peers it ended with {status}: {errors}")
    text = with_peers.read_text()
    expect("torch 2, commit abc, today" in text, "where the times of peers are from")
    expect(
        re.search(r"<td>eager 2\.500 ms \(.*x\), liger 7\.25 us", text),
        "the times of peers, in ms where they are long",
    )
    expect('class="peer"' in text and "<title>liger, " in text, "peers in the picture")
    for changed, says in (
        ({"machine": {"cpu": "another", "gpu": "another"}}, "is of another machine: another"),
        ({"adze_compare": 2, "rows": [{"op": "rope_table"}]}, "is damaged"),
    ):
        status, _, text = bench("rope_table", "--html", str(with_peers), "--peers", peers("other.json", changed))
        expect(status == 2 and says in text and "ceilings" not in text, f"peers: {status} {text}")
    status, _, text = bench("rope_table", "--peers", str(recorded))
    expect(status == 2 and "--peers is for the page of --html" in text, "peers without a page: " + text)
    status, _, text = bench("rope_table", "--html", str(with_peers), "--peers", str(recorded))
    expect(status == 2 and "was not written by bench/compare_torch.py" in text, "peers of another kind: " + text)

    def with_times(factor, name):
        changed = re.sub(r'"us": ([0-9.e+]+)', lambda m: f'"us": {float(m[1]) * factor}', recorded.read_text())
        path = folder / name
        path.write_text(changed)
        return str(path)

    status, errors, text = bench("rms_norm", "--against", with_times(100, "slow.json"))
    compared = re.search(r"^[1-9]\d* rows compared: 0 slower", text, re.M)
    expect(compared and not errors, "it was 100 times slower: " + text)
    status, errors, text = bench("rms_norm", "--against", with_times(0.01, "fast.json"))
    expect(status == 1 and "SLOWER" in text, "it was 100 times faster: " + text)
    line = json.loads(recorded.read_text())["rows"][0]["line"]
    status, errors, text = bench("--line", line, "--against", with_times(100, "slow.json"))
    compared = re.search(r"^[1-9]\d* rows compared: 0 slower", text, re.M)
    expect(compared and not errors, "a line of the record: " + text)
    status, _, text = bench("--line", "rms_norm x=f32[3,5]", "--against", str(recorded))
    expect(status == 2 and "nothing to compare" in text and "ceilings" not in text, "another line: " + text)
    other = folder / "other.json"
    other.write_text("{}\n")
    status, errors, text = bench("rms_norm", "--against", str(other))
    expect(status == 2 and "was not written by" in text, "a file of another kind: " + text)

    def refused(what, changed, says):
        other.write_text(changed)
        status, _, text = bench("rms_norm", "--against", str(other))
        expect(status == 2 and says in text and "ceilings" not in text, f"{what}: {status} {text}")

    record = recorded.read_text()
    lines = record.splitlines(keepends=True)
    refused("no common row", "".join(line for line in lines if '"op": "rms_norm"' not in line), "nothing to compare")
    refused("the first half", record[: len(record) // 2], "")
    refused("no end", record.replace("]}\n", ""), "ends before its rows do")
    refused("no time", record.replace('"us": ', '"us": null, "was": ', 1), "row 1 of")
    refused("a time of nothing", re.sub(r'"us": [0-9.e+]+', '"us": 0', record, count=1), "row 1 of")
    refused("a spread without end", re.sub(r'"spread": [0-9.]+', '"spread": inf', record, count=1), "row 1 of")
    refused("another machine", re.sub(r'"(cpu|gpu)": "[^"]+"', r'"\1": "another"', record), "is of another machine")
    other.write_text(re.sub(r'"kernel": "[^"]+"', '"kernel": "another"', record))
    status, errors, text = bench("rope_table", "--against", str(other))
    expect(status == 2 and "0 rows compared" in text and "nothing to compare" in text, "other kernels: " + text)
    print(f"{sum(verdicts)} passed, {len(verdicts) - sum(verdicts)} failed")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
