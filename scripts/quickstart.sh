#!/usr/bin/env bash
# Install the environment, create a tiny model, train it by GRPO with vLLM and ColossalAI on two producers and two trainers, and plot
# the reward curve. All files are written to runs/quickstart/. Arguments are passed to rl_example.py:
# scripts/quickstart.sh --max-steps 80
set -euo pipefail
trap 'printf "[quickstart] failed in phase: %s\n" "${phase:-environment}" >&2' ERR
start=$SECONDS
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

model=runs/quickstart/tiny-model
say() { printf '[quickstart] %s\n' "$*"; }
timing="environment $((SECONDS - start)) s"

phase="tiny model"
phase_start=$SECONDS
if [[ -f $model/complete ]]; then
    say "$model exists"
else
    say "creating $model (about a minute)"
    rm -rf "$model"
    "$PYTHON" scripts/make_tiny_model.py "$model" --seed 0
    touch "$model/complete"
fi
timing+=", tiny model $((SECONDS - phase_start)) s"

phase="training"
phase_start=$SECONDS
# Each run has its own folder; existing runs are not overwritten.
run_dir="runs/quickstart/run-$(date +%Y%m%d-%H%M%S)"
say "training; metrics and logs are in $run_dir"
"$PYTHON" rl_example.py \
    --model "$model" --dataset "$model/train.jsonl" --eval-dataset "{\"arithmetic\": \"$model/eval.jsonl\"}" \
    --reward-type boxed --backend vllm --algo GRPO --kl-coeff 0 --learning-rate 3e-4 \
    --num-trainers 2 --num-inferencer 2 --num-generations 8 \
    --inference-batch-size 32 --inference-microbatch-size 32 \
    --train-batch-size 32 --train-minibatch-size 32 --train-microbatch-size 16 \
    --max-new-tokens 32 --max-prompt-tokens 512 --eval-interval 10 --seed 0 --max-steps 40 --run-dir "$run_dir" "$@"
timing+=", training $((SECONDS - phase_start)) s"

phase="reward curve"
if [[ ! -d $run_dir ]]; then
    say "no run is in $run_dir (--dry-run, --help, or a --run-dir of yours): no curve is drawn"
    exit
fi
"$PYTHON" -m coati_rl.command_line plot "$run_dir"
summary=$run_dir/eval/summary.jsonl # missing with --eval-interval 0
[[ ! -f $summary ]] || "$PYTHON" - "$summary" <<'PYTHON'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
first, last = rows[0], rows[-1]
print(f"[quickstart] held-out greedy accuracy: {first['accuracy']:.1%} at step {first['step']}, {last['accuracy']:.1%} at step {last['step']}")
PYTHON
say "$timing; total $((SECONDS - start)) s"
