"""Muon's and SOAP's directions in torchtitan: its weights are sorted by what they are, part by part."""

import copy
import importlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from titan_cases import NUM_STEPS, assert_same, backward, build_llama, container, group, schedule, train
from torchtitan.distributed.pipeline_parallel import _split_module

import merit_optim
from merit_optim import MuonMERIT, param_groups
from merit_optim.integrations import torchtitan
from merit_optim.optim.kinds import kinds_of
from merit_optim.optim.registry import FAMILY

SORTING = ["MuonMERIT", "SOAPMERIT", "Muon", "NorMuon", "OrScale", "SOAP"]
STAGES = (["tok_embeddings"], ["layers.0"], ["layers.1", "norm", "lm_head"])


@pytest.fixture(scope="module")
def llama():
    return build_llama()


def by_name(optimizers) -> dict:
    """The group of every parameter."""
    groups = [of_group for optimizer in optimizers for of_group in optimizer.param_groups]
    return {name: of_group for of_group in groups for name in of_group["param_names"]}


def stages(model) -> list:
    """The parts of a pipeline, as torchtitan cuts them: the first has the embeddings alone."""
    return [_split_module(model, names) for names in STAGES]


@pytest.mark.parametrize("name", SORTING)
def test_hidden_matrices_take_the_direction_and_the_rest_adam_s(llama, name) -> None:
    assert FAMILY[name].COMPOSITION.kinds is not None
    optimizers = container(llama, group("norm", name, weight_decay=0.0), group(".*", name, weight_decay=0.2))
    (optimizer,) = optimizers
    assert type(optimizer) is getattr(merit_optim, name)
    of_parameters = by_name(optimizers)
    hidden = {key for key, found in of_parameters.items() if found["direction"] != "adam"}
    matrices = {key for key, parameter in llama.named_parameters() if parameter.ndim > 1}
    assert hidden == (matrices if name == "SOAP" else matrices - {"tok_embeddings.weight", "lm_head.weight"})
    decays = {key: found["weight_decay"] for key, found in of_parameters.items()}
    assert decays == {key: 0.2 if key in matrices else 0.0 for key, _ in llama.named_parameters()}


def test_weights_that_are_stored_transposed() -> None:
    """As in models of Hugging Face."""
    layer = type("Conv1D", (torch.nn.Module,), {})()
    layer.weight = torch.nn.Parameter(torch.ones(3, 4))
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "second": layer})
    of_parameters = by_name(container(model, group(".*", "NorMuon")))
    transposed = [name for name, found in of_parameters.items() if found.get("transposed")]
    assert transposed == ["second.weight"]


def test_steps_are_those_of_the_plain_optimizer(llama) -> None:
    titan, plain = copy.deepcopy(llama), copy.deepcopy(llama)
    groups = (group("norm", "MuonMERIT", lr=2e-2, weight_decay=0.0), group(".*", "MuonMERIT", lr=2e-2))
    optimizers = container(titan, *groups)
    expected = MuonMERIT(param_groups(plain, weight_decay=0.1), lr=2e-2, foreach=False)
    for step in range(3):
        for model, optimizer in ((titan, optimizers), (plain, expected)):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    assert_same(titan, plain)


def test_options_are_arguments_of_the_class(llama) -> None:
    kinds = {"embedding": {"betas": [0.8, 0.9], "weight_decay": 0.0}, "head": {"rate_scale": 2.0}}
    found = by_name(container(llama, group(".*", "MuonMERIT", lr=0.1, momentum=0.8, clip=0.5, kinds=kinds)))
    hidden, embedding = found["layers.0.attention.wo.weight"], found["tok_embeddings.weight"]
    assert [hidden[key] for key in ("lr", "momentum", "clip", "weight_decay")] == [0.1, 0.8, 0.5, 0.1]
    assert [embedding[key] for key in ("rate_scale", "clip", "weight_decay")] == [0.4, None, 0.0]
    assert (tuple(embedding["betas"]), embedding["ratio"]) == ((0.8, 0.9), "none")
    assert found["lm_head.weight"]["rate_scale"] == 2.0
    found = by_name(container(llama, group(".*", "MERIT", kinds={"embedding": {"rate_scale": 3.0}})))
    assert [found[f"{name}.weight"]["rate_scale"] for name in ("tok_embeddings", "lm_head")] == [3.0, 1.0]
    with pytest.raises(ValueError, match=r"kinds sets 'rate_scal' for 'head', .* did you mean 'rate_scale'"):
        container(llama, group(".*", "MERIT", kinds={"head": {"rate_scal": 3.0}}))


