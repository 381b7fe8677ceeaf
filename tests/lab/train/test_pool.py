"""Run after run on one compiled model."""

import dataclasses
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from merit_lab.models import loss
from merit_lab.train import Pool, train
from merit_lab.train.pool import as_in_pool
from merit_optim.optim.torch_private import compile_or_fail


@pytest.fixture
def without_a_compiler(monkeypatch):
    """Compile to graphs, but not to machine code, which takes long."""
    original = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: original(self, backend="aot_eager", **options)
    )
    monkeypatch.setattr(loss, "_fused_softmax", lambda: loss._softmax)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def trials(changed, **common):
    return [
        changed(seed=0, **common),
        changed(seed=1, **common, **{"optimizer.name": "adamw", "optimizer.lr": 3e-3}),
        changed(seed=2, **common, **{"optimizer.name": "muon-merit", "optimizer.lr": 2e-2}),
        changed(seed=1, **common, **{"optimizer.name": "torch:SGD", "optimizer.lr": 1e-1}),
    ]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.usefixtures("without_a_compiler")
def test_runs_of_a_pool_have_the_bits_of_runs_alone(is_compiled, changed, tmp_path, measured):
    pool = Pool()
    for number, config in enumerate(trials(changed, compile=is_compiled)):
        together = train(config, tmp_path / f"pool{number}", pool=pool)
        alone = train(as_in_pool(config), tmp_path / f"alone{number}")
        assert measured(together) == measured(alone)


@pytest.mark.usefixtures("without_a_compiler")
def test_one_graph_trains_and_one_evaluates(changed, tmp_path):
    unobserved = {"measure.attention_every": None, "measure.entropy_every": None}
    pool = Pool()
    # Also where the validation set is no multiple of a micro-batch, and there are several in a step.
    configs = trials(
        changed, compile=True, micro_batch=4, **unobserved, **{"measure.validation_sequences": 6}
    )
    for number, config in enumerate(configs * 3):
        run = train(config, tmp_path / str(number), pool=pool)
        assert not run.metrics("attention")
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.usefixtures("without_a_compiler")
@pytest.mark.slow
def test_more_shapes_than_torch_compiles_are_all_compiled(changed, tmp_path):
    pool, graphs = Pool(), []
    for number in range(10):
        shape = {"model.width": 16 + 2 * number, "steps": 1, "compile": True}
        train(changed(**shape), tmp_path / str(number), pool=pool)
        graphs.append(counters["stats"]["unique_graphs"])
    assert all(later > earlier for earlier, later in pairwise(graphs))


@pytest.mark.usefixtures("without_a_compiler")
def test_shapes_beyond_what_torch_compiles_are_an_error(changed, tmp_path, monkeypatch):
    def train_shapes():
        for width in (16, 20, 24, 28):
            config = changed(**{"model.width": width, "steps": 1, "compile": True})
            train(config, tmp_path / str(width), pool=Pool())

    monkeypatch.setattr("merit_lab.train.pool.compile_or_fail", partial(compile_or_fail, versions=2))
    few = torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2)
    with few, pytest.raises(FailOnRecompileLimitHit):
        train_shapes()


def test_a_run_after_one_that_failed(changed, tmp_path, measured, monkeypatch):
    pool, config = Pool(), changed(seed=5)
    with monkeypatch.context() as patched:
        patched.setattr("merit_lab.train.loop.take_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(changed(), tmp_path / "failed", pool=pool)
    assert measured(train(config, tmp_path / "pool", pool=pool)) == measured(
        train(config, tmp_path / "alone")
    )


def test_a_model_with_hooks_of_an_optimizer_is_not_reused(changed, tmp_path, measured, monkeypatch):
    class Hooked(torch.optim.SGD):
        def __init__(self, groups, **options):
            def halve(parameter):
                parameter.grad.mul_(0.5)

            super().__init__(groups, **options)
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(halve)

    pool, config = Pool(), changed(**{"optimizer.name": "torch:SGD", "optimizer.lr": 0.1})
    with monkeypatch.context() as patched:
        patched.setattr(torch.optim, "SGD", Hooked)
        train(config, tmp_path / "hooked", pool=pool)
    assert measured(train(config, tmp_path / "pool", pool=pool)) == measured(
        train(config, tmp_path / "alone")
    )


def test_a_pool_resumes_and_leaves_what_is_over(changed, tmp_path):
    config, pool = changed(), Pool()
    first = train(config, tmp_path / "run", pool=pool)
    written = first.metrics_path.read_bytes()
    assert train(config, tmp_path / "run", pool=pool).status == "finished"
    assert first.metrics_path.read_bytes() == written


def test_no_checkpoint_is_left_if_none_is_kept(changed, tmp_path):
    run = train(changed(**{"checkpoint.keep": 0}), tmp_path / "run", pool=Pool())
    assert run.status == "finished"
    assert not run.checkpoints.exists()
    assert train(None, run.folder, resume=True).status == "finished"


def test_models_of_transformers_are_trained_alone(changed, tmp_path, capfd):
    pytest.importorskip("transformers")
    from merit_lab.models import HuggingFaceConfig

    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 256, "n_positions": 32}
    config = changed(model=HuggingFaceConfig(settings={"model_type": "gpt2", **sizes}, context=32), steps=2)
    pool = Pool()
    for seed in range(2):
        assert (
            train(dataclasses.replace(config, seed=seed), tmp_path / str(seed), pool=pool).status
            == "finished"
        )
    assert capfd.readouterr().err.count("cannot be reused") == 1
