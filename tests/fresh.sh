#!/usr/bin/env bash
# fresh.sh - README's commands, and docs/c.md's, on a machine that holds nothing else: a minimal Debian root (mmdebstrap) with
# make, gcc, git and python3, into which HEAD is cloned. Once without nvcc and, where this machine has one, once with it.
#   tests/fresh.sh [--without-nvcc | --with-nvcc] [--keep] [--twice] [run | test | install] ...
# run and test are make's; install puts the library into /usr/local and builds the example as docs/c.md says. All three when
# none is named. --twice runs each a second time, --keep leaves the root behind. Needs root, and a few GB in TMPDIR.
# CUDA_OPT=0 in the environment holds inside too: with nvcc the tests then take as long as CI's.
#
# The root gets packages from where this machine gets them: apt's and pip's settings, proxies and certificates are passed
# on. Everything is mounted in a mount namespace that ends with the command, so nothing of this machine is mounted in the
# root when it is removed.
set -eu
cd "$(dirname "$0")/.."
fail() {
    echo "fresh: $*" >&2
    exit 2
}

# ---- inside the namespaces: fresh.sh --inside ROOT COMMAND, with MOUNTS (folders, read-only) and PASSED (a file of
# variables) ----
if [ "${1-}" = --inside ]; then
    root=$2
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount -t tmpfs -o mode=755 tmpfs "$root/dev"
    for node in null zero full random urandom tty; do
        touch "$root/dev/$node"
        mount --bind "/dev/$node" "$root/dev/$node"
    done
    mkdir "$root/dev/shm" "$root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
    ln -s pts/ptmx "$root/dev/ptmx"
    ln -s /proc/self/fd "$root/dev/fd"
    for n in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${n%:*}" "$root/dev/${n#*:}"; done
    while read -r folder; do
        [ -n "$folder" ] || continue
        mkdir -p "$root$folder"
        mount --bind "$folder" "$root$folder"
        mount -o remount,bind,ro "$root$folder"
    done <<<"$MOUNTS"
    mapfile -t passed <"$PASSED"
    status=0
    chroot "$root" env -i HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        "${passed[@]}" sh -c "cd ~/adze && $3" </dev/null || status=$?
    exit $status # and not exec: the first process of a PID namespace must wait for those that others leave
fi

variants= keep= times=1 stages=
for word in "$@"; do
    case $word in
    --without-nvcc) variants=without ;;
    --with-nvcc) variants=with ;;
    --keep) keep=1 ;;
    --twice) times=2 ;;
    run | test | install) stages="$stages $word" ;;
    *) fail "'$word' is not understood: [--without-nvcc | --with-nvcc] [--keep] [--twice] [run | test | install] ..." ;;
    esac