def test_groups_keep_their_own_options(llama) -> None:
    """Also those that stand in a group only if they are not the usual."""
    groups = (group("layers.0", "OrScale"), group(".*", "OrScale", calibrated=False, ratio_bounds=None))
    found = by_name(container(llama, *groups))
    values = [found[f"layers.{i}.attention.wo.weight"] for i in range(2)]
    assert [(group["calibrated"], group["ratio_bounds"]) for group in values] == [
        (True, (0.1, 5.0)),
        (False, None),
    ]


def test_a_group_that_says_its_direction_is_not_sorted(llama) -> None:
    adam = group("feed_forward", "MuonMERIT", direction="adam", lr=1e-3)
    muon = group("lm_head", "MuonMERIT", direction="muon", lr=2e-3)
    found = by_name(container(llama, adam, muon, group(".*", "MuonMERIT")))
    values = [found["layers.0.feed_forward.w1.weight"], found["lm_head.weight"]]
    assert [(group["direction"], group["lr"]) for group in values] == [("adam", 1e-3), ("muon", 2e-3)]
    assert found["layers.0.attention.wo.weight"]["direction"] == "muon"
    container(llama, group(".*", "MuonMERIT", direction="adam"))
    with pytest.raises(ValueError, match="'kinds', which MuonMERIT does not know"):
        container(llama, group(".*", "MuonMERIT", direction="adam", kinds={}))


def test_a_misspelt_option_is_refused(llama) -> None:
    with pytest.raises(
        ValueError, match=r"no option 'momentun'; did you mean 'momentum'\? Its options are .*kinds"
    ):
        container(llama, group(".*", "MuonMERIT", momentun=0.9))
    with pytest.raises(ValueError, match=r"set training\.max_norm"):
        container(llama, group(".*", "MuonMERIT", max_grad_norm=1.0))


def test_fused_is_the_fastest_engine_that_each_weight_can_have(llama, monkeypatch) -> None:
    (optimizer,) = container(llama, group(".*", "MuonMERIT"), implementation="fused")
    assert {(group["fused"], group["foreach"]) for group in optimizer.param_groups} == {(None, None)}
    (optimizer,) = container(llama, group(".*", "MuonMERIT"), implementation="foreach")
    assert {(group["fused"], group["foreach"]) for group in optimizer.param_groups} == {(False, True)}
    monkeypatch.setattr("merit_optim.optim.family.fused_unavailable", lambda: "there is no Triton")
    with pytest.raises(RuntimeError, match="there is no Triton"):
        container(llama, group(".*", "MuonMERIT", fused=True), implementation="fused")


# --- parts of a pipeline ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_name", ["llama3", "deepseek_v3", "gpt_oss"])
def test_a_part_alone_knows_what_its_weights_are(model_name) -> None:
    with torch.device("meta"):
        model = (
            importlib.import_module(f"torchtitan.models.{model_name}")
            .model_registry("debugmodel")
            .model.build()
        )
    kinds = kinds_of(model)
    whole = {name: kinds[parameter] for name, parameter in model.named_parameters()}
    assert (whole["tok_embeddings.weight"], whole["lm_head.weight"]) == ("embedding", "head")
    experts = {kind for name, kind in whole.items() if "inner_experts" in name and "bias" not in name}
    assert experts <= {"experts"}
    assert {kind for name, kind in whole.items() if "bias" in name} <= {"vector"}
    layers = [[f"layers.{number}"] for number in model.layers]
    for names in (["tok_embeddings"], *layers, ["norm", "lm_head"]):
        part = _split_module(model, names)
        kinds = kinds_of(part)
        for name, parameter in part.named_parameters():
            assert kinds[parameter] == whole[name], (names, name)


