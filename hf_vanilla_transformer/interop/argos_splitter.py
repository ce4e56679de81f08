"""The sentence splitter of an .argosmodel, so that Argos Translate need not download one.

Argos Translate 1.9 splits with Stanza's tokenizer, the versions of LibreTranslate with MiniSBD's. Both are networks
that label each character. The same rules are written here as the weights of a convolution over five characters. They
rather do not split than split wrongly. A sentence ends with ".", "!" or "?" before a space, unless a lower-case letter
follows or a digit precedes, with "。", "！" or "？", or with closing quotes and brackets after these.

Shapes: V characters, E features of a character, H = 4 rules, W = 5 characters.
"""

import io
import json
import unicodedata
from typing import Any

import numpy as np
import torch

from ..utils.errors import naming_extras

_NAME = "rules"  # the language and the package of the network, the same for every language
_LABELS = 3  # of a character: within a token, last of a token, last of a sentence
_CLASSES = {
    "end": set(".!?…‼⁇⁈⁉؟۔।॥։።"),
    "close": set("\"')]}»”’›"),
    "unspaced end": set("。！？｡"),
    "unspaced close": set("」』）】》"),
    "lower": {character for character in map(chr, range(0x2000)) if unicodedata.category(character) == "Ll"},
    "digit": {character for character in map(chr, range(0x2000)) if unicodedata.category(character) == "Nd"},
}
_FEATURES = [*_CLASSES, "space"]

# The features that must (1) or must not (-1) be at a character, by its distance from the last one of a sentence.
_RULES: list[dict[tuple[str, int], int]] = [
    {("end", 0): 1, ("space", 1): 1, ("lower", 2): -1, ("digit", -1): -1},
    {("end", -1): 1, ("close", 0): 1, ("space", 1): 1, ("lower", 2): -1},
    {("unspaced end", 0): 1, ("unspaced end", 1): -1, ("unspaced close", 1): -1, ("close", 1): -1},
    {("unspaced end", -1): 1, ("unspaced close", 0): 1, ("unspaced close", 1): -1},
]
_CERTAIN = 20.0
_CONFIG = {"feat_funcs": ["space_before"], "max_seqlen": 1000, "batch_size": 8, "skip_newline": False}


def splitter_files(language: str) -> dict[str, bytes]:
    """The files of a package's `stanza` and `minisbd` folders, for a code such as "en"."""
    units = ["<PAD>", "<UNK>", *sorted(set.union(*_CLASSES.values()))]
    ids = {unit: number for number, unit in enumerate(units)}
    vocabulary = {"lang": _NAME, "idx": 0, "cutoff": 0, "lower": False, "_unit2id": ids, "_id2unit": units}
    embedding = np.zeros((len(units), len(_CLASSES)), np.float32)  # (V, E - 1): the libraries add the feature "space"
    for column, characters in enumerate(_CLASSES.values()):
        embedding[[ids[character] for character in characters], column] = 1
    weight = np.zeros((len(_RULES), len(_FEATURES), 5), np.float32)  # (H, E, W)
    for row, rule in enumerate(_RULES):
        for (feature, distance), sign in rule.items():
            weight[row, _FEATURES.index(feature), 2 + distance] = sign
    bias = np.array([1 - sum(sign > 0 for sign in rule.values()) for rule in _RULES], np.float32)  # true: 1, else <= 0
    resources = {"tokenize": {_NAME: {}}, "default_processors": {"tokenize": _NAME}, "default_dependencies": {}}
    # an alias, because Stanza cuts Vietnamese into syllables
    languages = {language.lower(): {"alias": _NAME}, _NAME: {"lang_name": _NAME, **resources}}
    return {
        "stanza/resources.json": json.dumps(languages).encode(),
        f"stanza/{_NAME}/tokenize/{_NAME}.pt": _stanza_model(vocabulary, embedding, weight, bias),
        f"minisbd/{_NAME}.onnx": _onnx_model(vocabulary, embedding, weight, bias),
    }


def _stanza_model(vocabulary: dict[str, Any], embedding: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> bytes:
    """The checkpoint of a Stanza tokenizer with a zero LSTM and the rules in its convolution."""
    rules, features, _ = weight.shape
    hidden = rules // 2  # of each direction
    state = {"embeddings.weight": torch.tensor(embedding)}
    for suffix in ("", "_reverse"):
        for name, shape in (("weight_ih", (4 * hidden, features)), ("weight_hh", (4 * hidden, hidden))):
            state[f"rnn.{name}_l0{suffix}"] = torch.zeros(shape)
        state |= {f"rnn.bias_{part}_l0{suffix}": torch.zeros(4 * hidden) for part in ("ih", "hh")}
    state |= {"conv_res.0.weight": torch.tensor(weight), "conv_res.0.bias": torch.tensor(bias)}
    state |= {"conv_res2.weight": torch.eye(rules)[..., None], "conv_res2.bias": torch.zeros(rules)}
    for name, scale in (("tok", _CERTAIN), ("sent", _CERTAIN), ("mwt", 0.0)):
        state[f"{name}_clf.weight"] = torch.full((1, rules), scale)
        state[f"{name}_clf.bias"] = torch.tensor([-_CERTAIN / 2])
    sizes = {"vocab_size": len(embedding), "emb_dim": features - 1, "hidden_dim": hidden, "feat_dim": 1}
    network = {"rnn_layers": 1, "conv_res": "5", "hier_conv_res": True, "hierarchical": False, "dropout": 0.0}
    training = {"tok_noise": 0.0, "hier_invtemp": 0.0, "lr0": 0.001, "weight_decay": 0.0, "shorthand": _NAME}
    config = {**_CONFIG, **sizes, **network, **training, "lang": _NAME, "use_dictionary": False}
    file = io.BytesIO()
    torch.save({"model": state, "vocab": vocabulary, "config": config}, file)
    return file.getvalue()


def _onnx_model(vocabulary: dict[str, Any], embedding: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> bytes:
    with naming_extras():
        from onnx import TensorProto, helper, numpy_helper
    output = np.zeros((_LABELS, len(weight), 1), np.float32)
    output[2] = _CERTAIN
    arrays = {"embedding": embedding, "weight": weight, "bias": bias, "output": output}
    arrays["output bias"] = np.array([0, -_CERTAIN, -_CERTAIN / 2], np.float32)
    nodes = [
        helper.make_node("Gather", ["embedding", "units"], ["classes"]),
        helper.make_node("Concat", ["classes", "features"], ["characters"], axis=2),  # (B, T, E)
        helper.make_node("Transpose", ["characters"], ["channels"], perm=[0, 2, 1]),
        helper.make_node("Conv", ["channels", "weight", "bias"], ["sums"], pads=[2, 2]),
        helper.make_node("Relu", ["sums"], ["rules"]),
        helper.make_node("Conv", ["rules", "output", "output bias"], ["labels"]),
        helper.make_node("Transpose", ["labels"], ["logits"], perm=[0, 2, 1]),
    ]
    values = {
        name: helper.make_tensor_value_info(name, kind, ["batch", "length", *last])
        for name, kind, last in (
            ("units", TensorProto.INT64, []),
            ("features", TensorProto.FLOAT, [1]),
            ("logits", TensorProto.FLOAT, [_LABELS]),
        )
    }
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    inputs = [values["units"], values["features"]]
    graph = helper.make_graph(nodes, "splitter", inputs, [values["logits"]], initializer=tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    content = {"config": json.dumps(_CONFIG), "vocab": json.dumps(vocabulary), "lexicon": "null"}
    helper.set_model_props(model, {"lang_code": _NAME, **content})
    return model.SerializeToString()
