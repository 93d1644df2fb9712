"""steps.sh, with a suite of its own: what failing and skipped builds make of the steps that need them."""

import pathlib
import subprocess

STEPS = pathlib.Path(__file__).with_name("steps.sh")
SUITE = """set -u
logs={folder} suite={folder}/suite.sh
builds='build-good build-broken build-absent'
steps='on-good on-broken on-absent on-both on-nothing counted program'
quiet='late'
on_demand='rare'
need() {{ true; }}
test_program() {{
    about 'tests/NAME.c'
    need cc
}}
needs_of() {{
    case $1 in
    on-good) echo build-good ;;
    on-broken) echo build-broken ;;
    on-absent) echo build-absent ;;
    on-both) echo build-absent build-broken ;;
    late) echo on-broken ;;
    esac
}}
step_build-good() {{ true; }}
step_build-broken() {{ echo the compiler says no; false; }}
step_build-absent() {{ skip 'the compiler is not here'; }}
step_on-good() {{ about 'a good build'; need 'nosuch|true' false; true; }}
step_on-broken() {{ touch "$logs/was-run"; }}
step_on-absent() {{ false; }}
step_on-both() {{ true; }}
step_on-nothing() {{ true; }}
step_counted() {{ echo '3 passed, 0 failed, 2 skipped'; }}
step_late() {{ true; }}
step_rare() {{ touch "$logs/rare-was-run"; }}
. {steps}
"""


def run(folder, *chosen):
    suite = folder / "suite.sh"
    suite.write_text(SUITE.format(folder=folder, steps=STEPS))
    done = subprocess.run(["bash", suite, *chosen], capture_output=True, text=True)
    said = [line.split()[:2] for line in done.stdout.splitlines() if line[:4] in ("ok  ", "FAIL", "skip")]
    return done, {word: {name for w, name in said if w == word} for word in ("ok", "FAIL", "skip")}


def test_a_failed_build_fails_what_needs_it(tmp_path):
    done, words = run(tmp_path)
    assert words["FAIL"] == {"build-broken", "on-broken", "on-both", "late"}
    assert words["skip"] == {"build-absent", "on-absent"}
    assert words["ok"] == {"build-good", "on-good", "on-nothing", "counted", "program"}
    assert "not run: build-broken failed" in done.stdout
    assert "build-absent was skipped" in done.stdout
    assert "the compiler says no" in done.stdout
    assert not (tmp_path / "was-run").exists()
    assert done.stdout.splitlines()[-1] == "7 passed, 4 failed, 4 skipped"
    assert done.returncode == 1


def test_a_skipped_build_alone_is_no_failure(tmp_path):
    done, words = run(tmp_path, "build-absent", "on-absent")
    assert words == {"ok": set(), "FAIL": set(), "skip": {"build-absent", "on-absent"}}
    assert done.stdout.splitlines()[-1] == "0 passed, 0 failed, 2 skipped"
    assert done.returncode == 0


def test_a_build_that_was_not_asked_for_is_not_judged(tmp_path):
    run(tmp_path)
    done, words = run(tmp_path, "on-broken")
    assert words == {"ok": {"on-broken"}, "FAIL": set(), "skip": set()}
    assert (tmp_path / "was-run").exists()
    assert done.returncode == 0


def test_a_step_on_demand_runs_when_it_is_named(tmp_path):
    run(tmp_path)
    assert not (tmp_path / "rare-was-run").exists()
    done, words = run(tmp_path, "rare")
    assert words["ok"] == {"rare"} and done.returncode == 0
    assert (tmp_path / "rare-was-run").exists()


def test_seconds_of_each_step_come_at_the_end(tmp_path):
    done, _ = run(tmp_path, "build-good", "counted", "on-absent")
    lines = done.stdout.splitlines()
    at = lines.index("seconds of each step, the longest first:")
    table = [line.split() for line in lines[at + 1 : -2]]
    assert {(word, name) for _, unit, word, name in table if unit == "s"} == {
        ("ok", "build-good"),
        ("ok", "counted"),
        ("FAIL", "on-absent"),
    }
    seconds = [int(row[0]) for row in table]
    assert seconds == sorted(seconds, reverse=True)


def test_a_step_that_is_not_there_is_refused(tmp_path):
    done, words = run(tmp_path, "on-good", "nosuch")
    assert done.returncode == 2 and "no step is called 'nosuch'; there are: build-good" in done.stderr
    assert not words["ok"] and not words["FAIL"]


def test_the_list_says_what_a_step_needs(tmp_path):
    done, _ = run(tmp_path, "--list")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert rows[0] == ["step", "what it tests", "after", "tools"]
    assert ["`on-good`", "a good build", "`build-good`", "nosuch or true false"] in rows
    assert ["`NAME`", "tests/NAME.c", "", "cc"] in rows
    assert ["`on-both`", "", "`build-absent` `build-broken`", ""] in rows
