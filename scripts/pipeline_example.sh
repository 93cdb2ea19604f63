#!/usr/bin/env bash
# Run the post-training jobs one after another on the quickstart's arithmetic task: supervised fine-tuning, a reward model, RL
# against it, RL with verifiable reward, distillation into a smaller student, evaluation. docs/pipeline.md explains the stages.
# All files are written to runs/pipeline/. A finished stage is not repeated; `rm -r runs/pipeline` begins anew.
# Exit code: 1 if a stage fails, or if a model is not as good as scripts/pipeline_report.py asks for.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

root=runs/pipeline
example=pipeline
source scripts/stages.sh

# Two models of random weights with one tokenizer; the first one's folder holds the data too.
stage base "$PYTHON" scripts/make_tiny_model.py "$root/base" --steps 0 --num-conversations 16384
stage small "$PYTHON" scripts/make_tiny_model.py "$root/small" --steps 0 --hidden-size 64
data=$root/base

# Supervised fine-tuning on the solutions of a careless teacher.
fine_tune=("$coati_rl" sft -t 2 -tbs 32 -tmbs 32 --max-tokens-per-microbatch 4096 -e 3 --max-steps 600
    -lr 2e-3 --lr-schedule linear --min-lr-ratio 0 --warmup-steps 20 -si -1)
stage sft "${fine_tune[@]}" -m "$root/base" -d "$data/sft.jsonl" --run-dir "$root/sft"
sft=$root/sft/checkpoints/step-600

# Preference pairs of the model's own samples, the right answer preferred, and a reward model.
pairs=("$coati_rl" generate -m "$sft" -rt boxed -g 4 --pairs -mnt 32)
stage pairs.jsonl "${pairs[@]}" -d "$data/train.jsonl" --max-samples 8192 -o "$root/pairs.jsonl"
stage held-out-pairs.jsonl "${pairs[@]}" -d "$data/eval.jsonl" -o "$root/held-out-pairs.jsonl"
stage reward-model "$coati_rl" rm -m "$sft" -d "$root/pairs.jsonl" -ed "$root/held-out-pairs.jsonl" \
    -t 2 -tbs 32 -tmbs 32 --max-tokens-per-microbatch 4096 -e 4 --max-steps 120 -lr 1e-3 -si -1 --run-dir "$root/reward-model"

# RL: first the reward model judges, then the answer itself.
rl=("$coati_rl" rl -d "$data/train.jsonl" -ed "arithmetic=$data/eval.jsonl" -lr 3e-4 -t 2 -i 2 -g 8 -ibs 32 -imbs 32
    -tbs 32 -tMbs 32 -tmbs 16 -mnt 32 -ei 5 -si -1)
stage rl-reward-model "${rl[@]}" -m "$sft" -rt "boxed=0,model:$root/reward-model/checkpoints/step-120=1" -kl 1 \
    --max-steps 15 --run-dir "$root/rl-reward-model"
stage rl-verifiable "${rl[@]}" -m "$root/rl-reward-model/checkpoints/step-15" -rt boxed -kl 0 \
    --max-steps 30 --run-dir "$root/rl-verifiable"
teacher=$root/rl-verifiable/checkpoints/step-30

# The smaller model, on the careless solutions, and on solutions and distributions of the trained model.
stage student-sft "${fine_tune[@]}" -m "$root/small" -d "$data/sft.jsonl" --run-dir "$root/student-sft"
stage teacher.jsonl "$coati_rl" generate -m "$teacher" -rt boxed -d "$data/train.jsonl" -mnt 32 -o "$root/teacher.jsonl"
stage student-distilled "${fine_tune[@]}" -m "$root/small" -d "$root/teacher.jsonl" --teacher "$teacher" --run-dir "$root/student-distilled"

# Evaluation, greedy, on operands that no training prompt has.
for model in sft/checkpoints/step-600 rl-reward-model/checkpoints/step-15 rl-verifiable/checkpoints/step-30 \
    student-sft/checkpoints/step-600 student-distilled/checkpoints/step-600; do
    name=${model%%/*}
    stage "eval-$name.jsonl" "$coati_rl" generate -m "$root/$model" -d "$data/eval.jsonl" -rt boxed -temp 0 -mnt 32 \
        -b transformers -o "$root/eval-$name.jsonl"
done
"$PYTHON" scripts/pipeline_report.py "$root"
