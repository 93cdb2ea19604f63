#!/bin/bash
# Run unmodified recipes of tinker-cookbook against a server of this project, without a network, and print a table.
#   scripts/tinker_recipes.sh OUT_DIR [SERVER COMMAND ...]      default: coati-rl tinker-serve
# RECIPES="sl_loop rl_loop" chooses some; LIMIT=900: seconds that one may take; STEPS: as many times the recipes' few steps.
# The client is installed into OUT_DIR/client from the package index: the environment here stays as it is.
set -uo pipefail
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="$HERE/.venv/bin/python" # made by: source scripts/environment.sh
[[ -x "$PYTHON" ]] || { echo "source scripts/environment.sh first: it makes .venv"; exit 1; }
export OMP_NUM_THREADS=1
OUT="$(realpath -m "${1:?usage: scripts/tinker_recipes.sh OUT_DIR [SERVER COMMAND ...]}")"
shift
SERVER=("${@:-}")
[[ -n "${SERVER[0]}" ]] || SERVER=("$PYTHON" -m coati_rl.command_line tinker-serve)
MODEL=Qwen/Qwen3-4B-Instruct-2507 LIMIT="${LIMIT:-900}" K="${STEPS:-1}"
export PYTHONPATH="$HERE" HF_HOME="$OUT/hf" HF_HUB_OFFLINE=1 TINKER_TELEMETRY=0 TINKER_API_KEY=tml-recipes-0123456789
mkdir -p "$OUT/runs" "$OUT/logs"

if [[ ! -f "$OUT/client/done" ]]; then # packages of the project's environment, and beside them the client's
    "$PYTHON" -m venv --clear "$OUT/client"
    "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$OUT/client/lib/$(basename "$(ls -d "$OUT"/client/lib/python*)")/site-packages/project.pth"
    "$OUT/client/bin/pip" install -q --disable-pip-version-check tinker==0.38.0 sympy pylatexenc math-verify > "$OUT/logs/pip" 2>&1 || { tail -3 "$OUT/logs/pip"; exit 1; }
    # Without its dependencies: tml-renderers, for two models that are not served here, is not on every index.
    "$OUT/client/bin/pip" install -q --disable-pip-version-check --no-deps tinker-cookbook==0.6.1 blobfile chz pyrage termcolor tiktoken pycryptodomex lxml >> "$OUT/logs/pip" 2>&1 || { tail -3 "$OUT/logs/pip"; exit 1; }
    touch "$OUT/client/done"
fi
made() { # NAME SCRIPT ARGUMENTS...: once; what was interrupted is made again
    [[ -f "$OUT/logs/$1.done" ]] && return
    "$PYTHON" "$HERE/scripts/$2" "${@:3}" > "$OUT/logs/$1" 2>&1 || { tail -3 "$OUT/logs/$1"; exit 1; }
    touch "$OUT/logs/$1.done"
}
made tiny make_tiny_model.py "$OUT/tiny" --seed 0
made data tinker_recipe_data.py "$OUT" --model "$OUT/tiny"

"${SERVER[@]}" --model "$MODEL=$OUT/$MODEL" --root "$OUT/root" --port 0 > "$OUT/logs/server" 2>&1 &
server=$!
trap 'kill "$server" 2> /dev/null; wait "$server"' EXIT
for _ in $(seq 240); do
    TINKER_BASE_URL="$(grep -aoE 'http://[0-9.:]+' "$OUT/logs/server" | head -1)" && break
    kill -0 "$server" 2> /dev/null || { tail -3 "$OUT/logs/server"; exit 1; }
    sleep 0.5
done
[[ -n "$TINKER_BASE_URL" ]] || { tail -3 "$OUT/logs/server"; echo "the server named no address within 120 s"; exit 1; }
export TINKER_BASE_URL
cd "$OUT" || exit 1

