#!/usr/bin/env bash
# run.sh - every test that this machine can run: a line per step, then how long each took and the sum of all counts.
# `tests/run.sh STEP ...` runs some, `tests/run.sh --list` prints what there is and what each step needs. A step's log is
# build/test/STEP.log. A step that lacks a tool is skipped, with the reason; a build that fails makes the steps that need
# it fail.
set -u
cd "$(dirname "$0")/.."
unset MAKEFLAGS MFLAGS MAKELEVEL
export PATH=$PWD/build/venv/bin:$PATH
logs=$PWD/build/test suite=$PWD/tests/run.sh
mkdir -p "$logs"

# The first group builds, one after the other, each on all cores; the second runs side by side, the longest first, so that
# the cores end together; the third does the same when the second has ended, for `wheel` replaces the native part that the
# tests in Python load; the last has the machine for itself. A step on demand runs when it is named.
builds='build build-clang build-sanitized build-tsan build-cross'
on_demand='cuda-compile' # by name alone: as long as a third of all the rest
words=$(basename -s .py python/tests/test_*.py | cut -d_ -f2 | sort -u)
longest='pack inductor bench diffusers generate transformers documents'
steps=
for word in $longest $words; do
    case " $steps " in *" py-$word "*) continue ;; esac
    case " $(echo $words) " in *" $word "*) steps="$steps py-$word" ;; esac
