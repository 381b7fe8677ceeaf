"""The runs under results/, and which of them the tables of docs/results.md and docs/results/ are about."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from merit_lab.results import find_runs
from merit_lab.results.gather import MeasuredRun
from merit_lab.results.outcome import Spread
from merit_lab.study.reach import steps_to_reach

ROOT = Path(__file__).parents[2]
SIZES = {256: "10M", 512: "33M", 768: "98M"}  # by width
CONTESTANTS = ("adamw", "lamb", "merit", "muon", "normuon", "muon-merit")
HEADLINE = (*CONTESTANTS[:3], "soap", *CONTESTANTS[3:])  # and those that come near them
EVERYONE = (*CONTESTANTS[:3], "lion", "orscale", "soap", "soap-merit", *CONTESTANTS[3:])
WARMUPS = (0.02, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5)  # as shares of the steps
MOMENTUM, BOUND = "0.95", 0.2  # of most runs; the largest ratio of MuonMERIT, where it had a bound
# MuonMERIT's momentum, largest ratio and neuron_beta where a run names none, and from when on.
DEFAULTS = (
    ("2026-11-18T03:30", ("0.9", 0.1, "0.95")),
    ("2026-11-17T18:32", ("0.9", 0.1, "null")),
    ("2026-11-16T23:24", (MOMENTUM, BOUND, "null")),
    ("", (MOMENTUM, None, "null")),
)
SEQUENCES = 200 * 512  # in a run of enwik8, whatever its batch
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
SCALED = ("adamw", "muon", "muon-merit")  # optimizers that were run at every batch


@dataclass(frozen=True, eq=False)
class SeedRuns:
    """Runs that differ in their seeds alone."""

    runs: tuple[MeasuredRun, ...]

    @property
    def lr(self) -> float:
        return float(self.runs[0].config["optimizer"]["lr"])

    @property
    def options(self) -> dict[str, str]:
        """Options of the optimizer and of single parameters that are not its defaults."""
        optimizer = self.runs[0].config["optimizer"]
        named = dict(option.split("=", 1) for option in optimizer.get("options", []))
        return named | {pattern: pattern for pattern in optimizer.get("overrides", [])}

    @property
    def losses(self) -> list[float]:
        """The final validation loss of each seed, in the order of seeds."""
        return [run.curves["validation_loss"][-1][1] for run in sorted(self.runs, key=lambda run: run.seed)]

    @property
    def mean(self) -> float:
        return Spread(tuple(self.losses)).mean

    @property
    def shown(self) -> str:
        deviation = Spread(tuple(self.losses)).deviation
        return f"{self.mean:.3f}" + ("" if deviation is None else f" ± {deviation:.3f}")

    @property
    def rates(self) -> str:
        rest = self.options.get("rest_lr")
        return f"{self.lr:g}" + (f", rest {float(rest):g}" if rest else "")

    @property
    def setting(self) -> str:
        """What is not as in most runs: warm-up, momentum, bound of MuonMERIT's ratios, rows, a split."""
        optimizer = self.runs[0].config["optimizer"]
        found = [] if self.warmup == 0.1 else [f"warm-up {self.warmup:.0%}"]
        if self.momentum != MOMENTUM:
            found.append(f"momentum {self.momentum}")
        if optimizer["name"] == "muon-merit":
            found.append(f"ratios up to {self.bound:g}" if self.bound else "ratios not bounded")
        if self.has_equal_rows and optimizer["name"] == "muon-merit":
            found.append("equal rows")
        if any("split" in pattern for pattern in optimizer.get("overrides", [])):
            found.append("query, key and value split")
        return ", ".join(found)

    @property
    def has_equal_rows(self) -> bool:
        """Whether the rows of Muon's direction are equalized, as NorMuon's are."""
        return self.options.get("neuron_beta", defaults_of(self.runs[0])[2]) != "null"

    @property
    def warmup(self) -> float:
        """As a share of the steps."""
        return float(self.runs[0].config["optimizer"]["warmup"])

    @property
    def momentum(self) -> str:
        """That of Muon's direction."""
        return self.options.get("momentum", defaults_of(self.runs[0])[0])

    @property
    def bound(self) -> float | None:
        """The largest ratio that was allowed."""
        bounds = self.options.get("ratio_bounds")
        return json.loads(bounds)[1] if bounds else defaults_of(self.runs[0])[1]

    @property
    def is_plain(self) -> bool:
        """Whether it is as most runs in all but the learning rates; MuonMERIT's ratios may be unbounded."""
        named_alike = self.options.keys() <= {"rest_lr", "ratio_bounds"}
        with_other_rows = self.has_equal_rows and self.runs[0].config["optimizer"]["name"] == "muon-merit"
        is_muons = self.momentum == MOMENTUM and not with_other_rows
        return named_alike and is_muons and self.bound in (None, BOUND)

    @property
    def is_tuned(self) -> bool:
        """Whether it is as most runs in all but what is tuned: rates, warm-up, momentum, bound and rows."""
        return self.options.keys() <= {"rest_lr", "momentum", "ratio_bounds", "neuron_beta"}

    @property
    def largest_logit(self) -> float:
        """The largest attention logit at the end, of any layer and seed."""
        return max(run.curves["max_logit"][-1][1] for run in self.runs)

    @property
    def entropy(self) -> float:
        """The entropy of attention at the end, a mean over heads, layers and seeds."""
        return statistics.fmean(run.curves["entropy_mean"][-1][1] for run in self.runs)

    def steps_to(self, loss: float) -> float | None:
        """Mean steps of the seeds to a validation loss; None where one does not get there."""
        steps = [steps_to_reach(loss, run.curves["validation_loss"]) for run in self.runs]
        return statistics.fmean(found for found in steps if found) if all(steps) else None


