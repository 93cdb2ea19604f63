"""Test optimizers and schedules of the user's own: the trial before anything starts, and its messages."""

import pytest

from coati_rl.config import Config
from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError
from coati_rl.own_optimizer import check_own_functions, load_optimizer, load_schedule

IMPORTS = "import torch\nfrom torch.optim import *\n"
SGD = "def make(parameters, *, lr):\n    return SGD(parameters, lr=lr, momentum=0.9)\n"
HIDDEN = """
class Hidden(SGD):
    calls = 0
    def step(self):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= self.calls * p.grad
def make(parameters, *, lr):
    return Hidden(parameters, lr=lr)
"""
COUNTING = """
class Counting(SGD):
    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()
def make(parameters, *, lr):
    return Counting(parameters, lr=lr)
"""
OF_MATRICES = """
class Normalised(SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()
def make(parameters, *, lr):
    return Normalised(parameters, lr=lr)
"""


@pytest.fixture
def write(tmp_path):
    """text -> the name of its function `make` as a flag takes it."""

    def write_file(text, file="mine.py"):
        (tmp_path / file).write_text(IMPORTS + text, encoding="utf-8")
        return f"{tmp_path / file}:make"

    return write_file


def refusal(load, *args):
    with pytest.raises(ConfigError) as caught:
        load(*args)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        SGD,
        "def make(parameters, *, lr):\n    return AdamW(parameters, lr=lr, foreach=False)\n",
        "def make(parameters, *, lr):\n    return SGD([{'params': parameters[1:], 'lr': 3 * lr}, "
        "{'params': parameters[:1]}], lr=lr)\n",
        OF_MATRICES,
    ],
)
def test_an_optimizer_whose_state_is_of_its_parameters_is_taken(write, text):
    assert callable(load_optimizer(Config(optimizer=write(text)).optimizer))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def make(parameters): pass\n",
            "fails on two tensors: TypeError: make() got an unexpected keyword argument 'lr'",
        ),
        ("def make(parameters, *, lr): pass\n", "returns a NoneType; return a torch.optim.Optimizer"),
        ("def make(parameters, *, lr):\n    return SGD(parameters[:1], lr=lr)\n", "updates 1 of 2 parameters"),
        ("def make(parameters, *, lr):\n    return LBFGS(parameters, lr=lr)\n", "whose step() takes no closure"),
        (
            "def make(parameters, *, lr):\n    return Adafactor(parameters, lr=lr)\n",
            "its state row_var has the shape (4, 1), the parameter (4, 3); only state of the parameter's shape",
        ),
        (HIDDEN, "goes on differently when its state is loaded again; keep all of it in its state, by parameter"),
        (COUNTING, "keeps k in its parameter groups, which are not saved; keep it in its state"),
        (
            OF_MATRICES + "make.is_elementwise = True\n",
            "has is_elementwise, but updates a part of a tensor differently",
        ),
    ],
)
def test_an_optimizer_that_could_not_be_resumed_is_refused(write, text, message):
    name = write(text)
    found = refusal(load_optimizer, Config(optimizer=name).optimizer)
    assert found.startswith(f"--optimizer {name}: ") and message in found


@pytest.mark.parametrize("flags", [{"tensor_parallel_size": 2}, {"zero_stage": 1}, {"plugin": "fsdp2"}])
def test_parts_of_parameters_need_an_optimizer_that_treats_every_element_alone(write, flags):
    config = Config(num_trainers=4, optimizer=write(SGD), **flags)
    assert "a trainer then updates parts of parameters" in refusal(check_own_functions, config)
    check_own_functions(Config(num_trainers=4, optimizer=config.optimizer.optimizer, pipeline_parallel_size=2))
    elementwise = write(SGD + "make.is_elementwise = True\n", file="elementwise.py")
    check_own_functions(Config(num_trainers=4, optimizer=elementwise, **flags))


def test_a_schedule_maps_progress_to_a_factor(write):
    schedule = load_schedule(write("def make(progress):\n    return 1 - progress ** 2\n"))
    assert schedule(0.5) == 0.75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def make(): return 1\n", "fails at progress 0: TypeError"),
        ("def make(progress): return 0.1 / (progress != 0.5)\n", "fails at progress 0.5: ZeroDivisionError"),
        ("def make(progress): return 0.5 - progress\n", "returns -0.01 at progress 0.51; return a finite factor"),
        ("import math\ndef make(progress): return math.cos(8 * math.pi * progress)\n", "at progress 0.07; return a"),
        ("def make(progress): return float('nan')\n", "returns nan at progress 0"),
    ],
)
def test_a_schedule_that_gives_no_factor_is_refused(write, text, message):
    assert message in refusal(load_schedule, write(text))


def test_a_schedule_is_checked_again_where_it_is_asked_in_a_run(write):
    schedule = load_schedule(write("def make(progress): return float('nan') if progress == 1 / 3 else 0.3 - 0.1 * 3\n"))
    assert schedule(0.33) == 0.0, "which is -6e-17 there"
    assert "returns nan at progress 0.333333" in refusal(schedule, 1 / 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_schedule": "polynomial"}, "--lr-schedule 'polynomial': unknown; use cosine, linear, constant, or FILE"),
        ({"optimizer": "lion"}, "--optimizer 'lion': unknown; use adamw, or FILE.py:FUNCTION"),
    ],
)
def test_names_that_are_unknown_are_refused(settings, message):
    assert message in refusal(build_config, settings)
