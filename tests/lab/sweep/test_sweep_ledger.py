"""The best cell of a grid: how it is chosen, its neighbours, and the edge of the grid."""

import json
from pathlib import Path

import pytest
from sweep_runs import WriteRun

from merit_lab.sweep.ledger import Best, Ledger
from merit_lab.sweep.page import make_page
from merit_lab.sweep.summary import best_table, summarise, warnings
from merit_lab.tables import NOTHING


def read(tmp_path: Path, *fields: str) -> Ledger:
    return Ledger.read(tmp_path / "out", fields)


def best_of(ledger: Ledger, optimizer: str) -> Best:
    best = ledger.best(optimizer)
    assert best is not None
    return best


def test_the_best_is_the_lowest_mean_over_seeds_between_its_neighbours(
    write_run: WriteRun, tmp_path: Path
) -> None:
    for lr, losses in ((0.01, (3.0, 3.2)), (0.02, (2.5, 2.9)), (0.04, (2.4, 3.1)), (0.08, (3.5, 3.5))):
        for seed, loss in enumerate(losses):
            write_run("merit", lr, loss, seed=seed)
    ledger = read(tmp_path)
    best = best_of(ledger, "merit")
    assert best.value == 0.02  # although a single seed was lower at 0.04
    assert [cell and cell.number("optimizer.lr") for cell in best.neighbours] == [0.01, 0.04]
    assert best.edge is None
    assert warnings(ledger, may_grow=True) == []
    assert summarise(ledger) == (
        "MERIT was best at a learning rate of 0.02, with a validation loss of 2.700 ± 0.283 (2 seeds; "
        "3.100 at 0.01 and 2.750 at 0.04)."
    )
    row = best_table(ledger).rows[0]
    assert row == ("MERIT", "0.02", "2.700 ± 0.283", "3.100 at 0.01", "2.750 at 0.04", "2")


def test_the_mean_over_seeds_and_the_neighbours_of_the_best_are_written(
    write_run: WriteRun, tmp_path: Path
) -> None:
    for lr, losses in ((0.01, (3.0, 3.2)), (0.02, (2.5, 2.9)), (0.04, (2.4, None))):
        for seed, loss in enumerate(losses):
            write_run("merit", lr, loss, seed=seed)
    make_page(read(tmp_path), may_grow=True).write(tmp_path / "report")
    found = json.loads((tmp_path / "report" / "best.json").read_text())["merit"]
    assert found["validation_loss"] == pytest.approx(2.7)
    assert found["validation_loss_by_seed"] == {"0": 2.5, "1": 2.9}
    assert (found["num_diverged"], found["edge"]) == (0, None)
    assert found["neighbours"] == [
        {"optimizer.lr": 0.01, "validation_loss": pytest.approx(3.1)},
        {"optimizer.lr": 0.04, "validation_loss": 2.4},
    ]


def test_a_custom_optimizer_is_distinguished_from_a_built_in_one(write_run: WriteRun, tmp_path: Path) -> None:
    write_run("adamw", 0.01, 3.0)
    write_run("torch.optim:AdamW", 0.01, 2.0)
    ledger = read(tmp_path)
    names = ["AdamW", "torch.optim:AdamW"]
    assert [line.label for line in ledger.lines] == names
    assert [row[0] for row in best_table(ledger).rows] == names
    assert summarise(ledger).startswith("torch.optim:AdamW was best")
    assert [warning.partition(" was")[0] for warning in warnings(ledger, may_grow=True)] == names


def test_a_diverged_seed_outweighs_a_low_loss(write_run: WriteRun, tmp_path: Path) -> None:
    write_run("merit", 0.01, 3.0)
    write_run("merit", 0.01, 3.0, seed=1)
    write_run("merit", 0.02, 2.0)
    write_run("merit", 0.02, None, seed=1)
    assert best_of(read(tmp_path), "merit").value == 0.01
    assert "diverged at 0.02" in summarise(read(tmp_path))


@pytest.mark.parametrize(("lr", "edge", "side"), [(0.01, "lowest", "lower"), (0.04, "highest", "higher")])
def test_a_best_value_at_the_edge_is_a_warning(
    lr: float, edge: str, side: str, write_run: WriteRun, tmp_path: Path
) -> None:
    for rate in (0.01, 0.02, 0.04):
        write_run("lamb", rate, 2.0 if rate == lr else 3.0)
    [warning] = warnings(read(tmp_path), may_grow=True)
    assert warning == (
        f"LAMB's best learning rate, {lr:g}, is the {edge} that was tried: a {side} one may be better. "
        "Extend the grid with --extend."
    )
    assert "not extended further" in warnings(read(tmp_path), may_grow=False)[0]


