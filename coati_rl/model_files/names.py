"""Compare the tensors of a model's files with the parameters of its architecture, before or after they are loaded.

transformers says itself what is missing: given tensors on torch's meta device, which have shapes and no memory, it
loads them by its own renamings, conversions (experts that are stacked, dequantisation) and lists of what an
architecture may lack.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor

from coati_rl.errors import ConfigError
from coati_rl.model_files.quiet import held_load_report, no_progress_bars

_MAX_NAMED = 3  # tensors named in a message
_STYLE = re.compile(r"\x1b\[[\d;]*m")  # of a terminal

Mismatch = tuple[str, Size, Size]  # name, shape in the file, shape of the model


@dataclass(frozen=True, kw_only=True, slots=True)
class NameDifferences:
    """Hold how a model's files and its architecture differ, by tensor names of the architecture."""

    architecture: str  # name of the class
    missing: tuple[str, ...] = ()  # of the files
    unexpected: tuple[str, ...] = ()  # in the files
    mismatched: tuple[Mismatch, ...] = ()
    left_out: tuple[str, ...] = ()  # in the files; the architecture says that it does without, as without images

    @classmethod
    def of_report(
        cls, model: Any, report: Mapping[str, Any], tensors: Mapping[str, Tensor], *, has_new_head: bool = False
    ) -> "NameDifferences":
        """Return what transformers reports of a loaded model.

        Args:
            model: that was loaded.
            report: of `from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)`.
            tensors: of the files by name, on any device.
            has_new_head: heads are meant to differ: what is outside of the base model does not count.
        """
        base = f"{model.base_model_prefix}." if has_new_head else ""
        # A scalar or a mask that the model does not have is no parameter: it is a buffer of older versions of
        # transformers, such as GPT-2's attn.masked_bias.
        buffers = {name for name, each in tensors.items() if not each.dim() or each.dtype is torch.bool}
        unexpected = {*report["unexpected_keys"]} - buffers
        return cls(
            architecture=type(model).__name__,
            missing=tuple(sorted(name for name in report["missing_keys"] if name.startswith(base))),
            unexpected=tuple(sorted(name for name in unexpected if name.startswith(base))),
            mismatched=tuple(sorted(report["mismatched_keys"])),
            left_out=tuple(sorted(_matrices_left_out(model, tensors))),
        )

    def check(self, where: str) -> None:
        """Raise ConfigError, which begins with `where`, if there is a difference."""
        problems = [*self._problems()]
        if problems:
            raise ConfigError(f"{where}: its weight files and {self.architecture} differ: {'; '.join(problems)}")

    def warnings(self, where: str) -> list[str]:
        """Return what a checkpoint of the model will lack, each line beginning with `where`."""
        if not self.left_out:
            return []
        return [
            f"{where}: {self.architecture} leaves out {_named(self.left_out)}: they are not trained, and checkpoints "
            "of all weights lack them; an adapter (--lora-rank) that is merged into its files (coati-rl merge) has them"
        ]

    def _problems(self) -> Iterator[str]:
        prefix = _common_prefix(self.missing, self.unexpected)
        if prefix:
            yield (
                f"all names in the files begin with {prefix!r}, as {self.unexpected[0]}; save the model that is inside "
                "of the wrapper (of PEFT: merge_and_unload)"
            )
            return
        if self.missing:
            yield (
                f"the files lack {_named(self.missing)}, which would start at random values; download or save the "
                "model again, or correct config.json"
            )
        if self.unexpected:
            yield (
                f"{self.architecture} has no {_named(self.unexpected)}, which would be left out; correct config.json, "
                "or save the model without"
            )
        if self.mismatched:
            shapes = [f"{name} has the shape {[*found]} instead of {[*own]}" for name, found, own in self.mismatched]
            yield f"{_named(shapes)}; correct config.json"


def compare(
    build: Callable[[Any], Any], config: Any, tensors: Mapping[str, Tensor], *, has_new_head: bool = False
) -> NameDifferences:
    """Compare tensors on the meta device with an architecture.

    Args:
        build: makes a model of transformers from its config, such as AutoModelForCausalLM.from_config.
        config: transformers config of the model.
        tensors: of the files by name.
        has_new_head: as of `NameDifferences.of_report`.
    Raises: ValueError if the model cannot be built from the config, or the tensors cannot be converted for it.
    """
    told: list[str] = []
    try:
        with held_load_report() as told:
            model, report = load_on_meta(build, config, tensors)
    except Exception as error:  # the class's own code, with whatever values config.json has
        if names := _not_converted("\n".join(told)):
            raise ValueError(
                f"the weight files do not give {_named(names)} of {config.model_type}: a part of it is missing or has "
                "another shape; download or save the model again"
            ) from error
        what = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"config.json: no {config.model_type} can be built from it and the weight files: {type(error).__name__}: "
            f"{what}"
        ) from error
    return NameDifferences.of_report(model, report, tensors, has_new_head=has_new_head)


def load_on_meta(build: Callable[[Any], Any], config: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    """Return a model without memory that knows the names of its files, and transformers' report; see `compare`."""
    with torch.device("meta"), no_progress_bars():
        built = build(config)
        model, report = type(built).from_pretrained(
            None,
            config=built.config,
            state_dict=dict(tensors),
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    return model, report


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _not_converted(report: str) -> list[str]:
    """Return the parameters that several tensors make up, such as stacked experts, and that could not be made."""
    rows = [_STYLE.sub("", line).split("|") for line in report.splitlines() if "CONVERSION" in line and "|" in line]
    return sorted({row[0].strip() for row in rows})


def _matrices_left_out(model: Any, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the weights that a class of transformers does not load and does not report.

    Vectors, scalars and masks are left to it: they are buffers of older versions, such as rotary_emb.inv_freq and
    GPT-2's attn.bias.
    """
    patterns = [*map(re.compile, getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    own = {*model.state_dict()}
    for name, each in tensors.items():
        is_matrix = each.dim() > 1 and each.is_floating_point() and not name.endswith(".bias")
        if is_matrix and name not in own and any(pattern.search(name) for pattern in patterns):
            yield name


def _common_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return what comes before each name in the files, if it is all that keeps them from being the architecture's."""
    ends = [name for name in missing if unexpected and unexpected[0].endswith(name)]
    prefix = unexpected[0].removesuffix(max(ends, key=len)) if ends else ""
    is_all = all(name.startswith(prefix) and name.removeprefix(prefix) in missing for name in unexpected)
    return prefix if prefix and is_all else ""
