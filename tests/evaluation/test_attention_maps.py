"""Cross-attention weights against Eq. 1 computed in the test, and their plot."""

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.evaluation import cross_attention, plot_attention, plots
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.text.side_tokens import readable_tokens
from tests.model_helpers import error_of, tiny_config, tiny_marian, word_tokenizer

pytestmark = pytest.mark.usefixtures("drawn_figures")

SENTENCE, TRANSLATION = "two hundred and one", "zweihunderteins für 中"
LAYERS, HEADS = 2, 4


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SENTENCE, "zweihunderteins für"] * 5, 300)


@pytest.fixture
def model(tokenizer):
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "decoder_layers": LAYERS}
    torch.manual_seed(0)
    config = tiny_config(vocab_size=len(tokenizer), **sizes, decoder_attention_heads=HEADS)
    return VanillaTransformerForConditionalGeneration(config).eval()


def test_weights_equal_equation_1_in_the_first_layer(model, tokenizer):
    """softmax(QK^T / sqrt(d_k)), with the queries and keys that the first layer's projections give."""
    kept = {}
    attention = model.model.decoder.layers[0].cross_attn
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).register_forward_hook(lambda _, __, out, name=name: kept.update({name: out[0]}))
    source, target, weights = cross_attention(model, tokenizer, tokenizer, SENTENCE, TRANSLATION)
    query, key = (kept[name].view(-1, HEADS, 4).transpose(0, 1) for name in ("q_proj", "k_proj"))  # (H, T or S, d_k)
    assert query.shape[1] == len(target) and key.shape[1] == len(source)
    torch.testing.assert_close(weights[0], torch.softmax(query @ key.transpose(1, 2) / 4**0.5, -1))


def test_row_belongs_to_the_token_that_it_predicts(model, tokenizer):
    """The first row depends on no target token, so it is the same for every translation."""
    first, second = (
        cross_attention(model, tokenizer, None, SENTENCE, text)[2] for text in (TRANSLATION, "ganz anders")
    )
    torch.testing.assert_close(first[:, :, 0], second[:, :, 0])
    assert not torch.allclose(first[1, :, 1], second[1, :, 1])


def test_translation_defaults_to_that_of_the_model(model, tokenizer):
    model.generation_config.max_new_tokens = 5
    own = model.generate(input_ids=torch.tensor([tokenizer(SENTENCE)["input_ids"]]))
    text = tokenizer.decode(own[0], skip_special_tokens=True)
    found, expected = (cross_attention(model, tokenizer, None, SENTENCE, given) for given in (None, text))
    assert found[1] == expected[1]
    torch.testing.assert_close(found[2], expected[2])


def test_model_state_is_restored(model, tokenizer):
    model.set_attn_implementation("sdpa")
    model.train()
    cross_attention(model, tokenizer, None, SENTENCE, TRANSLATION)
    assert model.training and model.config._attn_implementation == "sdpa"
    assert "sentence" in error_of(cross_attention, model, tokenizer, None, " ")


def test_cross_attention_of_a_marian_model(tokenizer):
    source, target, weights = cross_attention(tiny_marian(len(tokenizer)), tokenizer, None, SENTENCE, TRANSLATION)
    assert weights.shape == (1, 2, len(target), len(source))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    from matplotlib.figure import Figure

    figures = []
    original = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), original(self, *a, **k))[1])
    return figures


def test_plot_has_the_mean_and_every_head(tmp_path, drawn):
    weights = torch.rand(3, 4, 2, 3)
    path = plot_attention(["▁one", "$2$", "</s>"], ["eins", "</s>"], weights, tmp_path / "a.png", layer=2)
    assert path == tmp_path / "a.png" and path.read_bytes().startswith(b"\x89PNG")
    panels = [axis for axis in drawn[0].axes if axis.images]
    assert [panel.get_title() for panel in panels] == ["mean of the heads", "head 1", "head 2", "head 3", "head 4"]
    for panel, expected in zip(panels, [weights[1].mean(0), *weights[1]], strict=True):
        torch.testing.assert_close(torch.tensor(panel.images[0].get_array()), expected)
    labels = panels[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["▁one", "$2$", "</s>"]
    assert not labels[1].get_parse_math()
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["eins", "</s>"]
    assert "layer 2 of 3" in drawn[0].get_suptitle()


def test_letters_of_a_language_are_no_bytes():
    """Ġ, Ċ and ħ are Maltese, and signs of bytes in GPT-2's tokens."""
    words = ["<unk>", "Ġorġ", "Ġ", "Ċ", "ħobż"]
    tokenizer = word_tokenizer(words)
    assert readable_tokens(tokenizer, [1, 2, 3, 4]) == words[1:]
    assert plots._readable(tokenizer, [1, 2, 3, 4], "target") == words[1:]
