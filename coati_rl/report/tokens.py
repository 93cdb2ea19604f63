"""Split a rollout's tokens into the texts that they stand for, by the tokenizer.json of its model."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coati_rl.run_lengths import decode_runs
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.run_reader.run_directory import RunDirectory
from coati_rl.text import printable

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_DIGITS = 4  # of a log-probability
_HEAD = 0.7  # of the tokens that are shown of a long rollout, the share from its beginning
_MAX_PIECE = 200  # characters of one token


def load_tokenizer(run: RunDirectory) -> Tokenizer | None:
    """Return the tokenizer of the run's model or of its newest checkpoint; None if no file of it is on this machine."""
    model = str(run.config().get("model"))
    directories = [Path(model), *reversed(run.checkpoints())]
    for path in (*(directory / "tokenizer.json" for directory in directories), *_downloaded(model)):
        if path.is_file() and (found := _loaded(path, path.stat().st_mtime_ns)) is not None:
            return found
    return None


def _downloaded(model: str) -> list[Path]:
    """Return the file of a model of the hub if it was downloaded before; nothing is asked for."""
    if not _HUB_NAME.fullmatch(model):
        return []
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "tokenizer.json")
    return [Path(found)] if isinstance(found, str) else []


@lru_cache(maxsize=4)
def _loaded(path: Path, _changed_ns: int) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001, the package raises no narrower type
        return None


def pieces(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of each token; that of a character which takes several is at the last of them.

    Without a tokenizer, or for an id that it does not have, a number stands for the token.
    """
    if tokenizer is None:
        return [f"<{token}>" for token in token_ids]
    stream, found = DecodeStream(skip_special_tokens=False), []
    for token in token_ids:
        try:
            piece = stream.step(tokenizer, token) or ""
        except Exception:  # noqa: BLE001, of an id or bytes that cannot be decoded; no narrower type is raised
            stream, piece = DecodeStream(skip_special_tokens=False), f"<{token}>"
        found.append(printable(piece[:_MAX_PIECE]))
    return found


def token_fields(
    rollout: RecordedRollout, tokenizer: Tokenizer | None, max_tokens: int, ratios: Sequence[float | None] = ()
) -> dict[str, Any] | None:
    """Return what the page shows of a rollout's tokens; None of one that was recorded without them.

    The middle of a long one is left out: "num_left_out" tokens behind the first "gap_at". `ratios`: of the tokens,
    where a replay has written them.
    """
    token_ids = rollout.line.get("token_ids")
    if not token_ids:
        return None
    number, line = len(token_ids), rollout.line
    is_long = number > max_tokens
    head = int(max_tokens * _HEAD) if is_long else number
    tail = number - (max_tokens - head) if is_long else number

    def kept(values: Iterable[Any]) -> list[Any]:
        listed = list(values)
        return listed[:head] + listed[tail:]

    mask = decode_runs(line["loss_mask"], bool).tolist() if "loss_mask" in line else [True] * number
    versions = decode_runs(line["token_versions"], int).tolist()
    logprobs = [None if each is None else float(f"{each:.{_DIGITS}g}") for each in kept(line["rollout_logprobs"])]
    return {
        "pieces": pieces(token_ids[:head], tokenizer) + pieces(token_ids[tail:], tokenizer),
        "logprobs": logprobs,
        "mask": [int(each) for each in kept(mask)],
        "versions": kept(versions),
        **({"ratios": kept(ratios)} if len(ratios) == number else {}),
        **({"gap_at": head, "num_left_out": tail - head} if is_long else {}),
    }
