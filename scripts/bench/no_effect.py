"""Measure optimizer steps in which some groups have equal rewards: all samples computed, and those with a gradient.

    OMP_NUM_THREADS=1 python scripts/bench/no_effect.py [--model DIR] [--rounds 5] [--json FILE]

In: random prompts and responses, whose log-probabilities are near the model's. All groups, half of them or none have
different rewards; the loss is GRPO's without KL. Out: medians of whole steps, from scored groups to updated weights,
one process and one thread. The cases and both ways take turns within each round. Before that an untimed round compares
loss and gradient of the two ways, and nothing is printed if they differ. The learning rate is 0: all steps are alike.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_model import save_random_model
from torch import Tensor
from trainer_process import run_as_trainer
from transformers import AutoModelForCausalLM

from coati_rl.algorithms.advantage import group_norm
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.coordinator.logprob_mismatch import MIN_SAMPLED_TOKENS
from coati_rl.data.batcher import BatchSettings, StepBatcher
from coati_rl.data.group_rules import GroupRules
from coati_rl.data.packing import build_mini_batch
from coati_rl.data.sample_selection import SelectionSettings
from coati_rl.model_files.quiet import no_progress_bars
from coati_rl.types import Completion, Prompt, RolloutGroup, Score
from consumer.backend import Backend
from consumer.backend_config import BackendConfig, trained
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.optim.learning_rate import LearningRate
from consumer.parallel.single_process import SingleProcess
from consumer.train_step import TrainStep
from producer.environments.single_turn import single_turns

NOISE = 0.05  # nats, deviation of the engine's log-probabilities from the model's
TOLERANCES = {"fp32": 1e-5, "bf16": 0.05}  # of the gradient, relative to its norm, and of the loss
CASES = {"all groups varied": 1.0, "half of them": 0.5, "none": 0.0}  # share of groups with different rewards
ALL, CHOSEN = "all samples", "with a gradient"
WAYS = {ALL: None, CHOSEN: SelectionSettings(min_tokens=MIN_SAMPLED_TOKENS, seed=0)}
FLAGS = {
    "prompts": (8, "prompts of a step"),
    "samples": (8, "samples of a prompt"),
    "prompt_tokens": (200, "tokens of a prompt"),
    "response_tokens": (32, "tokens of a response"),
    "micro_batch": (8, "samples of a micro-batch"),
    "rounds": (5, "timed rounds"),
    "hidden": (256, "hidden size of the random model, where --model is not given"),
    "layers": (4, "its decoder layers"),
    "vocab": (8192, "its vocabulary"),
}


class MeasuredBackend(Backend):
    """Keep the gradient of the last step, unscaled."""

    gradient: Tensor | None = None
    keeps_gradient = False

    def optimizer_step(self, **numbers: Any) -> float:
        """See `Backend`."""
        if self.keeps_gradient:
            self.reduce_gradients()
            self.gradient = torch.cat([g.flatten() for g in self.policy.gradients.values()]).clone()
        return super().optimizer_step(**numbers)


def make_completions(directory: Path, arguments: argparse.Namespace) -> list[tuple[Prompt, list[Completion]]]:
    """Draw prompts and responses, and score them with the model in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    rng, first = np.random.default_rng(0), arguments.prompt_tokens
    drawn = []
    for number in range(arguments.prompts):
        prompt = rng.integers(0, model.config.vocab_size, first)
        responses = rng.integers(0, model.config.vocab_size, (arguments.samples, arguments.response_tokens))
        token_ids = torch.from_numpy(np.concatenate([np.tile(prompt, (arguments.samples, 1)), responses], axis=1))
        with torch.no_grad():
            logits = model(input_ids=token_ids, logits_to_keep=arguments.response_tokens + 1).logits[:, :-1]
        own = logits.log_softmax(-1).gather(-1, token_ids[:, first:, None])[..., 0].numpy()
        completions = [
            Completion(
                token_ids=response.astype(np.int32),
                logprobs=(logprobs + rng.normal(0, NOISE, len(logprobs))).astype(np.float32),
                policy_versions=np.zeros(len(response), dtype=np.int32),
                finish_reason="stop",
                text="",
            )
            for response, logprobs in zip(responses, own, strict=True)
        ]
        drawn.append((Prompt(uid=f"p{number}", token_ids=tuple(prompt.tolist()), ground_truth=""), completions))
    return drawn


def make_groups(drawn: list[tuple[Prompt, list[Completion]]], share: float) -> list[RolloutGroup]:
    """Score the responses so that this share of the groups has different rewards; the others are all right or wrong."""
    groups = []
    for number, (prompt, completions) in enumerate(drawn):
        is_varied = number < share * len(drawn)
        rewards = [float((each if is_varied else number) % 2) for each in range(len(completions))]
        groups.append(
            RolloutGroup(
                lease_id=number,
                producer_id=0,
                prompt=prompt,
                temperature=1.0,
                trajectories=single_turns(prompt, completions, temperature=1.0),
                scores=tuple(Score(reward=r, answer_correct=r > 0, format_valid=True, verdict="ok") for r in rewards),
            )
        )
    return groups


