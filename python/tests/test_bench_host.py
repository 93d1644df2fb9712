"""host_cost.py without a GPU: the program that times calls from C, and how a call's cost is split into parts."""

import pathlib
import shutil

import pytest

pytest.importorskip("torch")
import bench_scripts  # noqa: E402

ROWS = [
    {"case": "no elements", "device": "cuda", "C++": 3900.0, "adze": 4500.0, "function": 5000.0, "ratio": 1.15},
    {"case": "one row", "device": "cuda", "C++": 4600.0, "adze": 9400.0, "function": 9900.0, "ratio": 2.04},
]
bench = bench_scripts.fixture("report", "host_cost")


def test_the_program_times_calls_from_c(bench):
    if not shutil.which("g++"):
        pytest.skip("g++ is not here")
    times = bench["host_cost"].program(False, bench_scripts.ROOT / "build" / "libadze.so")()
    assert set(times) == {"C, no elements", "C, one row"}
    assert 10 < times["C, no elements"] < times["C, one row"] < 1e6  # one computes, the other does not


def test_a_library_that_is_not_there(bench, tmp_path):
    with pytest.raises(SystemExit, match="libadze.so does not exist: run make"):
        bench["host_cost"].program(False, tmp_path / "libadze.so")


def test_what_is_adzes_own(bench):
    runs = [
        {"launch": 2000.0, "launch, PDL": 2200.0, "launch, PDL, parameters": 2300.0 + i, "C, one row": 2900.0}
        for i in range(3)
    ]
    parts = bench["host_cost"].parts_of(runs, ROWS)
    assert parts["launch, PDL, parameters"] == 2301 and parts["operator in C++"] == 4600
    assert parts["adze's own"] == 9400 - 4600 - 2301
    assert bench["host_cost"].parts_of([{"C, one row": 1.0}], ROWS)["adze's own"] == 9400 - 4600


def test_the_report_shows_the_parts(bench):
    run = {
        "adze_host_cost": 1,
        "machine": {"cpu": "C", "gpu": "G", "torch": "2"},
        "commit": "abc",
        "date": "2026-01-01T",
    }
    run |= {"path": pathlib.Path("bench/results/g/host-abc.json"), "rows": ROWS}
    before = bench["report"].performance({"g": [run]})
    names = ("launch", "launch, PDL", "launch, PDL, parameters", "C, no elements", "C, one row")
    timed = {name: 2000.0 + 100 * i for i, name in enumerate(names)}
    text = bench["report"].performance({"g": [run | {"parts": bench["host_cost"].parts_of([timed], ROWS)}]})
    assert text.startswith(before)
    assert "| the same, with programmatic dependent launch | 2100 |" in text and "| adze's own | 2600 |" in text
    assert (
        "4600 are what an operator in C++ takes that launches nothing, 2200 are the launch: adze's own are 2600, 28 %"
        in text
    )
