#!/usr/bin/env bash
# memcheck.sh - the checks of CUDA kernels under compute-sanitizer: `tests/memcheck.sh [OP ...]`, all ops without names.
# It needs a GPU and some minutes, so it is on demand. TOOL is memcheck, or racecheck, initcheck, synccheck. The last
# line counts ops.
set -u
cd "$(dirname "$0")/.."
tool=${TOOL:-memcheck}
command -v compute-sanitizer >/dev/null || {
    echo "memcheck.sh: there is no compute-sanitizer; it is a part of the CUDA toolkit"
    exit 2
}
[ -x build/adze ] || {
    echo "memcheck.sh: there is no build/adze, make builds it"
    exit 2
}
mapfile -t all < <(build/adze info | awk '$1 ~ /^[a-z_]+$/ && / \(?cuda/ { print $1 }')
[ $# -gt 0 ] || set -- "${all[@]}"
passed=0 failed=0
for op; do
    if out=$(compute-sanitizer --tool "$tool" --error-exitcode 9 build/adze check "$op" --brief --device cuda 2>&1); then
        passed=$((passed + 1))
        echo "ok    $op: $(grep ' passed, ' <<<"$out" | tail -n 1)"
    else
        failed=$((failed + 1))
        echo "FAIL  $op"
        grep -m 20 '^=========\|FAIL' <<<"$out"
    fi
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
