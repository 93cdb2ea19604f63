# Sourced by quickstart.sh, test.sh and check: makes .venv with the pinned packages if it is missing, incomplete or out of date, and
# keeps every cache below the repository. Sets REPOSITORY, PYTHON and DEVICE (cpu | gpu | emulated_gpu).
# COATI_DEVICE=cpu keeps a machine with a GPU on the CPU packages.

[ -n "${BASH_VERSION:-}" ] || { # another shell would not know where this file is, and make .venv elsewhere
    echo "scripts/environment.sh is for bash: call bash, and source it there" >&2
    return 1
}
REPOSITORY="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$REPOSITORY/.venv"
[[ "${COATI_DEVICE:-}" != emulated_gpu ]] || VENV="$REPOSITORY/.venv-gpu" # beside .venv, made only by test.sh --emulated-gpu
PYTHON="$VENV/bin/python"
CACHE="$REPOSITORY/.cache"
STAMP="$VENV/coati-stamp"
TORCH_PIN="torch==2.13.0"

# Variables that are already set are kept, for example a model cache elsewhere.
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$CACHE}"
export XDG_CONFIG_HOME="${XDG_CONFIG_HOME:-$CACHE/config}"
export HF_HOME="${HF_HOME:-$CACHE/huggingface}"
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$CACHE/vllm}"
export VLLM_CONFIG_ROOT="${VLLM_CONFIG_ROOT:-$CACHE/vllm-config}"
export MPLCONFIGDIR="${MPLCONFIGDIR:-$CACHE/matplotlib}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$CACHE/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$CACHE/triton}"
export CUPY_CACHE_DIR="${CUPY_CACHE_DIR:-$CACHE/cupy}"
# Disable the packages' usage statistics.
export VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1
# Two processes with two threads each on two cores are up to 23 times slower than with one.
export OMP_NUM_THREADS=1
# Without cached bytecode every process of a run would compile torch and vLLM again.
unset PYTHONDONTWRITEBYTECODE

say() { printf '[environment] %s\n' "$*"; }
fail() {
    printf '[environment] error: %s\n' "$*" >&2
    exit 1
}

choose_device() {
    if [[ -n "${COATI_DEVICE:-}" ]]; then
        [[ "$COATI_DEVICE" =~ ^(cpu|gpu|emulated_gpu)$ ]] || fail "COATI_DEVICE=$COATI_DEVICE: use cpu or gpu"
        printf '%s' "$COATI_DEVICE"
    elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        printf gpu
    else
        printf cpu
    fi
}

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3 python "${HOME:-}/.local/bin/python3.12" "${HOME:-}/.local/bin/python3.11"; do # the last two: uv's
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    return 1
}

# Say which Python there is, and how to get one that the packages are built for. Debian 13 has 3.13 alone, and no pip outside of environments.
python_remedy() {
    local version found="none was found"
    version="$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" && found="python3 is $version"
    case "$version" in
    3.11 | 3.12) found+=" without venv: apt install python3-venv (Debian, Ubuntu)" ;;
    *) found+=". Debian 12, Ubuntu 24.04: apt install python3-venv. Elsewhere uv brings one: apt install pipx && pipx install uv && ~/.local/bin/uv python install 3.12" ;;
    esac
    printf 'Python 3.11 or 3.12 with venv is needed, and %s; then repeat this command' "$found"
}

