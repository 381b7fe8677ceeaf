"""The four scales as data: models, batches, tokens, learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from merit_lab.models import PRESETS, ModelConfig
from merit_optim.optim.registry import OPTIMIZERS

_K, _B = 1024, 10**9


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, a batch and a number of tokens, with a learning rate for each optimizer."""

    size: str
    """As shown in tables: "GPT-2 small"."""
    model: ModelConfig
    batch: int
    tokens: int
    rates: Mapping[str, float]
    remark: str = ""
    """What tells it from the others of this size and batch."""

    @property
    def name(self) -> str:
        """As shown in tables: "GPT-2 small, batch 1024"."""
        return ", ".join(filter(None, (self.size, f"batch {self.batch}", self.remark)))

    def with_batch(self, batch: int) -> Setup:
        """The same number of tokens with another batch, learning rates scaled by its square root.

        This suits Adam's gradient noise (Malladi et al., 2022). The paper gives one learning rate for each
        model, and none for other batches.
        """
        factor = math.sqrt(batch / self.batch)
        rates = {name: float(f"{rate * factor:.3g}") for name, rate in self.rates.items()}
        return replace(self, batch=batch, rates=rates)

    def longer(self, factor: int) -> Setup:
        """The same with more tokens."""
        return replace(self, tokens=factor * self.tokens, remark=f"tokens x{factor}")

    def with_adamw(self, batch: int, rate: float) -> Setup:
        """The same number of tokens with a small batch, for AdamW only."""
        return replace(self, batch=batch, rates={"adamw": rate})


