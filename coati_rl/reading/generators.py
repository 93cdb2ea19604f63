"""Make rows with the generators of the package reasoning_gym: row i follows from a seed and i alone.

The package is imported here alone. Some of its verifiers hand a model's answer to `eval` or to sympy's `parse_expr`,
which would run what a model writes: in its modules both names stand for versions that read literals, arithmetic and
formulas only.

Training rows have seeds below 2**31, which begin where the run's seed says; the rows of evaluation sets have seeds from
2**31 on, and are the same in every run.
"""

import ast
import hashlib
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, lru_cache
from inspect import signature
from types import ModuleType
from typing import Any

import numpy as np

from coati_rl.errors import ConfigError
from coati_rl.generator_spec import GENERATED, GeneratorSpec

# Of 106 generators: composite needs a list of others, codeio runs programs from its data file in the run's own
# process, and the rows of the rest depend on the process (hash order, or the global state of `random`).
_OF_PROCESS = "its rows are not the same in every process, so that a run could not be resumed"
REFUSED = {
    "composite": "mix generators by their shares instead, reasoning_gym:NAME=SHARE,reasoning_gym:NAME=SHARE",
    "codeio": "it runs programs of its data file in the process of the run, without a sandbox",
    "intermediate_integration": _OF_PROCESS,
    "isomorphic_strings": _OF_PROCESS,
    "knight_swap": _OF_PROCESS,
    "list_functions": _OF_PROCESS,
    "polynomial_multiplication": _OF_PROCESS,
    "ransom_note": _OF_PROCESS,
    "word_ladder": _OF_PROCESS,
}
_SOLVER = "pycosat"  # has no built distribution: a C compiler has to be there to install it
_WITH_TUPLES = ("arc_agi", "rearc")  # their verifiers compare tuples, which JSON turns into lists
_CHUNK = 64  # rows of one dataset of the package; some make all of its rows at once
_EVALUATION_SEED = 1 << 31
_NUM_SEEDS = _EVALUATION_SEED - _CHUNK
_LITERALS = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Load)
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
_FUNCTIONS = re.compile("a?(sin|cos|tan|cot|sec|csc)h?|exp|log|ln|sqrt|cbrt|Abs|sign|pi")


