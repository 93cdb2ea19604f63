"""Read what a pipeline stage says of the tensors that it is about to send: their shapes, dtypes and places in a tree.

ColossalAI sends this as a pickle before each transfer, and would load whatever arrives. Here a pickle may name a few
classes that hold values, and nothing that can be called to an end of its own.
"""

import io
import pickle
from typing import Any

import torch

from coati_rl.errors import EngineError

_KNOWN = {
    ("builtins", "dict"),
    ("builtins", "list"),
    ("builtins", "tuple"),
    ("collections", "OrderedDict"),
    ("colossalai.pipeline.p2p", "P2PMetadata"),
    ("colossalai.pipeline.p2p", "TensorMetadata"),
    ("torch", "Size"),
    ("torch.utils._pytree", "LeafSpec"),
    ("torch.utils._pytree", "TreeSpec"),
    *(("torch", name) for name in ("bfloat16", "bool", "float16", "float32", "float64", "int32", "int64", "uint8")),
}


class _MessageUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def read_message(data: torch.Tensor, size: int) -> Any:
    """Load what a neighbouring stage sent.

    Args:
        data: uint8[N], on the CPU.
        size: bytes of it that are the message.
    Raises: EngineError if it is not what a stage sends.
    """
    try:
        return _MessageUnpickler(io.BytesIO(data.numpy().tobytes()[:size])).load()
    except Exception as error:
        raise EngineError(f"a pipeline stage received what no stage sends: {error}") from error