def test_every_part_has_an_optimizer_and_one_without_layers_is_adamw(llama) -> None:
    optimizers = container(stages(llama), group(".*", "MuonMERIT", lr=0.1))
    assert [type(optimizer) for optimizer in optimizers] == [MuonMERIT] * 3
    directions = [{settings["direction"] for settings in optimizer.param_groups} for optimizer in optimizers]
    assert directions == [{"adam"}, {"muon", "adam"}, {"muon", "adam"}]
    whole = by_name(container(llama, group(".*", "MuonMERIT", lr=0.1)))
    of_parts = by_name(optimizers)
    assert of_parts.keys() == whole.keys()
    for name, settings in of_parts.items():
        lists = ("params", "param_names")
        assert {k: v for k, v in settings.items() if k not in lists} == {
            k: v for k, v in whole[name].items() if k not in lists
        }


def test_a_rank_without_layers_says_that_it_is_adamw(llama, monkeypatch) -> None:
    said = []
    monkeypatch.setattr(torchtitan.logger, "warning", said.append)
    (optimizer,) = container(stages(llama)[:1], group(".*", "MuonMERIT"))
    (of_embedding,) = optimizer.param_groups
    assert (of_embedding["direction"], of_embedding["rate_scale"]) == ("adam", 0.4)
    assert ["MuonMERIT has no weight to use direction='muon' for on this rank" in line for line in said] == [
        True
    ]


def test_patterns_that_leave_no_hidden_matrix_are_refused(llama) -> None:
    with pytest.raises(ValueError, match=r"direction='muon' for: layers\.0\..* put MuonMERIT's before those"):
        container(llama, group("layers", "AdamW", lr=1e-3), group(".*", "MuonMERIT"))


def test_the_log_has_a_line_for_every_weight(llama, monkeypatch) -> None:
    said = []
    monkeypatch.setattr(torchtitan.logger, "info", said.append)
    container(llama, group("norm", "MuonMERIT"), group(".*", "MuonMERIT"))
    (table,) = [line for line in said if "MuonMERIT" in line]
    assert "['norm', '.*']" in table
    assert "muon x merit" in next(line for line in table.splitlines() if "attention.wo" in line)
    assert "adamw" in next(line for line in table.splitlines() if line.startswith("lm_head"))


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to .* in a single process:UserWarning")
@pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning")  # torchtitan's own doing
def test_a_checkpoint_of_the_whole_model_goes_on_in_parts(llama, tmp_path) -> None:
    groups = (group(".*", "MuonMERIT", lr=2e-2),)
    whole = copy.deepcopy(llama)
    optimizers = container(whole, *groups)
    schedulers = schedule(optimizers)
    train(whole, optimizers, schedulers, range(3))
    dcp.save({"optimizer": optimizers.state_dict()}, checkpoint_id=tmp_path)

    parts = stages(whole)
    of_parts = container(parts, *groups)
    schedulers_of_parts = schedule(of_parts)
    loaded = {"optimizer": of_parts.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    of_parts.load_state_dict(loaded["optimizer"])
    schedulers_of_parts.load_state_dict(schedulers.state_dict())
    parameters = {name: p for part in parts for name, p in part.named_parameters()}
    for step in range(3, NUM_STEPS):
        optimizers.zero_grad()
        backward(whole, step)
        for name, parameter in whole.named_parameters():
            parameters[name].grad = parameter.grad.clone()
        for some in (optimizers, of_parts, schedulers, schedulers_of_parts):
            some.step()
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameters[name], parameter), name
