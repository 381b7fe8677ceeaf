"""When a grid is extended, and when the extension stops."""

from pathlib import Path

import pytest
from sweep_runs import WriteRun

from merit_lab.sweep.extend import MOST_RATES_BEYOND, check_extendable, extension, next_rate
from merit_lab.sweep.grid import SweepGrid
from merit_lab.sweep.ledger import Ledger
from merit_lab.train import TrainConfig


@pytest.fixture
def grid(base: TrainConfig, tmp_path: Path) -> SweepGrid:
    return SweepGrid(
        base=base, folder=tmp_path / "out", learning_rates={"merit": [0.01, 0.02]}, fields={}, seeds=[0, 1]
    )


def names(grid: SweepGrid) -> list[str]:
    return [run.folder.name for run in extension(grid, Ledger.read(grid.folder, list(grid.fields)))]


def test_extends_beyond_the_edge_with_every_seed(write_run: WriteRun, grid: SweepGrid) -> None:
    for seed in (0, 1):
        write_run("merit", 0.01, 3.0, seed=seed)
        write_run("merit", 0.02, 2.0, seed=seed)
    assert names(grid) == ["merit-lr0.04-seed0", "merit-lr0.04-seed1"]
    for seed in (0, 1):
        write_run("merit", 0.04, 2.5, seed=seed)
    assert names(grid) == []


def test_a_diverged_neighbour_ends_the_extension(write_run: WriteRun, grid: SweepGrid) -> None:
    for seed in (0, 1):
        write_run("merit", 0.01, 3.0, seed=seed)
        write_run("merit", 0.02, 2.0, seed=seed)
        write_run("merit", 0.04, None, seed=seed)
    assert names(grid) == []


def test_extends_downwards_if_all_runs_diverged(write_run: WriteRun, grid: SweepGrid) -> None:
    for seed in (0, 1):
        write_run("merit", 0.01, None, seed=seed)
        write_run("merit", 0.02, None, seed=seed)
    assert names(grid) == ["merit-lr0.005-seed0", "merit-lr0.005-seed1"]


def test_a_line_of_one_rate_is_not_extended(write_run: WriteRun, base: TrainConfig, tmp_path: Path) -> None:
    decays = {"optimizer.weight_decay": [0.1]}
    rates = {"merit": [0.01, 0.02]}
    grid = SweepGrid(base=base, folder=tmp_path / "out", learning_rates=rates, fields=decays, seeds=[0])
    write_run("merit", 0.01, None)
    write_run("merit", 0.02, None)
    write_run("merit", 0.02, None, weight_decay=0.5)  # from an earlier call
    assert names(grid) == ["merit-lr0.005-weight_decay=0.1-seed0"]


def test_waits_for_unfinished_runs(write_run: WriteRun, grid: SweepGrid) -> None:
    write_run("merit", 0.01, 3.0)
    write_run("merit", 0.02, 2.0, end="interrupted")
    assert names(grid) == []


def test_stops_after_the_maximum_number_of_rates(write_run: WriteRun, grid: SweepGrid) -> None:
    rates = [0.01, 0.02]
    for _ in range(MOST_RATES_BEYOND):
        rates.append(next_rate(rates, downwards=False))
    for place, rate in enumerate(rates[:-1]):
        write_run("merit", rate, 3.0 - 0.1 * place)
    assert names(grid)[0] == f"merit-lr{rates[-1]:g}-seed0"
    write_run("merit", rates[-1], 1.0)
    assert names(grid) == []


def test_only_the_line_of_the_best_cell_is_extended(
    write_run: WriteRun, base: TrainConfig, tmp_path: Path
) -> None:
    grid = SweepGrid(
        base=base,
        folder=tmp_path / "out",
        learning_rates={"merit": [0.01, 0.02]},
        fields={"optimizer.weight_decay": [0.0, 0.1]},
        seeds=[0],
    )
    for decay, offset in ((0.0, 0.0), (0.1, 0.5)):
        write_run("merit", 0.01, 2.0 + offset, weight_decay=decay)
        write_run("merit", 0.02, 3.0 + offset, weight_decay=decay)
    assert names(grid) == ["merit-lr0.005-weight_decay=0-seed0"]


def test_a_single_rate_cannot_be_extended() -> None:
    with pytest.raises(ValueError, match=r"merit has only the learning rate 0\.01; give it two or more"):
        check_extendable({"lamb": [0.01, 0.02], "merit": [0.01]})


def test_extends_for_each_model_of_the_grid(write_run: WriteRun, base: TrainConfig, tmp_path: Path) -> None:
    rates = {"merit": [0.01, 0.02]}
    grid = SweepGrid(
        base=base, folder=tmp_path / "out", learning_rates=rates, fields={"model.width": [32, 64]}, seeds=[0]
    )
    for width, losses in ((32, (3.0, 2.5)), (64, (2.0, 2.4))):
        for lr, loss in zip(rates["merit"], losses, strict=True):
            write_run("merit", lr, loss, width=width)
    assert names(grid) == ["merit-lr0.04-width=32-seed0", "merit-lr0.005-width=64-seed0"]