class Steps:
    """Take steps with one backend."""

    def __init__(self, directory: Path, arguments: argparse.Namespace) -> None:
        config = BackendConfig(models={"policy": trained(directory)}, precision=arguments.precision)
        self.backend = MeasuredBackend(config, SingleProcess(device=torch.device("cpu")))
        objective = PolicyGradient(loss=PolicyLoss())
        self._train_step = TrainStep(self.backend, objective, learning_rate=LearningRate(peak=0.0))
        self._arguments = arguments
        drawn = make_completions(directory, arguments)
        self._groups = {case: make_groups(drawn, share) for case, share in CASES.items()}

    def take(self, case: str, way: str) -> dict[str, float]:
        """Take one step. Returns: wall_s, cpu_s, the number of samples computed, the loss."""
        arguments, groups = self._arguments, self._groups[case]
        begin, cpu = time.perf_counter(), time.process_time()
        settings = BatchSettings(
            dp=1,
            train_batch_size=len(groups),
            train_minibatch_size=len(groups),
            train_microbatch_size=arguments.micro_batch,
            loss_variation="sample_level",
            advantage_estimator="group_norm",
            rules=GroupRules(max_new_tokens=arguments.response_tokens),
            selection=WAYS[way],
        )
        batcher = StepBatcher(settings, step=0, learning_rate_progress=0.0, estimator=group_norm)
        metrics = self._train_step.run(build_mini_batch(batcher.add(groups)[0])) or {}
        seconds = {"wall_s": time.perf_counter() - begin, "cpu_s": time.process_time() - cpu}
        return {**seconds, "computed": batcher.close().num_computed, "loss": metrics["loss"]}

    def difference(self, case: str) -> float:
        """Return the distance of the two ways' gradients, relative to the norm; 0 if both are 0."""
        self.backend.keeps_gradient = True
        gradients, losses = [], []
        for way in WAYS:
            losses.append(self.take(case, way)["loss"])
            if self.backend.gradient is None:
                raise SystemExit("the step had no gradient")
            gradients.append(self.backend.gradient)
        self.backend.keeps_gradient, self.backend.gradient = False, None
        norm, apart = float(gradients[0].norm()), float((gradients[0] - gradients[1]).norm())
        relative = apart / norm if norm else apart
        if max(relative, abs(losses[0] - losses[1])) > TOLERANCES[self._arguments.precision]:
            raise SystemExit(f"{case}: gradients differ by {relative:.1e} of the norm, losses are {losses}")
        return relative


def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare gradients, then time both ways of all cases in turns."""
    steps = Steps(directory, arguments)
    differences = {case: steps.difference(case) for case in CASES}
    pairs = [(case, way) for case in CASES for way in WAYS]
    series: dict[str, dict[str, list[dict[str, float]]]] = {case: {way: [] for way in WAYS} for case in CASES}
    for number in range(arguments.rounds):
        for case, way in pairs if number % 2 else reversed(pairs):
            series[case][way].append(steps.take(case, way))
    return {"gradient_differences": differences, "series": series}


def summary(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the medians of each case, and of the rounds' ratios."""
    table = {}
    for case, ways in report["series"].items():
        row = {
            f"{way}, {key}": statistics.median(each[key] for each in steps)
            for way, steps in ways.items()
            for key in ("wall_s", "cpu_s", "computed")
        }
        for key in ("wall_s", "cpu_s"):
            row[f"ratio, {key}"] = statistics.median(
                one[key] / other[key] for one, other in zip(ways[ALL], ways[CHOSEN], strict=True)
            )
        table[case] = row
    return table


def main() -> None:
    """Measure, print the table and write the figures."""
    run_as_trainer()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model in Hugging Face format; default: a random Qwen3")
    parser.add_argument("--precision", choices=list(TOLERANCES), default="fp32", help="of the trainer [fp32]")
    for name, (default, text) in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} [{default}]")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, no_progress_bars():
        directory = arguments.model or Path(name)
        if arguments.model is None:
            sizes = {"vocab": arguments.vocab, "hidden": arguments.hidden, "layers": arguments.layers}
            longest = arguments.prompt_tokens + arguments.response_tokens
            save_random_model(directory, **sizes, max_positions=2 * longest)
        report = measure(directory, arguments)
    table, worst = summary(report), max(report["gradient_differences"].values())
    print(f"gradients agree, at worst within {worst:.1e} of the norm")
    print(f"{'groups with different rewards':32}{'computed':>10}{ALL:>14}{CHOSEN:>17}{'ratio':>8}{'by CPU':>8}")
    for case, row in table.items():
        seconds = f"{row[f'{ALL}, wall_s']:12.3f} s{row[f'{CHOSEN}, wall_s']:15.3f} s"
        ratios = f"{row['ratio, wall_s']:8.2f}{row['ratio, cpu_s']:8.2f}"
        print(f"{case:32}{row[f'{CHOSEN}, computed']:10.0f}{seconds}{ratios}")
    if arguments.json:
        settings = {name: str(value) for name, value in vars(arguments).items() if name != "json"}
        machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
        figures = {"settings": settings, **machine, "medians": table, **report}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
