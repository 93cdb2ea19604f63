"""The gradient of an optimizer step is that of its samples, whatever the loss, the cuts and the layout of trainers.

The oracle is `plain_training`: it knows no rows, micro-batches or ranks.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.consumer.conftest import (
    COMBINED,
    LAUNCH_TIMEOUT_S,
    LAYOUTS,
    MAX_GRAD_NORM,
    NUM_STEPS,
    launch_and_check,
    reference_of,
    save_with_reference,
)
from tests.integration.consumer.gradient_faults import FAULTS
from tests.integration.consumer.gradient_process import cases_of
from tests.integration.consumer.losses import LOSSES, NUM_SKIPPED
from tests.integration.consumer.plain_training import plain_gradients, plain_model, plain_steps
from tests.integration.consumer.samples import samples_near

pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S)  # whichever test needs a launch first waits for it
TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2}  # relative L2 per tensor
NORM_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3}  # of losses up to 14
# Of what two steps have made of all float32 masters. AdamW's first steps go by signs, which rounding turns where a
# gradient is nearly 0; a slice that was not stepped on, or with another's gradient, would be about 1.
MASTER_TOLERANCE = {"fp32": 2e-3, "bf16": 0.2}
UPDATE_TOLERANCE = 2e-3  # the same, of what AdamW makes of it


def sharing_out(layout: str, precision: str) -> bool:
    """ZeRO shares out float32 masters of bfloat16 weights; there is no such thing in float32."""
    return not (precision == "fp32" and "zero" in layout)


RUNS = [(name, precision) for name in LAYOUTS for precision in TOLERANCE if sharing_out(name, precision)]
every_run = pytest.mark.parametrize(("layout", "precision"), RUNS)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two architectures, tied and untied."""
    root = tmp_path_factory.mktemp("models")
    return [
        save_with_reference(root / f"{architecture}-{'tied' if tied else 'untied'}", architecture, tied=tied)
        for architecture in ("qwen3", "qwen2")
        for tied in (True, False)
    ]


Ranks = list[dict[Any, Any]]
Trained = Callable[[str, str], dict[Path, Ranks]]  # layout and precision to models to the results of each rank


