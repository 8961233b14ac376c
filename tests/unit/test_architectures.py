"""The routes of real architectures, built small: docs/notebook/architectures.md shows them all.

`python tests/unit/test_architectures.py --write` writes the page's table anew. Read it before committing it.
"""

import pathlib
import re
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from cachemuon import routes
from cachemuon.routing.layout import matrix_layout
from cachemuon.routing.rules import Route

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "notebook" / "architectures.md"
MARK = "<!-- From here on written by: python tests/unit/test_architectures.py --write -->\n"

TEXT = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=40,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
IMAGE = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=16,
    patch_size=4,
)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def pretrained(name: str, config: str | None = None, **settings) -> Callable[[], nn.Module]:
    """A model of transformers, by the name of its class."""

    def make():
        kind = config or re.sub(r"(For[A-Z]\w+|LMHeadModel|Model)$", "", name) + "Config"
        return getattr(transformers, name)(getattr(transformers, kind)(**settings))

    return make


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, 24)
        self.rnn = nn.LSTM(24, 32, num_layers=2)
        self.decoder = nn.Linear(32, 96)


class MoE(nn.Module):
    """A block with experts as stacked parameters, as they are written by hand."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.w_in = nn.Parameter(torch.zeros(4, 48, 32))
        self.b_in = nn.Parameter(torch.zeros(4, 48))
        self.w_out = nn.Parameter(torch.zeros(4, 32, 48))


class MixtureModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(96, 32)
        self.latents = nn.Parameter(torch.zeros(6, 32))
        self.blocks = nn.ModuleList(MoE() for _ in range(2))
        self.out = nn.Linear(32, 96)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy = nn.Linear(32, 5)
        self.value = nn.Linear(32, 1)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, groups=4))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 2, 2), nn.ReLU(), nn.ConvTranspose2d(16, 3, 2, 2)
        )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.transformer = nn.Transformer(32, 4, 1, 1, 48)
        self.generator = nn.Linear(32, 96)


def lora() -> nn.Module:
    model = pretrained("RobertaForSequenceClassification", **TEXT, num_labels=3)()
    config = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(model, config)


def lora_of_a_language_model() -> nn.Module:
    model = pretrained("LlamaForCausalLM", **TEXT)()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head", "embed_tokens"])
    return get_peft_model(model, config)


UNTIED = dict(tie_word_embeddings=False)
GPT = dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=40)
SPEECH = dict(
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
)
ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": pretrained("GPT2LMHeadModel", **GPT),
    "Llama": pretrained("LlamaForCausalLM", **TEXT, **UNTIED),
    "Llama, a classifier": pretrained("LlamaForSequenceClassification", **TEXT, num_labels=3),
    "Mistral": pretrained("MistralForCausalLM", **TEXT),
    "Qwen2": pretrained("Qwen2ForCausalLM", **TEXT),
    "Qwen3": pretrained("Qwen3ForCausalLM", **TEXT),
    "Gemma": pretrained("GemmaForCausalLM", **TEXT),
    "Phi": pretrained("PhiForCausalLM", **TEXT),
    "Falcon": pretrained("FalconForCausalLM", **{key: TEXT[key] for key in TEXT if key != "head_dim"}),
    "GPT-NeoX": pretrained("GPTNeoXForCausalLM", **TEXT),
    "Mixtral": pretrained("MixtralForCausalLM", **TEXT, num_local_experts=4),
    "Qwen2-MoE": pretrained(
        "Qwen2MoeForCausalLM", **TEXT, **EXPERTS, shared_expert_intermediate_size=40, decoder_sparse_step=1
    ),
    "Qwen3-MoE": pretrained("Qwen3MoeForCausalLM", **TEXT, **EXPERTS),
    "DeepSeek-V3": pretrained(
        "DeepseekV3ForCausalLM",
        **{**TEXT, "num_key_value_heads": 4},
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    "gpt-oss": pretrained("GptOssForCausalLM", **TEXT, num_local_experts=4),
    "Llama 4": pretrained("Llama4ForCausalLM", "Llama4TextConfig", **TEXT, num_local_experts=4),
    "Mamba": pretrained("MambaForCausalLM", vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8),
    "Mamba-2": pretrained(
        "Mamba2ForCausalLM",
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
    ),
    "BERT, pretraining": pretrained("BertForPreTraining", **TEXT),
    "BERT, question answering": pretrained("BertForQuestionAnswering", **TEXT),
    "RoBERTa, masked": pretrained("RobertaForMaskedLM", **TEXT),
    "RoBERTa, a classifier": pretrained("RobertaForSequenceClassification", **TEXT, num_labels=3),
    "DistilBERT, a classifier": pretrained(
        "DistilBertForSequenceClassification", vocab_size=96, dim=32, hidden_dim=48, n_layers=2, n_heads=4
    ),
    "ELECTRA, discriminator": pretrained("ElectraForPreTraining", **TEXT, embedding_size=16),
    "ELECTRA, generator": pretrained("ElectraForMaskedLM", **TEXT, embedding_size=16),
    "T5": pretrained(
        "T5ForConditionalGeneration", vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    ),
    "BART": pretrained("BartForConditionalGeneration", vocab_size=96, **SPEECH),
    "BART, a classifier": pretrained("BartForSequenceClassification", vocab_size=96, **SPEECH, num_labels=3),
    "ViT": pretrained("ViTForImageClassification", **IMAGE, num_labels=10),
    "DeiT, distilled": pretrained(
        "DeiTForImageClassificationWithTeacher", "DeiTConfig", **IMAGE, num_labels=10
    ),
    "Swin": pretrained(
        "SwinForImageClassification",
        image_size=32,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=10,
    ),
    "ConvNeXt": pretrained(
        "ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=10
    ),
    "ResNet": pretrained(
        "ResNetForImageClassification",
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        layer_type="basic",
        num_labels=10,
    ),
    "SegFormer": pretrained(
        "SegformerForSemanticSegmentation",
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        num_attention_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=24,
        num_labels=10,
    ),
    "CLIP": pretrained("CLIPModel", text_config=TEXT, vision_config=IMAGE, projection_dim=32),
    "SigLIP": pretrained("SiglipModel", text_config=TEXT, vision_config=IMAGE),
    "Whisper": pretrained(
        "WhisperForConditionalGeneration", vocab_size=96, **SPEECH, num_mel_bins=16, pad_token_id=0
    ),
    "Wav2Vec 2": pretrained(
        "Wav2Vec2ForCTC",
        **{**TEXT, "vocab_size": 40},
        conv_dim=(24, 24),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
    ),
    "LoRA, classifier saved": lora,
    "LoRA, head and embedding saved": lora_of_a_language_model,
    "LSTM language model": Recurrent,
    "nn.Transformer": Transformer,
    "mixture by hand": MixtureModel,
    "policy and value": ActorCritic,
    "convolutional autoencoder": Autoencoder,
}


def built(name: str) -> nn.Module:
    """On the meta device: only names, shapes and classes matter."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that build them
        return ARCHITECTURES[name]()


