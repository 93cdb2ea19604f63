"""Test that a step's gradient is that of its samples, for every loss, split and trainer layout.

The oracle is `plain_training`: it knows no rows, micro-batches or ranks.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.consumer.conftest import EVERY_LAYOUT, LAYOUTS, MAX_GRAD_NORM, NUM_STEPS, save_with_reference
from tests.integration.consumer.gradient_faults import FAULTS
from tests.integration.consumer.gradient_matrix import CASES, MODELS, OTHER_MODELS, RUNS, Run, Trial, is_full, trials_of
from tests.integration.consumer.gradient_process import NUM_SCORED, take_trials
from tests.integration.consumer.losses import LOSSES, NUM_SKIPPED
from tests.integration.consumer.plain_training import PlainSteps, plain_gradients, plain_steps, ref_logprobs_of
from tests.integration.consumer.samples import plain_model, sample_logprobs, samples_near
from tests.integration.consumer.trainer_server import LAUNCH_TIMEOUT_S, TrainerServers

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)  # whichever test needs a launch first waits for it
TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}  # L2 per tensor, relative to its scale: see `key_bias_terms`
NORM_TOLERANCE = 1e-5  # relative, of the clip norm, to the norm of the gradients that are compared
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}  # of losses up to 14
# Of what two steps have made of all float32 masters. AdamW's first steps go by signs, which rounding turns where a
# gradient is nearly 0; a slice that was not stepped on, or with another's gradient, would be about 1.
MASTER_TOLERANCE = {"fp32": 2e-3, "bf16": 0.2}
UPDATE_TOLERANCE = 2e-3  # the same, of what AdamW makes of each tensor in a step


def runs(*precisions: str) -> pytest.MarkDecorator:
    """Parametrize by the runs in these precisions."""
    chosen = [run for run in RUNS if run.precision in precisions]
    marked = [pytest.param(run, marks=pytest.mark.full) if is_full(run) else run for run in chosen]
    return pytest.mark.parametrize("run", marked, ids="-".join)


every_run = runs("fp32", "bf16")

Steps = list[dict[str, Any]]


class Trained:
    """Hold the records of a run's ranks, with the reference result of each trial."""

    def __init__(self, model_root: Path, run: Run, trials: list[Trial], out_dir: Path) -> None:
        self._model_root = model_root
        self._run = run
        self._trials = trials
        name = "-".join(run)
        self.ranks: list[dict[Any, Any]] = [
            torch.load(out_dir / f"{name}-rank{rank}.pt") for rank in range(run.world_size)
        ]

    def __iter__(self) -> Iterator[tuple[Trial, list[Steps], PlainSteps]]:
        """Trial, its steps on each rank, its steps in plain training."""
        for trial in self._trials:
            right = plain_steps(self._model_root / trial.model, trial.loss, self._run.precision)
            yield trial, [rank[trial] for rank in self.ranks], right

    def joined(self, trial: Trial, step: int, what: str) -> dict[str, Tensor]:
        """The whole tensors of the model from what each rank holds of them."""
        slices: dict[str, dict[int, dict[int, Tensor]]] = {}  # by name, tensor rank and data-parallel rank
        for rank in self.ranks:
            dp_rank, _, tp_rank = rank["place"]
            for name, tensor in rank[trial][step][what].items():
                slices.setdefault(name, {}).setdefault(tp_rank, {})[dp_rank] = tensor
        known = {name: shard for rank in self.ranks for name, shard in rank[trial.model, "shards"].items()}
        settings = EVERY_LAYOUT[self._run.layout][1]
        is_sliced = settings.get("zero_stage", 0) > 0 or settings.get("plugin") == "fsdp2"
        # Of the first copy, which has the first dp_ranks.
        num_shards = settings.get("fsdp_size") or 1 + max(rank["place"][0] for rank in self.ranks)
        ep_size = settings.get("ep_size", 1)

        def place(name: str, dp_rank: int) -> int:
            """Neighbours have other experts, and ranks with the same ones their rows in order."""
            ep_rank, row = dp_rank % ep_size, dp_rank // ep_size
            return ep_rank * (num_shards // ep_size) + row if ".experts." in name else dp_rank

        held = {
            name: {
                tp_rank: {place(name, dp): each for dp, each in by_dp.items() if dp < num_shards}
                for tp_rank, by_dp in by_tp.items()
            }
            for name, by_tp in slices.items()
        }
        return {name: join(by_rank, *known[name], is_sliced=is_sliced) for name, by_rank in held.items()}


def join(
    by_rank: dict[int, dict[int, Tensor]], shape: tuple[int, ...], split_dim: int | None, *, is_sliced: bool
) -> Tensor:
    """A tensor from its shards by tensor rank, of which ZeRO and FSDP2 leave each data-parallel rank a run of elements.

    ZeRO pads the last one.
    """
    shards = []
    for tp_rank in sorted(by_rank):
        copies = [by_rank[tp_rank][dp_rank] for dp_rank in sorted(by_rank[tp_rank])]
        whole = torch.cat([copy.flatten() for copy in copies]) if is_sliced else copies[0]
        shards.append(whole.flatten()[: math.prod(shape)].view(shape))
    return shards[0] if split_dim is None else torch.cat(shards, dim=split_dim)


@pytest.fixture(scope="module")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, (architecture, settings) in (MODELS | OTHER_MODELS).items():
        save_with_reference(root / name, architecture, **settings)
    return root


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
    trainers: TrainerServers,
    model_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Run], Trained]:
    """One launch of trainers for all runs of a size."""
    out_dir = tmp_path_factory.mktemp("gradients")
    trials = {run: trials_of(run, is_all=request.config.getoption("--all")) for run in RUNS}

    @functools.cache
    def launch(world_size: int) -> None:
        due = [(run, trials[run]) for run in RUNS if run.world_size == world_size and trials[run]]
        trainers.launch_and_check(take_trials, out_dir, model_root, due, world_size=world_size)

    @functools.cache
    def results(run: Run) -> Trained:
        launch(run.world_size)
        return Trained(model_root, run, trials[run], out_dir)

    return results


