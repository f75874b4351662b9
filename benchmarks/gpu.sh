#!/usr/bin/env bash
# Usage: benchmarks/gpu.sh [--dry_run] [PIECE ...]
# A day on a borrowed GPU, in pieces of under ten minutes: all of them, or those named (benchmarks/gpu.py --list). A piece that is
# done leaves a stamp and is skipped by the next call, so that an interrupted day goes on where it was. Nothing is downloaded: models
# have random weights in the shapes of real ones.
#   PYTHON  the interpreter of an environment with trl-qarl and vLLM; default: python
#   OUT     where logs, stamps, rows.jsonl and tables.md go; default: benchmarks/results
#   LIMIT   seconds a piece may take; default: 590
# --dry_run runs one piece of each kind with tiny shapes, on a CPU too, in one process.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python} out=${OUT:-benchmarks/results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"

if [ "${1:-}" = --dry_run ]; then
    exec "$python" benchmarks/gpu.py --dry_run --out "$out" "${@:2}"
fi
pieces=$("$python" benchmarks/gpu.py --list "$@") || exit 2
failed=
for piece in $pieces; do
    if [ -e "$out/$piece.done" ]; then echo "$piece: done"; continue; fi
    echo "== $piece"
    timeout --kill-after=20 "${LIMIT:-590}" "$python" benchmarks/gpu.py --out "$out" "$piece" 2>&1 | tee "$out/$piece.log"
    [ "${PIPESTATUS[0]}" = 0 ] || { echo "$piece: failed, see $out/$piece.log"; failed+=" $piece"; }
done
[ -z "$failed" ] || { echo "not done:$failed" >&2; exit 1; }
echo "all done: $out/tables.md"
