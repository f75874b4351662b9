#!/usr/bin/env bash
# Usage: benchmarks/rehearsal/run.sh RELEASE
# What can be tried of the GPU path without a GPU, with vLLM's wheel for CUDA: the contract of what we call (contract.py), the learner on
# fake CUDA tensors (learner.py), and the kernels that vLLM chooses by compute capability (kernels.py). README.md here says what that shows.
#   RELEASE  major.minor of vLLM, such as 0.32
#   PYTHON   the interpreter of an environment with it and this package's requirements; default: one is made in .venv-rehearsal with
#            uv, which takes 8 GB
# Ends with 1 if anything has changed or fails.
set -uo pipefail
cd "$(dirname "$0")/../.."
release=${1:?usage: benchmarks/rehearsal/run.sh RELEASE, such as 0.32}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$PWD/.venv-rehearsal/bin/python
    # cuda-python 12 has modules of the same names as cuda-bindings 13, and fewer functions.
    uv venv --quiet --clear --python 3.12 .venv-rehearsal &&
        uv pip install --quiet --python "$PYTHON" "vllm==$release.*" "cuda-python>=13" -e . || exit 2
fi

# vLLM's extensions want NVIDIA's driver. All that they call while they are loaded is answered with "no device".
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
{
    echo 'typedef int R;'
    for name in cuInit cuCtxGetCurrent cuCtxSetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuGetProcAddress_v2 \
        cuMemAddressFree cuMemAddressReserve cuMemCreate cuMemGetAllocationGranularity cuMemMap cuMemRelease cuMemSetAccess cuMemUnmap \
        cuPointerGetAttribute cuTensorMapEncodeTiled; do
        echo "R $name() { return 100; }"
    done
    echo 'R cuDriverGetVersion(int *version) { *version = 13000; return 0; }'
    echo 'R cuGetErrorString(R error, const char **text) { *text = "no device"; return 0; }'
} | cc -x c -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" - || exit 2

export LD_LIBRARY_PATH=$stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false TQDM_DISABLE=1
installed=$("$PYTHON" -c 'from importlib.metadata import version; print(version("vllm"))') || exit 2
case $installed in "$release".*) ;; *) echo "vLLM $installed is installed, not $release" >&2; exit 2 ;; esac

failed=
for part in "contract.py 9.0" "learner.py 8.0" "learner.py 9.0" kernels.py; do
    echo "== $part"
    # shellcheck disable=SC2086
    "$PYTHON" -W ignore benchmarks/rehearsal/$part || failed+=" ${part// /:}"
done
[ -z "$failed" ] || { echo "vLLM $installed: failed:$failed" >&2; exit 1; }
echo "vLLM $installed: everything as recorded"
