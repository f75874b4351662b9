#!/usr/bin/env bash
# Usage: benchmarks/gpu.sh [--dry_run] [PIECE ...]
# A day on a borrowed GPU, in pieces of under ten minutes: all of them, or those named (benchmarks/gpu.py --list). A piece that is
# done leaves a stamp and is skipped by the next call, so that an interrupted day goes on where it was. Nothing is downloaded: models
# have random weights in the shapes of real ones. The first three pieces need no vLLM.
#   PYTHON  the interpreter of an environment with trl-qarl, pytest and, but for the first pieces, vLLM; default: python
#   OUT     where two files go: results.tar.gz with logs, stamps and rows.jsonl, and tables.md; default: benchmarks/results
#   LIMIT   seconds a piece may take; default: 590
# --dry_run runs one piece of each kind with tiny shapes, on a CPU too, in one process.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python} out=${OUT:-benchmarks/results}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -e "$out/results.tar.gz" ]; then tar -xzf "$out/results.tar.gz" -C "$work" || exit 2; fi

# After each piece: whoever takes the machine away does not ask.
pack() {
    tar -czf "$out/results.tar.gz.part" -C "$work" . && mv "$out/results.tar.gz.part" "$out/results.tar.gz"
    if [ -e "$work/tables.md" ]; then cp "$work/tables.md" "$out/tables.md"; fi
}

if [ "${1:-}" = --dry_run ]; then
    "$python" benchmarks/gpu.py --dry_run --out "$work" "${@:2}"
    status=$?
    pack
    exit "$status"
fi
pieces=$("$python" benchmarks/gpu.py --list "$@") || exit 2
failed=
for piece in $pieces; do
    if [ -e "$work/$piece.done" ]; then echo "$piece: done"; continue; fi
    echo "== $piece"
    timeout --kill-after=20 "${LIMIT:-590}" "$python" benchmarks/gpu.py --out "$work" "$piece" 2>&1 | tee "$work/$piece.log"
    [ "${PIPESTATUS[0]}" = 0 ] || { echo "$piece: failed, see $piece.log in $out/results.tar.gz"; failed+=" $piece"; }
    pack
done
[ -z "$failed" ] || { echo "not done:$failed" >&2; exit 1; }
echo "all done: $out/tables.md"
