"""Say which weights a directory holds, and how two differ: `coati-rl weights PATH [OTHER] [--json]`."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coati_rl.checkpoint.weights import Comparison, Weights, compare, relation, weights_of
from coati_rl.errors import ConfigError

_PROG = "coati-rl weights"
_MAX_NAMED = 10  # tensors of a kind of difference, without --json


def main(arguments: Sequence[str]) -> int:
    """Run `weights` and return its exit code: 2 for what is no model, adapter, checkpoint or run."""
    parser = argparse.ArgumentParser(prog=_PROG, description=(__doc__ or "").partition(":")[0] + ".")
    what = "directory of a model, an adapter, a checkpoint or a run, whose newest complete checkpoint is taken"
    parser.add_argument("path", type=Path, metavar="PATH", help=what)
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER", help="weights to compare with")
    parser.add_argument("--base", type=Path, metavar="DIRECTORY", help="base of adapters; default: the one they name")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with every tensor that differs")
    parsed = parser.parse_args(arguments)
    try:
        found = [weights_of(path, str(path), base=parsed.base) for path in (parsed.path, parsed.other) if path]
        comparison = compare(*found) if len(found) == 2 else None
    except ConfigError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return 2
    text = json.dumps(_as_json(found, comparison)) if parsed.json else "\n".join(_lines(found, comparison))
    sys.stdout.write(f"{text}\n")
    return 0


def _as_json(found: Sequence[Weights], comparison: Comparison | None) -> dict[str, Any]:
    told = [_told(weights) for weights in found]
    if len(told) == 1:
        return told[0]
    tensors = None
    if comparison is not None:
        tensors = {
            "equal": comparison.num_equal,
            "missing": comparison.missing,
            "unknown": comparison.unknown,
            "shapes": comparison.shapes,
            "dtypes": comparison.dtypes,
            "largest_difference": comparison.largest,
        }
    return {**told[0], "other": told[1], "relation": relation(*found), "tensors_compared": tensors}


def _told(weights: Weights) -> dict[str, Any]:
    told = {
        "path": str(weights.path),
        "directory": str(weights.directory),
        "kind": "model" if weights.adapter is None else "adapter",
        "identity": weights.identity,
        "tensors": len(weights.tensors),
        "parameters": weights.num_parameters,
    }
    if weights.adapter is None:
        return told
    base = {
        "identity": weights.base_identity,
        "directory": None if weights.base_directory is None else str(weights.base_directory),
    }
    spec = weights.adapter.spec
    return {**told, "rank": spec.rank, "scale": spec.scale, "is_zero": weights.is_zero, "base": base}


def _lines(found: Sequence[Weights], comparison: Comparison | None) -> Iterator[str]:
    for weights in found:
        kind = "model" if weights.adapter is None else "adapter"
        size = f"{len(weights.tensors)} tensors, {weights.num_parameters} parameters"
        yield f"{weights.identity}  {kind} {weights.directory} ({size})"
        if weights.adapter is not None:
            spec = weights.adapter.spec
            zero = ", changes nothing" if weights.is_zero else ""
            where = weights.base_directory or f"{weights.adapter.base or 'its base'}, which is not here"
            yield f"  rank {spec.rank}, scale {spec.scale:g}{zero}; base {weights.base_identity} {where}"
    if len(found) == 2:
        yield relation(*found)
    if comparison is not None:
        yield from _differences(comparison)


def _differences(found: Comparison) -> Iterator[str]:
    yield f"equal tensors: {found.num_equal}"
    shapes = [f"{name}: {list(one)} and {list(other)}" for name, (one, other) in found.shapes.items()]
    dtypes = [f"{name}: {one} and {other}" for name, (one, other) in found.dtypes.items()]
    largest = [f"{name}: {each:.3g}" for name, each in sorted(found.largest.items(), key=lambda item: -item[1])]
    kinds = (
        ("missing in the first", found.missing),
        ("only in the first", found.unknown),
        ("of other shapes", shapes),
        ("of other dtypes", dtypes),
        ("largest differences", largest),
    )
    for title, lines in kinds:
        if lines:
            yield f"{title}: {len(lines)}"
            yield from (f"  {line}" for line in lines[:_MAX_NAMED])
            if len(lines) > _MAX_NAMED:
                yield f"  and {len(lines) - _MAX_NAMED} more (--json has all)"
