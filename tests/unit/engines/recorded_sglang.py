"""Answer as SGLang's HTTP server does, in this process: with replies that were recorded from it (`replies.json`).

Of SGLang 0.5.23 on the CPU, with the model of `save_checkpoint(..., 0, tied=False)`, by
`tests/integration/engines/record_sglang.py`.
"""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.unit.engines.recorded_server import RecordedServer

SGLANG_REPLIES = json.loads((Path(__file__).parents[2] / "data" / "sglang_server" / "replies.json").read_text())


class RecordedSglang(RecordedServer):
    """One server of SGLang. Tests change its replies, and what it does."""

    def __init__(self, model: Path, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.replies = copy.deepcopy(SGLANG_REPLIES)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.asked.append((path, body))
        if path == "/update_weights_from_disk" and not self._updates(body):
            return tuple(self.replies["reload_failed"])
        status, reply = copy.deepcopy(self.replies.get(path, [200, None] if path == "/ping" else [404, {}]))
        if path == "/generate":
            return self._generate(body)
        if path == "/update_weight_version":
            self.version = reply["new_version"] = body["new_version"]
        if path == "/tokenize":
            reply["tokens"] = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        if path == "/weights_checker":
            reply["ranks"][0]["checksums"].update(
                (name, hashlib.sha256(self.loaded[name].numpy().tobytes()).hexdigest()[:16])
                for name in self.loaded.keys() & reply["ranks"][0]["checksums"].keys()
            )
        return status, reply

    def _updates(self, body: Any) -> bool:
        """Load a file, unless updates are ignored; whether it is there."""
        try:
            loaded = load_file(Path(body["model_path"]) / "model.safetensors")
        except OSError:
            return False
        self.loaded = self.loaded if self.ignores_updates else loaded
        self.version = body["weight_version"]
        return True

    def _generate(self, body: Any) -> tuple[int, Any]:
        if body.get("top_logprobs_num"):
            return copy.deepcopy(self.replies["even"])
        if body.get("logprob_start_len") == 0:
            return copy.deepcopy(self.replies["prompt_logprobs"])
        if self.holds is not None:
            self.holds.wait(60)
        status, reply = copy.deepcopy(self.replies["cut" if body["return_sampling_mask"] else "/generate"])
        if status == 200:
            reply = reply[: len(body["rid"])]
            for sample in reply:
                for span in sample["meta_info"]["weight_versions"]:
                    span["version"] = self.version
        return status, reply