@dataclass(frozen=True, kw_only=True)
class Scale:
    """All setups of one scale, and how its runs are measured."""

    name: str
    summary: str
    gpt2: tuple[Setup, ...]
    llama: tuple[Setup, ...]
    batches: tuple[int, ...]
    """Of figure 1, for the first of ``gpt2``; the second has the same multiples of its batch."""
    small_batch: int
    """Of figure 11, for the observed setup."""
    references: tuple[Setup, ...]
    """AdamW with small batches and as many tokens, one for each of the first of ``gpt2``."""
    longer: Setup
    """The first of ``gpt2`` with several times the tokens."""
    doubled: tuple[Setup, ...]
    """Twice the batch, as many tokens and separate rates, one for each of the first of ``gpt2``."""
    long: tuple[Setup, ...]
    """Of table 1, in pairs: a small batch for AdamW, then a large one for MERIT."""
    shapes: tuple[Setup, Setup]
    """As many parameters in few wide layers, and in many narrow ones."""
    shape_batches: tuple[int, ...]
    seeds: int = 3
    grid_seeds: int = 1
    """Seeds of entries with many runs."""
    num_measurements: int = 20
    """How often a run measures validation loss, attention and updates."""
    num_checkpoints: int = 5
    validation_sequences: int = 256
    curvature_sequences: int = 64
    """Sequences that the Hessian of figure 7 is computed on."""
    curvature_probes: int = 32
    """Random vectors for the trace; the density takes twice as many Lanczos steps."""
    evaluation_limit: int | None = None
    """Items of each evaluation set; None for all."""
    tokenizer: str | None = None
    """For the text that every machine has; None if that is too little and --data is required."""

    @property
    def is_large(self) -> bool:
        """Whether it needs data of its own and many GPU hours, and so asks before starting."""
        return self.tokenizer is None

    @property
    def setups(self) -> dict[str, Sequence[Setup]]:
        """The setups by the names that entries have for them."""
        first, observed = self.gpt2[0], self.gpt2[:2][-1]  # the second size (GPT-2 medium), or the only one
        wide, deep = ([shape.with_batch(batch) for batch in self.shape_batches] for shape in self.shapes)
        return {
            "gpt2": self.gpt2,
            "first": [first],
            "two": self.gpt2[:2],
            "last two": self.gpt2[-2:],
            "llama": self.llama,
            "batches": [
                one.with_batch(batch * one.batch // first.batch)
                for one in self.gpt2[:2]
                for batch in self.batches
            ],
            "observed": [observed],
            "large batch": [observed],
            "small batch": [observed.with_batch(self.small_batch)],
            "references": self.references,
            "of references": self.gpt2[: len(self.references)],
            "longer": [self.longer],
            "single batch": self.gpt2[: len(self.doubled)],
            "twice the batch": self.doubled,
            "long, small batch": self.long[::2],
            "long, large batch": self.long[1::2],
            "wide": wide,
            "deep": deep,
        }


def _paper_rates(model: str) -> dict[str, float]:
    """Learning rates from table 4 of the paper. It has none for maxLAMB, which uses LAMB's."""
    known = {name: one.learning_rates for name, one in OPTIMIZERS.items() if one.learning_rates}
    rates = {name: of_models[model] for name, of_models in known.items()}
    return {**rates, "maxlamb": rates["lamb-uncorrected"]}


def _setup(family: str, size: str, batch: int, tokens: int, rates_of: str = "") -> Setup:
    """A model of the paper's, with the learning rates of its size."""
    preset = f"{family.lower().replace('gpt-2', 'gpt2')}-{size.lower()}"
    rates = _paper_rates(rates_of or preset)
    return Setup(size=f"{family} {size}", model=PRESETS[preset], batch=batch, tokens=tokens, rates=rates)


def _long(size: str, rate: float, batch: int) -> tuple[Setup, Setup]:
    """Table 1: 48B tokens. The paper gives no learning rate for the small batch; these are Sophia's."""
    large = _setup("GPT-2", size, batch, 48 * _B)
    return large.with_adamw(480, rate), large


def _shapes(setup: Setup, wide: ModelConfig, deep: ModelConfig) -> tuple[Setup, Setup]:
    return replace(setup, size="wide", model=wide), replace(setup, size="deep", model=deep)


_SMALL = _setup("GPT-2", "small", 1 * _K, 2 * _B)
_MEDIUM = _setup("GPT-2", "medium", 4 * _K, 8 * _B)
_LARGE = _setup("GPT-2", "large", 8 * _K, 16 * _B)
_GPT2_SHAPES = (
    replace(PRESETS["gpt2-small"], width=1280, heads=20, layers=4),  # 78.7M in the blocks
    replace(PRESETS["gpt2-small"], width=512, heads=8, layers=25),  # 78.6M
)

# 128 steps of 64 sequences of 64 bytes. The learning rates are the best of factor-of-two grids with one seed;
# table4 shows them with their neighbours.
_TINY = Setup(
    size="GPT-2 0.2M",
    model=PRESETS["tiny"],
    batch=64,
    tokens=128 * 64 * 64,
    rates={
        "adamw": 2e-3,
        "lamb-uncorrected": 4e-2,
        "maxlamb": 4e-2,
        "merit": 4e-2,
        "lion": 1.6e-3,
        "sophiag": 2e-3,
    },
)
_LLAMA_TINY = replace(_TINY, size="Llama 0.2M", model=PRESETS["llama-tiny"])
# 200 steps of 512 sequences of 512 tokens. The learning rates are the best of factor-of-two grids with one
# seed, on enwik8 and one H200 (docs/paper-results.md). Sophia-G's are not tuned.
_NANO_10M = Setup(
    size="GPT-2 10M",
    model=PRESETS["nano-10m-bpe"],
    batch=512,
    tokens=200 * 512 * 512,
    rates={
        "adamw": 1e-3,
        "lamb-uncorrected": 2e-2,
        "maxlamb": 2e-2,
        "merit": 2e-2,
        "lion": 4e-4,
        "sophiag": 4e-4,
    },
)
_NANO_33M = replace(
    _NANO_10M,
    size="GPT-2 33M",
    model=PRESETS["nano-33m"],
    rates={
        "adamw": 5e-4,
        "lamb-uncorrected": 2e-2,
        "maxlamb": 1e-2,
        "merit": 1e-2,
        "lion": 8e-4,
        "sophiag": 4e-4,
    },
)
_NANO_64 = (_NANO_10M.with_adamw(64, 2e-3), _NANO_33M.with_adamw(64, 1e-3))
_NANO_1024 = (
    replace(
        _NANO_10M,
        batch=1024,
        rates={"adamw": 1e-3, "lamb-uncorrected": 2e-2, "maxlamb": 1e-2, "merit": 1e-2, "lion": 4e-4},
    ),
    replace(
        _NANO_33M,
        batch=1024,
        rates={"adamw": 5e-4, "lamb-uncorrected": 2e-2, "maxlamb": 1e-2, "merit": 1e-2, "lion": 1.6e-3},
    ),
)
# GPT-2 10M with an untied head. GPT-2's rates are the best here too for AdamW, LAMB and MERIT (figure 6).
_LLAMA_NANO = replace(
    _NANO_10M, size="Llama 15M", model=replace(_NANO_10M.model, family="llama", norm_eps=1e-6)
)

_SMALL_SCALE = Scale(
    name="small",
    summary="the paper's GPT-2 small and Llama 130M, a GPU node",
    gpt2=(_SMALL,),
    llama=(_setup("Llama", "130M", 1 * _K, 26 * _B // 10, "gpt2-small"),),
    batches=(128, 256, 512, 1 * _K, 2 * _K),
    small_batch=128,
    references=(_SMALL.with_adamw(480, 6e-4),),
    longer=_SMALL.longer(4),
    doubled=(_SMALL.with_batch(2 * _SMALL.batch),),
    long=_long("small", 6e-4, 4 * _K),
    shapes=_shapes(_SMALL, *_GPT2_SHAPES),
    shape_batches=(256, 1 * _K, 4 * _K),
    seeds=1,
    num_measurements=100,
    validation_sequences=4 * _K,
)

SCALES = {
    "tiny": Scale(
        name="tiny",
        summary="0.2M parameters, bytes of Python sources, two CPU cores: minutes for everything",
        gpt2=(_TINY,),
        llama=(_LLAMA_TINY,),
        batches=(16, 64, 256),
        small_batch=16,
        references=(_TINY.with_batch(16),),
        longer=_TINY.longer(2),
        doubled=(_TINY.with_batch(2 * _TINY.batch),),
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
        tokenizer="bytes",
    ),
    "nano": Scale(
        name="nano",
        summary="10M and 33M parameters, any text by a BPE of 16384 tokens, one GPU: minutes for a run",
        gpt2=(_NANO_10M, _NANO_33M),
        llama=(_LLAMA_NANO,),
        batches=(64, 128, 256, 512, 1 * _K),
        small_batch=64,
        references=_NANO_64,
        longer=_NANO_10M.longer(4),  # 20 tokens for each parameter
        doubled=_NANO_1024,
        long=(_NANO_64[0], _NANO_10M),
        shapes=_shapes(
            _NANO_10M,
            replace(_NANO_10M.model, width=512, heads=8, layers=2),  # 6.3M parameters in the blocks
            replace(_NANO_10M.model, width=192, heads=3, layers=14),  # 6.2M
        ),
        shape_batches=(64, 256, 1 * _K),
        num_checkpoints=3,
        tokenizer="bpe-16384",
    ),
    "small": _SMALL_SCALE,
    "paper": replace(
        _SMALL_SCALE,
        name="paper",
        summary="all of the paper's models at its own settings, a cluster",
        gpt2=(_SMALL, _MEDIUM, _LARGE),
        llama=(*_SMALL_SCALE.llama, _setup("Llama", "350M", 4 * _K, 8 * _B, "gpt2-medium")),
        batches=(*_SMALL_SCALE.batches, 4 * _K),
        small_batch=512,
        references=(*_SMALL_SCALE.references, _MEDIUM.with_adamw(480, 3e-4)),
        long=(*_SMALL_SCALE.long, *_long("medium", 3e-4, 6 * _K)),
    ),
}
