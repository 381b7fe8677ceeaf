"""A scale far below tiny: its runs take a few steps of a few hundred tokens."""

import dataclasses

from merit_lab.models import ModelConfig
from merit_lab.paper.scales import Scale, Setup

MODEL = ModelConfig(width=16, heads=2, layers=3, context=16, vocab_size=256)
RATES = {
    "adamw": 1e-3,
    "lamb-uncorrected": 1e-2,
    "maxlamb": 1e-2,
    "merit": 1e-2,
    "lion": 1e-4,
    "sophiag": 1e-3,
}


def make_scale(*, steps: int = 4, seeds: int = 2, **changes: object) -> Scale:
    """A scale whose runs take a few steps of a few hundred tokens."""
    setup = Setup(size="toy", model=MODEL, batch=8, tokens=steps * 8 * 16, rates=dict(RATES))
    llama = dataclasses.replace(setup, size="toy llama", model=dataclasses.replace(MODEL, family="llama"))
    wide = dataclasses.replace(setup, size="wide", model=dataclasses.replace(MODEL, width=24, layers=1))
    deep = dataclasses.replace(setup, size="deep", model=dataclasses.replace(MODEL, width=12, layers=4))
    scale = Scale(
        name="toy",
        summary="for tests",
        gpt2=(setup,),
        llama=(llama,),
        batches=(4, 8),
        small_batch=4,
        references=(setup.with_batch(4),),
        longer=setup.longer(2),
        doubled=(setup.with_batch(16),),
        long=(setup.with_batch(4), setup),
        shapes=(wide, deep),
        shape_batches=(4, 8),
        seeds=seeds,
        grid_seeds=1,
        num_measurements=4,
        num_checkpoints=2,
        validation_sequences=8,
        curvature_sequences=2,
        curvature_probes=2,
        evaluation_limit=2,
        tokenizer="bytes",
    )
    return dataclasses.replace(scale, **changes)
