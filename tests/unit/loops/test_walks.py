"""Test through how many hands a prompt and a sampled token pass: functions and containers, by a trace of a run."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = tuple(f"{ROOT / name}/" for name in ("coati_rl", "producer", "consumer", "rewards"))
UID = "train-3.0"
MAX_DEPTH = 5  # of containers in an argument
MAX_ITEMS = 5000  # of an array that is searched


class Trace:
    """Note what crosses the borders of the product's functions, in all threads that start meanwhile."""

    def __init__(self, note: Callable[[str, object], None]) -> None:
        self._note = note
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        threading.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, result: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PRODUCT) or code.co_name.startswith("<"):
            return
        if "ledger" in code.co_filename or threading.current_thread().name == "ledger":  # it writes down what passes
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if event == "call" else ()
        values = [frame.f_locals.get(name) for name in names if name != "self"] if names else [result]
        with self._lock:
            for value in values:
                self._note(code.co_qualname, value)


def inside(value: object, depth: int = MAX_DEPTH) -> Iterator[tuple[type | None, object]]:
    """Yield what a value is made of, each with the class whose field it is."""
    yield None, value
    if depth == 0:
        return
    if isinstance(value, list | tuple):
        for each in value[:64]:
            yield from inside(each, depth - 1)
    elif isinstance(value, dict):
        for each in list(value.values())[:64]:
            yield from inside(each, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            for owner, part in inside(getattr(value, field.name, None), depth - 1):
                yield owner or type(value), part


def has_tokens(value: object, tokens: list[int]) -> bool:
    """True for an array of integers in which these stand one behind another."""
    if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel() <= MAX_ITEMS:
        value = value.detach().numpy()
    elif isinstance(value, list | tuple) and len(value) >= len(tokens) and all(type(each) is int for each in value):
        value = np.array(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind != "i" or not len(tokens) <= value.size <= MAX_ITEMS:
        return False
    windows = np.lib.stride_tricks.sliding_window_view(value.ravel(), len(tokens))
    return bool((windows == tokens).all(axis=1).any())


@pytest.fixture(scope="module")
def walks(run_in_threads) -> dict[str, Any]:
    """Functions that a prompt passes until the engine computes with it, and classes that hold its first sample."""
    functions: dict[str, None] = {}
    owners: dict[str, None] = {}
    prompt: list[int] = []
    sample: list[int] = []

    def note(name: str, value: object) -> None:
        if not prompt and getattr(value, "uid", None) == UID:
            prompt.extend(value.token_ids)
        if prompt and not sample and any(has_tokens(part, prompt) for _, part in inside(value)):
            functions.setdefault(name)
        if name == "single_turns" and not sample and getattr(value, "uid", None) == UID:
            sample.append(-1)  # the next argument has the answers
        elif name == "single_turns" and sample == [-1]:
            sample[:] = max((list(map(int, each.token_ids)) for each in value), key=len)
        if len(sample) > 1:
            for owner, part in inside(value):
                if owner is not None and has_tokens(part, sample):
                    owners.setdefault(owner.__name__)

    with Trace(note):
        run_in_threads()
    return {"functions": [*functions], "owners": [*owners]}


def test_a_prompt_passes_at_most_20_functions_until_the_engine_has_it_checks_included(walks):
    path = walks["functions"]
    assert path[0] == "DatasetPrompts.draw"
    to_engine = path[: path.index("_FakeCore.add") + 1]
    until = [name for name in to_engine if "probe" not in name]  # a probe may have the same tokens
    assert {"Coordinator.lease", "GroupRunner.submit", "SingleTurn.run", "ThreadedEngine.submit"} <= {*until}
    assert len(until) <= 20, until


def test_at_most_10_classes_hold_a_sampled_token_on_its_way_to_the_loss(walks):
    owners = walks["owners"]
    assert {"Completion", "Trajectory", "Sample", "MicroBatch"} <= {*owners}, owners
    assert len(owners) <= 10, owners
