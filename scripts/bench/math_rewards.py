r"""Measure the cost of comparing math answers: pairs per second against math-verify, and the delay by slow answers.

    python scripts/bench/math_rewards.py [--pairs 2000] [--rounds 5] [--workers 2] [--limit-s 1] [--json FILE]

Speed: a corpus of pairs (math_corpus.py), each unseen: `check_answer`, its caches cleared before each round, against
math-verify's `parse` and `verify` of `\boxed{...}` without limits, interleaved, median of rounds, in CPU seconds, so
that other load matters less. All verdicts must equal those of `compare_by_math_verify`, which takes no short cuts, or
nothing is printed. Verdicts of math-verify alone that differ (notations that it misreads) are counted.
Refused answers: the longest time of one that exceeds a limit. Slow answers: 5 % integrals, which only the time limit
ends, among the pairs, through a RewardPool with 64 responses in flight: latency of the others, and wall time against
its bound.
"""

import argparse
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import math_verify
from math_corpus import Pair, make_pairs

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem, Score
from rewards import RewardPool
from rewards.math.math_answer import check_answer, clear_caches, compare_by_math_verify

SLOW_FRACTION = 0.05
IN_FLIGHT = 64
REFUSED = (
    "1e999999999",
    "9^{9^{9^9}}",
    "2^{10000000}",
    "2" + "^{2" * 8 + "}" * 8,
    r"\left(\frac{1}{3}\right)^{10^7}",
    "{" * 400 + "5" + "}" * 400,
    "(" * 300 + "5" + ")" * 300,
    "9" * 5000,
)


def main() -> None:
    """Measure and print."""
    options = _arguments()
    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.ERROR)  # it warns that its timeouts are disabled, which is intended
    pairs = make_pairs(options.pairs, seed=0)
    results = {"speed": _speed(pairs, options.rounds), "refused": _refused()}
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
            raise SystemExit("the verdicts differ from those of math-verify without short cuts")
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


def _refused() -> dict[str, float]:
    longest_ms = 0.0
    for text in REFUSED:
        clear_caches()
        started = time.process_time()
        verdict = check_answer(text, "5").verdict
        longest_ms = max(longest_ms, (time.process_time() - started) * 1e3)
        if verdict != "invalid":
            raise SystemExit(f"an answer over a limit was not refused: {text[:60]}")
    print(f"{len(REFUSED)} answers over a limit: {longest_ms:.2f} ms for the slowest to be refused")
    return {"count": len(REFUSED), "longest_ms": longest_ms}


def _pool(pairs: list[Pair], *, num_workers: int, limit_s: float) -> dict[str, float]:
    num_slow = round(SLOW_FRACTION * len(pairs))
    clean_wall_s, clean_p99_s = _stream(pairs, num_workers, limit_s)
    mixed = pairs[num_slow:] + [
        Pair("slow", rf"\int_0^{{\infty}} \frac{{\ln(x+{3 + i})}}{{x^5+{2 + i}}} dx", "5") for i in range(num_slow)
    ]
    random.Random(0).shuffle(mixed)
    wall_s, p99_s = _stream(mixed, num_workers, limit_s)
    bound_s = clean_wall_s + num_slow * limit_s / num_workers
    print(f"{num_workers} workers, {IN_FLIGHT} in flight, {num_slow} integrals at a limit of {limit_s:g} s:")
    print(f"  clean corpus {clean_wall_s:.2f} s, 99th percentile of latency {clean_p99_s:.3f} s")
    print(f"  with slow answers {wall_s:.1f} s (bound {bound_s:.1f} s); 99th percentile of the others {p99_s:.3f} s")
    clean = {"clean_wall_s": clean_wall_s, "clean_only_p99_s": clean_p99_s}
    return {**clean, "wall_s": wall_s, "bound_s": bound_s, "p99_s": p99_s}


def _stream(pairs: Sequence[Pair], num_workers: int, limit_s: float) -> tuple[float, float]:
    """Return the wall time, and the 99th percentile of the other pairs' latency from submit to score."""
    latencies: list[float] = []
    window = threading.Semaphore(IN_FLIGHT)

    def note(pair: Pair, submitted: float, _: Future[list[Score]]) -> None:
        if pair.kind != "slow":
            latencies.append(time.perf_counter() - submitted)
        window.release()

    spec = RewardSpec(
        reward_type="boxed", math_answer="any"
    )  # otherwise an integral for a number is wrong without being computed
    with RewardPool(spec, num_workers=num_workers, timeout_s=limit_s) as pool:
        pool.submit([r"\boxed{\sin x}"], Problem(ground_truth="1")).result()
        started = time.perf_counter()
        for pair in pairs:
            window.acquire()
            future = pool.submit([rf"\boxed{{{pair.answer}}}"], Problem(ground_truth=pair.ground_truth))
            future.add_done_callback(partial(note, pair, time.perf_counter()))
        for _ in range(IN_FLIGHT):
            window.acquire()
        return time.perf_counter() - started, quantiles(latencies, n=100)[98]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of comparing math answers.")
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=1.0)
    parser.add_argument("--skip-pool", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
