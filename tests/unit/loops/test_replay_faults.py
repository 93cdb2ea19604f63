"""Plant faults in the process of a run, and replay it: the first stage that differs is where the fault is."""

import dataclasses

import numpy as np
import pytest

import coati_rl.coordinator.prompt_flow
import consumer.objectives.run_objective
import consumer.role_models
import consumer.train_loop
import consumer.train_step
from coati_rl.batching import sample_builder
from consumer.parallel.single_process import WholeModel
from producer.engines.transformers_engine import _TransformersCore
from tests.unit.loops.recorded_run import first_named, write_metrics
from tests.unit.loops.watched_engine import WatchedEngine

RUN = {
    "backend": "transformers",
    "num_generations": 4,
    "inference_batch_size": 2,
    "kl_coeff": 0.05,
    "save_interval": 1,
    "max_logprob_gap": 100.0,
    "max_steps": 4,
}
STEP = 3  # that is replayed: off the first weights, and with a checkpoint before and after it


class Plant:
    """Replace parts of the run's process, until the run is over."""

    def __init__(self, patch):
        self._patch = patch

    def result(self, where, name, change):
        """Let `change` have what a function or method returns."""
        inner = getattr(where, name)
        self._patch.setattr(where, name, lambda *given, **named: change(inner(*given, **named)))

    def argument(self, where, name, **changes):
        """Call a function with other named arguments, each from the given one."""
        inner = getattr(where, name)

        def call(*given, **named):
            return inner(*given, **{**named, **{key: change(named[key]) for key, change in changes.items()}})

        self._patch.setattr(where, name, call)


def with_arrays(change):
    """A change of the arrays of a mini-batch's first micro-batch, as the trainer lays it out."""

    def changed(batch):
        first, *others = batch.micro_batches
        arrays = {name: array.copy() for name, array in first.loss_arrays.items()}
        change(arrays)
        return dataclasses.replace(batch, micro_batches=(first.replace_arrays(arrays), *others))

    return changed


def of_batch(change):
    return lambda plant: plant.result(consumer.train_loop, "build_mini_batch", with_arrays(change))


def swap_samples(arrays):
    """The advantages of two samples of different rewards change places."""
    samples, advantages = arrays["sample_index"], arrays["advantages"]
    high, low = (samples == samples[advantages == edge(advantages)][0] for edge in (np.max, np.min))
    top, bottom = advantages[high][0], advantages[low][0]
    advantages[high], advantages[low] = bottom, top


def of_objective(**changes):
    """Another coefficient in the trainer's loss than the configuration says."""

    def plant_it(plant):
        plant.result(consumer.objectives.run_objective, "build_loss", lambda loss: dataclasses.replace(loss, **changes))

    return plant_it


def lose_a_token(engine_result):
    for each in engine_result.completions:
        for name in ("token_ids", "logprobs", "policy_versions"):
            object.__setattr__(each, name, getattr(each, name)[:-1] if len(each.token_ids) > 2 else getattr(each, name))


def of_results(change):
    """A change of what the engine answers, before the producer has it."""

    def plant_it(plant):
        inner = WatchedEngine._pass_on

        def changed(self, request, done, seen):
            change(done.result())
            inner(self, request, done, seen)

        plant._patch.setattr(WatchedEngine, "_pass_on", changed)

    return plant_it


def hotter(plant):
    """The engine samples at another temperature than the lease says."""
    inner = WatchedEngine.submit

    def submit(self, request, on_tokens=None):
        sampling = dataclasses.replace(request.sampling, temperature=1.3 * request.sampling.temperature)
        return inner(self, dataclasses.replace(request, sampling=sampling), on_tokens)

    plant._patch.setattr(WatchedEngine, "submit", submit)


def stale(plant):
    """The engine says that it serves new weights, and keeps those that it had."""
    inner = _TransformersCore.commit

    def commit(self, policy_version):
        if policy_version != STEP - 1:  # the one whose step is replayed
            return inner(self, policy_version)
        kept = {name: each.clone() for name, each in self._parameters.items()}
        done = inner(self, policy_version)
        for name, each in self._parameters.items():
            each.copy_(kept[name])
        return done

    plant._patch.setattr(_TransformersCore, "commit", commit)


