"""Read the paths of -d and -ed, which may have names, NAME=PATH, and the sources that a path may list, with shares."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from coati_rl.config.user_paths import exists, usable
from coati_rl.errors import ConfigError
from coati_rl.generator_spec import is_generator, parse_generator, split_share

_NAMED = re.compile(r"([A-Za-z0-9][\w.+-]*)=(.+)", re.DOTALL)
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
_WITH_SHARE = re.compile(rf"(.+)=({_NUMBER})", re.DOTALL)
_SHARE = re.compile(rf"({_NUMBER})(,.*)?", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """Name one of the files, directories or datasets that rows are drawn from."""

    path: str
    share: Fraction | None = None  # of the draws, in relation to the others' shares; None: as many as it has rows

    @property
    def is_generator(self) -> bool:
        """Return True for a generator of rows."""
        return is_generator(self.path)


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises: ValueError, also for a name that an object has twice."""

    def named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{twice!r} is given twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=named)


def read_sources(text: str) -> tuple[DataSource, ...]:
    """Return the sources of a text: PATH, or PATH,PATH, or PATH=SHARE,PATH=SHARE. An existing path is one source.

    Raises: ValueError for an empty path, one that cannot be looked up, or a share of 0.
    """
    if exists(text):
        return (DataSource(path=text),)
    sources = []
    for part in text.split(","):
        path, share = _with_share(part)
        if not path.strip():
            raise ValueError("a path is empty; write PATH,PATH or PATH=SHARE,PATH=SHARE")
        if share == 0:
            raise ValueError(f"the share of {path} is 0; leave it out, or give it a share above 0")
        if not is_generator(path):
            usable(path)
        sources.append(DataSource(path=path, share=share))
    return tuple(sources)


def _with_share(part: str) -> tuple[str, Fraction | None]:
    if is_generator(part):
        path, text = split_share(part)
        parse_generator(path)  # ValueError for another form
        if text is not None and not re.fullmatch(_NUMBER, text):
            raise ValueError(f"{part}: the share {text!r} is no number above 0")
        return path, None if text is None else Fraction(text)
    match = None if exists(part) else _WITH_SHARE.fullmatch(part)
    return (match[1], Fraction(match[2])) if match else (part, None)


def shares_of(sources: Sequence[DataSource]) -> tuple[Fraction, ...]:
    """Return the shares of sources, whose sum is 1; none if none has one. Raises: ValueError if only some have one."""
    without = [source.path for source in sources if source.share is None]  # one path may be of two tasks
    if len(without) == len(sources):
        return ()
    if without:
        raise ValueError(f"{without[0]} has no share, and others have; give each a share, PATH=SHARE, or none")
    shares = [source.share for source in sources if source.share is not None]
    return tuple(share / sum(shares) for share in shares)


def check_evaluation_sets(sets: Mapping[str, str] | None) -> None:
    """Raise ValueError for a set whose name is no file's, and for sources with shares: a set is read whole."""
    for name, text in (sets or {}).items():
        for source in read_sources(text):
            if source.share is not None:
                raise ValueError(f"an evaluation set is read whole: leave out the share of {source.path}")
        if not name or "/" in name or name.startswith("."):
            raise ValueError(f"the name {name!r} names metrics and files of results: use letters and digits")


def read_paths(flag: str, texts: Sequence[str], *, needs_names: bool) -> Any:
    """Return what the values of a flag, in order, come to: one path, or paths by name (of JSON, whatever it holds).

    An existing file whose own path has the form NAME=PATH is a path, and NAME=NUMBER is a path with a share. A later
    plain path takes the place of an earlier one, as with any other flag.

    Args:
        flag: for messages.
        texts: at least one.
        needs_names: one path without a name is refused.
    Raises: ConfigError for a name that is given twice, and for paths with and without names.
    """
    last = texts[-1]
    if last.startswith(("{", "[") if needs_names else "{"):
        try:
            return read_json(last)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"""{flag} {last!r}: not JSON ({error}); write '{{"task": "path.jsonl"}}'""") from error
    named: dict[str, str] = {}
    for text in texts:
        match = None if exists(text) else _NAMED.fullmatch(text)
        if match is None or (not needs_names and _SHARE.fullmatch(match[2])):
            continue
        if match[1] in named:
            raise ConfigError(f"{flag} {text}: {match[1]} is named twice; give one file for each name")
        named[match[1]] = match[2]
    if not named and not needs_names:
        return last
    if len(named) < len(texts):
        raise ConfigError(
            f"{flag} {' '.join(texts)}: give every path a name, NAME=PATH{'' if needs_names else ', or one path alone'}"
        )
    return named
