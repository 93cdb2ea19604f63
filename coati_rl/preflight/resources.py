"""Find the devices and the model of a job, before anything starts."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coati_rl.checkpoint.resumed_run import kept_date
from coati_rl.config.data import DatasetFields
from coati_rl.config.plan import resolve_precision
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import is_adapter
from coati_rl.reading.chat_template import now, set_chat_template, set_variables, writes_date
from coati_rl.reading.conversations import NO_OPTIONS
from coati_rl.torchrun import num_local
from coati_rl.types import Device

if TYPE_CHECKING:
    from coati_rl.model_files.check import Use

Job = TypeVar("Job", bound=TrainingConfig)

_TEKKEN = "tekken.json"


def find_device(
    config: TrainingConfig, *, needed: str, fewer: Callable[[int], str], is_dry_run: bool
) -> tuple[Device, list[str]]:
    """Return the device, and warnings.

    Args:
        config: of the run.
        needed: how many GPUs it takes, for the message.
        fewer: the remedy, for a number of available GPUs.
        is_dry_run: too few are a warning.
    Raises: ConfigError when this machine has too few GPUs.
    """
    import torch

    cluster = config.cluster
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cluster.device == "cpu" or (cluster.device == "auto" and not available and not cluster.master_address):
        return "cpu", []
    if cluster.master_address or available >= num_local(config.num_devices):
        return "cuda", []  # a cluster's GPUs are counted when it is joined
    message = f"{needed}, this machine has {available}"
    if is_dry_run:
        return "cuda", [message]
    raise ConfigError(f"{message}; {fewer(available)}")


def gpu_bytes(config: TrainingConfig) -> int | None:
    """Return the memory of this machine's smallest GPU; None if a job's GPUs are elsewhere, or this machine lacks some.

    The GPUs of a cluster are not known before it is joined, and need not be those of the driver's machine.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.cluster.master_address or count < num_local(config.num_devices):
        return None
    return min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=None)


def precision_warnings(config: TrainingConfig, device: Device) -> list[str]:
    """Return `slow_precision` of a job; none if its processors are elsewhere."""
    instead = "--precision fp32 with -zero 0" if config.parallel.zero_stage > 0 else "--precision fp32"
    precision = resolve_precision(config, device)
    return [] if config.cluster.master_address else slow_precision(precision, device, instead=instead)


def slow_precision(precision: str, device: Device, *, instead: str = "--precision fp32") -> list[str]:
    """Return one warning, with what to use instead, if this CPU has no instructions for a job's bfloat16.

    Products took 5 to 10 times as long as in float32: 4.4 to 8.4 against 35 to 44 GFLOP/s (AMD Zen 3, torch 2.13).
    """
    if device != "cpu" or precision != "bf16" or _has_bf16_products():
        return []
    slow = "this CPU lacks bfloat16 instructions and computes it several times slower than"
    return [f"--precision bf16: {slow} {instead}"]


def _has_bf16_products() -> bool:
    """Return False if torch is known to compute bfloat16 products without oneDNN, one number after the other."""
    import torch

    operations = torch.ops.mkldnn
    return not hasattr(operations, "_is_mkldnn_bf16_supported") or operations._is_mkldnn_bf16_supported()


def sharding_warnings(config: TrainingConfig, device: Device) -> Iterator[str]:
    """Return the settings of sharding that have no effect, or set another one."""
    parallel = config.parallel
    if parallel.zero_stage > 0 and config.model.precision is None and device == "cpu":
        yield f"-zero {parallel.zero_stage} sets --precision bf16: ZeRO keeps float32 masters of bfloat16 weights"
    if parallel.zero_stage > 0 and config.num_copies == 1:
        yield f"-zero {parallel.zero_stage}: has no effect, as there is one data-parallel rank"
    if parallel.plugin == "fsdp2" and config.fsdp_ranks == 1:
        of_all = "there is one trainer" if parallel.num_trainers == 1 else "--fsdp-size and -tp leave one for each part"
        yield f"--plugin fsdp2: shards nothing, as {of_all}"


