# Sourced by the example scripts that run several jobs one after another. Needs: `root`, the folder of all their files, and `example`,
# the name that their messages begin with; `takes`, what the arguments of the script are: seeds,
# or flags that it passes on; else it may have none. Sets `coati_rl` and `precision`. A finished stage is not repeated.

coati_rl="$VENV/bin/coati-rl"
# A CPU without bfloat16 instructions computes products in it many times slower than in float32.
precision=bf16
[[ "$DEVICE" == gpu ]] || grep -qw avx512_bf16 /proc/cpuinfo || precision=fp32
say() { printf '[%s] %s\n' "$example" "$*"; }

for argument in "$@"; do
    case "${takes:-}" in
        flags) ;;
        seeds) [[ "$argument" =~ ^[0-9]+$ ]] || { say "'$argument' is no seed: give whole numbers" >&2 && exit 2; } ;;
        *) say "'$argument': this script takes no arguments" >&2 && exit 2 ;;
    esac
done

# Run COMMAND as a stage: stage NAME COMMAND...; its output is in logs/NAME.log, its seconds in stages/NAME.json.
stage() {
    local name=$1 log=$root/logs/$1.log started=$SECONDS
    shift
    if [[ -f $root/stages/$name.json ]]; then
        say "$name: finished before"
        return
    fi
    say "$name: ${*##*/}"
    mkdir -p "$root"/{logs,stages}
    rm -rf "${root:?}/$name" "$root/$name.progress" # of an interrupted stage
    if ! "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        say "failed: $name; its whole output is in $log" >&2
        exit 1
    fi
    printf '{"seconds": %d}\n' $((SECONDS - started)) >"$root/stages/$name.json"
}
