"""DPO in a loop of one's own: python own_dpo.py MODEL PAIRS.jsonl OUTPUT"""

import json
import random
import sys
from pathlib import Path

import coati

model, data, output = sys.argv[1:]
rows = [json.loads(line) for line in Path(data).read_text().split("\n") if line]

with coati.Trainer(model, loss="dpo", beta=0.1, max_length=128, train_microbatch_size=8) as trainer:
    samples = coati.rows(trainer, rows)  # {"prompt", "chosen", "rejected"}: two samples of each
    pairs = [samples[start : start + 2] for start in range(0, len(samples), 2)]
    for step in range(10):
        batch = random.Random(step).sample(pairs, 8)
        metrics = trainer.forward_backward([sample for pair in batch for sample in pair])
        trainer.optim_step(lr=2e-4)
        print(f"step {step + 1} loss {metrics['loss']:.3f} accuracy {metrics['rewards/accuracies']:.2f}", flush=True)
    trainer.save(output)
