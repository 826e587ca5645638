#!/bin/sh
# Everything worth knowing of one big GPU, in under ten minutes: benchmarks/gpu.sh [--tiny] [OUT]
# --tiny: the same calls at toy shapes, on whatever there is, to see that they work. OUT: where the JSON goes.
set -eu
cd "$(dirname "$0")/.."
tiny=""
if [ "${1:-}" = "--tiny" ]; then
  tiny=1
  shift
fi
out="${1:-benchmarks/results/gpu}"
python="${PYTHON:-.venv/bin/python}"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
"$python" -m depthgrow doctor
if [ -n "$tiny" ]; then
  shape="--hidden 64 --vocab 512 --teacher-layers 4 --documents 4 --mean 60 --longest 128 --micro-tokens 512 --dtype float32 --steps 8"
  head="--tokens 256 --hidden 64 --vocab 512,1024 --repeats 1"
else
  shape=""
  head="--tokens 8192 --hidden 4096 --vocab 49152,151936 --repeats 1"
fi
# attention, weights and losses first: a fast wrong answer is worth nothing
"$python" benchmarks/device_check.py
# shellcheck disable=SC2086
"$python" benchmarks/paper_shape.py $shape --out "$out/paper-shape.json"
# shellcheck disable=SC2086
"$python" benchmarks/head.py $head --out "$out/head.json"
