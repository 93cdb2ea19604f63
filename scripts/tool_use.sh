#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct to solve word problems with a calculator: fine-tuning on conversations in which few call it, then RL with
# `--tools calculator`. docs/recipes/tool_use.md shows what comes of it. The arguments are seeds of RL (scripts/tool_use.sh 0 1 2; by
# default 0). All files are written to runs/tool-use/. A finished stage is not repeated.
# Exit code: 1 if a stage fails, or if the model is not as good as scripts/recipe_report.py asks for.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

root=runs/tool-use
example="tool use"
takes=seeds
source scripts/stages.sh

model=$root/SmolLM2-135M-Instruct
stage SmolLM2-135M-Instruct "$PYTHON" scripts/smollm2.py "$model"
stage task "$PYTHON" scripts/word_problem_task.py "$root/task" --seed 0
stage sft "$coati_rl" sft -m "$model" -d "$root/task/sft.jsonl" --chat-template "$root/task/chat_template.jinja" --precision "$precision" -t 2 \
    --max-tokens-per-microbatch 2048 --max-length 256 -tbs 8 -tmbs 8 -e 1 -lr 1e-4 --lr-schedule linear --min-lr-ratio 0 \
    --warmup-steps 4 -si -1 --run-dir "$root/sft"
sft=$(echo "$root"/sft/checkpoints/step-*)

for seed in "${@:-0}"; do
    stage "rl-$seed" "$coati_rl" rl -m "$sft" -d "$root/task/train.jsonl" -ed "held_out=$root/task/eval.jsonl" \
        --tools calculator --max-turns 3 -rt boxed --precision "$precision" -kl 0 -lr 2e-5 --warmup-steps 4 -t 2 -i 2 \
        -g 8 -ibs 4 -imbs 4 -tbs 4 -tMbs 4 -tmbs 32 --max-tokens-per-microbatch 1024 -mpt 128 -mnt 48 --max-episode-tokens 256 \
        -ei 15 -si -1 --max-steps 30 --seed "$seed" --run-dir "$root/rl-$seed"
    stage "without-tool-$seed.jsonl" env OMP_NUM_THREADS=2 "$coati_rl" generate -m "$(echo "$root/rl-$seed"/checkpoints/step-*)" \
        -d "$root/task/eval.jsonl" -rt boxed --precision "$precision" -temp 0 -mpt 128 -mnt 48 -imbs 64 -o "$root/without-tool-$seed.jsonl"
done
"$PYTHON" scripts/recipe_report.py tool_use "$root"
