#!/usr/bin/env bash
# lint.sh - formats, static analysis, layers and other rules that a program can check. The last line has the counts.
set -u
cd "$(dirname "$0")/.."
PATH=$PWD/build/venv/bin:$PATH
passed=0 failed=0 skipped=0

report() { # name, what was found (nothing: passed)
    if [ -z "$2" ]; then
        passed=$((passed + 1))
    else
        printf '%s\n' "$1:" "$2"
        failed=$((failed + 1))
    fi
}
skip() {
    echo "skipped: $1"
    skipped=$((skipped + 1))
}
of_version() { command -v "$1" >/dev/null && "$1" --version | grep -q "version $2\."; }
files() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }

# The findings of these two differ between versions, so one version is required.
if of_version clang-format 14; then
    report clang-format "$(files '*.[ch]' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror 2>&1 | grep 'error:')"
else
    skip 'clang-format 14 is not here'
fi
if of_version clang-tidy 14; then
    # Nearly all of its time goes to paths of the analyzer: it may follow 20000 nodes of its 225000, or
    # TIDY_NODES of them.
    tidy() { clang-tidy --quiet "$1" -- -std=c11 -D_GNU_SOURCE -Iinclude -Isrc -Icheck -Icli -Ibind -DADZE_CUDA=0 -DADZE_ISA= \
        -DADZE_COMMIT='""' -DADZE_CUDA_CODE='""' -Xclang -analyzer-config -Xclang max-nodes=${TIDY_NODES:-20000}; }
    export -f tidy
    report clang-tidy "$(files 'src/*.c' 'check/*.c' 'cli/*.c' 'bind/*.c' 'examples/*.c' | grep -v '^src/cpu/' |
        xargs -P "$(nproc)" -I{} bash -c 'tidy {}' 2>/dev/null | grep -E 'error:|warning:' | sort -u)"
else
    skip 'clang-tidy 14 is not here'
fi
# check.c writes bad calls, among them one with no data, each from a fresh copy; cppcheck does not follow the copy,
# nor does it know the size of a vector in ceiling.c.
if command -v cppcheck >/dev/null; then
    report cppcheck "$(cppcheck --quiet --std=c11 --enable=warning,performance,portability --inline-suppr \
        --suppress=missingIncludeSystem --suppress=nullPointerArithmetic:check/check.c \
        --suppress=bufferAccessOutOfBounds:check/ceiling.c -Iinclude -Isrc -Icheck -Icli -Ibind -DADZE_CUDA=0 -DADZE_ISA= -D__aarch64__ -D__linux__ \
        -j "$(nproc)" --template='{file}:{line}: {message} [{id}]' src check cli bind examples tests 2>&1)"
else
    skip 'cppcheck is not here'
fi
if command -v ruff >/dev/null; then
    report 'ruff check' "$(ruff check --quiet . 2>&1)"
    report 'ruff format' "$(ruff format --quiet --check . 2>&1)"
else
    skip 'ruff is not here'
fi

# Layers look down only. Each line: files, and the headers of this tree that they may include.
layer() {
    report "layers: $1 may include $2" "$(files ":(glob)$1" | xargs -r grep -nE '^ *# *include "' | grep -vE "\"($2)\"")"
}
own() { files "$@" | sed 's|.*/||; s|\.|\\.|' | paste -sd'|'; }
base=$(own ':(glob)src/*.h' 'include/*.h')
layer 'src/*.[ch]' "$base"
layer 'src/ops/*' "$base|ops/[a-z_0-9]+\.h"
layer 'src/cpu/*' "$base|cpu/[a-z_0-9]+\.h"
layer 'src/cuda/*' "$base|(cuda/)?[a-z_0-9]+\.cuh"
layer 'cli/*' "adze\.h|kernel\.h|$(own 'check/*.h' 'cli/*.h')"
# The harness from the bottom up: a file may include src/*.h, its own header and those of the names before it. check.h has
# the commands, which check.c and self.c are; all other files of check/ are cases of an op.
harness='line suite gpu graph timing flops ceiling producer data alias judge dependency smaller trial options check self_waits self'
below=$base
for name in $harness; do
    below="$below|$name\\.h"
    layer "check/$name.*" "$below"
done
layer 'check/norm.h' "$base|suite\.h"
for op in $(files ':(glob)check/*.c' | sed 's|check/||; s|\.c||'); do
    case " $harness " in *" $op "*) ;; *) layer "check/$op.c" "$base|suite\.h|norm\.h" ;; esac
done
layer 'bind/*' "$base|$(own 'bind/*.h')"
layer 'examples/*.c' 'adze\.h'

text=$(files '*.[ch]' '*.cu' '*.cuh' '*.py' '*.sh' '*.md' '*.in' '*.toml' Makefile .ci/run)
report 'only ASCII in sources' "$(LC_ALL=C grep -nP '[^\x00-\x7F]' $text)"
report 'no spaces at the end of a line' "$(grep -nE '[[:space:]]+$' $text)"
report 'no tabs but in the Makefile' "$(grep -nP '\t' $(echo "$text" | grep -v '^Makefile$'))"
report 'nothing kept for later' "$(grep -nE 'TO''DO|FIX''ME|#if'' 0' $text)"
report 'a file over 600 lines says why ("600 lines") in its first ten' "$(for f in $text; do
    [ "$(wc -l <"$f")" -le 600 ] || head -10 "$f" | grep -q '600 lines' || echo "$f"
done)"
report 'the first line says what a file is' "$(for f in $(files '*.[ch]' '*.cu' '*.cuh'); do
    head -1 "$f" | grep -qE '^/[*/] .{8}' || echo "$f"
done)"
report 'public headers name their licence' "$(grep -L 'SPDX-License-Identifier: Apache-2.0' include/*.h)"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