def another_prompt(plant):
    """The engine is given a prompt without its first token, which is recorded as it was given."""
    inner = coati_rl.coordinator.prompt_flow.PromptFlow.draw

    def draw(self):
        prompt = inner(self)
        return prompt and dataclasses.replace(prompt, token_ids=prompt.token_ids[1:])

    plant._patch.setattr(coati_rl.coordinator.prompt_flow.PromptFlow, "draw", draw)


def scaled_gradient(plant):
    """One tensor of the gradient counts double, as a sum over too many ranks makes it."""

    def scale(gradients):
        gradients["model.layers.0.self_attn.o_proj.weight"].mul_(1.001)
        return gradients

    plant.result(WholeModel, "reduce_gradients", scale)


def moved_reference(plant):
    """The reference is not the model that the run began with."""
    inner = consumer.role_models.RoleModel.score

    def score(self, inputs):
        return [each + 0.01 for each in inner(self, inputs)] if self.role == "reference" else inner(self, inputs)

    plant._patch.setattr(consumer.role_models.RoleModel, "score", score)


def scaled_rewards(plant):
    """Advantages are scaled before they are recorded."""
    plant.result(sample_builder, "_advantages", lambda advantages: 1.01 * advantages)


def other_rate(plant):
    plant.argument(consumer.role_models.RoleModel, "optimizer_step", learning_rate=lambda rate: 1.1 * rate)


def no_clipping(plant):
    plant.argument(consumer.role_models, "scale_and_clip", max_norm=lambda _: 1e9)


def other_scale(plant):
    plant.argument(consumer.train_step.TrainStep, "finish", loss_scale=lambda scale: 1.001 * scale)


def mask_first(arrays):
    arrays["loss_mask"][0, 0] = False


def weigh_first(arrays):
    arrays["loss_weights"][0, 0] = 0.0


def scale_advantages(arrays):
    arrays["advantages"] *= 1.01


def scale_temperature(arrays):
    arrays["temperature"] *= 1.05


TRAINER = {"loss", "gradient"}  # what is wrong in a loss may leave its value as it is, where advantages add up to 0
# What is planted, what the run and its engine are given besides, and the stages of which one is to be the first.
FAULTS = {
    "wrong temperature": (hotter, {}, {"rollout logprobs"}),
    "stale weights": (stale, {}, {"rollout logprobs"}),
    "scaled log-probabilities": (None, {"logprob_scale": 1.01}, {"rollout logprobs"}),
    "a lost token": (of_results(lose_a_token), {}, {"text"}),
    "another prompt": (another_prompt, {}, {"prompt"}),
    "scaled advantages, recorded": (scaled_rewards, {}, {"advantage"}),
    "scaled advantages, trained": (of_batch(scale_advantages), {}, TRAINER),
    "swapped samples": (of_batch(swap_samples), {}, TRAINER),
    "a flipped mask": (of_batch(mask_first), {}, {"scores", "loss"}),
    "a token of another weight": (of_batch(weigh_first), {}, TRAINER),
    "wrong temperature in the loss": (of_batch(scale_temperature), {}, {"scores", "loss"}),
    "wrong KL coefficient": (of_objective(kl_coeff=0.06), {}, TRAINER),
    "wrong clip": (of_objective(clip_low=0.05, clip_high=0.05), {"backend": "fake"}, {"loss"}),
    "another reference": (moved_reference, {}, {"scores"}),
    "a tensor summed too often": (scaled_gradient, {}, {"gradient"}),
    "wrong learning rate": (other_rate, {}, {"update"}),
    "wrong gradient clipping": (no_clipping, {"max_grad_norm": 0.01}, {"update"}),
    "wrong scale of the loss": (other_scale, {}, TRAINER),
}
OF_ENGINE = {"logprob_scale"}
FAST = ("wrong temperature", "a tensor summed too often")
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in FAULTS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", CASES)
def test_the_first_stage_that_differs_is_where_the_fault_is(run_in_threads, parity_file, fault):
    plant_it, given, expected = FAULTS[fault]
    engine = {name: value for name, value in given.items() if name in OF_ENGINE}
    changes = {name: value for name, value in given.items() if name not in OF_ENGINE}
    with pytest.MonkeyPatch.context() as patch:
        if plant_it is not None:
            plant_it(Plant(patch))
        trace = run_in_threads({"reward_type": f"{parity_file}:score", **RUN, **changes}, score=None, **engine)
    name, text = first_named(write_metrics(trace), STEP)
    assert name in expected, text
