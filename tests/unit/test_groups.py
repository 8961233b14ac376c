"""Routing: every parameter has one place and a reason, on real modules."""

import copy
import inspect
import math
import re
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from cachemuon import CacheMuon, Muon
from cachemuon.optim.adam import ADAM_DEFAULTS
from cachemuon.routing.groups import ParamGroups, param_groups
from cachemuon.routing.heads import HEAD_NAMES, LAST_NAMES
from cachemuon.routing.layout import matrix_layout, matrix_shape
from cachemuon.routing.names import ADAM_SETTINGS, MUON_SETTINGS
from cachemuon.routing.rules import Route, routes


def reasons(model, **options):
    """{name: (use_muon, reason)}."""
    return {route.name: (route.use_muon, route.reason) for route in routes(model, **options)}


def on_muon(model, **options):
    return [route.name for route in routes(model, **options) if route.use_muon]


def names(group):
    return [name for name, _ in group["params"]]


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, add_bias_kv=True)
        self.up = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width)


class GPT(nn.Module):
    def __init__(self, tied=True, depth=2):
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.wpe = nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class Wrapper(nn.Module):
    """Holds its model as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class Net(nn.Module):
    """Whatever children and parameters are given, by name, in order."""

    def __init__(self, **members):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)


def test_mlp_sends_hidden_matrices_to_muon_and_the_last_linear_to_adam():
    assert reasons(mlp()) == {
        "0.weight": (True, "matrix"),
        "0.bias": (False, "bias"),
        "2.weight": (True, "matrix"),
        "2.bias": (False, "bias"),
        "4.weight": (False, "output head"),
        "4.bias": (False, "bias"),
    }


def test_the_head_goes_to_muon_by_choice():
    assert reasons(mlp(), head="muon")["4.weight"] == (True, "output head, by choice")
    assert on_muon(mlp(), head="muon") == ["0.weight", "2.weight", "4.weight"]


def test_conv_net():
    model = Net(
        conv=nn.Conv2d(3, 8, 3),
        norm=nn.BatchNorm2d(8),
        up=nn.ConvTranspose2d(8, 4, 2),
        deep=nn.Conv3d(4, 4, 3, bias=False),
        depthwise=nn.Conv2d(8, 8, 3, groups=8),
        act=nn.PReLU(),
        grouped=nn.Conv2d(8, 12, 3, groups=2),
        patches=nn.Conv2d(3, 8, 4, stride=4),
        fc=nn.Linear(8, 10),
    )
    found = reasons(model)
    assert found["conv.weight"] == (True, "convolution as (out, in*kh*kw)")
    assert found["norm.weight"] == (False, "norm")
    assert found["norm.bias"] == (False, "bias")
    assert found["up.weight"] == (True, "convolution as (in, out*kh*kw)")
    assert found["deep.weight"] == (True, "convolution as (out, in*kd*kh*kw)")
    assert found["depthwise.weight"] == (False, "depthwise convolution")
    assert found["grouped.weight"] == (True, "convolution as (out, in*kh*kw), in 2 groups")
    assert found["patches.weight"] == (False, "patch embedding")
    assert found["act.weight"] == (False, "vector")
    assert found["fc.weight"] == (False, "output head")


def test_weights_that_are_read_differently_have_groups_of_their_own():
    model = Net(
        conv=nn.Conv1d(3, 8, 5, bias=False),
        up=nn.ConvTranspose1d(8, 4, 2, bias=False),
        grouped=nn.Conv2d(4, 8, 3, groups=2, bias=False),
        grouped_up=nn.ConvTranspose2d(4, 8, 3, groups=2, bias=False),
        mix=nn.Linear(4, 4),
        out=nn.Linear(4, 2),
    )
    groups = param_groups(model, muon=dict(momentum=0.9))
    read = [(g.get("view"), g.get("split"), g.get("transposed"), names(g)) for g in groups]
    assert read == [
        (None, None, None, ["mix.weight"]),
        (None, 2, None, ["grouped.weight", "grouped_up.weight"]),
        ("flatten", None, None, ["conv.weight"]),
        ("flatten", None, True, ["up.weight"]),
        (None, None, None, ["out.weight"]),
        (None, None, None, ["mix.bias", "out.bias"]),
    ]
    assert [g.get("momentum") for g in groups] == [0.9] * 4 + [None] * 2
    by_name = {route.name: route for route in groups.routes}
    assert by_name["conv.weight"].reason == "convolution as (out, in*k)"
    assert by_name["up.weight"].reason == "convolution as (in, out*k)"
    assert by_name["conv.weight"].view == "flatten"
    assert by_name["mix.weight"].view == "auto"
    assert by_name["mix.bias"].view is None


def test_the_matrices_of_a_grouped_convolution_are_what_its_groups_do():
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 8, 3, groups=2, bias=False)
    (group,) = param_groups(conv)
    parts = matrix_layout(tuple(conv.weight.shape), split=group["split"]).split(conv.weight)
    x = torch.randn(1, 6, 5, 5)
    alone = [nn.functional.conv2d(x[:, 3 * i : 3 * i + 3], part) for i, part in enumerate(parts)]
    torch.testing.assert_close(torch.cat(alone, 1), conv(x))


class Conv1D(nn.Module):
    """As transformers' own, which GPT-2 uses: a Linear that keeps its weight as (in, out)."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inputs, outputs))


