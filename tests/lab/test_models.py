"""The models are the ones the paper names: same function, same count, same matrices for Muon."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
import transformers
from torch import nn
from torch.func import functional_call

from cachemuon import Muon, param_groups
from cachemuon.routing.layout import matrix_shape
from cachemuon_lab import totals
from cachemuon_lab.models import (
    GPT2,
    GPT2_LARGE,
    GPT2_SMALL,
    RESNET18,
    GPT2Config,
    ResNet18,
    ResNetConfig,
    build,
)

TINY = GPT2Config(layers=2, heads=3, width=24, context=16, vocabulary=53)
THIN = ResNetConfig(width=4)


def seeded(config, seed=0):
    torch.manual_seed(seed)
    return build(config)


def batch_for(config, count=4, seed=1):
    """`(inputs, targets)`; a text fills the context."""
    g = torch.Generator().manual_seed(seed)
    if isinstance(config, GPT2Config):
        text = torch.randint(config.vocabulary, (count, config.context + 1), generator=g)
        return text[:, :-1], text[:, 1:]
    return torch.randn(count, 3, 32, 32, generator=g), torch.randint(config.classes, (count,), generator=g)


def size(config):
    with torch.device("meta"):
        return sum(p.numel() for p in build(config).parameters())


def muon_matrices(config, **options):
    """{name: (rows, cols)} of what Muon gets, in the model's order."""
    with torch.device("meta"):
        routes = param_groups(build(config), **options).routes
    return {r.name: matrix_shape(r.shape, r.view)[1:] for r in routes if r.use_muon}


both = pytest.mark.parametrize("config", [TINY, THIN], ids=["gpt2", "resnet"])


HUGGING_FACE = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "final_norm": "ln_f",
    "blocks": "h",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def hugging_face_name(name):
    for ours, theirs in HUGGING_FACE.items():
        name = name.replace(ours, theirs)
    return "transformer." + name


def hugging_face(config):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocabulary,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            resid_pdrop=config.dropout,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",  # its own softmax, so that the kernel is not compared with itself
        )
    )


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def twins(request):
    """Our model and Hugging Face's, in float64, with the same random weights in every parameter."""
    ours = seeded(replace(TINY, bias=request.param)).double().eval()
    theirs = hugging_face(TINY).double().eval()
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        left = dict(theirs.named_parameters())
        for name, p in ours.named_parameters():
            # Far from the initialization: its zero biases and unit norms would hide a mistake, and so
            # would its logits of size 0.1.
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=g) * 0.3 + (p.ndim == 1))
            twin = left.pop(hugging_face_name(name))
            matrix = p.ndim == 2 and "embedding" not in name
            twin.copy_(p.mT if matrix else p)  # Conv1D stores a matrix as (in, out)
        assert all(name.endswith("bias") for name in left), "a weight without a counterpart"
        for bias in left.values():  # there is no GPT-2 without biases at Hugging Face: zeros
            assert not request.param
            bias.zero_()
    return ours, theirs


def test_logits_are_those_of_hugging_face(twins):
    ours, theirs = twins
    tokens, _ = batch_for(TINY)
    expected = theirs(tokens).logits
    assert expected.std() > 1
    # Two float64 roundings of one function: measured 5e-15 apart, where logits reach 5.7.
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-13)


def test_loss_and_gradients_are_those_of_hugging_face(twins):
    ours, theirs = twins
    text, _ = batch_for(TINY)
    expected = theirs(text, labels=text).loss  # it shifts by itself
    actual = ours.loss(text[:, :-1], text[:, 1:])
    expected.backward()
    actual.backward()
    # Hugging Face takes the loss in float32, which rounds by 6e-8: the loss was 6e-8 apart, relatively,
    # and the gradients, which start from there, 9e-8 of each tensor's largest entry.
    torch.testing.assert_close(actual, expected, rtol=5e-7, atol=0, check_dtype=False)
    twin = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        grad = twin[hugging_face_name(name)].grad
        matrix = p.ndim == 2 and "embedding" not in name
        largest = grad.abs().max().item()
        torch.testing.assert_close(p.grad, grad.mT if matrix else grad, rtol=0, atol=1e-6 * largest)


def test_a_shorter_text_has_the_same_logits(twins):
    ours, theirs = twins
    tokens = batch_for(TINY)[0][:, :5]
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "config, count",
    [(replace(GPT2_SMALL, bias=True), 124_439_808), (GPT2_LARGE, 774_030_080)],
    ids=["small", "large"],
)
def test_counts_agree_with_hugging_face(config, count):
    with torch.device("meta"):
        theirs = hugging_face(config)
    assert size(config) == sum(p.numel() for p in theirs.parameters()) == count