def test_a_single_value_is_a_warning(write_run: WriteRun, tmp_path: Path) -> None:
    write_run("lamb", 0.01, 2.0)
    assert "tried at only one learning rate, 0.01" in warnings(read(tmp_path), may_grow=True)[0]


def test_each_value_of_another_field_is_a_separate_line(write_run: WriteRun, tmp_path: Path) -> None:
    field = "optimizer.weight_decay"
    for decay, offset in ((0.0, 0.2), (0.1, 0.0), (0.2, 0.1)):
        for lr, loss in ((0.01, 3.0), (0.02, 2.0), (0.04, 3.0)):
            write_run("merit", lr, loss + offset, weight_decay=decay)
    ledger = read(tmp_path, field)
    assert [line.label for line in ledger.lines] == [f"MERIT, weight decay {d}" for d in ("0", "0.1", "0.2")]
    best = best_of(ledger, "merit")
    assert (best.line.label, best.value) == ("MERIT, weight decay 0.1", 0.02)
    assert warnings(ledger, may_grow=True) == []
    assert "at a learning rate of 0.02 and weight decay 0.1" in summarise(ledger)


def test_the_edge_of_another_field_is_a_warning(write_run: WriteRun, tmp_path: Path) -> None:
    for decay, loss in ((0.0, 2.2), (0.1, 2.1), (0.2, 2.0)):
        for lr in (0.01, 0.02, 0.04):
            write_run("merit", lr, loss + 100 * abs(lr - 0.02), weight_decay=decay)
    [warning] = warnings(read(tmp_path, "optimizer.weight_decay"), may_grow=True)
    assert "MERIT's best weight decay, 0.2, is the highest that was tried" in warning


def test_two_values_of_another_field_have_no_edge(write_run: WriteRun, tmp_path: Path) -> None:
    for decay, loss in ((0.0, 2.2), (0.1, 2.1)):
        for lr in (0.01, 0.02, 0.04):
            write_run("merit", lr, loss + 100 * abs(lr - 0.02), weight_decay=decay)
    assert warnings(read(tmp_path, "optimizer.weight_decay"), may_grow=True) == []


def test_with_one_rate_per_optimizer_lines_go_along_the_field(write_run: WriteRun, tmp_path: Path) -> None:
    for optimizer, lr in (("lamb", 0.01), ("merit", 0.02)):  # each at a different rate
        for decay, loss in ((0.0, 3.0), (0.1, 2.0), (0.2, 3.0)):
            write_run(optimizer, lr, loss, weight_decay=decay)
    ledger = read(tmp_path, "optimizer.weight_decay")
    assert ledger.axis == "optimizer.weight_decay"
    best = best_of(ledger, "merit")
    assert (best.value, best.edge) == (0.1, None)
    assert "LAMB was best at a weight decay of 0.1" in summarise(ledger)


