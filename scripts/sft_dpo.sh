#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct on its own answers: fine-tuning on the best of them, then DPO on pairs of better and worse ones.
# docs/recipes/sft_dpo.md shows what comes of it. The arguments are seeds of DPO (scripts/sft_dpo.sh 0 1 2; by default 0).
# All files are written to runs/preferences/. A finished stage is not repeated.
# Exit code: 1 if a stage fails, or if the model is not as good as scripts/recipe_report.py asks for.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

root=runs/preferences
example="SFT and DPO"
takes=seeds
source scripts/stages.sh

model=$root/SmolLM2-135M-Instruct
stage SmolLM2-135M-Instruct "$PYTHON" scripts/smollm2.py "$model"
stage task "$PYTHON" scripts/instruction_task.py "$root/task" --seed 0
train=$root/task/train.jsonl
# One process has both cores here.
sample=(env OMP_NUM_THREADS=2 "$coati_rl" generate -rt scripts/instruction_task.py:score --precision "$precision" -mpt 80 -mnt 48 -imbs 64)
job=(--precision "$precision" -t 2 --max-tokens-per-microbatch 2048 --max-length 160 --warmup-steps 4 --lr-schedule linear --min-lr-ratio 0 -si -1)

# The best of 8 answers, where it has all that was asked for.
stage best.jsonl "${sample[@]}" -m "$model" -d "$train" --max-samples 512 -g 8 -temp 0.8 --best-of --min-reward 1 -o "$root/best.jsonl"
stage sft "$coati_rl" sft "${job[@]}" -m "$model" -d "$root/best.jsonl" -tbs 16 -tmbs 16 -e 2 -lr 4e-5 --run-dir "$root/sft"
sft=$(echo "$root"/sft/checkpoints/step-*)

# The best and the worst of 8 answers of that model to other prompts; pairs of 64 more are held out.
pairs=$root/pairs.jsonl
sed -n 513,800p "$train" >"$root/prompts.jsonl"
tail -n 64 "$train" >"$root/held-out-prompts.jsonl"
compare=("${sample[@]}" -m "$sft" -g 8 -temp 0.8 --pairs)
stage pairs.jsonl "${compare[@]}" -d "$root/prompts.jsonl" -o "$pairs"
stage held-out-pairs.jsonl "${compare[@]}" -d "$root/held-out-prompts.jsonl" -o "$root/held-out-pairs.jsonl"

evaluate=("${sample[@]}" -d "$root/task/eval.jsonl" -temp 0)
stage eval-start.jsonl "${evaluate[@]}" -m "$model" -o "$root/eval-start.jsonl"
stage eval-sft.jsonl "${evaluate[@]}" -m "$sft" -o "$root/eval-sft.jsonl"

for seed in "${@:-0}"; do
    stage "dpo-$seed" "$coati_rl" dpo "${job[@]}" -m "$sft" -d "$pairs" -ed "$root/held-out-pairs.jsonl" \
        -tbs 8 -tmbs 8 -e 2 -lr 5e-5 --beta 0.1 --seed "$seed" --run-dir "$root/dpo-$seed"
    stage "eval-dpo-$seed.jsonl" "${evaluate[@]}" -m "$(echo "$root/dpo-$seed"/checkpoints/step-*)" -o "$root/eval-dpo-$seed.jsonl"
done
"$PYTHON" scripts/recipe_report.py sft_dpo "$root"
