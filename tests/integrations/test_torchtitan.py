"""The real torchtitan, as far as it goes without a GPU: configurations, containers, schedules, checkpoints.

Its trainer needs a GPU.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from titan_cases import NUM_STEPS, assert_same, backward, build_llama, container, group, schedule, train
from torchrun import forked
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import ConfigManager, OverrideConfig, apply_overrides

import merit_optim
from merit_optim import MERIT
from merit_optim.integrations.torchtitan import MeritOptimizersContainer, default_merit, default_optimizer
from merit_optim.optim.registry import FAMILY

EXAMPLE = Path(__file__).parents[2] / "examples/torchtitan"
WORKER = Path(__file__).with_name("torchtitan_worker.py")
MODULE = "merit_optim.integrations.torchtitan"


@pytest.fixture(scope="module")
def llama():
    return build_llama()


def merit_in_two_groups(model, implementation="for-loop"):
    groups = (group(r"norm\.weight$", lr=2e-2, weight_decay=0.0), group(r".*", lr=9e-3, clip=0.5))
    return container(model, *groups, implementation=implementation)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
def test_steps_are_those_of_the_plain_optimizer(llama, implementation) -> None:
    titan, plain = copy.deepcopy(llama), copy.deepcopy(llama)
    optimizers = merit_in_two_groups(titan, implementation)
    schedulers = schedule(optimizers)
    norms = [p for name, p in plain.named_parameters() if name.endswith("norm.weight")]
    others = [p for name, p in plain.named_parameters() if not name.endswith("norm.weight")]
    expected = MERIT([{"params": norms, "weight_decay": 0.0}, {"params": others, "clip": 0.5}])
    for step in range(NUM_STEPS):
        rates = schedulers.get_metrics()
        for i, of_group in enumerate(expected.param_groups):
            of_group["lr"] = rates[f"lr/MERIT/{i}"]
        train(titan, optimizers, schedulers, [step])
        expected.zero_grad(set_to_none=False)
        backward(plain, step)
        expected.step()
    assert_same(titan, plain)
    assert not torch.equal(titan.lm_head.weight, llama.lm_head.weight)


def test_the_schedule_scales_the_rate_of_each_group(llama) -> None:
    model = copy.deepcopy(llama)
    optimizers = merit_in_two_groups(model)
    schedulers = schedule(optimizers)
    rates = []
    for step in range(NUM_STEPS):
        rates.append(schedulers.get_metrics())
        train(model, optimizers, schedulers, [step])
    assert rates[0] == {"lr/MERIT/0": 1e-2, "lr/MERIT/1": 4.5e-3}
    assert max(rate["lr/MERIT/0"] for rate in rates) == 2e-2
    assert rates[-1]["lr/MERIT/1"] < 4.5e-3


@pytest.mark.parametrize("name", ["MERIT", "LAMB", "MaxLAMB"])
def test_groups_hold_what_torchtitan_puts_there(llama, name) -> None:
    names = [name for name, _ in llama.named_parameters()]
    optimizers = container(llama, group("norm", name, lr=1e-2), group(".*", name), implementation="foreach")
    (optimizer,) = optimizers
    assert type(optimizer) is getattr(merit_optim, name)
    norms, others = optimizer.param_groups
    assert norms["param_names"] == [n for n in names if "norm" in n]
    assert others["param_names"] == [n for n in names if "norm" not in n]
    assert [norms["lr"], others["lr"]] == [1e-2, optimizer.defaults["lr"]]
    assert (norms["fused"], norms["foreach"]) == (False, True)


def test_beside_adamw_and_in_several_parts(llama) -> None:
    """As in a pipeline: each part has an optimizer of each kind."""
    model = copy.deepcopy(llama)
    parts = [copy.deepcopy(model.layers["0"]), copy.deepcopy(model.layers["1"])]
    groups = [group("norm", "AdamW", lr=1e-3), group(".*", "MERIT", lr=9e-3)]
    optimizers = container(parts, *groups)
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["AdamW", "MERIT"] * 2
    assert schedule(optimizers).get_metrics() == {"lr/AdamW": 5e-4, "lr/MERIT": 4.5e-3}
    for part in parts:
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizers.step()
    assert not torch.equal(parts[1].attention.wo.weight, model.layers["1"].attention.wo.weight)
    assert not torch.equal(parts[1].ffn_norm.weight, model.layers["1"].ffn_norm.weight)


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to .* in a single process:UserWarning")
@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")  # torchtitan's own doing
def test_a_checkpoint_goes_on_bit_for_bit(llama, tmp_path) -> None:
    whole, first, second = (copy.deepcopy(llama) for _ in range(3))
    optimizers = merit_in_two_groups(whole)
    train(whole, optimizers, schedule(optimizers), range(NUM_STEPS))

    optimizers = merit_in_two_groups(first)
    schedulers = schedule(optimizers)
    train(first, optimizers, schedulers, range(3))
    saved = {"model": first.state_dict(), "optimizer": optimizers.state_dict()}
    dcp.save(saved | {"lr_scheduler": schedulers.state_dict()}, checkpoint_id=tmp_path)

    optimizers = merit_in_two_groups(second)
    schedulers = schedule(optimizers)
    loaded = {"model": second.state_dict(), "optimizer": optimizers.state_dict()}
    loaded["lr_scheduler"] = schedulers.state_dict()
    dcp.load(loaded, checkpoint_id=tmp_path)
    second.load_state_dict(loaded["model"])
    optimizers.load_state_dict(loaded["optimizer"])
    schedulers.load_state_dict(loaded["lr_scheduler"])
    state = optimizers.optimizers[0].state[second.norm.weight]
    assert state["step"] == 3
    train(second, optimizers, schedulers, range(3, NUM_STEPS))
    assert_same(second, whole)


def test_state_is_keyed_by_name_and_made_without_touching_the_weights(llama) -> None:
    model = copy.deepcopy(llama)
    state = merit_in_two_groups(model).state_dict()
    assert_same(model, llama)
    names = {name for name, _ in model.named_parameters()}
    assert {key for key in state if key.startswith("state.")} == {
        f"state.{name}.{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert state["param_groups.norm.weight.algorithm"] == "merit"
    assert state["param_groups.lm_head.weight.clip"] == 0.5


def test_a_misspelt_option_is_refused(llama) -> None:
    with pytest.raises(ValueError, match=r"'wieght_decay', .* did you mean 'weight_decay'\?"):
        container(llama, group(".*", wieght_decay=0.1))
    with pytest.raises(
        ValueError, match=r"no option 'max_norm'; did you mean 'max_grad_norm'\? Its options are .*lr, "
    ):
        container(llama, group(".*", max_norm=1.0))
    with pytest.raises(ValueError, match=r"sets 'momentum', which its choices do not have.*direction='muon'"):
        container(llama, group(".*", momentum=0.9))


def test_options_are_checked_by_the_optimizer(llama) -> None:
    with pytest.raises(ValueError, match="lr is -1"):
        container(llama, group(".*", lr=-1))
    with pytest.raises(TypeError, match="learning_rate"):
        container(llama, group(".*"), optimizer_factory_kwargs_by_name={"MERIT": {"learning_rate": 1}})


def test_an_unknown_name_is_refused(llama) -> None:
    words = (
        r"unknown optimizer 'muon-merit'; did you mean 'MuonMERIT'\? Known optimizers: .*LAMB, .*SOAPMERIT\."
    )
    with pytest.raises(ValueError, match=words) as caught:
        container(llama, group(".*", "muon-merit"))
    assert caught.value.__notes__ == ["torchtitan's own names are allowed too."]


def test_clipping_is_left_to_torchtitan(llama) -> None:
    with pytest.raises(ValueError, match=r"set training\.max_norm"):
        container(llama, group(".*", max_grad_norm=1.0))


@pytest.mark.parametrize("state_dtype", ["bfloat16", torch.bfloat16])
def test_states_in_bf16(llama, state_dtype) -> None:
    with pytest.raises(
        ValueError, match="'fused_opt_states_bf16' is for Adam and AdamW, not MERIT; use 'fused'"
    ):
        container(llama, group(".*"), implementation="fused_opt_states_bf16")
    model = copy.deepcopy(llama)
    optimizers = container(model, group(".*", state_dtype=state_dtype))
    assert optimizers.state_dict()["state.lm_head.weight.exp_avg"].dtype == torch.bfloat16


def test_a_dtype_that_is_none_is_refused(llama) -> None:
    with pytest.raises(ValueError, match="state_dtype is 'bf61'; it must be one of"):
        container(llama, group(".*", state_dtype="bf61"))


def test_where_nothing_can_be_fused_the_error_says_what_to_set(llama, monkeypatch) -> None:
    monkeypatch.setattr("merit_optim.optim.family.fused_unavailable", lambda: "there is no Triton")
    with pytest.raises(RuntimeError, match="there is no Triton") as caught:
        container(llama, group(".*"), implementation="fused")
    assert "implementation='foreach'" in caught.value.__notes__[0]
    container(llama, group(".*", fused=None), implementation="fused")
    with pytest.raises(ValueError, match="lr is -1") as caught:
        container(llama, group(".*", lr=-1), implementation="for-loop")
    assert not hasattr(caught.value, "__notes__")


def test_merit_for_every_parameter() -> None:
    expected = MeritOptimizersContainer.Config(param_groups=[group(".*", "MERIT", lr=1e-2, weight_decay=0.2)])
    assert default_merit(lr=1e-2, weight_decay=0.2) == expected
    assert default_optimizer("MERIT", lr=1e-2, weight_decay=0.2) == expected


# --- whole configurations: these need what torchtitan's own import ----------------------------------------


@pytest.fixture
def parse():
    for name in ("torchdata", "datasets"):
        pytest.importorskip(name, reason=f"torchtitan's configurations need {name}")
    return lambda *arguments: ConfigManager().parse_args(list(arguments))


@pytest.mark.usefixtures("parse")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
def test_sharded_by_torchtitan_the_steps_are_the_same(backend) -> None:
    """By FSDP2 and tensor parallelism on 4 ranks, with MERIT, MuonMERIT and SOAPMERIT."""
    finished = forked(4, WORKER, backend, imports_much=True, CUDA_VISIBLE_DEVICES="")
    assert finished.returncode == 0, finished.stderr[-3000:]


@pytest.mark.parametrize(
    ("flag", "more", "name"),
    [
        ("merit", {}, "MERIT"),
        ("lamb", {}, "LAMB"),
        ("max_lamb", {}, "MaxLAMB"),
        *[("by_name", {"name": name}, name) for name in ("LAMB", "MuonMERIT", "NorMuon")],
    ],
)
def test_one_flag_replaces_the_optimizer(parse, llama, flag, more, name) -> None:
    options = {**more, "lr": 0.02, "weight_decay": 0.3, "state_dtype": "bfloat16"}
    config = parse(
        *("--module", "llama3", "--config", "llama3_debugmodel"),
        *("--optimizer.implementation", "foreach"),
        *("--override.imports", f"{MODULE}.{flag}={json.dumps(options)}"),
    )
    apply_overrides(config.override, config)  # as the trainer does
    (optimizer,) = config.optimizer.build(model_parts=[llama])
    assert type(optimizer) is FAMILY[name]
    first = optimizer.param_groups[0]
    assert (first["lr"], first["weight_decay"], first["foreach"]) == (0.02, 0.3, True)
    assert first["state_dtype"] == torch.bfloat16
    json.dumps(config.optimizer.to_dict())  # as the trainer does to print or save it


def test_the_flag_drops_nothing_in_silence(parse) -> None:
    config = parse("--module", "llama3", "--config", "llama3_debugmodel")
    config.optimizer.param_groups.append(group("norm", "AdamW"))
    flag = OverrideConfig(imports=[f"{MODULE}.merit"])
    with pytest.raises(ValueError, match=r"several parameter groups \('\.\*', 'norm'\)"):
        apply_overrides(flag, config)

    class Others(OptimizersContainer.Config):
        pass

    config.optimizer = Others()
    with pytest.raises(ValueError, match=r"configured by .*Others.* which an override for MERIT cannot"):
        apply_overrides(flag, config)


@pytest.mark.parametrize("optimizer_name", ["MuonMERIT", "MERIT"])
@pytest.mark.parametrize(
    "config_name", ["llama3_debugmodel_merit", "llama3_8b_merit", "deepseek_v3_debugmodel_merit"]
)
def test_the_example(parse, monkeypatch, config_name, optimizer_name) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.setattr("merit_llama3.OPTIMIZER", optimizer_name)
    arguments = ("--module", "merit_llama3", "--config", config_name, "--optimizer.implementation", "foreach")
    config = parse(*arguments)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    (optimizer,) = config.optimizer.build(model_parts=[model])
    assert type(optimizer) is getattr(merit_optim, optimizer_name)
    for of_group in optimizer.param_groups:
        is_stacked = {parameter.ndim > 2 for parameter in of_group["params"]}
        assert is_stacked == {of_group["matrix_dims"] == 2}
        assert {parameter.ndim > 1 for parameter in of_group["params"]} == {of_group["weight_decay"] > 0}