def experts(up, down):
    return Net(gate_up_proj=nn.Parameter(torch.zeros(2, *up)), down_proj=nn.Parameter(torch.zeros(2, *down)))


def test_what_lies_as_in_out_is_found_by_class_and_by_shape():
    def turned(model, **options):
        return [route.name for route in routes(model, **options) if route.transposed]

    model = Net(body=nn.ModuleList([Conv1D(12, 4), nn.Linear(12, 4)]), lm_head=Conv1D(9, 4))
    assert turned(model) == ["body.0.weight"]
    assert reasons(model)["body.0.weight"] == (True, "matrix, as (in, out)")
    assert reasons(model)["lm_head.weight"] == (False, "output head")
    assert turned(model, transposed={"body.0.*": False, "body.1.weight": True}) == ["body.1.weight"]
    for hidden, width in ((6, 4), (8, 4), (4, 4), (4, 8)):
        assert turned(experts((hidden, 2 * width), (width, hidden))) == ["gate_up_proj", "down_proj"]
        assert turned(experts((2 * width, hidden), (hidden, width))) == []


def test_split_by_pattern():
    model = Net(rnn=nn.LSTM(6, 8), h=nn.ModuleList([Conv1D(24, 8), nn.Linear(8, 12)]), out=nn.Linear(12, 2))
    split = {"rnn.weight_*": 4, "h.0.weight": 3, "h.1.*": [8, 2, 2]}
    groups = param_groups(model, split=split)
    found = {name: group for group in groups for name in names(group)}
    assert found["rnn.weight_ih_l0"]["split"] == 4
    assert (found["h.0.weight"]["split"], found["h.0.weight"]["transposed"]) == (3, True)
    assert found["h.1.weight"]["split"] == (8, 2, 2)
    assert "split" not in found["h.1.bias"]  # a pattern may match what is Adam's, if it matches more
    assert reasons(model, split=split)["h.0.weight"] == (True, "matrix, split 3, as (in, out)")
    assert reasons(model, split=split)["h.1.weight"] == (True, "matrix, split (8, 2, 2)")
    optimizer = Muon(groups, adjust_lr_fn="original")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    stepped = optimizer.cache_stats()["matrices"]
    assert {f"h.0.weight[{i}]" for i in range(3)} | {f"rnn.weight_hh_l0[{i}]" for i in range(4)} <= set(
        stepped
    )


def test_a_bare_parameter_is_a_weight_only_if_it_is_called_so():
    bare = ("latents", "pos", "gamma", "queries", "A_log", "layer_scale", "codebook", "b1", "mixers")
    model = Net(
        **{
            name: nn.Parameter(torch.zeros(2, 4, 4) if name == "mixers" else torch.zeros(4, 8))
            for name in bare
        }
    )
    assert on_muon(model) == []
    assert reasons(model)["latents"] == (False, "no layer's weight")
    called = (
        "weight",
        "in_proj_weight",
        "w",
        "w1",
        "W_q",
        "qkv_w",
        "kernel",
        "up_proj",
        "lora_A",
        "weight_hh_l0",
    )
    assert on_muon(Net(**{name: nn.Parameter(torch.zeros(4, 8)) for name in called})) == list(called)
    # Experts are called all kinds of things.
    mixture = type("MoE", (Net,), {})(
        up=nn.Parameter(torch.zeros(2, 8, 4)), up_b=nn.Parameter(torch.zeros(2, 8)), gate=nn.Linear(4, 2)
    )
    assert on_muon(Net(moe=mixture, head=nn.Linear(4, 3))) == ["moe.up"]


