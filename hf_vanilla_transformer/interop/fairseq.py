"""fairseq's `transformer` checkpoints: one file with weights and options, and the dictionaries in the same folder."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import UserError
from . import state_dicts, vocabularies
from .converting import Converted
from .state_dicts import PRE_NORM, STACKS, Renames
from .transformers_folders import set_generation_config

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]  # `Dictionary` puts them before the tokens of the file
_SPECIAL = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True))
_GENERATION_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_IDS = {**_GENERATION_IDS, "unk_token_id": 3}

# Options of other architectures: the value that is supported, and what other values mean.
REFUSED = {
    "encoder_normalize_before": (False, PRE_NORM),
    "decoder_normalize_before": (False, PRE_NORM),
    "layernorm_embedding": (False, "normalises the embeddings, §3.4 does not"),
    "no_token_positional_embeddings": (False, "leaves out the positions of §3.5"),
    "adaptive_input": (False, "has embeddings of different widths"),
    "adaptive_softmax_cutoff": (None, "has an adaptive softmax"),
    "no_cross_attention": (False, "has a decoder without cross-attention"),
    "cross_self_attention": (False, "attends to source and target at once"),
    "layer_wise_attention": (False, "attends to every encoder layer"),
    "encoder_layers_to_keep": (None, "leaves out layers when it is loaded"),
    "decoder_layers_to_keep": (None, "leaves out layers when it is loaded"),
    "base_layers": (0, "has BASE layers"),
    "char_inputs": (False, "reads characters"),
}

# fairseq's names of activations that differ from transformers'.
ACTIVATIONS = {"gelu_accurate": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}

# Tensor names of older versions.
_UPGRADES: Renames = (
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
        data: the folder of dict.SOURCE.txt and dict.TARGET.txt; default: the checkpoint's.
        codes: of subword-nmt or fastBPE; the tokenizer then takes raw text, through Moses.
        sentencepiece, target_sentencepiece: models; the tokenizer then takes raw text. One may serve both sides.

    Returns:
        The model and, if the dictionaries are there, a tokenizer; without codes or a SentencePiece model it takes
        tokenized text, as fairseq-preprocess does.

    Raises:
        UserError: an architecture that cannot be expressed here, a damaged file, one with other classes than
            argparse.Namespace.
    """
    path = Path(checkpoint)
    found = state_dicts.read_torch_file(path)
    if not isinstance(found, Mapping) or "model" not in found:
        raise UserError(f"{path}: no checkpoint of fairseq: it has no 'model'")
    options, task, generation = _options(found, path)
    _refuse(options, path)
    tensors = _upgraded(state_dicts.require_tensors(found["model"], f"{path}: model"))
    embeddings = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
    tying = state_dicts.find_tying(tensors, *embeddings, "decoder.output_projection.weight")
    sizes = state_dicts.width_and_depth(tensors, embeddings[0])
    positions, tensors = _positions(tensors)
    fields = _fields(options, tensors) | tying.fields | positions | _IDS | sizes
    model = state_dicts.build_model(fields, tensors, _locate, tying.copies)
    if generation:
        set_generation_config(model, generation | _GENERATION_IDS)
    sides = _dictionaries(Path(data) if data else path.parent, task, fields)
    if not sides:
        if codes or sentencepiece:
            raise UserError("dict.SOURCE.txt and dict.TARGET.txt are not in the checkpoint's folder: give data=FOLDER")
        return Converted(model)
    if codes:
        languages = str(task.get("source_lang")), str(task.get("target_lang"))
        return Converted(model, vocabularies.bpe_tokenizer(Path(codes), sides, languages))
    if sentencepiece:
        spm_models = Path(sentencepiece), Path(target_sentencepiece or sentencepiece)
        return Converted(model, vocabularies.sentencepiece_tokenizer(spm_models, sides, _SPECIAL))
    return Converted(model, *vocabularies.whitespace_tokenizers(sides, _SPECIAL), note=vocabularies.PRETOKENIZED)


def _options(found: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Options of model, task and generation: one namespace in older checkpoints, sections in newer ones."""
    if found.get("args") is not None:
        options = _as_dict(found["args"])
        return options, options, {}
    sections = found.get("cfg")
    if not isinstance(sections, Mapping) or "model" not in sections:
        raise UserError(f"{path}: no checkpoint of fairseq: it has neither 'args' nor 'cfg'")
    options = _as_dict(sections["model"])
    for stack in STACKS:  # `transformer` itself has a section for each
        for name, value in _as_dict(options.pop(stack, None)).items():
            options[f"{stack}_{name}"] = value
    search = _as_dict(sections.get("generation"))
    names = {"beam": "num_beams", "lenpen": "length_penalty"}
    generation = {ours: search[theirs] for theirs, ours in names.items() if theirs in search}
    if generation and not search.get("max_len_a") and search.get("max_len_b"):
        generation["max_new_tokens"] = int(search["max_len_b"])
    return options, _as_dict(sections.get("task")), generation


def _as_dict(options: Any) -> dict[str, Any]:
    if isinstance(options, argparse.Namespace):
        return dict(vars(options))
    return dict(options) if isinstance(options, Mapping) else {}


def _refuse(options: Mapping[str, Any], path: Path) -> None:
    arch = str(options.get("arch") or options.get("_name"))
    if not arch.startswith("transformer") or "lm" in arch:
        raise UserError(f"{path}: arch={arch}: only fairseq's transformer architectures of translation are converted")
    for name, (supported, reason) in REFUSED.items():
        if options.get(name, supported) not in (supported, None, False, 0, ""):
            raise UserError(f"{path}: --{name.replace('_', '-')}={options[name]}: such a model {reason}")
    width = options.get("encoder_embed_dim")
    for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        if options.get(name, width) != width:
            raise UserError(
                f"{path}: --{name.replace('_', '-')}={options[name]} with --encoder-embed-dim={width}: "
                f"here all sub-layers have one width d_model (§3.1)"
            )


def _upgraded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of newer versions, with separate projections."""
    upgraded = {}
    for name, tensor in tensors.items():
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        name = state_dicts.rename(name, _UPGRADES)
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
    for stack in STACKS:
        heads = fields[f"{stack}_attention_heads"] = options.get(f"{stack}_attention_heads")
        if not isinstance(heads, int):
            raise UserError(f"{stack}_attention_heads={heads}: the checkpoint's options must give the number of heads")
        fields[f"{stack}_ffn_dim"] = len(state_dicts.require_matrix(tensors, f"{stack}.layers.0.fc1.weight"))
    return fields


def _locate(name: str) -> str:
    name = name.removeprefix("model.").replace("cross_attn", "encoder_attn")
    return name.replace("lm_head", "decoder.output_projection")


def _dictionaries(folder: Path, task: Mapping[str, Any], fields: Mapping[str, Any]) -> list[list[str]]:
    """The tokens of source and target, by id; none if there are no dictionaries."""
    files = [folder / f"dict.{task.get(f'{side}_lang')}.txt" for side in ("source", "target")]
    if not all(file.is_file() for file in files):
        return []
    sides = []
    for file, size in zip(files, (fields["vocab_size"], fields["decoder_vocab_size"]), strict=True):
        tokens = [line.rstrip().rsplit(" ", 1)[0] for line in vocabularies.read_lines(file) if line.strip()]
        sides.append(vocabularies.require_size(SPECIAL_TOKENS + tokens, size, file))
    return sides
