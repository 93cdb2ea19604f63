r"""What comparing math answers costs: pairs per second against math-verify alone, and how poison holds up the others.

    python scripts/bench/math_rewards.py [--pairs 2000] [--rounds 5] [--workers 2] [--limit-s 1] [--json FILE]

Speed: a corpus of pairs (math_corpus.py), each unseen: `check_answer`, its caches cleared before each round, against
math-verify's `parse` and `verify` of `\boxed{...}` without limits, interleaved, median of rounds, in CPU seconds, so
that other load counts less. All verdicts must be those of `compare_by_math_verify`, which takes no short
cut, or nothing is printed. Where math-verify alone says something else (notations that it misreads) is counted.
Poison: texts that are recognised, the longest time of any. Then 5 % that are not (integrals without an end) among the
pairs, through a RewardPool with 64 responses in flight: latency of the others, and wall time against its bound.
"""

import argparse
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median, quantiles

import math_verify
from math_corpus import Pair, make_pairs

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem, Score
from rewards import RewardPool
from rewards.math.math_answer import check_answer, clear_caches, compare_by_math_verify

SHARE_POISON = 0.05
IN_FLIGHT = 64
RECOGNISED = (
    "9^{9^{9^9}}",
    "{" * 400 + "5" + "}" * 400,
    "9" * 5000,
    "2^{10000000}",
    "1000000!",
    "20!!",
    "(x+1)^{5000}",
    "(a+b+c+d+e)^{60}",
    "+".join(rf"\sin({i}x)" for i in range(40)),
    r"\sum_{k=1}^{1000000000} k^k",
    r"\binom{1000000}{500000}",
    "2" + "^{2" * 8 + "}" * 8,
)


def main() -> None:
    """Measure and print."""
    options = _arguments()
    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.ERROR)  # it warns that its timeouts are off: they are, on purpose
    pairs = make_pairs(options.pairs, options.seed)
    results = {"speed": _speed(pairs, options.rounds), "recognised": _recognised()}
    if not options.skip_pool:
        results["pool"] = _pool(pairs, num_workers=options.workers, limit_s=options.limit_s)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _speed(pairs: Sequence[Pair], num_rounds: int) -> dict[str, object]:
    verdicts = [compare_by_math_verify(pair.answer, pair.ground_truth).verdict for pair in pairs]
    ours_s, theirs_s = [], []
    for _ in range(num_rounds):
        clear_caches()
        started = time.process_time()
        ours = [check_answer(pair.answer, pair.ground_truth).verdict for pair in pairs]
        ours_s.append(time.process_time() - started)
        started = time.process_time()
        theirs = [_math_verify_alone(pair) for pair in pairs]
        theirs_s.append(time.process_time() - started)
        if ours != verdicts:
            raise SystemExit("verdicts differ from those without short cuts")
    others = Counter(
        pair.kind for pair, verdict, other in zip(pairs, verdicts, theirs, strict=True) if other != (verdict == "ok")
    )
    figures: dict[str, object] = {
        "ours_per_s": len(pairs) / median(ours_s),
        "math_verify_per_s": len(pairs) / median(theirs_s),
        "ratio": median(them / us for us, them in zip(ours_s, theirs_s, strict=True)),
        "verdicts": dict(Counter(verdicts)),
        "math_verify_alone_differs": dict(others),
    }
    print(f"pairs per second and core, {len(pairs)} pairs: {figures['ours_per_s']:,.0f}")
    print(f"  math-verify alone: {figures['math_verify_per_s']:,.0f}; ratio, median of rounds: {figures['ratio']:.1f}")
    print(f"  verdicts {figures['verdicts']}; math-verify alone says otherwise: {dict(others)}")
    return figures


def _math_verify_alone(pair: Pair) -> bool:
    gold, answer = (
        math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (pair.ground_truth, pair.answer)
    )
    return bool(math_verify.verify(gold, answer, timeout_seconds=None))


def _recognised() -> dict[str, float]:
    longest_ms = 0.0
    for text in RECOGNISED:
        clear_caches()
        started = time.perf_counter()
        verdict = check_answer(text, "5").verdict
        longest_ms = max(longest_ms, (time.perf_counter() - started) * 1e3)
        if verdict != "invalid":
            raise SystemExit(f"not recognised as poison: {text[:60]}")
    print(f"{len(RECOGNISED)} recognised poisons: {longest_ms:.2f} ms for the slowest")
    return {"count": len(RECOGNISED), "longest_ms": longest_ms}


def _pool(pairs: Sequence[Pair], *, num_workers: int, limit_s: float) -> dict[str, float]:
    num_poison = round(SHARE_POISON * len(pairs))
    poison = [
        Pair("poison", rf"\int_0^{{\infty}} \frac{{\ln(x+{3 + i})}}{{x^5+{2 + i}}} dx", "5") for i in range(num_poison)
    ]
    clean_wall_s, clean = _stream(pairs, num_workers, limit_s)
    mixed = [*pairs[: len(pairs) - num_poison], *poison]
    random.Random(0).shuffle(mixed)
    wall_s, latencies = _stream(mixed, num_workers, limit_s)
    figures = {
        "workers": num_workers,
        "limit_s": limit_s,
        "poison": num_poison,
        "clean_wall_s": clean_wall_s,
        "clean_only_p99_s": _p99(clean),
        "wall_s": wall_s,
        "bound_s": clean_wall_s + num_poison * limit_s / num_workers,
        "p99_s": _p99(latencies),
    }
    print(f"{num_workers} workers, {IN_FLIGHT} in flight, {num_poison} unseen poisons at a limit of {limit_s:g} s:")
    print(f"  clean corpus {clean_wall_s:.2f} s, 99th percentile of latency {figures['clean_only_p99_s']:.3f} s")
    print(f"  with poison {wall_s:.1f} s (bound {figures['bound_s']:.1f} s); clean ones' p99 {figures['p99_s']:.3f} s")
    return figures


def _stream(pairs: Sequence[Pair], num_workers: int, limit_s: float) -> tuple[float, list[float]]:
    """Wall time, and the clean pairs' latencies from submit to score, with a window of responses in flight."""
    latencies: list[float] = []
    window = threading.Semaphore(IN_FLIGHT)
    with RewardPool(RewardSpec(reward_type="boxed"), num_workers=num_workers, timeout_s=limit_s) as pool:
        pool.submit([r"\boxed{\sin x}"], Problem(ground_truth="1")).result()
        started = time.perf_counter()
        for pair in pairs:
            window.acquire()
            future = pool.submit([rf"\boxed{{{pair.answer}}}"], Problem(ground_truth=pair.ground_truth))
            future.add_done_callback(_when_done(latencies, pair, time.perf_counter(), window))
        for _ in range(IN_FLIGHT):
            window.acquire()
        return time.perf_counter() - started, latencies


def _when_done(
    latencies: list[float], pair: Pair, submitted: float, window: threading.Semaphore
) -> Callable[[Future[list[Score]]], None]:
    def note(_: Future[list[Score]]) -> None:
        if pair.kind != "poison":
            latencies.append(time.perf_counter() - submitted)
        window.release()

    return note


def _p99(latencies: Sequence[float]) -> float:
    return quantiles(latencies, n=100)[98]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of comparing math answers.")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=1.0)
    parser.add_argument("--skip-pool", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