def rows(name: str) -> list[str]:
    """The table of one model: a line for each kind of parameter, vectors counted."""
    found: dict[tuple[str, ...], int] = {}
    plain: dict[str, int] = {}
    for route in routes(built(name)):
        if route.use_muon is None or route.reason in ("bias", "norm"):
            plain[route.reason] = plain.get(route.reason, 0) + 1
            continue
        key = (f"`{numberless(route.name)}`", str(route.shape), place(route), numberless(route.reason))
        found[key] = found.get(key, 0) + 1
    lines = [f"| {' | '.join(key)} | {number} |" for key, number in found.items()]
    return lines + [
        f"| | | {'-' if why == 'frozen' else 'Adam'} | {why} | {number} |" for why, number in plain.items()
    ]


def numberless(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def place(route: Route) -> str:
    return "**Muon**" if route.use_muon else "Adam" if route.kind == "matrix" else f"Adam, {route.kind}"


def section(name: str) -> str:
    head = ["| parameter | shape | to | why | how many |", "|---|---|---|---|---|"]
    return "\n".join([f"### {name}\n", *head, *rows(name)])


def written() -> dict[str, str]:
    """The sections of the page, by name."""
    made = PAGE.read_text(encoding="utf-8").split(MARK)[1]
    return {part.partition("\n")[0]: f"### {part.rstrip()}" for part in made.split("\n### ")[1:]}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_page_shows_what_is_done(name):
    assert written()[name] == section(name)


def test_the_page_has_no_other_architectures():
    assert list(written()) == list(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # GPT-2 gives Muon its four matrices per block, and the paper's experiments no others.
        ("GPT-2", {"c_attn", "c_proj", "c_fc"}),
        ("Mixtral", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"}),
        ("Mamba", {"in_proj", "x_proj", "dt_proj", "out_proj"}),
        ("ConvNeXt", {"pwconv1", "pwconv2", "downsampling_layer.1"}),
        ("LoRA, head and embedding saved", {"lora_A.default", "lora_B.default"}),
        ("policy and value", {"body.0", "body.2"}),
    ],
)
def test_what_muon_gets(name, weights):
    found = {route.name.removesuffix(".weight") for route in routes(built(name)) if route.use_muon}
    assert found
    assert all(any(path.endswith(weight) for weight in weights) for path in found)
    assert all(any(path.endswith(weight) for path in found) for weight in weights)


def test_fused_weights_are_split_by_pattern():
    found = {r.name: r for r in routes(built("GPT-2"), split={"*.c_attn.weight": 3})}
    weight = found["transformer.h.0.attn.c_attn.weight"]
    pieces = matrix_layout(weight.shape, weight.view, weight.split, weight.transposed).views
    assert [piece.sides for piece in pieces] == [(32, 32)] * 3
    grouped = routes(built("Falcon"), split={"*.query_key_value.weight": (32, 8, 8)})
    assert {r.split for r in grouped if "query_key_value" in r.name} == {(32, 8, 8)}


if __name__ == "__main__" and "--write" in sys.argv:
    prose = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    made = "\n\n".join(section(name) for name in ARCHITECTURES)
    PAGE.write_text(f"{prose}{MARK}\n{made}\n", encoding="utf-8")
