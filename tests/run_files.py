"""Write the directory of a run, as the files that its readers find."""

import json

import yaml

from coati_rl.config.commands import TRAINING

STEP = {
    "step": 1, "policy_version": 1, "time_s": 1.0, "loss": 0.0, "grad_norm": 1.0, "learning_rate": 1e-6, "step_s": 2.0,
    "train_s": 1.0, "rollout_wait_s": 0.5, "sync_s": 0.25, "reward_mean": 0.5, "answer_accuracy": 0.5,
    "groups_total": 2, "num_response_tokens": 8, "samples_invalid": 0,
}  # fmt: skip
LINE = {
    "step": 1, "uid": "train-1.0", "sample": 0, "episode": 0, "producer": 0, "prompt": "1 + 1?", "gt_answer": "2",
    "response": "ab", "num_tokens": 2, "finish_reason": "stop", "temperature": 1.0, "policy_versions": [0, 0],
    "reward": 1.0, "answer_correct": True, "format_valid": True, "verdict": "ok", "detail": "", "is_trained": True,
    "advantage": 0.5,
}  # fmt: skip
TOKENS = {"prompt_token_ids": [9], "token_ids": [0, 1], "token_versions": [[0, 2]], "turns": [[0, 2, "stop"]],
          "rollout_logprobs": [-0.5, -2.0]}  # fmt: skip


def write_run_in(directory, name="run", *, steps=({},), rollouts=(), evaluations=(), config=None, job="rl"):
    """Write a run into a directory: its steps and rollouts are given by what differs from STEP and LINE."""
    run = directory / name
    (run / "rollouts").mkdir(parents=True)
    (run / "eval").mkdir()
    settings = {key: field.default for key, field in TRAINING[job].fields().items()} | (config or {})
    (run / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(settings, default=list))))
    steps = [STEP | {"step": number, "time_s": 2.0 * number} | step for number, step in enumerate(steps, 1)]
    lines = {"metrics.jsonl": steps, "eval/summary.jsonl": evaluations}
    for line in rollouts:
        first = (line.get("step", 1) - 1) // 100 * 100 + 1
        lines.setdefault(f"rollouts/steps-{first:06d}-{first + 99:06d}.jsonl", []).append(LINE | line)
    for path, records in lines.items():
        (run / path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return run
