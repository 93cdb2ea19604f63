"""Find the base and the adapters that `coati-rl serve` serves, and name the weights of each.

In: --model and --adapter. Out: the base's directory, what requests may name, and the engine's adapters by names that
hold the identity of their weights, so that no name ever stands for two.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from coati_rl.checkpoint.saved_adapter import check_base
from coati_rl.checkpoint.weights import find_weights
from coati_rl.config.serve import ServeConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import AdapterDirectory, is_adapter, read_adapter
from coati_rl.model_files.identity import FINGERPRINT_DIGITS, adapter_identity, model_identity, model_tensors
from coati_rl.model_files.stored import has_weights
from producer.gateway.served_models import ServedModel, ServedModels


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWeights:
    """Hold what is served."""

    base: Path
    named: str  # directory or hub id of the base, as it was given
    adapters: Mapping[str, Path]  # directories, by the name that requests give
    default: str | None = None  # the adapter that --model is; None: --model is the base
    tokenizer: Path  # directory of it

    @property
    def names(self) -> str:
        """Return what is served, for messages."""
        return ", ".join((self.named, *self.adapters))


def served_weights(config: ServeConfig, resolve: Callable[[str, str], Path]) -> ServedWeights:
    """Return the base and the adapters; a --model that is an adapter is served with the base that it names.

    Args:
        config: of the command.
        resolve: returns the directory of a model: of a directory or a hub id, and a flag for messages.
    Raises: ConfigError.
    """
    default: str | None = None
    model, named = config.model.model, config.server.adapters
    found = {name: find_weights(Path(path), f"--adapter {name}={path}") for name, path in named.items()}
    if is_adapter(path := Path(model).expanduser()):
        base = read_adapter(path, f"--model {model}").base
        if not base:
            raise ConfigError(
                f"--model {model}: is an adapter that does not say what its base is; give the base as "
                f"--model and the adapter as --adapter {path.resolve().name}={model}"
            )
        own = path.resolve()
        if own.name in found:
            raise ConfigError(f"--adapter {own.name}: is the name of --model {model}; give another one")
        found, model, default = {own.name: own, **found}, base, own.name
    has_tokenizer = default is not None and (found[default] / "tokenizer_config.json").is_file()
    directory = resolve(model, "--model")
    tokenizer = found[default] if default is not None and has_tokenizer else directory
    weights = ServedWeights(base=directory, named=model, adapters=found, default=default, tokenizer=tokenizer)
    if weights.adapters and config.engine.backend != "vllm":
        raise ConfigError(
            f"-b {config.engine.backend} with an adapter: only vllm serves adapters; use -b vllm, or merge it into its "
            "base (coati-rl merge)"
        )
    for name, directory in found.items():
        _check_fit(directory, weights.base, f"--adapter {name}={directory}")
    return weights


def named_models(weights: ServedWeights) -> tuple[ServedModels, dict[str, str]]:
    """Return what requests may name, and the directories of the engine's adapters by its names; all weights are read.

    A base of files that are not read here, of a format of its own, has no fingerprint.

    Raises: ConfigError for a name that is given twice, and for damaged files of adapters.
    """
    name = Path(weights.named).name
    if name in weights.adapters:
        raise ConfigError(f"--adapter {name}: is the name of the base; give another one")
    identity: str | None = None
    try:
        identity = model_identity(weights.base) if has_weights(weights.base) else None
    except ConfigError:
        if weights.adapters:
            raise
    base = ServedModel(name=name, fingerprint=_short(identity))
    adapted, directories = [], dict[str, str]()
    for its_name, directory in weights.adapters.items():
        own = adapter_identity(directory, identity or "", f"--adapter {its_name}")
        lora = f"{its_name}@{own}"
        directories[lora] = str(directory)
        adapted.append(ServedModel(name=its_name, fingerprint=_short(own), lora=lora, parent=name))
    models = sorted((base, *adapted), key=lambda model: model.name != (weights.default or name))
    return ServedModels(*models), directories


def _short(identity: str | None) -> str | None:
    return None if identity is None else identity[:FINGERPRINT_DIGITS]


def _check_fit(directory: Path, base: Path, where: str) -> None:
    """Raise ConfigError for an adapter that an engine cannot add to the base, or that is of another one."""
    if not is_adapter(directory):
        raise ConfigError(f"{where}: holds a whole model; serve it as --model")
    adapter = read_adapter(directory, where)
    plain = (".lora_A.weight", ".lora_B.weight")
    further = [name for name in adapter.shapes if not name.endswith(plain) or "lm_head." in name]
    if adapter.has_scalar_head or further:
        what = "a scalar head" if adapter.has_scalar_head else further[0]
        raise ConfigError(f"{where}: holds {what}, too, and engines add adapters alone; merge it (coati-rl merge)")
    check_base(directory, base, where)
    shapes = {name: tuple(each.meta.shape) for name, each in model_tensors(base).items()}
    problems = [*adapter_misfits(adapter, shapes)]
    if problems:
        more = f" and {len(problems) - 1} more" if problems[1:] else ""
        raise ConfigError(f"{where}: does not fit the base {base}: {problems[0]}{more}; give the one it was trained on")


def adapter_misfits(adapter: AdapterDirectory, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield what of an adapter does not fit a base. `shapes`: of the base's tensors, by name."""
    for name, shape in adapter.shapes.items():
        layer, _, factor = name.removesuffix(".weight").rpartition(".")
        weight = shapes.get(f"{layer}.weight")
        if weight is None:
            yield f"{layer} is no layer that takes an adapter"
        elif shape != ((adapter.spec.rank, weight[1]) if factor == "lora_A" else (weight[0], adapter.spec.rank)):
            yield f"{name} has shape {shape}, and {layer} {weight}"
