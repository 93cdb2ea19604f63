"""Run `coati-rl COMMAND ...`, which `pip install .` puts on the path; only the chosen command is imported."""

import sys
from collections.abc import Sequence
from importlib import import_module

from coati_rl import __version__
from coati_rl.standard_streams import open_closed_streams

# Jobs on a dataset: the same function runs each by its name.
JOBS = {
    "sft": "fine-tune on conversations or text",
    "rm": "train a reward model on pairs of completions",
    "dpo": "train on preferences: DPO, IPO, SimPO, ORPO and others",
    "kto": "train on completions labelled desirable or undesirable",
    "prm": "train a process reward model on solutions with labelled steps",
    "value": "train a critic on the rollouts of a run, for PPO to begin with",
}
# Name -> "module:function" of a function from arguments to exit code, and what --help says of it. The modules are above
# this package in the order of imports, so they are named here and imported when they run.
COMMANDS = {
    "rl": ("rl_example:run", "train a policy with producers, trainers and verifiable rewards (rl_example.py)"),
    **{name: ("consumer.__main__:main", summary) for name, summary in JOBS.items()},
    "rehearse": ("coati_rl.rehearsal.command:main", "try a training command on the CPU, small, before it is started"),
    "generate": ("rl_generate:run", "sample, score and write responses to the prompts of a dataset (rl_generate.py)"),
    "score": ("rewards.__main__:score", "score responses: JSON lines from stdin to stdout"),
    "show": ("coati_rl.run_reader.show:main", "print a run's rollouts as conversations, best and worst first"),
    "report": ("coati_rl.report.report_command:main", "write runs as one HTML file: curves, health, time, rollouts"),
    "watch": ("coati_rl.report.watch_command:main", "serve the same page on this machine while a run goes on"),
    "replay": ("coati.replay:main", "recompute an optimizer step from a run's files, and say what differs first"),
    "doctor": ("coati_rl.doctor.command:main", "check this machine, or name the causes of what a run shows"),
    "install-engines": (
        "coati_rl.doctor.install_engines:main",
        "add to vLLM what pip alone cannot: ColossalAI",
    ),
    "plot": ("coati_rl.observability.plot:main", "plot rewards, accuracies and losses of runs in one figure"),
    "merge": ("consumer.merge_command:main", "merge an adapter into its base: a Hugging Face model, checked"),
    "weights": ("coati_rl.checkpoint.weights_command:main", "say which weights a directory holds, and how two differ"),
    "serve": ("producer.__main__:serve", "serve a model over HTTP by OpenAI's API"),
    "tinker-serve": ("coati.tinker_serve:main", "serve training and sampling of many adapters by Tinker's API"),
    "join": (
        "coati_rl.runtime.join_command:join",
        "join a run with this machine: its Ray cluster (--max-producers) or its --join-port",
    ),
    "leave": ("coati_rl.runtime.join_command:leave", "leave it: producers here give their prompts back first"),
    "serve-rewards": ("rewards.__main__:serve", "serve scores over HTTP to runs on this machine or others"),
}


def usage() -> str:
    """Return the text of --help."""
    lines = [f"  {name:<17}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: coati-rl COMMAND ...", "", "commands:", *lines, "", "coati-rl COMMAND --help lists a command's flags."]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; 2 for a command that does not exist."""
    open_closed_streams()
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(usage() + "\n")
        return 0
    if name == "--version":
        sys.stdout.write(f"coati-rl {__version__}\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(f"coati-rl: no command {name!r}; use one of {', '.join(COMMANDS)}\n")
        return 2
    if name == "serve" and any(word.partition("=")[0] == "--type" for word in rest):
        name = "serve-rewards"  # as it was called before models were served
    module, _, function = COMMANDS[name][0].partition(":")
    exit_code: int = getattr(import_module(module), function)([name, *rest] if name in JOBS else rest)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
