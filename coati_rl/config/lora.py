"""Set the low-rank adapters that are trained in place of a model's weights."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import field_validator

from coati_rl.config.fields import Needs, Section, execution, experiment
from coati_rl.config.user_paths import OptionalPath

if TYPE_CHECKING:
    from coati_rl.model_files.adapter_files import AdapterSpec


class LoraConfig(Section):
    """Low-rank adapters (LoRA), which are trained in place of the model's weights."""

    NEEDS: ClassVar[Needs] = {"lora_rank": (), "adapter": ()}

    lora_rank: int | None = experiment(
        None, "Train adapters of this rank, with the model's weights as they are; None: the weights are trained.", ge=1
    )
    lora_alpha: float | None = experiment(
        None, "An adapter's product is scaled by ALPHA / rank; default: twice the rank.", metavar="ALPHA", gt=0
    )
    lora_targets: tuple[str, ...] = experiment(
        ("all-linear",),
        "Linear layers with an adapter, by the last parts of their names, such as q_proj,v_proj; all-linear: all but "
        "the head.",
        metavar="NAME,...",
    )
    lora_dropout: float = experiment(
        0.0,
        "Share of an adapter's inputs that is dropped in training; then log-probabilities that are trained are not "
        "those that are scored or sampled.",
        ge=0,
        lt=1,
    )
    use_rslora: bool = experiment(False, "Scale an adapter's product by ALPHA / sqrt(rank) (rsLoRA).")
    adapter: OptionalPath = experiment(
        None,
        "Adapter to begin with, in PEFT's format: a checkpoint of a run with --lora-rank, for example. It has its "
        "rank, scale and layers.",
        metavar="DIRECTORY",
    )
    lora_sync: Literal["merged", "adapter"] = execution(
        "merged",
        "What engines get at a weight sync: the weights with the adapters merged into them, or the adapters alone, "
        "beside the base that engines have loaded (-b vllm), which on the CPU generate about half as fast with one.",
    )
    export: Literal["none", "merged"] = execution(
        "none",
        "merged: after the last checkpoint write the model with its adapters merged to RUN/export, checked as by "
        "coati-rl merge.",
    )
    load_in_4bit: bool = experiment(
        False,
        "Hold the linear layers of the model that adapters are trained of in 4 bits (QLoRA, NF4 of bitsandbytes): 9/16 "
        "byte a weight; a trainer computes with what they stand for.",
    )

    @field_validator("lora_targets", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        names = tuple(value.split(",")) if isinstance(value, str) else value
        if (
            not names
            or not isinstance(names, tuple | list)
            or not all(isinstance(name, str) and name.strip() == name and name for name in names)
        ):
            raise ValueError("give names of layers, like q_proj,v_proj, or all-linear")
        if "all-linear" in names and len(names) > 1:
            raise ValueError("all-linear has every layer; leave the other names out")
        return tuple(names)

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.lora_rank is not None or self.adapter is not None

    @property
    def sent_adapter(self) -> "AdapterSpec | None":
        """Return the adapters that engines get beside the base; None: they get whole weights."""
        return self.spec if self.lora_sync == "adapter" else None

    @property
    def spec(self) -> "AdapterSpec":
        """Return what adapters are trained; those of --adapter must have been read."""
        from coati_rl.model_files.adapter_files import AdapterSpec  # imports torch

        if self.lora_rank is None:
            raise ValueError("without --lora-rank there are no adapters")
        return AdapterSpec(
            rank=self.lora_rank,
            alpha=2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha,
            targets=tuple(sorted(self.lora_targets)),
            dropout=self.lora_dropout,
            is_rank_stabilised=self.use_rslora,
        )
