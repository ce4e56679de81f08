"""OpenNMT-py's checkpoints. The reference is the NumPy restatement."""

import functools
import json
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
from hf_vanilla_transformer.interop.vocabularies import SPLIT_AT_SPACES
from hf_vanilla_transformer.text import load_tokenizers
from tests.interop.checkpoints import eole
from tests.interop.checkpoints.marian_npz import marian_position
from tests.interop.checkpoints.opennmt import OPTIONS, PEER, SPECIAL, restated, save, weights
from tests.interop.conftest import Compare
from tests.interop.foreign import (
    SOURCES,
    TARGETS,
    UNSEEN,
    Record,
    assert_fields,
    converted,
    installed,
    learnt_codes,
    train_sentencepiece,
)
from tests.model_helpers import error_of

FORMATS = pytest.mark.parametrize("source_format", ["opennmt", "eole"])


@pytest.mark.parametrize(("version", "activation"), [(1, "relu"), (3, "gelu")])
def test_opennmt_checkpoint_gives_its_logits(
    version: int, activation: str, model_file: Path, compared: Compare
) -> None:
    model, head = weights((23, 29), qkv_bias=version == 1)
    # version 1 and 2 have a Sequential of the output layer and a softmax
    saved = {f"0.{name}": tensor for name, tensor in head.items()} if version == 1 else head
    save(model_file, model, saved, pos_ffn_activation_fn=activation)
    theirs = restated(model, head, activation=activation)
    ours, tokenizer, _ = compared(PEER, "opennmt", model_file, theirs)
    assert tokenizer is None
    assert_fields(ours.config, attention_bias=version == 1)
    assert_fields(
        ours.generation_config,
        num_beams=5,
        length_penalty=0.0,
        max_new_tokens=100,
        beam_search_rule="opennmt2",
    )


def test_opennmt_without_biases_of_the_feed_forward_network(
    model_file: Path, compared: Compare
) -> None:
    """As version 3.5 saves it by default."""
    model, head = weights((23, 29), qkv_bias=False)
    biases = {name for name in model if re.search(r"feed_forward\.w_.*bias$", name)}
    save(
        model_file,
        {name: tensor for name, tensor in model.items() if name not in biases},
        head,
    )
    zeros = {name: torch.zeros_like(model[name]) for name in biases}
    compared(PEER, "opennmt", model_file, restated(model | zeros, head))


def test_opennmt_vocabulary_of_version_3(model_file: Path, tmp_path: Path) -> None:
    vocab = {
        "src": [*SPECIAL, "a", "dog"],
        "tgt": [*SPECIAL, "ein", "Hund", "läuft"],
        "data_task": "seq2seq",
        "decoder_start_token": "<s>",
    }
    save(model_file, *weights((6, 7)), vocab)
    ours, tokenizer, target = converted("opennmt", model_file, tmp_path / "ours")
    # its sources do not end with </s>
    assert tokenizer("a dog sleeps")["input_ids"] == [4, 5, 0]
    assert target("ein Hund")["input_ids"] == [4, 5, 3]
    assert_fields(ours.config, decoder_start_token_id=2)
    assert_fields(ours.generation_config, length_penalty=1.0, max_new_tokens=250)


