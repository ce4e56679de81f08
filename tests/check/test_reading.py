"""Checks of code whose names say nothing, and the places of mistakes that are planted in it."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from hf_vanilla_transformer.utils.errors import UserError
from scripts.docs.lessons.check.checker import check
from scripts.docs.lessons.check.conventions import own_convention
from scripts.docs.lessons.check.sandbox import _imported, check_file
from tests.check import more_styles, styles, unusual
from tests.model_helpers import error_of, first_of_each

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*nested.tensor", "ignore:.*norm_first", "ignore:.*mismatched"
)

SOURCES = {
    module: Path(module.__file__).read_text(encoding="utf-8")
    for module in (styles, more_styles, unusual)
}


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        ("Letters", []),
        ("Frozen", []),
        ("TorchEight", []),
        ("Outside", ["scores was applied", "1 or True shows a key"]),
        ("TrainingMask", ["training mode"]),
    ],
)
def test_right_code_is_read_by_its_operations(name, noted):
    report = check(getattr(unusual, name), {})
    notes = " ".join(report.notes)
    assert report.mistakes == []
    assert report.difference < 1e-5
    for what in noted:
        assert what in notes


@pytest.mark.parametrize(
    ("bug", "places"), [(None, []), ("restart", []), ("forgets", ["cached step"])]
)
def test_token_by_token_is_compared_where_training_mode_has_the_mask(bug, places):
    report = check(unusual.Stateful, {"bug": bug})
    notes = " ".join(report.notes)
    assert [each.place for each in report.mistakes] == places
    assert "training mode alone" in notes
    assert "not compared" not in notes
    assert ("gets position 0" in notes) == (bug == "restart")


def test_known_mistake_is_named_without_torchs_fast_path():
    assert [each.place for each in check(unusual.TorchEight, {"bug": "memory"}).mistakes] == [
        "padding"
    ]
    assert torch.backends.mha.get_fastpath_enabled()


def test_unknown_mistake_in_front_of_the_decoder_is_placed_there():
    (mistake,) = check(unusual.TorchEight, {"bug": "factor"}).mistakes
    assert mistake.place == "the decoder's embeddings and positions"


def test_frozen_table_is_compared_with_the_formula():
    assert [each.option for each in check(unusual.Frozen, {"shift": 1.0}).mistakes] == ["from 1"]


def planted(module, old, new, count=1):
    """The names of a module in whose source `old` is replaced by `new`."""
    text = SOURCES[module]
    assert text.count(old) >= 1, old
    space = {"__name__": module.__name__}
    exec(compile(text.replace(old, new, count), module.__file__, "exec"), space)
    return space


@pytest.mark.parametrize("letter", ["k", "v"])
def test_bias_that_no_operation_uses_is_no_norm(letter):
    name = f"W_{letter}"
    space = planted(
        styles, f"self.{name}({letter.upper()})", f"{letter.upper()} @ self.{name}.weight.T"
    )
    report = check(space["Transformer"], {})
    assert report.mistakes == []
    assert any(
        note.startswith("no operation uses ") and f"{name}.bias" in note for note in report.notes
    )


# the code -> text, what replaces it, the mistakes' places, and perhaps words of where the first one is
PLANTS: dict[tuple[ModuleType, str], list[tuple]] = {
    (unusual, "Letters"): [
        ("x = self.n[0](x + self.a[0](x, x, m))", "x = self.n[0](self.a[0](x, x, m))", "residual"),
        ("self.a[1](x, y, p)", "self.a[1](x, x, m)", "memory"),
        ("self.a[1](x, y, p)", "self.a[0](x, y, p)", "layers", "cross-attention"),
        ("self.n[1](x + ", "self.n[0](x + ", "layers", "cross-attention"),
        ("math.sqrt(d // H)", "math.sqrt(d)", "attention scale"),
        ("zip((x, y, y)", "zip((x, y, x)", "*", "encoder|decoder|forward"),
        (".transpose(1, 2).reshape(b, t, d)", ".reshape(b, t, d)", "heads"),
        ("e.sum(-1, keepdim=True)", "e.sum(-2, keepdim=True)", "*", "NaN"),
        ("triu(1)", "triu(2)", "causal mask"),
        ("triu(1)", "tril(-1)", "causal mask"),
        (
            "x = self.se(src) * d**0.5",
            "x = self.se(src)",
            "embedding scale",
            "encoder's embeddings",
        ),
        (
            "y = self.te(tgt) * d**0.5",
            "y = self.te(tgt)",
            "embedding scale",
            "decoder's embeddings",
        ),
        ("wave(tgt.size(1), d)", "0 * wave(tgt.size(1), d)", "positions"),
        ("self.te.weight.T", "self.te.weight.T * d**-0.5", "output scale"),
        ("for each in self.x:", "for each in list(self.x)[:1]:", "layers", "x.1 is never called"),
        ("y = each(y,", "y = each(self.te(tgt) * d**0.5 + wave(tgt.size(1), d),", "*", "layer 2"),
        (
            "            x = each(x, p)",
            "            x = each(self.se(src) * d**0.5 + wave(src.size(1), d), p)",
            "*",
            "encoder layer 2|encoder",
        ),
        ("transpose(1, 2)).relu()", "transpose(1, 2))", "activation"),
        (".relu()", ".sigmoid()", "activation"),
        ("return self.n[-1](x + z)", "return self.n[-1](z)", "residual"),
        ("return self.n[-1](x + z)", "return x + self.n[-1](z)", "residual"),
        (
            "return self.n[-1](x + z)",
            "return x + z if y is not None else self.n[-1](x + z)",
            "norm",
            "decoder",
        ),
        ("z = self.d(z)", "z = 1.2 * self.d(z)", "*", "feed-forward"),
        ("src.eq(0)[:, None, None]", "src.ne(0)[:, None, None]", "padding"),
        ("each(x, p)", "each(x, p & False)", "padding"),
        (
            "zip((x, y, y), self.w",
            "zip((x, y, y), [self.w[0], *self.w[::2]]",
            "layers",
            "projection of the keys of self-attention of encoder layer 1",
        ),
        ("nn.LayerNorm(d)", "nn.LayerNorm(d, eps=0.5)", "epsilon"),
        ("y = self.te(tgt)", "y = self.se(tgt)", "embeddings", "te is never read"),
        (
            "x = self.se(src) * d**0.5 + wave(src.size(1), d)",
            "x = self.se(src) * d**0.5 + wave(src.size(0), d)[:, None]",
            "positions",
            "encoder's embeddings",
        ),
        (
            "y = self.te(tgt) * d**0.5 + wave(tgt.size(1), d)",
            "y = self.te(tgt) * d**0.5 + wave(1, d)",
            "positions",
            "decoder's embeddings",
        ),
        (
            "x = self.se(src) * d**0.5 + wave(",
            "x = self.se(src) * d**0.5 * wave(",
            "*",
            "encoder's embeddings",
        ),
        ("position / 10000", "position / 50", "*", "the encoder's embeddings and positions"),
        (
            "torch.arange(0, width, 2) / width",
            "torch.arange(0, width, 2) // width",
            "*",
            "the encoder's embeddings and positions",
        ),
        (
            "x = each(x, p)",
            "x = each(x, p | torch.ones(src.size(1), src.size(1)).triu(1).bool())",
            "causality",
            "encoder",
        ),
        ("self.a[1](x, y, p)", "self.a[1](x, y, m)", "causality", "cross-attention"),
        (
            "p = src.eq(0)[:, None, None]",
            "p = src.eq(0)[:, None, :, None]",
            "padding",
            "self-attention",
        ),
        (
            "each(y, m, x, p)",
            "each(y, m, self.x[0](self.se(src) * d**0.5 + wave(src.size(1), d), p), p)",
            "memory",
            "decoder layer 1",
        ),
        (
            "return self.n[-1](x + z)",
            "return self.n[-1](x + x + z)",
            "*",
            "encoder layer 1, the residual",
        ),
        (
            "return self.n[-1](x + z)",
            "return self.n[-1](x + z if y is None else x)",
            "*",
            "decoder layer 1",
        ),
        (
            ".transpose(1, 2).reshape(b, t, d)",
            ".permute(0, 2, 3, 1).reshape(b, t, d)",
            "*",
            "encoder layer 1, self-attention",
        ),
        ("return y @", "return functional.dropout(y) @", "*", "dropout"),
        (
            "return y @",
            "return (y + x.mean(1, keepdim=True)) @",
            "output layer",
            "the output layer reads",
        ),
        (
            "            x = each(x, p)",
            "            x = each(x, p)\n            x = x + wave(src.size(1), d)",
            "*",
            "encoder layer 1, the residual",
        ),
        (".reshape(b, t, d)", ".reshape(b, t, d).relu()", "*", "encoder layer 1, self-attention"),
        ("q @ k.transpose", "q @ k.flip(1).transpose", "*", "encoder layer 1, self-attention"),
    ],
    (unusual, "Frozen"): [
        ("self.gains[name](x + z)", "self.gains[name](z)", "residual"),
        ("masked_fill(hidden, -1e9)", "masked_fill(hidden, 0.0)", "mask value"),
        ("np.sqrt(q.size(-1))", "q.size(-1)", "attention scale"),
        ("softmax(-1)", "softmax(1)", "softmax"),
        ('return self.gains["last"](x', 'return self.gains["own"](x', "layers", "one module"),
        ('self.maps[f"{name}3"](attend', "(attend", "attention output"),
        ("x.std(-1, keepdim=True)", "x.var(-1, keepdim=True)", "norm"),
        ("x.mean(-1, keepdim=True)", "x.mean(1, keepdim=True)", "*", "norm"),
        ("size(1)), memory, padding)", "size(1)), self.embed(0, source), padding)", "memory"),
        ("torch.sin(angles)", "torch.cos(angles)", "positions"),
        ('x = self.one("own", x, x, hidden)\n        if', "if", "*", "self-attention"),
        (" * self.scale + self.shift", " * self.scale", "norm", "shift"),
        (" * self.scale + self.shift", " + self.shift", "*", "norm"),
        ("eps=1e-6", "eps=0.1", "epsilon"),
        ("x.mean(-1, keepdim=True)", "x.mean()", "*", "norm"),
        (
            "masked_fill(hidden, -1e9).softmax(-1) @ v",
            "softmax(-1).masked_fill(hidden, -1e9) @ v",
            "*",
            "self-attention",
        ),
        ("masked_fill(hidden, -1e9).softmax(-1) @ v", "softmax(-1) * ~hidden @ v", "mask value"),
    ],
    (unusual, "TorchEight"): [
        ("src_key_padding_mask=pad,", "", "padding"),
        ("tgt_mask=future(tgt.size(1)),", "", "causal mask"),
        ("x = self.embed(self.one, src)", "x = self.one(src)", "*", "the encoder's embeddings"),
        ("self.two, tgt)", "self.one, tgt)", "embeddings", "two is never read"),
    ],
    (unusual, "Outside"): [
        (
            "y = step(y, future, x, hidden)",
            "y = step(y, future, x + 1, hidden)",
            "*",
            "encoder|decoder",
        ),
    ],
    (styles, "Transformer"): [
        (
            "self.norm2(x + self.cross_attn(x, keys, keys,",
            "self.norm2(self.cross_attn(x, keys, keys,",
            "residual",
        ),
        (
            "x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))",
            "x = self.norm1(self.self_attn(x, x, x, tgt_mask))",
            "residual",
            "decoder layer 1, self-attention",
        ),
        (
            "x = self.norm1(x + self.dropout(self.self_attn(x, x, x, mask)))",
            "x = self.norm1(self.dropout(self.self_attn(x, x, x, mask)))",
            "residual",
            "encoder layer 1, self-attention",
        ),
        ("y = layer(y, x, src_mask, tgt_mask)", "y = layer(y, x, None, tgt_mask)", "padding"),
        ("x = layer(x, src_mask)", "x = layer(x, None)", "padding"),
        (
            "x = self.norm2(x + self.cross_attn(x,",
            "y = x\n        x = self.norm2(2 * x + self.cross_attn(x,",
            "*",
            "decoder layer 1, the residual",
        ),
        (
            "x = self.norm1(x + self.dropout(self.self_attn(x, x, x, mask)))",
            "x = self.norm2(x + self.feed_forward(x))\n        return self.norm1(x + self.self_attn(x, x, x, mask))",
            "sublayers",
            "encoder layer 1",
        ),
    ],
    (styles, "make_model"): [
        (
            'return x if self.bug == "final norm" else self.norm(x)',
            "return x if isinstance(layer, Layer) and layer.decoder else self.norm(x)",
            "final norm",
            "decoder",
        ),
        ("mask.unsqueeze(1) == 0", "mask.unsqueeze(1) == 1", None, "1 or True hides a key"),
    ],
    (styles, "Seq2SeqTransformer"): [
        ('self.bug == "causal"', "True", "causal mask"),
    ],
    (styles, "LearnedTransformer"): [
        ("x = layer(x, x, x, src_mask)", "x = layer(x, x, x, src_mask * 0 + 1)", "padding"),
        ("energy / size**0.5", "energy * size**0.5", "attention scale"),
        ("torch.arange(x.shape[1])", "torch.zeros_like(x)", "positions", "same position"),
        (
            "torch.arange(x.shape[1])",
            "torch.arange(x.shape[0])[:, None]",
            "*",
            "embeddings and positions",
        ),
    ],
    (more_styles, "FusedTransformer"): [
        ('x = self.encoder["ln_f"](x)\n', "\n", "final norm", "encoder"),
        ("return x + self.mlp(self.ln_ff(x))", "return self.mlp(self.ln_ff(x))", "residual"),
        (
            "x = x + self.cross_attn(self.ln_cross(x)",
            "x = y + self.cross_attn(self.ln_cross(x)",
            "*",
            "decoder layer 1|cross-attention",
        ),
        (
            "self.cross_attn(self.ln_cross(x), memory",
            "self.cross_attn(self.ln_cross(x), self.ln_cross(memory)",
            "memory",
            "cross-attention in the decoder",
        ),
        (
            "self.self_attn(y, y, hidden)",
            "self.self_attn(y, x, hidden)",
            "*",
            "encoder layer 1, self-attention",
        ),
    ],
    (more_styles, "HeadwiseTransformer"): [
        ('self.norms["ff"](x + self.ff2', 'self.norms["self_attn"](x + self.ff2', "layers"),
    ],
    (more_styles, "SequenceFirst"): [
        ("memory, memory_added)", "memory, 0 * memory_added.nan_to_num(neginf=0))", "padding"),
    ],
    (more_styles, "FlashTransformer"): [
        ("self.to_kv(memory).chunk(2, -1)", "self.to_kv(memory).chunk(2, -1)[::-1]", None),
    ],
}


#: The places of mistakes that the fast tests of test_check.py plant.
KNOWN = {place for bugs in (styles.STYLES | more_styles.STYLES).values() for place in bugs.values()}

PLANTED = []
for code, cases in PLANTS.items():
    for old, new, place, *words in cases:
        PLANTED.append((*code, old, new, place, "".join(words)))


@pytest.mark.parametrize(
    ("module", "name", "old", "new", "place", "where"), first_of_each(PLANTED, 4, KNOWN)
)
@pytest.mark.slow
def test_planted_mistakes_are_found_where_they_are(module, name, old, new, place, where):
    try:
        report = check(planted(module, old, new)[name], {})
    except UserError as error:
        assert place == "*" and re.search(where, str(error))
        return
    if place is None:  # the same function, or a convention that a note states
        assert report.mistakes == [] and re.search(where, " ".join(report.notes))
        return
    assert report.mistakes
    texts = " ".join(f"{each.place} {each.explanation}" for each in report.mistakes)
    assert place == "*" or place in [each.place for each in report.mistakes]
    assert re.search(where, texts), texts


# the code -> text, what replaces it, and perhaps words of the note
RIGHT: dict[tuple[ModuleType, str], list[tuple]] = {
    (unusual, "Letters"): [
        ("nn.LayerNorm(d)", "nn.RMSNorm(d)", "RMSNorm"),
        (".masked_fill(m, -1e9)", " + m * -1e9"),
        (".masked_fill(m, -1e9)", ".masked_fill(m, -math.inf)"),
        (".masked_fill(m, -1e9)", ".masked_fill(m, -1e4)"),
        ("x = each(x, p)", "x = each(x, p | p.mT)"),
    ],
    (unusual, "Frozen"): [
        ("functional.relu(", "functional.gelu(", "GELU"),
        ("functional.relu(", "nn.GELU('tanh')(", "GELU"),
        ("functional.relu(", "functional.silu(", "SiLU"),
        (
            "(x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)",
            "x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()",
            "RMSNorm",
        ),
    ],
    (unusual, "TorchEight"): [
        ("8, 2, 2, 64, 0.0, batch", "8, 2, 2, 64, 0.0, norm_first=True, batch", "pre-norm"),
        ("8, 2, 2, 64, 0.0, batch", "8, 2, 2, 64, 0.0, 'gelu', batch", "GELU"),
    ],
    (more_styles, "FlashTransformer"): [
        ("bias=False", "bias=True"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "old", "new", "note"),
    [
        (*code, old, new, "".join(note))
        for code, cases in RIGHT.items()
        for old, new, *note in cases
    ],
)
def test_right_variants_are_right(module, name, old, new, note):
    report = check(planted(module, old, new)[name], {})
    assert report.mistakes == []
    assert note in " ".join(report.notes)


@pytest.mark.parametrize(
    ("module", "name", "old", "new", "words"),
    [
        (unusual, "Letters", "x = each(x, p)", "pass", "x is never called"),
        (
            styles,
            "Transformer",
            "y = layer(y, x, src_mask, tgt_mask)",
            "pass",
            "decoder_layers is never called",
        ),
        (
            styles,
            "Transformer",
            "(encoder) for _ in range(num_layers)",
            "(1) for _ in ()",
            "the encoder has no layers",
        ),
    ],
)
def test_a_stack_without_layers_is_named(module, name, old, new, words):
    (mistake,) = check(planted(module, old, new)[name], {}).mistakes
    assert mistake.place == "layers"
    assert mistake.explanation.startswith(words)


def test_one_module_in_two_places_is_found():
    class Shared(styles.Transformer):
        def __init__(self, src_vocab_size, tgt_vocab_size, d_model, num_heads, num_layers, d_ff):
            super().__init__(
                src_vocab_size, tgt_vocab_size, d_model, num_heads, num_layers, d_ff, 50, 0.0
            )
            for layer in self.decoder_layers:
                layer.cross_attn = layer.self_attn

    (mistake,) = check(Shared, {}).mistakes
    assert mistake.option == "shared"
    assert "cross-attention" in mistake.explanation


#: a model whose masks are the other way round
INVERTED = SOURCES[styles].replace("mask.unsqueeze(1) == 0", "mask.unsqueeze(1) == 1")


def built_by(path, text):
    """`make_model` of a file with this text."""
    path.write_text(text, encoding="utf-8")
    space: dict = {"__name__": "mine"}
    exec(compile(text, str(path), "exec"), space)
    return space["make_model"]


@pytest.mark.parametrize(
    ("body", "convention", "count"),
    [
        ("torch.ones(size, size).tril()", "visible", 1),
        ("torch.ones(size, size).triu(1)", "hidden", 0),
        ("torch.ones(size, size).tril(1)", "visible", 1),
    ],
)
def test_mask_functions_of_the_file_state_the_convention(tmp_path, body, convention, count):
    text = f"{INVERTED}\n\ndef subsequent_mask(size):\n    return {body}\n"
    build = built_by(tmp_path / "mine.py", text)
    assert own_convention(build).encoding == convention
    assert len(check(build, {}).mistakes) == count


METHOD = """
seq_len = 200

