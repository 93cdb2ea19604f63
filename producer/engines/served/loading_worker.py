"""Load weights in the workers of a vLLM server, and digest them there; vLLM mixes this class into its own.

Start the server with `--worker-extension-cls producer.engines.served.loading_worker.LoadingWorker` and this package on
its PYTHONPATH. In: a safetensors file's path, over /collective_rpc. Out: the digest of what was read. All names begin
with `coati_`, since the class is shared with vLLM.
"""

import json
from typing import Any

from producer.engines.vllm_worker import host_digest, load_model_weights


class LoadingWorker:
    """Load a file into a vLLM worker's model, with a tied output head, which vLLM's own reload leaves on the CPU."""

    # Attributes of vLLM's worker class:
    device: Any
    model_runner: Any
    model_config: Any
    vllm_config: Any

    coati_digest = ""  # of what was loaded last

    def coati_load(self, path: str, names: str) -> str:
        """Load a file of all weights; no step may be running.

        Args:
            path: of the safetensors file.
            names: JSON list of its tensors, in the order of the digest.
        Returns: the digest of the tensors; what went wrong, if the file could not be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                tensors = [(name, file.get_tensor(name)) for name in json.loads(names)]
        except (OSError, SafetensorError, ValueError) as error:  # an exception would end the server's engine
            return f"{type(error).__name__}: {error}"
        digest = host_digest(tensors)
        load_model_weights(self, tensors)
        self.coati_digest = digest
        return digest

    def coati_loaded(self) -> str:
        """Return the digest of what was loaded last; empty in a process that has only what it was started with."""
        return self.coati_digest