def test_named_configurations_are_the_papers():
    assert GPT2_SMALL == GPT2Config(12, 12, 768, 1024, 50257, dropout=0.0, bias=False)
    assert GPT2_LARGE == GPT2Config(36, 20, 1280, 1024, 50257, dropout=0.1, bias=True)
    assert size(GPT2_SMALL) == 124_337_664


def test_no_bias_means_none_in_the_norms_either():
    names = [name for name, _ in seeded(replace(TINY, bias=False)).named_parameters()]
    assert not any(name.endswith("bias") for name in names)


def test_no_later_token_reaches_an_earlier_logit():
    model = seeded(TINY).double().eval()
    tokens, _ = batch_for(TINY)
    for position in range(TINY.context):
        other = tokens.clone()
        other[:, position] = (other[:, position] + 1) % TINY.vocabulary
        moved = (model(tokens) - model(other)).abs().amax((0, 2)) > 0
        assert not moved[:position].any()
        assert moved[position:].all()


def test_the_loss_is_the_mean_over_positions_and_leaves_out_masked_targets():
    model = seeded(TINY)
    tokens, targets = batch_for(TINY)
    log_p = model(tokens).log_softmax(-1).gather(2, targets[..., None])[..., 0]
    # One float32 mean of 64 terms near 4, summed in two orders.
    torch.testing.assert_close(model(tokens, targets), -log_p.mean(), rtol=1e-6, atol=0)
    masked = targets.clone()
    masked[:, 3:] = -100
    torch.testing.assert_close(model.loss(tokens, masked), -log_p[:, :3].mean(), rtol=1e-6, atol=0)


def test_initial_weights():
    config = GPT2Config(layers=8, heads=4, width=128, context=64, vocabulary=512)
    model = seeded(config)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        elif "norm" in name:
            assert (p == 1).all()
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            # The smallest tensor has 8,192 entries: its sample deviation is known to 0.8%; five of those.
            assert p.std().item() == pytest.approx(std, rel=0.04)
            assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel())
    with torch.no_grad():  # a fresh model knows nothing: every token is about as likely
        assert model.loss(*batch_for(config)).item() == pytest.approx(math.log(512), abs=0.1)


def test_dropout_acts_in_training_only():
    tokens, _ = batch_for(TINY)
    model = seeded(replace(TINY, dropout=0.1))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    without = seeded(TINY)
    without.load_state_dict(model.state_dict())
    assert torch.equal(without.train()(tokens), model(tokens))


def test_dropout_is_in_embeddings_attention_and_both_branches():
    model, calls = seeded(replace(TINY, dropout=0.1)), []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            assert module.p == 0.1
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(batch_for(TINY)[0])
    assert calls == ["dropout"] + ["blocks.0.dropout"] * 2 + ["blocks.1.dropout"] * 2
    attention, x = model.blocks[0].attention, torch.randn(4, 16, 24)  # this one is inside torch's kernel
    assert not torch.equal(attention(x), attention(x))


def test_the_head_is_the_embedding_and_stored_once():
    model = seeded(TINY)
    assert len(model.state_dict()) == len(list(model.parameters()))
    tokens, _ = batch_for(TINY)
    before = model(tokens)
    with torch.no_grad():
        unseen = next(t for t in range(TINY.vocabulary) if t not in tokens)
        model.token_embedding.weight[unseen] += 1
    changed = (model(tokens) != before).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == [unseen]


def test_resnet18_has_the_standard_count():
    assert RESNET18 == ResNetConfig(width=64, classes=10)
    assert size(RESNET18) == 11_173_962


def test_resnet_resolutions():
    model, shapes = seeded(THIN), []
    for module in [model.stem, *model.stages]:
        module.register_forward_hook(lambda _, __, y: shapes.append(tuple(y.shape[1:])))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert shapes == [(4, 32, 32), (4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4)]


