"""Assemble the page: one HTML file with its style, its program and its data, which loads nothing from elsewhere.

What models have said is data: JSON in an element that is not executed, every "<" of it escaped, put into the page as
text. The page's policy (Content-Security-Policy) admits its own style and program by their digests, and nothing else.
"""

import base64
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.report.escaped_json import as_json
from coati_rl.report.run_data import add_steps, number_of_steps, page_data, read_runs
from coati_rl.run_reader.run_directory import ANNOTATIONS
from coati_rl.text import count

MAX_BYTES = 5_000_000  # of a report
_SCRIPTS = (
    "elements.js",
    "charts.js",
    "curves.js",
    "groups.js",
    "rollouts.js",
    "time.js",
    "settings.js",
    "live.js",
    "main.js",
)
_STATIC = files("coati_rl.report") / "static"


def html_page(data: Mapping[str, Any], *, title: str, is_live: bool = False) -> bytes:
    """Return the page of some data. A live one may ask its own server, and none else."""
    style = (_STATIC / "page.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join((_STATIC / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    policy = [
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "connect-src 'self'" if is_live else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    parts = {"title": html.escape(title), "policy": "; ".join(policy), "style": style, "script": script}
    template = (_STATIC / "page.html").read_text(encoding="utf-8")
    before, after = re.sub(r"\{(title|policy|style|script)\}", lambda found: parts[found[1]], template).split("{data}")
    return before.encode() + as_json(data) + after.encode()


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def report(paths: Sequence[Path], *, steps: Sequence[int] = (), max_bytes: int = MAX_BYTES) -> bytes:
    """Return the page of runs.

    Args:
        steps: of which rollouts are shown besides those that are chosen evenly.
        max_bytes: no page is larger; groups and rollouts fill what the rest leaves.
    Raises: ConfigError if a run cannot be read.
    """
    runs = read_runs(paths)
    data = page_data(runs)
    title = " · ".join(run.label for run in runs)
    room = max_bytes - len(html_page(data, title=title)) - 2000 * len(runs)
    number = number_of_steps(runs, room)
    for run, fields in zip(runs, data["runs"], strict=True):
        add_steps(run, fields, run.steps_to_show(number, steps), room // len(runs))
    _check_steps(steps, data)
    page = html_page(data, title=title)
    # Escapes take room, too. Of a single one nothing is left.
    while len(page) > max_bytes and any(fields["rollouts"] or fields["groups"] for fields in data["runs"]):
        for fields in data["runs"]:
            for name in ("rollouts", "groups"):
                fields[name] = fields[name][::2] if len(fields[name]) > 1 else []
            fields["read"]["is_halved"] = True
        page = html_page(data, title=title)
    if len(page) > max_bytes:
        raise ConfigError(
            f"{count(len(runs), 'run')}: the page would have {len(page):,} bytes without rollouts, of which "
            f"{max_bytes:,} are allowed; give fewer runs, or move their {ANNOTATIONS} away"
        )
    return page


def _check_steps(steps: Sequence[int], data: Mapping[str, Any]) -> None:
    """Raise ConfigError for a step that was asked for and has rollouts in no run."""
    found = {step for fields in data["runs"] for step in fields["read"].get("steps", ())}
    if missing := [step for step in steps if step not in found]:
        raise ConfigError(f"--steps {','.join(map(str, missing))}: no rollout is recorded for it; leave it out")