@pytest.fixture(scope="module")
def trained(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One launch of trainers for all layouts of a size, as starting takes longer than a layout."""
    out_dir = tmp_path_factory.mktemp("gradients")

    @functools.cache
    def launch(world_size: int, precision: str) -> None:
        runs = ",".join(":".join(run) for run in RUNS if (LAYOUTS[run[0]][0], run[1]) == (world_size, precision))
        launch_and_check("gradient_process.py", out_dir, runs, "losses", *paths, world_size=world_size)

    def results(layout: str, precision: str) -> dict[Path, Ranks]:
        launch(LAYOUTS[layout][0], precision)
        chosen = paths[:1] if layout in COMBINED else paths
        return {path: read_ranks(out_dir, layout, precision, path) for path in chosen}

    return results


def read_ranks(out_dir: Path, layout: str, precision: str, path: Path) -> Ranks:
    ranks = range(LAYOUTS[layout][0])
    return [torch.load(out_dir / f"{layout}-{precision}-{path.name}-rank{rank}.pt") for rank in ranks]


def cases(trained: Mapping[Path, Ranks], layout: str, what: str = "losses") -> Iterator[tuple[Path, Ranks, Any]]:
    """Model, ranks, (loss, *cut)."""
    for index, (path, ranks) in enumerate(trained.items()):
        due = [(loss, *cut) for loss, cut in cases_of(what, layout=layout, is_first_model=index == 0)]
        assert [case for case in ranks[0] if isinstance(case, tuple)] == due
        for case in due:
            yield path, ranks, case


def joined(ranks: Ranks, case: Any, step: int, what: str) -> dict[str, Tensor]:
    """Full tensors of the whole model: those of each stage, from its head."""
    return {name: tensor for rank in ranks for name, tensor in rank[case][step][what].items()}


def differences(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> dict[str, float]:
    assert left.keys() == right.keys()
    return {name: float((left[name] - right[name]).norm() / right[name].norm()) for name in right}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_part_of_a_loss_acts_on_the_samples(paths: list[Path], loss: str) -> None:
    """Without it the gradient is another one, by far more than the tolerance."""
    case, model, reference = LOSSES[loss], plain_model(paths[0]), plain_model(reference_of(paths[0]))
    for step in range(NUM_STEPS):
        samples = samples_near(paths[0], step, recomputes_old=case.recomputes_old)
        with_it, without_it = (
            plain_gradients(model, reference, samples, formula, aggregation)[1]
            for formula, aggregation in ((case.formula, case.aggregation), (case.without, "sample_level"))
        )
        assert min(differences(without_it, with_it).values()) > 4 * TOLERANCE["bf16"]


@every_run
def test_every_cut_gives_the_plain_gradient_and_norm_for_two_steps(
    trained: Trained, layout: str, precision: str
) -> None:
    for path, ranks, case in cases(trained(layout, precision), layout):
        for step, right in enumerate(plain_steps(path, case[0], precision)):
            found = differences(joined(ranks, case, step, "gradients"), right["gradients"])
            assert max(found.values()) < TOLERANCE[precision], (path.name, case, step, found)
            for rank in ranks:
                assert rank[case][step]["norm"] == pytest.approx(right["norm"], rel=NORM_TOLERANCE[precision])
                assert rank[case][step]["norm"] > MAX_GRAD_NORM


@pytest.mark.parametrize("layout", [name for name, precision in RUNS if precision == "fp32"])
def test_every_cut_steps_as_plain_training_does(trained: Trained, layout: str) -> None:
    for path, ranks, case in cases(trained(layout, "fp32"), layout):
        for step, right in enumerate(plain_steps(path, case[0])):
            # The update follows signs of gradients that may be noise; this compares learning rate, decay and clipping.
            found = differences(joined(ranks, case, step, "updates"), right["updates"])
            assert max(found.values()) < UPDATE_TOLERANCE, (path.name, case, step, found)


@every_run
def test_the_optimizer_moves_its_masters_where_plain_training_moves_them(
    paths: list[Path], trained: Trained, layout: str, precision: str
) -> None:
    starts = {path: plain_model(path).state_dict() for path in paths}
    for path, ranks, case in cases(trained(layout, precision), layout):
        found = joined(ranks, case, NUM_STEPS - 1, "masters")
        right = plain_steps(path, case[0], precision)[-1]["masters"]
        assert found.keys() == right.keys()
        moved = torch.cat([(right[name] - starts[path][name]).flatten() for name in right])
        apart = torch.cat([(found[name] - right[name]).flatten() for name in right])
        assert apart.norm() < MASTER_TOLERANCE[precision] * moved.norm(), (path.name, case)


@every_run
def test_ranks_that_hold_the_same_weights_keep_them_bit_equal(trained: Trained, layout: str, precision: str) -> None:
    for path, ranks, case in cases(trained(layout, precision), layout):
        seen: dict[Any, str] = {}
        for rank in ranks:
            _, _, tp_rank = rank["layout"]
            for name, digest in rank[case][-1]["weights"].items():
                # Over data-parallel copies and, if tied, over stages; over tensor ranks if it is not cut.
                place = name if name in rank["replicated"] else (name, tp_rank)
                assert seen.setdefault(place, digest) == digest, (path.name, case, name)
        assert len({rank[case][0]["norm"] for rank in ranks}) == 1


@every_run
def test_ranks_with_the_lm_head_report_the_plain_loss(trained: Trained, layout: str, precision: str) -> None:
    for path, ranks, case in cases(trained(layout, precision), layout):
        last_stage = max(rank["layout"][1] for rank in ranks)
        for step, right in enumerate(plain_steps(path, case[0], precision)):
            for rank in ranks:
                sums = rank[case][step]["sums"]
                if rank["layout"][1] < last_stage:
                    assert sums == {}
                    continue
                loss = sums["loss_sum"] * rank[case][step]["loss_scale"]
                assert loss == pytest.approx(right["loss"], abs=LOSS_TOLERANCE[precision]), (path.name, case, step)
                assert sums.get("skipped_samples") == (NUM_SKIPPED if "skip" in case[0] else None)


def test_other_architectures_sliding_windows_and_uneven_stages(tmp_path: Path) -> None:
    paths = [
        save_with_reference(tmp_path / "llama", "llama", tied=False, num_hidden_layers=3, attention_bias=True),
        save_with_reference(tmp_path / "mistral", "mistral", tied=True, num_hidden_layers=3, sliding_window=5),
    ]
    launch_and_check("gradient_process.py", tmp_path, "tp2_pp2:fp32", "cuts", *paths, world_size=4)
    ranks_of = {path: read_ranks(tmp_path, "tp2_pp2", "fp32", path) for path in paths}
    for path, ranks, case in cases(ranks_of, "tp2_pp2", "cuts"):
        for step, right in enumerate(plain_steps(path, case[0])):
            found = differences(joined(ranks, case, step, "gradients"), right["gradients"])
            assert max(found.values()) < TOLERANCE["fp32"], (path.name, case, step, found)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("dp2", "wrong_denominator"),
        ("tp2", "dropped_q_norm_sum"),
        ("pp2", "undivided_pipeline"),
        ("dp1", "ratio_of_a_row"),
    ],
)
def test_a_fault_in_the_trainer_is_noticed(paths: list[Path], tmp_path: Path, layout: str, fault: str) -> None:
    launch_and_check("gradient_process.py", tmp_path, f"{layout}:fp32", fault, paths[0], world_size=LAYOUTS[layout][0])
    ranks_of = {paths[0]: read_ranks(tmp_path, layout, "fp32", paths[0])}
    ((_, ranks, case),) = cases(ranks_of, layout, fault)
    right = plain_steps(paths[0], FAULTS[fault][1])[0]["gradients"]
    found = differences(joined(ranks, case, 0, "gradients"), right)
    assert max(found.values()) > 1000 * TOLERANCE["fp32"]
    if fault == "dropped_q_norm_sum":
        wrong = {name for name, difference in found.items() if difference > TOLERANCE["fp32"]}
        assert {name.rsplit(".", 2)[1] for name in wrong} == {"q_norm", "k_norm"}
