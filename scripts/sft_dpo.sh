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
source scripts/stages.sh
source scripts/answer_pairs.sh

for seed in "${@:-0}"; do
    stage "dpo-$seed" "$coati_rl" dpo "${job[@]}" -m "$sft" -d "$pairs" -ed "$root/held-out-pairs.jsonl" \
        -tbs 8 -tmbs 8 -e 2 -lr 5e-5 --beta 0.1 --seed "$seed" --run-dir "$root/dpo-$seed"
    stage "eval-dpo-$seed.jsonl" "${evaluate[@]}" -m "$(echo "$root/dpo-$seed"/checkpoints/step-*)" -o "$root/eval-dpo-$seed.jsonl"
done
"$PYTHON" scripts/recipe_report.py sft_dpo "$root"
