"""Where a grid goes on, and where it stops."""

from pathlib import Path

import pytest
from sweep_runs import WriteRun

from merit_lab.sweep import Ledger
from merit_lab.sweep.extend import MOST_RATES_BEYOND, check_extendable, extension, next_rate
from merit_lab.sweep.grid import Grid
from merit_lab.train import TrainConfig


@pytest.fixture
def grid(base: TrainConfig, tmp_path: Path) -> Grid:
    return Grid(
        base=base, folder=tmp_path / "out", learning_rates={"merit": [0.01, 0.02]}, fields={}, seeds=[0, 1]
    )


def names(grid: Grid) -> list[str]:
    return [run.folder.name for run in extension(grid, Ledger.read(grid.folder, list(grid.fields)))]


def test_goes_on_beyond_the_edge_with_every_seed(write_run: WriteRun, grid: Grid) -> None:
    for seed in (0, 1):
        write_run("merit", 0.01, 3.0, seed=seed)
        write_run("merit", 0.02, 2.0, seed=seed)
    assert names(grid) == ["merit-lr0.04-seed0", "merit-lr0.04-seed1"]
    for seed in (0, 1):
        write_run("merit", 0.04, 2.5, seed=seed)
    assert names(grid) == []


def test_a_diverged_neighbour_is_a_neighbour(write_run: WriteRun, grid: Grid) -> None:
    for seed in (0, 1):
        write_run("merit", 0.01, 3.0, seed=seed)
        write_run("merit", 0.02, 2.0, seed=seed)
        write_run("merit", 0.04, None, seed=seed)
    assert names(grid) == []


def test_goes_down_where_all_diverged(write_run: WriteRun, grid: Grid) -> None:
    for seed in (0, 1):
        write_run("merit", 0.01, None, seed=seed)
        write_run("merit", 0.02, None, seed=seed)
    assert names(grid) == ["merit-lr0.005-seed0", "merit-lr0.005-seed1"]


def test_a_line_of_one_rate_has_no_factor_to_go_on_by(
    write_run: WriteRun, base: TrainConfig, tmp_path: Path
) -> None:
    decays = {"optimizer.weight_decay": [0.1]}
    rates = {"merit": [0.01, 0.02]}
    grid = Grid(base=base, folder=tmp_path / "out", learning_rates=rates, fields=decays, seeds=[0])
    write_run("merit", 0.01, None)
    write_run("merit", 0.02, None)
    write_run("merit", 0.02, None, weight_decay=0.5)  # of an earlier call
    assert names(grid) == ["merit-lr0.005-weight_decay=0.1-seed0"]


def test_waits_for_runs_that_are_not_done(write_run: WriteRun, grid: Grid) -> None:
    write_run("merit", 0.01, 3.0)
    write_run("merit", 0.02, 2.0, end="interrupted")
    assert names(grid) == []


def test_ends_after_so_many_rates(write_run: WriteRun, grid: Grid) -> None:
    rates = [0.01, 0.02]
    for _ in range(MOST_RATES_BEYOND):
        rates.append(next_rate(rates, downwards=False))
    for place, rate in enumerate(rates[:-1]):
        write_run("merit", rate, 3.0 - 0.1 * place)
    assert names(grid)[0] == f"merit-lr{rates[-1]:g}-seed0"
    write_run("merit", rates[-1], 1.0)
    assert names(grid) == []


def test_the_line_of_the_best_goes_on_alone(write_run: WriteRun, base: TrainConfig, tmp_path: Path) -> None:
    grid = Grid(
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


def test_one_rate_has_no_factor() -> None:
    with pytest.raises(ValueError, match=r"merit has the learning rate 0\.01 alone; give it two or more"):
        check_extendable({"lamb": [0.01, 0.02], "merit": [0.01]})
