"""Supervised fine-tuning in a loop of one's own: python own_sft.py MODEL ROWS.jsonl OUTPUT"""

import json
import random
import sys
from pathlib import Path

import coati

model, data, output = sys.argv[1:]
rows = [json.loads(line) for line in Path(data).read_text().split("\n") if line]

with coati.Trainer(model, loss="sft", max_length=128, train_microbatch_size=16) as trainer:
    samples = coati.rows(trainer, rows)  # {"messages": [...]}, {"prompt", "completion"} or {"text"}
    for step in range(20):
        metrics = trainer.forward_backward(random.Random(step).sample(samples, 16))
        trainer.optim_step(lr=1e-3)
        print(f"step {step + 1} loss {metrics['loss']:.3f} perplexity {metrics['perplexity']:.2f}", flush=True)
    trainer.save(output)