def test_routers_go_to_adam():
    def lin():
        return nn.Linear(8, 4, bias=False)

    mixture = Net(gate=lin(), experts=nn.ModuleList([nn.Linear(8, 8, bias=False)]), shared_expert_gate=lin())
    glu = Net(gate=lin(), up=lin())
    nested = Net(router=Net(layer=lin()))
    stacked = Net(experts_w=nn.Parameter(torch.zeros(2, 8, 8)), gate=lin())
    model = Net(
        blocks=nn.ModuleList([mixture, glu, nested, stacked]), router_weight=nn.Parameter(torch.zeros(4, 8))
    )
    assert {name for name, found in reasons(model).items() if found == (False, "router")} == {
        "router_weight",
        "blocks.0.gate.weight",
        "blocks.0.shared_expert_gate.weight",
        "blocks.2.router.layer.weight",
        "blocks.3.gate.weight",
    }
    assert "blocks.1.gate.weight" in on_muon(model)


def test_attention_alone_has_no_head():
    model = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    assert on_muon(model) == ["in_proj_weight", "out_proj.weight"]
    found = reasons(model)
    for name in ("in_proj_bias", "bias_k", "bias_v", "out_proj.bias"):
        assert found[name] == (False, "bias")
    apart = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
    assert on_muon(apart) == ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
    # The last Linear is attention's own: the one before it is not made a head in its place.
    assert "0.weight" in on_muon(nn.Sequential(nn.Linear(8, 8), model))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("wrap", [lambda m: m, Wrapper, lambda m: Net(encoder=m)])
def test_transformer_encoder_has_no_head_at_any_depth(depth, wrap):
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = wrap(nn.TransformerEncoder(layer, depth, enable_nested_tensor=False))
    matrices = [name for name, param in model.named_parameters() if param.ndim == 2]
    assert on_muon(model) == matrices
    assert len(matrices) == 4 * depth


def test_blocks_in_a_module_list_have_no_head_whatever_their_last_linear_is_called():
    for depth in (1, 2):
        body = Net(blocks=nn.ModuleList(Block() for _ in range(depth)))
        assert f"blocks.{depth - 1}.out.weight" in on_muon(body)


def test_tied_embedding_appears_once_under_adam():
    model = GPT()
    found = reasons(model, head="muon")
    assert found["wte.weight"] == (False, "embedding, tied to lm_head.weight")
    assert "lm_head.weight" not in found
    assert found["wpe"] == (False, "embedding")
    assert on_muon(model) == [
        f"blocks.{i}.{name}.weight".replace("in_proj.weight", "in_proj_weight")
        for i in range(2)
        for name in ("attn.in_proj", "attn.out_proj", "up", "out")
    ]
    # The owner that comes second decides as well.
    late = Net(lm_head=nn.Linear(8, 11, bias=False), wte=nn.Embedding(11, 8))
    late.wte.weight = late.lm_head.weight
    assert reasons(late, head="muon") == {"lm_head.weight": (False, "embedding, tied to wte.weight")}


def test_untied_head_is_a_head():
    found = reasons(GPT(tied=False))
    assert found["wte.weight"] == (False, "embedding")
    assert found["lm_head.weight"] == (False, "output head")


def test_a_layer_that_is_reached_twice_is_routed_once_and_is_not_tied():
    shared = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(shared, shared, nn.Linear(8, 2, bias=False))
    assert reasons(model)["0.weight"] == (True, "matrix")
    assert [name for name, _ in param_groups(model)[0]["params"]] == ["0.weight"]
    # As under Fabric, which has the model under two names.
    wrapped = Net(_forward_module=model, _original_module=model)
    assert [reason for _, reason in reasons(wrapped).values()] == ["matrix", "output head"]


