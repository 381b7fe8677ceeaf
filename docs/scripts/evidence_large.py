"""Tables of the models of 10M to 98M parameters."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise, product

from evidence_runs import (
    BATCHES,
    BOUNDS,
    CONTESTANTS,
    EVERYONE,
    HEADLINE,
    ROOT,
    SCALED,
    SEQUENCES,
    SIZES,
    WARMUPS,
    SeedRuns,
    all_runs,
    at_papers_batch,
    best_at,
    entropy_left,
    in_arena,
    lowest,
    text_of,
    tried,
    tuned_series,
)

from merit_lab.arena.advice import RunSize, advise, read_boards
from merit_lab.models import num_parameters
from merit_lab.results import find_runs
from merit_lab.results.gather import DISPLAY_NAMES
from merit_lab.results.tables import with_error
from merit_lab.tables import NOTHING, Table
from merit_lab.train import TrainConfig


def headline() -> Table:
    """Validation loss by optimizer and size."""
    sizes = [[lowest(tuned_series(width, name)) for name in HEADLINE] for width in SIZES]
    columns = []
    for found in (*sizes, [in_arena().get(name) for name in HEADLINE]):
        winner = min((one for one in found if one), key=lambda one: one.mean)
        shown = [one.shown if one else NOTHING for one in found]
        columns.append(
            [f"**{text}**" if one is winner else text for one, text in zip(found, shown, strict=True)]
        )
    names = [DISPLAY_NAMES[name] for name in HEADLINE]
    head = ("Optimizer", *(f"{size} parameters" for size in SIZES.values()), "10M, all tuned alike")
    return Table(head, tuple(zip(names, *columns, strict=True)))


def tuned() -> Table:
    """The lowest loss of each optimizer at each size, of all settings and of those with three seeds."""
    rows = []
    for width, size in SIZES.items():
        series = {name: tuned_series(width, name) for name in EVERYONE}
        muon, adamw = lowest(series["muon"]), lowest(series["adamw"])
        for name, found in series.items():
            for one in _lowest_two(found):
                ours = lowest(series["muon-merit"], seeds=min(len(one.runs), 3))
                shares = (_share(one, other) for other in (muon, adamw))
                seeds = str(len(one.runs))
                rows.append((size, DISPLAY_NAMES[name], seeds, one.shown, _gap(one, ours), *shares))
    head = ("Size", "Optimizer", "Seeds", "Validation loss", "Above MuonMERIT")
    return Table((*head, "Steps to Muon's loss", "Steps to AdamW's"), tuple(rows), num_text=2)


def tuned_settings() -> Table:
    """The settings of these, and how many were tried."""
    rows = [
        (size, DISPLAY_NAMES[name], one.setting, one.rates, str(len(one.runs)), str(len(found)))
        for (width, size), name in product(SIZES.items(), EVERYONE)
        for found in [tuned_series(width, name)]
        for one in _lowest_two(found)
    ]
    head = ("Size", "Optimizer", "Setting", "Learning rate", "Seeds", "Settings tried")
    return Table(head, tuple(rows), num_text=3)


def _lowest_two(found: Sequence[SeedRuns]) -> list[SeedRuns]:
    """The lowest of all, and the lowest with three seeds where that is another."""
    both = dict.fromkeys((lowest(found), lowest(found, seeds=3)))
    return [one for one in both if one is not None]


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


def batches() -> Table:
    """Validation loss after as many tokens, by batch."""
    rows = []
    for batch in BATCHES:
        cells = [best_at(batch, name) for name in SCALED]
        shown = [f"{one.shown} ({one.rates})" if one else NOTHING for one in cells]
        rows.append((f"{batch}", f"{SEQUENCES // batch}", *shown))
    return Table(("Batch", "Steps", *(DISPLAY_NAMES[name] for name in SCALED)), tuple(rows))


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


def entropies() -> Table:
    """How far runs end above the best of their kind, by how much of their attention entropy is left."""
    alike: dict[str, list[tuple[float, float]]] = {}
    for run in all_runs():
        config, (last_step, loss) = run.config, run.curves["validation_loss"][-1]
        # Not those of scaling studies, which end at a given loss.
        is_whole = last_step == config["steps"] and not re.search(r"-to[\d.]+-", run.name)
        if is_whole and len(run.curves.get("entropy_mean", [])) > 1:
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