@functools.cache
@torch.no_grad()
def exact_logprobs(model_dir: Path) -> Tensor:
    """float32 log-probabilities of some of a step's counted tokens, from weights rounded to bfloat16."""
    model = copy.deepcopy(plain_model(model_dir))
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return torch.cat([sample_logprobs(model, sample) for sample in samples_near(model_dir, 0)[:NUM_SCORED]])


def norm_of(gradients: dict[str, Tensor]) -> float:
    """L2 over all tensors, before clipping."""
    return math.hypot(*(float(gradient.norm()) for gradient in gradients.values()))


def differences(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], scales: Mapping[str, float] | None = None
) -> dict[str, float]:
    """L2 of the difference by tensor, relative to `scales`; None: to the norm of `right`."""
    assert left.keys() == right.keys()
    scales = scales or {name: tensor.norm().item() for name, tensor in right.items()}
    return {name: float((left[name] - right[name]).norm() / scales[name]) for name in right}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("loss", CASES)
def test_every_part_of_a_loss_acts_on_the_samples(request: pytest.FixtureRequest, model_root: Path, loss: str) -> None:
    """Without it the gradient is another one, by far more than the tolerance."""
    case, model_dir = CASES[loss], model_root / next(iter(MODELS))
    for step in range(NUM_STEPS if request.config.getoption("--all") else 1):
        samples = samples_near(model_dir, step, recomputes_old=case.recomputes_old, kind=case.kind)
        ref_logprobs = ref_logprobs_of(model_dir, step, case.kind)
        with_it, without_it = (
            plain_gradients(plain_model(model_dir), samples, ref_logprobs, formula, aggregation, case.unit)[1]
            for formula, aggregation in ((case.formula, case.aggregation), (case.without, "sample_level"))
        )
        assert min(differences(without_it, with_it).values()) > 4 * TOLERANCE["bf16"]


@every_run
def test_every_cut_gives_the_plain_gradient_and_norm(trained: Callable[[Run], Trained], run: Run) -> None:
    results = trained(run)
    for trial, ranks, right in results:
        for step in range(trial.num_steps):
            gradients = results.joined(trial, step, "gradients")
            found = differences(gradients, right[step]["gradients"], right[step]["scales"])
            assert max(found.values()) < TOLERANCE[run.precision], (trial, step, found)
            norm = norm_of(gradients)
            for steps in ranks:
                assert steps[step]["norm"] == pytest.approx(norm, rel=NORM_TOLERANCE), (trial, step)
                assert steps[step]["norm"] > MAX_GRAD_NORM