def test_a_weight_of_several_layers_names_them():
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    layers[1].weight = layers[2].weight = layers[0].weight
    model = nn.Sequential(*layers, layers[1], nn.Linear(8, 2, bias=False))
    assert reasons(model)["0.weight"] == (True, "matrix, tied to 1.weight and 1 more")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"adam": {"learning_rate": 1e-3}}, "adam has no setting 'learning_rate': did you mean 'lr'?"),
        ({"adam": {"beta": (0.9, 0.95)}}, "adam has no setting 'beta': did you mean 'betas'?"),
        ({"muon": {"weight_decy": 0.1}}, "muon has no setting 'weight_decy': did you mean 'weight_decay'?"),
        ({"muon": {"betas": (0.9, 0.95)}}, "muon has no setting 'betas': allowed are adjust_lr_fn, "),
        ({"heads": {"momentum": 0.9}}, "heads has no setting 'momentum': allowed are betas, "),
        ({"vectors": {"weight_decays": 0.1}}, "vectors has no setting 'weight_decays': did you mean"),
        ({"muon": {"use_muon": False}}, "muon has no setting 'use_muon'"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known_one(own, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        param_groups(GPT(), **own)


def test_the_settings_that_are_known_are_those_of_the_optimizers():
    def arguments(make):
        return inspect.signature(make).parameters.keys() - {"params"}

    assert arguments(CacheMuon) == MUON_SETTINGS > arguments(Muon)
    assert ADAM_DEFAULTS.keys() | {"lr_ratio"} == ADAM_SETTINGS


def test_embedding_like_parameters_by_their_own_name():
    names = ("wte", "wpe", "cls_token", "mask_token", "pos_emb", "pos_embed", "embedding_table")
    names += ("class_embedding", "query_tokens", "relative_position_bias_table", "rel_pos_h", "time_emb")
    model = Net(**{name: nn.Parameter(torch.zeros(4, 8)) for name in names})
    assert set(reasons(model).values()) == {(False, "embedding")}
    plain = Net(
        decomposition_weight=nn.Parameter(torch.zeros(4, 8)),
        member_weights=nn.Parameter(torch.zeros(4, 8)),
        embed_in=nn.Linear(4, 8, bias=False),  # the module is called so, its weight is a matrix
        out=nn.Linear(8, 8, bias=False),
    )
    assert on_muon(plain) == ["decomposition_weight", "member_weights", "embed_in.weight"]
    assert reasons(nn.EmbeddingBag(4, 8))["weight"] == (False, "embedding")
    assert reasons(Net(embeds=nn.ParameterList([torch.zeros(4, 8)])))["embeds.0"] == (False, "embedding")
    assert reasons(type("VocabParallelEmbedding", (Net,), {})(weight=nn.Parameter(torch.zeros(4, 8)))) == {
        "weight": (False, "embedding")
    }


def test_experts_are_a_stack_of_matrices_in_the_main_group():
    model = Net(experts=nn.Parameter(torch.zeros(4, 8, 16)), grid_w=nn.Parameter(torch.zeros(2, 2, 8, 4)))
    assert reasons(model) == {"experts": (True, "stack of matrices"), "grid_w": (True, "tensor as (2, 64)")}
    (group,) = param_groups(model)
    assert "view" not in group


def test_norms_vectors_and_scalars_go_to_adam():
    model = Net(
        plain=nn.LayerNorm(8),
        image=nn.LayerNorm((3, 4, 4)),
        rms=nn.RMSNorm((4, 4)),
        group=nn.GroupNorm(2, 8),
        mine=type("LlamaRMSNorm", (Net,), {})(weight=nn.Parameter(torch.ones(8))),
        heads=type("CohereLayerNorm", (Net,), {})(weight=nn.Parameter(torch.ones(4, 8))),
        gain=nn.Parameter(torch.ones(8)),
        temperature=nn.Parameter(torch.tensor(1.0)),
    )
    found = reasons(model)
    for name in ("plain", "image", "rms", "group", "mine", "heads"):
        assert found[f"{name}.weight"] == (False, "norm")
    assert found["gain"] == found["temperature"] == (False, "vector")


def test_a_complex_parameter_is_refused_as_the_optimizers_do():
    with pytest.raises(
        ValueError, match=r"spectrum: parameters must be real floating point, got torch.complex64"
    ):
        routes(Net(spectrum=nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))))


def test_what_polar_would_only_normalize_goes_to_adam():
    model = Net(
        row_w=nn.Parameter(torch.zeros(1, 8)),
        column_w=nn.Parameter(torch.zeros(8, 1)),
        rows_w=nn.Parameter(torch.zeros(4, 1, 8)),
        layers=nn.ModuleList([nn.Conv2d(8, 1, 3, bias=False)]),
        none_w=nn.Parameter(torch.zeros(0, 4, 4)),
    )
    found = reasons(model)
    assert set(found.values()) == {(False, "fewer than two rows or columns")}
    regression = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    assert reasons(regression)["1.weight"] == (False, "output head")
    many = reasons(regression, head="muon")["1.weight"]
    assert many == (False, "output head with fewer than two rows or columns")


def test_lstm():
    model = Net(rnn=nn.LSTM(4, 8, proj_size=3), fc=nn.Linear(3, 2))
    assert on_muon(model) == ["rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.weight_hr_l0"]
    found = reasons(model)
    assert found["rnn.bias_ih_l0"] == found["rnn.bias_hh_l0"] == (False, "bias")
    assert found["fc.weight"] == (False, "output head")


def test_a_model_without_matrices_is_told_so():
    with pytest.warns(UserWarning, match="Muon gets none of the 2 parameters"):
        param_groups(nn.Sequential(nn.LayerNorm(8)))


