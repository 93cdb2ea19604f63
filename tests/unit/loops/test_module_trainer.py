"""Test a trainer whose steps are methods of a torch module of one's own."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

import coati
from coati_rl.errors import ConfigError, RunError

LIMITS = {"max_prompt_tokens": 32, "max_new_tokens": 8}
IDS = [[5, 6, 7, 8, 9], [9, 8, 7, 6, 5], [4, 4, 5, 5, 6]]


class OwnModel(Qwen3ForCausalLM):
    def on_weights_materialized(self):
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_step(self, rows, scale=1.0):
        ids = torch.tensor(rows, device=self.device)
        logits = self(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * scale
        loss.backward()
        return loss.item()

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def weights_of(trainer):
    return {name: weight.clone() for name, weight in trainer.members._member.export_weights()}


def plain_steps(model_dir, number):
    """The same steps of plain transformers and PyTorch."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(number):
        ids = torch.tensor(IDS)
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def test_its_steps_are_those_of_plain_pytorch_and_engines_get_its_weights(model_dir, tmp_path):
    losses, right = plain_steps(model_dir, 3)
    with (
        coati.Engine(model_dir, backend="transformers", **LIMITS) as engine,
        coati.ModuleTrainer(OwnModel, model_dir) as trainer,
    ):
        found = []
        for _ in range(3):
            found += trainer.call("train_step", coati.Split(IDS))
            trainer.call("optimizer_step")
        assert found == pytest.approx(losses, rel=1e-5)
        own = weights_of(trainer)
        assert own.keys() == right.keys()
        assert max(float((own[name] - right[name]).detach().abs().max()) for name in own) < 1e-5
        assert trainer.push_to(engine).gap is None  # nothing was answered yet
        (answer,) = engine.generate([[5, 6, 7]])[0]
        push = trainer.push_to(engine)
        assert push.policy_version == 2
        assert push.gap < 1e-5
        trainer.save(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(torch.equal(weight, own[name]) for name, weight in saved.named_parameters())
    ids = torch.tensor([[5, 6, 7, *answer.token_ids]])
    logprobs = saved(ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
    np.testing.assert_allclose(answer.logprobs, logprobs.detach(), atol=1e-5)


def test_it_takes_turns_with_an_engine_bit_for_bit(model_dir):
    found = []
    for in_turns in (False, True):
        with (
            coati.Engine(model_dir, backend="transformers", **LIMITS) as engine,
            coati.ModuleTrainer(OwnModel, model_dir, precision="fp32") as trainer,
        ):
            for _ in range(2):
                rows = [
                    [*map(int, one.prompt_ids), *map(int, one.token_ids)] for one in engine.generate([IDS[0]], 4)[0]
                ]
                if in_turns:
                    engine.sleep()
                    trainer.cuda()
                trainer.call("train_step", [row[:6] for row in rows])
                trainer.call("optimizer_step")
                push = trainer.push_to(engine)
                if in_turns:
                    trainer.cpu()
                    states = trainer.members._member.module.optimizer.state.values()
                    kept = [each for state in states for each in state.values()]
                    assert len(kept) > 2
                    assert all(each.untyped_storage().nbytes() == 0 for each in kept)
                    with pytest.raises(
                        RunError, match=r"the trainer's weights must be on its device: trainer.cuda\(\)"
                    ):
                        trainer.call("optimizer_step")
                    push = engine.wake()
            found.append((rows, push.digest, push.gap))
    assert found[0] == found[1]


def test_in_bfloat16_the_gap_is_judged_by_its_rounding(model_dir):
    flags = {"precision": "bf16"}
    with (
        coati.Engine(model_dir, backend="transformers", **flags, **LIMITS) as engine,
        coati.ModuleTrainer(OwnModel, model_dir, **flags) as trainer,
    ):
        engine.generate([IDS[0]])
        trainer.call("train_step", IDS)
        trainer.call("optimizer_step")
        assert 0 <= trainer.push_to(engine).gap < 0.2


def test_what_it_cannot_do_is_said(model_dir):
    with coati.ModuleTrainer(OwnModel, model_dir) as trainer:
        with pytest.raises(ConfigError, match="OwnModel has no method step"):
            trainer.call("step")
        trainer.meta()
        with pytest.raises(RunError, match="make another ModuleTrainer of a checkpoint"):
            trainer.cuda()
        with pytest.raises(RunError, match="the trainer's weights must be on its device"):
            trainer.save("nowhere")


@pytest.mark.parametrize(
    ("size", "parts"), [(1, [[0, 1, 2, 3, 4]]), (2, [[0, 1], [2, 3, 4]]), (3, [[0], [1, 2], [3, 4]])]
)
def test_each_rank_gets_its_part_of_what_is_split(size, parts):
    assert [coati.Split(range(5)).part(rank, size) for rank in range(size)] == [
        range(part[0], part[-1] + 1) for part in parts
    ]


def test_rlite_s_engine_refuses_other_ranks_and_executors(model_dir):
    from coati import rlite

    with torch.device("meta"):
        module = OwnModel(OwnModel.config_class(**json.loads((model_dir / "config.json").read_text())))
    module.config.name_or_path = str(model_dir)
    with pytest.raises(ConfigError, match=r'RliteTrainEngine\(executor="ddp"\): there is "fsdp2"'):
        rlite.RliteTrainEngine(module, executor="ddp")
    engine = rlite.RliteTrainEngine(module)
    with pytest.raises(ConfigError, match=r"there are 1 ranks; use rlite.init\(trainers=2\)"):
        engine.build(tensor_parallel_size=2)
    engine.build()
    (loss,) = engine.train_step(rlite.NeedParallel(IDS), 2)
    assert loss == pytest.approx(2 * plain_steps(model_dir, 1)[0][0], rel=1e-5)
