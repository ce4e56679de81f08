"""OpenNMT-py's checkpoints. The reference is the NumPy restatement."""

import json
import math
import re
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import save_file

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.interop.converting import convert
from hf_vanilla_transformer.interop.opennmt import from_opennmt
from hf_vanilla_transformer.text import load_tokenizers
from hf_vanilla_transformer.utils.errors import UserError
from tests.interop.checkpoints import D, eole
from tests.interop.checkpoints.opennmt import OPTIONS, PEER, SPECIAL, restated, save, weights
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    UNSEEN,
    Record,
    converted,
    installed,
    learnt_codes,
    train_sentencepiece,
)
from tests.interop.restatement import assert_restated
from tests.model_helpers import error_of


@pytest.mark.parametrize("version", [1, 3])
def test_opennmt_checkpoint_gives_its_logits(version: int, tmp_path: Path, record_property: Record) -> None:
    model, head = weights((23, 29), qkv_bias=version == 1)
    # version 1 and 2 have a Sequential of the output layer and a softmax
    saved = {f"0.{name}": tensor for name, tensor in head.items()} if version == 1 else head
    save(tmp_path / "model.pt", model, saved)
    ours, tokenizer, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model, head))))
    assert tokenizer is None and ours.config.attention_bias is (version == 1)
    search = ours.generation_config
    assert (search.num_beams, search.length_penalty, search.max_new_tokens) == (5, 0.0, 100)
    assert search.beam_search_rule == "opennmt2"


def test_opennmt_gelu(tmp_path: Path, record_property: Record) -> None:
    model, head = weights((23, 29))
    save(tmp_path / "model.pt", model, head, pos_ffn_activation_fn="gelu")
    ours, _, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model, head, activation="gelu"))))


def test_opennmt_without_biases_of_the_feed_forward_network(tmp_path: Path, record_property: Record) -> None:
    """As version 3.5 saves it by default."""
    model, head = weights((23, 29), qkv_bias=False)
    biases = {name: tensor for name, tensor in model.items() if "feed_forward.w_" in name and name.endswith("bias")}
    save(tmp_path / "model.pt", {name: tensor for name, tensor in model.items() if name not in biases}, head)
    ours, _, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in biases.items()}
    record_property("logits", (PEER, assert_restated(ours, restated(model | zeros, head))))


def test_opennmt_vocabulary_of_version_3(tmp_path: Path) -> None:
    sides = {"src": [*SPECIAL, "a", "dog"], "tgt": [*SPECIAL, "ein", "Hund", "läuft"]}
    model, head = weights((6, 7))
    vocab = {**sides, "data_task": "seq2seq", "decoder_start_token": "<s>"}
    save(tmp_path / "model.pt", model, head, vocab)
    ours, tokenizer, target = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    # its sources do not end with </s>
    assert tokenizer("a dog sleeps")["input_ids"] == [4, 5, 0]
    assert target("ein Hund")["input_ids"] == [4, 5, 3]
    assert ours.config.decoder_start_token_id == 2
    assert (ours.generation_config.length_penalty, ours.generation_config.max_new_tokens) == (1.0, 250)
    save(tmp_path / "model.pt", model, head, {**vocab, "tgt": sides["tgt"][:-1]})
    with pytest.raises(UserError, match="6 .* 7"):
        from_opennmt(tmp_path / "model.pt")
    save(tmp_path / "model.pt", model, head, {**vocab, "src": ["a", "b"]})
    assert "<unk>" in error_of(from_opennmt, tmp_path / "model.pt")