def test_frozen_parameters_are_in_no_group_but_have_a_route():
    model = mlp()
    model[2].requires_grad_(False)
    groups = param_groups(model, overrides={"2.*": "muon"})
    named = [name for group in groups for name, _ in group["params"]]
    assert sorted(named) == ["0.bias", "0.weight", "4.bias", "4.weight"]
    assert Route("2.weight", (8, 8), None, "frozen") in groups.routes
    assert param_groups(model.requires_grad_(False)) == []


def compiled(model):
    # The eager backend gives the same wrapper; the default one imports torch.jit, which warns.
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap", [Wrapper, compiled, lambda m: Wrapper(compiled(m)), lambda m: compiled(Wrapper(m))]
)
@pytest.mark.parametrize(
    "make",
    [mlp, GPT, lambda: GPT(tied=False, depth=1), lambda: nn.Linear(4, 3), lambda: Net(fc=nn.Linear(4, 3))],
)
def test_wrappers_are_transparent(wrap, make):
    bare, wrapped = make(), wrap(make())
    inside, outside = routes(bare), routes(wrapped)
    assert [(r.shape, r.use_muon, r.view) for r in inside] == [(r.shape, r.use_muon, r.view) for r in outside]
    assert [r.name for r in outside] == [name for name, _ in wrapped.named_parameters()]


def test_overrides_need_not_know_the_wrapper():
    for model in (mlp(), Wrapper(mlp()), compiled(mlp())):
        assert reasons(model, overrides={"0.weight": "adam"}).popitem()[1] == (False, "bias")
        assert len(on_muon(model, overrides={"0.weight": "adam"})) == 1
    assert len(on_muon(Wrapper(mlp()), overrides={"module.0.weight": "adam"})) == 1


def test_compiled_parts_keep_their_place():
    model = GPT(tied=False)
    model.lm_head = compiled(model.lm_head)
    assert reasons(model)["lm_head._orig_mod.weight"] == (False, "output head")


def test_what_is_a_head():
    def head(model):
        return [route.name for route in routes(model) if route.reason.startswith("output head")]

    def lin():
        return nn.Linear(4, 4)

    body = nn.Sequential(lin(), lin())
    assert head(lin()) == []
    assert head(Net(fc=lin())) == ["fc.weight"]
    assert head(Net(model=Net(body=body, last=lin()), loss=nn.CrossEntropyLoss())) == ["model.last.weight"]
    assert head(nn.Sequential(lin())) == ["0.weight"]
    assert head(Net(flatten=nn.Flatten(), stack=nn.Sequential(lin(), lin()))) == ["stack.1.weight"]
    assert head(Net(features=body, classifier=nn.Sequential(lin(), lin()))) == ["classifier.1.weight"]
    assert head(Net(features=body, tail=nn.Sequential(lin(), lin()))) == ["tail.1.weight"]
    assert head(Net(features=body, tail=Net(a=lin(), b=lin()))) == []
    assert head(Net(body=lin(), anything=lin())) == ["anything.weight"]
    assert head(nn.Sequential(body, Net(inner=lin(), fc=lin()))) == ["1.fc.weight"]
    assert head(Net(body=body, last=nn.Sequential(lin(), nn.Sequential(OrderedDict(mlp_head=lin()))))) == [
        "last.1.mlp_head.weight"
    ]
    for name in HEAD_NAMES + LAST_NAMES:
        assert head(Net(body=body, deep=Net(inner=lin(), **{name: lin()}))) == [f"deep.{name}.weight"]
    assert head(Net(body=body, deep=Net(inner=lin(), proj=lin()))) == []


