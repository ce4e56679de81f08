"""fairseq's `transformer` checkpoints: one file with weights and options, and the dictionaries beside it."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..errors import UserError
from .converting import Converted
from .state_dicts import build_model, read_torch_file, require_tensors, width_and_depth, word_matrices
from .transformers_folders import decode_as
from .vocabularies import bpe_tokenizer, pieces_tokenizer, read_lines, sentencepiece_tokenizer

SPECIAL_WORDS = ["<s>", "<pad>", "</s>", "<unk>"]  # `Dictionary` puts them before the words of the file
_SPECIAL = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_WORDS, strict=True))
_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "unk_token_id": 3, "decoder_start_token_id": 2}

# Options that make another architecture, the value with which they do not, and what they are.
REFUSED = {
    "encoder_normalize_before": (False, "normalises before each sub-layer (pre-norm), this architecture after (§3.1)"),
    "decoder_normalize_before": (False, "normalises before each sub-layer (pre-norm), this architecture after (§3.1)"),
    "layernorm_embedding": (False, "normalises the embeddings, §3.4 does not"),
    "no_token_positional_embeddings": (False, "leaves out the positions of §3.5"),
    "adaptive_input": (False, "has words of different widths"),
    "adaptive_softmax_cutoff": (None, "has an output layer in parts"),
    "no_cross_attention": (False, "has a decoder that reads no source"),
    "cross_self_attention": (False, "attends to source and target at once"),
    "layer_wise_attention": (False, "attends to every encoder layer"),
    "encoder_layers_to_keep": (None, "leaves out layers when it is loaded"),
    "decoder_layers_to_keep": (None, "leaves out layers when it is loaded"),
    "base_layers": (0, "has BASE layers"),
    "char_inputs": (False, "reads characters"),
}

# Where fairseq's name of an activation is not transformers'.
ACTIVATIONS = {"gelu_accurate": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}

# Older names of tensors.
_UPGRADES = (
    (r"layer_norms\.0\.", "self_attn_layer_norm."),
    (r"(encoder\.layers\.\d+)\.layer_norms\.1\.", r"\1.final_layer_norm."),
    (r"(decoder\.layers\.\d+)\.layer_norms\.1\.", r"\1.encoder_attn_layer_norm."),
    (r"layer_norms\.2\.", "final_layer_norm."),
    (r"^decoder\.embed_out$", "decoder.output_projection.weight"),
)
_NOT_WEIGHTS = re.compile(r"(en|de)coder\.(version|embed_positions\.(_float_tensor|weights))")
_POSITIONS = "coder.embed_positions.weight"


def from_fairseq(
    checkpoint: str | Path,
    *,
    data: str | Path | None = None,
    codes: str | Path | None = None,
    sentencepiece: str | Path | None = None,
    target_sentencepiece: str | Path | None = None,
) -> Converted:
    """A checkpoint of fairseq's post-norm `transformer` architectures.

    Args:
        checkpoint: such as checkpoint_best.pt.
        data: the folder of dict.SOURCE.txt and dict.TARGET.txt; the checkpoint's own where None.
        codes: of subword-nmt or fastBPE; the tokenizer then takes raw text, through Moses.
        sentencepiece, target_sentencepiece: models; the tokenizer then takes raw text. One may serve both sides.

    Returns:
        The model; where the dictionaries are there, a tokenizer, which without codes or a SentencePiece model takes
        text in pieces, as fairseq-preprocess did.

    Raises:
        UserError: an architecture that cannot be expressed here, a damaged file, one that asks for other classes than
            argparse.Namespace.
    """
    path = Path(checkpoint)
    found = read_torch_file(path)
    if not isinstance(found, Mapping) or "model" not in found:
        raise UserError(f"{path}: no checkpoint of fairseq: it has no 'model'")
    options, task, generation = _options(found, path)
    _refuse(options, path)
    tensors = _upgraded(require_tensors(found["model"], f"{path}: model"))
    words = word_matrices(
        tensors, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"
    )
    layers = {f"{stack}_layers": f"{stack}.layers." for stack in ("encoder", "decoder")}
    positions, tensors = _positions(tensors)
    fields = _fields(options, tensors) | words.fields | positions | _IDS
    fields |= width_and_depth(tensors, "encoder.embed_tokens.weight", layers)
    model = build_model(fields, tensors, _place, words.copies)
    if generation:
        decode_as(model, GenerationConfig(**generation, **{k: v for k, v in _IDS.items() if k != "unk_token_id"}))
    sides = _dictionaries(Path(data) if data else path.parent, task, fields)
    return _with_tokenizers(Converted(model), sides, task, codes, sentencepiece, target_sentencepiece)


def _options(found: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of the model, of the task, and of decoding: a namespace in older checkpoints, sections in newer ones."""
    if found.get("args") is not None:
        options = _plain(found["args"])
        return options, options, {}
    sections = found.get("cfg")
    if not isinstance(sections, Mapping) or "model" not in sections:
        raise UserError(f"{path}: no checkpoint of fairseq: it has neither 'args' nor 'cfg'")
    options = _plain(sections["model"])
    for stack in ("encoder", "decoder"):  # newer ones have a section for each
        for name, value in _plain(options.pop(stack, None)).items():
            options[f"{stack}_{name}"] = value
    search = _plain(sections.get("generation"))
    generation = {
        theirs: search[ours]
        for ours, theirs in (("beam", "num_beams"), ("lenpen", "length_penalty"))
        if ours in search
    }
    if generation and not search.get("max_len_a") and search.get("max_len_b"):
        generation["max_new_tokens"] = int(search["max_len_b"])
    return options, _plain(sections.get("task")), generation


