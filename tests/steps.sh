# steps.sh - runs steps and adds up their counts, for the script that sources it (run.sh). That script sets builds, steps,
# quiet, logs (a folder) and suite (its own path), and may set on_demand and later. It has the functions step_NAME,
# test_python, test_program and needs_of, which names the steps that one depends on. Its arguments choose steps; without
# any, all but those on demand are run. `--list` prints a table instead: what a step is about, and the steps and tools that
# it needs, as its function says them.

about() { :; } # what a step tests; --list prints it

skip() {
    echo "skipped: $*"
    exit 77
}

# A step whose need failed in this run has failed too; a need that was skipped makes it skipped. Sets word when the step is
# not to be run, with its counts and the note.
look_at_needs() {
    local need p f s
    for need in $(needs_of "$1"); do
        case " $chosen " in *" $need "*) ;; *) continue ;; esac
        read -r p f s <"$logs/$need.count" || f=1
        if [ "$f" -gt 0 ]; then
            failed=1 skipped=0 word=FAIL note="not run: $need failed"
            return
        fi
        [ "$p" -gt 0 ] || skipped=1 word=skip note="$need was skipped"
    done
}

# Runs one step and leaves its counts: those of its last counting line, or one for the whole step.
run_step() {
    local step=$1 log=$logs/$1.log start=$SECONDS status counts passed=0 failed=0 skipped=0 word= note=
    look_at_needs "$step"
    case $(function_of "$step") in
    test_python) set -- --python "${step#py-}" ;;
    test_program) set -- --program "$step" ;;
    *) set -- --step "$step" ;;
    esac
    if [ -n "$word" ]; then
        echo "$note" >"$log"
    else
        timeout -k 10 "${STEP_SECONDS:-2400}" bash "$suite" "$@" >"$log" 2>&1
        status=$?
    fi
    if [ -z "$word" ] && [ $status = 77 ]; then
        skipped=1 word=skip note=$(tail -1 "$log" | sed 's/^skipped: //')
    elif [ -z "$word" ]; then
        counts=$(grep -E '^=* ?[0-9]+ (passed|failed|skipped)' "$log" | tail -1)
        count() { echo "$counts" | grep -oE "[0-9]+ $1" | head -1 | cut -d' ' -f1; }
        passed=$(count passed) failed=$(count failed) skipped=$(count skipped)
        : "${passed:=0}" "${failed:=0}" "${skipped:=0}"
        # A count of nothing is a test of nothing.
        [ -z "$counts" ] || [ $((passed + failed + skipped)) -gt 0 ] || status=1
        [ $status = 0 ] && word=ok || word=FAIL
        [ $status = 0 ] || [ "$failed" -gt 0 ] || failed=1
        [ $((passed + failed + skipped)) -gt 0 ] || passed=1
        note=$([ -n "$counts" ] && echo "$passed passed, $failed failed, $skipped skipped")
        [ $status != 124 ] || note="stopped after ${STEP_SECONDS:-2400} s"
    fi
    echo "$passed $failed $skipped" >"$logs/$step.count"
    printf '%6d s  %-5s %s\n' $((SECONDS - start)) "$word" "$step" >"$logs/$step.seconds"
    printf '%-5s %-18s %4d s  %s\n' "$word" "$step" $((SECONDS - start)) "$note"
    [ "$word" != FAIL ] || [ -z "${status-}" ] || sed "s/^/        /" "$log" | grep -vE '^ *(CC|LD|NVCC) ' | tail -25
}

function_of() { # a step
    case $1 in
    py-*) echo test_python ;;
    *) if declare -F "step_$1" >/dev/null; then echo "step_$1"; else echo test_program; fi ;;
    esac
}
# Tests of a folder, which have one function, have one row.
list_steps() {
    local step function name tools
    declare -A seen
    printf '| step | what it tests | after | tools |\n| --- | --- | --- | --- |\n'
    for step in $builds ${on_demand-} $steps ${later-} $quiet; do
        function=$(function_of "$step")
        [ -z "${seen[$function]-}" ] || continue
        seen[$function]=1
        case $function in test_python) name=py-NAME ;; test_program) name=NAME ;; *) name=$step ;; esac
        tools=$(declare -f "$function" | sed -n 's/^ *need \(.*[^;]\);*$/\1/p' | tr -d "'\"" | sed 's/|/ or /g; s/\$arch/ARCH/g' | paste -sd' ')
        printf '| `%s` | %s | %s | %s |\n' "$name" "$(declare -f "$function" | sed -n "s/^ *about '\(.*\)';*$/\1/p")" \
            "$(needs_of "$step" | sed 's/\([^ ]*\)/`\1`/g')" "$tools"
    done
}

case ${1-} in
--list)
    list_steps
    exit
    ;;
--step)
    set -e
    "step_$2"
    exit
    ;;
--python)
    set -e
    test_python "$2"
    exit
    ;;
--program)
    set -e
    test_program "$2"
    exit
    ;;
esac

for step in "$@"; do
    case " $(echo $builds ${on_demand-} $steps ${later-} $quiet) " in *" $step "*) ;; *)
        echo "no step is called '$step'; there are: $(echo $builds ${on_demand-} $steps ${later-} $quiet)" >&2
        exit 2
        ;;
    esac
done
chosen=${*:-$builds $steps ${later-} $quiet}
of() { for step in $chosen; do case " $1 " in *" $step "*) echo "$step" ;; esac done; }
for step in $chosen; do rm -f "$logs/$step.count" "$logs/$step.seconds"; done
for step in $(of "$builds ${on_demand-}"); do run_step "$step"; done
workers=$(nproc)
for group in "$steps" "${later-}"; do
    for step in $(of "$(echo $group)"); do
        while [ "$(jobs -rp | wc -l)" -ge "$workers" ]; do wait -n; done
        run_step "$step" &
    done
    wait
done
for step in $(of "$quiet"); do run_step "$step"; done
echo 'seconds of each step, the longest first:'
for step in $chosen; do cat "$logs/$step.seconds"; done | sort -rn
for step in $chosen; do cat "$logs/$step.count" || echo 0 1 0; done |
    awk -v seconds=$SECONDS '{p += $1; f += $2; s += $3}
        END {printf "%d seconds\n%d passed, %d failed, %d skipped\n", seconds, p, f, s; exit f > 0}'