# The environment is complete if its stamp has this text: a digest of the pins, the device, and the project's path (editable installation).
wanted_stamp() {
    printf '%s %s ' "$DEVICE" "$REPOSITORY"
    cat "$REPOSITORY"/requirements/*.txt "$REPOSITORY/setup.py" "${BASH_SOURCE[0]}" | sha256sum
}

# Print a setting of pip (indexes, certificates) from its configuration or variables, which uv does not read; $2: all, as pip lists them.
# Several values on one line, which pip shows with \n between them if its file has one a line.
pip_setting() {
    awk -F= -v name="$1" -v quote="'" '
        { key = $1; sub(/.*\./, "", key); value = substr($0, length($1) + 2); gsub(quote, "", value); gsub(/\\n/, " ", value); sub(/^ +/, "", value) }
        key == name { if ($1 ~ /^:env:/) from_variable = value; else from_file = value }
        END { print from_variable ? from_variable : from_file }' <<<"$2"
}

prepare_uv() {
    local name of_pip
    of_pip="$("$PYTHON" -m pip config list 2>/dev/null)" || true
    export UV_PYTHON="$PYTHON" UV_NO_CONFIG=1 UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}" # as pip: the best version of all indexes
    export UV_CACHE_DIR="$CACHE/uv" # on the environment's file system, so that files are linked and not copied; removed at the end
    export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$(pip_setting index-url "$of_pip")}" UV_INDEX="${UV_INDEX:-$(pip_setting extra-index-url "$of_pip")}"
    export UV_FIND_LINKS="${UV_FIND_LINKS:-$(pip_setting find-links "$of_pip" | tr -s ' ' ,)}"
    export SSL_CERT_FILE="${SSL_CERT_FILE:-$(pip_setting cert "$of_pip")}"
    for name in UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS SSL_CERT_FILE; do
        [[ -n "${!name}" ]] || unset "$name"
    done
}

uv_install() { "$VENV/bin/uv" pip install --quiet "$@"; }

# Install a lock, whose digests are those of the package index's files. A build of another index or of find-links whose version has a
# suffix (torch 2.13.0+cpu) would be preferred to the pinned one, and refused for want of a digest.
uv_install_lock() { (unset UV_INDEX UV_FIND_LINKS && uv_install --no-deps --no-build-isolation --require-hashes -r "$1"); }

# Compile only the modules that a run imports (all packages have 24,000 files); later processes may not (PYTHONDONTWRITEBYTECODE).
compile_imports() {
    local trainer='import colossalai.booster.plugin, datasets, ray, tensorboard, trl, wandb'
    local engine='import math_verify, vllm.v1.engine.llm_engine, vllm.v1.worker.cpu_worker, vllm.v1.worker.gpu_worker'
    (cd / && "$PYTHON" -W ignore -c "$trainer" >/dev/null 2>&1) &
    (cd / && "$PYTHON" -W ignore -c "$engine" >/dev/null 2>&1) || true
    wait $! || true
}

install_cpu() {
    say "installing $TORCH_PIN and the packages of requirements/cpu.txt"
    uv_install "$TORCH_PIN" -c "$REPOSITORY/requirements/cpu.txt" # the package index's build for this machine
    uv_install_lock "$REPOSITORY/requirements/cpu.txt"
    uv_install --no-deps --no-build-isolation --editable "$REPOSITORY"
}

# Print the CUDA version, 12 or 13, that this Python's torch and vLLM are built for; nothing if they are not installed.
installed_cuda() {
    "$1" -c 'import importlib.metadata as m; m.version("vllm"); import torch; print((torch.version.cuda or "").partition(".")[0])' 2>/dev/null || true
}

# Check before the installation: wheels of the locks (llguidance, which vLLM needs) are built for glibc 2.31.
check_glibc() {
    local name version
    read -r name version < <("$1" -c 'import platform; print(*platform.libc_ver())')
    [[ "$name" == glibc ]] && ((${version%%.*} > 2 || ${version#*.} >= 31)) ||
        fail "the C library is '$name $version', and the packages need glibc 2.31 or newer: use a newer Linux (Debian 11, Ubuntu 20.04, RHEL 9) or a container of one"
}

# Check before the installation: Triton needs gcc and Python.h, and the package index's torch and vLLM are built for CUDA 13.
check_gpu_machine() {
    local base="$1" headers driver
    headers="$("$base" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    command -v gcc >/dev/null && [[ -f "$headers/Python.h" ]] ||
        fail "gcc and $headers/Python.h are needed to compile GPU kernels (Debian, Ubuntu: apt install gcc python3-dev)"
    [[ "$(installed_cuda "$base")" != 12 ]] || return 0
    command -v nvidia-smi >/dev/null ||
        fail "nvidia-smi is not on the PATH, and tells the driver's version: install the NVIDIA driver, 580 or newer, or set COATI_DEVICE=cpu"
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)"
    [[ "${driver%%.*}" =~ ^[0-9]+$ ]] && ((${driver%%.*} >= 580)) ||
        fail "the NVIDIA driver is '${driver:-unknown}' and CUDA 13 needs 580 or newer: update it, or install CUDA 12 builds of torch and vllm for $base first, or set COATI_DEVICE=cpu"
}

install_gpu() {
    local cuda lock
    cuda="$(installed_cuda "$PYTHON")"
    lock="$REPOSITORY/requirements/gpu-cu${cuda:=13}.txt"
    [[ -f "$lock" ]] || fail "torch and vllm are built for CUDA $cuda: install CUDA 12 or 13 builds, or set COATI_DEVICE=cpu"
    say "installing the packages of requirements/${lock##*/}"
    uv_install_lock "$lock"
    uv_install --no-deps --no-build-isolation "$(grep '^colossalai==' "$REPOSITORY/requirements/cpu.in")" -c "$REPOSITORY/requirements/cpu.txt"
    uv_install --no-deps --no-build-isolation --editable "$REPOSITORY"
}