def resolve_model(model: str, *, is_dry_run: bool, flag: str = "--model") -> Path | None:
    """Return the model's directory; a hub id is taken from the local cache or downloaded. None: only in a dry run.

    Raises: ConfigError, which names `flag`.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if is_adapter(directory):
            raise ConfigError(
                f"{flag} {model}: holds an adapter and not a model; merge it into its base (coati-rl merge), or "
                f"give the base as {flag} and the directory as --adapter, if the command has that flag"
            )
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{flag} {model}: the directory has no config.json; give a model in Hugging Face format")
        return directory.absolute()
    if directory.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1 or directory.parent.is_dir():
        raise ConfigError(f"{flag} {model}: no such directory; give a model directory or a hub id (owner/name)")
    if is_dry_run:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"{flag} {model}: neither a directory nor a model that the hub provides ({type(error).__name__})"
        ) from error


def load_tokenizer(
    directory: Path,
    *,
    chat_template: str | None = None,
    template_date: str | None = None,
    variables: Mapping[str, Any] = NO_OPTIONS,
    needs_chat_template: bool = True,
) -> Any:
    """Load the model's tokenizer.

    Args:
        directory: of the model.
        chat_template: of --chat-template, in place of the model's.
        template_date: that its templates write as today's; None: today's.
        variables: of --chat-template-kwargs, which its templates read.
        needs_chat_template: a tokenizer without one is refused.
    Raises: ConfigError.
    """
    tokenizer = read_tokenizer(directory)
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    elif needs_chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"--model {directory}: the tokenizer has no chat template; use an instruction-tuned model, --chat-template "
            "chatml (or a file), or --input-template"
        )
    set_variables(tokenizer, date=template_date, variables=variables)
    return tokenizer


def load_run_tokenizer(directory: Path, data: DatasetFields, *, needs_chat_template: bool) -> Any:
    """Load the model's tokenizer with the chat template, its date and its variables of these settings.

    Raises: ConfigError.
    """
    return load_tokenizer(
        directory,
        chat_template=data.chat_template,
        template_date=data.template_date,
        variables=data.chat_template_kwargs,
        needs_chat_template=needs_chat_template,
    )


def with_tokenizer(config: Job, directory: Path, *, needs_chat_template: bool) -> tuple[Job, Any]:
    """Return the tokenizer, and the config with the text of --chat-template, if one is given. Raises: ConfigError.

    If templates write today's date, the config has the run's: that of its flag, of its checkpoint, or now.
    """
    data = config.data
    tokenizer = load_run_tokenizer(directory, data, needs_chat_template=needs_chat_template)
    if data.chat_template is not None:
        config = config.with_changes(chat_template=tokenizer.chat_template)
    if writes_date(tokenizer):
        date = data.template_date or kept_date(config.run.checkpoint_path) or now()
        config = config.with_changes(template_date=date)
        set_variables(tokenizer, date=date, variables=data.chat_template_kwargs)
    return config, tokenizer


def read_tokenizer(directory: Path, flag: str = "--model") -> Any:
    """Load a model's tokenizer, in Hugging Face's format where the directory has it, else from Mistral's tekken.json.

    Raises: ConfigError, which names `flag`.
    """
    from transformers import AutoTokenizer

    try:
        if (directory / _TEKKEN).is_file() and not (directory / "tokenizer.json").is_file():
            from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

            return convert_tekken_tokenizer(str(directory / _TEKKEN))
        # Mistral's own class, the default beside a tekken.json, has no offsets of tokens and no template.
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, mistral_format=False)
    except ImportError as error:
        raise ConfigError(f"{flag} {directory}: its {_TEKKEN} needs mistral-common; install it") from error
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{flag} {directory}: the tokenizer cannot be loaded: {error}") from error


def checked_model_config(
    directory: Path, *uses: "Use", flag: str = "--model", precision: str | None = None, is_dry_run: bool = False
) -> tuple[Any, list[str]]:
    """Check a model's files for what is done with it; the arguments are those of `check_model_files`.

    A dry run plans for a directory without any weights, too: they may not have been fetched yet.

    Returns: the transformers config of the model's text part, with the LM head that the files have; and warnings.
    Raises: ConfigError, which names `flag`.
    """
    from coati_rl.model_files.check import check_model_files
    from coati_rl.model_files.stored import has_weights

    if is_dry_run and not has_weights(directory):
        return read_model_config(directory, flag), [f"{flag} {directory} has no weights yet: they are not checked"]
    facts = check_model_files(directory, *uses, where=f"{flag} {directory}", precision=precision)
    config = read_model_config(directory, flag)
    if facts.has_own_head:
        config.tie_word_embeddings = False
    return config, [*facts.warnings]


def positions_of(hf_config: Any) -> int | None:
    """Return the tokens that a model (its transformers config) has positions for; None: unknown, or extended (rope)."""
    limit = getattr(hf_config, "max_position_embeddings", None)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    return limit if isinstance(limit, int) and rope.get("rope_type", "default") == "default" else None


def read_model_config(directory: Path, flag: str = "--model") -> Any:
    """Return the transformers config of the model's text part. Raises: ConfigError, which names `flag`."""
    from coati_rl.model_files.config import read_config

    return read_config(directory, f"{flag} {directory}").get_text_config()
