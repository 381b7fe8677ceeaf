"""Every command of the lab refuses bad input: its message names what was given; there is no traceback."""

from pathlib import Path

import pytest

from merit_optim import cli

SMALL = "tiny --data {data} --steps 2"
DEEP = "[" * 100_000
HUGE = "1" * 31

# By command line, what the message says of what was given. {new} is a folder that nothing may be written to.
REFUSED = {
    f"train {SMALL} --out {{new}} --batch 0": "batch is 0",
    f"train {SMALL} --out {{new}} --batch many": "many",
    f"train {SMALL} --out {{new}} --optimizer.name adamx": "adamx",
    f"train {SMALL} --out {{new}} --optimizer.lr nan": "nan",
    f"train {SMALL} --out {{new}} --optimiser.lr 1": "--optimizer.lr",
    "train tiniest --data {data} --out {new}": "tiniest",
    "train tiny --data {empty} --out {new}": "{empty}",
    f"compare {SMALL} --out {{new}} --optimizers adamw adamx": "adamx",
    f"sweep {SMALL} --out {{new}} --lr 0.1 x": "x",
    f"arena {SMALL} --out {{new}} --budget 0": "0",
    f"arena {SMALL} --out {{new}} --budget {HUGE}": "--budget is 1",
    f"scale {SMALL} --out {{new}} --target 1 --batches 0 --lr 1e-3": "0",
    "advise --model tiny --batch many": "many",
    "demo --seeds x": "x",
    "prepare text {empty}/none.txt --out {new}": "{empty}/none.txt",
    "prepare text {text} --out {new} --tokenizer bqe-400": "bqe-400",
    "prepare text {text} --out {new} --tokenizer bpe-256": "its size must be from 257",
    "prepare text {text} --out {new} --validation 2": "the share for validation is 2.0",
    "prepare text {text} --out {new} --tokenizer bytes --gpt2-vocabulary {empty}": "leave it out",
    "prepare text {text} --out {new} --gpt2-vocabulary {empty}": "{empty} does not hold GPT-2's vocabulary",
    "prepare embedded --limit 1 --out {new}": "no Python sources of up to 1 bytes",
    "prepare enwik8 {text} --out {new}": "enwik8 has 100000000",
    "report {empty} --out {new}": "{empty}",
    "keep {empty} --out {new}": "{empty}",
    "reproduce fig99 --out {new}": "fig99",
    "batch-size {empty}": "{empty}",
    "batch-size {run} --batches 1": "batches is 1; it must be a whole number of at least 2",
    f"batch-size {{run}} --batches 2 --batch 4 --micro-batch 2 --seed {HUGE}": "seed is 1",
    "batch-size {run} --batch 6": "batch is 6; it must be a multiple of micro_batch, 4",
    "batch-size {run} --checkpoint 5": "no checkpoint of step 5; available steps: 4, 6",
    "batch-size {run} --batches 4 --batch 2000": "8000, but train.bin has 6248",
    "curvature {empty}": "{empty}",
    "curvature {run} --checkpoint 5": "no checkpoint of step 5; available steps: 4, 6",
    "curvature {run} --sequences 0": "sequences is 0; it must be a whole number of at least 1",
    f"curvature {{run}} --seed {HUGE}": "it must be at most 9223372036854775807",
    f"curvature {{run}} --micro-batch {HUGE}": "micro_batch is 1",
    "curvature {run} --top 10000": "request at most",
    "curvature {run} --probes 1": "probes is 1; it must be 0",
    "curvature {run} --micro-batch 0": "micro_batch is 0",
    "curvature {run} --tolerance 0": "tolerance is 0.0; it must be between",
    "curvature {run} --data {empty}": "{empty}",
    "evaluate {empty} --task-files {empty}": "{empty}",
    "evaluate {run} --tasks lambda --task-files {empty}": "'lambda' among the task files; did you mean",
    "evaluate {run} --limit 0 --task-files {empty}": "limit is 0; it must be a whole number of at least 1",
    f"evaluate {{run}} --limit {HUGE} --task-files {{empty}}": "limit is 1",
    "evaluate {run} --tokenizer bytes --task-files {empty}": "must contain lambada/lambada_test.jsonl",
    "evaluate {run} --checkpoint 3 --task-files {empty}": "no checkpoint of step 3; available steps: 4, 6",
    "evaluate {run} --task-files {empty}": "--tokenizer",
    "export {run} {data}": "{data} is not empty; choose another folder",
    "export {run} {new} --checkpoint 15": "no checkpoint of step 15; available steps: 4, 6",
    "export {run} {new} --tokenizer gpt-2": "'gpt-2'; it must be gpt2, bytes",
    "bench stpe": "stpe",
    "bench --device gpu": "device is 'gpu'",
    "bench --device cuda:99": "device is 'cuda:99'",
    "bench --seconds nan": "seconds is nan",
    "bench --models gpt3": "models is 'gpt3'",
    "bench --device cpu --out {data}": "nothing can be written to {data}",
    "bench --models tiny --device cpu --only Adagrad": "leave no contestant; choose from: torch AdamW",
    "completion tcsh": "tcsh",
    "trian": "did you mean 'train'?",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_refused(
    line: str, data: Path, trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    empty, new, text = tmp_path / "empty", tmp_path / "new", tmp_path / "text"
    empty.mkdir()
    text.write_text("some text " * 1000)
    places = {"data": data, "run": trained, "empty": empty, "new": new, "text": text}
    before = sorted(trained.rglob("*"))
    try:
        status: object = cli.main([word.format(**places) for word in line.split()])
    except SystemExit as error:
        status = error.code
    said = capfd.readouterr().err
    if isinstance(status, str):  # what sys.exit prints
        said, status = said + status, 1
    assert status in (1, 2)
    unwrapped = " ".join(said.replace("│", " ").split())
    assert REFUSED[line].format(**places) in unwrapped
    assert "Traceback" not in said
    assert not new.exists()
    assert sorted(trained.rglob("*")) == before


@pytest.mark.parametrize(
    "command", ["batch-size {}", "curvature {}", "evaluate {}", "export {} new", "report {}"]
)
@pytest.mark.parametrize(
    "text", [DEEP, "1" * 400, "[]", "{", '{"format": 7}'], ids=["deep", "digits", "list", "cut", "format"]
)
def test_a_run_whose_configuration_is_damaged_is_refused(
    command: str, text: str, run: Path, tmp_path: Path, monkeypatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (run / "config.json").write_text(text)
    assert cli.main(command.format(run).split()) == 1
    said = capfd.readouterr().err
    assert "config.json" in said
    assert "Traceback" not in said
