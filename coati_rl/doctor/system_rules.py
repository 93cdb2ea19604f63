"""Tell by times, memory, disk and logs whether the machine or a process holds a run up."""

from collections import defaultdict
from itertools import pairwise
from statistics import correlation, mean, median

from coati_rl.doctor.rule import POOR, SLOW, WRONG, Rules
from coati_rl.doctor.run_data import RunData
from coati_rl.doctor.spans import EndedSpan, covered_s
from coati_rl.text import shorten

_IDLE = 0.5  # of the trainers' time
_SCORING = ((0.4, 1.0), (0.8, 0.25))  # share of the wall time in which a producer scores; times a group's generation
_SLOWER = 2.5  # times the other producers' median
_MIN_GROUPS = 5  # of a producer, before its median says anything
_LOST, _STEADY = 0.25, -0.95  # of the memory at the start; correlation of memory and step
_JUMP_S = 30.0
_LEAST_DISK = 1.0  # GiB
RULES = Rules()


@RULES.add(
    WRONG,
    says="the disk of the run directory is full, or will be",
    remedy="free space; --keep-checkpoints N, --save-dir elsewhere, --rollout-detail text",
    leads_to="run_failed driver_killed",
)
def disk_full(run: RunData) -> str | None:
    """Follow the free space of the run directory's disk: less than 1 GiB, or at this rate gone before --max-steps.

    The rate counts from eight steps on, once a tenth of what was free is used. A failure to write says so, too.
    """
    failure = run.log.failure or ""
    if "cannot be written: " in failure and ("No space" in failure or "quota" in failure.lower()):
        return failure
    values = run.values("disk_free_gib")
    if not values:
        return None
    (first_step, first), (step, last) = values[0], values[-1]
    text = f"{last:.2f} GiB are free in step {step}, {first:.2f} GiB were in step {first_step}"
    if last < _LEAST_DISK:
        return text
    planned, used = run.config.get("max_steps") or 0, first - last
    if len(values) < 8 or used < 0.1 * first or planned <= step:
        return None
    needed = used / (step - first_step) * (planned - step)
    return f"{text}; at this rate the remaining {planned - step} steps take {needed:.1f}" if needed > last else None