@pytest.mark.parametrize("version", ["0", "1", "2"])
def test_opennmt_vocabularies_of_torchtext_are_read(version: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Their classes are not installed. Sources have neither <s> nor </s>."""
    classes = {name: type(name, (), {"__module__": "torchtext.x"}) for name in ("Vocab", "Field", "TextMultiField")}
    tokens = {"src": ["<unk>", "<blank>", "a", "dog"], "tgt": [*SPECIAL, "ein", "Hund"]}

    def made(name: str, **attributes: Any) -> Any:
        instance = classes[name]()
        instance.__dict__.update(attributes)
        return instance

    vocabs = {side: made("Vocab", freqs={}, itos=itos, stoi=defaultdict(int)) for side, itos in tokens.items()}
    fields = {side: made("Field", sequential=True, vocab=vocab, tokenize=str.split) for side, vocab in vocabs.items()}
    multi = {side: made("TextMultiField", fields=[(side, field)]) for side, field in fields.items()}
    vocab = {"0": list(vocabs.items()), "1": {**fields, "indices": made("Field")}, "2": multi}[version]
    model, head = weights((4, 6))
    with monkeypatch.context() as installed:
        module = ModuleType("torchtext.x")
        module.__dict__.update(classes)
        installed.setitem(sys.modules, "torchtext", ModuleType("torchtext"))
        installed.setitem(sys.modules, "torchtext.x", module)
        for field in fields.values():
            del field.tokenize
        save(tmp_path / "model.pt", model, head, vocab)
    ours, tokenizer, target = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    assert tokenizer("a dog sleeps")["input_ids"] == [2, 3, 0]
    assert target("ein Hund")["input_ids"] == [4, 5, 3] and target.decode([4, 5]) == "ein Hund"
    assert ours.generation_config.length_penalty == 0.0


@pytest.mark.parametrize("source_format", ["opennmt", "eole"])
def test_opennmt_and_eole_targets_have_special_ids_of_their_own(source_format: str, tmp_path: Path) -> None:
    """A batch of sources is padded with the source's token. The search starts, ends and pads with the target's."""
    vocab = {"src": [*SPECIAL, *"abcde"], "tgt": ["x", *SPECIAL[::-1], "y", "z", "w"], "decoder_start_token": "<s>"}
    path = tmp_path / "in" / "model.pt"
    if source_format == "opennmt":
        model, head = weights((9, 8))
        head["bias"][vocab["tgt"].index("</s>")] += 4.0  # translations end
        save(path, model, head, {**vocab, "data_task": "seq2seq"})
        reference = restated(model, head)
    else:
        tensors = eole.weights()
        tensors["generator.bias"][vocab["tgt"].index("</s>")] += 4.0
        eole.save(path.parent, tensors)
        content = {**json.loads((path.parent / "vocab.json").read_text()), **vocab}
        (path.parent / "vocab.json").write_text(json.dumps(content))
        reference = eole.restated(tensors)
    source = path if source_format == "opennmt" else path.parent
    ours, tokenizer, target = converted(source_format, source, tmp_path / "ours")
    batch = tokenizer(["a b c d e", "b"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1].tolist() == [5, 1, 1, 1, 1]
    found = ours.generate(**batch, num_beams=1, max_new_tokens=6)
    start, end, pad = (vocab["tgt"].index(token) for token in ("<s>", "</s>", "<blank>"))
    for ids, written in zip([[4, 5, 6, 7, 8], [5]], found.tolist(), strict=True):
        expected = [start]
        while len(expected) <= 6 and expected[-1] != end:
            expected.append(int(reference.logits(ids, expected)[-1].argmax()))
        assert written == expected + [pad] * (len(written) - len(expected))
        assert target.decode(written, skip_special_tokens=True).split() == [
            vocab["tgt"][token] for token in expected if vocab["tgt"][token] not in SPECIAL
        ]


def test_opennmt_shared_embeddings_have_one_id_for_a_token(tmp_path: Path) -> None:
    model, head = weights((6, 6))
    source, target = (f"{stack}.embeddings.make_embedding.emb_luts.0.weight" for stack in ("encoder", "decoder"))
    vocab = {"src": [*SPECIAL, "a", "b"], "tgt": [*SPECIAL[::-1], "a", "b"]}
    save(tmp_path / "model.pt", model | {target: model[source]}, head, vocab)
    assert "share" in error_of(from_opennmt, tmp_path / "model.pt")


RAW = [*SOURCES, *TARGETS, *UNSEEN, "ﬁne ½ ①  \u3000 x\u00a0y ", "…   Ａ１", "<s> </s> <unk>"]


def save_with_vocabulary(source_format: str, folder: Path, tokens: list[str], **config: Any) -> Path:
    if source_format == "opennmt":
        vocab = {"src": tokens, "tgt": tokens, "data_task": "seq2seq"}
        save(folder / "model.pt", *weights((len(tokens),) * 2), vocab, **config)
        return folder / "model.pt"
    eole.save(folder, eole.weights(sizes=(len(tokens),) * 2))
    (folder / "vocab.json").write_text(json.dumps({"src": tokens, "tgt": tokens}))
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | config))
    return folder


@pytest.mark.parametrize("source_format", ["opennmt", "eole"])
def test_opennmt_and_eole_take_raw_text_with_byte_pair_codes(source_format: str, tmp_path: Path) -> None:
    """As their transform `bpe`, which splits at spaces and ends no source with </s>."""
    bpe = learnt_codes(tmp_path / "codes", [*SOURCES, *TARGETS])
    tokens = [*SPECIAL, *sorted({piece for line in SOURCES + TARGETS[:2] for piece in bpe.process_line(line).split()})]
    source = save_with_vocabulary(source_format, tmp_path / "in", tokens, transforms=["bpe", "filtertoolong"])
    line = convert(source_format, source, tmp_path / "ours", codes=tmp_path / "codes")
    assert "the toolkit applies" not in line and "by the codes" in line
    tokenizer, target = load_tokenizers(tmp_path / "ours")
    ids = {token: number for number, token in enumerate(tokens)}
    for text in [*SOURCES, *TARGETS, "dogs and Wörter </s> <unk> 漢字", "x"]:
        assert tokenizer(text)["input_ids"] == [ids.get(piece, 0) for piece in bpe.process_line(text).split()]
    for text in SOURCES:
        written = bpe.process_line(text)
        assert target(written)["input_ids"] == [*(ids[piece] for piece in written.split()), ids["</s>"]]
        assert target.decode(target(written)["input_ids"], skip_special_tokens=True) == text
    with pytest.raises(UserError, match="codes"):
        convert(source_format, source, tmp_path / "both", codes=tmp_path / "codes", sentencepiece=tmp_path / "codes")


@pytest.mark.parametrize("source_format", ["opennmt", "eole"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"byte_fallback": True, "vocab_size": 340},
        {"model_type": "bpe", "byte_fallback": True, "vocab_size": 340},
        {"model_type": "bpe", "user_defined_symbols": ["ll", "%)"]},
    ],
    ids=str,
)
def test_opennmt_and_eole_take_raw_text_with_sentencepiece(source_format, settings, tmp_path, record_property):
    spm = tmp_path / "joint.model"
    pieces = train_sentencepiece(spm, SOURCES + TARGETS, **settings)
    # the last two are characters that the model does not know
    tokens = [*SPECIAL, *(piece for piece in pieces if piece not in SPECIAL), "漢字", "ž"]
    source = save_with_vocabulary(source_format, tmp_path / "in", tokens)
    _, tokenizer, target = converted(source_format, source, tmp_path / "ours", sentencepiece=spm)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    ids = {token: number for number, token in enumerate(tokens)}
    for text in RAW:
        expected = [ids.get(piece, 0) for piece in processor.encode(text, out_type=str)]
        assert tokenizer(text)["input_ids"] == expected, text
        assert target(text)["input_ids"] == [*expected, 3]
    for text in TARGETS:
        assert target.decode(target(text)["input_ids"], skip_special_tokens=True) == text
    record_property("tokens", installed("sentencepiece"))
    if source_format == "opennmt":
        fewer = sorted(tokens, key=lambda token: (token[0] != "<", len(token)))[:-1]
        save_with_vocabulary(source_format, tmp_path / "in", fewer)
        assert "joint.model" in error_of(from_opennmt, source, sentencepiece=spm)
    spm.write_bytes(b"no model")
    assert "joint.model" in error_of(convert, source_format, source, tmp_path / "bad", sentencepiece=spm)


def test_opennmt_refuses_sentencepiece_models_of_other_tokens(tmp_path: Path) -> None:
    """Merges of a BPE go through each character. SentencePiece does not normalise its own symbols."""
    spm = tmp_path / "joint.model"
    for settings, named in (
        ({"model_type": "bpe"}, "'d'"),
        ({"user_defined_symbols": ["①"]}, "changes its symbol '①'"),
    ):
        pieces = train_sentencepiece(spm, SOURCES + TARGETS, **settings)
        tokens = [*SPECIAL, *(piece for piece in pieces if piece not in [*SPECIAL, "d"])]
        source = save_with_vocabulary("opennmt", tmp_path / "in", tokens)
        assert named in error_of(from_opennmt, source, sentencepiece=spm)


def test_opennmt_weights_in_a_file_of_their_own(tmp_path: Path, record_property: Record) -> None:
    """As version 3.4 saves them with -save_format safetensors."""
    model, head = weights((6, 7))
    vocab = {"src": [*SPECIAL, "a", "dog"], "tgt": [*SPECIAL, "ein", "Hund", "läuft"], "data_task": "seq2seq"}
    torch.save({"vocab": vocab, "opt": Namespace(**OPTIONS), "optim": {}}, tmp_path / "model_step_9.pt")
    assert "model_step_9.safetensors" in error_of(from_opennmt, tmp_path / "model_step_9.pt")
    named = {f"generator.{name}": tensor for name, tensor in head.items()}
    save_file(
        {name: tensor.clone() for name, tensor in (model | named).items()}, tmp_path / "model_step_9.safetensors"
    )
    ours, _, _ = converted("opennmt", tmp_path / "model_step_9.pt", tmp_path / "ours")
    record_property("logits", (PEER, assert_restated(ours, restated(model, head))))


def test_opennmt_normalisations_and_masks_of_version_0(tmp_path: Path, record_property: Record) -> None:
    model, head = weights((23, 29))
    old = {
        re.sub(r"(norm\w*)\.bias", r"\1.b_2", re.sub(r"(norm\w*)\.weight", r"\1.a_2", n)): t for n, t in model.items()
    }
    old |= {"decoder.transformer_layers.0.mask": torch.ones(1, 9, 9, dtype=torch.uint8).triu(1)}
    save(tmp_path / "model.pt", old, head)
    ours, _, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    theirs = restated(model, head)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        gain, bias = theirs.pair(name)
        return gain * (x - x.mean(-1, keepdims=True)) / (x.std(-1, ddof=1, keepdims=True) + 1e-6) + bias

    theirs.norm = norm  # type: ignore[method-assign]
    record_property("logits", (PEER, assert_restated(ours, theirs)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("encoder_type", "brnn"),
        ("layer_norm", "rms"),
        ("position_encoding", False),
        ("max_relative_positions", 20),
        ("self_attn_type", "average"),
        ("parallel_residual", True),
        ("multiquery", True),
        ("copy_attn", True),
        ("generator_function", "sparsemax"),
        ("heads", "four"),
    ],
)
def test_opennmt_refuses_other_architectures(option: str, value: Any, tmp_path: Path, record_property: Record) -> None:
    save(tmp_path / "model.pt", *weights((9, 8)), **{option: value})
    assert f"-{option}={value}" in error_of(from_opennmt, tmp_path / "model.pt")
    record_property("refused", f"-{option} {value}")


def test_opennmt_refuses_other_positions(tmp_path: Path, record_property: Record) -> None:
    """SinusoidalConcat has fairseq's wavelengths."""
    model, head = weights((9, 8))
    angles = np.arange(50)[:, None] * np.exp(np.arange(D // 2) * -math.log(10000) / (D // 2 - 1))
    table = torch.tensor(np.concatenate([np.sin(angles), np.cos(angles)], axis=1)).float()[:, None]
    save(tmp_path / "model.pt", model | {name: table for name in model if name.endswith("pe.pe")}, head)
    assert "-position_encoding_type" in error_of(from_opennmt, tmp_path / "model.pt")
    record_property("refused", "-position_encoding_type SinusoidalConcat")


ATOMS = [
    *["C", "c", "1", "2", "3", "(", ")", "=", "O", "N", "n", "o", "S", "s", "F", "Cl", "Br", "I", "P", "B", "-", "+"],
    *["[C@@H]", "[C@H]", "[nH]", "[N+]", "[O-]", "[n+]", "[Si]", "[B-]", "[S@]", "[NH4+]", "[Na+]", "[Li]", "[Mg+]"],
    *["%10", "%11", "%12", "4", "5", "6", "7", "8", "9", ".", "/", "\\", "#", "[Pd]", "[Cu]", "[Zn+]", "[K+]", "*"],
]


def opennmt_search(
    log_probs: Callable[[list[int]], np.ndarray],
    beams: int,
    n_best: int,
    longest: int,
    penalty: Callable[[int], float],
    version: int,
) -> list[tuple[float, list[int]]]:
    """`BeamSearch.advance` and `update_finished` of OpenNMT-py, restated: scores and tokens without the start.

    `log_probs` returns those of the next token, (V,), after these tokens.
    """
    start, end = SPECIAL.index("<s>"), SPECIAL.index("</s>")
    running = [(0.0, [start])]
    finished: list[tuple[float, list[int]]] = []
    best_finished = False
    for length in range(1, longest + 1):
        candidates = [
            (total + float(log_p), [*tokens, token])
            for total, tokens in running
            for token, log_p in enumerate(log_probs(tokens))
        ]
        candidates.sort(key=lambda pair: -pair[0])
        kept = candidates[:beams]
        ends = [tokens[-1] == end or length == longest for _, tokens in kept]
        # the length counts the start token
        finished += [
            (total / penalty(length + 1), tokens[1:])
            for (total, tokens), is_end in zip(kept, ends, strict=True)
            if is_end
        ]
        running = [pair for pair, is_end in zip(kept, ends, strict=True) if not is_end]
        best_finished = ends[0] or (best_finished and version == 2)
        if best_finished and len(finished) >= (beams if version == 2 else n_best):
            break
    return sorted(finished, key=lambda pair: -pair[0])[:n_best]


@pytest.mark.parametrize(("beams", "n_best"), [(12, 3), (12, 12), (50, 50)])
@pytest.mark.parametrize("penalty", ["none", "avg", "wu"])
@pytest.mark.parametrize("version", [2, 3])
def test_opennmt_atoms_give_the_hypotheses_of_its_search(
    version: int, penalty: str, beams: int, n_best: int, tmp_path: Path
) -> None:
    """As the Molecular Transformer and RetroChimera store them: SMILES with a space between two tokens."""
    tokens = [*SPECIAL, *ATOMS]
    model, head = weights((len(tokens), len(tokens)))
    head["bias"][SPECIAL.index("</s>")] += 4.0  # hypotheses of many lengths
    vocab = {"src": tokens, "tgt": tokens, "decoder_start_token": "<s>"}
    save(tmp_path / "model.pt", model, head, vocab)
    ours, tokenizer, target = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    target = target or tokenizer
    assert ours.generation_config.beam_search_rule == "opennmt3"
    ours.generation_config.beam_search_rule = f"opennmt{version}"
    written = "C [C@@H] ( Br ) c 1 [nH] %10 . / \\ # [N+]"
    read = tokenizer(written)["input_ids"]
    assert read == [tokens.index(token) for token in written.split()] and tokenizer.decode(read) == written

    ids = [40, 41, 7]
    source = tokenizer.decode(ids)
    longest = 8 if beams == 12 else 6
    settings: dict[str, Any] = {"num_beams": beams, "max_new_tokens": longest, "probabilities": True}
    if penalty == "wu":
        ours.generation_config.length_penalty = None
        ours.generation_config.paper_length_penalty = 0.6
    else:
        settings["length_penalty"] = 1.0 if penalty == "avg" else 0.0
    translator = Translator(ours, tokenizer, target)
    assert translator.task == "sequence"
    assert target.init_kwargs["normalize_source"] is False
    (hypotheses,) = translator.translate_nbest([source], n_best, **settings)

    theirs = restated(model, head)
    known: dict[tuple[int, ...], np.ndarray] = {}

    def log_probs(prefix: list[int]) -> np.ndarray:
        if tuple(prefix) not in known:
            known[tuple(prefix)] = log_softmax(theirs.logits(ids, prefix)[-1])
        return known[tuple(prefix)]

    divisors = {
        "none": lambda length: 1.0,
        "avg": lambda length: float(length),
        "wu": lambda length: ((5 + length) / 6) ** 0.6,
    }
    expected = opennmt_search(log_probs, beams, n_best, longest, divisors[penalty], version)
    assert len(expected) == n_best
    if penalty == "avg" and beams == 12:
        of_other = opennmt_search(log_probs, beams, n_best, longest, divisors[penalty], 5 - version)
        assert expected != of_other, "the test does not tell the versions apart"
    assert [one.tokens for one in hypotheses] == [[tokens[token] for token in best] for _, best in expected]
    assert [one.score for one in hypotheses] == pytest.approx([score for score, _ in expected], abs=1e-4)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_beam_search_rule_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "model.pt", *weights((23, 29)))
    ours, _, _ = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    ours.generation_config.beam_search_rule = "opennmt"
    with pytest.raises(ValueError, match="beam_search_rule='opennmt'.* opennmt2, opennmt3"):
        ours.generate(torch.tensor([[4, 5]]))


@pytest.mark.parametrize(
    ("symbols", "task"),
    [
        (["C", "c", "1", "Br", "[nH]", "(", ")", "=", "<RX_1>"], "sequence"),
        (["the", "of", "C", "1", "(", ")", "=", "N", "a"], "language"),
        ([*"abcdefghijklmnopqrstuvwxyz.,"], "language"),
    ],
)
def test_task_of_a_converted_model_follows_its_vocabulary(symbols: list[str], task: str, tmp_path: Path) -> None:
    vocab = {"src": [*SPECIAL, *symbols], "tgt": [*SPECIAL, *symbols], "decoder_start_token": "<s>"}
    save(tmp_path / "model.pt", *weights((len(vocab["src"]), len(vocab["tgt"]))), vocab)
    ours, tokenizer, target = converted("opennmt", tmp_path / "model.pt", tmp_path / "ours")
    assert Translator(ours, tokenizer, target or tokenizer).task == task
