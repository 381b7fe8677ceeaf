"""Writes the tables of docs/results.md and README.md from the records under results/.

    python docs/scripts/evidence.py

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`; TABLES has the function of each name.
The pictures are drawn from the same runs. tests/test_results.py fails where a page or a picture differs
from what the records give.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path

from merit_lab.arena.advice import RunSize, advise, read_boards
from merit_lab.models import num_parameters
from merit_lab.record import run_folders
from merit_lab.report import find_runs, group
from merit_lab.report.charts import write_svg
from merit_lab.report.figures import make_figures
from merit_lab.report.gather import DISPLAY_NAMES, MeasuredRun
from merit_lab.report.outcome import Spread
from merit_lab.report.tables import NOTHING, Table, with_error
from merit_lab.scale.measure import choose, fit, measure
from merit_lab.study.charts import Axis, line_chart
from merit_lab.study.fields import short
from merit_lab.study.page import FILE_WIDTH
from merit_lab.study.reach import steps_to_reach
from merit_lab.sweep import Best, Ledger
from merit_lab.sweep.carry import exponent, lowest_value
from merit_lab.train import TrainConfig
from merit_optim import MuonMERIT

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/results.md")
PICTURES = ROOT / "docs/images"
SIZES = {256: "10M", 512: "33M", 768: "98M"}  # by width
CONTESTANTS = ("adamw", "lamb", "merit", "muon", "normuon", "muon-merit")
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


def headline() -> Table:
    """Validation loss by optimizer and size."""
    sizes = [[lowest(tuned_series(width, name)) for name in CONTESTANTS] for width in SIZES]
    columns = []
    for found in (*sizes, [in_arena().get(name) for name in CONTESTANTS]):
        winner = min((one for one in found if one), key=lambda one: one.mean)
        shown = [one.shown if one else NOTHING for one in found]
        columns.append(
            [f"**{text}**" if one is winner else text for one, text in zip(found, shown, strict=True)]
        )
    names = [DISPLAY_NAMES[name] for name in CONTESTANTS]
    head = ("Optimizer", *(f"{size} parameters" for size in SIZES.values()), "10M, all tuned alike")
    return Table(head, tuple(zip(names, *columns, strict=True)))


def tuned() -> Table:
    """The lowest loss of each optimizer at each size, of all settings and of those with three seeds."""
    rows = []
    for width, size in SIZES.items():
        series = {name: tuned_series(width, name) for name in EVERYONE}
        muon, adamw = lowest(series["muon"]), lowest(series["adamw"])
        for name, found in series.items():
            # One row where the lowest of all has three seeds.
            for one in dict.fromkeys((lowest(found), lowest(found, seeds=3))):
                if one is None:
                    continue
                ours = lowest(series["muon-merit"], seeds=min(len(one.runs), 3))
                rows.append(
                    (
                        size,
                        DISPLAY_NAMES[name],
                        one.setting,
                        one.rates,
                        str(len(found)),
                        str(len(one.runs)),
                        one.shown,
                        _gap(one, ours),
                        *(_share(one, other) for other in (muon, adamw)),
                    )
                )
    head = ("Size", "Optimizer", "Setting", "Learning rate", "Settings tried", "Seeds", "Validation loss")
    head = (*head, "Above MuonMERIT", "Steps to Muon's loss", "Steps to AdamW's")
    return Table(head, tuple(rows), num_text=3)


def _gap(one: SeedRuns, ours: SeedRuns | None) -> str:
    """How far a mean is above ours, with the p value of a paired t-test where both have three seeds."""
    if ours is None or one is ours:
        return NOTHING
    gap = f"{one.mean - ours.mean:z.2f}"
    if len(one.runs) < 3 or len(ours.runs) < 3:
        return gap
    from scipy import stats

    return f"{gap} (p = {stats.ttest_rel(one.losses, ours.losses).pvalue:.1g})"


def _share(one: SeedRuns, other: SeedRuns | None) -> str:
    """Steps to another's final loss, as a share of the steps of the other."""
    steps = None if other is None or one is other else one.steps_to(other.mean)
    return NOTHING if steps is None else f"{steps / one.runs[0].config['steps']:.2f}"


