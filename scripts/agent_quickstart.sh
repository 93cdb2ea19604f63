#!/usr/bin/env bash
# Train a tiny model that cannot multiply to call a calculator: random weights, supervised fine-tuning on conversations in which few
# call it, RL with `--tools calculator`, and an evaluation without the tool. docs/agent_quickstart.md shows what comes of it.
# All files are written to runs/agent_quickstart/. A finished stage is not repeated; `rm -r runs/agent_quickstart` begins anew.
# Exit code: 1 if a stage fails, or if the model has not learned what scripts/agent_report.py asks for.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

root=runs/agent_quickstart
example="agent quickstart"
source scripts/stages.sh

stage base "$PYTHON" scripts/make_agent_model.py "$root/base" --task multiplication --hidden-size 64
stage sft "$coati_rl" sft -m "$root/base" -d "$root/base/sft.jsonl" -t 2 -tbs 32 -tmbs 32 --max-tokens-per-microbatch 4096 \
    -e 4 --max-steps 800 -lr 3e-3 --lr-schedule linear --min-lr-ratio 0 --warmup-steps 20 -si -1 --run-dir "$root/sft"
stage rl "$coati_rl" rl -m "$root/sft/checkpoints/step-800" -d "$root/base/train.jsonl" -ed "products=$root/base/eval.jsonl" \
    --tools calculator --max-turns 3 -rt boxed -kl 0 -lr 7e-4 -t 1 -i 1 -g 8 -ibs 64 -imbs 64 -tbs 64 -tMbs 64 -tmbs 64 \
    -mpt 64 -mnt 24 --max-episode-tokens 128 -ei 10 -si -1 --max-steps 60 --run-dir "$root/rl"
stage without-tool.jsonl "$coati_rl" generate -m "$root/rl/checkpoints/step-60" -d "$root/base/eval.jsonl" -rt boxed -temp 0 \
    -mpt 64 -mnt 24 -b transformers -o "$root/without-tool.jsonl"
"$PYTHON" scripts/agent_report.py "$root"
