"""Write the models of a trainer into one checkpoint: the policy at its top, others in directories of their roles."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coati_rl.checkpoint.saved_adapter import FOUR_BITS_KEY
from coati_rl.model_files.identity import model_identity
from coati_rl.protocols import Role
from consumer.checkpoint import CheckpointWriter
from consumer.parallel.parallelism import Parallelism
from consumer.role_models import RoleModel


def save_models(
    directory: Path,
    policy: RoleModel,
    others: Sequence[tuple[Role, RoleModel, Path]],
    parallelism: Parallelism,
    *,
    dtype: torch.dtype,
    settings_dir: Path,
    state: Mapping[str, Any],
    tokenizer_files: Mapping[str, bytes],
    files: Mapping[str, bytes],
    keep: int | None,
    has_optimizer: bool = True,
) -> None:
    """Write a checkpoint, which appears complete or not at all; collective.

    Args:
        directory: of the checkpoint.
        policy: its weights, or its adapters, are the checkpoint's own.
        others: further models by role, each with the directory whose settings that transformers refuses are copied.
        parallelism: of all of them.
        dtype: of saved weights.
        settings_dir: that of the policy.
        state: what else a resume needs.
        tokenizer_files: by name, beside each model.
        files: further ones, by name.
        keep: checkpoints to keep in the parent directory; None: all.
        has_optimizer: the states of optimizers are written, too.
    Raises: RunError on every rank if it cannot be written.
    """
    agree, is_first_rank = parallelism.agree, parallelism.layout.sender == 0
    writer = CheckpointWriter(
        directory,
        policy.saved_infos,
        dtype=dtype,
        peft=policy.peft,
        has_optimizer=has_optimizer,
        buffers=policy.saved_buffers,
    )
    agree(writer.begin if is_first_rank else None)
    written = agree(lambda: json.dumps(policy.write(writer)))
    for role, model, its_settings in others:
        of_role = writer.nested(role, model.saved_infos, model.peft, model.saved_buffers)
        agree(of_role.begin if is_first_rank else None)
        written += agree(partial(_written, model, of_role, role))
        describe = partial(of_role.describe, model.module, its_settings, tokenizer_files)
        agree(describe if is_first_rank else None)
    publish = partial(
        writer.publish,
        model=policy.module,
        settings_dir=settings_dir,
        state={**state, FOUR_BITS_KEY: True} if _has_four_bits(policy) else state,
        files={**tokenizer_files, **files},
        digests={name: digest for text in written for name, digest in json.loads(text).items()},
        keep=keep,
    )
    agree(publish if is_first_rank else None)


def _has_four_bits(model: RoleModel) -> bool:
    return model.adapters is not None and model.adapters.source.has_four_bits


def _written(model: RoleModel, writer: CheckpointWriter, role: Role) -> str:
    """Write a model's part of a checkpoint. Returns: JSON of the digests by name in the checkpoint."""
    return json.dumps({f"{role}/{name}": digest for name, digest in model.write(writer).items()})


def identity_in_background(directory: Path) -> Future[str]:
    """Begin to compute the identity of a model's weights; see `coati_rl.model_files.identity`."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="identity")
    future = pool.submit(model_identity, directory)
    pool.shutdown(wait=False)
    return future
