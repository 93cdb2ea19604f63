#!/usr/bin/env bash
# Train a tiny model to play GuessTheNumber of textarena, a game of up to five turns here: random weights, supervised fine-tuning on
# mostly random guesses, RL with `--env textarena:GuessTheNumber-v0`. docs/agent_quickstart.md shows what comes of it.
# All files are written to runs/textarena/. A finished stage is not repeated; `rm -r runs/textarena` begins anew.
# Exit code: 1 if a stage fails, or if the model has not learned what scripts/agent_report.py asks for.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
cd -- "$REPOSITORY"

root=runs/textarena
example="textarena"
source scripts/stages.sh

game=(--env-arg min_number=10 --env-arg max_number=40 --env-arg max_turns=4) # the turns after the first one: five guesses
stage base "$PYTHON" scripts/make_agent_model.py "$root/base" --task guessing "${game[@]}" --hidden-size 64 --num-conversations 16384
stage sft "$coati_rl" sft -m "$root/base" -d "$root/base/sft.jsonl" -t 2 -tbs 32 -tmbs 32 --max-tokens-per-microbatch 4096 \
    -e 4 --max-steps 1024 -lr 3e-3 --lr-schedule linear --min-lr-ratio 0 --warmup-steps 20 -si -1 --run-dir "$root/sft"
stage rl "$coati_rl" rl -m "$root/sft/checkpoints/step-1024" -d "$root/base/train.jsonl" -ed "games=$root/base/eval.jsonl" \
    --env textarena:GuessTheNumber-v0 "${game[@]}" --max-turns 10 -kl 0 -lr 1e-3 -t 1 -i 1 -g 8 -ibs 64 -imbs 64 -tbs 64 -tMbs 64 \
    -tmbs 64 -mpt 64 -mnt 8 --max-episode-tokens 256 -ei 10 --eval-temperature 1 -si -1 --max-steps 60 --run-dir "$root/rl"
"$PYTHON" scripts/agent_report.py "$root"