@pytest.mark.parametrize("version", ["0", "1", "2"])
def test_opennmt_vocabularies_of_torchtext_are_read(
    version: str, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their classes are not installed. Sources have neither <s> nor </s>."""
    names = ("Vocab", "Field", "TextMultiField")
    classes = {name: type(name, (), {"__module__": "torchtext.x"}) for name in names}
    tokens = {"src": ["<unk>", "<blank>", "a", "dog"], "tgt": [*SPECIAL, "ein", "Hund"]}

    def made(name: str, **attributes: Any) -> Any:
        instance = classes[name]()
        vars(instance).update(attributes)
        return instance

    vocabs = {
        side: made(
            "Vocab",
            freqs={},
            itos=itos,
            stoi=defaultdict(int),
        )
        for side, itos in tokens.items()
    }
    fields = {side: made("Field", sequential=True, vocab=vocab) for side, vocab in vocabs.items()}
    vocab = {
        "0": list(vocabs.items()),
        "1": {**fields, "indices": made("Field")},
        "2": {
            side: made("TextMultiField", fields=[(side, field)]) for side, field in fields.items()
        },
    }[version]
    with monkeypatch.context() as known:
        module = ModuleType("torchtext.x")
        vars(module).update(classes)
        known.setitem(sys.modules, "torchtext", ModuleType("torchtext"))
        known.setitem(sys.modules, "torchtext.x", module)
        save(model_file, *weights((4, 6)), vocab)
    ours, tokenizer, target = converted("opennmt", model_file, tmp_path / "ours")
    assert tokenizer("a dog sleeps")["input_ids"] == [2, 3, 0]
    assert target("ein Hund")["input_ids"] == [4, 5, 3]
    assert target.decode([4, 5]) == "ein Hund"
    assert_fields(ours.generation_config, length_penalty=0.0)


@FORMATS
def test_opennmt_and_eole_targets_have_special_ids_of_their_own(
    source_format: str, tmp_path: Path
) -> None:
    """A batch of sources is padded with the source's token. The search starts, ends and pads with the target's."""
    targets = ["x", *SPECIAL[::-1], "y", "z", "w"]
    vocab = {"src": [*SPECIAL, *"abcde"], "tgt": targets, "decoder_start_token": "<s>"}
    start, end, pad = map(targets.index, ("<s>", "</s>", "<blank>"))
    source = tmp_path / "in"
    if source_format == "opennmt":
        source /= "model.pt"
        model, head = weights((9, 8))
        head["bias"][end] += 4.0  # translations end
        save(source, model, head, {**vocab, "data_task": "seq2seq"})
        reference = restated(model, head)
    else:
        tensors = eole.weights()
        tensors["generator.bias"][end] += 4.0
        eole.save(source, tensors)
        update_json(source / "vocab.json", vocab)
        reference = eole.restated(tensors)
    ours, tokenizer, target = converted(source_format, source, tmp_path / "ours")
    batch = tokenizer(["a b c d e", "b"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1].tolist() == [5, 1, 1, 1, 1]
    found = ours.generate(**batch, num_beams=1, max_new_tokens=6)
    sources = [[4, 5, 6, 7, 8], [5]]
    for ids, written in zip(sources, found.tolist(), strict=True):
        expected = [start]
        while len(expected) <= 6 and expected[-1] != end:
            expected.append(int(reference.logits(ids, expected)[-1].argmax()))
        assert written == expected + [pad] * (len(written) - len(expected))
        words = [targets[token] for token in expected if targets[token] not in SPECIAL]
        assert target.decode(written, skip_special_tokens=True).split() == words


def update_json(file: Path, fields: dict[str, Any]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_opennmt_shared_embeddings_have_one_id_for_a_token(model_file: Path) -> None:
    model, head = weights((6, 6))
    source, target = (
        f"{stack}.embeddings.make_embedding.emb_luts.0.weight" for stack in ("encoder", "decoder")
    )
    vocab = {"src": [*SPECIAL, "a", "b"], "tgt": [*SPECIAL[::-1], "a", "b"]}
    save(model_file, model | {target: model[source]}, head, vocab)
    assert "share" in error_of(from_opennmt, model_file)


RAW = [*SOURCES, *TARGETS, *UNSEEN, "ﬁne ½ ①  \u3000 x\u00a0y ", "…   Ａ１", "<s> </s> <unk>"]


def save_with_vocabulary(
    source_format: str, folder: Path, tokens: list[str], **config: Any
) -> Path:
    """Write a checkpoint with these tokens on both sides, and return what is to be converted."""
    sizes = (len(tokens), len(tokens))
    vocab = {"src": tokens, "tgt": tokens}
    if source_format == "opennmt":
        save(
            folder / "model.pt",
            *weights(sizes),
            {**vocab, "data_task": "seq2seq"},
            **config,
        )
        return folder / "model.pt"
    eole.save(folder, eole.weights(sizes=sizes), **config)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    return folder


@FORMATS
def test_opennmt_and_eole_take_raw_text_with_byte_pair_codes(
    source_format: str, tmp_path: Path
) -> None:
    """As their transform `bpe`, which splits at spaces and ends no source with </s>."""
    codes = tmp_path / "codes"
    bpe = learnt_codes(codes, [*SOURCES, *TARGETS])
    pieces = {piece for line in SOURCES + TARGETS[:2] for piece in bpe.process_line(line).split()}
    tokens = [*SPECIAL, *sorted(pieces)]
    source = save_with_vocabulary(
        source_format, tmp_path / "in", tokens, transforms=["bpe", "filtertoolong"]
    )
    line = convert(source_format, source, tmp_path / "ours", codes=codes)
    assert "the toolkit applies" not in line
    assert SPLIT_AT_SPACES in line
    tokenizer, target = load_tokenizers(tmp_path / "ours")
    ids = {token: number for number, token in enumerate(tokens)}
    for text in [*SOURCES, *TARGETS, "dogs and Wörter </s> <unk> 漢字", "x"]:
        assert tokenizer(text)["input_ids"] == [
            ids.get(piece, 0) for piece in bpe.process_line(text).split()
        ]
    for text in SOURCES:
        written = bpe.process_line(text)
        found = target(written)["input_ids"]
        assert found == [*(ids[piece] for piece in written.split()), ids["</s>"]]
        assert target.decode(found, skip_special_tokens=True) == text
    assert "codes" in error_of(
        convert, source_format, source, tmp_path / "both", codes=codes, sentencepiece=codes
    )


@FORMATS
def test_opennmt_and_eole_take_raw_text_with_sentencepiece(
    source_format: str, tmp_path: Path, record_property: Record
) -> None:
    spm = tmp_path / "joint.model"
    pieces = train_sentencepiece(spm, SOURCES + TARGETS)
    # the last two are characters that the model does not know
    tokens = [
        *SPECIAL,
        *(piece for piece in pieces if piece not in SPECIAL),
        "漢字",
        "ž",
    ]
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
    assert "joint.model" in error_of(
        convert, source_format, source, tmp_path / "bad", sentencepiece=spm
    )


def test_opennmt_weights_in_a_file_of_their_own(model_file: Path, compared: Compare) -> None:
    """As version 3.4 saves them with -save_format safetensors."""
    model, head = weights((6, 7))
    vocab = {
        "src": [*SPECIAL, "a", "dog"],
        "tgt": [*SPECIAL, "ein", "Hund", "läuft"],
        "data_task": "seq2seq",
    }
    torch.save(
        {
            "vocab": vocab,
            "opt": Namespace(**OPTIONS),
            "optim": {},
        },
        model_file,
    )
    assert "model.safetensors" in error_of(from_opennmt, model_file)
    tensors = model | {f"generator.{name}": tensor for name, tensor in head.items()}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, model_file.with_suffix(".safetensors"))
    compared(PEER, "opennmt", model_file, restated(model, head))


def test_opennmt_normalisations_and_masks_of_version_0(model_file: Path, compared: Compare) -> None:
    model, head = weights((23, 29))
    old = {"decoder.transformer_layers.0.mask": torch.ones(1, 9, 9, dtype=torch.uint8).triu(1)}
    for name, tensor in model.items():
        renamed = re.sub(r"(norm\w*)\.weight", r"\1.a_2", name)
        old[re.sub(r"(norm\w*)\.bias", r"\1.b_2", renamed)] = tensor
    save(model_file, old, head, norm_eps=None)
    theirs = restated(model, head)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        gain, bias = theirs.pair(name)
        deviation = x.std(-1, ddof=1, keepdims=True)
        return gain * (x - x.mean(-1, keepdims=True)) / (deviation + 1e-6) + bias

    theirs.norm = norm  # type: ignore[method-assign]
    ours, _, _ = compared(PEER, "opennmt", model_file, theirs)
    assert_fields(ours.config, layer_norm_eps=1e-12)


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
def test_opennmt_refuses_other_architectures(
    option: str, value: Any, model_file: Path, record_property: Record
) -> None:
    save(model_file, *weights((9, 8)), **{option: value})
    assert f"-{option}={value}" in error_of(from_opennmt, model_file)
    record_property("refused", f"-{option} {value}")


def test_opennmt_refuses_other_positions(model_file: Path, record_property: Record) -> None:
    """SinusoidalConcat has fairseq's wavelengths, and so has Marian."""
    model, head = weights((9, 8))
    table = torch.tensor(np.stack([marian_position(index) for index in range(50)])).float()[
        :, None
    ]  # (P, 1, D)
    save(
        model_file,
        model | {name: table for name in model if name.endswith("pe.pe")},
        head,
    )
    assert "-position_encoding_type" in error_of(from_opennmt, model_file)
    record_property("refused", "-position_encoding_type SinusoidalConcat")


ATOMS = """
C c 1 2 3 ( ) = O N n o S s F Cl Br I P B - + [C@@H] [C@H] [nH] [N+] [O-] [n+] [Si] [B-] [S@] [NH4+] [Na+] [Li] [Mg+]
%10 %11 %12 4 5 6 7 8 9 . / \\ # [Pd] [Cu] [Zn+] [K+] *
"""


def opennmt_search(
    log_probs: Callable[[tuple[int, ...]], np.ndarray],
    beams: int,
    n_best: int,
    longest: int,
    penalty: Callable[[int], float],
    version: int,
) -> list[tuple[float, list[int]]]:
    """`BeamSearch.advance` and `update_finished` of OpenNMT-py, restated: scores and tokens without the start.

    `log_probs` returns those of the next token, (V,), after these tokens.
    """
    start, end = map(SPECIAL.index, ("<s>", "</s>"))
    running = [(0.0, (start,))]
    finished = []
    best_finished = False
    for length in range(1, longest + 1):
        candidates = [
            (total + float(log_p), (*tokens, token))
            for total, tokens in running
            for token, log_p in enumerate(log_probs(tokens))
        ]
        candidates.sort(key=lambda pair: -pair[0])
        running = []
        ends = []
        for total, tokens in candidates[:beams]:
            ends.append(tokens[-1] == end or length == longest)
            if ends[-1]:
                # the length counts the start token
                finished.append((total / penalty(length + 1), [*tokens[1:]]))
            else:
                running.append((total, tokens))
        best_finished = ends[0] or (best_finished and version == 2)
        if best_finished and len(finished) >= (beams if version == 2 else n_best):
            break
    return sorted(finished, key=lambda pair: -pair[0])[:n_best]


DIVISORS: dict[str, Callable[[int], float]] = {
    "none": lambda length: 1.0,
    "avg": float,
    "wu": lambda length: ((5 + length) / 6) ** 0.6,
}


@pytest.mark.parametrize(("beams", "n_best"), [(12, 3), (12, 12), (50, 50)])
@pytest.mark.parametrize("penalty", DIVISORS)
@pytest.mark.parametrize("version", [2, 3])
def test_opennmt_atoms_give_the_hypotheses_of_its_search(
    version: int, penalty: str, beams: int, n_best: int, model_file: Path, tmp_path: Path
) -> None:
    """As the Molecular Transformer and RetroChimera store them: SMILES with a space between two tokens."""
    tokens = [*SPECIAL, *ATOMS.split()]
    model, head = weights((len(tokens), len(tokens)))
    head["bias"][SPECIAL.index("</s>")] += 4.0  # hypotheses of many lengths
    save(model_file, model, head, {"src": tokens, "tgt": tokens, "decoder_start_token": "<s>"})
    ours, tokenizer, _ = converted("opennmt", model_file, tmp_path / "ours")
    search = ours.generation_config
    assert_fields(search, beam_search_rule="opennmt3")
    search.beam_search_rule = f"opennmt{version}"
    written = "C [C@@H] ( Br ) c 1 [nH] %10 . / \\ # [N+]"
    read = tokenizer(written)["input_ids"]
    assert read == [tokens.index(token) for token in written.split()]
    assert tokenizer.decode(read) == written

    search.length_penalty = {"none": 0.0, "avg": 1.0, "wu": None}[penalty]
    if penalty == "wu":
        search.paper_length_penalty = 0.6
    translator = Translator(ours, tokenizer)
    assert translator.task == "sequence"
    assert tokenizer.init_kwargs["normalize_source"] is False
    ids = [40, 41, 7]
    longest = 8 if beams == 12 else 6
    (hypotheses,) = translator.translate_nbest(
        [tokenizer.decode(ids)],
        n_best,
        num_beams=beams,
        max_new_tokens=longest,
        probabilities=True,
    )
    theirs = restated(model, head)

    @functools.cache
    def log_probs(prefix: tuple[int, ...]) -> np.ndarray:
        logits = theirs.logits(ids, [*prefix])[-1]
        return torch.from_numpy(logits).log_softmax(-1).numpy()

    its_search = functools.partial(
        opennmt_search, log_probs, beams, n_best, longest, DIVISORS[penalty]
    )
    expected = its_search(version)
    assert len(expected) == n_best
    if penalty == "avg" and beams == 12:
        assert expected != its_search(5 - version), "the test does not tell the versions apart"
    assert [one.tokens for one in hypotheses] == [
        [tokens[token] for token in best] for _, best in expected
    ]
    assert [one.score for one in hypotheses] == pytest.approx(
        [score for score, _ in expected], abs=1e-4
    )


def test_beam_search_rule_that_does_not_exist_is_refused(model_file: Path) -> None:
    save(model_file, *weights((23, 29)))
    ours = from_opennmt(model_file).model
    ours.generation_config.beam_search_rule = "opennmt"
    with pytest.raises(ValueError, match="beam_search_rule='opennmt'.* opennmt2, opennmt3"):
        ours.generate(torch.tensor([[4, 5]]))


@pytest.mark.parametrize(
    ("symbols", "task"),
    [
        ("C c 1 Br [nH] ( ) = <RX_1>", "sequence"),
        ("the of C 1 ( ) = N a", "language"),
        (" ".join("abcdefghijklmnopqrstuvwxyz.,"), "language"),
    ],
)
def test_task_of_a_converted_model_follows_its_vocabulary(
    symbols: str, task: str, model_file: Path, tmp_path: Path
) -> None:
    tokens = [*SPECIAL, *symbols.split()]
    vocab = {"src": tokens, "tgt": tokens, "decoder_start_token": "<s>"}
    save(model_file, *weights((len(tokens), len(tokens))), vocab)
    ours, tokenizer, _ = converted("opennmt", model_file, tmp_path / "ours")
    assert Translator(ours, tokenizer).task == task