def _plain(options: Any) -> dict[str, Any]:
    if isinstance(options, argparse.Namespace):
        return dict(vars(options))
    return dict(options) if isinstance(options, Mapping) else {}


def _refuse(options: Mapping[str, Any], path: Path) -> None:
    arch = str(options.get("arch") or options.get("_name"))
    if not arch.startswith("transformer") or "lm" in arch:
        raise UserError(f"{path}: arch={arch}: only fairseq's transformer architectures of translation are converted")
    for name, (harmless, reason) in REFUSED.items():
        if options.get(name, harmless) not in (harmless, None, False, 0, ""):
            raise UserError(f"{path}: --{name.replace('_', '-')}={options[name]}: such a model {reason}")
    width = options.get("encoder_embed_dim")
    for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        if options.get(name, width) != width:
            raise UserError(
                f"{path}: --{name.replace('_', '-')}={options[name]} beside --encoder-embed-dim={width}: "
                f"here all sub-layers have one width d_model (§3.1)"
            )


def _upgraded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of newer versions, projections in three, without what is no weight."""
    upgraded = {}
    for name, tensor in tensors.items():
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        for old, new in _UPGRADES:
            name = re.sub(old, new, name)
        fused = re.fullmatch(r"(.*)\.in_proj_(weight|bias)", name)
        if fused is None:
            upgraded[name] = tensor
            continue
        for projection, part in zip("qkv", tensor.chunk(3), strict=False):
            upgraded[f"{fused[1]}.{projection}_proj.{fused[2]}"] = part
    return upgraded


def _positions(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Sinusoids are not saved; learned positions begin after the row of the padding."""
    tables = {name: table for name, table in tensors.items() if name.endswith(_POSITIONS)}
    if not tables:
        return {"position_encoding_type": "sinusoidal_fairseq"}, dict(tensors)
    if len(tables) == 1:
        raise UserError(f"{next(iter(tables))}: the other stack has sinusoids; here both stacks have the same kind")
    rows = {name: table[_IDS["pad_token_id"] + 1 :] for name, table in tables.items()}
    shortest = min(map(len, rows.values()))
    learned = {"position_encoding_type": "learned", "max_position_embeddings": shortest}
    return learned, {**tensors, **{name: table[:shortest] for name, table in rows.items()}}


def _fields(options: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    activation = options.get("activation_fn") or "relu"
    fields: dict[str, Any] = {
        "activation_function": ACTIVATIONS.get(activation, activation),
        "scale_embedding": not options.get("no_scale_embedding", False),
        "attention_bias": "encoder.layers.0.self_attn.q_proj.bias" in tensors,
        "lm_head_bias": "decoder.output_projection.bias" in tensors,
    }
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        fields[name] = options.get(name) or 0.0
    for stack in ("encoder", "decoder"):
        heads = options.get(f"{stack}_attention_heads")
        if not isinstance(heads, int):
            raise UserError(
                f"{stack}_attention_heads={heads}: the checkpoint's options have to give the number of heads"
            )
        fields[f"{stack}_attention_heads"] = heads
        weight = tensors.get(f"{stack}.layers.0.fc1.weight")
        if weight is not None:
            fields[f"{stack}_ffn_dim"] = len(weight)
    return fields


def _place(name: str) -> str:
    name = name.removeprefix("model.").replace("cross_attn", "encoder_attn")
    return name.replace("lm_head", "decoder.output_projection")


def _dictionaries(folder: Path, task: Mapping[str, Any], fields: Mapping[str, Any]) -> list[list[str]]:
    """The words of source and target in the order of their numbers; none where there are no dictionaries."""
    languages = task.get("source_lang"), task.get("target_lang")
    files = [folder / f"dict.{language}.txt" for language in languages]
    if not all(file.is_file() for file in files):
        return []
    sides = []
    for file, size in zip(files, (fields["vocab_size"], fields["decoder_vocab_size"]), strict=True):
        words = SPECIAL_WORDS + [line.rstrip().rsplit(" ", 1)[0] for line in read_lines(file) if line.strip()]
        if len(words) != size:
            raise UserError(f"{file}: {len(words)} words with the 4 special ones, but the model has {size}")
        sides.append(words)
    return sides


def _with_tokenizers(
    converted: Converted,
    sides: list[list[str]],
    task: Mapping[str, Any],
    codes: str | Path | None,
    sentencepiece: str | Path | None,
    target_sentencepiece: str | Path | None,
) -> Converted:
    if not sides:
        if codes or sentencepiece:
            raise UserError(
                "there is no dict.SOURCE.txt and dict.TARGET.txt beside the checkpoint: say where with data"
            )
        return converted
    (source, target), origin = sides, "the dictionaries"
    tokenizer: PreTrainedTokenizerBase
    if codes:
        languages = str(task.get("source_lang")), str(task.get("target_lang"))
        tokenizer = bpe_tokenizer(Path(codes), source, target, languages, origin)
        return Converted(converted.model, tokenizer)
    if sentencepiece:
        models = Path(sentencepiece), Path(target_sentencepiece or sentencepiece)
        return Converted(converted.model, sentencepiece_tokenizer(*models, source, target, _SPECIAL, origin))
    tokenizer = pieces_tokenizer(source, _SPECIAL, origin)
    target_tokenizer = tokenizer if source == target else pieces_tokenizer(target, _SPECIAL, origin)
    return Converted(converted.model, tokenizer, target_tokenizer, note="it takes text in pieces, with spaces between")
