"""Measure how many episodes per second a producer plays when each turn waits for a tool.

    python scripts/bench/agents.py [--engine vllm|transformers|fake] [--episodes 64] [--turns 3] [--sleep-s 1.0]
        [--ways thread async process] [--json FILE]

In: an untrained tiny model; episodes of some turns, all in flight at a time; a tool that sleeps, as a sync method in a
thread, as an async one, or in a process for each episode. Out, for each way: episodes per second, and the ideal: the
same episodes without the sleep, whose time per round plus the sleep of all turns would be that of a round if no episode
held up another. With vLLM also the tokens that a later turn's prefill computed beyond those that are new to it, by the
engine's own count of cached tokens; the cache finds whole blocks, so that these should be less than a block.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from length_model import make_model, make_tokenizer
from sleeping_tool import Sleep, SleepAsync

from coati_rl.observability.timeline import NO_TIMELINE
from coati_rl.types import DEFAULT_TASK, GenerationRequest, Lease, Prompt, SamplingParams
from producer.engines import EngineOptions, create_engine, engine_environment
from producer.environments.chat import ChatTemplate
from producer.environments.episode import EpisodeLimits
from producer.environments.episode_environment import EpisodeEnvironment
from producer.environments.process_host import ProcessHost
from producer.group_runner import GroupRunner, RolledOut

MAX_MODEL_LEN, MAX_NEW_TOKENS, BLOCK_SIZE = 1024, 32, 32
GROUP_SIZE = 8
TIMEOUT_S = 300.0
WAYS = ("thread", "async", "process")
PROMPT = ({"role": "user", "content": "Call the tool."},)


class CountedEngine:
    """Pass requests on to an engine, and count what vLLM finds in its cache."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._requests: dict[str, GenerationRequest] = {}
        self._contexts: dict[str, int] = {}  # by episode: tokens of its last turn that were computed
        self.excess: list[int] = []  # of later turns: tokens computed in the prefill that were computed before
        core = engine._core
        if type(core).__name__ == "_VllmCore":
            step = core._engine.step
            core._engine.step = lambda: self._count(step())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest, on_tokens: Any = None) -> Any:
        """Note a request."""
        self._requests[request.request_id] = request
        return self._engine.submit(request, on_tokens)

    def _count(self, outputs: list[Any]) -> list[Any]:
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None or not output.finished:
                continue
            episode, num_tokens = str(request.episode_id), len(request.token_ids)
            if episode in self._contexts:
                self.excess.append(self._contexts[episode] - (output.num_cached_tokens or 0))
            self._contexts[episode] = num_tokens + len(output.outputs[0].token_ids) - 1  # not the last one sampled
        return outputs


def make_environment(way: str, template: ChatTemplate, *, turns: int, sleep_s: float) -> EpisodeEnvironment:
    """Return the environment of one way to run the tool."""
    kind = SleepAsync if way == "async" else Sleep
    arguments: dict[str, Any] = {"turns": turns, "sleep_s": sleep_s}
    own_file = f"{Path(__file__).resolve().parent}/sleeping_tool.py:Sleep"
    limits = EpisodeLimits(max_turns=turns, max_tokens=MAX_MODEL_LEN, timeout_s=TIMEOUT_S)
    return EpisodeEnvironment(
        lambda: kind(**arguments),
        template,
        limits,
        correct_from={DEFAULT_TASK: 1.0},
        host=ProcessHost(own_file, arguments, timeout_s=TIMEOUT_S) if way == "process" else None,
    )


def play(engine: Any, environment: EpisodeEnvironment, template: ChatTemplate, *, episodes: int, first: int) -> float:
    """Play a round of episodes, all at a time. Returns: the seconds that it took."""
    runner = GroupRunner(engine, environment, max_sequences=episodes, group_size=GROUP_SIZE, timeline=NO_TIMELINE)
    prompt = Prompt(uid="p", token_ids=template.prompt(PROMPT), ground_truth="", messages=PROMPT)
    sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
    leases = [
        Lease(lease_id=first + number, prompt=prompt, group_size=GROUP_SIZE, sampling=sampling)
        for number in range(episodes // GROUP_SIZE)
    ]
    done: list[RolledOut] = []
    begin = time.perf_counter()
    try:
        runner.submit(leases, min_policy_version=0)
        while len(done) < len(leases):
            done += runner.take_finished(1.0)
        took_s = time.perf_counter() - begin
    finally:
        runner.close()
    failed = [each.error for each in done if each.error] + [
        score.detail for each in done for score in each.scores.values() if score.verdict == "invalid"
    ]
    if failed:
        raise SystemExit(f"{len(failed)} failed: {failed[0]}")
    return took_s


def measure(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Return the figures of each way."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    make_model(tokenizer, end_probability=1 / 24, seed=0).save_pretrained(directory)
    template = ChatTemplate(tokenizer)
    engine = CountedEngine(
        create_engine(
            options.engine,
            EngineOptions(
                model=directory,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=options.episodes,
                block_size=BLOCK_SIZE,
            ),
        )
    )
    figures: dict[str, Any] = {}
    number = 0
    try:
        for way in options.ways:
            rounds: dict[float, list[float]] = {0.0: [], options.sleep_s: []}
            for sleep_s in [0.0, *[0.0, options.sleep_s] * options.rounds]:  # the first one warms up
                environment = make_environment(way, template, turns=options.turns, sleep_s=sleep_s)
                try:
                    took_s = play(engine, environment, template, episodes=options.episodes, first=number)
                finally:
                    environment.close()
                rounds[sleep_s].append(took_s)
                number += options.episodes
            without_s = sorted(rounds[0.0][1:])[options.rounds // 2]
            with_s = sorted(rounds[options.sleep_s])[options.rounds // 2]
            ideal = options.episodes / (without_s + options.turns * options.sleep_s)
            figures[way] = {
                "episodes_per_s": options.episodes / with_s,
                "ideal_per_s": ideal,
                "share_of_ideal": options.episodes / with_s / ideal,
                "without_sleep_s": without_s,
                "with_sleep_s": with_s,
            }
    finally:
        engine.close()
    if engine.excess:
        figures["prefill"] = {"turns": len(engine.excess), "max_excess": max(engine.excess), "block_size": BLOCK_SIZE}
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print a row for each way."""
    print(f"{'tool':<10}{'episodes/s':>12}{'ideal':>10}{'share':>8}{'round, s':>10}{'without sleep, s':>18}")
    for way, found in figures.items():
        if way != "prefill":
            print(
                f"{way:<10}{found['episodes_per_s']:>12.2f}{found['ideal_per_s']:>10.2f}{found['share_of_ideal']:>8.2f}"
                f"{found['with_sleep_s']:>10.2f}{found['without_sleep_s']:>18.2f}"
            )
    if prefill := figures.get("prefill"):
        print(
            f"{prefill['turns']} later turns computed at most {prefill['max_excess']} tokens of earlier ones again "
            f"(blocks of {prefill['block_size']})"
        )


def main() -> None:
    """Measure, print the results and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=("vllm", "transformers", "fake"), default="vllm")
    parser.add_argument("--episodes", type=int, default=64, help=f"at a time; a multiple of {GROUP_SIZE}")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sleep-s", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3, help="with and without the sleep, of which the median counts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    os.environ.update(engine_environment("cpu", 1))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(options, directory)
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
