"""Run `python -m producer serve MODEL ...`: serve a model over HTTP; `coati-rl serve` is the same.

Exit code: 0 ended by SIGTERM, 1 it failed, 2 invalid arguments (nothing was started), 130 interrupted (Ctrl-C).
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from coati_rl.config.cli import parse_job
from coati_rl.config.installed import with_installed
from coati_rl.config.serve import ServeConfig
from coati_rl.processes.exit_codes import exit_code_of
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.subreaper import run_under_subreaper

_PROG = ServeConfig.prog()


def main(arguments: Sequence[str]) -> int:
    """Run a command given by name, and return its exit code."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m producer serve MODEL ...  (serve --help lists the flags)")
        return 0
    if name != "serve":
        sys.stderr.write(f"python -m producer: no command {name!r}; use serve\n")
        return 2
    return serve(rest)


def serve(arguments: Sequence[str]) -> int:
    """Run `serve` with these arguments, in a child process that leaves nothing behind; returns the exit code."""
    return run_under_subreaper(functools.partial(serve_main, arguments), prog=_PROG)


def serve_main(arguments: Sequence[str], _scratch: Path) -> int:
    """Run `serve` in this process. Raises: SystemExit(0) on SIGTERM."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]

    def body() -> None:
        say = functools.partial(print_lines, prog=_PROG)
        config, is_dry_run = parse_job(arguments, ServeConfig)
        config = with_installed(config, say)
        from producer.serve_command import serve_model

        serve_model(config, say=say, is_dry_run=is_dry_run)

    return exit_code_of(body, prog=_PROG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