done
stages=${stages:-run test install}
[ "$(id -u)" = 0 ] || fail 'only root can make a root and enter it'
command -v mmdebstrap >/dev/null || fail 'mmdebstrap is not here (the Debian package of that name)'
# nvcc may be a script or a link: it says itself where its toolkit is.
nvcc=$(command -v nvcc || command -v /usr/local/cuda/bin/nvcc || true)
toolkit=
if [ -n "$nvcc" ]; then
    toolkit=$("$nvcc" --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
    toolkit=$(realpath "$toolkit")
fi
[ "$variants" != with ] || [ -n "$toolkit" ] || fail 'nvcc is not here'
variants=${variants:-without${toolkit:+ with}}

work=$(mktemp -d "${TMPDIR:-/tmp}/adze-fresh.XXXXXX")
chmod 755 "$work"
clean() {
    if [ -n "$keep" ]; then
        echo "fresh: the roots are in $work"
    elif grep -qF " $work/" /proc/self/mountinfo; then
        echo "fresh: something is mounted in $work, which is left as it is" >&2
    else
        rm -rf --one-file-system "$work"
    fi
}
trap clean EXIT
# unshare ignores the gentler signals; all that runs inside ends with it.
inside=
trap '[ -z "$inside" ] || kill -KILL "$inside" 2>/dev/null; exit 130' INT TERM

# Package sources: those of this release that apt has read here. What apt is told about fetching holds there too.
codename=$(. /etc/os-release && echo "${VERSION_CODENAME-}")
sources() {
    apt-get indextargets --format "deb \$(REPO_URI) \$(RELEASE) \$(COMPONENT)" 'Created-By: Packages' |
        awk -v name="$codename" '$3 == name || index($3, name "-") == 1' | sort -u
}
[ -n "$(sources)" ] || apt-get -qq update
sources >"$work/sources"
[ -s "$work/sources" ] || fail "apt has no package lists of ${codename:-this release} here"
apt-config dump | grep '^Acquire::' >"$work/apt.conf"

# Variables: pip's settings whether they are in a file or in the environment, proxies, this machine's certificates. Local
# indexes and folders of wheels are mounted; an index of files has the files next to it.
certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
[ -f "$certificates" ] || certificates=/dev/null
python3 - "$work" "$certificates" <<'PYTHON'
import ast
import os
import pathlib
import subprocess
import sys

work = pathlib.Path(sys.argv[1])
pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
settings = dict(line.split("=", 1) for line in pip.splitlines() if "=" in line)
passed, mounts = {}, set()
for section in ("global", "install", ":env:"):  # the last one wins
    for key, value in settings.items():
        if key.startswith(section + "."):
            name = key.removeprefix(section + ".").upper().replace("-", "_")
            passed["PIP_" + name] = " ".join(ast.literal_eval(value).split())
for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
    for word in passed.get(name, "").split():
        path = word.removeprefix("file://")
        if os.path.isabs(path) and os.path.isdir(path):
            mounts.add(path if name == "PIP_FIND_LINKS" else os.path.dirname(path.rstrip("/")))
for name, value in os.environ.items():
    if name.lower().endswith("_proxy") or name in ("STEP_SECONDS", "FUZZ_SECONDS", "CUDA_OPT"):
        passed[name] = value
certified = "PIP_CERT SSL_CERT_FILE REQUESTS_CA_BUNDLE CURL_CA_BUNDLE GIT_SSL_CAINFO"
for name in certified.split() if sys.argv[2] != "/dev/null" else ():
    passed[name] = "/etc/ssl/certificates-of-the-host.crt"
(work / "passed").write_text("".join(f"{name}={value}\n" for name, value in passed.items()))
(work / "mounts").write_text("".join(f"{path}\n" for path in sorted(mounts)))
PYTHON
echo 'Acquire::https::CAInfo "/etc/ssl/certificates-of-the-host.crt";' >"$work/apt-inside.conf"

make_root() { # name, packages
    local root=$work/$1
    # libc6-dev: what apt brings with gcc, and mmdebstrap, which takes no recommended package, does not.
    mmdebstrap --quiet --mode=root --variant=apt --include="$2" --aptopt="$work/apt.conf" "$codename" "$root" \
        "$work/sources" || fail "mmdebstrap could not make $root"
    mkdir -p "$root/etc/ssl"
    if [ "$certificates" != /dev/null ]; then
        cp "$certificates" "$root/etc/ssl/certificates-of-the-host.crt"
        cp "$work/apt-inside.conf" "$root/etc/apt/apt.conf.d/99certificates"
    fi
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    git clone -q --no-local . "$root/root/adze"
    git -C "$root/root/adze" checkout -q --detach "$(git rev-parse HEAD)"
}
enter() { # root, mounts, command
    MOUNTS=$2 PASSED=$work/passed unshare --mount --propagation private --pid --fork --kill-child \
        bash "$PWD/tests/fresh.sh" --inside "$1" "$3" &
    inside=$!
    wait $inside
}

# The line of docs/c.md, in a folder that holds nothing but the example.
install_and_compile='make install && { command -v pkg-config >/dev/null ||
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends pkg-config >/dev/null; }; } &&
    rm -rf /tmp/example && mkdir /tmp/example && cp examples/rms_norm.c /tmp/example && cd /tmp/example &&
    cc rms_norm.c $(pkg-config --cflags --libs adze) && ./a.out && adze info'
passed=0 failed=0
for variant in $variants; do
    packages=make,gcc,libc6-dev,git,python3 mounts=$(cat "$work/mounts")
    if [ "$variant" = with ]; then
        packages=$packages,g++
        mounts=$mounts$'\n'$toolkit
    fi
    echo "fresh: making a root $variant nvcc: ${packages//,/, }"
    make_root "$variant" "$packages"
    [ "$variant" = without ] || [ "$toolkit" = /usr/local/cuda ] || ln -s "$toolkit" "$work/with/usr/local/cuda"
    for stage in $stages; do
        for turn in $(seq $times); do
            case $stage in
            install) command=$install_and_compile ;;
            *) command="make $stage" ;;
            esac
            echo "fresh: $stage, $variant nvcc, turn $turn"
            start=$SECONDS
            if enter "$work/$variant" "$mounts" "$command"; then
                result=passed passed=$((passed + 1))
            else
                result=FAILED failed=$((failed + 1))
            fi
            echo "fresh: $stage, $variant nvcc, turn $turn: $result after $((SECONDS - start)) s"
        done
    done
done
echo "fresh: $(git rev-parse --short HEAD), $(uname -m), Debian $codename: $passed passed, $failed failed"
[ $failed = 0 ]
