#!/usr/bin/env bash
# Run a command on emulated GPUs, with the environment and libraries that scripts/test.sh --emulated-gpu makes:
#     tests/emulated_gpu/run.sh COMMAND...
# COATI_EMULATED_GPU_COUNT: GPUs (8). COATI_EMULATED_GPU_BYTES: memory of each (8 GiB). COATI_EMULATED_GPU_LOG: a file of
# what is not emulated, and of NCCL's errors (stderr).
home="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
export COATI_EMULATED_GPU_HOME="$home" COATI_EMULATED_GPU_COUNT="${COATI_EMULATED_GPU_COUNT:-8}"
export COATI_EMULATED_GPU_LIBRARIES="${COATI_EMULATED_GPU_LIBRARIES:-$home/../../.venv-gpu/emulated_gpu}"
libraries="$COATI_EMULATED_GPU_LIBRARIES"
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
preload="$libraries/libcudart.so.13:$libraries/libcuda.so.1:$libraries/libnccl.so.2"
export LD_PRELOAD="$preload${LD_PRELOAD:+:$LD_PRELOAD}"
exec "$@"
