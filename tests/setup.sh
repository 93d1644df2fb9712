#!/usr/bin/env bash
# setup.sh - what the tests use: Debian packages where root may install them, and build/venv. What cannot be had is
# no failure here: the steps that need it say so and are skipped.
set -u
cd "$(dirname "$0")/.."

missing=()
want() { command -v "$1" >/dev/null || missing+=("$2"); }
# A compiler can be here without the C library's headers, which its package only recommends.
want_compiler() {
    printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' | "$1" -x "$2" - -o /dev/null 2>/dev/null ||
        missing+=("${@:3}")
}
want_compiler gcc c gcc libc6-dev
want_compiler g++ c++ g++
want_compiler clang c clang
want clang-tidy clang-tidy
want cppcheck cppcheck
want pkg-config pkg-config
want qemu-aarch64 qemu-user
want chromium chromium
case $(uname -m) in
x86_64) want_compiler aarch64-linux-gnu-gcc c gcc-aarch64-linux-gnu libc6-dev-arm64-cross ;;
aarch64) want_compiler x86_64-linux-gnu-gcc c gcc-x86-64-linux-gnu libc6-dev-amd64-cross ;;
esac
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
# Inductor compiles against Python.h. Debian has it for its own Python alone.
python3 -c 'import os, sys, sysconfig
sys.exit(sys.base_prefix == "/usr" and not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    missing+=(python3-dev)

apt() { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" >>build/setup.log 2>&1; }
install_packages() {
    apt install -y --no-install-recommends "$@" || { apt update && apt install -y --no-install-recommends "$@"; } ||
        for package in "$@"; do
            apt install -y --no-install-recommends "$package" || echo "setup: $package could not be installed"
        done
}
mkdir -p build
: >build/setup.log
can_install=$([ "$(id -u)" = 0 ] && command -v apt-get)
if [ ${#missing[@]} -gt 0 ]; then
    if [ -n "$can_install" ]; then
        echo "setup: installing ${missing[*]}"
        install_packages "${missing[@]}"
    else
        echo "setup: not here, and only root can install it: ${missing[*]}"
    fi
fi
# clang's sanitizers and fuzzer are a package of their own, named after its version.
if [ -n "$can_install" ] && command -v clang >/dev/null &&
    ! echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | clang -fsanitize=fuzzer -x c - -o /dev/null 2>/dev/null; then
    version=$(clang -dumpversion | cut -d. -f1)
    echo "setup: installing the run time of clang $version"
    apt install -y "libclang-rt-$version-dev" || apt install -y "libclang-common-$version-dev"
fi

# Only packages that pip has as wheels. torch is taken where a local build of it is offered (pip's find-links), never
# from an index: there it comes with gigabytes of CUDA. `build/venv/bin/pip install -r tests/requirements-models.txt`
# is the other way to have the model tests.
if ! cat tests/requirements*.txt | cmp -s - build/venv/complete; then
    echo 'setup: build/venv'
    pip() { build/venv/bin/python -m pip install -q --only-binary :all: "$@" >>build/setup.log 2>&1; }
    if ! python3 -m venv build/venv || ! pip -r tests/requirements.txt; then
        echo 'setup: build/venv is not complete, see build/setup.log'
    elif pip --no-index --no-deps "$(grep '^torch==' tests/requirements-models.txt)" &&
        ! pip -r tests/requirements-models.txt; then
        echo 'setup: the packages of the model tests are not complete, see build/setup.log'
    else
        cat tests/requirements*.txt >build/venv/complete
    fi
fi
true
