"""Train, score, send and save a trainer's models on its parallelism.

Consumes mini-batches; produces gradients, steps, log-probabilities, weights and checkpoints. A gradient is always the
unscaled sum over the global batch, accumulated in float32 until `optimizer_step` scales it.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.batching.packing import padded
from coati_rl.checkpoint.directory import OBJECTIVE_KEY, load_state, role_directory
from coati_rl.checkpoint.resumed_run import DATE_KEY
from coati_rl.checkpoint.saved_adapter import WEIGHTS_KEY
from coati_rl.checkpoint.tokenizer_files import read_tokenizer_files
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.errors import ConfigError
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.protocols import LossFn, Role
from coati_rl.transport.manifest import TensorEntry
from consumer.backend_config import BackendConfig
from consumer.checkpoint import CheckpointReader
from consumer.chosen_parallelism import make_parallelism
from consumer.loaded_models import load_models
from consumer.models.float32_compute import Float32Compute
from consumer.models.policy_model import DTYPES, Output, make_input
from consumer.parallel.parallelism import Parallelism
from consumer.parallel.process_group import collective
from consumer.remote_model import RemoteModel, Scorers
from consumer.role_models import RoleModel
from consumer.saving import identity_in_background, save_models
from consumer.sent_weights import SentWeights


def make_backend(config: BackendConfig, *, device: torch.device, timeout_s: float) -> "Backend":
    """Build the backend of this rank; collective over the default process group, which must exist.

    Args:
        config: models, layout and optimizer settings.
        device: the device that this rank computes on.
        timeout_s: time limit of a collective, in seconds.
    Raises: ConfigError, EngineError.
    """
    return Backend(config, make_parallelism(config, device=device, timeout_s=timeout_s))


class Backend:
    """Train the models of a run on one parallelism; methods are collective unless noted.

    All raise an EngineError if another rank does not take part in time.
    """

    def __init__(self, config: BackendConfig, parallelism: Parallelism) -> None:
        self._config = config
        self.parallelism = parallelism
        self.device = parallelism.device
        self.precision = config.precision
        self.layout = parallelism.layout
        self._input = partial(make_input, device=self.device, context=self.layout.context)
        self._settings_dir = config.tokenizer_dir or config.models["policy"].directory
        # Read once: the directory may change, or go, while the run goes on.
        self._tokenizer_files = dict[str, bytes]()
        if self.layout.sender == 0:
            self._tokenizer_files = read_tokenizer_files(self._settings_dir, chat_template=config.chat_template)
        self.models, shared = load_models(config, parallelism)
        self.policy = self.models["policy"]
        base = config.models["policy"].directory
        sent_beside = base if config.sends_adapters else None
        self._sent = SentWeights(self.policy, self.layout, config.wire_dtype, base=sent_beside)
        # Of what adapters are trained on; of the rank that writes it. Read now, as the directory may change.
        is_named = self.policy.adapters is not None and self.layout.sender == 0
        self._base_identity = identity_in_background(base) if is_named else None
        self._views = dict(shared)
        self._remote: dict[str, RemoteModel] = {}

    def score(
        self, micro_batches: Sequence[MicroBatch], role: Role = "policy", output: Output = "scores"
    ) -> list[Tensor]:
        """Compute an output of one of the models for the loss tokens, at the sampling temperature.

        Returns: per micro-batch without gradient, float32[R, M] log-probabilities, a scalar head's values or entropies,
            0 where the loss mask is False; or float32[R, M, G] hidden states, of any value there. An empty list on
            ranks without the head.
        Raises: ValueError if the backend was built without this model.
        """
        if remote := self._remote.get(role):
            return remote.score(micro_batches, output)
        model = self._views.get(role) or self._model(role)
        with collective("score a mini-batch"):
            count = self.parallelism.num_micro_batches(len(micro_batches))
            replayed = self.policy.routers.replayed if role in ("policy", "old") else lambda *_: None
            inputs = [
                self._input(each, output=output, routing=replayed(each, self.device, self.layout.context))
                for each in padded(micro_batches, count)
            ]
            return model.score(inputs)[: len(micro_batches)]

    def score_elsewhere(self, roles: Collection[str], scorers: Scorers) -> None:
        """Let scorers, which have devices of their own, score in these roles; not collective."""
        dtype = DTYPES[self._config.precision]
        for role in roles:
            self._remote[role] = RemoteModel(role, scorers, self.layout, device=self.device, dtype=dtype)

    def score_float32(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Compute the policy's log-probabilities as `score` does, from the same weights, but in float32."""
        with Float32Compute():
            return self.score(micro_batches)

    def keep_old_policy(self) -> None:
        """Copy the current policy's weights to the "old" model; every rank copies its own part.

        Raises: ValueError if the backend was built without an old policy.
        """
        (self._views.get("old") or self._model("old")).move_to(self.policy)

    def move_reference(self, mix: float) -> None:
        """Move the reference to (1 - mix) * reference + mix * policy; every rank moves its own part; not collective."""
        self._model("reference").move_to(self.policy, mix)

    def forward_backward(self, mini_batch: MiniBatch, loss_fn: LossFn, role: Role = "policy") -> dict[str, Tensor]:
        """Accumulate the gradient of a trained model's summed loss over this rank's samples.

        The trainer's policy_version is the number of optimizer steps taken, which is `mini_batch.step`.

        Returns: the sums that `loss_fn` reports, float64[] each, over this rank's samples (maxima for keys `*_max`);
            empty without the LM head.
        """
        # A rank without samples still takes part in the step.
        wanted = max(len(mini_batch.micro_batches), int(mini_batch.is_last))
        has_teacher, model = isinstance(loss_fn, DistilledLoss), self._model(role)
        used = (self._remote.get("teacher") or self._model("teacher")).head_weights() if has_teacher else nullcontext()
        with collective("compute gradients"), used as teacher_head:
            inputs = [
                self._input(
                    micro_batch,
                    trainer_version=mini_batch.step,
                    loss_fn=loss_fn,
                    teacher_head=teacher_head,
                    routing=model.routers.routing(micro_batch, self.device, self.layout.context),
                )
                for micro_batch in padded(mini_batch.micro_batches, self.parallelism.num_micro_batches(wanted))
            ]
            return model.accumulate(inputs)

    def reduce_gradients(self, role: Role = "policy") -> None:
        """Sum a model's gradients over all ranks, once, into its `gradients`; `optimizer_step` does so, too."""
        with collective("sum gradients over trainers"):
            self._model(role).reduce_gradients()

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Return a step's reported sums over all ranks; empty without the LM head."""
        return self.parallelism.reduce_sums(sums)

    def router_metrics(self) -> dict[str, float | None]:
        """Return the metrics of the policy's routers since the last call; see `Routers.metrics`."""
        add, copies = self.parallelism.add_over_ranks, self.layout.tp_size
        return self.policy.routers.metrics(add, copies=copies, device=self.device)

    def optimizer_step(
        self,
        *,
        loss_scale: float,
        learning_rate: float,
        settings: OptimizerConfig | None = None,
        role: Role = "policy",
        observe: Callable[[RoleModel, float], None] | None = None,
    ) -> float:
        """Sum a model's gradient over all ranks, scale it, clip it, step and clear it; see `RoleModel`.

        Returns: the scaled gradient's norm before clipping, the same on every rank.
        Raises: EngineError if the norm is not finite; the weights are unchanged then.
        """
        with collective("sum gradients over trainers"):
            return self._model(role).optimizer_step(
                loss_scale=loss_scale, learning_rate=learning_rate, settings=settings, observe=observe
            )

    def free(self, role: Role) -> None:
        """Drop a frozen model; not collective. Raises: ValueError for a trained one."""
        source = self._config.models.get(role)
        if source is not None and source.optimizer is not None:
            raise ValueError(f"the {role} model is trained and cannot be freed")
        self.models.pop(role, None)
        self._views.pop(role, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def weight_entries(self) -> tuple[TensorEntry, ...]:
        """Return the entries of all tensors that all senders export, in Hugging Face order; not collective."""
        return self._sent.entries()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors that this rank sends, by name; see `RoleModel.export`."""
        return self._sent.tensors()

    def base_identity(self) -> str:
        """Return the identity of the base whose adapters alone are exported; empty: all weights are; not collective."""
        return self._sent.base_identity

    def broadcast_text(self, text: str | None) -> str:
        """Broadcast a text from sender 0 to all senders; collective over them. `text`: None on the others."""
        return self.parallelism.broadcast_text(text)

    def live_weights(self) -> list[Tensor]:
        """Return those weights of the policy on this rank that training changes, not copied; not collective."""
        return list(self.policy.parameters.trained.values())

    def any_rank(self, is_needed: bool) -> bool:
        """Return True if any of the ranks that must run a forward together needs one; collective over them."""
        with collective("agree on whether to score"):
            return self.parallelism.num_micro_batches(int(is_needed)) > 0

    def save(
        self,
        directory: Path,
        *,
        state: dict[str, Any],
        files: Mapping[str, bytes] | None = None,
        objective: Mapping[str, Any] | None = None,
        keep: int | None = None,
        has_optimizer: bool = True,
    ) -> None:
        """Write a checkpoint to `directory`, which appears complete or not at all. The first rank adds its `files`.

        The state of the objective is that of a rank with the LM head, which alone has the sums that it adapts to.
        `keep`: so many directories; None: as many as the settings say. `has_optimizer`: of each trained model, too.

        Raises: RunError on every rank if it cannot be written.
        """
        own = json.dumps(dict(objective or {})) if self.layout.is_last_stage else ""
        adapted = next(text for text in self.parallelism.agree(lambda: own) if text)
        date = self._config.template_date
        save_models(
            directory,
            self.policy,
            [(role, model, self._config.models[role].directory) for role, model in self._saved_others()],
            self.parallelism,
            dtype=DTYPES[self._config.precision],
            settings_dir=self._settings_dir,
            state={
                **state,
                "rng_state": b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
                **({} if date is None else {DATE_KEY: date}),
                **({OBJECTIVE_KEY: json.loads(adapted)} if adapted != "{}" else {}),
                **({} if self._base_identity is None else {WEIGHTS_KEY: {"base": self._base_identity.result()}}),
            },
            tokenizer_files=self._tokenizer_files,
            files=files or {},
            keep=keep or self._config.keep_checkpoints,
            has_optimizer=has_optimizer,
        )

    def restore(self, directory: Path) -> None:
        """Load the optimizer and random state of the checkpoint whose weights this backend was built from.

        The checkpoint may come from any layout. All ranks get the random state of the rank that saved it.

        Raises: ConfigError if it belongs to another model.
        """
        self.policy.restore(CheckpointReader(directory))
        for role, model in self._saved_others():
            # Else it begins with this run. A model without an optimizer was restored when it was loaded.
            if model.torch_optimizer is not None and (own := role_directory(directory, role)).is_dir():
                model.restore(CheckpointReader(own))
        rng_state = load_state(directory).get("rng_state")
        if rng_state is None:
            raise ConfigError(f"{directory} is not a checkpoint to resume from: it holds no random state")
        torch.set_rng_state(torch.frombuffer(bytearray(b64decode(rng_state)), dtype=torch.uint8))

    def close(self) -> None:
        """Destroy the process groups that were made for this backend; the default group stays."""
        self.parallelism.close()

    def _saved_others(self) -> list[tuple[Role, RoleModel]]:
        """Return the models beside the policy that change by training, in one order on all ranks."""
        sources = self._config.models
        saved = [role for role, source in sources.items() if source.optimizer is not None or source.is_saved]
        return [(role, self.models[role]) for role in sorted(saved) if role != "policy"]

    def _model(self, role: Role) -> RoleModel:
        if role not in self.models:
            raise ValueError(f"this backend was built without the {role} model")
        return self.models[role]
