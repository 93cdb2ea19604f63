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
# Without compiled bytecode every process of a run would compile torch and vLLM anew.
unset PYTHONDONTWRITEBYTECODE

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

# What pip has been told of indexes and certificates, in pip's configuration or its variables; uv reads neither.
pip_setting() {
    "$PYTHON" -m pip config list 2>/dev/null | awk -F= -v name="$1" -v quote="'" '
        { key = $1; sub(/.*\./, "", key); value = substr($0, length($1) + 2); gsub(quote, "", value) }
        key == name { if ($1 ~ /^:env:/) from_variable = value; else from_file = value }
        END { print from_variable ? from_variable : from_file }'
}

prepare_uv() {
    export UV_PYTHON="$PYTHON" UV_NO_CONFIG=1 UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # pip's: the best of all indexes
    export UV_CACHE_DIR="$CACHE/uv" # beside the environment, so that files are linked and not copied; gone when all is installed
    export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$(pip_setting index-url)}" UV_INDEX="${UV_INDEX:-$(pip_setting extra-index-url)}"
    export UV_FIND_LINKS="${UV_FIND_LINKS:-$(pip_setting find-links | tr -s ' ' ,)}"
    export SSL_CERT_FILE="${SSL_CERT_FILE:-$(pip_setting cert)}"
    local name
    for name in UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS SSL_CERT_FILE; do
        [[ -n "${!name}" ]] || unset "$name"
    done
}

uv_install() { "$VENV/bin/uv" pip install --quiet "$@"; }

# Compiles what a run imports, as later processes may be told not to (PYTHONDONTWRITEBYTECODE); all that was installed would be 24,000 files.
compile_imports() {
    local trainer='import colossalai.booster.plugin, datasets, ray, tensorboard, trl, wandb'
    local engine='import math_verify, vllm.v1.engine.llm_engine, vllm.v1.worker.cpu_worker, vllm.v1.worker.gpu_worker'
    (cd / && "$PYTHON" -W ignore -c "$trainer" >/dev/null 2>&1) &
    (cd / && "$PYTHON" -W ignore -c "$engine" >/dev/null 2>&1) || true
    wait $! || true
}

install_cpu() {
    say "installing the packages of requirements/cpu.txt"
    uv_install --no-deps --no-build-isolation -r "$REPOSITORY/requirements/cpu.txt"
    uv_install --no-deps --no-build-isolation --editable "$REPOSITORY"
}

install_gpu() {
    local cuda
    cuda="$("$PYTHON" -c 'import torch; print((torch.version.cuda or "none").partition(".")[0])')"
    [[ "$cuda" == 12 || "$cuda" == 13 ]] ||
        fail "torch is built for CUDA '$cuda', this machine has an NVIDIA GPU: install a CUDA 12 or 13 build of $TORCH_PIN, or set COATI_DEVICE=cpu"
    say "installing the packages of requirements/gpu.txt and cupy for CUDA $cuda"
    uv_install "$TORCH_PIN" -r "$REPOSITORY/requirements/gpu.txt"
    uv_install --no-deps --no-build-isolation "$(grep '^colossalai==' "$REPOSITORY/requirements/cpu.txt")"
    uv_install --no-build-isolation --editable "$REPOSITORY[gpu-cu$cuda]"
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
    "$PYTHON" -m pip --no-cache-dir --disable-pip-version-check install --quiet -r "$REPOSITORY/requirements/build.txt"
    prepare_uv
    uv_install "$TORCH_PIN" -c "$REPOSITORY/requirements/cpu.txt"
    "install_$DEVICE"
    rm -rf "$UV_CACHE_DIR"
    say "compiling what is imported"
    compile_imports
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