class Generator:
    """Make the rows of one generator, in training or as an evaluation set."""

    def __init__(self, spec: GeneratorSpec, *, seed: int | None) -> None:
        """Take the run's seed; None: the rows of an evaluation set."""
        self.spec = spec
        digest = hashlib.sha256(str(seed).encode()).digest()
        self._first = 0 if seed is None else int.from_bytes(digest[:8], "little") % _NUM_SEEDS
        self._offset = _EVALUATION_SEED if seed is None else 0
        self._chunk: tuple[int, Any] | None = None  # the seed of the last chunk, and its dataset

    def row(self, position: int) -> dict[str, Any]:
        """Return row `position`, from 0: a prompt, its answer, and what the verifier needs (`metadata`, `parameters`).

        Raises: whatever the package raises if it cannot make the row.
        """
        chunk, place = divmod(position, _CHUNK)
        seed = self._offset + (self._first + chunk * _CHUNK) % _NUM_SEEDS
        with _global_state_kept():
            if self._chunk is None or self._chunk[0] != seed:
                self._chunk = (seed, _make_dataset(self.spec.key, seed))
            entry = self._chunk[1][place]
        answer = entry["answer"]
        return {
            "messages": [{"role": "user", "content": entry["question"]}],
            "gt_answer": None if answer is None else str(answer),
            "metadata": json.loads(json.dumps({**entry["metadata"], "source_dataset": self.spec.name}, default=str)),
            "parameters": self.spec.parameters,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without a dataset of the package."""
        return {**self.__dict__, "_chunk": None}


def open_generator(spec: GeneratorSpec, *, seed: int | None, where: str) -> Generator:
    """Return a generator that has made a first row.

    Args:
        spec: its name and parameters.
        seed: as of `Generator`.
        where: the flag and the text of the source, for messages.
    Raises: ConfigError for an unknown or refused generator, unknown parameters or wrong values, or without the package.
    """
    generators = load_package().DATASETS
    if spec.name not in generators:
        raise ConfigError(f"{where}: no such generator; {_nearest(spec.name, generators)}")
    if reason := refusals().get(spec.name):
        raise ConfigError(f"{where}: the generator {spec.name} cannot be used: {reason}")
    known = [name for name in signature(generators[spec.name][1]).parameters if name not in ("seed", "size")]
    if unknown := [name for name in spec.parameters if name not in known]:
        raise ConfigError(f"{where}: {spec.name} has no parameter {unknown[0]}; {_nearest(unknown[0], known)}")
    generator = Generator(spec, seed=seed)
    try:
        generator.row(0)
    except Exception as error:
        raise ConfigError(
            f"{where}: {spec.name} makes no row with these parameters: {type(error).__name__}: {error}"
        ) from error
    return generator


def score_answer(answer: str, row: dict[str, Any], ground_truth: str) -> float:
    """Return the score that the verifier of a row's generator gives an answer, from 0 to 1.

    Args:
        answer: without its tags.
        row: with `metadata`, which names the generator, and perhaps `parameters`; as of `Generator.row`, or an entry
            of the package that was written as JSON.
        ground_truth: the answer of the row.
    Raises: ValueError for a row without its generator; whatever the verifier raises.
    """
    metadata, parameters = row.get("metadata"), row.get("parameters") or {}
    name = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or name not in load_package().DATASETS or name == "composite":
        raise ValueError(f"the row's metadata names no generator of {GENERATED} as source_dataset: {name!r}")
    has_none = "gt_answer" in row and row["gt_answer"] is None  # there are generators without one right answer
    entry = {
        "question": row.get("question", ""),
        "answer": None if has_none else ground_truth,
        "metadata": metadata,
    }
    if name in _WITH_TUPLES:
        entry["metadata"] = _with_tuples(metadata)
    key = GeneratorSpec(name=name, parameters=parameters).key
    return float(_scoring_dataset(key).score_answer(answer, entry))


def refusals() -> dict[str, str]:
    """Return why generators cannot be used, by name."""
    load_package()
    has_solver = hasattr(sys.modules[_SOLVER], "itersolve")
    return REFUSED if has_solver else {**REFUSED, "zebra_puzzles": f"it needs the package {_SOLVER}; install it"}


@cache
def load_package() -> Any:
    """Return reasoning_gym's module `factory`, in which all generators are registered. Raises: ConfigError."""
    if _SOLVER not in sys.modules and importlib.util.find_spec(_SOLVER) is None:
        sys.modules[_SOLVER] = ModuleType(_SOLVER)  # the package imports it for zebra_puzzles
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, when it is compiled
            package = importlib.import_module(GENERATED)
    except ImportError as error:
        raise ConfigError(
            f"{GENERATED}: the package is not installed ({error}); pip install 'coati-rl[reasoning-gym]'"
        ) from error
    for name, module in [*sys.modules.items()]:
        if module is not None and name.partition(".")[0] == GENERATED:
            _restrict(module)
    return package.factory


def _sympy() -> Any:
    return importlib.import_module("sympy")


def _restrict(module: ModuleType) -> None:
    """Replace `eval` and sympy's `parse_expr` in a module of the package."""
    sympy, names = _sympy(), vars(module)
    for name, value in [*names.items()]:
        if value is sympy:
            names[name] = _RestrictedSympy("sympy")
        elif value is sympy.parse_expr:
            names[name] = _parse_formula
    names["eval"] = _evaluate


class _RestrictedSympy(ModuleType):
    """Stand for sympy in the package's modules, with another `parse_expr`."""

    def __getattr__(self, name: str) -> Any:
        return _parse_formula if name == "parse_expr" else getattr(_sympy(), name)


def _evaluate(text: str) -> Any:
    """Evaluate literals and arithmetic. Raises: ValueError or SyntaxError for anything else."""
    tree = ast.parse(text.strip(), mode="eval")
    other = next((node for node in ast.walk(tree) if not isinstance(node, _LITERALS + _ARITHMETIC)), None)
    if other is not None:
        raise ValueError(f"{type(other).__name__} is neither a literal nor arithmetic")
    return eval(compile(tree, "<answer>", "eval"), {"__builtins__": {}})


def _parse_formula(text: str, *args: Any, **options: Any) -> Any:
    """Parse a formula of numbers, single letters and functions by name. Raises: ValueError for anything else."""
    names = re.findall(r"[^\W\d]\w*", text)
    other = next((name for name in names if len(name) > 1 and not _FUNCTIONS.fullmatch(name)), None)
    if other is not None or "__" in text or re.search(r"[^\w\s+\-*/^().,!]|\.\s*[^\W\d]", text):
        raise ValueError(f"not a formula: {text[:80]!r}")
    return _sympy().parse_expr(text, *args, **options)


@lru_cache(maxsize=8)
def _scoring_dataset(key: str) -> Any:
    """Return a dataset whose verifier is used, and not its rows."""
    return _make_dataset(key, 0)


def _make_dataset(key: str, seed: int) -> Any:
    """Return _CHUNK rows of the package; most generators make them when they are read."""
    name, parameters = json.loads(key)
    return load_package().create_dataset(name, **parameters, seed=seed, size=_CHUNK)


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """Restore NumPy's global generator of random numbers, which one generator seeds."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return {key: _with_tuples(each) for key, each in value.items()} if isinstance(value, dict) else value


def _nearest(name: str, known: Any) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    return f"use {' or '.join(near)}" if near else f"its names are {', '.join(sorted(known))}"
