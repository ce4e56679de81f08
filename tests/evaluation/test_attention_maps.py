"""Cross-attention weights against Eq. 1 computed in the test, and their plot."""

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.evaluation import cross_attention, plot_attention, plots
from hf_vanilla_transformer.text import train_tokenizer
from hf_vanilla_transformer.text.side_tokens import readable_tokens
from tests.evaluation.figures import texts_of
from tests.model_helpers import error_of, tiny_config, tiny_marian, word_tokenizer

SENTENCE = "two hundred and one"
TRANSLATION = "zweihunderteins für 中"
LAYERS = 2
HEADS = 4


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SENTENCE, "zweihunderteins für"] * 5, 300)


@pytest.fixture
def model(tokenizer):
    sizes = {
        "d_model": 16,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "decoder_layers": LAYERS,
    }
    torch.manual_seed(0)
    config = tiny_config(vocab_size=len(tokenizer), **sizes, decoder_attention_heads=HEADS)
    return VanillaTransformerForConditionalGeneration(config).eval()


def test_weights_equal_equation_1_in_the_first_layer(model, tokenizer):
    """softmax(QK^T / sqrt(d_k)), with the queries and keys that the first layer's projections give."""
    kept = {}
    attention = model.model.decoder.layers[0].cross_attn
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).register_forward_hook(
            lambda _, __, out, name=name: kept.update({name: out[0]})
        )
    source, target, weights = cross_attention(model, tokenizer, tokenizer, SENTENCE, TRANSLATION)
    query, key = (
        kept[name].view(-1, HEADS, 4).transpose(0, 1) for name in ("q_proj", "k_proj")
    )  # (H, T or S, d_k)
    assert query.shape[1] == len(target)
    assert key.shape[1] == len(source)
    torch.testing.assert_close(weights[0], torch.softmax(query @ key.transpose(1, 2) / 4**0.5, -1))


def test_row_belongs_to_the_token_that_it_predicts(model, tokenizer):
    """The first row depends on no target token, so it is the same for every translation."""
    first, second = (
        cross_attention(model, tokenizer, None, SENTENCE, text)[2]
        for text in (TRANSLATION, "ganz anders")
    )
    torch.testing.assert_close(first[:, :, 0], second[:, :, 0])
    assert not torch.allclose(first[1, :, 1], second[1, :, 1])


def test_translation_defaults_to_that_of_the_model(model, tokenizer):
    """Also of an address, which the text of a translation would keep."""
    sentence = f"{SENTENCE} www.example.org"
    model.generation_config.max_new_tokens = 5
    own = model.generate(input_ids=torch.tensor([tokenizer(sentence)["input_ids"]]))
    text = tokenizer.decode(own[0], skip_special_tokens=True)
    found, expected = (
        cross_attention(model, tokenizer, None, sentence, given) for given in (None, text)
    )
    assert found[1] == expected[1]
    torch.testing.assert_close(found[2], expected[2])


def test_model_state_is_restored(model, tokenizer):
    model.set_attn_implementation("sdpa")
    model.train()
    *_, weights = cross_attention(model, tokenizer, None, SENTENCE, TRANSLATION)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not weights.requires_grad


def test_weights_of_a_half_precision_model_are_float32(model, tokenizer):
    *_, weights = cross_attention(model.bfloat16(), tokenizer, None, SENTENCE, TRANSLATION)
    assert weights.dtype == torch.float32


def test_empty_sentence_is_refused(model, tokenizer):
    assert error_of(cross_attention, model, tokenizer, None, " ").startswith("sentence: ")


def test_cross_attention_of_a_marian_model(tokenizer):
    source, target, weights = cross_attention(
        tiny_marian(len(tokenizer)), tokenizer, None, SENTENCE, TRANSLATION
    )
    assert weights.shape == (1, 2, len(target), len(source))


@pytest.mark.usefixtures("drawn_figures")
def test_plot_is_an_image_with_the_colours_beside_the_maps(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, *a, **k: [drawn.append(figure), save(figure, *a, **k)],
    )
    path = plot_attention(
        ["▁one", "$2$", "</s>"],
        ["eins", "</s>"],
        torch.rand(1, 2, 2, 3),
        tmp_path / "a.png",
    )
    assert path == tmp_path / "a.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    *maps, colours = drawn[0].axes
    gap = colours.get_position().x0 - max(axis.get_position().x1 for axis in maps)
    assert 0 < gap < 0.05


