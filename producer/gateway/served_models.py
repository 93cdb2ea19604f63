"""Name what a server answers with: a model, and adapters of it, each with a fingerprint of its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from producer.gateway.api_error import ApiError


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """Describe one of the models that requests name."""

    name: str
    fingerprint: str | None = None  # of its weights, in answers' system_fingerprint; None: they change, or are not read
    lora: str | None = None  # the engine's name of its adapter; None: it has none
    parent: str | None = None  # name of the model that it is an adapter of


class ServedModels:
    """Find the model that a request names."""

    def __init__(self, default: ServedModel, *others: ServedModel) -> None:
        """Take the model of requests without a name. Without others it is that of requests with any name."""
        self._default = default
        self._by_name = {model.name: model for model in (default, *others)}

    @staticmethod
    def one(name: str) -> "ServedModels":
        """Return a model that answers to any name."""
        return ServedModels(ServedModel(name=name))

    def find(self, name: str) -> ServedModel:
        """Return the model of a name. Raises: ApiError(404)."""
        if not name or len(self._by_name) == 1:
            return self._default
        if name not in self._by_name:
            known = ", ".join(self._by_name)
            message = f"The model `{name}` does not exist; use {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._by_name[name]

    @property
    def loras(self) -> Mapping[str, str]:
        """Return the engine's names of adapters by the names that requests give, none among them."""
        named = {name: model.lora for name, model in (*self._by_name.items(), ("", self._default))}
        return {name: lora for name, lora in named.items() if lora is not None}

    def described(self, name: str) -> dict[str, Any]:
        """Return the API's description of a model. Raises: ApiError(404)."""
        model = self.find(name)
        parent = {} if model.parent is None else {"parent": model.parent}
        return {"id": name or model.name, "object": "model", "created": 0, "owned_by": "coati-rl", **parent}

    def listed(self) -> list[dict[str, Any]]:
        """Return the API's list."""
        return [self.described(name) for name in self._by_name]
