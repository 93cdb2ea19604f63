"""Test parsing of -rt to rewards with weights."""

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import RewardPart, absolute_reward_type, parse_reward_type, short_names


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("boxed", [("boxed", 1.0)]),
        ("boxed=2", [("boxed", 2.0)]),
        ("boxed=1,brevity.py:score=0.2", [("boxed", 1.0), ("brevity.py:score", 0.2)]),
        (" boxed = 2 , code ", [("boxed", 2.0), ("code", 1.0)]),
        ("boxed,think_answer_tags=-0.5", [("boxed", 1.0), ("think_answer_tags", -0.5)]),
        ("boxed=0,code=1e-3", [("boxed", 0.0), ("code", 0.001)]),
        ("boxed=.5,code=+1.", [("boxed", 0.5), ("code", 1.0)]),
        # paths and addresses have equals signs of their own
        ("/runs/lr=3/mine.py:score", [("/runs/lr=3/mine.py:score", 1.0)]),
        ("/runs/lr=3/mine.py:score=2", [("/runs/lr=3/mine.py:score", 2.0)]),
        ("http://rm:8000/score", [("http://rm:8000/score", 1.0)]),
        ("http://rm:8000/score=0.5", [("http://rm:8000/score", 0.5)]),
        ("https://rm/score?k=3", [("https://rm/score?k=3", 1.0)]),
        ("https://rm/score?k=3=0.5", [("https://rm/score?k=3", 0.5)]),
        ("https://rm/score?a=x&k=3", [("https://rm/score?a=x&k=3", 1.0)]),
        ("https://rm/score?a=x&k=3=-2,boxed=1", [("https://rm/score?a=x&k=3", -2.0), ("boxed", 1.0)]),
        ("model:/runs/judge", [("model:/runs/judge", 1.0)]),
        ("boxed=1,model:/runs/judge@2=0.5", [("boxed", 1.0), ("model:/runs/judge@2", 0.5)]),
        ("model:/lr=3e-5/judge", [("model:/lr=3e-5/judge", 1.0)]),
    ],
)
def test_names_and_weights_are_told_apart(text, parts):
    assert [(part.name, part.weight) for part in parse_reward_type(text)] == parts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "box",
            "--reward-type 'box': unknown reward 'box'; use think_answer_tags, boxed, code, reasoning_gym, ",
        ),
        ("", "--reward-type '': a reward without a name; use"),
        ("boxed,", "--reward-type 'boxed,': a reward without a name; use"),
        ("boxed,box=1", "unknown reward 'box'; use"),
        ("boxed=much", "the weight of boxed is 'much'; use a finite number"),
        ("boxed=", "the weight of boxed is ''; use a finite number"),
        ("boxed=nan", "the weight of boxed is 'nan'; use a finite number"),
        ("boxed=1e999", "the weight of boxed is '1e999'; use a finite number"),
        ("a.py:f=much", "the weight of a.py:f is 'much'; use a finite number"),
        ("http://rm/s?k=3=much", "the weight of http://rm/s?k=3 is 'much'; use a finite number"),
        ("boxed=1,boxed=2", "boxed is named twice; name it once, with the sum of the weights"),
        ("http://", "'http://' names no host; use http://HOST:PORT/PATH"),
        ("https://[::1/score", "names no host"),
        ("notes,old.py:score", "unknown reward 'notes'"),
        ("model:", "unknown reward 'model:'"),
    ],
)
def test_what_is_no_reward_is_refused_with_the_choices(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_reward_type(text)
    assert message in str(caught.value)


def test_paths_become_absolute_and_nothing_else_changes(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    text = "boxed=1, a.py:score=0.2,~/b.py:score,/c.py:score=-3,http://rm/s?k=3=2,box=x,model:judge=2"
    assert absolute_reward_type(text) == (
        f"boxed=1,{tmp_path}/a.py:score=0.2,/home/somebody/b.py:score,/c.py:score=-3,http://rm/s?k=3=2,box=x,"
        f"model:{tmp_path}/judge=2"
    )


def test_the_same_file_by_two_paths_is_named_twice(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.py:score is named twice"):
        parse_reward_type(absolute_reward_type(f"a.py:score,{tmp_path}/a.py:score"))


def test_short_names_are_short_and_no_two_are_the_same():
    names = (
        *("boxed", "/x/brevity.py:score", "/y/brevity.py:score", "/y/brevity.py:other", "/z/brevity.py:score"),
        *("https://me:secret@rm:8000/v1/?k=3", "http://rm:8000/v1", "http://rm"),
        *("model:/runs/judge", "model:/other/judge"),
    )
    assert short_names(tuple(RewardPart(name=name) for name in names)) == (
        *("boxed", "brevity.score", "brevity.score-2", "brevity.other", "brevity.score-3"),
        *("rm:8000/v1", "rm:8000/v1-2", "rm"),
        *("judge", "judge-2"),
    )