def test_several_heads():
    def head(model):
        return [route.name for route in routes(model) if route.reason == "output head"]

    def lin(inputs=8, outputs=8):
        return nn.Linear(inputs, outputs, bias=False)

    body = nn.Sequential(lin(), nn.ReLU(), lin())
    assert head(Net(body=body, policy=lin(8, 4), value=lin(8, 1))) == ["policy.weight", "value.weight"]
    assert head(Net(body=body, value=lin(8, 1), policy=lin(8, 4))) == ["value.weight", "policy.weight"]
    actor, critic = (nn.Sequential(lin(6, 8), nn.Tanh(), lin(8, outputs)) for outputs in (3, 1))
    assert head(Net(actor=actor, critic=critic)) == ["actor.2.weight", "critic.2.weight"]
    # A layer whose outputs the next one takes is hidden, and so is the latent of an autoencoder.
    assert head(Net(fc1=lin(8, 16), fc2=lin(16, 8), fc3=lin(8, 3))) == ["fc3.weight"]
    assert head(Net(mean=lin(8, 4), spread=lin(8, 4), wide=lin(4, 8), out=lin(8, 8))) == ["out.weight"]
    named = Net(
        body=body, policy_head=Net(dense=lin(), out=lin(8, 4)), rest=Net(value_head=lin(8, 2), x=lin())
    )
    assert head(named) == ["policy_head.out.weight", "rest.value_head.weight"]
    many = Net(body=body, heads=nn.ModuleList([lin(8, 2), nn.Sequential(lin(), lin(8, 3))]))
    assert head(many) == ["heads.0.weight", "heads.1.1.weight"]
    tasks = Net(body=body, heads=nn.ModuleDict(dict(a=lin(8, 2), b=lin(8, 3))))
    assert head(tasks) == ["heads.a.weight", "heads.b.weight"]
    by_class = Net(
        body=body, task=type("SpanHead", (Net,), {})(dense=lin(), out=lin(8, 2)), tail=Net(x=lin())
    )
    assert head(by_class) == ["task.out.weight"]
    # Attention heads are no output heads.
    attention = Net(heads=nn.ModuleList([Net(key=lin(), value=lin())]), proj=lin())
    assert head(Net(blocks=nn.Sequential(Net(sa=attention), Net(sa=attention)), last=Net(x=lin()))) == []
    clip = Net(text=Net(x=lin()), image=Net(x=lin()), visual_projection=lin(), text_projection=lin())
    assert head(clip) == ["visual_projection.weight", "text_projection.weight"]
    segmentation = Net(
        backbone=Net(x=lin()), classifier=nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1))
    )
    assert head(segmentation) == ["classifier.1.weight"]


def test_parametrized_layers_keep_their_role():
    model = Net(
        conv=parametrizations.weight_norm(nn.Conv1d(3, 8, 5)),
        rotate=parametrizations.orthogonal(nn.Linear(8, 8)),
        wte=parametrizations.weight_norm(nn.Embedding(5, 8)),
        fc=parametrizations.weight_norm(nn.Linear(8, 4)),
    )
    found = {route.name: (route.use_muon, route.reason, route.view) for route in routes(model)}
    prefix = "parametrizations.weight.original"
    assert found[f"conv.{prefix}0"] == (False, "fewer than two rows or columns", None)
    assert found[f"conv.{prefix}1"] == (True, "convolution as (out, in*k)", "flatten")
    assert found[f"rotate.{prefix}"] == (True, "matrix", "auto")
    assert found[f"wte.{prefix}1"] == (False, "embedding", None)
    assert found[f"fc.{prefix}1"] == (False, "output head", None)
    root = parametrizations.weight_norm(nn.Linear(8, 4, bias=False))
    assert on_muon(root) == [f"{prefix}1"]