def defaults_of(run: MeasuredRun) -> tuple[str, float | None, str]:
    """The momentum, the largest ratio and neuron_beta of a run that names none."""
    name = run.config["optimizer"]["name"]
    if name != "muon-merit":
        return MOMENTUM, None, "0.95" if name == "normuon" else "null"
    if "optimizer" in run.environment:  # newer records have them
        group = run.environment["optimizer"][0]
        bounds = group.get("ratio_bounds")
        return str(group["momentum"]), bounds and bounds[1], json.dumps(group["neuron_beta"])
    return next(values for since, values in DEFAULTS if run.environment["started"] >= since)


@cache
def all_runs() -> list[MeasuredRun]:
    """Every finished run whose settings these tables can tell apart."""
    studies = sorted(path.parent for path in ROOT.glob("results/*/*/runs.parquet"))
    others = ("nano", "arena")  # nano's are below it, and an arena has a table of its own
    folders = [ROOT / "results/nano", *(folder for folder in studies if folder.parent.name not in others)]
    runs = [run for folder in folders for run in find_runs([folder])]
    return [
        run
        for run in runs
        if run.status == "finished"
        and run.config["model"]["family"] == "gpt2"
        and not run.config["optimizer"]["without"]
    ]


@cache
def texts() -> dict[str, str]:
    """The name of each text, by its fingerprint."""
    known = [json.loads(path.read_text("utf-8")) for path in ROOT.glob("results/*/data.json")]
    return {text["fingerprint"]: text["name"] for text in known}


def text_of(run: MeasuredRun) -> str:
    """The name of the text that a run was trained on."""
    return texts()[run.environment["data"]["fingerprint"]]


@cache
def tried(
    width: int,
    optimizer: str,
    *,
    batch: int = 512,
    steps: int = 200,
    warmup: float = 0.1,
    text: str = "enwik8",
) -> tuple[SeedRuns, ...]:
    """What was tried of an optimizer at a size: one series for each setting."""
    groups: dict[str, list[MeasuredRun]] = {}
    for run in all_runs():
        config, settings = run.config, run.config["optimizer"]
        if (
            (config["model"]["width"], settings["name"], config["batch"], config["steps"], text_of(run))
            == (width, optimizer, batch, steps, text)
            and (settings["warmup"], settings["weight_decay"], settings["final"]) == (warmup, 0.1, 0.1)
            and settings.get("rest") is None
        ):
            named = (settings["lr"], settings.get("options", []), settings.get("overrides", []))
            one = SeedRuns((run,))
            key = repr((named, one.momentum, one.bound, one.has_equal_rows))
            groups.setdefault(key, []).append(run)
    return tuple(SeedRuns(tuple(once(runs))) for runs in groups.values())


def tuned_series(width: int, optimizer: str) -> list[SeedRuns]:
    """What was tried to tune an optimizer at a size."""
    return [one for warmup in WARMUPS for one in tried(width, optimizer, warmup=warmup) if one.is_tuned]


def once(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """The first run of each seed: some were made again, to see what rounding does."""
    return list({run.seed: run for run in reversed(list(runs))}.values())


def best(found: Sequence[SeedRuns]) -> SeedRuns | None:
    """The lowest mean over learning rates, of those with the most seeds; bounded ratios before others."""
    plain = [one for one in found if one.is_plain]
    most = max((len(one.runs) for one in plain), default=0)
    with_most = [one for one in plain if len(one.runs) == most]
    return min(with_most, key=lambda one: (one.bound is None, one.mean), default=None)


def lowest(found: Iterable[SeedRuns], *, seeds: int = 1) -> SeedRuns | None:
    """The lowest mean of those with so many seeds or more; of means within 0.01 that of the most seeds."""
    enough = [one for one in found if len(one.runs) >= seeds]
    least = min((one.mean for one in enough), default=math.inf)
    level = (one for one in enough if one.mean < least + 0.01)
    return min(level, key=lambda one: (-len(one.runs), one.mean), default=None)


def at_papers_batch(name: str) -> SeedRuns | None:
    """The best of an optimizer on GPT-2 small at the paper's batch."""
    return best(tried(768, name, batch=1024, steps=400, warmup=0.05, text="mix"))


@cache
def in_arena(size: str = "10m") -> dict[str, SeedRuns]:
    """The settings that an arena chose for each optimizer.

    It tunes with one seed and repeats the best with others, so these are the settings with the most seeds.
    """
    runs: dict[str, dict[str, list[MeasuredRun]]] = {}
    for run in find_runs([ROOT / "results/arena" / size]):
        optimizer = run.config["optimizer"]
        runs.setdefault(optimizer["name"], {}).setdefault(repr(optimizer), []).append(run)
    return {name: SeedRuns(tuple(max(found.values(), key=len))) for name, found in runs.items()}


def best_at(batch: int, optimizer: str) -> SeedRuns | None:
    """The best of an optimizer at 10M with a batch, after as many tokens as with all others."""
    # AdamW with 64 was run for the paper's comparison, with the paper's warm-up: 32 of 1600 steps.
    warmup = 0.02 if (optimizer, batch) == ("adamw", 64) else 0.1
    return best(tried(256, optimizer, batch=batch, steps=SEQUENCES // batch, warmup=warmup))


def entropy_left(run: MeasuredRun) -> float:
    """The attention entropy at the end, as a share of that before training."""
    (_, first), *_, (_, last) = run.curves["entropy_mean"]
    return last / first


BOUNDS = (None, 0.2, 0.1, 0.05)