done
steps="bench $steps lint sdist variants-cli cli pytest example symbols headers docs cuda-graph cuda-rows"
later='check-cross check-sve check-sanitized check check-clang check-self wheel fuzz check-tsan'
quiet='page'
for program in tests/*.c; do
    case $program in tests/fuzz_* | tests/cuda_*) ;; *) steps="$steps $(basename "$program" .c)" ;; esac
done
needs_of() {
    case $1 in
    build-sanitized | build-tsan) echo build ;;
    build | build-* | cuda-compile | headers | lint | wheel) ;;
    check-clang | fuzz) echo build-clang ;;
    check-sanitized) echo build-sanitized ;;
    check-tsan) echo build-tsan ;;
    check-cross) echo build-cross ;;
    page) echo build bench ;;
    pytest) echo build build-clang ;;
    *) echo build ;;
    esac
}

have() { command -v "$1" >/dev/null; }
# The tools of a step; one of those that a | separates will do, and $tool is the last that was found.
need() {
    local one
    for one in "$@"; do
        for tool in ${one//|/ }; do have "$tool" && continue 2; done
        skip "${one//|/ or } is not here"
    done
}
compiles() { # with a compiler and its flags: a program that needs the headers and the library of C
    printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' | "$@" -x c - -o /dev/null
}
build() { make --no-print-directory "$@"; }
other_arch() { # into $arch, and into $cpu what qemu calls it: there, `rep movsb` copies byte by byte
    case $(uname -m) in
    x86_64) arch=aarch64 cpu=max ;;
    aarch64) arch=x86_64 cpu=max,-erms ;;
    *) skip "$(uname -m) is neither x86_64 nor aarch64: there is no cross build" ;;
    esac
}

step_build() {
    about 'the library, the program and the native part of the package'
    build all python
}
step_build-clang() {
    about 'the same with clang, without CUDA'
    need clang
    build CC=clang CUDA=0 CPU_OPT=-O1 B=build/clang all
}
step_build-sanitized() {
    about 'the same with AddressSanitizer and UndefinedBehaviorSanitizer'
    build SAN=1 PLAIN=build all
}
step_build-tsan() {
    about 'the library with ThreadSanitizer, but for its CPU kernels'
    build SAN=thread CUDA=0 CFLAGS='-O2 -g' K=build build/tsan/libadze.so
}
step_build-cross() {
    about 'the same for the other of x86-64 and aarch64'
    other_arch
    need "$arch-linux-gnu-gcc"
    compiles "$arch-linux-gnu-gcc" || skip "$arch-linux-gnu-gcc finds no C library"
    build CC="$arch-linux-gnu-gcc" AR="$arch-linux-gnu-ar" CUDA=0 CPU_OPT=-O1 B="build/$arch" all
}

step_check() {
    about 'every kernel of this machine against the definitions'
    build/adze check
}
step_check-clang() {
    about 'the same as clang compiled it, each case in one dtype'
    build/clang/adze check --device cpu --brief
}
step_check-self() {
    about 'kernels that are broken on purpose, each of which the check must catch'
    build/adze check --self
}
step_check-sanitized() {
    about 'the check under AddressSanitizer and UndefinedBehaviorSanitizer, each small case in one dtype'
    build/san/adze check --device cpu --brief --small
}
# Programs of threads, and the library, under ThreadSanitizer. It needs a fixed address layout (setarch -R).
step_check-tsan() {
    about 'threads.c and dlopen.c under ThreadSanitizer'
    local program
    [ -e build/tsan/libadze.so ] || skip 'there is no build with ThreadSanitizer'
    for program in threads dlopen; do
        cc -g -O1 -fsanitize=thread -std=c11 -Wall -Wextra -Werror -D_GNU_SOURCE -Iinclude "tests/$program.c" \
            -Wl,--as-needed -Lbuild/tsan -ladze -lm -ldl -pthread -o "$logs/tsan_$program"
        LD_LIBRARY_PATH=build/tsan TSAN_OPTIONS=halt_on_error=1 setarch -R "$logs/tsan_$program"
    done
}
# What the processor lacks is run in qemu: SVE here, every ISA of the other architecture there.
step_check-sve() {
    about 'the SVE kernels in qemu, where the processor has none, each small case in one dtype'
    [ "$(uname -m)" = aarch64 ] || skip 'check-cross runs SVE'
    ! grep -qw sve /proc/cpuinfo || skip 'the processor has SVE, check ran it'
    need qemu-aarch64
    qemu-aarch64 -cpu max build/adze check --device cpu --kernel cpu_sve --brief --small
}
step_check-cross() {
    about 'the kernels of the other architecture in qemu, each small case in one dtype'
    other_arch
    need "qemu-$arch"
    "qemu-$arch" -cpu $cpu -L "/usr/$arch-linux-gnu" "build/$arch/adze" check --device cpu --brief --small
}
step_cuda-compile() {
    about 'the CUDA sources for the oldest and the newest GPU; on demand, and before a release'
    need 'nvcc|/usr/local/cuda/bin/nvcc'
    build cuda-compile
}

# A program of tests/ sees the library as a user does, unless it includes what only the static library has.
test_program() {
    about 'tests/NAME.c'
    local library=(-Wl,--as-needed -ladze -lm -ldl -pthread)
    grep -q '^#include "kernel.h"' "tests/$1.c" &&
        read -ra library <<<"-Isrc -Icheck -l:libadze_check.a -l:libadze.a $(sed -n 's/^Libs.private: //p' build/adze.pc)"
    cc -std=c11 -Wall -Wextra -Werror -D_GNU_SOURCE -Iinclude "tests/$1.c" -Lbuild "${library[@]}" -o "$logs/$1"
    LD_LIBRARY_PATH=build "$logs/$1"
}
# The files of python/tests whose names begin with this word, in one process: importing torch and its friends takes
# seconds. Steps run side by side, so each has one thread of torch's.
test_python() {
    about 'python/tests/test_NAME.py and test_NAME_*.py'
    need pytest
    local files=() file
    for file in "python/tests/test_$1.py" "python/tests/test_$1"_*.py; do [ ! -e "$file" ] || files+=("$file"); done
    PYTHONPATH=python OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 pytest -q -p no:cacheprovider -p no:logging -rs \
        "${files[@]}" || [ $? = 5 ] # 5: all of them were skipped
}
# A CUDA program, which skips itself where there is no GPU.
cuda_program() { # a file of tests, for a GPU
    nvcc -Iinclude "tests/$1.c" -Lbuild -ladze -o "$logs/$1"
    LD_LIBRARY_PATH=build "$logs/$1"
}
step_cuda-graph() {
    about 'first calls in a CUDA graph, on a GPU'
    need nvcc
    cuda_program cuda_graph
}
step_cuda-rows() {
    about 'bits that do not depend on other rows, on a GPU'
    need nvcc
    cuda_program cuda_gemm_rows
}
step_fuzz() {
    about 'any text as a line, with libFuzzer, for FUZZ_SECONDS (30)'
    [ -f tests/fuzz_line.c ] || skip 'tests/fuzz_line.c is not here'
    need clang
    echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | clang -fsanitize=fuzzer -x c - -o /dev/null ||
        skip 'clang has no libFuzzer here'
    clang -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -std=c11 -D_GNU_SOURCE -DADZE_CUDA=0 \
        -Iinclude -Isrc -Icheck tests/fuzz_line.c check/line.c check/data.c build/clang/libadze_check.a \
        build/clang/libadze.a -lm -pthread -o "$logs/fuzz_line"
    mkdir -p "$logs/corpus"
    "$logs/fuzz_line" -max_total_time="${FUZZ_SECONDS:-30}" -max_len=400 -rss_limit_mb=4096 -timeout=20 -verbosity=0 \
        -print_final_stats=1 -artifact_prefix="$logs/" "$logs/corpus"
}
# Installed, then built elsewhere with nothing but pkg-config's word and, as `make install` says for a folder that the
# loader does not search, a run path; against the shared and the static library. The folder has a space in its name.
step_example() {
    about 'the examples, built against an installed library'
    need pkg-config
    [ -f examples/rms_norm.c ] || skip 'examples/rms_norm.c is not here'
    work=$(mktemp -d "${TMPDIR:-/tmp}/adze test.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    make --no-print-directory install PREFIX=/usr DESTDIR="$work/image" >"$work/said"
    if grep '^install: ' "$work/said"; then exit 1; fi # nothing runs from an image
    make --no-print-directory install PREFIX="$work/adze" >"$work/said"
    grep -F "install: the loader does not search $work/adze/lib: set PKG_CONFIG_PATH=$work/adze/lib/pkgconfig, and link \
programs with -Wl,-rpath,$work/adze/lib too" "$work/said"
    diff <(cd "$work/image/usr" && find . | sort) <(cd "$work/adze" && find . | sort)
    cp examples/*.c "$work"
    cd "$work"
    adze/bin/adze info
    export PKG_CONFIG_PATH=$work/adze/lib/pkgconfig
    local flags static
    for static in '' --static; do
        flags=$(pkg-config $static --cflags --libs adze)
        if [ -z "$static" ]; then
            flags="$flags -Wl,-rpath,'$work/adze/lib'"
        else
            flags=${flags/-ladze/-l:libadze.a}
        fi
        for source in *.c; do
            eval "cc -std=c11 -Wall -Wextra -Werror $source $flags -o example"
            ./example
        done
    done
}
# As a distributor has it: a source distribution, and the wheel that an isolated environment makes of it, in an environment
# with nothing else in it. The kernels are those of this build; compiling them is what other steps do.
step_sdist() {
    about 'the source distribution, and the wheel that comes of it'
    local version
    python3 -m build --version || skip "Python's build is not here"
    work=$(mktemp -d "${TMPDIR:-/tmp}/adze-test.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    ADZE_MAKE="CUDA=0 K=$PWD/build" python3 -m build -o "$work" .
    tar -tf "$work"/adze_kernels-*.tar.gz | sed 's|^[^/]*/||' >"$work/files"
    git ls-files 2>/dev/null | grep -vxF -e .gitignore -e .ci/run | while read -r file; do
        grep -qxF "$file" "$work/files" || { echo "the source distribution lacks $file" && exit 1; }
    done
    if grep -E '\.(so|o)$' "$work/files"; then exit 1; fi
    python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q "$work"/adze_kernels-*.whl
    version=$(awk '/define ADZE_VERSION / {printf "%d.%d.%d", $3 / 10000, $3 / 100 % 100, $3 % 100}' include/adze.h)
    cd "$work"
    venv/bin/python -c 'import adze, adze.operators.description, adze.patching.known_sources, importlib.metadata, sys
