"""Serve models by Tinker's API over HTTP, until a signal: `coati-rl tinker-serve`.

Consumes: HTTP requests. Waits for: requests. Is unblocked by: SIGINT or SIGTERM, after which another server of the same
--root goes on. It uses plain HTTP: for other machines use a TLS proxy.
"""

import argparse
import functools
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coati_rl.errors import ConfigError
from coati_rl.flag_numbers import integer_from, positive
from coati_rl.processes.exit_codes import exit_code_of
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.http_server import ReadyServer, is_loopback, listen_as_told, server_config, url_of
from coati_rl.processes.subreaper import run_under_subreaper
from coati_rl.tinker.bases import Base
from coati_rl.tinker.limits import KEY_PREFIX, Keys, Limits

PROG = "coati-rl tinker-serve"
_MIN_KEY = 16  # characters
_NAME = re.compile(r"[\w./:-]{1,200}", re.ASCII)
_KEY = re.compile(r"[!-~]+")
_REACHABLE_S = 120  # that a connection is kept without a request


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Say how the parts of base models compute."""

    device: str  # "auto", "cpu" or "cuda"
    precision: str | None  # "fp32" or "bf16"; None: by the device
    max_tokens: int | None  # None: the model's positions, at most 8192
    sampler: str  # "transformers" or "vllm"


MakeBase = Callable[[str, Path, Parts], Base]


def run_command(arguments: Sequence[str], make_base: MakeBase) -> int:
    """Run the command. Returns: the exit code.

    Args:
        arguments: of the command line.
        make_base: makes a base model of its name, its directory, and how it computes; raises ConfigError.
    """
    return run_under_subreaper(functools.partial(_main, arguments, make_base), prog=PROG)


def _main(arguments: Sequence[str], make_base: MakeBase, _scratch: Path) -> int:
    say = functools.partial(print_lines, prog=PROG)
    logging.basicConfig(level=logging.INFO, format=f"{PROG}: %(message)s")
    try:
        return exit_code_of(lambda: _serve(_parser().parse_args(arguments), make_base, say), prog=PROG)
    finally:
        gc.freeze()  # so that the end of the interpreter does not look at all that was imported


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Serve models by Tinker's API, until Ctrl-C.")
    add, count = parser.add_argument, integer_from(1)
    add("--model", action="append", required=True, metavar="NAME=DIR", help="a base model, by the name clients use")
    add("--root", type=Path, required=True, metavar="DIR", help="checkpoints, and what a restart goes on from")
    add("--host", default="127.0.0.1", help="address to listen on; another one than loopback needs keys")
    add("--port", type=int, default=8123, help="port; 0 picks a free one, which is printed")
    add("--key", action="append", default=[], metavar="NAME=KEY", help="a key, tml-..., and who it belongs to")
    add("--keys-file", type=Path, metavar="FILE", help="lines of NAME=KEY, which other users cannot read from here")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="what computes")
    add("--precision", choices=["fp32", "bf16"], help="of base models; default: bf16 on GPUs, else fp32")
    add("--sampler", choices=["transformers", "vllm"], default="transformers", help="what samples")
    add("--max-tokens", type=count, metavar="N", help="of a sequence; default: the model's positions, at most 8192")
    limits = Limits()
    add("--max-models", type=count, default=limits.max_models, metavar="N", help="of a key at a time")
    most_gib = limits.max_checkpoint_bytes / 2**30
    add("--max-checkpoint-gib", type=positive, default=most_gib, help="of a key's checkpoints")
    add("--max-in-flight", type=count, default=limits.max_in_flight, metavar="N", help="unanswered requests of a key")
    add("--session-timeout-s", type=positive, default=limits.session_timeout_s, help="without a client's heartbeat")
    add("--poll-s", type=positive, default=limits.poll_s, help="that a call waits for an answer; a proxy may need less")
    add("--save-steps", type=count, default=limits.save_steps, metavar="N", help="between automatic checkpoints")
    return parser


def _serve(given: argparse.Namespace, make_base: MakeBase, say: Callable[[str], None]) -> None:
    models, keys = _models(given.model), _keys(given)
    if not keys.owners and not is_loopback(given.host):
        raise ConfigError(f"--host {given.host}: other machines could use the models without a key; add --keys-file")
    limits = Limits(
        max_models=given.max_models,
        max_checkpoint_bytes=int(given.max_checkpoint_gib * 2**30),
        max_in_flight=given.max_in_flight,
        session_timeout_s=given.session_timeout_s,
        save_steps=given.save_steps,
        poll_s=given.poll_s,
    )
    if given.sampler == "vllm" and len(models) > 1:
        raise ConfigError("--sampler vllm: a process holds one engine; give one --model, or use --sampler transformers")
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # before torch is imported
    parts = Parts(device=given.device, precision=given.precision, max_tokens=given.max_tokens, sampler=given.sampler)
    with listen_as_told(given.host, given.port) as listener:
        from coati_rl.tinker.app import make_app
        from coati_rl.tinker.service import Service

        bases = {name: make_base(name, directory, parts) for name, directory in models.items()}
        service = Service(bases, given.root, keys=keys, limits=limits)
        told = f"serving {', '.join(models)} on {url_of(listener)}, checkpoints in {service.root}"
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn ends its replies, and raises the signal again
        options = {"lifespan": "on", "timeout_keep_alive": _REACHABLE_S}
        ReadyServer(server_config(make_app(service), **options), on_ready=lambda: say(told)).run([listener])


def _models(texts: Sequence[str]) -> Mapping[str, Path]:
    found: dict[str, Path] = {}
    for text in texts:
        name, _, directory = text.rpartition("=")
        name = name or directory
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--model {text}: give NAME=DIR; a name has letters, digits and . / : _ -")
        if name in found:
            raise ConfigError(f"--model {text}: {name} is given twice")
        if not (Path(directory) / "config.json").is_file():
            raise ConfigError(f"--model {text}: {directory} has no config.json; give a model in Hugging Face format")
        found[name] = Path(directory).absolute()
    return found


def _keys(given: argparse.Namespace) -> Keys:
    lines = [("--key", each) for each in given.key]
    if given.keys_file is not None:
        try:
            text = given.keys_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--keys-file {given.keys_file}: cannot be read: {error}") from error
        lines += [("--keys-file", each.strip()) for each in text.splitlines() if each.strip()]
    owners: dict[str, str] = {}
    for flag, line in lines:
        owner, _, key = line.partition("=")
        if (
            not _NAME.fullmatch(owner)
            or not _KEY.fullmatch(key)
            or not key.startswith(KEY_PREFIX)
            or len(key) < _MIN_KEY
        ):
            raise ConfigError(
                f"{flag} {owner}=...: give NAME=KEY with a key of at least {_MIN_KEY} characters that begins with "
                f"{KEY_PREFIX}: python -c 'import secrets; print(\"{KEY_PREFIX}\" + secrets.token_hex(16))'"
            )
        if key in owners:
            raise ConfigError(f"{flag} {owner}=...: this key is {owners[key]}'s already")
        owners[key] = owner
    return Keys(owners=owners)
