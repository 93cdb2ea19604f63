#!/usr/bin/env bash
# Build the emulator's libraries for an environment with torch's CUDA 13 build, and make its Python load the emulation:
#     tests/emulated_gpu/build.sh PYTHON DIRECTORY
# A function that CUDA's or NCCL's library has and the emulator has not fails, and is named in the log.
set -euo pipefail
python="$1" directory="$2"
sources="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/libraries"
packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
digest="$(cat "$sources"/* "${BASH_SOURCE[0]}" | sha256sum) $packages"
[[ "$(cat "$directory/built" 2>/dev/null)" != "$digest" ]] || exit 0
mkdir -p "$directory"
cd -- "$directory"
includes=(-I"$sources" -I"$packages/nvidia/cu13/include" -I"$packages/nvidia/nccl/include")
compile=(gcc -std=gnu11 -O1 -fPIC -fno-builtin "${includes[@]}" -DCUDARTAPI=)

# Print a library's functions, without their versions.
exported() { nm -D --defined-only "$1" | awk '{ sub(/@.*/, "", $3); print $3 }'; }

# link LIBRARY ERROR NAMES OPTIONS SOURCES...: functions of the file NAMES that the sources lack return ERROR.
link() {
    local library="$1" error="$2" names="$3" options="$4" source objects=()
    shift 4
    for source in "$@"; do
        "${compile[@]}" -c "$sources/$source.c" -o "$source.o"
        objects+=("$source.o")
    done
    nm --defined-only "${objects[@]}" | awk '$2 == "T" { print $3 }' | sort -u >"$library.have"
    echo 'void emulated_log(const char *, ...);' >"$library.rest.c"
    sort -u "$names" | comm -23 - "$library.have" | while read -r name; do
        echo "int $name(void) { emulated_log(\"$name is not emulated\"); return $error; }"
    done >>"$library.rest.c"
    "${compile[@]}" -w -c "$library.rest.c" -o "$library.rest.o"
    # shellcheck disable=SC2086
    gcc -shared -o "$library" "${objects[@]}" "$library.rest.o" -Wl,-soname,"$library" $options -lpthread -ldl
}

exported "$packages/nvidia/cu13/lib/libcudart.so.13" | grep -v '^libcudart' >cudart.names
exported "$packages/nvidia/nccl/lib/libnccl.so.2" | grep -E '^p?nccl' >nccl.names
grep -ohE '\bcu[A-Z][A-Za-z0-9]+(_v[0-9]+)? *\(' "$packages/nvidia/cu13/include/cuda.h" | tr -d ' (' >cuda.names
: >nvml.names
echo 'libcudart.so.13 { global: *; };' >cudart.map
link libcudart.so.13 801 cudart.names "-Wl,--version-script=cudart.map" devices memory streams kernels
link libcuda.so.1 801 cuda.names "-L. -l:libcudart.so.13" driver virtual_memory
link libnccl.so.2 3 nccl.names "-L. -l:libcudart.so.13" nccl nccl_members nccl_exchange nccl_numbers
link libnvidia-ml.so.1 3 nvml.names "-L. -l:libcudart.so.13" nvml
torch="$packages/torch"
g++ -std=c++20 -O1 -w -fPIC -shared "${includes[@]}" -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
    "$sources/dispatch.cpp" -o libdispatch.so -L"$torch/lib" -ltorch -ltorch_cpu -ltorch_cuda -lc10 -lc10_cuda \
    -L. -l:libcudart.so.13
# The interpreter reads this when it starts; without the variable it does nothing.
cat >"$packages/emulated_gpu.pth" <<'PYTHON'
import os, sys; h = os.environ.get("COATI_EMULATED_GPU_HOME"); h and (sys.path.append(h), __import__("emulation.start"))
PYTHON
echo "$digest" >built
