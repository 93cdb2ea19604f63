"""Carry out the requests of models on the part that trains: create, load, step, save, publish.

Runs on the scheduler's thread. An outcome holds the answer, and what is known of the model by it.
"""

import logging
import math
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coati_rl.disk import flush, flush_tree
from coati_rl.tinker.bodies import AdamParams
from coati_rl.tinker.checkpoints import SAMPLER, TRAINING, Checkpoint, Checkpoints
from coati_rl.tinker.core import AdamStep, ModelSpec, RequestError, TrainingCore
from coati_rl.tinker.futures import json_reply
from coati_rl.tinker.state import CREATE, LOAD, PUBLISH, SAVE, STEP, Model, Reply, Request

logger = logging.getLogger(__name__)

FLAGS = {"train_attn": "trains_attention", "train_mlp": "trains_mlp", "train_unembed": "trains_head"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Hold what a request came to."""

    reply: Reply
    effects: Mapping[str, Any] = field(default_factory=dict)  # fields of the model that change
    directory: str | None = None  # below the root, of a sampler's weights


class Operations:
    """Carry out requests; `root` is the server's directory."""

    def __init__(self, root: Path, checkpoints: Checkpoints, *, max_checkpoint_bytes: int) -> None:
        """Make the directories of automatic checkpoints and of samplers' weights."""
        self._root, self._checkpoints, self._max_bytes = root, checkpoints, max_checkpoint_bytes
        for name in ("models", "samplers"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def run(self, core: TrainingCore, model: Model, request: Request, *, saves: bool = False) -> Outcome:
        """Carry out a request; `saves`: make an automatic checkpoint after a step. Raises: RequestError."""
        args = request.args
        if request.op == CREATE:
            return self._create(core, model, args)
        if request.op == LOAD:
            return self._load(core, model, request)
        if request.op == STEP:
            return self._step(core, model, request, saves=saves)
        if request.op == SAVE:
            return self._save(core, model, request)
        if request.op == PUBLISH:
            return self._publish(core, model, args)
        raise RequestError(args.get("message") or f"unknown operation {request.op}")

    def restore(self, core: TrainingCore, model: Model) -> None:
        """Bring back a model from its automatic checkpoint. Raises: RequestError."""
        core.load(model.id, self._root / "models" / str(model.saved_in), with_optimizer=True)

    def forget(self, saved_in: str | None) -> None:
        """Delete an automatic checkpoint."""
        if saved_in is not None:
            shutil.rmtree(self._root / "models" / saved_in, ignore_errors=True)

    def check_made_by(self, directory: str, made_by: str) -> None:
        """Raise RequestError if the checkpoint that a request made is not in a directory below the root any more."""
        self._checkpoints.check_made_by(self._root / directory, made_by)

    def forget_sampler(self, directory: str | None) -> None:
        """Delete the weights that a model published for samplers; those of a checkpoint stay."""
        if directory is not None and directory.startswith("samplers/"):
            shutil.rmtree(self._root / directory, ignore_errors=True)

    def _create(self, core: TrainingCore, model: Model, args: Mapping[str, Any]) -> Outcome:
        flags = {name: bool(args[name]) for name in FLAGS}
        spec = ModelSpec(rank=args["rank"], seed=args["seed"], **{field: flags[name] for name, field in FLAGS.items()})
        core.create(model.id, spec)
        reply = json_reply({"type": "create_model", "model_id": model.id})
        return Outcome(reply=reply, effects={"rank": spec.rank, "flags": flags})

    def _load(self, core: TrainingCore, model: Model, request: Request) -> Outcome:
        """Load a checkpoint, and save the model: the checkpoint may be deleted before a restart needs it."""
        args = request.args
        directory = self._checkpoints.directory(args["path"])
        if not directory.exists():
            raise RequestError(f"{args['path']} was deleted")
        core.load(model.id, directory, with_optimizer=args["optimizer"])
        reply = json_reply({"type": "load_weights", "path": args["path"], "model_id": model.id})
        effects = {"rank": args["rank"], "flags": dict(args["flags"])}
        return Outcome(reply=reply, effects=effects | self._autosave(core, model, request))

    def _step(self, core: TrainingCore, model: Model, request: Request, *, saves: bool) -> Outcome:
        metrics = core.optim_step(model.id, AdamStep(**AdamParams.model_validate(request.args).model_dump()))
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        finite |= {f"{name.partition(':')[0]}_not_finite:sum": 1.0 for name in metrics.keys() - finite.keys()}
        reply = json_reply({"type": "optim_step", "metrics": finite})
        effects: dict[str, Any] = {}
        if saves:
            try:
                effects = self._autosave(core, model, request)
            except Exception:  # the step was taken, which a client that hears of a failure would take again
                logger.exception(
                    "no automatic checkpoint of %s after request %d; a later one is tried", model.id, request.seq
                )
        return Outcome(reply=reply, effects=effects)

    def _autosave(self, core: TrainingCore, model: Model, request: Request) -> dict[str, Any]:
        saved_in = uuid.uuid4().hex
        self._write(core, model, self._root / "models" / saved_in, with_optimizer=True)
        return {"saved_seq": request.seq, "saved_in": saved_in}

    def _save(self, core: TrainingCore, model: Model, request: Request) -> Outcome:
        args = request.args
        kind, is_training = args["kind"], args["kind"] == TRAINING
        self._checkpoints.check_quota(model.owner, self._max_bytes)
        now = time.time()
        checkpoint = Checkpoint(
            path=f"tinker://{model.id}/{kind}/{args['name']}",
            owner=model.owner,
            base=model.base,
            rank=model.rank,
            flags=model.flags,
            has_optimizer=is_training,
            made_by=request.id,
            created=now,
            expires=now + args["ttl_seconds"] if args.get("ttl_seconds") else None,
            metadata=args.get("user_metadata"),
            run_metadata=model.metadata,
        )
        self._checkpoints.write(
            checkpoint,
            lambda directory: core.save(model.id, directory, with_optimizer=is_training),
            overwrites=bool(args.get("overwrite")),
        )
        what = "save_weights_for_sampler" if kind == SAMPLER else "save_weights"
        return Outcome(reply=json_reply({"type": what, "path": checkpoint.path}))

    def _publish(self, core: TrainingCore, model: Model, args: Mapping[str, Any]) -> Outcome:
        name = uuid.uuid4().hex
        self._write(core, model, self._root / "samplers" / name, with_optimizer=False)
        reply = json_reply({"type": "save_weights_for_sampler", "sampling_session_id": args["sampler"]})
        return Outcome(reply=reply, directory=f"samplers/{name}")

    def _write(self, core: TrainingCore, model: Model, directory: Path, *, with_optimizer: bool) -> None:
        try:
            directory.mkdir()
            core.save(model.id, directory, with_optimizer=with_optimizer)
            flush_tree(directory)
            flush(directory.parent)
        except BaseException:
            for left in directory.parent.glob(f"*{directory.name}*"):  # `save` writes to hidden directories beside it
                shutil.rmtree(left, ignore_errors=True)
            raise
