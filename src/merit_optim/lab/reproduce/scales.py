"""The four scales."""

from __future__ import annotations

from dataclasses import replace

from merit_optim.lab.models import PRESETS, ModelConfig
from merit_optim.lab.reproduce.scale import Scale, Setting
from merit_optim.optim.registry import OPTIMIZERS

_K, _B = 1024, 10**9


def _paper_rates(model: str) -> dict[str, float]:
    """Table 4 of the paper; it has no rate for maxLAMB, which gets LAMB's."""
    rates = {name: own.learning_rates[model] for name, own in OPTIMIZERS.items() if own.learning_rates}
    return {**rates, "maxlamb": rates["lamb"]}


def _gpt2(size: str, batch: int, tokens: int) -> Setting:
    model = f"gpt2-{size}"
    return Setting(
        name=f"GPT-2 {size}, batch {batch // _K}K",
        model=PRESETS[model],
        batch=batch,
        tokens=tokens,
        rates=_paper_rates(model),
        paper=size,
    )


def _llama(size: str, like: str, batch: int, tokens: int) -> Setting:
    return Setting(
        name=f"Llama {size}, batch {batch // _K}K",
        model=PRESETS[f"llama-{size.lower()}"],
        batch=batch,
        tokens=tokens,
        rates=_paper_rates(like),
        paper=size,
    )


def _long(size: str, rate: float, batch: int) -> tuple[Setting, Setting]:
    """Table 1: 48B tokens. The paper gives no learning rate for the small batch; these are Sophia's."""
    large = _gpt2(size, batch, 48 * _B)
    name = f"GPT-2 {size}, batch 480"
    return replace(large, name=name, batch=480, rates={"adamw": rate}), large


def _shapes(setting: Setting, wide: ModelConfig, deep: ModelConfig) -> tuple[Setting, ...]:
    return replace(setting, name="wide", model=wide), replace(setting, name="deep", model=deep)


_SMALL = _gpt2("small", 1 * _K, 2 * _B)
_MEDIUM = _gpt2("medium", 4 * _K, 8 * _B)
_LARGE = _gpt2("large", 8 * _K, 16 * _B)
_GPT2_SHAPES = (
    replace(PRESETS["gpt2-small"], width=1280, heads=20, layers=4),  # 78.7M in the blocks
    replace(PRESETS["gpt2-small"], width=512, heads=8, layers=25),  # 78.6M
)

# 128 steps of 64 sequences of 64 bytes. The learning rates are the best of grids by factors of two with one
# seed; table4 shows them with their neighbours.
_TINY = Setting(
    name="GPT-2 0.2M, batch 64",
    model=PRESETS["tiny"],
    batch=64,
    tokens=128 * 64 * 64,
    rates={
        "adamw": 2e-3,
        "lamb": 4e-2,
        "maxlamb": 4e-2,
        "merit": 4e-2,
        "lion": 1.6e-3,
        "sophiag": 2e-3,
    },
)
_LLAMA_TINY = replace(_TINY, name="Llama 0.2M, batch 64", model=PRESETS["llama-tiny"])
# 200 steps of 256 sequences of 512 bytes. AdamW's, LAMB's and MERIT's learning rates are the best of grids by
# factors of two on one H200 (`merit demo` has the numbers); the others' are theirs at the same ratio to
# AdamW's or LAMB's as in the paper, and not tuned.
_NANO = Setting(
    name="GPT-2 10M, batch 256",
    model=PRESETS["nano-10m"],
    batch=256,
    tokens=200 * 256 * 512,
    rates={"adamw": 5e-4, "lamb": 2e-2, "maxlamb": 2e-2, "merit": 1e-2, "lion": 5e-5, "sophiag": 1e-4},
)
_LLAMA_NANO = replace(_NANO, name="Llama 10M, batch 256", model=replace(_NANO.model, family="llama"))

SCALES = {
    "tiny": Scale(
        name="tiny",
        summary="0.2M parameters, bytes of Python sources, two CPU cores: minutes for everything",
        gpt2=(_TINY,),
        llama=(_LLAMA_TINY,),
        batches=(16, 64, 256),
        small_batch=16,
        long=(_TINY.with_batch(16), _TINY),
        shapes=_shapes(
            _TINY,
            replace(_TINY.model, width=96, heads=6, layers=2),  # 0.22M parameters in the blocks
            replace(_TINY.model, width=48, heads=3, layers=8),  # 0.22M
        ),
        shape_batches=(16, 64, 256),
        curvature_sequences=16,
        curvature_probes=16,
        evaluation_limit=50,
        makes_data=True,
    ),
    "nano": Scale(
        name="nano",
        summary="10M parameters, bytes of Python sources, one GPU: minutes for a run",
        gpt2=(_NANO,),
        llama=(_LLAMA_NANO,),
        batches=(32, 64, 128, 256, 512),
        small_batch=32,
        long=(_NANO.with_batch(32), _NANO),
        shapes=_shapes(
            _NANO,
            replace(_NANO.model, width=576, heads=9, layers=3),  # 11.9M parameters in the blocks
            replace(_NANO.model, width=320, heads=5, layers=10),  # 12.3M
        ),
        shape_batches=(32, 128, 512),
        makes_data=True,
    ),
    "small": Scale(
        name="small",
        summary="the paper's GPT-2 small and Llama 130M, a GPU node",
        gpt2=(_SMALL,),
        llama=(_llama("130M", "gpt2-small", 1 * _K, 26 * _B // 10),),
        batches=(128, 256, 512, 1 * _K, 2 * _K),
        small_batch=128,
        long=_long("small", 6e-4, 4 * _K),
        shapes=_shapes(_SMALL, *_GPT2_SHAPES),
        shape_batches=(256, 1 * _K, 4 * _K),
        seeds=1,
        num_looks=100,
        validation_sequences=4 * _K,
        is_large=True,
    ),
    "paper": Scale(
        name="paper",
        summary="all of the paper's models at its own settings, a cluster",
        gpt2=(_SMALL, _MEDIUM, _LARGE),
        llama=(
            _llama("130M", "gpt2-small", 1 * _K, 26 * _B // 10),
            _llama("350M", "gpt2-medium", 4 * _K, 8 * _B),
        ),
        batches=(128, 256, 512, 1 * _K, 2 * _K, 4 * _K),
        small_batch=512,
        long=(*_long("small", 6e-4, 4 * _K), *_long("medium", 3e-4, 6 * _K)),
        shapes=_shapes(_SMALL, *_GPT2_SHAPES),
        shape_batches=(256, 1 * _K, 4 * _K),
        seeds=1,
        num_looks=100,
        validation_sequences=4 * _K,
        is_large=True,
    ),
}