assert adze.patching.known_sources.read()[1]
distribution = importlib.metadata.distribution("adze-kernels")
assert adze.__version__ == distribution.version == sys.argv[1], (adze.__version__, distribution.version, sys.argv[1])
assert {url.split(",")[0] for url in distribution.metadata.get_all("Project-URL")} >= {"Homepage", "Source", "Changelog"}
assert [e.value for e in distribution.entry_points] == ["adze.vllm:register"]' "$version"
}
# As others get it: a wheel that needs no newer libc than 2.28, in an environment with nothing else in it.
step_wheel() {
    about 'a wheel for glibc 2.28 and newer, linked with ziglang from pip'
    need objdump
    local native newest
    work=$(mktemp -d "${TMPDIR:-/tmp}/adze-test.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q ziglang || skip 'ziglang cannot be had'
    PY_LD="$("$work/venv/bin/python" -c 'import ziglang; print(ziglang.__path__[0])')/zig cc -target $(uname -m)-linux-gnu.2.28" \
        ADZE_WHEEL="manylinux_2_28_$(uname -m)" "$work/venv/bin/pip" wheel -q --no-deps -w "$work" .
    "$work/venv/bin/pip" install -q "$work"/adze_kernels-*-py3-none-manylinux_2_28_*.whl
    cd "$work"
    venv/bin/python -c 'import adze, sys; print(adze.__version__, "torch" in sys.modules)' | grep -q ' False$'
    native=$(venv/bin/python -c 'import adze, pathlib; print(pathlib.Path(adze.__file__).with_name("operators") / "_adze.abi3.so")')
    newest=$(objdump -T "$native" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1)
    echo "the newest symbol is of $newest"
    [ "$(printf '%s\n' "$newest" GLIBC_2.28 | sort -V | tail -1)" = GLIBC_2.28 ]
    objdump -p "$native" | awk '/NEEDED/ {print $2}' | grep -vE '^(lib(c|m|dl|rt|pthread)\.so\.[0-9]|ld-linux-.*)$' && exit 1
    true
}
step_symbols() {
    about 'the library exports what adze.h declares, and nothing else'
    nm -D --defined-only build/libadze.so | awk '{print $3}' | sort >"$logs/exported"
    tr '\n' ' ' <include/adze.h | grep -oE 'ADZE_API [^;(]*\(' | grep -oE 'adze_[a-z0-9_]+\($' | tr -d '(' | sort \
        >"$logs/declared"
    diff "$logs/declared" "$logs/exported"
    [ -s "$logs/declared" ]
}
step_headers() {
    about 'the public headers as C99 and C++11'
    for header in include/*.h; do
        for compiler in gcc clang; do
            have $compiler || continue
            echo "#include <${header#include/}>" >"$logs/header.c"
            $compiler -std=c99 -Iinclude -Wall -Wextra -Wpedantic -Werror -fsyntax-only -x c "$logs/header.c"
            $compiler -std=c++11 -Iinclude -Wall -Wextra -Wpedantic -Werror -fsyntax-only -x c++ "$logs/header.c"
        done
    done
}
step_lint() {
    about 'formats (clang-format 14, ruff), static analysis (clang-tidy 14, cppcheck), layers'
    tests/lint.sh
}
step_pytest() {
    about 'tests/test_*.py'
    need pytest
    compgen -G 'tests/test_*.py' >/dev/null || skip 'there are no tests in Python'
    pytest -q -p no:cacheprovider -rs tests || [ $? = 5 ] # 5: every module was skipped
}
step_docs() {
    about 'generated documents are up to date'
    diff -u <(sed -n '/^| step |/,/^$/p' CONTRIBUTING.md | sed '/^$/d') <(tests/run.sh --list)
    build/adze info --markdown include/adze.h | diff -u docs/ops.md -
    python3 bind/header.py | diff -u python/adze/operators/header.py -
    python3 bench/report.py --check
    python3 bench/facts.py --check
    python3 -c 'import re, textwrap
block = re.search("```c\n(.*?)```", open("docs/c.md").read(), re.S)[1]
assert textwrap.indent(block, "    ") in open("examples/rms_norm.c").read(), "docs/c.md shows another example"'
}
step_cli() {
    about 'options, errors and files of the program'
    python3 tests/cli.py build/adze "$logs/cli"
}
# The program with an op whose kernel has variants, also where there is no GPU; and with a wrong one among them.
step_variants-cli() {
    about 'kernels with variants: listed, traced, forced, checked, timed and tuned'
    local flag
    for flag in VARIANTS BROKEN; do
        cc -std=c11 -Wall -Wextra -Werror -D_GNU_SOURCE "-D$flag" -Iinclude -Isrc tests/variants/op.c build/cli/*.o -Lbuild \
            -l:libadze_check.a -l:libadze.a $(sed -n 's/^Libs.private: //p' build/adze.pc) -o "$logs/adze-$flag"
    done
    python3 tests/variants.py build/adze "$logs/adze-VARIANTS" "$logs/adze-BROKEN" "$logs/variants-cli"
}
step_bench() {
    about '`adze bench`: what it writes, compares and refuses'
    python3 tests/bench.py build/adze "$logs"
}
step_page() {
    about 'the page of `adze bench --html`, in a browser'
    need 'chromium|chromium-browser|google-chrome'
    [ -f "$logs/bench.html" ]
    python3 tests/page.py "$tool" "$logs/bench.html" build/adze
}

. tests/steps.sh