failed=0
recipe() { # NAME METRIC MODULE ARGUMENTS...
    local name="$1" metric="$2" module="$3" begin code
    shift 3
    [[ -z "${RECIPES:-}" || " $RECIPES " == *" $name "* ]] || return
    rm -rf "runs/$name"
    begin=$(date +%s)
    timeout "$LIMIT" client/bin/python -m "tinker_cookbook.recipes.$module" log_path="runs/$name" "$@" > "logs/$name" 2>&1 < /dev/null
    code=$?
    (( code == 0 )) || failed=1
    client/bin/python - "$name" "$metric" "$code" "$(($(date +%s) - begin))" "runs/$name/metrics.jsonl" << 'END'
import json, pathlib, sys
name, metric, code, seconds, file = sys.argv[1:]
rows = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()] if pathlib.Path(file).exists() else []
found = [row[metric] for row in rows if row.get(metric) is not None]
some = max(1, len(found) // 5)  # of the first and of the last fifth of the steps, the mean
ends = f"{sum(found[:some]) / some:9.4f} {sum(found[-some:]) / some:9.4f}" if found else f"{'-':>9} {'-':>9}"
print(f"{name:<24} {'ok' if code == '0' else 'exit ' + code:<8} {seconds:>5} s {len(found):4d} steps {metric:<34} {ends}", flush=True)
END
    (( code == 0 )) || tail -2 "logs/$name" | cut -c1-300
}

S="model_name=$MODEL lora_rank=8"
A="$S group_size=4 groups_per_batch=8 max_tokens=8 eval_every=0 behavior_if_log_dir_exists=delete"
R=env/all/reward/total
NLL=train_mean_nll
recipe sl_loop $NLL sl_loop $S batch_size=16 learning_rate=1e-3 max_steps=$((20 * K))
recipe sl_basic $NLL sl_basic $S max_steps=$((4 * K)) learning_rate=1e-3
recipe chat_sl $NLL chat_sl.train $S dataset=no_robots batch_size=32 max_steps=$((5 * K)) learning_rate=1e-3 behavior_if_log_dir_exists=delete
recipe prompt_distillation $NLL prompt_distillation.train $S file_path=languages.jsonl batch_size=32 max_steps=$((5 * K)) learning_rate=1e-3 behavior_if_log_dir_exists=delete
recipe dpo dpo_loss preference.dpo.train model_name=$MODEL dataset=hhh batch_size=32 max_steps=$((5 * K)) learning_rate=1e-3 behavior_if_log_dir_exists=delete
L="$S batch_size=8 group_size=8 max_tokens=8 learning_rate=1e-3"
recipe rl_loop reward/total rl_loop $L max_steps=$((10 * K)) loss_fn=importance_sampling
recipe rl_loop_gspo reward/total rl_loop $L max_steps=$((3 * K)) loss_fn=gspo
recipe rl_loop_cispo reward/total rl_loop $L max_steps=$((3 * K)) loss_fn=cispo
recipe rl_basic $R rl_basic model_name=$MODEL max_tokens=8 max_steps=$K loss_fn=importance_sampling learning_rate=1e-3 lora_rank=8
recipe math_rl $R math_rl.train $A env=gsm8k max_steps=$((10 * K)) loss_fn=importance_sampling learning_rate=1e-3
recipe math_rl_cispo $R math_rl.train $A env=gsm8k max_steps=$((3 * K)) loss_fn=cispo learning_rate=1e-3
recipe math_rl_ppo $R math_rl.train $A env=gsm8k max_steps=$((3 * K)) loss_fn=ppo num_substeps=2 compute_post_kl=True learning_rate=1e-3
recipe math_rl_dro $R math_rl.train $A env=gsm8k max_steps=$((3 * K)) loss_fn=dro learning_rate=1e-3
recipe math_rl_async $R math_rl.train $A env=gsm8k max_steps=$((3 * K)) loss_fn=importance_sampling max_steps_off_policy=1 learning_rate=1e-3
recipe math_rl_streamed $R math_rl.train $A env=gsm8k max_steps=$((3 * K)) loss_fn=importance_sampling stream_minibatch_config.groups_per_batch=8 stream_minibatch_config.num_minibatches=2 learning_rate=1e-3
recipe guess_number $R multiplayer_rl.guess_number.train model_name=$MODEL renderer_name=qwen3_instruct group_size=4 batch_size=4 max_tokens=8 max_steps=$((2 * K)) eval_every=0 behavior_if_log_dir_exists=delete
recipe on_policy_distillation teacher_kl distillation.on_policy_distillation $S teacher_model=$MODEL dataset=deepmath group_size=2 groups_per_batch=4 max_tokens=12 max_steps=$((2 * K)) eval_every=0 behavior_if_log_dir_exists=delete
exit $failed