def reference_resnet(weights, images):
    """Loop by loop, in eval mode: what the names in the state dict mean."""

    def conv_norm(x, name, stride):
        w = weights[f"{name}.conv.weight"]
        x = nn.functional.conv2d(x, w, stride=stride, padding=w.shape[-1] // 2)
        mean, var, scale, shift = (
            weights[f"{name}.norm.{key}"][:, None, None]
            for key in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    x = conv_norm(images, "stem", 1).clamp(min=0)
    for stage in range(4):
        for block in range(2):
            name = f"stages.{stage}.{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            y = conv_norm(conv_norm(x, f"{name}.first", stride).clamp(min=0), f"{name}.second", 1)
            x = conv_norm(x, f"{name}.shortcut", stride) if stride == 2 else x
            x = (x + y).clamp(min=0)
    return x.mean(3).mean(2) @ weights["fc.weight"].T + weights["fc.bias"]


def test_resnet_is_its_reference():
    model = seeded(THIN).double()
    images = batch_for(THIN)[0].double()
    model(images)  # moves the running statistics away from 0 and 1
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    expected = reference_resnet(model.state_dict(), images)
    # Two float64 roundings of one function: measured 4e-14 apart, where logits reach 53.
    torch.testing.assert_close(model.eval()(images), expected, rtol=0, atol=1e-12)


def test_resnet_initial_weights():
    model = seeded(ResNetConfig(width=16))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            out, _, *kernel = module.weight.shape
            std = math.sqrt(2 / (out * math.prod(kernel)))
            error = 1 / math.sqrt(2 * module.weight.numel())  # of a sample deviation, relatively
            assert module.weight.std().item() == pytest.approx(std, rel=5 * error)
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all() and not module.bias.any()


@pytest.mark.parametrize(
    "config, shapes",
    [(GPT2_SMALL, totals.GPT2_SMALL), (GPT2_LARGE, totals.GPT2_LARGE)],
    ids=["small", "large"],
)
def test_gpt2_gives_muon_its_four_matrices_per_block(config, shapes):
    matrices = muon_matrices(config)
    kinds = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    assert list(matrices) == [f"blocks.{i}.{kind}.weight" for i in range(config.layers) for kind in kinds]
    assert tuple(matrices.values()) == shapes


def test_gpt2_gives_adam_the_rest_for_its_reason():
    routes = {r.name: r.reason for r in param_groups(seeded(TINY)).routes if not r.use_muon}
    assert routes["token_embedding.weight"] == routes["position_embedding.weight"] == "embedding"
    assert {routes[name] for name in routes if name.endswith("bias")} == {"bias"}
    assert set(routes.values()) == {"embedding", "bias", "norm"}


def test_resnet_gives_muon_the_papers_21_matrices():
    matrices = muon_matrices(RESNET18, head="muon")
    assert tuple(matrices.values()) == totals.RESNET18
    assert len(matrices) == 21
    assert list(muon_matrices(RESNET18)) == list(matrices)[:-1]
    assert list(matrices)[-1] == "fc.weight"


@both
def test_protocol(config):
    model = seeded(config)
    inputs, targets = batch_for(config)
    loss = model.loss(inputs, targets)
    assert loss.shape == () and loss.requires_grad
    assert torch.equal(loss, model(inputs, targets))
    metrics = model.metrics(inputs, targets)
    assert torch.equal(metrics["loss"], loss)
    assert not any(value.requires_grad or value.ndim for value in metrics.values())
    assert set(metrics) == ({"loss", "correct"} if config is THIN else {"loss"})
    if config is THIN:
        guesses = model(inputs).argmax(1)
        assert model.metrics(inputs, guesses)["correct"] == len(guesses)
        assert model.metrics(inputs, (guesses + 1) % 10)["correct"] == 0


@both
def test_metrics_stay_on_the_device(config):
    with torch.device("meta"):  # where a read by the host would be an error
        model = build(config)
        inputs, targets = (t.to("meta") for t in batch_for(config))
        assert {value.device.type for value in model.metrics(inputs, targets).values()} == {"meta"}


@both
@pytest.mark.parametrize("way", ["autocast", "bfloat16 weights"])
def test_the_loss_is_in_float32_where_logits_are_in_bfloat16(config, way):
    model = seeded(config)
    inputs, targets = batch_for(config)
    exact = model.metrics(inputs, targets)["loss"]
    if way == "bfloat16 weights":
        model.bfloat16()
        inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        logits, metrics = model(inputs), model.metrics(inputs, targets)
        loss = model.loss(inputs, targets)
    assert logits.dtype == torch.bfloat16
    assert metrics["loss"].dtype == loss.dtype == torch.float32
    # bfloat16 rounds by 0.4%; over six seeds the loss moved by at most 0.002% (gpt2) and 0.4% (resnet).
    torch.testing.assert_close(metrics["loss"], exact, rtol=0.02, atol=0)


@both
def test_every_parameter_gets_a_gradient(config):
    model = seeded(config)
    model.loss(*batch_for(config)).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(layers=1, heads=2, width=4, context=3, vocabulary=5),
        GPT2Config(layers=2, heads=1, width=4, context=3, vocabulary=5, bias=False),
        ResNetConfig(width=2, classes=3),
    ],
    ids=["gpt2", "gpt2 no bias", "resnet"],
)
def test_gradients_against_finite_differences(config):
    model = seeded(config).double()
    inputs, targets = batch_for(config, count=2)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    g = torch.Generator().manual_seed(3)
    names, parameters = zip(*model.named_parameters(), strict=True)
    with torch.no_grad():
        for p in parameters:
            p.add_(torch.randn(p.shape, dtype=p.dtype, generator=g), alpha=0.1)

    def loss(*values):
        return functional_call(model, dict(zip(names, values, strict=True)), (inputs, targets))

    # What is tolerated is 1e-5: behind dead relus, say, every gradient would pass.
    assert min(g.abs().max() for g in torch.autograd.grad(loss(*parameters), parameters)) > 1e-3
    # Along random directions (`fast_mode`), because the ResNet has 11,301 entries.
    assert torch.autograd.gradcheck(loss, parameters, fast_mode=True)


