# Sourced by quickstart.sh, test.sh and check: makes .venv with the pinned packages if it is missing, incomplete or out of date, and
# keeps every cache below the repository. Sets REPOSITORY, PYTHON and DEVICE (cpu | gpu).
# COATI_DEVICE=cpu keeps a machine with a GPU on the CPU packages.

REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPOSITORY/.venv"
PYTHON="$VENV/bin/python"
CACHE="$REPOSITORY/.cache"
STAMP="$VENV/coati-stamp"
TORCH_PIN="torch==2.13.0"

# What a person has set already stays: a model cache elsewhere, for example.
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$CACHE}"
export XDG_CONFIG_HOME="${XDG_CONFIG_HOME:-$CACHE/config}"
export HF_HOME="${HF_HOME:-$CACHE/huggingface}"
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$CACHE/vllm}"
export VLLM_CONFIG_ROOT="${VLLM_CONFIG_ROOT:-$CACHE/vllm-config}"
export MPLCONFIGDIR="${MPLCONFIGDIR:-$CACHE/matplotlib}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$CACHE/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$CACHE/triton}"
export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$CACHE/cupy}"
# No package reports home.
export VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1
# Two processes with two threads each on two cores are up to 23 times slower than with one.
export OMP_NUM_THREADS=1

say() { printf '[environment] %s\n' "$*"; }
fail() {
    printf '[environment] error: %s\n' "$*" >&2
    exit 1
}

choose_device() {
    if [[ -n "${COATI_DEVICE:-}" ]]; then
        [[ "$COATI_DEVICE" == cpu || "$COATI_DEVICE" == gpu ]] || fail "COATI_DEVICE=$COATI_DEVICE: use cpu or gpu"
        printf '%s' "$COATI_DEVICE"
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        printf gpu
    else
        printf cpu
    fi
}

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3 python; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    return 1
}

# The environment is complete when this text is in its stamp: the pins, the device, and where the project lies (it is installed editable).
wanted_stamp() {
    printf '%s %s ' "$DEVICE" "$REPOSITORY"
    cat "$REPOSITORY"/requirements/*.txt "$REPOSITORY/setup.py" "${BASH_SOURCE[0]}" | sha256sum
}

pip_install() { "$PYTHON" -m pip --no-cache-dir --disable-pip-version-check install --quiet "$@"; }

install_cpu() {
    say "installing the packages of requirements/cpu.txt"
    pip_install --no-deps --no-build-isolation -r "$REPOSITORY/requirements/cpu.txt"
    pip_install --no-deps --no-build-isolation --editable "$REPOSITORY"
}

install_gpu() {
    local cuda
    cuda="$("$PYTHON" -c 'import torch; print((torch.version.cuda or "none").partition(".")[0])')"
    [[ "$cuda" == 12 || "$cuda" == 13 ]] ||
        fail "torch is built for CUDA '$cuda', this machine has an NVIDIA GPU: install a CUDA 12 or 13 build of $TORCH_PIN, or set COATI_DEVICE=cpu"
    say "installing the packages of requirements/gpu.txt and cupy for CUDA $cuda"
    pip_install "$TORCH_PIN" -r "$REPOSITORY/requirements/gpu.txt"
    pip_install --no-deps --no-build-isolation "$(grep '^colossalai==' "$REPOSITORY/requirements/cpu.txt")"
    pip_install --no-build-isolation --editable "$REPOSITORY[gpu-cu$cuda]"
}

make_environment() {
    local base
    if ! "$PYTHON" -c 'import pip' 2>/dev/null; then
        base="$(find_python)" ||
            fail "Python 3.11 or 3.12 with venv is needed and was not found (Debian, Ubuntu: apt install python3 python3-venv)"
        say "making .venv with $("$base" --version)"
        "$base" -m venv --clear "$VENV"
    fi
    rm -f "$STAMP" # until all is installed: an interrupted installation is repaired by the next call
    say "installing $TORCH_PIN"
    pip_install -r "$REPOSITORY/requirements/build.txt"
    pip_install "$TORCH_PIN" -c "$REPOSITORY/requirements/cpu.txt"
    "install_$DEVICE"
    wanted_stamp >"$STAMP"
}

ensure_environment() {
    if [[ "$(cat "$STAMP" 2>/dev/null)" == "$(wanted_stamp)" ]] && [[ -x "$PYTHON" ]]; then
        say "ready ($DEVICE)"
        return
    fi
    local started=$SECONDS
    make_environment
    say "ready ($DEVICE) after $((SECONDS - started)) s"
}

DEVICE="$(choose_device)"
mkdir -p "$CACHE"
# One at a time; in a subshell, so that no process started later inherits the lock.
(
    set -euo pipefail
    flock 9
    ensure_environment
) 9>"$CACHE/environment.lock"
