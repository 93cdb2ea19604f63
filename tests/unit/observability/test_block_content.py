"""Test what a terminal's block shows of a run, in any width and encoding."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from coati_rl.observability.block_content import BlockContent
from coati_rl.observability.sampled_answer import SampledAnswer

STEP = {
    **{"reward_mean": 0.5, "answer_accuracy": 0.25, "teacher_kl_mean": None, "loss": 0.1, "num_response_tokens": 600},
    **{"step_s": 600.0, "staleness_mean": 1.0, "logprob_gap_mean": None},
    **{"trainer_idle_fraction": 0.625, "producer_idle_fraction": 0.04},
}
WAIT = "waiting for rollouts: 3 of 8 groups of step 4 are finished, 5 prompts are being sampled by 2 producers (4 s)"
ANSWER = SampledAnswer(step=2, prompt="What is 17 + 25?", answer="\\boxed{42}", truth="42", reward=1.0, verdict="ok")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def content_of(*records, clock=None, **options):
    clock = clock or Clock()
    content = BlockContent(10, now=clock, **options)
    for number, record in enumerate(records, 1):
        clock.now += 600.0  # of steps of ten minutes, too, the time left is known
        content.add({**record, "step": number})
    return content


def lines_of(content, width=100):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    with console.capture() as captured:
        console.print(content.render(width), width=width)
    return captured.get().splitlines()


def test_step_bar_time_left_figures_waits_and_an_answer():
    content = content_of(*({**STEP, "reward_mean": reward} for reward in (0.0, 0.25, 1.0)))
    content.wait = WAIT
    content.show(ANSWER)
    bar, *rest = lines_of(content)
    assert bar.startswith("step 3/10 ━━━") and bar.endswith("0:30:00 left 1:10:00"), "7 steps of 600 s"
    assert rest == [
        "reward 1.000 ▁▃█   accuracy 0.250 ▁▁▁   loss +0.1000 ▁▁▁   1 tok/s",
        "idle: trainers 62%, producers 4%   staleness 1.00   gap -",
        "waiting for rollouts: 3 of 8 groups of step 4 are finished, 5 prompts are being sampled by 2",
        "producers (4 s)",
        "answer of step 2: reward 1, ok",
        "  prompt  What is 17 + 25?",
        "  answer  \\boxed{42}",
    ]


def test_before_the_first_step_there_is_no_figure_and_the_line_of_waits_stays_free():
    bar, wait = lines_of(BlockContent(10, now=Clock()))
    assert bar.split() == ["starting", "0:00:00", "left", "-:--:--"] and wait == ""
    assert lines_of(BlockContent(10, first_step=3, now=Clock()))[0].startswith("step 3/10 ━")
    assert lines_of(BlockContent(None, now=Clock()))[0].startswith("starting")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "iso8859-1"])
def test_every_line_fits_and_is_of_the_terminal_s_characters(width, encoding):
    content = content_of(STEP, STEP, STEP, encoding=encoding)
    content.wait = WAIT + " für größe"
    hostile = "\x1b[2J\r\x07\u202eevil\u200b 数学" * 50 + "👍🏽 e\u0301" * 30 + "\ud800\x00 \\boxed{42}"
    content.show(SampledAnswer(step=2, prompt=hostile, answer=hostile, truth="", reward=0.5, verdict="wrong\x1b[A"))
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=raw, force_terminal=True, width=width, color_system=None)
    with console.capture() as captured:
        console.print(content.render(width), width=width)
    lines = captured.get().splitlines()
    assert len(lines) <= 16
    for line in lines:
        line.encode(encoding)
        assert "\x1b" not in line and "\u202e" not in line and "\r" not in line
        assert cell_len(line) <= width
    for line in lines[-2:]:  # terminals differ in the widths of what a model may say
        assert sum(1 if each.isascii() else 2 for each in line) <= width
    if width >= 40:
        assert lines[0].startswith("step 3/10 ") and lines[0].rstrip().endswith("left 1:10:00")
        assert lines[-1].endswith("\\boxed{42}")


def test_an_answer_of_many_megabytes_is_shown_by_its_ends_at_once():
    content = content_of(STEP)
    content.show(
        SampledAnswer(step=1, prompt="p", answer="first " + "\u202e" * 2**24 + " last", truth="", reward=0, verdict="")
    )
    assert lines_of(content, 60)[-1] == "  answer  first \\u202e\\u2 ... e\\u202e\\u202e\\u202e\\u202e last"


def test_a_job_on_a_dataset_shows_its_own_figures():
    sft = content_of({"loss": 1.5, "perplexity": 4.5, "loss_tokens": 600, "step_s": 0.5, "trainer_idle_fraction": 0.0})
    assert lines_of(sft)[1] == "loss +1.5000   1200 tok/s   idle: trainers 0%   perplexity 4.500"
    dpo = content_of(*({"loss": 0.7, "rewards/accuracies": share, "rewards/margins": 0.5} for share in (0.5, 0.75)))
    assert lines_of(dpo)[1] == "loss +0.7000 ▁▁   accuracy 0.750 ▁█   0 tok/s   margin 0.5"


def test_a_later_update_of_a_batch_keeps_what_came_in_with_the_first():
    later = dict.fromkeys(STEP) | {"update": 1, "loss": 0.2, "num_response_tokens": 0, "step_s": 1.0}
    (_, figures, *_) = lines_of(content_of({**STEP, "update": 0}, later))
    assert figures == "reward 0.500   accuracy 0.250   loss +0.2000 ▁█   1 tok/s   idle: trainers 62%, producers 4%"
