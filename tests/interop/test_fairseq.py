"""fairseq's checkpoints. fairseq cannot be installed with the tests. The references are FSMT, its port with the same
names, and the NumPy restatement; subword-nmt and SentencePiece for the tokens.
"""

import re
import sys
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sacremoses
import sentencepiece
import torch
from transformers import FSMTConfig, FSMTForConditionalGeneration

from hf_vanilla_transformer.interop.fairseq import from_fairseq
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.checkpoints import FFN, HEADS, D
from tests.interop.checkpoints.fairseq import (
    OPTIONS,
    PEER,
    restated,
    save,
    save_with_sections,
    weights,
    with_final_norms,
    write_dictionaries,
)
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    Record,
    assert_same_logits,
    converted,
    installed,
    learnt_codes,
    train_sentencepiece,
)
from tests.interop.restatement import assert_restated
from tests.model_helpers import error_of, randomise

PORT = f"its port `FSMTForConditionalGeneration`, {installed('transformers')}"


@pytest.mark.parametrize(("name", "formula"), [("gelu", "none"), ("gelu_accurate", "tanh"), ("gelu_fast", "tanh")])
def test_fairseq_activation_names_are_mapped(name: str, formula: str, tmp_path: Path) -> None:
    save(tmp_path / "model.pt", weights(9, 8), activation_fn=name)
    ours, x = from_fairseq(tmp_path / "model.pt").model, torch.linspace(-3, 3, 50)
    actual = ours.model.encoder.layers[0].activation(x)
    torch.testing.assert_close(actual, torch.nn.functional.gelu(x, approximate=formula))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_fairseq_checkpoint_with_sections_gives_its_logits(nested, shared, tmp_path, record_property):
    model = weights(23, 23 if shared else 29, shared)
    save_with_sections(tmp_path / "checkpoint_best.pt", model, nested)
    ours, tokenizer, _ = converted("fairseq", tmp_path / "checkpoint_best.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model))))
    assert tokenizer is None
    assert ours.config.share_encoder_decoder_embeddings is ours.config.tie_word_embeddings is shared
    search = ours.generation_config
    assert (search.num_beams, search.length_penalty, search.max_new_tokens) == (7, 0.8, 34)


def test_fairseq_checkpoint_of_old_version_gives_its_logits(tmp_path: Path, record_property: Record) -> None:
    """Names of version 0.6: fused projections, numbered LayerNorms, `embed_out`; learned positions."""
    model = weights(23, 29)
    old = {name: tensor for name, tensor in model.items() if "_float_tensor" not in name}
    for name in [name for name in old if re.search(r"\.q_proj\.", name)]:
        fused = name.replace("q_proj.", "in_proj_")
        old[fused] = torch.cat([old.pop(name.replace("q_proj", f"{each}_proj")) for each in "qkv"])
    numbers = {
        "encoder": ("self_attn_layer_norm", "final_layer_norm"),
        "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
    }
    for name in list(old):
        stack, norm = name.split(".")[0], name.split(".")[-2]
        if norm in numbers[stack]:
            old[name.replace(norm, f"layer_norms.{numbers[stack].index(norm)}")] = old.pop(name)
    old["decoder.embed_out"] = old.pop("decoder.output_projection.weight")
    tables = {f"{stack}.embed_positions.weight": torch.randn(12 + 2, D) for stack in ("encoder", "decoder")}
    save(tmp_path / "old.pt", old | tables, no_scale_embedding=True)
    ours, _, _ = converted("fairseq", tmp_path / "old.pt", tmp_path / "ours")
    stacks = {"source": "encoder", "target": "decoder"}

    def learned(index: int, side: str) -> np.ndarray:
        return tables[f"{stacks[side]}.embed_positions.weight"][index + 2].double().numpy()

    record_property("logits", (PEER, assert_restated(ours, restated(model, learned, scale=False))))
    assert ours.config.max_position_embeddings == 12


@torch.no_grad()
def test_fairseq_checkpoint_gives_logits_of_fsmt(tmp_path: Path, record_property: Record) -> None:
    shape = {"d_model": D, "encoder_ffn_dim": FFN, "decoder_ffn_dim": FFN, "encoder_layers": 2, "decoder_layers": 1}
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    port = FSMTForConditionalGeneration(FSMTConfig(**shape, **heads, src_vocab_size=23, tgt_vocab_size=29))
    tables = {name: table.clone() for name, table in port.state_dict().items() if "embed_positions" in name}
    randomise(port).load_state_dict(tables, strict=False)
    model = {name.removeprefix("model."): weight for name, weight in port.state_dict().items() if name not in tables}
    save(tmp_path / "model.pt", model)
    ours, _, _ = converted("fairseq", tmp_path / "model.pt", tmp_path / "ours")
    record_property("logits", (PORT, assert_same_logits(ours, port.eval())))


def test_fairseq_pre_norm_checkpoint_gives_its_logits(tmp_path: Path, record_property: Record) -> None:
    model = with_final_norms(weights(23, 29))
    save(tmp_path / "model.pt", model, encoder_normalize_before=True, decoder_normalize_before=True)
    ours, _, _ = converted("fairseq", tmp_path / "model.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model, pre_norm=True))))
    assert ours.config.layer_norm_position == "pre"


def test_fairseq_checkpoint_of_version_0_12_with_unused_tensors(tmp_path: Path, record_property: Record) -> None:
    """Its encoder layers save copies of their weights for an inference kernel, zeros until they are used."""
    model = weights(23, 29)
    shapes = {"in_proj_weight": (3 * D, D), "in_proj_bias": (3 * D,), "out_proj_weight": (D, D), "out_proj_bias": (D,)}
    shapes |= {"fc1_weight": (FFN, D), "fc1_bias": (FFN,), "fc2_weight": (D, FFN), "fc2_bias": (D,)}
    unused = {f"encoder.layers.{i}.{name}": torch.zeros(shape) for i in range(2) for name, shape in shapes.items()}
    save_with_sections(tmp_path / "model.pt", model | unused, nested=False)
    ours, _, _ = converted("fairseq", tmp_path / "model.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model))))


def test_fairseq_checkpoint_of_version_0_9_with_meters(tmp_path, monkeypatch, record_property):
    """It saves its objects that average the loss, of classes that are not installed here."""
    module: Any = ModuleType("fairseq.meters")
    for name in ("AverageMeter", "TimeMeter", "StopwatchMeter"):
        setattr(module, name, type(name, (), {"__module__": "fairseq.meters"}))
    monkeypatch.setitem(sys.modules, "fairseq", ModuleType("fairseq"))
    monkeypatch.setitem(sys.modules, "fairseq.meters", module)
    meter, model = module.AverageMeter(), weights(23, 29)
    meter.val, meter.sum = 2.5, 10.0
    meters = OrderedDict(train_loss=meter, wall=module.TimeMeter(), train_wall=module.StopwatchMeter())
    extra = {"extra_state": {"train_meters": meters, "epoch": 3}}
    torch.save({"args": Namespace(**OPTIONS), "model": model, **extra}, tmp_path / "model.pt")
    monkeypatch.undo()
    ours, _, _ = converted("fairseq", tmp_path / "model.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model))))


@pytest.mark.parametrize("style", ["multilingual", "mbart"])
def test_fairseq_dictionaries_of_multilingual_tasks(style: str, tmp_path: Path) -> None:
    """They lack the tokens of languages, and the checkpoint names neither side."""
    sides = {side: [f"{side}{number}" for number in range(3)] for side in ("en", "de")}
    added = ["__en__", "__de__"] if style == "multilingual" else ["[en]", "[de]", "<mask>"]
    write_dictionaries(tmp_path, sides)
    task = {"source_lang": None, "target_lang": None, "langs": ["en", "de"], "lang_tok_style": style}
    task |= {
        "task": "translation_from_pretrained_bart" if style == "mbart" else "translation",
        "encoder_langtok": "src",
    }
    save(tmp_path / "model.pt", weights(7 + len(added), 7 + len(added)), **task)
    plain = from_fairseq(tmp_path / "model.pt")
    assert plain.tokenizer is None and "source_language" in "; ".join(plain.notes)
    found = from_fairseq(tmp_path / "model.pt", source_language="en", target_language="de")
    assert found.tokenizer is not None and found.target_tokenizer is not None
    assert found.tokenizer.convert_tokens_to_ids(["en2", *added]) == [6, *range(7, 7 + len(added))]
    assert found.target_tokenizer.convert_tokens_to_ids("de0") == 4
    assert "--encoder-langtok" in "; ".join(found.notes)


def test_fairseq_search_is_that_of_fairseq_generate(tmp_path: Path) -> None:
    save(tmp_path / "old.pt", weights(9, 8))
    search = from_fairseq(tmp_path / "old.pt").model.generation_config
    # its defaults: 5 beams, log P / length, until 5 have ended; 1 to 200 tokens, then the end; never the padding
    assert (search.num_beams, search.length_penalty, search.early_stopping) == (5, 1.0, True)
    assert (search.min_new_tokens, search.max_new_tokens, search.forced_eos_token_id) == (1, 201, 2)
    assert search.suppress_tokens == [1]
    save_with_sections(tmp_path / "new.pt", weights(9, 8), nested=True)
    whole = torch.load(tmp_path / "new.pt")
    whole["cfg"]["generation"] |= {"unnormalized": True, "no_repeat_ngram_size": 3, "max_len_a": 1.2, "unkpen": 0.5}
    torch.save(whole, tmp_path / "new.pt")
    found = from_fairseq(tmp_path / "new.pt")
    search = found.model.generation_config
    assert (search.length_penalty, search.no_repeat_ngram_size, search.max_new_tokens) == (0.0, 3, None)
    assert "--max-len-a, --unkpen" in "; ".join(found.notes)


def ids_of(line: str, tokens: list[str]) -> list[int]:
    """`Dictionary.encode_line`: the special tokens come first, unknown tokens are 3, the end is 2."""
    ids = {token: number for number, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *tokens])}
    return [ids.get(token, 3) for token in line.split()] + [2]


def test_fairseq_tokenizer_for_tokenized_text(tmp_path: Path) -> None:
    sides = {"en": ["a", "do@@", "g", "runs", "."], "de": ["ein", "Hu@@", "nd", "läuft"]}
    write_dictionaries(tmp_path / "bin", sides)
    save(tmp_path / "model.pt", weights(9, 8))
    _, tokenizer, target = converted("fairseq", tmp_path / "model.pt", tmp_path / "ours", data=tmp_path / "bin")
    lines = ["a do@@ g runs .", "  a\tcat </s> runs", ""]
    assert tokenizer(lines)["input_ids"] == [ids_of(line, sides["en"]) for line in lines]
    assert target("ein Hu@@ nd läuft")["input_ids"] == ids_of("ein Hu@@ nd läuft", sides["de"])
    # as --remove-bpe
    assert target.batch_decode([[2, 4, 5, 6, 7, 2, 1], [5, 2], [2]], skip_special_tokens=True) == [
        "ein Hund läuft",
        "Hu",
        "",
    ]


def test_fairseq_dictionary_lines_that_overwrite(tmp_path: Path) -> None:
    """As of CamemBERT: a token that is there already gets another id. `<s>` too, while the start keeps its own."""
    for language, lines in {"en": ["ein 9", "Hund 7", "ein 4091 #fairseq:overwrite"], "de": ["a 2", "<s> 3"]}.items():
        text = "\n".join(lines) + (" #fairseq:overwrite" if language == "de" else "") + "\n"
        (tmp_path / f"dict.{language}.txt").write_text(text, encoding="utf-8")
    save(tmp_path / "model.pt", weights(7, 6))
    _, tokenizer, target = converted("fairseq", tmp_path / "model.pt", tmp_path / "ours")
    assert tokenizer("ein Hund")["input_ids"] == [6, 5, 2]
    assert tokenizer.decode([6, 5, 2], skip_special_tokens=True) == "ein Hund"
    assert target("a <s>")["input_ids"] == [4, 5, 2]
    assert target.decode([0, 4, 5, 2], skip_special_tokens=True) == "a <s>"
    (tmp_path / "dict.en.txt").write_text("ein\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"dict\.en\.txt: line 1 .*'ein'"):
        from_fairseq(tmp_path / "model.pt")


@pytest.mark.parametrize("tool", ["subword-nmt", "fastBPE"])
def test_fairseq_tokenizer_for_raw_text_with_byte_pair_codes(tool, tmp_path, record_property):
    moses = sacremoses.MosesTokenizer("en")
    tokenised = [moses.tokenize(line, aggressive_dash_splits=True, return_str=True) for line in SOURCES]
    bpe = learnt_codes(tmp_path / "codes", [*tokenised, *TARGETS])
    pieces = sorted({piece for line in tokenised[:2] for piece in bpe.process_line(line).split()})
    target_pieces = sorted({piece for line in TARGETS for piece in bpe.process_line(line).split()})
    if tool == "fastBPE":  # no header, and a count in each line
        lines = (tmp_path / "codes").read_text().splitlines()[1:]
        (tmp_path / "codes").write_text("".join(f"{line} 5\n" for line in lines))
    write_dictionaries(tmp_path, {"en": pieces, "de": target_pieces})
    save(tmp_path / "model.pt", weights(len(pieces) + 4, len(target_pieces) + 4))
    _, tokenizer, target = converted("fairseq", tmp_path / "model.pt", tmp_path / "ours", codes=tmp_path / "codes")
    texts = ["two dogs run in the snow, and a cat doesn't!", "thirty-four children sleep.", *SOURCES[:2]]
    for text in texts:
        line = bpe.process_line(moses.tokenize(text, aggressive_dash_splits=True, return_str=True))
        assert tokenizer(text)["input_ids"] == ids_of(line, pieces)
    written = ids_of(bpe.process_line("ein Hund läuft im Schnee ."), target_pieces)
    assert target.decode([2, *written], skip_special_tokens=True) == "ein Hund läuft im Schnee."
    for peer in ("sacremoses", "subword-nmt"):
        record_property("tokens", installed(peer))


def test_fairseq_tokenizer_for_raw_text_with_sentencepiece(tmp_path: Path, record_property: Record) -> None:
    pieces = train_sentencepiece(tmp_path / "spm.model", SOURCES + TARGETS)
    tokens = [piece for piece in pieces if piece not in ("<s>", "</s>", "<unk>")][::-1]
    write_dictionaries(tmp_path, {"en": tokens[:-3], "de": tokens})
    save(tmp_path / "model.pt", weights(len(tokens) + 1, len(tokens) + 4))
    options = {"sentencepiece": tmp_path / "spm.model"}
    _, tokenizer, target = converted("fairseq", tmp_path / "model.pt", tmp_path / "ours", **options)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    for text in [*SOURCES, "", "Žluťoučký dogs"]:
        line = " ".join(processor.encode(text, out_type=str))
        assert tokenizer(text)["input_ids"] == ids_of(line, tokens[:-3])
    for text in TARGETS:
        written = ids_of(" ".join(processor.encode(text, out_type=str)), tokens)
        assert target(text_target=text)["input_ids"] == written
        assert target.decode([2, *written], skip_special_tokens=True) == text
    record_property("tokens", installed("sentencepiece"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_normalize_before": True}, "--encoder-normalize-before=True"),
        ({"no_decoder_final_norm": True}, "--no-decoder-final-norm=True"),
        ({"layernorm_embedding": True}, "--layernorm-embedding"),
        ({"adaptive_softmax_cutoff": "1000,5000"}, "--adaptive-softmax-cutoff=1000,5000"),
        ({"no_token_positional_embeddings": True}, "positions"),
        ({"decoder_output_dim": 6}, "--decoder-output-dim=6"),
        ({"arch": "transformer_lm"}, "arch=transformer_lm"),
        ({"arch": "fconv_wmt_en_de"}, "arch=fconv_wmt_en_de"),
        ({"encoder_attention_heads": None}, "heads"),
        ({"activation_fn": "relu_squared"}, "activation_function='relu_squared'"),
        # these would pass silently, with other logits than fairseq's
        ({"arch": "transformer_unidirectional_iwslt_de_en"}, "arch=transformer_unidirectional"),
        ({"arch": "transformer_monotonic"}, "arch=transformer_monotonic"),
        ({"quant_noise_scalar": 0.5}, "--quant-noise-scalar=0.5"),
        ({"encoder_xformers_att_config": '{"name": "global"}'}, "--encoder-xformers-att-config"),
        ({"task": "translation_moe", "num_experts": 3}, "--num-experts=3"),
    ],
)
def test_fairseq_refuses_other_architectures(options, message, tmp_path, record_property):
    save(tmp_path / "model.pt", weights(9, 8), **options)
    with pytest.raises(UserError, match=message):
        from_fairseq(tmp_path / "model.pt")
    record_property("refused", ", ".join(f"--{name.replace('_', '-')}={value}" for name, value in options.items()))


def test_fairseq_refuses_options_of_sections(tmp_path: Path) -> None:
    """`transformer` itself keeps them in sections: fairseq rounds the weights of such a model when it is used."""
    save_with_sections(tmp_path / "model.pt", weights(9, 8), nested=True)
    state = torch.load(tmp_path / "model.pt", weights_only=False)
    state["cfg"]["model"]["quant_noise"] = {"pq": 0.0, "pq_block_size": 8, "scalar": 0.5}
    torch.save(state, tmp_path / "model.pt")
    assert "--quant-noise-scalar=0.5" in error_of(from_fairseq, tmp_path / "model.pt")


def test_fairseq_refuses_inconsistent_files(tmp_path: Path) -> None:
    save(tmp_path / "model.pt", weights(9, 8))
    assert "dict.SOURCE.txt" in error_of(from_fairseq, tmp_path / "model.pt", codes=tmp_path / "codes")
    write_dictionaries(tmp_path, {"en": ["a"], "de": ["ein"]})
    with pytest.raises(UserError, match=r"dict\.en\.txt: 5 .* 9"):
        from_fairseq(tmp_path / "model.pt")
    write_dictionaries(tmp_path, {"en": list("abcda"), "de": list("abcd")})
    assert "'a' occurs twice" in error_of(from_fairseq, tmp_path / "model.pt")
    write_dictionaries(tmp_path, {"en": list("abcde"), "de": list("abcd")})
    (tmp_path / "codes").write_text("a b\nc d</w>\n")
    assert "subword-nmt 0.1" in error_of(from_fairseq, tmp_path / "model.pt", codes=tmp_path / "codes")
    (tmp_path / "codes").write_text("#version: 0.2\na b\nc\n")
    assert "line 2" in error_of(from_fairseq, tmp_path / "model.pt", codes=tmp_path / "codes")
    assert "SentencePiece" in error_of(from_fairseq, tmp_path / "model.pt", sentencepiece=tmp_path / "codes")
