"""Test the page in a real browser: it is drawn, hostile text does nothing, keys move the step, narrow screens, live."""

import fcntl
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.browser import CHROMIUM, Tab, browser
from tests.run_files import LINE, STEP, TOKENS, write_run_in

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)"),
]
HOSTILE = "</script><img src=x onerror=\"document.title='run'\"><a href='javascript:1'>\x1b[2J\u202eabc"
# Texts whose contrast with the first opaque background behind them is below 4.5, by WCAG 2.2.
CONTRAST = """(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (part) => ((part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = parse(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const ratio = (element) => {
    const lights = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    return (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const isShown = (element) => element.checkVisibility() && !element.closest('svg, script, style, option');
  const texts = [...document.querySelectorAll('body *')].filter((element) => hasText(element) && isShown(element));
  return texts.map((element) => [ratio(element), element.textContent.slice(0, 40)]).filter(([found]) => found < 4.5);
})()"""
KIND = """(() => {
  const kind = document.querySelector('#groups select');
  kind.value = '%s';
  kind.dispatchEvent(new Event('change'));
})()"""
TOKEN_MODE = """(() => {
  const mode = document.querySelector('#rollouts select');
  mode.value = '%s';
  mode.dispatchEvent(new Event('change'));
})()"""
SCRIPT = """(() => {
  const script = document.createElement('script');
  script.textContent = 'window.ran = 1';
  document.body.append(script);
  return window.ran ?? 0;
})()"""
LOSS = "[...document.querySelectorAll('.chart')].find((chart) => chart.textContent.startsWith('Loss')).textContent"
FOCUS = "document.activeElement.tagName + ' ' + (document.activeElement.type ?? '')"
HAS_OUTLINE = "getComputedStyle(document.activeElement).outlineStyle !== 'none'"


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


@pytest.fixture
def write_run(tmp_path):
    return partial(write_run_in, tmp_path)


@pytest.fixture
def page(write_run, tmp_path):
    """A run of 30 steps with hostile texts in each place that a model or a user writes."""
    rollouts = [
        {"step": step, "uid": f"train-{number}.0", "sample": sample, "episode": sample, "reward": float(sample)}
        | TOKENS
        | dict.fromkeys(["prompt", "response", "gt_answer", "detail"], HOSTILE)
        for step in range(1, 31)
        for number in range(2)
        for sample in range(2)
    ]
    run = write_run(
        steps=[{"loss": 1 / step} for step in range(1, 31)], rollouts=rollouts, config={"system_prompt": HOSTILE}
    )
    subprocess.run(
        [sys.executable, "-m", "coati_rl.command_line", "report", run, "-o", tmp_path / "page.html"], check=True
    )
    return tmp_path / "page.html"


def task_seconds(tab: Tab) -> float:
    metrics = {each["name"]: each["value"] for each in tab.send("Performance.getMetrics")["metrics"]}
    return metrics["TaskDuration"]


def shown_step(tab: Tab) -> str:
    return tab.run("document.querySelector('output').textContent")


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_drawn_within_the_screen_and_asks_for_nothing(tab, page, width, is_dark):
    tab.complaints.clear()
    tab.requests.clear()
    tab.size(width, 800, is_dark=is_dark)
    tab.open(page.as_uri())
    assert tab.complaints == []
    assert tab.requests == [page.as_uri()]
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run("document.querySelectorAll('.chart path.line').length") >= 10
    assert tab.run(CONTRAST) == []


def test_what_a_model_says_is_shown_as_text_and_runs_nothing(tab, page):
    tab.size(1280, 800)
    tab.open(page.as_uri())
    assert tab.run("document.title") == "run - Coati-RL"
    assert tab.run("document.querySelectorAll('img, main script, a[href^=javascript]').length") == 0
    said = tab.run("document.querySelector('.said.answer pre').textContent")
    assert said == HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
    assert tab.run(SCRIPT) == 0, "the policy admits no other script"


def test_keys_move_the_step_the_tokens_and_the_focus(tab, page):
    tab.size(1280, 800)
    tab.open(page.as_uri())
    assert shown_step(tab) == "step 30 of 30"
    for _ in range(3):
        tab.press("ArrowLeft")
    assert shown_step(tab) == "step 27 of 30"
    assert tab.run("document.querySelector('#rollouts header p').textContent").startswith("4 rollouts of step 27")
    assert "loss0.03704" in tab.run(LOSS)
    order = []
    for _ in range(12):
        tab.press("Tab")
        order.append(tab.run(FOCUS))
        assert tab.run(HAS_OUTLINE) or order[-1] == "INPUT radio", "of a radio its label has it"
    assert order[0].startswith("A") and "INPUT radio" in order and "INPUT range" in order
    tab.run("document.querySelector('.tokens[tabindex]').focus()")
    tab.press("ArrowRight")
    assert "log-probability -0.5" in tab.run("document.querySelector('#rollouts [role=status]').textContent")
    assert shown_step(tab) == "step 27 of 30", "the arrow keys are the tokens' while these have the focus"