@RULES.add(
    WRONG,
    says="memory grows until the system kills a process",
    remedy="see which process grows (top), your own reward or environment above all; "
    "resume from the last checkpoint before it ends",
    leads_to="run_failed driver_killed producers_lost",
)
def memory_grows(run: RunData) -> str | None:
    """Follow the memory that is available on the driver's machine over the steps after the first fifth.

    It falls steadily (correlation with the step below -0.95) by a quarter: caches and other programs go up and down.
    """
    values = run.values("memory_available_gib")
    values = values[len(values) // 5 :]
    if len(values) < 8 or len({value for _, value in values}) < 3:
        return None
    (first_step, first), (last_step, last) = values[0], values[-1]
    steady = correlation([step for step, _ in values], [value for _, value in values])
    if first - last < _LOST * first or steady > _STEADY:
        return None
    left = last * (last_step - first_step) / (first - last)
    return (
        f"available memory fell steadily from {first:.1f} GiB in step {first_step} to {last:.1f} GiB in step "
        f"{last_step}: enough for {left:.0f} more steps"
    )


@RULES.add(
    WRONG,
    says="producers were lost and replaced",
    remedy="read the end of the producer's file in logs/, and the kernel's log for a process that was killed",
    leads_to="run_failed samples_lost producer_slow",
)
def producers_lost(run: RunData) -> str | None:
    """Count the producers that were lost since the run began, or was resumed last."""
    if not run.log.lost:
        return None
    return f"{len(run.log.lost)} lost; the first: {shorten(run.log.lost[0], 300)}"


@RULES.add(
    POOR,
    says="the machine's clock was set, or the machine was suspended",
    remedy="keep the clocks of all nodes by NTP; times of logs and of the timeline are apart from here on",
)
def clock_jumps(run: RunData) -> str | None:
    """Compare the wall clock of driver.log with the run's own monotonic time between two steps: 30 s apart, or back.

    Lines are written within a second of their step. A machine that was suspended shows it, too.
    """
    own = {each["step"]: each["time_s"] for each in run.steps if each.get("time_s") is not None}
    times = [(step, wall) for step, wall in run.log.step_times if step in own]
    for (before, earlier), (step, wall) in pairwise(times):
        jump = (wall - earlier) - (own[step] - own[before])
        if step > before and abs(jump) > _JUMP_S:
            return (
                f"between steps {before} and {step} the wall clock moved by {wall - earlier:.0f} s, while the run "
                f"counted {own[step] - own[before]:.0f} s"
            )
    return None


@RULES.add(
    WRONG,
    says="the run was ended from outside: its driver was killed, or the machine stopped",
    remedy="see the kernel's log (dmesg) for a process that was killed for memory; go on with -cp RUN",
)
def driver_killed(run: RunData) -> str | None:
    """Look whether driver.log lacks the summary that every end writes, and no process holds the run's lock."""
    if run.log.has_ended is not False or run.is_running:
        return None
    last = f"step {run.steps[-1]['step']}" if run.steps else "before the first step"
    return f"driver.log ends without a summary ({last}), and no process of this machine holds the run's lock"


@RULES.add(
    WRONG,
    says="the run failed",
    remedy="do what the message says; logs/ has a file for each process; go on with -cp RUN",
)
def run_failed(run: RunData) -> str | None:
    """Read in driver.log why the run ended: the message is what the terminal showed last."""
    return shorten(run.log.failure, 400) if run.log.failure else None


@RULES.add(
    SLOW,
    says="the reward is slow: trainers and engines wait for it",
    remedy="raise --reward-workers or --n-behind, or make the reward faster",
)
def reward_slow(run: RunData) -> str | None:
    """Compare the time in which a producer scores groups with the time in which it generates them.

    Trainers are idle for half of their time, and a group is scored for longer than it is generated, while something is
    scored in two fifths of the time; or something is scored in four fifths of it, a quarter as long as generated.
    """
    scored, made = _of(run, "score"), _of(run, "generate")
    idle = [value for _, value in run.values("trainer_idle_fraction")]
    if len(scored) < _MIN_GROUPS or len(made) < _MIN_GROUPS or not idle or median(idle) < _IDLE:
        return None
    seconds, generating = (median(each.seconds for each in spans) for spans in (scored, made))
    spans = [*scored, *made, *_of(run, "train")]
    wall = max(each.end_s for each in spans) - min(each.begin_s for each in spans)
    producers = {each.actor for each in scored}
    share = mean(covered_s(each for each in scored if each.actor == actor) for actor in producers) / max(wall, 1e-9)
    if not any(share >= least and seconds >= times * generating for least, times in _SCORING):
        return None
    return (
        f"a group is scored for {seconds:.2g} s and generated in {generating:.2g} s (medians of {len(scored)}), a "
        f"producer scores something for {share:.0%} of the time, and trainers are idle for {median(idle):.0%}"
    )


@RULES.add(
    SLOW,
    says="one producer is slower than the others",
    remedy="look what else runs on its node or GPU (nvidia-smi, top), and at its file in logs/",
)
def producer_slow(run: RunData) -> str | None:
    """Compare the median seconds of a group by producer: one takes 2.5 times as long as the median of the others."""
    by_actor = defaultdict(list)
    for span in _of(run, "generate"):
        by_actor[span.actor].append(span.seconds)
    medians = {actor: median(seconds) for actor, seconds in by_actor.items() if len(seconds) >= _MIN_GROUPS}
    if len(medians) < 2:
        return None
    slowest = max(medians, key=lambda actor: medians[actor])
    others = median(value for actor, value in medians.items() if actor != slowest)
    if medians[slowest] < _SLOWER * others:
        return None
    return f"{slowest} generates a group in {medians[slowest]:.2g} s (median), the others in {others:.2g} s"


def _of(run: RunData, name: str) -> list[EndedSpan]:
    return [span for span in run.spans if span.name == name]
