"""Call the engine or trainer rank of this process, and get the results of all processes that torchrun has started."""

import atexit
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from coati_rl.members import Arguments
from consumer.parallel.process_group import agree, destroy_process_group


class OwnMember:
    """Hold this process's member. Every process makes the same calls, and gets the results of all."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """Make the member, after this process has joined torchrun's others, if it has any."""
        self._rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._member = make()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coati")

    def call(self, method: str, arguments: Arguments) -> list[Any]:
        """Call this process's member, and return the results of all; see `Members`."""
        return self._results(partial(getattr(self._member, method), *arguments[self._rank]))

    def begin(self, method: str, arguments: Arguments) -> Callable[[], list[Any]]:
        """Call this process's member in a thread; see `Members`."""
        future = self._thread.submit(getattr(self._member, method), *arguments[self._rank])
        return lambda: self._results(future.result)

    def _results(self, call: Callable[[], Any]) -> list[Any]:
        if self.size == 1:
            return [call()]
        texts = agree(lambda: json.dumps(call(), default=_text_of), what="get the others' results")
        return [json.loads(text, object_hook=_array_of) for text in texts]


def join_torchrun(device: str) -> torch.device:
    """Join the other processes that torchrun has started, if it has. Returns: the device of this one."""
    own = torch.device(device)
    if device == "cuda":
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=own if device == "cuda" else None)
        atexit.register(destroy_process_group)  # else a thread of gloo may abort the process at its end
    return own


def torchrun_address() -> str:
    """Return the first process's address, as other machines' processes of torchrun reach it; empty: there are none."""
    is_one_machine = os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1")
    return "" if is_one_machine else os.environ["MASTER_ADDR"]


def _text_of(array: np.ndarray) -> dict[str, Any]:
    """Write an array as JSON."""
    return {"array": b64encode(array.tobytes()).decode(), "dtype": array.dtype.str, "shape": array.shape}


def _array_of(read: dict[str, Any]) -> Any:
    """Read what `_text_of` has written, and leave other objects alone."""
    if read.keys() != {"array", "dtype", "shape"}:
        return read
    return np.frombuffer(b64decode(read["array"]), read["dtype"]).reshape(read["shape"])
