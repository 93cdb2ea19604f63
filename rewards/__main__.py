"""Run `python -m rewards score|serve`: score JSON lines, or serve scores to runs on other machines.

Usage: `score --type TYPE < in.jsonl > out.jsonl`. An input line is {"response": str} with "gt_answer" (text or a
number) or "test_cases" ({"inputs": [...], "outputs": [...]}, and "fn_name" for tests that call a function) if the
reward needs them, and optionally "messages", "prompt" and columns that a user's function takes. An output line is
{"reward", "answer_correct", "format_valid", "verdict", "detail"}, and "breakdown" with several rewards.

Exit code 0: all lines were scored, with any verdict, or `serve` was ended by SIGTERM. 2: an argument or a line is
invalid (one message on stderr, nothing is scored). 1: scoring itself failed. 130: Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from coati_rl.processes.exit_codes import exit_code_of
from rewards.commands import score_command


def main(arguments: Sequence[str] | None = None, prog: str = "python -m rewards") -> int:
    """Run the command line, named `prog` in its messages. Returns: the exit code.

    Raises: SystemExit(2) by argparse for invalid arguments.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(prog, with_serve=not arguments or arguments[0] != "score")
    options = parser.parse_args(arguments)
    try:
        return exit_code_of(lambda: options.run(options), prog="rewards")
    except BrokenPipeError:
        # The reader of the output has closed it. The interpreter flushes stdout at exit: let it write to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def score(arguments: Sequence[str]) -> int:
    """Run `score` with these arguments."""
    return main(["score", *arguments], prog="coati-rl")


def serve(arguments: Sequence[str]) -> int:
    """Run `serve` with these arguments."""
    return main(["serve", *arguments], prog="coati-rl")


def _parser(prog: str, *, with_serve: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Scores responses outside of a run.")
    commands = parser.add_subparsers(required=True, metavar="score|serve")
    score = commands.add_parser("score", help="score JSON lines from stdin to stdout")
    score_command.add_arguments(score)
    score.set_defaults(run=score_command.score_command)
    if with_serve:
        from rewards.commands import serve_command  # `score` does not import the web server

        serve = commands.add_parser("serve", help="score over HTTP, for runs on this machine or others")
        serve_command.add_arguments(serve)
        serve.set_defaults(run=serve_command.serve_command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
