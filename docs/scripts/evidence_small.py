"""Tables of small models, and of questions that were asked of small models first."""

from collections.abc import Sequence
from functools import cache

from evidence_runs import BOUNDS, MOMENTUM, ROOT, SCALED, SeedRuns, entropy_left

from merit_lab.results import find_runs
from merit_lab.results.gather import DISPLAY_NAMES, MeasuredRun
from merit_lab.runs import run_folders
from merit_lab.scale.measure import choose, fit, measure
from merit_lab.study.fields import short
from merit_lab.sweep.carry import exponent, lowest_value
from merit_lab.sweep.ledger import Best, Ledger
from merit_lab.tables import NOTHING, Table
from merit_optim import MuonMERIT


def critical() -> Table:
    """Steps of `tiny` to a loss, by batch, and the critical batch that they give."""
    return _critical("sizes/scale-defaults", 2.4)


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


# Where weight decay acts, by the name of MuonMERITVariant's option.
PLACES = {"inside": "scaled by the ratios", "outside": "decoupled", "cautious": "scaled, where d shrinks w"}


def decays() -> Table:
    """A small model with MuonMERIT's weight decay elsewhere or stronger, or its ratios smoothed."""
    series: dict[tuple[str, ...], list[MeasuredRun]] = {}
    for run in find_runs([ROOT / "results/sizes/variants"]):
        optimizer, one = run.config["optimizer"], SeedRuns((run,))
        stronger = [pattern.split("=")[1] for pattern in optimizer["overrides"]]
        decay = stronger[0] if stronger else f"{optimizer['weight_decay']:g}"
        if optimizer["name"] == "normuon":
            name, place = "NorMuon", "decoupled"
        else:
            name = "MuonMERIT, smoothed ratios" if "smoothing" in one.options else "MuonMERIT"
            place = PLACES[one.options.get("decay", "inside")]
        setting = (f"{run.config['steps']:,}", name, place, decay, f"{one.lr:g}")
        series.setdefault(setting, []).append(run)
    rows = [(*setting, str(len(runs)), SeedRuns(tuple(runs)).shown) for setting, runs in series.items()]
    head = (
        "Steps",
        "Optimizer",
        "Weight decay is",
        "Weight decay",
        "Learning rate",
        "Seeds",
        "Validation loss",
    )
    return Table(head, tuple(sorted(rows, key=lambda row: (len(row[0]), *row))), num_text=3)


def soap_later() -> Table:
    """A small model with Muon's direction and MERIT's ratios, and SOAP's direction from some step on."""
    muon_alone = [
        run
        for run in find_runs([ROOT / "results/sizes/variants"])
        if run.config["steps"] == 800
        and run.config["optimizer"]["name"] != "normuon"
        and not run.config["optimizer"]["options"] + run.config["optimizer"]["overrides"]
    ]
    series: dict[tuple[str, float], list[MeasuredRun]] = {}
    for run in [*muon_alone, *find_runs([ROOT / "results/sizes/soap"])]:
        one = SeedRuns((run,))
        after = one.options.get("soap_after")
        if run.config["optimizer"]["name"] == "soap":
            direction = "SOAP's, without ratios"
        elif after is None:
            direction = "Muon's"
        else:
            direction = "SOAP's" if after == "0" else f"Muon's, after {after} steps SOAP's"
        series.setdefault((direction, one.lr), []).append(run)
    rows = [
        (direction, f"{lr:g}", str(len(runs)), SeedRuns(tuple(runs)).shown)
        for (direction, lr), runs in sorted(series.items())
    ]
    return Table(("Direction", "Learning rate", "Seeds", "Validation loss"), tuple(rows), num_text=1)


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
