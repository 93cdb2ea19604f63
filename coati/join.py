"""Run `coati-rl join https://HOST:PORT`: roll out prompts of a run on this machine, without a Ray cluster.

Exit code: 0 the run is over, or a signal came and all prompts were given back; 1 the run let this producer go, or could
not be reached any more; 2 what was given does not fit the run, and nothing was started.
"""

import argparse
import functools
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_rl import __version__
from coati_rl.config import Config
from coati_rl.config.cli import build_job
from coati_rl.errors import ConfigError, EngineError, PeerLostError
from coati_rl.processes.actor_process import ActorContext, device_environment
from coati_rl.processes.exit_codes import exit_code_of
from coati_rl.processes.exit_messages import print_lines
from coati_rl.processes.join_address import TOKEN_VARIABLE, token_from
from coati_rl.processes.subreaper import run_under_subreaper
from coati_rl.runtime.join_command import joined_here, leaving

if TYPE_CHECKING:
    from producer.joining.client import JoinConnection

PROG = "coati-rl join"
_PATIENCE_S = 30.0  # for a run that does not answer


def main(arguments: Sequence[str]) -> int:
    """Join in a child process that leaves nothing behind. Returns: the exit code."""
    options = _parser().parse_args(arguments)
    try:
        with joined_here():  # this process, which passes signals on
            return run_under_subreaper(functools.partial(_main, options), prog=PROG)
    except ConfigError as error:
        print_lines(str(error), prog=PROG)
        return 2


def _main(options: argparse.Namespace, scratch: Path) -> int:
    return exit_code_of(lambda: _join(options, scratch), prog=PROG)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Roll out prompts of a run with --join-port.")
    parser.add_argument("address", help="https://HOST:PORT of the run")
    parser.add_argument("--token-file", type=Path, help=f"file with the run's token; default: {TOKEN_VARIABLE}")
    parser.add_argument("--token", help="the token itself, which other users of this machine may see")
    parser.add_argument("--ca", type=Path, help="PEM file of the certificate that the run's is trusted by")
    parser.add_argument("--model", type=Path, help="directory of the run's model; default: the path that the run has")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the engine")
    return parser


def _join(options: argparse.Namespace, scratch: Path) -> None:
    from producer.joining.client import JoinConnection

    token = _token(options)
    say = functools.partial(print_lines, prog=PROG)
    with ExitStack() as stack:
        connection = JoinConnection(options.address, token, ca_file=options.ca, patience_s=_PATIENCE_S)
        stack.callback(connection.close)
        try:
            hello = connection.ask_once("hello").fields
        except PeerLostError as error:
            raise ConfigError(f"{error}; is the run there, and --ca its certificate's?") from error
        config, identity = _fitting(hello, options)
        context = _context(config, options, dtype=hello["dtype"], log_dir=scratch / "logs")
        _set_environment(config, context)
        _work(stack, connection, config, context, identity, say)


def _work(
    stack: ExitStack,
    connection: "JoinConnection",
    config: Config,
    context: ActorContext,
    identity: str,
    say: Any,
) -> None:
    """Load the engine, join, and roll out until the end."""
    from producer.joining.frames import PROTOCOL
    from producer.joining.session import JoinedSession
    from producer.run_engine import load_engine
    from rewards.scorer import scorer_factory

    session = JoinedSession(connection, config, context)
    stack.enter_context(leaving(session.leave))
    reward = scorer_factory(config)()
    stack.callback(reward.close)
    engine = load_engine(config, context)
    stack.callback(engine.close)
    say("the engine is loaded")
    try:
        joined = connection.ask("join", protocol=PROTOCOL, version=__version__, identity=identity)
    except EngineError as error:
        raise ConfigError(str(error)) from error
    connection.use_key(joined.fields["key"])
    session.run(engine, reward, say)


def _token(options: argparse.Namespace) -> str:
    if options.token is not None:
        return token_from(options.token, "--token")
    if options.token_file is not None:
        try:
            return token_from(options.token_file.read_text(encoding="ascii"), f"--token-file {options.token_file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {options.token_file}: {error}; give a readable file") from error
    return token_from(os.environ.get(TOKEN_VARIABLE, ""), f"{TOKEN_VARIABLE} (or --token-file RUN_DIR/join_token)")


def _fitting(hello: Any, options: argparse.Namespace) -> tuple[Config, str]:
    """Return the run's configuration with the model as it is here, and its identity. Raises: ConfigError."""
    from coati_rl.model_files.identity import model_identity
    from producer.joining.frames import PROTOCOL

    theirs, own = (hello["protocol"], hello["version"]), (PROTOCOL, __version__)
    if theirs != own:
        raise ConfigError(
            f"{options.address}: is a run of version {theirs[1]} (protocol {theirs[0]}), and this is {own[1]} "
            f"({own[0]}); install the same version"
        )
    config = build_job(hello["config"], Config)
    model = Path(options.model or config.model.model).absolute()
    if not model.is_dir():
        raise ConfigError(f"--model {model}: is no directory here; give that of the run's model")
    identity = model_identity(model)
    if identity != hello["identity"]:
        raise ConfigError(
            f"--model {model}: has the weights {identity}, and the run was started with {hello['identity']}; give the "
            "model that the run has"
        )
    return config.with_changes(model=str(model)), identity


def _context(config: Config, options: argparse.Namespace, *, dtype: str, log_dir: Path) -> ActorContext:
    from coati_rl.preflight.prepare_generation import engine_device

    log_dir.mkdir(parents=True, exist_ok=True)
    device = engine_device(options.device, width=1)
    return ActorContext(name="joined", log_dir=log_dir, device=device, dtype=dtype, slot=0, num_slots=1)


def _set_environment(config: Config, context: ActorContext) -> None:
    """Set what engines read when they are imported."""
    from producer.engines.environment import engine_environment

    precision = "bf16" if context.dtype == "bfloat16" else "fp32"
    compiles = config.sampling.enforce_eager is False
    os.environ |= {
        **device_environment(context.device, precision),
        **engine_environment(context.device, config.parallel.producer_tensor_parallel_size, compiles=compiles),
    }