@both
def test_overfits_one_batch_with_muon(config):
    model = seeded(config)
    inputs, targets = batch_for(config, count=8)
    groups = param_groups(model, head="adam" if config is TINY else "muon", adam={"lr": 1e-2})
    optimizer = Muon(groups, lr=2e-2)
    first = model.metrics(inputs, targets)["loss"].item()
    for _ in range(40 if config is TINY else 20):
        optimizer.zero_grad()
        model.loss(inputs, targets).backward()
        optimizer.step()
    last = model.metrics(inputs, targets)
    # Measured over three seeds: 3% of the first loss for gpt2, 1% for resnet.
    assert last["loss"].item() < 0.1 * first
    if config is THIN:
        assert last["correct"] == 8


@both
def test_weights_follow_the_seed(config):
    one, same, other = (seeded(config, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    weights = [name for name in one if one[name].ndim > 1]
    assert not any(torch.equal(one[name], other[name]) for name in weights)


@both
def test_built_on_meta_then_materialized_is_a_fresh_model(config):
    with torch.device("meta"):
        model = build(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(7)  # what an empty tensor holds may be anything
    expected = build(config)
    for fresh in (model, expected):
        torch.manual_seed(5)
        fresh.init_weights()
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_build_makes_what_the_configuration_describes():
    gpt2, resnet = build(TINY), build(THIN)
    assert type(gpt2) is GPT2 and gpt2.config is TINY
    assert type(resnet) is ResNet18 and resnet.config is THIN
    with pytest.raises(FrozenInstanceError):
        TINY.width = 48


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: replace(TINY, heads=5), r"heads must divide width=24, got 5"),
        (lambda: replace(TINY, layers=0), r"layers must be an integer of at least 1, got 0"),
        (lambda: replace(TINY, vocabulary=1e3), r"vocabulary must be an integer of at least 1, got 1000.0"),
        (lambda: replace(TINY, dropout=1), r"dropout must be at least 0 and less than 1, got 1"),
        (lambda: replace(TINY, dropout=-0.1), r"dropout must be at least 0 and less than 1, got -0.1"),
        (lambda: replace(THIN, width=-4), r"width must be an integer of at least 1, got -4"),
        (lambda: replace(THIN, classes=None), r"classes must be an integer of at least 1, got None"),
        (lambda: build({"width": 4}), r"config must be a GPT2Config or a ResNetConfig, got \{'width': 4\}"),
        (
            lambda: build(TINY)(torch.zeros(2, 17).long()),
            r"tokens must .* at most the context, 16, got \(2, 17\)",
        ),
        (lambda: build(TINY)(torch.zeros(5).long()), r"tokens must .*, got \(5,\)"),
        (
            lambda: build(TINY)(torch.zeros(1, 2, 8).long()),
            r"tokens must .*, got \(1, 2, 8\)",
        ),
        (
            lambda: build(TINY).loss(torch.zeros(2, 8).long(), torch.zeros(4, 4).long()),
            r"targets must have the shape of tokens, \(2, 8\), got \(4, 4\)",
        ),
    ],
)
def test_errors_name_the_argument_the_value_and_what_is_allowed(make, message):
    with pytest.raises(ValueError, match=message):
        make()
