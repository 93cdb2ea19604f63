"""Serve one adapter with vLLM beside the base that it has loaded: an engine's requests, and the tensors in its workers.

There is one slot, in which each commit puts other tensors, between two steps. Requests name the version, as vLLM's
prefix cache does: keys and values of another version are never found under the name of this one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coati_rl.errors import EngineError
from coati_rl.model_files.adapted_layers import A
from coati_rl.model_files.adapter_files import PREFIX, AdapterSpec
from producer.engines.admission import RequestRefusedError
from producer.engines.vllm_served_adapters import RANKS, allocated_rank

SLOT = 1  # vLLM's number of the adapter, whatever its version
_NO_FILE = "/nonexistent: the tensors of an adapter are received, not read"
_MAX_NAMED = 3  # layers in a message


class SyncedAdapter:
    """Hold what requests of an engine have to run with."""

    def __init__(self, spec: AdapterSpec | None) -> None:
        """Begin without an adapter. `spec`: of those that are received; None: updates hold whole weights."""
        self.spec = spec
        self._request: Any = None

    def engine_args(self, names: Iterable[str]) -> dict[str, Any]:
        """Return vLLM's arguments, by name. `names`: of the adapter's tensors."""
        if self.spec is None:
            return {}
        allocated = allocated_rank(self.spec.rank)
        if allocated is None:
            raise EngineError(f"vLLM takes adapters of ranks up to {RANKS[-1]}, and this one has {self.spec.rank}")
        return {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": allocated,
            # Without the list vLLM wraps the LM head, too, whose log-probabilities of prompts then end a CPU engine.
            "lora_target_modules": _targets(_layers(names)),
        }

    def to_json(self, names: Iterable[str]) -> str:
        """Return what workers need to know, empty without adapters; see `WorkerAdapter`. `names`: as above."""
        if self.spec is None:
            return ""
        layers = _layers(names)
        peft = self.spec.as_peft(base="", has_scalar_head=False, targets=tuple(_targets(layers)))
        return json.dumps({"peft": peft, "layers": layers})

    def request(self) -> Any:
        """Return vLLM's request for the serving adapter, of all requests; None where updates hold whole weights.

        Raises: RequestRefusedError before the first adapter, as the base alone is no version of the policy.
        """
        if self.spec is not None and self._request is None:
            raise RequestRefusedError("no adapter was received yet, and the base alone is no version of the policy")
        return self._request

    def check(self, output: Any) -> None:
        """Raise EngineError for an output of vLLM that was sampled without an adapter where there has to be one."""
        if self.spec is not None and (output.lora_request is None or output.lora_request.lora_int_id != SLOT):
            raise EngineError(f"request {output.request_id} ran without the adapter")

    def commit(self, policy_version: int) -> None:
        """Name the adapter that serves from now on. Running requests keep its former name, and the same slot."""
        if self.spec is None:
            return
        from vllm.lora.request import LoRARequest

        self._request = LoRARequest(f"version {policy_version}", SLOT, _NO_FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerAdapter:
    """Put received adapters in the slot of a worker's model."""

    peft: Mapping[str, Any]  # contents of adapter_config.json
    manager: Any  # vLLM's WorkerLoRAManager

    @staticmethod
    def prepared(text: str, manager: Any) -> "WorkerAdapter":
        """Parse what the engine says, and check it against the model. Raises: EngineError if a layer takes none."""
        fields = json.loads(text)
        adapter = WorkerAdapter(peft=fields["peft"], manager=manager)
        adapter._check_layers(fields["layers"])
        return adapter

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the adapter; no step may be running. `tensors`: by PEFT's names; they are copied."""
        from vllm.lora.lora_model import LoRAModel

        adapters = self.manager._adapter_manager
        lora = LoRAModel.from_lora_tensors(
            SLOT,
            {name: tensor.detach().cpu().clone() for name, tensor in tensors},  # vLLM keeps and scales them
            self._helper(),
            device="cpu",
            dtype=self.manager.lora_config.lora_dtype,
            model_vocab_size=self.manager.vocab_size,
            weights_mapper=self._mapper(),
        )
        adapters.remove_adapter(SLOT)
        adapters.add_adapter(lora)
        adapters.activate_adapter(SLOT)
        if SLOT not in adapters.lora_index_to_id:
            raise EngineError("vLLM has not taken the adapter")

    def _helper(self) -> Any:
        from vllm.lora.peft_helper import PEFTHelper

        helper = PEFTHelper.from_dict(dict(self.peft))
        helper.validate_legal(self.manager.lora_config)
        return helper

    def _mapper(self) -> Any:
        mapper = getattr(self.manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()

    def _check_layers(self, layers: Sequence[str]) -> None:
        """Raise EngineError for layers that vLLM would leave without their adapter, without a word."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        adapters, mapper = self.manager._adapter_manager, self._mapper()
        known = {*adapters.modules, *(part for packed in adapters.packed_modules.values() for part in packed)}
        names = {name: parse_fine_tuned_lora_name(f"{PREFIX}{name}.{A}.weight", mapper)[0] for name in layers}
        if unknown := [name for name, its_name in names.items() if its_name not in known]:
            more = f" and {len(unknown) - _MAX_NAMED} more" if len(unknown) > _MAX_NAMED else ""
            raise EngineError(
                f"--lora-sync adapter: vLLM adds no adapter to {', '.join(unknown[:_MAX_NAMED])}{more} of "
                f"{type(adapters.model).__name__}; use --lora-sync merged, or leave them out of --lora-targets"
            )


def _layers(names: Iterable[str]) -> list[str]:
    """Return the layers that an adapter's tensors belong to, in order."""
    return list(dict.fromkeys(name.removeprefix(PREFIX).rpartition(f".{A}.")[0] for name in names if f".{A}." in name))


def _targets(layers: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in layers})
