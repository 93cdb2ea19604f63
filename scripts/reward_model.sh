#!/usr/bin/env bash
# Train SmolLM2-135M-Instruct on its own answers: fine-tuning on the best of them, a reward model on pairs of better and worse ones, then
# RL with that model as the only reward. docs/recipes/reward_model.md shows what comes of it. The arguments are seeds of both trainings
# (scripts/reward_model.sh 0 1 2; by default 0). All files are written to runs/preferences/. A finished stage is not repeated.
# Exit code: 1 if a stage fails, or if a model is not as good as scripts/recipe_report.py asks for.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

root=runs/preferences
example="reward model"
source scripts/stages.sh
source scripts/answer_pairs.sh

for seed in "${@:-0}"; do
    stage "reward-model-$seed" "$coati_rl" rm "${job[@]}" -m "$sft" -d "$pairs" -ed "$root/held-out-pairs.jsonl" \
        -tbs 8 -tmbs 8 -e 2 -lr 5e-5 --seed "$seed" --run-dir "$root/reward-model-$seed"
    # The program's score has the weight 0: it is only measured.
    stage "rl-$seed" "$coati_rl" rl -m "$sft" -d "$train" -ed "held_out=$root/task/eval.jsonl" \
        -rt "scripts/instruction_task.py:score=0,model:$(echo "$root/reward-model-$seed"/checkpoints/step-*)=1" \
        --precision bf16 -kl 0.05 -temp 0.8 -lr 2e-5 --warmup-steps 4 -t 2 -i 2 -g 8 -ibs 4 -imbs 4 -tbs 4 -tMbs 4 -tmbs 32 \
        --max-tokens-per-microbatch 1024 -mpt 80 -mnt 48 -ei 10 -si -1 --max-steps 30 --seed "$seed" --run-dir "$root/rl-$seed"
done
"$PYTHON" scripts/recipe_report.py reward_model "$root"
