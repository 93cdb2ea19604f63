"""GRPO in a loop of one's own, on a directory of scripts/make_tiny_model.py.

python own_loop.py DIRECTORY                       in one process
torchrun --nproc-per-node 2 own_loop.py DIRECTORY  two trainer ranks, and an engine in each
python own_loop.py DIRECTORY --cluster             on Ray: two trainer ranks and one engine
"""

import argparse
import contextlib
import json
from pathlib import Path

import coati

parser = argparse.ArgumentParser()
parser.add_argument("directory", type=Path)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--backend", default="transformers")
parser.add_argument("--cluster", action="store_true")
parser.add_argument("--colocate", action="store_true", help="engines and trainers on the same devices, in turns")
parser.add_argument("--tensor-parallel", action="store_true", help="over two ranks, in place of data parallel")
parser.add_argument("--context-parallel", action="store_true", help="two ranks share each row of samples")


def read(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def accuracy(engine, rows):
    answers = engine.generate([[row["messages"]] for row in rows], temperature=0.0)
    return sum(reward(one.text, row["gt_answer"]).reward for row, (one,) in zip(rows, answers, strict=True)) / len(rows)


if __name__ == "__main__":
    args = parser.parse_args()
    train, held_out = read(args.directory / "train.jsonl"), read(args.directory / "eval.jsonl")[:64]
    reward = coati.reward("boxed")
    shared = {"colocate": args.colocate}
    with coati.cluster(trainers=2, engines=1, **shared) if args.cluster else contextlib.nullcontext() as on:
        limits = {"max_prompt_tokens": 64, "max_new_tokens": 32}
        engine = coati.Engine(args.directory, on=on, backend=args.backend, **limits, **shared)
        layout = {"tensor_parallel_size": 2} if args.tensor_parallel else {}
        layout |= {"context_parallel_size": 2} if args.context_parallel else {}
        flags = {"kl_coeff": 0.0, "train_microbatch_size": 64, **limits, **layout}
        trainer = coati.Trainer(args.directory, loss="grpo", on=on, **flags)
        before = accuracy(engine, held_out)
        for step in range(args.steps):
            rows = train[step * 32 : (step + 1) * 32]
            samples, rewards = [], []
            for row, group in zip(rows, engine.generate([[row["messages"]] for row in rows], n=8), strict=True):
                scores = [reward(one.text, row["gt_answer"]) for one in group]
                samples += coati.group_samples(group, scores)
                rewards += [score.reward for score in scores]
            if args.colocate:
                engine.sleep(), trainer.cuda()
            trainer.forward_backward(samples)
            trainer.optim_step(lr=5e-4)
            push = trainer.push_to(engine)
            if args.colocate:
                trainer.cpu()
                push = engine.wake()
            mean = sum(rewards) / len(rewards)
            print(f"step {step + 1} reward {mean:.3f} gap {push.gap:.1e} push {push.seconds:.2f} s", flush=True)
        print(f"held-out accuracy {before:.3f} -> {accuracy(engine, held_out):.3f}")
        trainer.cuda()
        trainer.save("own-loop-checkpoint")
        trainer.close(), engine.close()
