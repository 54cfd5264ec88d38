#!/bin/sh
# Every benchmark of docs/benchmarks.md, whose tables and charts are redrawn; run it on an otherwise idle machine.
set -e
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"

step() { "$python" benchmarks/train_step.py "$@"; }
step --peer trl --docs 1-trl-8
step --peer trl --num-generations 16 --docs 2-trl-16
step --peer trl --lora --docs 3-trl-lora-8
step --peer trl --lora --num-generations 16 --docs 4-trl-lora-16
step --peer trl --beta 0.04 --docs 5-trl-beta-8
step --peer trl --lora --beta 0.04 --docs 6-trl-lora-beta-8
step --peer dense --docs 7-dense-8
step --peer trl --shape hybrid --docs 8-trl-hybrid-8
step --peer dense --shape hybrid --docs 9-dense-hybrid-8
"$python" benchmarks/trajectories.py --docs trajectories-8
for tokens in 2048 4096 8192; do
    for generations in 08 16; do
        "$python" benchmarks/video.py --shape narrow --image-tokens $tokens --num-generations $generations \
            --repeats 1 --docs video-$tokens-$generations
    done
done
"$python" benchmarks/rollout.py --docs rollout-8
"$python" benchmarks/rollout.py --num-generations 16 --docs rollout-16
"$python" benchmarks/whole_run.py --docs whole_run-1-small
"$python" benchmarks/whole_run.py --shape digits --windows 22 --docs whole_run-2-digits
"$python" benchmarks/scaling.py --docs scaling
"$python" benchmarks/patch_embed.py --docs patch_embed
"$python" benchmarks/sharding.py --docs sharding
"$python" benchmarks/compiled_kernels.py --docs