class Run:
    def make_mask(self, src_input, trg_input):
        visible = torch.ones([1, seq_len, seq_len], dtype=torch.bool).tril().to(device)
        return src_input.ne(pad_id).unsqueeze(1), trg_input.ne(pad_id).unsqueeze(1) & visible
"""


@pytest.mark.parametrize("imports", [1, 2])
def test_mask_methods_and_constants_of_imported_files_state_the_convention(
    tmp_path, monkeypatch, imports
):
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    inner = tmp_path / f"checked_inside_{imports}"
    inner.mkdir()
    names = ["main", "other"][:imports]
    lines = [f"from .{name} import *\n" for name in (*names, "constants")]
    (inner / "model.py").write_text("".join(lines) + INVERTED, "utf-8")
    (inner / "constants.py").write_text("pad_id = 0\n")
    (inner / "main.py").write_text(f"import torch\n{METHOD}")
    (inner / "other.py").write_text(
        "def causal_mask(size):\n    return torch.ones(size, size).triu(1)\n"
    )
    text = f"from {inner.name}.model import make_model as inner\n\n\ndef make_model():\n    pass\n"
    (tmp_path / "mine.py").write_text(text)
    build = _imported(tmp_path / "mine.py").make_model
    # files that disagree say nothing, and neither does a file that nothing imports
    assert own_convention(build) == (("visible", "make_mask", False) if imports == 1 else None)


def test_another_attempt_in_the_folder_says_nothing_of_masks(tmp_path):
    (tmp_path / "base.py").write_text(f"import torch\n{METHOD}")
    (tmp_path / "train.py").write_text("from base import Run\n")
    build = built_by(tmp_path / "mine.py", INVERTED)
    assert own_convention(build) is None
    assert check(build, {}).mistakes == []


def test_output_layer_can_be_named():
    class TwoOutputs(unusual.Outside):
        def __init__(self, src_vocab, tgt_vocab, d_model):
            super().__init__(src_vocab, tgt_vocab, d_model)
            self.other = nn.Linear(d_model, tgt_vocab)

    assert "--role output_layer" in error_of(check, TwoOutputs, {})
    assert check(TwoOutputs, {}, {"output_layer": "scores"}).mistakes == []


def test_imports_are_searched_in_the_folders_above(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["", *sys.path])
    inner = tmp_path / "checked_models" / "blocks"
    inner.mkdir(parents=True)
    (tmp_path / "checked_constants.py").write_text("SIZE = 3\n")
    (tmp_path / "checked_models" / "other.py").write_text("from checked_constants import SIZE\n")
    (inner / "model.py").write_text(
        "from checked_models.other import SIZE\ndef build():\n    return SIZE\n"
    )
    (inner / "relative.py").write_text("from .model import build\n")
    assert _imported(inner / "model.py").build() == 3
    assert _imported(inner / "relative.py").build() == 3


def test_mask_functions_count_next_to_other_mistakes(tmp_path):
    text = INVERTED.replace("self.lut(x) * math.sqrt(self.d_model)", "self.lut(x)")
    text += "\n\ndef nopeak_mask(size, opt):\n    return torch.ones(1, size, size).tril()\n"
    build = built_by(tmp_path / "mine.py", text)
    assert [each.place for each in check(build, {}).mistakes] == ["embedding scale", "masks"]


@pytest.mark.slow
def test_folders_that_an_import_makes_are_skipped(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import os\nos.makedirs('checkpoints')\n" + SOURCES[unusual], "utf-8")
    assert check_file(path, "Letters", {})["mistakes"] == []
    assert not (tmp_path / "checkpoints").exists()