def test_tokens_are_coloured_by_ratios_that_a_replay_has_written_and_else_it_says_how(tab, write_run, tmp_path):
    run = write_run(steps=[{"loss": 1.0}] * 2, rollouts=[{"step": step} | TOKENS for step in (1, 2)])
    (run / "token_ratios").mkdir()
    (run / "token_ratios" / "step-2.jsonl").write_text('{"uid": "train-1.0", "sample": 0, "ratios": [0.5, 1.5]}\n')
    path = tmp_path / "ratios.html"
    subprocess.run([sys.executable, "-m", "coati_rl.command_line", "report", run, "-o", path], check=True)
    tab.size(1280, 800)
    tab.open(path.as_uri())
    tab.run(TOKEN_MODE % "ratio")
    assert tab.run("[...document.querySelectorAll('.tokens[tabindex] [data-i]')].map((each) => each.className)") == [
        "r0",
        "r4",
    ]
    tab.run("document.querySelector('.tokens[tabindex]').focus()")
    tab.press("ArrowRight")
    assert ", ratio 0.5, version 0" in tab.run("document.querySelector('#rollouts [role=status]').textContent")
    assert tab.run(CONTRAST) == []
    tab.run("document.activeElement.blur()")
    tab.press("ArrowLeft")
    assert "coati-rl replay RUN --step 1 --ratios" in tab.run("document.querySelector('#rollouts .scale').textContent")


def test_groups_are_filtered_and_lead_to_their_rollouts(tab, page):
    tab.size(1280, 800)
    tab.open(page.as_uri())
    tab.run(KIND % "high")
    assert tab.run("document.querySelector('#groups [role=status]').textContent") == "0 groups of 60"
    tab.run(KIND % "mixed")
    tab.run("document.querySelector('#groups tbody tr:nth-child(2) button').click()")
    assert tab.run("document.querySelectorAll('.list button').length") == 3, "two answers, and the way to the others"
    assert shown_step(tab) == "step 1 of 30"


def test_a_page_of_the_largest_size_is_drawn_with_two_seconds_of_computing(tab, write_run, tmp_path):
    number = 600
    tokens = {"token_ids": [*range(number)], "rollout_logprobs": [-0.123456] * number, "token_versions": [[0, number]]}
    answer = TOKENS | tokens | {"response": "word " * 4000}
    rollouts = [
        {"step": step, "uid": f"train-{group}", "sample": sample, **answer}
        for step in range(1, 41)
        for group in range(8)
        for sample in range(8)
    ]
    steps = [{f"figure_{n}": step / n for n in range(1, 30)} for step in range(1, 1001)]
    run = write_run(steps=steps, rollouts=rollouts)
    page = tmp_path / "page.html"
    subprocess.run([sys.executable, "-m", "coati_rl.command_line", "report", run, "-o", page], check=True)
    assert page.stat().st_size < 5_000_000
    tab.send("Performance.enable", timeDomain="threadTicks")  # of the page's thread: no other program counts
    before = task_seconds(tab)
    tab.open(page.as_uri())
    assert task_seconds(tab) - before < 2.0


def test_a_new_step_comes_to_the_live_page_and_a_note_is_kept(tab, write_run):
    run: Path = write_run(steps=[{}, {}], rollouts=[{"step": 1}, {"step": 2}])
    command = [sys.executable, "-m", "coati_rl.command_line", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            tab.complaints.clear()
            tab.size(1280, 800)
            tab.open(server.stdout.readline().split()[0])
            assert shown_step(tab) == "step 2 of 2"
            tab.press("ArrowLeft")
            assert shown_step(tab) == "step 1 of 2"
            tab.press("ArrowRight")  # at the last step the page goes on to each new one
            with (run / "rollouts/steps-000001-000100.jsonl").open("a") as file:
                file.write(json.dumps(LINE | {"step": 3, "response": "the third"}) + "\n")
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(STEP | {"step": 3}) + "\n")
            tab.wait("document.querySelector('output').textContent === 'step 3 of 3'")
            tab.wait("document.querySelector('.said.answer pre').textContent === 'the third'")
            tab.run(
                "document.querySelector('textarea').value = 'odd'; document.querySelector('.annotate button').click()"
            )
            tab.wait("document.querySelector('#rollouts .notes')?.textContent.endsWith('odd')")
            assert (
                '"step": 3, "uid": "train-1.0", "sample": 0, "text": "odd"' in (run / "annotations.jsonl").read_text()
            )
            with (run / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                tab.wait("document.querySelector('.state').textContent === 'running'")
            tab.wait("document.querySelector('.state').textContent === 'not running'")
            assert tab.complaints == []
        finally:
            server.terminate()