install_emulated_gpu() { install_gpu; }

# Tell whether the environment was made for another device or place: CPU and CUDA builds are of one version, so that neither replaces the
# other, and what is in bin/ names the place. A link leads to an environment of another clone, which is left.
is_of_another() {
    local device place
    [[ -f "$STAMP" && ! -L "$VENV" ]] || return 1
    read -r device place <"$STAMP" || true
    [[ "$device" == "$DEVICE" || -n "${COATI_DEVICE:-}" ]] ||
        fail "${VENV##*/} was made for $device, and this machine's device is $DEVICE: set COATI_DEVICE=$device to use it, or COATI_DEVICE=$DEVICE to make it anew"
    [[ "$device $place " != "$DEVICE $REPOSITORY "* ]]
}

make_environment() {
    local base status=0
    "$PYTHON" -c 'import pip, sys; sys.exit(3 * (sys.version_info[:2] not in ((3, 11), (3, 12))))' 2>/dev/null || status=$?
    ((status != 3)) ||
        fail "${VENV##*/} is of $("$PYTHON" --version), and the packages need 3.11 or 3.12: remove it, and repeat this command"
    if ((status)) || is_of_another; then
        base="$(find_python)" ||
            fail "$(python_remedy)"
        check_glibc "$base"
        [[ "$DEVICE" != gpu ]] || check_gpu_machine "$base"
        say "making ${VENV##*/} with $("$base" --version)"
        # CUDA 12 builds of torch and vLLM are not on the package index: use those that are installed on the machine.
        local site=()
        [[ "$DEVICE" == cpu || "$(installed_cuda "$base")" != 12 ]] || site=(--system-site-packages)
        "$base" -m venv --clear "${site[@]}" "$VENV"
    fi
    printf '%s %s\n' "$DEVICE" "$REPOSITORY" >"$STAMP" # completed at the end, so that the next call repairs an interrupted installation
    "$PYTHON" -m pip --no-cache-dir --disable-pip-version-check install --quiet --no-compile --require-hashes -r "$REPOSITORY/requirements/build.txt"
    prepare_uv
    "install_$DEVICE"
    say "compiling the modules that a run imports"
    rm -rf "$UV_CACHE_DIR" & # beside it
    compile_imports
    wait
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

DEVICE="$(choose_device)" || return 1
mkdir -p "$CACHE"
# Only one process at a time; in a subshell, so that later processes do not inherit the lock.
(
    set -euo pipefail
    flock 9
    ensure_environment
) 9>"$CACHE/environment.lock"
