"""Test the examples of the library: what they learn, alone, in processes of torchrun and in actors of Ray."""

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
NUM_STEPS = 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    run(str(ROOT / "scripts" / "make_tiny_model.py"), str(directory), cwd=directory.parent)
    return directory


def run(*arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines_of(output: str) -> list[tuple[float, float]]:
    """Reward and gap of each step."""
    found = re.findall(r"step \d+ reward ([\d.]+) gap (\S+)", output)
    return [(float(reward), float(gap)) for reward, gap in found]


def accuracies(output: str) -> tuple[float, float]:
    (found,) = set(re.findall(r"held-out accuracy ([\d.]+) -> ([\d.]+)", output))
    return float(found[0]), float(found[1])


@pytest.fixture(scope="module")
def of_one_process(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    cwd = tmp_path_factory.mktemp("one")
    return run(str(EXAMPLES / "own_loop.py"), str(tiny), "--steps", str(NUM_STEPS), cwd=cwd)


def test_forty_steps_raise_the_accuracy_by_forty_points(tiny: Path, tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "own_loop.py"), str(tiny), cwd=tmp_path)
    before, after = accuracies(output)
    assert after - before >= 0.4
    steps = lines_of(output)
    assert len(steps) == 40
    assert max(gap for _, gap in steps) <= 1e-4
    assert (tmp_path / "own-loop-checkpoint" / "model.safetensors").is_file()


@pytest.mark.parametrize("layout", [(), ("--tensor-parallel",)], ids=["data parallel", "tensor parallel"])
def test_two_processes_of_torchrun_take_the_same_steps(
    layout: tuple[str, ...], of_one_process: str, tiny: Path, tmp_path: Path
) -> None:
    arguments = (*TORCHRUN, str(EXAMPLES / "own_loop.py"), str(tiny), "--steps", str(NUM_STEPS), *layout)
    output = run(*arguments, cwd=tmp_path)
    assert accuracies(output) == pytest.approx(accuracies(of_one_process), abs=0.05)
    steps = lines_of(output)
    assert len(steps) == 2 * NUM_STEPS  # each process prints them
    assert max(gap for _, gap in steps) <= 1e-4


def test_processes_of_several_nodes_of_torchrun_push_over_the_network(tiny: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    nodes = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")
    with ThreadPoolExecutor() as pool:
        run_node = partial(run, cwd=tmp_path)
        loop = (str(EXAMPLES / "own_loop.py"), str(tiny), "--steps", "2")
        started = [
            pool.submit(run_node, *nodes, "--master-port", port, "--node-rank", str(rank), *loop) for rank in range(2)
        ]
        outputs = [each.result() for each in started]
    assert all(len(lines_of(output)) == 2 for output in outputs)
    assert max(gap for output in outputs for _, gap in lines_of(output)) <= 1e-4


def test_actors_of_ray_take_the_same_steps(of_one_process: str, tiny: Path, tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "own_loop.py"), str(tiny), "--steps", str(NUM_STEPS), "--cluster", cwd=tmp_path)
    assert accuracies(output) == pytest.approx(accuracies(of_one_process), abs=0.05)
    assert len(lines_of(output)) == NUM_STEPS


@pytest.mark.parametrize("where", [(), ("--cluster",)], ids=["one process", "Ray"])
def test_in_turns_on_one_device_the_steps_are_the_same(
    where: tuple[str, ...], of_one_process: str, tiny: Path, tmp_path: Path
) -> None:
    loop = (str(EXAMPLES / "own_loop.py"), str(tiny), "--steps", str(NUM_STEPS), *where)
    apart = run(*loop, cwd=tmp_path) if where else of_one_process
    in_turns = run(*loop, "--colocate", cwd=tmp_path)
    assert lines_of(in_turns) == lines_of(apart)
    assert accuracies(in_turns) == accuracies(apart)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a directory of a random Qwen2, which is unlikely to end an answer before its limit."""
    directory = tmp_path_factory.mktemp("rlite") / "qwen2"
    end = "<|endoftext|>"
    words = [end, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"w{number}" for number in range(3839))]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)
    made.save_pretrained(directory)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=len(words), eos_token_id=0, pad_token_id=0, bos_token_id=None, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory.parent


AFTER = """
(answer,) = vllm_engine.generate(["Hello, world!"], seed=1)[0].outputs
print("answer", answer.token_ids)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_rlite_s_tutorial_runs_and_the_engine_answers_by_what_was_learned(qwen2: Path, ranks: int) -> None:
    tutorial = (EXAMPLES / "rlite_tutorial.py").read_text().replace("lr=1e-5", "lr=1e-1")
    places = {"rlite.init()": f"rlite.init(trainers={ranks}, engines=1)", "size=1, colo": f"size={ranks}, colo"}
    for old, new in places.items() if ranks > 1 else ():
        assert old in tutorial
        tutorial = tutorial.replace(old, new)
    before = tutorial[: tutorial.index("vllm_engine.meta()")]
    found = []
    for text in (before, tutorial):
        (qwen2 / "program.py").write_text(text + AFTER)
        found.append(re.findall(r"answer \[.*\]", run("program.py", cwd=qwen2)))
    assert [len(each) for each in found] == [1, 1]
    assert found[0] != found[1]


def test_vllm_serves_what_is_pushed(tiny: Path, tmp_path: Path) -> None:
    output = run(str(EXAMPLES / "own_loop.py"), str(tiny), "--steps", "2", "--backend", "vllm", cwd=tmp_path)
    assert max(gap for _, gap in lines_of(output)) <= 1e-4


def test_loops_on_a_dataset_learn(tiny: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().split("\n")[:-1][:64]]

    def answer(row: dict, added: int) -> list[dict]:
        return [{"role": "assistant", "content": f"\\boxed{{{int(row['gt_answer']) + added}}}"}]

    conversations = [{"messages": [row["messages"], *answer(row, 0)]} for row in rows]
    pairs = [{"prompt": [row["messages"]], "chosen": answer(row, 0), "rejected": answer(row, 1)} for row in rows]
    found = {}
    for name, data in (("own_sft", conversations), ("own_dpo", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        output = run(str(EXAMPLES / f"{name}.py"), str(tiny), f"{name}.jsonl", f"{name}-model", cwd=tmp_path)
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
        found[name] = losses[0], sum(losses[-3:]) / 3
        assert (tmp_path / f"{name}-model" / "config.json").is_file()
    assert found["own_sft"][1] < 0.8 * found["own_sft"][0]
    assert found["own_dpo"][1] < found["own_dpo"][0] == pytest.approx(0.693, abs=1e-3)


def test_a_training_session_on_a_cluster_goes_on_from_its_checkpoints(tiny: Path, tmp_path: Path) -> None:
    """Adapters and all weights over two ranks; a script of its own, as Ray must be imported after its settings."""
    script = tmp_path / "session.py"
    script.write_text(
        """
import sys
from pathlib import Path
import numpy as np
import coati
from coati_rl.tinker.core import AdamStep, Datum, LossRequest, ModelSpec

ids = np.arange(5, 30)
data = [Datum(tokens=ids[:-1], inputs={"target_tokens": ids[1:]})] * 3
step = AdamStep(learning_rate=1e-2)
with coati.cluster(trainers=2, device="cpu") as cluster:
    with coati.TrainingSession(sys.argv[1], on=cluster, tensor_parallel_size=2) as session:
        for rank in (4, 0):
            session.create(f"r{rank}", ModelSpec(rank=rank, seed=1))
            losses = []
            for number in range(3):
                model = f"r{rank}" if number < 2 else f"loaded{rank}"
                (result,) = session.forward_backward([LossRequest(model=model, data=data, loss="cross_entropy")])
                losses.append(result.metrics["loss:sum"])
                session.optim_step(model, step)
                if number == 1:
                    session.save(model, Path(f"saved{rank}"), with_optimizer=True)
                    session.load(f"loaded{rank}", Path(f"saved{rank}"), with_optimizer=True)
            assert losses[0] > losses[1] > losses[2], losses
print("done")
"""
    )
    assert run(str(script), str(tiny), cwd=tmp_path).splitlines()[-1] == "done"