def test_overrides_first_match_wins_on_any_name():
    found = reasons(GPT(), overrides={"lm_head.*": "muon", "*.weight": "adam", "wte.*": "adam"})
    assert found["wte.weight"] == (True, "override 'lm_head.*', tied to lm_head.weight")
    assert found["blocks.0.up.weight"] == (False, "override '*.weight'")
    assert found["blocks.0.attn.in_proj_weight"] == (True, "matrix")
    conv = param_groups(nn.Conv1d(2, 4, 3), overrides={"weight": "muon"})
    assert conv[0]["view"] == "flatten"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: param_groups(mlp(), head="sgd"), ["head", "'sgd'", "'adam'", "'muon'"]),
        (lambda: routes([1]), ["model", "torch.nn.Module", "list"]),
        (lambda: routes(mlp().parameters()), ["model", "torch.nn.Module", "generator"]),
        (lambda: param_groups(mlp(), muon={"params": []}), ["muon", "'params'"]),
        (lambda: param_groups(mlp(), adam={"use_muon": True}), ["adam", "'use_muon'"]),
        (lambda: param_groups(mlp(), muon={"view": "batch"}), ["muon", "'view'"]),
        (lambda: routes(mlp(), overrides={"9.*": "adam"}), ["overrides", "'9.*'", "none"]),
        (lambda: routes(mlp(), overrides={"0.*": "sgd"}), ["overrides['0.*']", "'sgd'", "'adam'", "'muon'"]),
        (
            lambda: routes(mlp(), overrides={"0.*": "muon"}),
            ["overrides['0.*']", "'0.bias'", "(8,)", "'adam'"],
        ),
        (lambda: routes(Net(a=nn.LazyLinear(4))), ["model", "'a.weight'", "one forward"]),
        (lambda: routes(mlp(), split={"9.*": 2}), ["split", "'9.*'", "none"]),
        (lambda: routes(mlp(), split={"0.bias": 2}), ["split", "'0.bias'", "weights of Muon"]),
        (lambda: routes(mlp(), split={"0.*": 3}), ["0.weight", "(8, 6)", "split", "8 outputs"]),
        (lambda: routes(mlp(), split={"0.*": 8}), ["split['0.*']", "0.weight", "two rows", "got 8"]),
        (lambda: routes(mlp(), split={"0.*": "2"}), ["split['0.*']", "integer >= 1", "'2'"]),
        (lambda: routes(mlp(), transposed={"9.*": True}), ["transposed", "'9.*'", "none"]),
        (lambda: routes(mlp(), transposed={"0.*": 1}), ["transposed['0.*']", "True or False", "1"]),
        (lambda: param_groups(mlp(), heads={"reasons": []}), ["heads", "'reasons'"]),
        (lambda: param_groups(mlp(), head={"lr": 1}), ["head", "`heads`"]),
        (lambda: matrix_shape((3,)), ["shape", "(3,)", "2 dimensions"]),
        (lambda: matrix_shape(()), ["shape", "()", "2 dimensions"]),
        (lambda: matrix_shape((3, 4), "rows"), ["view", "'rows'", "'auto'", "'flatten'", "'batch'"]),
    ],
)
def test_errors_name_the_argument_the_value_and_what_is_allowed(call, words):
    with pytest.raises(ValueError) as error:
        call()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("shape", "view", "expected"),
    [
        ((3, 5), "auto", (1, 3, 5)),
        ((2, 3, 5), "auto", (2, 3, 5)),
        ((7, 2, 3, 5), "auto", (1, 7, 30)),
        ((7, 2, 3, 5, 2), "auto", (1, 7, 60)),
        ((3, 5), "flatten", (1, 3, 5)),
        ((2, 3, 5), "flatten", (1, 2, 15)),
        ((3, 5), "batch", (1, 3, 5)),
        ((7, 2, 3, 5), "batch", (14, 3, 5)),
    ],
)
def test_matrix_shape(shape, view, expected):
    assert matrix_shape(shape, view) == expected
    assert matrix_shape(torch.zeros(shape).shape, view) == expected


def test_table_is_aligned_and_ends_with_totals():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 2))
    model[2].requires_grad_(False)
    groups = param_groups(model)
    assert groups.table().splitlines() == [
        "name      shape    route   reason",
        "0.weight  (5, 4)   adam    embedding",
        "1.weight  (16, 4)  muon    matrix",
        "1.bias    (16,)    adam    bias",
        "2.weight  (16,)    frozen  frozen",
        "2.bias    (16,)    frozen  frozen",
        "3.weight  (2, 16)  adam    output head",
        "3.bias    (2,)     adam    bias",
        "",
        "muon    1 parameters, 64 elements",
        "adam    4 parameters, 70 elements",
        "frozen  2 parameters, 32 elements",
    ]
    assert str(groups) == groups.table()


def test_groups_survive_a_copy_and_settings_are_not_touched():
    adam = dict(lr=2e-3, betas=(0.9, 0.999), eps=1e-8)
    groups = param_groups(mlp(), muon=dict(lr=1e-3), adam=adam)
    assert isinstance(groups, ParamGroups)
    assert [group["lr"] for group in groups] == [1e-3, 2e-3, 2e-3]
    assert groups[1]["betas"] == (0.9, 0.999)
    assert adam == dict(lr=2e-3, betas=(0.9, 0.999), eps=1e-8)
    assert copy.deepcopy(groups).routes == groups.routes == routes(mlp())


def test_an_optimizer_takes_the_groups_and_keeps_the_names():
    model = GPT()
    optimizer = torch.optim.SGD(param_groups(model, adam=dict(lr=0.2)), lr=0.1)
    assert [(g["use_muon"], g["lr"]) for g in optimizer.param_groups] == [(True, 0.1)] + [(False, 0.2)] * 2
    named = dict(model.named_parameters())
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            assert named.pop(name) is param
    assert not named


