"""Compare PPO's critic with GRPO, by turn and by episode, in an environment of several turns that pays in each.

    python scripts/bench/turn_rewards.py OUT_DIR [--methods ppo grpo_turns] [--seeds 0 1] [--group-size 8] [-- FLAGS]

The environment is `turn_rewards_env.py`. Out: OUT_DIR/model, a tiny model that supervised training has taught the walks
of a careless player; OUT_DIR/<method>-<learning rate>-<dice>-<group size>-<episodes>x<steps>-<seed>/, each an ordinary
run; a Markdown table on standard output, of means over seeds and their standard deviations. All methods begin with the
same model and have the same number of episodes per step, steps, prompts and limits; no KL. Runs follow one another. A
complete run is not repeated. FLAGS are added to every run.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from turn_rewards_env import (
    DOORS,
    Rooms,
    View,
    best_reward,
    best_reward_by_room,
    key_then_coins,
    keys,
    mean_reward,
    most_coins,
)

from producer.environments.episode import Action, EpisodeTask, Message

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(__file__).with_name("turn_rewards_env.py")
NUM_TURNS, BOOST = 5, 3
SFT_BATCH = 32  # walks of a step of supervised fine-tuning
WINDOW = 10  # last steps, whose mean reward is given
TIMEOUT_S = 1200.0  # of one run
MOST_COINS_SHARE, KEY_THEN_COINS_SHARE = 0.2, 0.2  # of the careless player's turns; the other doors are random
PPO = ("--algo", "PPO", "--critic-lr", "3e-3")
GRPO = ("--algo", "GRPO")
METHODS: dict[str, tuple[str, ...]] = {
    "ppo": PPO,
    "ppo_lambda_1": (*PPO, "--gae-lambda", "1"),
    "ppo_critic_lambda_1": (*PPO, "--critic-lambda", "1"),
    "ppo_warmup_10": (*PPO, "--critic-warmup", "10"),
    "ppo_no_group": (*PPO, "--num-generations", "1"),
    "grpo_turns": (*GRPO, "--turn-advantages", "1"),
    "grpo_turns_0": (*GRPO, "--turn-advantages", "0"),
    "grpo": GRPO,
}

Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder for model and runs")
    parser.add_argument("--methods", nargs="+", default=["ppo", "grpo_turns", "grpo"], choices=[*METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="one run each")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run")
    parser.add_argument("--episodes", type=int, default=32, help="of an optimizer step; a multiple of --group-size")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of a prompt; fewer: more prompts")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of the policy, of all methods")
    parser.add_argument("--dice", choices=["episode", "prompt"], default="episode", help="see turn_rewards_env.py")
    parser.add_argument("--sft-steps", type=int, default=200, help="optimizer steps of supervised fine-tuning")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    own, flags = sys.argv[1:], []
    if "--" in own:  # argparse handles "--" only without options before it
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = parser.parse_args(own)
    arguments.flags = flags
    return arguments


def play(rng: random.Random) -> Row:
    """Return a line of sft.jsonl: a walk of the careless player."""
    walk, seed = Rooms(num_turns=NUM_TURNS, boost=BOOST), rng.getrandbits(31)
    task = EpisodeTask(
        uid="", messages=(), prompt="", ground_truth="", columns={}, seed=seed, episode=0, purpose="train"
    )
    messages: list[Message] = walk.reset(task)
    for turn in range(NUM_TURNS):
        door = DOORS[_careless_door(walk.view, rng)]
        messages.append({"role": "assistant", "content": door})
        action = Action(text=door, token_ids=(), finish_reason="stop", turn=turn, messages=())
        observation, *_ = walk.step(action)
        messages += observation or []
    return {"messages": messages}


def _careless_door(view: View, rng: random.Random) -> int:
    draw = rng.random()
    if draw < MOST_COINS_SHARE:
        return most_coins(view)
    return key_then_coins(view) if draw < MOST_COINS_SHARE + KEY_THEN_COINS_SHARE else rng.randrange(len(DOORS))


def make_model(directory: Path, num_steps: int) -> None:
    """Create a tiny model, train it on walks of the careless player, and save it with the rows of the runs."""
    sys.path.append(str(ROOT / "scripts"))
    import make_agent_model
    import make_tiny_model

    rng = random.Random(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = make_agent_model.make_tokenizer([play(rng) for _ in range(2000)], vocab_size=512)
    sizes = argparse.Namespace(vocab_size=len(tokenizer), hidden_size=64, num_layers=2, tied=True)
    model = make_tiny_model.make_model(tokenizer, sizes)
    optimizers = make_tiny_model.make_optimizers(model)
    for step in make_tiny_model.told(range(num_steps)):
        model(**_batch([play(rng) for _ in range(SFT_BATCH)], tokenizer)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak_rate in optimizers:
            optimizer.param_groups[0]["lr"] = peak_rate * min((step + 1) / 10, 1 - step / num_steps)
            optimizer.step()
            optimizer.zero_grad()
    directory.mkdir(parents=True, exist_ok=True)
    prompt = {"messages": {"role": "user", "content": "Walk."}}  # the environment's text takes its place
    for name, count in (("train", 16384), ("eval", 256)):
        make_tiny_model.write_rows(directory / f"{name}.jsonl", [prompt] * count)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)


def _batch(walks: list[Row], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Return walks of equal length, int64[B, T] each; only doors and the ends of turns after them have labels."""
    rows = [tokenizer.apply_chat_template(walk["messages"], return_dict=False) for walk in walks]
    input_ids = torch.tensor(rows)
    is_answer = torch.isin(input_ids, torch.tensor(tokenizer.convert_tokens_to_ids([*DOORS])))
    is_answer[:, 1:] |= is_answer[:, :-1].clone()
    return {"input_ids": input_ids, "labels": torch.where(is_answer, input_ids, -100)}


