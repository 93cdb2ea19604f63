"""List the rehearsals of `rehearsal_matrix.py`: commands that fail, with what the message must name, and good ones.

In the flags {f} is the directory of `rehearsal_files.py`, {m} the tiny model.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """One command."""

    name: str
    flags: str
    named: tuple[str, ...] = ()  # what the message names; none: a good command
    job: str = "rl"
    options: str = ""  # of the rehearsal


_SMALL = "-b transformers -t 1 -i 1 -ibs 8 -imbs 8 -tbs 8 -tMbs 8 -tmbs 8 -g 4 -mnt 64 -mpt 256 -kl 0 --device cpu"
_RL = f"-m {{m}} -d {{f}}/train.jsonl -rt boxed {_SMALL}"
_MODEL = f"-d {{f}}/train.jsonl -rt boxed {_SMALL}"
_DATA = f"-m {{m}} -rt boxed {_SMALL}"
_REWARD = f"-m {{m}} -d {{f}}/train.jsonl {_SMALL}"
_LARGE = "-m {f}/large -d {f}/train.jsonl -rt boxed -mnt 1024 -mpt 256"
_TURNS = "--max-turns 2 --max-episode-tokens 512"
_JOB = "-m {m} -tbs 8 --device cpu"


def _no(name: str, flags: str, *named: str, job: str = "rl", options: str = "") -> Case:
    return Case(name, flags, named, job, options)


FAILING = (
    # sizes
    _no("tp does not divide the heads of a 7B model", f"{_LARGE} -t 3 -tp 3", "-tp 3", "num_attention_heads 28"),
    _no("-ptp does not divide its heads", f"{_LARGE} -ptp 3 -t 1", "-ptp 3", "28"),
    _no("more pipeline stages than layers", f"{_RL} -t 4 -pp 4", "-pp 4", "num_hidden_layers 2"),
    _no("rollout step is not a multiple of the optimizer step", f"{_RL} -tbs 6 -tMbs 6", "(P * ibs) % (tbs * dp)"),
    _no("mini-batch does not divide the batch", f"{_RL} -tMbs 3", "tbs % tMbs"),
    _no("prompt and response exceed the positions", f"{_RL} -mnt 8000", "4096 positions", "-mnt"),
    _no("7B on one GPU of 16 GiB for the trainer", f"{_LARGE} -t 1 -i 1", "GPU", "GiB", options="--gpu-memory 16"),
    _no(
        "24 GPUs wanted, two nodes of 8",
        f"{_LARGE} -t 16 -i 8",
        "no resources for",
        options="--nodes 2 --gpu-memory 80",
    ),
    # outputs
    _no("checkpoints of the whole run exceed the disk", f"{_RL} -e 4000 -si 1", "--save-interval 1", "free"),
    _no("run directory below a file", f"{_RL} --run-dir {{f}}/train.jsonl/run", "--run-dir", "cannot be written"),
    # model files
    _no("safetensors file cut off", f"-m {{f}}/torn-model {_MODEL}", "model.safetensors"),
    _no("safetensors file lacks a tensor", f"-m {{f}}/lacks-tensor {_MODEL}", "model.layers.1.mlp.down_proj.weight"),
    _no("index names a shard that is missing", f"-m {{f}}/lacks-shard {_MODEL}", "model-00002-of-00002.safetensors"),
    _no("unknown model_type", f"-m {{f}}/unknown {_MODEL}", "qwen9"),
    _no("quantised model is to be trained", f"-m {{f}}/gptq {_MODEL}", "gptq"),
    _no("fewer embeddings than tokens", f"-m {{f}}/small-vocabulary {_MODEL}", "vocab"),
    _no("adapter in place of a model", f"-m {{f}}/adapter {_MODEL}", "adapter"),
    _no("generation config is cut off", f"-m {{f}}/generation {_MODEL}", "generation_config.json"),
    _no("teacher has other tokens", f"{_RL} --teacher {{f}}/other-tokens", "--teacher"),
    # template and rows
    _no("no chat template", f"-m {{f}}/no-template {_MODEL}", "no chat template"),
    _no(
        "template refuses the system message",
        f"{_RL} --chat-template {{f}}/refuses.jinja --system-prompt Add.",
        "no system role",
    ),
    _no("template is no Jinja", f"{_RL} --chat-template {{f}}/broken.jinja", "--chat-template"),
    _no("answers are in another column", f"{_DATA} -d {{f}}/label_key.jsonl", "has no gt_answer", "--answer-key"),
    _no("prompts are in another column", f"{_DATA} -d {{f}}/no_prompt.jsonl", "instruction_text"),
    _no("all prompts are too long", f"{_DATA} -d {{f}}/long.jsonl", "--max-prompt-tokens 256"),
    _no("half an emoji in row 301", f"{_DATA} -d {{f}}/surrogate.jsonl", "surrogate.jsonl, line 301"),
    _no("line 501 is cut off", f"{_DATA} -d {{f}}/torn.jsonl", "torn.jsonl, line 501"),
    _no("rows end with the solution", f"{_DATA} -d {{f}}/assistant.jsonl", "assistant"),
    _no("evaluation set is missing", f"{_RL} -ei 1 -ed a={{f}}/nowhere.jsonl", "nowhere.jsonl"),
    _no("evaluation set has other columns", f"{_RL} -ei 1 -ed a={{f}}/label_key.jsonl", "--eval-dataset", "gt_answer"),
    _no("tests of a code row are no list", f"-m {{m}} -d {{f}}/tests.jsonl -rt code {_SMALL}", "test_cases"),
    # rewards
    _no(
        "reward raises on row 901",
        f"-m {{m}} -d {{f}}/row_900.jsonl -rt {{f}}/rewards.py:raises_on_some {_SMALL}",
        "train-900",
        "ZeroDivisionError",
    ),
    _no("reward hangs on some rows", f"{_REWARD} -rt {{f}}/rewards.py:hangs_on_some", "no score within"),
    _no("reward returns text", f"{_REWARD} -rt {{f}}/rewards.py:returns_text", "returns_text"),
    _no("reward is no number", f"{_REWARD} -rt {{f}}/rewards.py:returns_nan", "nan"),
    _no("reward ends its process", f"{_REWARD} -rt {{f}}/rewards.py:exits", "rewards.py:exits"),
    _no("reward takes a column that rows lack", f"{_REWARD} -rt {{f}}/rewards.py:needs_column", "difficulty"),
    _no("served reward does not answer", f"{_REWARD} -rt http://127.0.0.1:9/score", "127.0.0.1:9"),
    # environments, own functions, jobs
    _no(
        "environment raises in reset", f"{_REWARD} --env {{f}}/games.py:Resets {_TURNS}", "no game server at port 4711"
    ),
    _no("environment raises in step", f"{_REWARD} --env {{f}}/games.py:Steps {_TURNS}", "ValueError"),
    _no("step returns one value", f"{_REWARD} --env {{f}}/games.py:Shape {_TURNS}", "step"),
    _no(
        "agent lacks a module",
        f"{_REWARD} --agent-command 'python {{f}}/agent.py' --max-episode-tokens 512",
        "a_module_that_is_missing",
    ),
    _no(
        "MCP server does not start",
        f"{_RL} --mcp-server no-such-server --chat-template {{f}}/tools.jinja {_TURNS}",
        "no-such-server",
    ),
    _no(
        "own advantages have another shape",
        f"{_RL} --advantage-estimator {{f}}/losses.py:one_advantage",
        "one_advantage",
    ),
    _no("conversations without an answer", f"{_JOB} -d {{f}}/sft_no_answer.jsonl", "assistant", job="sft"),
    _no(
        "chosen equals rejected in all pairs", f"{_JOB} -d {{f}}/equal_pairs.jsonl", "chosen equals rejected", job="dpo"
    ),
)

GOOD = (
    Case(
        "quickstart: vLLM, two of each",
        "-m {m} -d {m}/train.jsonl -ed a={m}/eval.jsonl -ei 10 -rt boxed -b vllm -kl 0 -lr 3e-4 -t 2 -i 2 -g 8 -ibs 32 "
        "-imbs 32 -tbs 32 -tMbs 32 -tmbs 16 -mnt 32 -mpt 512 --max-steps 40",
    ),
    Case("SFT", f"{_JOB} -d {{f}}/sft.jsonl -ed held={{f}}/sft.jsonl", job="sft"),
    Case("continued pretraining", f"{_JOB} -d {{f}}/solutions.jsonl", job="sft"),
    Case("DPO", f"{_JOB} -d {{f}}/pairs.jsonl", job="dpo"),
    Case("IPO, reference first", f"{_JOB} -d {{f}}/pairs.jsonl --loss ipo --precompute-reference", job="dpo"),
    Case("KTO", f"{_JOB} -d {{f}}/kto.jsonl", job="kto"),
    Case("reward model", f"{_JOB} -d {{f}}/pairs.jsonl", job="rm"),
    Case("process reward model", f"{_JOB} -d {{f}}/prm.jsonl --placeholder-token '#'", job="prm"),
    Case("SFT, LoRA, merged at the end", f"{_JOB} -d {{f}}/sft.jsonl --lora-rank 8 --export merged", job="sft"),
    Case("SFT, FSDP2 on two", f"{_JOB} -d {{f}}/sft.jsonl -t 2 --plugin fsdp2", job="sft"),
    Case("SFT, tp 2", f"{_JOB} -d {{f}}/sft.jsonl -t 2 -tp 2", job="sft"),
    Case(
        "SFT of 7B, pp 2, GPUs of 80 GiB",
        "-m {f}/large -d {f}/sft.jsonl -t 2 -pp 2 -tbs 8 --gradient-checkpointing",
        job="sft",
        options="--gpu-memory 80",
    ),
    Case("GRPO, boxed", _RL),
    Case(
        "GRPO of 7B, two nodes of 8 GPUs of 80 GiB",
        f"{_LARGE} -t 8 -tp 2 -i 2 -ibs 32 -tbs 16 -b transformers",
        options="--gpu-memory 80 --nodes 2",
    ),
    Case("DAPO", f"{_RL} --algo DAPO"),
    Case("PPO with a critic", f"{_RL} --algo PPO"),
    Case("RLOO", f"{_RL} --algo RLOO"),
    Case("REMAX", f"{_RL} --algo REMAX"),
    Case("GSPO", f"{_RL} --algo GSPO"),
    Case("KL to a reference", f"{_RL} --algo GRPO -kl 0.01"),
    Case("own reward with boxed", f"{_REWARD} -rt boxed=1,{{f}}/rewards.py:right=0.2"),
    Case("own reward with a column", f"-m {{m}} -d {{f}}/other.jsonl -rt {{f}}/rewards.py:needs_column {_SMALL}"),
    Case("code in the sandbox", f"-m {{m}} -d {{f}}/code.jsonl -rt code {_SMALL}"),
    Case("environment of two turns", f"{_REWARD} --env {{f}}/games.py:Base {_TURNS}"),
    Case(
        "tools",
        f"{_RL} --tools calculator --chat-template {{f}}/tools.jinja {_TURNS} -mpt 1024 --max-episode-tokens 1536",
    ),
    Case("adapters", f"{_RL} --lora-rank 8"),
    Case("two steps a sync, one behind", f"{_RL} -ibs 16 -imbs 8 -nb 1"),
    Case("mixture of two files", f"{_DATA} -d {{f}}/train.jsonl=0.7,{{f}}/other.jsonl=0.3"),
    Case("Unicode rows, streamed", f"{_DATA} -d {{f}}/unicode.jsonl --streaming"),
    Case("the same row again and again", f"{_DATA} -d {{f}}/twice.jsonl"),
)
