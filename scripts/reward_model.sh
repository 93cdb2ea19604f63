#!/usr/bin/env bash
# Train a reward model on comparisons of SmolLM2-135M-Instruct's own answers, by a style that no prompt mentions, then the policy by RL with
# that model as the only reward. docs/recipes/reward_model.md shows what comes of it. The arguments are seeds of both trainings
# (scripts/reward_model.sh 0 1 2; by default 0). All files are written to runs/reward-model/. A finished stage is not repeated.
# Exit code: 1 if a stage fails, or if a model is not as good as scripts/recipe_report.py asks for.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

root=runs/reward-model
example="reward model"
takes=seeds
source scripts/stages.sh

model=$root/SmolLM2-135M-Instruct
stage SmolLM2-135M-Instruct "$PYTHON" scripts/smollm2.py "$model"
stage task "$PYTHON" scripts/style_task.py "$root/task" --seed 0
# One process has both cores here.
sample=(env OMP_NUM_THREADS=2 "$coati_rl" generate -m "$model" -rt scripts/style_task.py:score --precision "$precision" -mpt 64 -mnt 40 -imbs 64)
# The best and the worst of 8 answers, as the judge sees them.
stage pairs.jsonl "${sample[@]}" -d "$root/task/train.jsonl" -g 8 -temp 0.8 --pairs -o "$root/pairs.jsonl"
stage held-out-pairs.jsonl "${sample[@]}" -d "$root/task/eval.jsonl" -g 8 -temp 0.8 --pairs -o "$root/held-out-pairs.jsonl"

for seed in "${@:-0}"; do
    stage "reward-model-$seed" "$coati_rl" rm -m "$model" -d "$root/pairs.jsonl" -ed "$root/held-out-pairs.jsonl" --precision "$precision" -t 2 \
        --max-tokens-per-microbatch 2048 --max-length 160 -tbs 8 -tmbs 8 -e 2 -lr 5e-5 --lr-schedule linear --min-lr-ratio 0 \
        --warmup-steps 4 -si -1 --seed "$seed" --run-dir "$root/reward-model-$seed"
    # The judge's score has the weight 0: it is only measured.
    stage "rl-$seed" "$coati_rl" rl -m "$model" -d "$root/task/train.jsonl" -ed "held_out=$root/task/eval.jsonl" \
        -rt "scripts/style_task.py:score=0,model:$(echo "$root/reward-model-$seed"/checkpoints/step-*)=1" \
        --precision "$precision" -kl 0.1 -temp 0.8 -lr 4e-5 --warmup-steps 4 -t 2 -i 2 -g 8 -ibs 4 -imbs 4 -tbs 4 -tMbs 4 -tmbs 32 \
        --max-tokens-per-microbatch 1024 -mpt 64 -mnt 40 -ei 15 -si -1 --max-steps 30 --seed "$seed" --run-dir "$root/rl-$seed"
done
"$PYTHON" scripts/recipe_report.py reward_model "$root"