@pytest.mark.parametrize("layer", [1, 2, 3, None])
def test_plot_has_the_mean_and_every_head(layer, tmp_path, figures):
    weights = torch.rand(3, 4, 2, 3)
    plot_attention(
        ["▁one", "$2$", "</s>"], ["eins", "</s>"], weights, tmp_path / "a.png", layer=layer
    )
    *panels, colours = figures[0].axes
    assert [panel.get_title() for panel in panels] == [
        "mean of the heads",
        "head 1",
        "head 2",
        "head 3",
        "head 4",
    ]
    of_layer = weights[2 if layer is None else layer - 1]
    for panel, expected in zip(panels, [of_layer.mean(0), *of_layer], strict=True):
        (image,) = panel.images
        torch.testing.assert_close(torch.tensor(image.get_array()), expected)
        assert image.get_clim() == (0, 1)
        assert image.get_cmap().name == "Blues"
        assert panel.get_aspect() == "auto"
        assert panel.title.get_fontsize() == 10
    title = f"Cross-attention, decoder layer {layer or 3} of 3"
    assert texts_of(figures[0])[title].get_fontsize() == 13
    assert colours.get_ylabel() == "attention weight"
    whole = max(axis.get_position().y1 for axis in panels) - min(
        axis.get_position().y0 for axis in panels
    )
    assert colours.get_position().height == pytest.approx(0.6 * whole)


def test_labels_of_a_plot_are_at_its_top_and_left(tmp_path, figures):
    source = ["▁one", "$2$", "</s>"]
    plot_attention(source, ["eins", "</s>"], torch.rand(1, 4, 2, 3), tmp_path / "a.png")
    panels = figures[0].axes[:5]  # 3 + 2
    columns = [[label.get_text() for label in panel.get_xticklabels()] for panel in panels]
    assert columns[0] == source
    assert panels[0].get_xticks().tolist() == [0, 1, 2]
    labels = panels[0].get_xticklabels() + panels[0].get_yticklabels()
    assert [label.get_text() for label in labels[3:]] == ["eins", "</s>"]
    assert not any(label.get_parse_math() for label in labels)
    assert {label.get_fontsize() for label in labels} == {8}
    assert {label.get_rotation() for label in labels[:3]} == {90}
    ticks = panels[0].xaxis.get_tick_params()
    assert (ticks["labeltop"], ticks["labelbottom"], ticks["length"]) == (True, False, 0)
    assert panels[0].yaxis.get_tick_params()["length"] == 0
    has_top = [panel.xaxis.get_tick_params()["labeltop"] for panel in panels]
    has_left = [panel.yaxis.get_tick_params()["labelleft"] for panel in panels]
    assert has_top == [True, True, True, False, False]
    assert has_left == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("heads", "targets", "sources", "grid", "size"),
    [
        # cells of 0.22 inches, panels of at least 1.8, and 1.8 and 2.2 for the rest
        (1, 2, 3, (1, 2), (2 * 1.8 + 1.8, 1.8 + 2.2)),
        (3, 10, 20, (2, 2), (2 * 4.4 + 1.8, 2 * 2.2 + 2.2)),
        (4, 2, 20, (2, 3), (3 * 4.4 + 1.8, 2 * 1.8 + 2.2)),
        (8, 10, 3, (3, 3), (3 * 1.8 + 1.8, 3 * 2.2 + 2.2)),
    ],
)
def test_plot_has_room_for_each_token(heads, targets, sources, grid, size, tmp_path, figures):
    weights = torch.rand(1, heads, targets, sources)
    plot_attention(["a"] * sources, ["b"] * targets, weights, tmp_path / "a.png")
    panels = [axis for axis in figures[0].axes if axis.images]
    assert len(figures[0].axes) == heads + 2  # the mean and the colours, without spare places
    assert panels[0].get_gridspec().get_geometry() == grid
    assert figures[0].get_size_inches().tolist() == pytest.approx(size)


@pytest.mark.parametrize("layer", [0, 3])
def test_layer_that_does_not_exist_is_refused(layer, tmp_path):
    message = error_of(
        plot_attention,
        ["a"],
        ["b"],
        torch.rand(2, 1, 1, 1),
        tmp_path / "a.png",
        layer=layer,
    )
    assert message == f"layer: the model has decoder layers 1 to 2, not {layer}"


def test_tokens_are_readable(tokenizer):
    """Bytes of a character apart are no characters, and control characters and white space can be seen."""
    ids = tokenizer(" two für\n\r\t\x04中")["input_ids"]
    shown = plots._readable(tokenizer, ids, "source")
    assert "".join(shown).lstrip("▁") == "two▁für↵↵⇥\\x04���</s>"
    assert shown[-1] == "</s>"
    assert plots._readable(tokenizer, [], "source") == []


def test_letters_of_a_language_are_no_bytes():
    """Ġ, Ċ and ħ are Maltese, and signs of bytes in GPT-2's tokens."""
    words = ["<unk>", "Ġorġ", "Ġ", "Ċ", "ħobż"]
    tokenizer = word_tokenizer(words)
    assert readable_tokens(tokenizer, [1, 2, 3, 4]) == words[1:]
    assert plots._readable(tokenizer, [1, 2, 3, 4], "target") == words[1:]