def test_unfinished_runs_are_reported_and_not_ranked(write_run: WriteRun, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run("merit", 0.01, 3.0, seed=seed)
        write_run("merit", 0.02, 2.0, seed=seed, end="interrupted" if seed else "finished")
    ledger = read(tmp_path)
    assert best_of(ledger, "merit").value == 0.01
    assert "1 of the runs are not finished" in warnings(ledger, may_grow=True)[-1]
    assert "unfinished at 0.02" in summarise(ledger)


def test_an_optimizer_that_always_diverged_has_no_best(write_run: WriteRun, tmp_path: Path) -> None:
    write_run("adamw", 0.1, None)
    ledger = read(tmp_path)
    assert ledger.best("adamw") is None
    assert summarise(ledger) == "No run finished, so there is no best value."
    assert "No run of AdamW finished" in warnings(ledger, may_grow=True)[0]
    assert best_table(ledger).rows[0][0] == "AdamW"


def test_each_model_has_a_best_rate_and_the_sweep_says_whether_one_carries_over(
    write_run: WriteRun, tmp_path: Path
) -> None:
    # The loss is a parabola over log2(lr), lowest at 0.02 for width 32 and at 0.01 for width 128.
    for width, bottom, losses in (
        (32, 3.0, {0.01: 0.1, 0.02: 0.0, 0.04: 0.1}),
        (128, 2.0, {0.005: 0.2, 0.01: 0.0, 0.02: 0.2}),
    ):
        for lr, above in losses.items():
            write_run("merit", lr, bottom + above, width=width)
    ledger = read(tmp_path, "model.width")
    assert ledger.sizes == ["model.width"]
    assert [best.value for best in ledger.bests("merit")] == [0.02, 0.01]
    assert warnings(ledger, may_grow=True) == []  # the largest width is no edge of anything
    assert summarise(ledger) == (
        "MERIT's best learning rate was 0.02 at width 32 (loss 3.000) and 0.01 at width 128 (loss 2.000). "
        "The first of these ends 0.200 above it at width 128. "
        "Between the values that were tried the best goes about as width^-0.50."
    )
    assert [row[:5] for row in best_table(ledger).rows] == [
        ("MERIT", "32", "0.02", "0.02", "3.000"),
        ("MERIT", "128", "0.01", "0.01", "2.000"),
    ]
    make_page(ledger, may_grow=True).write(tmp_path / "report")
    found = json.loads((tmp_path / "report" / "best.json").read_text())["merit"]
    assert [(best["config"]["model"]["width"], best["lr"]) for best in found] == [(32, 0.02), (128, 0.01)]


def test_a_rate_that_lies_at_the_edge_for_one_model_carries_no_law(
    write_run: WriteRun, tmp_path: Path
) -> None:
    for width, losses in (
        (32, {0.01: 3.1, 0.02: 3.0, 0.04: 3.1}),
        (128, {0.01: 2.0, 0.02: None, 0.04: None}),
    ):
        for lr, loss in losses.items():
            write_run("merit", lr, loss, width=width)
    ledger = read(tmp_path, "model.width")
    assert "The first of these diverges at width 128." in summarise(ledger)
    assert "goes about as" not in summarise(ledger)
    [warning] = warnings(ledger, may_grow=True)
    assert warning.startswith("MERIT's best learning rate at width 128, 0.01, is the lowest that was tried")
    assert best_table(ledger).rows[1][3] == NOTHING


def test_a_size_at_which_nothing_finished_is_a_warning(write_run: WriteRun, tmp_path: Path) -> None:
    for width in (32, 128):
        for lr, loss in ((0.01, 3.1), (0.02, 3.0), (0.04, 3.1)):
            write_run("merit", lr, None if width == 128 else loss, width=width)
    [warning] = warnings(read(tmp_path, "model.width"), may_grow=True)
    assert warning.startswith("No run of MERIT finished at width 128, so it has no best value")


def test_the_cost_of_an_unfinished_run_is_not_known(write_run: WriteRun, tmp_path: Path) -> None:
    for width, losses in ((32, (3.1, 3.0, 3.1)), (128, (2.0, 2.1, 2.2))):
        for lr, loss in zip((0.01, 0.02, 0.04), losses, strict=True):
            write_run(
                "merit",
                lr,
                loss,
                width=width,
                end="interrupted" if (width, lr) == (128, 0.02) else "finished",
            )
    assert "The first of these" not in summarise(read(tmp_path, "model.width"))


def test_a_value_of_zero_has_no_parabola(write_run: WriteRun, tmp_path: Path) -> None:
    for width in (32, 64):
        for decay, loss in ((0.0, 3.1), (0.1, 3.0), (0.2, 3.1)):
            write_run("merit", 0.01, loss, weight_decay=decay, width=width)
    ledger = read(tmp_path, "optimizer.weight_decay", "model.width")
    assert (ledger.axis, ledger.sizes) == ("optimizer.weight_decay", ["model.width"])
    assert [row[:4] for row in best_table(ledger).rows] == [
        ("MERIT", "32", "0.1", NOTHING),
        ("MERIT", "64", "0.1", NOTHING),
    ]


def test_sizes_are_named_as_one_says_them(write_run: WriteRun, tmp_path: Path) -> None:
    for width in (32, 64):
        for layers in (2, 4):
            write_run("merit", 0.01, 3.0, width=width, layers=layers)
            write_run("merit", 0.02, 3.1, width=width, layers=layers)
    told = summarise(read(tmp_path, "model.width", "model.layers"))
    assert "0.01 at width 32 and 2 layers (loss 3.000)" in told


def test_a_seed_that_diverged_is_no_point_of_a_parabola_and_no_price(
    write_run: WriteRun, tmp_path: Path
) -> None:
    for width, losses in ((32, (3.1, 3.0, 3.1)), (128, (2.0, 2.1, 2.2))):
        for lr, loss in zip((0.01, 0.02, 0.04), losses, strict=True):
            write_run("merit", lr, loss, width=width)
            write_run("merit", lr, None if (width, lr) == (128, 0.02) else loss, width=width, seed=1)
    ledger = read(tmp_path, "model.width")
    assert "The first of these diverges at width 128." in summarise(ledger)
    assert [row[3] for row in best_table(ledger).rows] == ["0.02", NOTHING]
