"""A service of Tinker's API whose parts count in place of computing: a model's weights are its number of steps."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from coati_rl.tinker.bases import Base
from coati_rl.tinker.bodies import CreateSampler
from coati_rl.tinker.core import LossResult, SampledSequence, SampleResult
from coati_rl.tinker.limits import Keys, Limits
from coati_rl.tinker.messages import MESSAGES
from coati_rl.tinker.sampling_routes import _new_sampler
from coati_rl.tinker.scheduler import Job
from coati_rl.tinker.service import Service
from coati_rl.tinker.state import CREATE, LOSS, PUBLISH, SAVE, STEP, Model
from coati_rl.tinker.wire import read_forward_backward
from tests.tinker_client import loss_body

OWNER = "anyone"
_LORA = {"rank": 4, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": True}
_ADAM = {
    "learning_rate": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


class Counting:
    """Train by counting steps, and passes since the last one; `failures` are raised, one by each call that computes."""

    max_tokens, vocab_size = 1000, 1000

    def __init__(self):
        self.steps, self.passes, self.failures, self.is_disk_full = {}, {}, [], False

    def create(self, model, spec):
        self.steps[model] = self.passes[model] = 0

    def check(self, request):
        pass

    def forward_backward(self, requests):
        for request in requests:
            self.passes[request.model] += 1
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure
        return [LossResult(logprobs=[np.zeros(1, np.float32)], metrics={"loss:sum": 1.0}) for _ in requests]

    def optim_step(self, model, step):
        self.steps[model] += 1
        self.passes[model] = 0
        return {"grad_norm:mean": 1.0}

    def save(self, model, directory, *, with_optimizer):
        partial = directory.with_name(f".{directory.name}.partial")  # as `write_adapters` does
        partial.mkdir()
        (partial / "steps").write_text(str(self.steps[model]))
        if self.is_disk_full:
            raise OSError(28, "No space left on device")
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)

    def load(self, model, directory, *, with_optimizer):
        self.steps[model], self.passes[model] = int((directory / "steps").read_text()), 0

    def drop(self, model):
        pass

    def close(self):
        pass


class Telling:
    """Sample one token: the number of steps of the sampler's weights."""

    def __init__(self):
        self.published = {}

    def publish(self, sampler, directory):
        self.published[sampler] = int((directory / "steps").read_text())

    def withdraw(self, sampler):
        del self.published[sampler]

    def check(self, request):
        pass

    async def sample(self, request):
        tokens = [self.published[request.sampler]]
        return SampleResult(sequences=[SampledSequence(token_ids=tokens, logprobs=[0.0], has_stopped=True)])

    async def close(self):
        pass


class Running:
    """Ask a service for a model's requests and a sampler's, as the routes do."""

    def __init__(self, service, core):
        self.service, self.core, self.model, self._seq, self._samplers = service, core, None, 0, 0

    async def begin(self):
        session = await self.service.add_session(OWNER, None, None)
        model = Model(id=f"{session.id}:train:0", owner=OWNER, session=session.id, base="tiny")
        await self.answer(await self.service.training.create(model, CREATE, _LORA))
        self.model = self.service.state.models[model.id]

    def resume(self):
        """Go on with the model of the server before."""
        self.model = next(iter(self.service.state.models.values()))
        self._seq = max(self.model.requests)

    def hold(self):
        """Have requests wait. Returns: what has them computed at once, while the event loop stands still."""
        go, scheduler = threading.Event(), self.service.bases.scheduler("tiny")
        others = {"owner": OWNER, "model": self.model.id, "cost": 0}
        scheduler.submit(Job(done=lambda _: None, work=lambda _: go.wait(60), **others))

        def compute():
            done = threading.Event()
            scheduler.submit(Job(done=lambda _: done.set(), work=lambda _: None, **others))
            go.set()
            assert done.wait(60)

        return compute

    async def answer(self, future):
        """Return an answer: of a loss "ok", else the JSON."""
        reply = await self.service.futures.wait(future, OWNER, 20)
        return "ok" if reply.is_proto else json.loads(reply.body)

    async def ask(self, op, args, **others):
        self._seq += 1
        return await self.service.training.accept(self.model, self._seq, op, args, **others)

    async def loss(self, *, is_forward_only=False):
        body = loss_body(self.model.id, self._seq + 1, [[1, 2]])
        request = replace(read_forward_backward(body)[0], is_forward_only=is_forward_only)
        return await self.ask(LOSS, {"is_forward_only": is_forward_only}, body=body, loss=request)

    async def step(self):
        return await self.ask(STEP, _ADAM)

    async def save(self, name, *, overwrite=False, kind="weights"):
        args = {"kind": kind, "name": name, "overwrite": overwrite, "ttl_seconds": None, "user_metadata": None}
        return await self.ask(SAVE, args)

    async def publish(self):
        """Make a sampler of the present weights, without a checkpoint."""
        self._samplers += 1
        return await self.ask(PUBLISH, {"sampler": f"published-{self._samplers}", "is_inflight": False})

    async def sampler(self, path):
        """Make a sampling client of a checkpoint."""
        session = self.model.session
        body = CreateSampler(session_id=session, sampling_session_seq_id=self._samplers, model_path=path)
        name = f"{session}:sample:{self._samplers}"
        self._samplers += 1
        await self.service.add_sampler(_new_sampler(self.service, body, name, session, OWNER))
        return self.service.state.samplers[name]

    async def sample(self, sampler):
        """Return the number of steps of the weights that answer, or an error's text."""
        asked = {"prompt": [1], "seed": 1}
        future = await self.service.sampling.accept(sampler, len(sampler.samples), asked)
        reply = await self.service.futures.wait(future, OWNER, 20)
        if reply.is_error:
            return json.loads(reply.body)["error"]
        sequence = MESSAGES["SampleResponse"].FromString(reply.body).sequences[0]
        return int(np.frombuffer(sequence.tokens, "<i4")[0])


@asynccontextmanager
async def running(root: Path, **limits):
    """Serve a directory with one new model."""
    core = Counting()
    base = Base(name="tiny", directory=Path("/"), arch="none", training=core, sampling=Telling())
    service = Service({"tiny": base}, root, keys=Keys(), limits=Limits(**limits))
    await service.start()
    try:
        found = Running(service, core)
        await found.begin()
        yield found
    finally:
        await service.close()


def run(work, root, **limits):
    """Run `work(Running)` with a service of a directory."""

    async def with_service():
        async with running(root, **limits) as found:
            return await asyncio.wait_for(work(found), 30)

    return asyncio.run(with_service())