def run(command: list[Any], directory: Path) -> None:
    """Run a command of the project from the repository's root. Raises: SystemExit if it fails."""
    print(f"{directory}", file=sys.stderr, flush=True)
    with directory.with_name(f"{directory.name}.log").open("w") as log:
        words = [sys.executable, *map(str, command), "--run-dir", str(directory)]
        done = subprocess.run(words, cwd=ROOT, stdout=log, stderr=log, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{directory}: exit code {done.returncode}; see {log.name}")


def train(method: str, seed: int, model: Path, arguments: argparse.Namespace) -> list[Row]:
    """Return the metrics of one run, which is started if it does not exist."""
    rate = arguments.learning_rate
    task = f"{arguments.dice}-{arguments.group_size}"
    directory = arguments.out_dir / f"{method}-{rate:g}-{task}-{arguments.episodes}x{arguments.steps}-{seed}"
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        flags = METHODS[method]
        group = 1 if "--num-generations" in flags else arguments.group_size
        prompts = arguments.episodes // group
        data = ("-m", model, "-d", model / "train.jsonl", "-ed", f"walks={model / 'eval.jsonl'}")
        environment = ("--env", f"{ENVIRONMENT}:Rooms", "--env-arg", f"dice={arguments.dice}")
        lengths = ("--max-turns", NUM_TURNS, "-mpt", 64, "-mnt", 4, "--max-episode-tokens", 256)
        sizes = [word for flag in ("-ibs", "-imbs", "-tbs", "-tMbs") for word in (flag, prompts)]
        workers = ("-b", "transformers", "-t", 1, "-i", 1)
        packing = ("-tmbs", arguments.episodes, "--max-tokens-per-microbatch", 2048)
        steps = ("--max-steps", arguments.steps, "-ei", arguments.steps, "-si", -1, "-e", 100)
        command = ["rl_example.py", *data, *environment, *lengths, *sizes, *workers, *packing, *steps, "-kl", 0]
        run([*command, "-g", arguments.group_size, "-lr", rate, "--seed", seed, *flags, *arguments.flags], directory)
    rows = _read(metrics)
    if len(rows) != arguments.steps:
        raise SystemExit(f"{directory}: holds {len(rows)} of {arguments.steps} steps; remove it to run it again")
    held_out = {row["step"]: row["reward_mean"] for row in _read(directory / "eval" / "summary.jsonl")}
    return [{**row, "held_out": held_out.get(row["step"])} for row in rows]


def _read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def summarise(method: str, runs: list[list[Row]], arguments: argparse.Namespace) -> Row:
    """Return a method's figures, each with one number for a seed."""
    explained = [[row["explained_variance"] for row in rows if row.get("explained_variance")] for rows in runs]
    return {
        "method": method,
        "learning_rate": arguments.learning_rate,
        "first": [fmean(row["reward_mean"] for row in rows[:WINDOW]) for rows in runs],
        "all": [fmean(row["reward_mean"] for row in rows) for rows in runs],
        "last": [fmean(row["reward_mean"] for row in rows[-WINDOW:]) for rows in runs],
        "final": [rows[-1]["reward_mean"] for rows in runs],
        "held_out": [rows[-1]["held_out"] for rows in runs],
        "explained": [fmean(found[-WINDOW:]) for found in explained if found],
        "minutes": [rows[-1]["time_s"] / 60 for rows in runs],
    }


def table(summaries: list[Row]) -> str:
    """Format the summaries as a Markdown table: means over seeds and their standard deviation."""
    columns = {
        "first": f"reward, first {WINDOW}",
        "all": "all steps",
        "last": f"last {WINDOW}",
        "final": "last step",
        "held_out": "held out, greedy",
        "explained": "explained variance",
        "minutes": "minutes",
    }
    lines = [["method", "-lr", *columns.values()], ["---"] * (len(columns) + 2)]
    for row in summaries:
        lines.append([row["method"], f"{row['learning_rate']:g}", *(_cell(row[name]) for name in columns)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def main() -> None:
    """Make the model, train, print."""
    arguments = parse_arguments()
    arguments.out_dir = arguments.out_dir.absolute()
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    model = arguments.out_dir / "model"
    if not (model / "model.safetensors").exists():
        make_model(model, arguments.sft_steps)
    runs = {method: [train(method, seed, model, arguments) for seed in arguments.seeds] for method in arguments.methods}
    summaries = [summarise(method, of_method, arguments) for method, of_method in runs.items()]
    of_random, of_most, of_keys = (
        mean_reward(num_turns=NUM_TURNS, boost=BOOST, player=player) for player in (None, most_coins, keys)
    )
    print(
        f"expected rewards: {of_random:.3f} of random doors, {of_most:.3f} of the most coins, {of_keys:.3f} of the "
        f"keys; at best {best_reward_by_room(num_turns=NUM_TURNS, boost=BOOST):.3f} by the room alone and "
        f"{best_reward(num_turns=NUM_TURNS, boost=BOOST):.3f} by all that is shown\n"
    )
    print(table(summaries))
    if arguments.json:
        arguments.json.write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