def test_vectors_are_not_decayed_unless_they_are_said_to_be():
    def decay(**options):
        groups = param_groups(GPT(tied=False), **options)
        return {name: group.get("weight_decay") for group in groups for name in names(group)}

    for options, matrices, vectors in (
        ({}, None, 0.0),
        ({"adam": dict(weight_decay=0.1)}, 0.1, 0.0),
        ({"adam": dict(weight_decay=0.1), "vectors": dict(lr=0.3)}, 0.1, 0.0),
        ({"adam": dict(weight_decay=0.1), "vectors": dict(weight_decay=0.2)}, 0.1, 0.2),
    ):
        found = decay(**options)
        assert found["wte.weight"] == found["wpe"] == found["lm_head.weight"] == matrices
        assert found["blocks.0.norm.weight"] == found["blocks.0.up.bias"] == vectors
        assert found["blocks.0.up.weight"] is None
    gains = Net(
        scale=nn.Parameter(torch.ones(2, 8)), temperature=nn.Parameter(torch.ones(())), x=nn.Linear(8, 8)
    )
    decayed = {n: g.get("weight_decay") for g in param_groups(gains, head="muon") for n in names(g)}
    assert decayed == {"x.weight": None, "x.bias": 0.0, "scale": 0.0, "temperature": 0.0}


def test_the_kinds_of_adam_have_settings_of_their_own():
    groups = param_groups(
        GPT(tied=False),
        adam=dict(lr=1.0, eps=1e-6),
        embeddings=dict(lr=2.0),
        heads=dict(lr=3.0),
        vectors=dict(lr=4.0),
        overrides={"blocks.0.up.weight": "adam"},
    )
    lr = {name: group.get("lr") for group in groups for name in names(group)}
    assert (lr["wte.weight"], lr["wpe"], lr["lm_head.weight"]) == (2.0, 2.0, 3.0)
    assert (lr["blocks.0.up.weight"], lr["blocks.1.norm.bias"], lr["blocks.1.up.weight"]) == (1.0, 4.0, None)
    assert {group.get("eps") for group in groups if not group["use_muon"]} == {1e-6}
    assert len(groups) == 5
    assert len(param_groups(GPT(tied=False))) == 3  # what has no settings of its own shares a group


@pytest.mark.parametrize("make", [Muon, CacheMuon])
def test_reasons_reach_the_optimizer_and_its_state(make, tmp_path):
    model = GPT(tied=False)
    groups = param_groups(model, heads=dict(lr=1e-4))
    for group in groups:
        assert len(group["reasons"]) == len(group["params"])
    optimizer = make(groups, lr=0.01)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    told = {row.name: (row.to, row.why) for row in optimizer.explain().rows}
    assert told == {r.name: ("muon" if r.use_muon else "adam", r.reason) for r in groups.routes}


def leaves():
    layers = [
        lambda: nn.Linear(4, 4),
        lambda: nn.Linear(4, 1, bias=False),
        lambda: nn.Conv1d(4, 4, 3),
        lambda: nn.Conv2d(2, 3, 3),
        lambda: nn.Conv2d(4, 6, 3, groups=2),
        lambda: nn.ConvTranspose1d(4, 6, 3),
        lambda: nn.Embedding(5, 4),
        lambda: nn.LayerNorm(4),
        lambda: nn.LSTM(4, 4),
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
        lambda: nn.Linear(4, 4).requires_grad_(False),
        lambda: parametrizations.weight_norm(nn.Conv1d(4, 4, 3)),
        lambda: nn.ReLU(),
        lambda: nn.ParameterList([torch.zeros(2, 4, 4), torch.zeros(())]),
        lambda: GPT(depth=1),
    ]
    return st.sampled_from(layers).map(lambda make: make())


def compositions(inner):
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        some.map(lambda ms: nn.Sequential(*ms)),
        some.map(nn.ModuleList),
        some.map(lambda ms: nn.Sequential(*ms, *ms)),  # tied
        some.map(lambda ms: Net(**dict(zip(("module", "head", "out"), ms, strict=False)))),
        inner.map(Wrapper),
    )


@pytest.mark.filterwarnings("ignore:Muon gets none")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.recursive(leaves(), compositions, max_leaves=6), st.sampled_from(["adam", "muon"]))
def test_every_trainable_parameter_is_in_exactly_one_group(model, head):
    groups = param_groups(model, head=head)
    placed = [(name, id(param)) for group in groups for name, param in group["params"]]
    trainable = [(name, id(param)) for name, param in model.named_parameters() if param.requires_grad]
    assert sorted(placed) == sorted(trainable)
    assert [route.name for route in groups.routes] == [name for name, _ in model.named_parameters()]
    assert all(route.reason for route in groups.routes)
    for group in groups:
        assert group["params"] and len(group["reasons"]) == len(group["params"])
        for _, param in group["params"] if group["use_muon"] else ():
            how = {key: group[key] for key in ("view", "split", "transposed") if key in group}
            pieces = matrix_layout(tuple(param.shape), **how).views
            assert sum(math.prod(piece.sides) for piece in pieces) == param.numel()
            assert min(min(piece.sides) for piece in pieces) > 1