@runs("fp32")
def test_every_cut_steps_as_plain_training_does(model_root: Path, trained: Callable[[Run], Trained], run: Run) -> None:
    """The update follows signs of gradients that may be noise; this compares learning rate, decay and clipping."""
    results = trained(run)
    for trial, _, right in results:
        before = {name: p.detach() for name, p in plain_model(model_root / trial.model).named_parameters()}
        found_before = before
        for step in range(trial.num_steps):
            after, found_after = right[step]["masters"], results.joined(trial, step, "masters")
            found = differences(
                {name: found_after[name] - found_before[name] for name in found_after},
                {name: after[name] - before[name] for name in after},
            )
            assert max(found.values()) < UPDATE_TOLERANCE, (trial, step, found)
            before, found_before = after, found_after


@every_run
def test_the_optimizer_moves_its_masters_where_plain_training_moves_them(
    model_root: Path, trained: Callable[[Run], Trained], run: Run
) -> None:
    results = trained(run)
    for trial, _, steps in results:
        start = plain_model(model_root / trial.model).state_dict()
        last = trial.num_steps - 1
        found, right = results.joined(trial, last, "masters"), steps[last]["masters"]
        assert found.keys() == right.keys()
        moved = torch.cat([(right[name] - start[name]).flatten() for name in right])
        apart = torch.cat([(found[name] - right[name]).flatten() for name in right])
        assert apart.norm() < MASTER_TOLERANCE[run.precision] * moved.norm(), trial


@every_run
def test_ranks_that_hold_the_same_weights_keep_them_bit_equal(trained: Callable[[Run], Trained], run: Run) -> None:
    for trial, ranks, _ in trained(run):
        seen: dict[Any, str] = {}
        for steps in ranks:
            # Over data-parallel copies and, if tied, over stages; over tensor ranks if it is not cut.
            for place, digest in steps[-1]["weights"].items():
                assert seen.setdefault(place, digest) == digest, (trial, place)
        assert len({steps[0]["norm"] for steps in ranks}) == 1


@every_run
def test_ranks_with_the_lm_head_report_the_plain_loss(trained: Callable[[Run], Trained], run: Run) -> None:
    results = trained(run)
    stages = [rank["place"][1] for rank in results.ranks]
    for trial, ranks, right in results:
        for step in range(trial.num_steps):
            for stage, steps in zip(stages, ranks, strict=True):
                sums = steps[step]["sums"]
                if stage < max(stages):
                    assert sums == {}
                    continue
                loss = sums["loss_sum"] * steps[step]["loss_scale"]
                assert loss == pytest.approx(right[step]["loss"], abs=LOSS_TOLERANCE[run.precision]), (trial, step)
                assert sums.get("skipped_samples") == (NUM_SKIPPED if "skip" in trial.loss else None)


@runs("bf16")
def test_every_layout_scores_in_float32_what_its_bfloat16_weights_say(
    model_root: Path, trained: Callable[[Run], Trained], run: Run
) -> None:
    results = trained(run)
    last = max(rank["place"][1] for rank in results.ranks)
    for model in {trial.model for trial, _, _ in results}:
        right = exact_logprobs(model_root / model)
        for rank in results.ranks:
            rounded, exact = rank[model, "scores"]
            if rank["place"][1] < last:
                assert rounded == exact == []
                continue
            torch.testing.assert_close(torch.cat(exact, dim=1)[0], right, rtol=0, atol=1e-5)
            assert (torch.cat(rounded, dim=1)[0] - right).abs().mean() > 1e-4, "bfloat16 rounds"


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("dp2", "wrong_denominator"),
        ("tp2", "dropped_q_norm_sum"),
        ("pp2", "undivided_pipeline"),
        ("dp1", "ratio_of_a_row"),
    ],
)
def test_a_fault_in_the_trainer_is_noticed(
    trainers: TrainerServers, model_root: Path, tmp_path: Path, layout: str, fault: str
) -> None:
    put_in, loss = FAULTS[fault]
    run, trial = Run(layout, "fp32"), Trial("qwen3-tied", loss, LOSSES[loss].cuts[0], num_steps=1)
    due = [(run, [trial])]
    trainers.launch_and_check(take_trials, tmp_path, model_root, due, put_in, world_size=LAYOUTS[layout][0])
    results = Trained(model_root, run, [trial], tmp_path)
    right = plain_steps(model_root / trial.model, loss)
    found = differences(results.joined(trial, 0, "gradients"), right[0]["gradients"])
    assert max(found.values()) > 1000 * TOLERANCE["fp32"]
    if fault == "dropped_q_norm_sum":
        wrong = {name for name, difference in found.items() if difference > TOLERANCE["fp32"]}
        assert {name.rsplit(".", 2)[1] for name in wrong} == {"q_norm", "k_norm"}