def best_at(batch: int, optimizer: str) -> SeedRuns | None:
    """The best of an optimizer at 10M with a batch, after as many tokens as with all others."""
    # AdamW with 64 was run for the paper's comparison, with the paper's warm-up: 32 of 1600 steps.
    warmup = 0.02 if (optimizer, batch) == ("adamw", 64) else 0.1
    return best(tried(256, optimizer, batch=batch, steps=SEQUENCES // batch, warmup=warmup))


def batches() -> Table:
    """Validation loss after as many tokens, by batch."""
    rows = []
    for batch in BATCHES:
        cells = [best_at(batch, name) for name in SCALED]
        shown = [f"{one.shown} ({one.rates})" if one else NOTHING for one in cells]
        rows.append((f"{batch}", f"{SEQUENCES // batch}", *shown))
    return Table(("Batch", "Steps", *(DISPLAY_NAMES[name] for name in SCALED)), tuple(rows))


def critical() -> Table:
    """Steps of `tiny` to a loss, by batch, and the critical batch that they give."""
    return _critical("sizes/scale", 2.4)


def critical_10m() -> Table:
    """The same at 10M."""
    return _critical("directions/10m-scale", 4.3)


def _critical(folder: str, loss: float) -> Table:
    measured = choose(measure(run_folders(ROOT / "results" / folder), loss))
    sizes = sorted({one.batch for one in measured})
    rows = []
    for name in sorted({one.optimizer for one in measured}, key=SCALED.index):
        steps = {one.batch: f"{one.mean:.0f} ({one.lr:g})" for one in measured if one.optimizer == name}
        curve = fit(measured, name)
        assert curve is not None
        batch = curve.critical_batch
        rows.append(
            (
                DISPLAY_NAMES[name],
                *(steps[size] for size in sizes),
                f"{batch.value:.0f} ({batch.low:.0f} to {batch.high:.0f})",
            )
        )
    return Table(("Optimizer", *(f"Batch {size}" for size in sizes), "Critical batch"), tuple(rows))


def longer() -> Table:
    """Four times as many steps at 10M, on a text that is read twice."""
    return _settings(256, (*CONTESTANTS[:2], "maxlamb", *CONTESTANTS[2:]), steps=800, text="mix")


def longer_98m() -> Table:
    """As many steps and the same text at 98M."""
    return _settings(768, CONTESTANTS, steps=800, text="mix")


def largest() -> Table:
    """Everything that was tried at 98M in 200 steps."""
    return _settings(768, EVERYONE, steps=200, text="enwik8")


def _settings(width: int, names: Iterable[str], *, steps: int, text: str) -> Table:
    rows = [
        (
            DISPLAY_NAMES[name],
            one.setting,
            one.rates,
            str(len(one.runs)),
            one.shown,
            f"{one.largest_logit:,.0f}",
            f"{one.entropy:.1f}",
        )
        for name in names
        for one in sorted(
            (one for warmup in WARMUPS for one in tried(width, name, steps=steps, warmup=warmup, text=text)),
            key=lambda one: (one.lr, one.rates, one.setting),
        )
    ]
    head = (
        "Optimizer",
        "Setting",
        "Learning rate",
        "Seeds",
        "Validation loss",
        "Largest attention logit",
        "Entropy",
    )
    return Table(head, tuple(rows), num_text=2)


ENTROPY_LEFT = (0.0, 0.25, 0.4, 0.6, math.inf)  # bounds of ranges, as shares of the entropy before training


def entropy_left(run: MeasuredRun) -> float:
    """The attention entropy at the end, as a share of that before training."""
    (_, first), *_, (_, last) = run.curves["entropy_mean"]
    return last / first


def entropies() -> Table:
    """How far runs end above the best of their kind, by how much of their attention entropy is left."""
    alike: dict[str, list[tuple[float, float]]] = {}
    for run in all_runs():
        config, (last_step, loss) = run.config, run.curves["validation_loss"][-1]
        # Not those that end at a given loss.
        if len(run.curves.get("entropy_mean", [])) > 1 and last_step == config["steps"]:
            kind = repr([config[key] for key in ("model", "batch", "steps")]) + config["optimizer"]["name"]
            alike.setdefault(kind + text_of(run), []).append((loss, entropy_left(run)))
    above = [(loss - min(runs)[0], left) for runs in alike.values() if len(runs) > 1 for loss, left in runs]
    rows = []
    for low, high in pairwise(ENTROPY_LEFT):
        gaps = [gap for gap, left in above if low <= left < high]
        ends = f"{low:.0%} to {high:.0%}" if math.isfinite(high) else f"{low:.0%} and more"
        near = sum(gap <= 0.05 for gap in gaps)
        rows.append((ends, f"{len(gaps)}", f"{near}", f"{statistics.median(gaps):.2f}"))
    return Table(("Entropy left", "Runs", "Within 0.05 of the best", "Median above the best"), tuple(rows))


BOUNDS = (None, 0.2, 0.1, 0.05)


def bounds() -> Table:
    """MuonMERIT at one rate with the ratios bounded: the loss, and the largest attention logit."""
    rows = []
    settings = [(width, 200, "enwik8") for width in SIZES] + [(256, 800, "mix")]
    for width, steps, text in settings:
        for momentum in ("0.95", "0.9"):
            found = {
                one.bound: one
                for one in tried(width, "muon-merit", steps=steps, text=text)
                if one.lr == 0.04
                and one.options.get("rest_lr") == "0.128"
                and one.momentum == momentum
                and one.options.keys() <= {"rest_lr", "momentum", "ratio_bounds"}
            }
            cells = [
                f"{found[bound].shown} ({found[bound].largest_logit:,.0f})" if bound in found else NOTHING
                for bound in BOUNDS
            ]
            if found:
                rows.append((SIZES[width], f"{steps}, {text}", momentum, *cells))
    columns = (f"{bound:g}" if bound else "No bound" for bound in BOUNDS)
    head = ("Size", "Steps, text", "Momentum", *columns)
    return Table(head, tuple(rows), num_text=2)


def small_bounds() -> Table:
    """A small model with bounded ratios, by width, momentum and rate: the loss, and the entropy left."""
    bounded = [bound for bound in BOUNDS if bound]
    series: dict[tuple[int, int, str, float], dict[float | None, str]] = {}
    for run in find_runs([ROOT / "results/sizes/tiny", ROOT / "results/sizes/bounds"]):
        config, one = run.config, SeedRuns((run,))
        if (config["optimizer"]["name"], config["model"]["layers"], config["batch"]) == ("muon-merit", 4, 64):
            setting = config["steps"], config["model"]["width"], one.momentum, one.lr
            series.setdefault(setting, {})[one.bound] = f"{one.shown} ({entropy_left(run):.0%})"
    rows = [
        (f"{steps}", f"{width}", momentum, f"{lr:g}", *(found.get(bound, NOTHING) for bound in bounded))
        for (steps, width, momentum, lr), found in sorted(series.items())
        if momentum != MOMENTUM or len(found) > 1
    ]
    head = ("Steps", "Width", "Momentum", "Learning rate", *(f"{bound:g}" for bound in bounded))
    return Table(head, tuple(rows), num_text=0)


def equal_rows() -> Table:
    """A small model with MuonMERIT, with NorMuon's equal rows in addition, and with NorMuon."""
    as_by_default = {"momentum=0.9", "ratio_bounds=[0,0.1]"}
    series: dict[tuple[int, int, bool, bool, float], list[MeasuredRun]] = {}
    for run in find_runs([ROOT / "results/sizes/rows", ROOT / "results/sizes/defaults"]):
        config, one = run.config, SeedRuns((run,))
        setting = config["steps"], config["model"]["width"]
        changed = {f"{name}={value}" for name, value in one.options.items()} - as_by_default
        only_rows = all("neuron_beta" in option for option in changed)
        if setting in ((200, 128), (800, 64)) and only_rows and config["optimizer"]["weight_decay"] == 0.1:
            is_normuon = config["optimizer"]["name"] == "normuon"
            series.setdefault((*setting, is_normuon, one.has_equal_rows, one.lr), []).append(run)
    rows = [
        (
            f"{steps}",
            f"{width}",
            "NorMuon" if is_normuon else "MuonMERIT, equal rows" if has_equal_rows else "MuonMERIT",
            f"{lr:g}",
            f"{len(runs)}",
            SeedRuns(tuple(runs)).shown,
        )
        for (steps, width, is_normuon, has_equal_rows, lr), runs in sorted(series.items())
    ]
    head = ("Steps", "Width", "Optimizer", "Learning rate", "Seeds", "Validation loss")
    return Table(head, tuple(rows), num_text=3)


def equal_rows_large() -> Table:
    """MuonMERIT with and without equal rows, otherwise alike, at the sizes of the first table."""
    rows = []
    for (width, size), (steps, text) in product(SIZES.items(), ((200, "enwik8"), (800, "mix"))):
        found = [
            one
            for warmup in WARMUPS
            for one in tried(width, "muon-merit", steps=steps, warmup=warmup, text=text)
            if one.is_tuned and (one.momentum, one.bound) == ("0.9", 0.1)
        ]
        plain = {(one.rates, one.warmup): one for one in found if not one.has_equal_rows}
        for one in found:
            other = plain.get((one.rates, one.warmup))
            if one.has_equal_rows and other:
                seeds = f"{len(other.runs)}, {len(one.runs)}"
                setting = (size, f"{steps}, {text}", one.rates, f"{one.warmup:.0%}", seeds)
                rows.append((*setting, other.shown, one.shown, _gap(other, one)))
    head = ("Size", "Steps", "Learning rate", "Warm-up", "Seeds", "Rows as they are", "Equal rows")
    return Table((*head, "Gain"), tuple(rows), num_text=2)


CHANCE = {"arc_easy": 1 / 4, "hellaswag": 1 / 4, "race": 1 / 4, "copa": 1 / 2, "wic": 1 / 2}
SHOWN = (
    ("lambada", "perplexity", "LAMBADA perplexity"),
    ("lambada", "acc", "LAMBADA"),
    ("wikitext", "bits_per_byte", "WikiText-2 bits per byte"),
    ("arc_easy", "acc", "ARC easy"),
    ("hellaswag", "acc_norm", "HellaSwag"),
    ("race", "acc", "RACE"),
    ("copa", "acc", "COPA"),
    ("wic", "acc", "WiC"),
)


def zero_shot() -> Table:
    """The evaluations of the checkpoints at the end of 800 steps at 98M."""
    columns = [("", *(label for *_, label in SHOWN))]
    for run in find_runs([ROOT / "results/mix/98m"]):
        if run.evaluations:
            one, results = SeedRuns((run,)), {result.name: result for result in run.evaluations}
            values = (results[name].metrics[metric] for name, metric, _ in SHOWN)
            title = f"{DISPLAY_NAMES[run.config['optimizer']['name']]}, {one.shown}"
            title += ", equal rows" if "equal rows" in one.setting else ""
            columns.append((title, *(with_error(metric.value, metric.stderr) for metric in values)))
    columns.append(("By chance", *(f"{CHANCE[name]:g}" if name in CHANCE else NOTHING for name, *_ in SHOWN)))
    head, *rows = zip(*columns, strict=True)
    return Table(head, tuple(rows))


PARTS = (
    ("as it is", {}),
    ("one ratio for each weight (`element_wise=False`)", {"element_wise": "false"}),
    ("without the weight-wise bound", {"weight_bound": "false"}),
    ("without the clip", {"clip": "null"}),
    ("Euclidean norms (`norm=\"l2\"`)", {"norm": "l2"}),
    ("momentum 0.85", {"momentum": "0.85"}),
    ("momentum 0.9", {"momentum": "0.9"}),
    ("momentum 0.98", {"momentum": "0.98"}),
    ("without Nesterov's look ahead", {"nesterov": "false"}),
    ("three Newton-Schulz steps for five", {"ns_steps": "3"}),
    ("query, key and value split (`split=3`)", {"*query_key_value*:split=3": "*query_key_value*:split=3"}),
)  # fmt: skip


def parts() -> Table:
    """MuonMERIT at 10M with one option changed, against the same seed unchanged."""
    by_options = {
        tuple(sorted(one.options.items())): one for one in tried(256, "muon-merit") if one.lr == 0.04
    }
    base = by_options[("rest_lr", "0.128"),]
    rows = []
    for label, options in PARTS:
        one = by_options.get(tuple(sorted({"rest_lr": "0.128", **options}.items())))
        if one is None:
            continue
        gaps = [loss - other for loss, other in zip(one.losses, base.losses, strict=False)]
        gap = NOTHING if one is base else f"{statistics.fmean(gaps):+.3f}"
        rows.append((label, str(len(one.runs)), one.shown, gap))
    return Table(("MuonMERIT", "Seeds", "Validation loss", "Difference"), tuple(rows))


def rates() -> Table:
    """Learning rates of Muon and of MuonMERIT without a bound at each size."""
    rows = []
    for name in ("muon", "muon-merit"):
        for width, size in SIZES.items():
            rows += [
                (DISPLAY_NAMES[name], size, one.rates, str(len(one.runs)), one.shown)
                for one in sorted(tried(width, name), key=lambda one: (one.lr, one.rates))
                if one.is_plain and one.bound is None
            ]
    return Table(("Optimizer", "Size", "Learning rate", "Seeds", "Validation loss"), tuple(rows), num_text=2)


# The sweeps of a small model: what was varied, its title, and its value where something else was varied.
VARIED = {
    "model.width": ("Width", 64),
    "model.layers": ("Layers", 4),
    "batch": ("Batch", 64),
    "steps": ("Steps", 200),
}


@cache
def small_sweep(name: str) -> Ledger:
    """Learning rates of a small model at several sizes."""
    return Ledger.read(ROOT / "results/sizes" / name, list(VARIED))


def along(field: str, optimizer: str, sweep: str) -> list[Best]:
    """The best learning rates where only one size of the small model was varied."""
    others = {name: usual for name, (_, usual) in VARIED.items() if name != field}
    return [
        best
        for best in small_sweep(sweep).bests(optimizer)
        if all(best.cell.settings[name] == usual for name, usual in others.items())
    ]


def sizes() -> Table:
    """The best learning rates of Muon and MuonMERIT, one size of a small model varied."""
    contestants = {
        "Muon's": ("muon", "tiny"),
        "MuonMERIT's": ("muon-merit", "defaults"),
        "with momentum 0.95 and ratios up to 0.2": ("muon-merit", "tiny"),
    }
    rows = []
    for field, (title, _) in VARIED.items():
        found = [along(field, *contestant) for contestant in contestants.values()]
        for bests in zip(*found, strict=True):
            cells = [(_rate(best), f"{best.loss.mean:.3f}") for best in bests]
            rows.append(
                (f"{title} {bests[0].cell.settings[field]}", *(text for cell in cells for text in cell))
            )
        powers = [(_power(bests, field), "") for bests in found]
        rows.append((f"{title}: goes as", *(text for cell in powers for text in cell)))
    muon, ours, before = contestants
    head = (
        f"{muon} best rate",
        f"{muon} loss",
        f"{ours} best rate",
        f"{ours} loss",
        f"Best rate {before}",
        "Loss",
    )
    return Table(("Varied", *head), tuple(rows))


def sizes_rows() -> Table:
    """MuonMERIT's best learning rates with equal rows, beside those without."""
    rows = []
    for field, (title, _) in VARIED.items():
        plain = {best.cell.settings[field]: best for best in along(field, "muon-merit", "defaults")}
        bests = along(field, "muon-merit", "equal")
        for best in bests:
            value = best.cell.settings[field]
            losses = (f"{one.loss.mean:.3f}" for one in (best, plain[value]))
            rows.append((f"{title} {value}", _rate(best), _rate(plain[value]), *losses))
        beside = [plain[best.cell.settings[field]] for best in bests]
        powers = (_power(found, field) for found in (bests, beside))
        rows.append((f"{title}: goes as", *powers, "", ""))
    head = ("Varied", "Best rate", "Without equal rows", "Loss", "Without equal rows")
    return Table(head, tuple(rows))


def _rate(best: Best) -> str:
    """The best rate that was tried and, in brackets, by a parabola through its neighbours."""
    lowest = lowest_value(best)
    return f"{best.value:g}" + (f" ({lowest:.2g})" if lowest else "")


def _power(bests: Sequence[Best], field: str) -> str:
    """The power of a size that the best rates follow."""
    power = exponent(bests, field)
    return NOTHING if power is None else f"{short(field)}^{power:.2f}"


def cost() -> Table:
    """Seconds and memory to the losses that others end with, at the paper's batch.

    Other runs shared the GPU at times, so the time of a step is that of the fastest tenth.
    """
    chosen = {name: at_papers_batch(name) for name in CONTESTANTS}
    found = {name: one for name, one in chosen.items() if one}
    targets = [name for name in ("adamw", "merit", "muon") if name in found]
    rows = []
    for name, one in found.items():
        (run,) = one.runs
        tokens = run.config["batch"] * run.config["model"]["context"]
        seconds = (
            tokens / statistics.quantiles([speed for _, speed in run.curves["tokens_per_second"]], n=10)[-1]
        )
        memory = run.rows["train"][-1]["memory_gib"]
        steps = [one.steps_to(found[target].mean) for target in targets]
        times = [f"{seconds * number:,.0f}" if number else NOTHING for number in steps]
        rows.append((DISPLAY_NAMES[name], f"{seconds:.2f}", f"{memory:.1f}", *times))
    to = [f"Seconds to {DISPLAY_NAMES[target]}'s loss" for target in targets]
    return Table(("Optimizer", "Seconds a step", "Memory, GiB", *to), tuple(rows))


def budgets() -> Table:
    """What an arena found: the best settings of each optimizer, and how far they are above MuonMERIT's."""
    chosen = in_arena()
    ours, muon, adamw = (chosen[name] for name in ("muon-merit", "muon", "adamw"))
    rows = []
    for name, one in sorted(chosen.items(), key=lambda entry: entry[1].mean, reverse=True):
        optimizer = one.runs[0].config["optimizer"]
        settings = (one.rates, f"{optimizer['warmup']:.0%}", f"{optimizer['weight_decay']:g}")
        shares = (_share(one, other) for other in (muon, adamw))
        rows.append((DISPLAY_NAMES[name], *settings, one.shown, _gap(one, ours), *shares))
    head = ("Optimizer", "Learning rate", "Warm-up", "Weight decay", "Validation loss", "Above MuonMERIT")
    return Table((*head, "Steps to Muon's loss", "Steps to AdamW's"), tuple(rows))


# Where rates were tried beside the arena's setting: width, batch, steps, text.
ELSEWHERE = (
    (512, 512, 200, "enwik8"),
    (768, 512, 200, "enwik8"),
    (256, 64, 1600, "enwik8"),
    (512, 64, 1600, "enwik8"),
    (256, 128, 800, "enwik8"),
    (256, 256, 400, "enwik8"),
    (256, 1024, 100, "enwik8"),
    (256, 512, 800, "mix"),
    (768, 512, 800, "mix"),
)


def advised() -> Table:
    """What `merit advise` says from the arena at 10M, and the rate of the lowest loss at each setting."""
    standings = read_boards([ROOT / "results/arena/10m"])
    contestants = {standing.config.optimizer.name: standing.optimizer for standing in standings}
    rows = []
    for width, batch, steps, text in ELSEWHERE:
        for name in CONTESTANTS:
            found = [
                one
                for warmup in WARMUPS
                for one in tried(width, name, batch=batch, steps=steps, warmup=warmup, text=text)
                if one.is_plain or one.is_tuned
            ]
            one = lowest(found)
            if one is None or len({each.lr for each in found}) == 1:
                continue
            model = TrainConfig.from_dict(dict(one.runs[0].config)).model
            said = advise(standings, contestants[name], RunSize(batch, num_parameters(model), steps))
            setting = (SIZES[width], f"{batch}", f"{steps:,}")
            rates = (f"{one.lr:g}", f"{said.lr:.2g}", f"{said.low:.2g} to {said.high:.2g}")
            rows.append((DISPLAY_NAMES[name], *setting, *rates))
    head = ("Optimizer", "Size", "Batch", "Steps", "Best that was tried", "Advice", "80% interval")
    return Table(head, tuple(rows), num_text=2)


QUARTERS = (0.25, 0.5, 0.75, 1.0)  # of a run, after which the table of long runs looks at it


def drift() -> Table:
    """Long runs of a small model: the loss, and what logits and weights do on the way with the first seed."""
    groups: dict[tuple[str, ...], list[MeasuredRun]] = {}
    for run in find_runs([ROOT / "results/sizes/long"]):
        optimizer = run.config["optimizer"]
        length = f"{run.config['steps']:,} of {run.config['batch']}"
        schedule = optimizer.get("schedule", "cosine")
        setting = (DISPLAY_NAMES[optimizer["name"]], schedule, length, f"{optimizer['lr']:g}")
        groups.setdefault(setting, []).append(run)
    rows = []
    for setting, runs in groups.items():
        first = min(runs, key=lambda run: run.seed)
        ways = [_on_the_way(first, curve) for curve in ("max_logit", "weight_norm")]
        rows.append((*setting, SeedRuns(tuple(runs)).shown, *ways))
    when = ", ".join(f"{share:.0%}" for share in QUARTERS)
    head = ("Optimizer", "Schedule", "Steps", "Learning rate", "Validation loss")
    head = (*head, f"Largest attention logit after {when} of the steps", "Norm of the weights")
    return Table(head, tuple(sorted(rows)), num_text=2)


def rest() -> Table:
    """MuonMERIT with rates of their own for embeddings and for the gains of norms."""
    rows = []
    for study in ("mix/rise", "sizes/rest"):
        for run in find_runs([ROOT / "results" / study]):
            model = run.config["model"]
            losses = [loss for _, loss in run.curves["validation_loss"]]
            size = f"width {model['width']}, {run.config['steps']} steps"
            rates = (f"{rate:g}" for rate in _rates_of_rest(run))
            rows.append((size, *rates, f"{max(losses[1:]):.2f}", f"{losses[-1]:.3f}"))
    head = ("Model", "Rate of embeddings", "Rate of norms", "Highest loss on the way", "Validation loss")
    return Table(head, tuple(sorted(rows, reverse=True)))


def rest_grid() -> Table:
    """MuonMERIT at 10M with each pair of rates for embeddings and norms: the loss at the end."""
    found: dict[tuple[float, float], float] = {}
    for run in find_runs([ROOT / "results/directions/10m-rest"]):
        found[_rates_of_rest(run)] = run.curves["validation_loss"][-1][1]
    embeddings, norms = (sorted(set(rates)) for rates in zip(*found, strict=True))
    rows = [(f"{rate:g}", *(f"{found[rate, norm]:.3f}" for norm in norms)) for rate in embeddings]
    return Table(("Rate of embeddings", *(f"Norms at {norm:g}" for norm in norms)), tuple(rows))


def _rates_of_rest(run: MeasuredRun) -> tuple[float, float]:
    """MuonMERIT's rates of embeddings and of norms."""
    optimizer = run.config["optimizer"]
    named = dict(option.split("=", 1) for option in optimizer["options"])
    given = dict(text.rsplit(":lr=", 1) for text in optimizer["overrides"])
    default = named.get("rest_lr", optimizer["lr"] * MuonMERIT.REST_SHARE)
    return float(given.get("*embedding*", default)), float(given.get("*norm*", default))


def _on_the_way(run: MeasuredRun, curve: str) -> str:
    """What was measured last before each quarter's end."""
    points = run.curves.get(curve)
    if points is None:
        return NOTHING
    ends = [share * run.config["steps"] for share in QUARTERS]
    return ", ".join(f"{[value for step, value in points if step <= end][-1]:.0f}" for end in ends)


TABLES: dict[str, Callable[[], Table]] = {
    "headline": headline,
    "tuned": tuned,
    "budgets": budgets,
    "batches": batches,
    "critical": critical,
    "critical-10m": critical_10m,
    "largest": largest,
    "entropies": entropies,
    "longer": longer,
    "longer-98m": longer_98m,
    "bounds": bounds,
    "small-bounds": small_bounds,
    "parts": parts,
    "equal-rows": equal_rows,
    "equal-rows-large": equal_rows_large,
    "zero-shot": zero_shot,
    "rates": rates,
    "sizes": sizes,
    "sizes-rows": sizes_rows,
    "drift": drift,
    "advised": advised,
    "cost": cost,
    "rest": rest,
    "rest-grid": rest_grid,
}


def with_tables(text: str) -> str:
    """A page with the tables that the records give."""

    def table(block: re.Match[str]) -> str:
        return f"{block[1]}\n{TABLES[block[2]]().markdown()}\n{block[3]}"

    return re.sub(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- /table -->)", table, text, flags=re.DOTALL)


def draw_losses(path: Path) -> None:
    """The loss over the steps at 33M, of each optimizer at its best."""
    chosen = [lowest(tuned_series(512, name)) for name in CONTESTANTS if name != "normuon"]
    _draw_losses(path, chosen, "Validation loss at 33M parameters, batches of 512 sequences")


def draw_papers_batch(path: Path) -> None:
    """The loss over the steps of GPT-2 small at the paper's batch."""
    chosen = map(at_papers_batch, CONTESTANTS)
    _draw_losses(path, chosen, "Validation loss of GPT-2 small, batches of 1024 sequences of 1024 tokens")


def _draw_losses(path: Path, chosen: Iterable[SeedRuns | None], title: str) -> None:
    figures = make_figures(group([run for one in chosen if one for run in one.runs]))
    figure = next(figure for figure in figures if figure.key == "validation-loss")
    write_svg(path, {**figure.in_files[figure.key], "datasets": figure.datasets}, title)


def draw_batches(path: Path) -> None:
    """The loss at 10M after as many tokens, against the batch."""
    chosen = {name: [(batch, best_at(batch, name)) for batch in BATCHES] for name in SCALED}
    lines = {
        DISPLAY_NAMES[name]: [(name, [(float(batch), one.mean) for batch, one in points if one], False)]
        for name, points in chosen.items()
    }
    chart = line_chart(
        lines,
        {DISPLAY_NAMES[name]: name for name in SCALED},
        Axis("sequences in a batch", format="d", logarithmic=True, ticks=tuple(map(float, BATCHES))),
        Axis("validation loss", format=".1f"),
        name=path.stem,
        title="Validation loss after 52M tokens at 10M parameters",
        caption="",
    )
    write_svg(path, {"width": FILE_WIDTH, **chart.spec}, chart.title)


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "large-batch.svg": draw_losses,
    "papers-batch.svg": draw_papers_batch,
    "batches.svg": draw_batches,
}


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
    for name, draw in DRAWINGS.items():
        draw(PICTURES / name)
