"""Mistakes of students, as edits of a few characters in the public implementations of `public_transformers`."""

from typing import Any, NamedTuple

from scripts.trials.public_transformers import Edit


class Plant(NamedTuple):
    """A mistake.

    Attributes:
        kind: what the student does, as in the trial's table.
        edits: how it gets into the code.
        where: a regular expression for the words of the report that tell the place, if the mistake is in one place.
    """

    kind: str
    edits: tuple[Edit, ...]
    where: str = ""


def plant(kind: str, file: str, old: str, new: str, where: str = "", count: int = 1) -> Plant:
    return Plant(kind, (Edit(file, old, new, count),), where)


def several(kind: str, file: str, *edits: Any, where: str = "") -> Plant:
    """A mistake of several edits of a file: (old, new) or (old, new, count)."""
    return Plant(kind, tuple(Edit(file, *edit) for edit in edits), where)


ATTENTION_SCALE = "scores have another scale"
BATCH = "batch and time are confused"
CACHE = "a cached step has other keys"
CAUSAL = "causal mask missing or off by one"
EMBEDDING_SCALE = "embeddings have another scale"
ACTIVATION = "ReLU missing or another"
FINAL_NORM = "final norm missing"
HEADS = "heads split or joined in another order"
INVERTED = "mask inverted"
LAYERS = "a layer skipped or fed with an older input"
MASK_VALUE = "masked scores have another value"
MEMORY = "cross-attention reads something else"
NORM = "norm by another formula, or missing"
ORDER = "sublayers in another order"
PADDING = "padding attended to"
POSITIONS = "positions by another formula, or missing"
RESIDUAL = "residual missing or from elsewhere"
SHARED = "one module used twice"
SOFTMAX = "softmax over another axis, or mask after it"

_HYUN = "models/layers/scale_dot_product_attention.py"
_GORDIC = "models/definitions/transformer_model.py"
_MHA = "labml_nn/transformers/mha.py"
_ALADDIN = "transformer_from_scratch.py"
_BRANDO = "architectures/transformer_decoder.py"
_TUNZ = "model/transformer.py"
_LABML = "labml_nn/transformers/models.py"

PLANTS: dict[str, tuple[Plant, ...]] = {
    "hkproj": (
        plant(INVERTED, "model.py", "(mask == 0", "(mask == 1"),
        plant(EMBEDDING_SCALE, "model.py", " * math.sqrt(self.d_model)", ""),
        plant(
            EMBEDDING_SCALE, "model.py", " * math.sqrt(self.d_model)", " / math.sqrt(self.d_model)"
        ),
        plant(RESIDUAL, "model.py", "return x + self.dropout", "return self.dropout"),
        plant(
            RESIDUAL, "model.py", "return x + self.dropout", "return self.norm(x) + self.dropout"
        ),
        plant(FINAL_NORM, "model.py", "return self.norm(x)", "return x", "encoder"),
        plant(FINAL_NORM, "model.py", "return self.norm(x)", "return x", "decoder", count=-1),
        plant(MEMORY, "model.py", "encoder_output, encoder_output, src_mask", "x, x, tgt_mask"),
        plant(POSITIONS, "model.py", "torch.cos", "torch.sin"),
        plant(POSITIONS, "model.py", "10000.0", "1000.0"),
        plant(POSITIONS, "model.py", "10000.0", "50.0", "positions"),
        plant(ATTENTION_SCALE, "model.py", "math.sqrt(d_k)", "math.sqrt(query.shape[1] * d_k)"),
        plant(SOFTMAX, "model.py", "softmax(dim=-1)", "softmax(dim=-2)"),
        plant(HEADS, "model.py", "x.transpose(1, 2).contiguous()", "x.contiguous()"),
        plant(SHARED, "model.py", "key = self.w_k(k)", "key = self.w_q(k)"),
        plant(SHARED, "model.py", "value = self.w_v(v)", "value = self.w_k(v)"),
        plant(
            LAYERS,
            "model.py",
            "for layer in self.layers:",
            "for layer in self.layers[1:]:",
            "encoder",
        ),
    ),
    "harvardnlp": (
        plant(SHARED, "annotated.py", "c(attn), c(attn)", "attn, attn", "cross-attention"),
        plant(SHARED, "annotated.py", "copy.deepcopy(module)", "module"),
        plant(INVERTED, "annotated.py", "(mask == 0", "(mask == 1"),
        plant(CAUSAL, "annotated.py", "diagonal=1)", "diagonal=0)"),
        plant(
            LAYERS, "annotated.py", "mask)\n        return", "mask)\n            return", "encoder"
        ),
        several(
            ORDER,
            "annotated.py",
            ("self.self_attn(x, x, x, tgt_mask)", "self.src_attn(x, m, m, visible)"),
            ("self.src_attn(x, m, m, src_mask)", "self.self_attn(x, x, x, tgt_mask)"),
            ("m, m, visible)", "m, m, src_mask)"),
            where="cross-attention",
        ),
        plant(
            RESIDUAL,
            "annotated.py",
            "self.dropout(sublayer(self.norm(x)))",
            "self.norm(sublayer(x))",
        ),
        plant(NORM, "annotated.py", "(std + self.eps)", "(std**2 + self.eps)"),
        plant(NORM, "annotated.py", " + self.b_2", ""),
        plant(NORM, "annotated.py", "eps=1e-6", "eps=0.1"),
        plant(NORM, "annotated.py", "x.mean(-1, keepdim=True)", "x.mean()"),
        plant(ACTIVATION, "annotated.py", ".relu()", ""),
        plant(ATTENTION_SCALE, "annotated.py", "/ math.sqrt(d_k)", "/ d_k"),
        plant(
            SOFTMAX,
            "annotated.py",
            "p_attn = scores.softmax(dim=-1)",
            "p_attn = scores.softmax(dim=-3)",
        ),
        several(
            SOFTMAX,
            "annotated.py",
            ("scores = scores.masked_fill(mask == 0, -1e9)", "pass"),
            ("scores.softmax(dim=-1)", "scores.softmax(dim=-1) * (1 if mask is None else mask)"),
        ),
        plant(POSITIONS, "annotated.py", ": x.size(1)", "1 : x.size(1) + 1"),
        plant(BATCH, "annotated.py", "self.pe[:, : x.size(1)]", "self.pe[0, : x.size(0), None]"),
    ),
    "bentrevett": (
        plant(
            LAYERS,
            "seq2seq.py",
            "src = layer(src, src_mask)",
            "src = layer(src, src_mask); break",
            "encoder",
        ),
        several(
            LAYERS,
            "seq2seq.py",
            (
                "for layer in self.layers:\n            src",
                "first = src\n        for layer in self.layers:\n            src",
            ),
            ("layer(src, src_mask)", "layer(first, src_mask)"),
            where="encoder",
        ),
        several(
            LAYERS,
            "seq2seq.py",
            (
                "for layer in self.layers:\n            trg",
                "first = trg\n        for layer in self.layers:\n            trg",
            ),
            ("layer(trg, enc_src", "layer(first, enc_src"),
            where="decoder",
        ),
        plant(INVERTED, "seq2seq.py", "mask == 0", "mask == 1"),
        plant(EMBEDDING_SCALE, "seq2seq.py", "(src) * self.scale", "(src)", "encoder"),
        plant(EMBEDDING_SCALE, "seq2seq.py", "(trg) * self.scale", "(trg)", "decoder"),
        plant(CAUSAL, "seq2seq.py", " & trg_sub_mask", ""),
        plant(POSITIONS, "seq2seq.py", " + self.pos_embedding(pos)", "", "decoder", count=-1),
        plant(RESIDUAL, "seq2seq.py", "ff_layer_norm(src + ", "ff_layer_norm(", "encoder"),
        plant(
            SHARED, "seq2seq.py", "enc_attn_layer_norm(trg", "self_attn_layer_norm(trg", "decoder"
        ),
        plant(SHARED, "seq2seq.py", "K = self.fc_k(key)", "K = self.fc_q(key)"),
    ),
    "hyunwoongko": (
        plant(INVERTED, _HYUN, "mask == 0", "mask == 1"),
        plant(ATTENTION_SCALE, _HYUN, "/ math.sqrt(d_tensor)", ""),
        plant(NORM, "models/layers/layer_norm.py", "torch.sqrt(", "("),
        plant(NORM, "models/layers/layer_norm.py", "(x - mean)", "x"),
        plant(NORM, "models/layers/layer_norm.py", "self.gamma * out", "out"),
        plant(CAUSAL, "models/model/transformer.py", " & trg_sub_mask", ""),
        plant(
            CAUSAL, "models/model/transformer.py", "(trg_len, trg_len))", "(trg_len, trg_len), 1)"
        ),
        plant(
            PADDING,
            "models/blocks/decoder_layer.py",
            "mask=src_mask",
            "mask=None",
            "cross-attention",
        ),
        several(
            POSITIONS,
            "models/embedding/positional_encoding.py",
            ("torch.sin(", "torch.cos("),
            ("torch.cos(", "torch.sin(", -1),
        ),
    ),
    "SamLynnEvans": (
        plant(INVERTED, "Sublayers.py", "mask == 0", "mask == 1"),
        plant(ATTENTION_SCALE, "Sublayers.py", "/  math.sqrt", "* math.sqrt"),
        plant(FINAL_NORM, "Models.py", "return self.norm(x)", "return x", "encoder"),
        plant(FINAL_NORM, "Models.py", "return self.norm(x)", "return x", "decoder", count=-1),
        plant(SHARED, "Layers.py", "attn_2(x2", "attn_1(x2", "cross-attention"),
        plant(RESIDUAL, "Layers.py", "x + self.dropout_2", "x2 + self.dropout_2", "encoder"),
        plant(EMBEDDING_SCALE, "Embed.py", "x = x * math.sqrt(self.d_model)", ""),
        several(
            POSITIONS,
            "Embed.py",
            ("x = x * math.sqrt(self.d_model)", ""),
            ("x + pe", "(x + pe) * math.sqrt(self.d_model)"),
        ),
    ),
    "devjwsong": (
        plant(INVERTED, "layers.py", "mask == 0", "mask == 1"),
        plant(NORM, "layers.py", "x_2 = self.layer_norm_2(x)", "x_2 = x", "decoder", count=-1),
        plant(EMBEDDING_SCALE, "layers.py", "x = x * math.sqrt(d_model)", ""),
        plant(ATTENTION_SCALE, "layers.py", "math.sqrt(d_k)", "math.sqrt(d_model)"),
        plant(ACTIVATION, "layers.py", "self.relu(", "torch.sigmoid("),
        plant(
            PADDING, "layers.py", "e_output, mask=e_mask", "e_output, mask=None", "cross-attention"
        ),
        plant(
            FINAL_NORM,
            "transformer.py",
            "return self.layer_norm(x)",
            "return x",
            "decoder",
            count=-1,
        ),
    ),
    "aladdinpersson": (
        plant(INVERTED, _ALADDIN, "mask == 0", "mask == 1"),
        plant(
            CAUSAL,
            _ALADDIN,
            "torch.tril(torch.ones((trg_len, trg_len)))",
            "torch.ones((trg_len, trg_len))",
        ),
        plant(SOFTMAX, _ALADDIN, "dim=3)", "dim=2)"),
        plant(RESIDUAL, _ALADDIN, "forward + x", "forward", "feed-forward"),
        plant(RESIDUAL, _ALADDIN, "attention + x", "attention", "decoder"),
        plant(PADDING, _ALADDIN, "src, src_mask", "src, None", "encoder"),
    ),
    "gordicaleksa": (
        plant(INVERTED, _GORDIC, "torch.tensor(False)", "torch.tensor(True)"),
        plant(
            SHARED,
            _GORDIC,
            "= copy.deepcopy(multi_headed_attention)",
            "= multi_headed_attention",
            count=2,
        ),
        plant(ATTENTION_SCALE, _GORDIC, "math.sqrt(self.head_dimension)", "self.head_dimension"),
        plant(
            RESIDUAL,
            _GORDIC,
            "return representations_batch +",
            "return self.norm(representations_batch) +",
        ),
        plant(
            ACTIVATION,
            _GORDIC,
            "self.relu(self.linear1(representations_batch))",
            "self.linear1(representations_batch)",
        ),
        plant(EMBEDDING_SCALE, _GORDIC, "math.sqrt(self.model_dimension)", "self.model_dimension"),
        plant(HEADS, _GORDIC, "representations.transpose(1, 2).reshape", "representations.reshape"),
    ),
    "jadore801120": (
        plant(INVERTED, "transformer/Modules.py", "mask == 0", "mask == 1"),
        plant(RESIDUAL, "transformer/SubLayers.py", "q += residual", "pass", "attention"),
        plant(ATTENTION_SCALE, "transformer/SubLayers.py", "d_k ** 0.5", "d_k"),
        plant(CAUSAL, "transformer/Models.py", "& get_subsequent_mask(trg_seq)", ""),
        plant(CAUSAL, "transformer/Models.py", "diagonal=1)", "diagonal=2)"),
        plant(NORM, "transformer/SubLayers.py", "x = self.layer_norm(x)", "pass", "feed-forward"),
    ),
    "dreamgonfly": (
        plant(INVERTED, "models.py", "masked_fill(", "masked_fill(~"),
        plant(RESIDUAL, "models.py", "self.sublayer(*args) + x", "self.sublayer(*args)"),
        plant(NORM, "models.py", "return self.layer_normalization(x)", "return x"),
        plant(SOFTMAX, "models.py", "nn.Softmax(dim=3)", "nn.Softmax(dim=1)"),
        plant(EMBEDDING_SCALE, "embeddings.py", "x = x * math.sqrt(self.dim)", "pass"),
        plant(PADDING, "models.py", "inputs_len)", "inputs_len) & False", "cross-attention"),
        plant(ATTENTION_SCALE, "models.py", "np.sqrt(self.d_head)", "self.d_head"),
    ),
    "tunz": (
        plant(ATTENTION_SCALE, _TUNZ, "q.mul_(self.scale)", "pass"),
        plant(MASK_VALUE, _TUNZ, "-1e9", "0.0"),
        plant(EMBEDDING_SCALE, _TUNZ, "input_embedded *= self.emb_scale", "pass", "encoder"),
        plant(
            SHARED,
            _TUNZ,
            "self.enc_dec_attention_norm(x)",
            "self.self_attention_norm(x)",
            "decoder",
        ),
        plant(LAYERS, _TUNZ, "enumerate(self.layers)", "enumerate(self.layers[:-1])", "decoder"),
    ),
    "graykode": (
        plant(POSITIONS, "Transformer.py", "np.sin(", "np.cos("),
        plant(ATTENTION_SCALE, "Transformer.py", "/ np.sqrt(d_k)", ""),
        plant(PADDING, "Transformer.py", "scores.masked_fill_(attn_mask, -1e9)", ""),
        plant(RESIDUAL, "Transformer.py", "output + residual", "output", "attention"),
        plant(CAUSAL, "Transformer.py", "k=1)", "k=0)"),
    ),
    "brandokoch": (
        plant(RESIDUAL, "architectures/add_and_norm.py", "(x+residual)", "(x)+residual"),
        plant(
            EMBEDDING_SCALE,
            "architectures/transformer_encoder_decoder.py",
            "(trg_token_ids) * math.sqrt(self.d_model)",
            "(trg_token_ids)",
            "decoder",
        ),
        several(
            MEMORY,
            _BRANDO,
            ("(encoder_output)", "(mha_layer_1_out)", 2),
            ("v_2, src_mask)", "v_2, trg_mask)"),
            where="cross-attention",
        ),
        plant(
            MEMORY, _BRANDO, "k_2 = self.W_k_2(encoder_output)", "k_2 = self.W_k_2(mha_layer_1_out)"
        ),
        plant(
            HEADS,
            "architectures/multi_head_attention.py",
            "k.view(k.size(0), k.size(1), self.n_heads, self.d_head)",
            "k.view(k.size(0), self.n_heads, k.size(1), self.d_head).transpose(1, 2)",
            "attention",
        ),
    ),
    "labmlai": (
        plant(SOFTMAX, _MHA, "nn.Softmax(dim=1)", "nn.Softmax(dim=0)"),
        plant(INVERTED, _MHA, "mask == 0", "mask == 1"),
        plant(
            RESIDUAL,
            _LABML,
            "x + self.dropout(attn_src)",
            "self.dropout(attn_src)",
            "cross-attention",
        ),
        plant(ATTENTION_SCALE, _MHA, "scores *= self.scale", "pass"),
        plant(CAUSAL, "labml_nn/transformers/utils.py", "torch.tril(", "torch.triu("),
        plant(FINAL_NORM, _LABML, "return self.norm(x)", "return x", "encoder"),
    ),
    "d2l-ai": (
        plant(CACHE, "chapter.py", "(state[2][self.i], X)", "(X, X)"),
        plant(CACHE, "chapter.py", "torch.cat((state[2][self.i], X), dim=1)", "X"),
        plant(CACHE, "chapter.py", "state[2][self.i] = key_values", "state[2][self.i] = X"),
        plant(CACHE, "chapter.py", "state[2][self.i] = key_values", "pass"),
        plant(CAUSAL, "chapter.py", "1, num_steps + 1", "2, num_steps + 2"),
        plant(CAUSAL, "chapter.py", "if self.training:", "if False:"),
        plant(
            PADDING,
            "chapter.py",
            "(Y, enc_outputs, enc_outputs, enc_valid_lens)",
            "(Y, enc_outputs, enc_outputs, None)",
            "cross-attention",
        ),
        plant(
            MEMORY,
            "chapter.py",
            "enc_outputs, enc_outputs, enc_valid_lens)",
            "key_values, key_values, dec_valid_lens)",
        ),
        plant(RESIDUAL, "chapter.py", "(Y) + X)", "(Y)) + X"),
        plant(ATTENTION_SCALE, "chapter.py", "math.sqrt(d)", "d"),
        plant(INVERTED, "chapter.py", "< valid_len", "> valid_len"),
        plant(POSITIONS, "chapter.py", "torch.cos", "torch.sin"),
        plant(
            HEADS,
            "chapter.py",
            "X.permute(0, 2, 1, 3)",
            "X.reshape(X.shape[0], X.shape[2], X.shape[1], -1)",
            count=-1,
        ),
    ),
    "datawhalechina": (),
}

#: Edits that leave an implementation right.
HARMLESS: dict[str, tuple[Plant, ...]] = {
    "tunz": (
        plant(
            "the caller shifts the target",
            _TUNZ,
            "target_embedded = F.pad(target_embedded, (0, 0, 1, 0))",
            "target_embedded = self.t_vocab_embedding(targets)",
        ),
    ),
    "hkproj": (
        plant(
            "a mask that is added",
            "model.py",
            "attention_scores.masked_fill_(mask == 0, -1e9)",
            "attention_scores += (mask == 0) * -1e9",
        ),
        plant("GELU", "model.py", "torch.relu(", "nn.functional.gelu("),
        plant("GELU by tanh", "model.py", "torch.relu(", "nn.GELU('tanh')("),
        plant(
            "RMSNorm",
            "model.py",
            "(x - mean) / (std + self.eps)",
            "x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()",
        ),
    ),
    "harvardnlp": (
        plant(
            "post-norm",
            "annotated.py",
            "return x + self.dropout(sublayer(self.norm(x)))",
            "return self.norm(x + self.dropout(sublayer(x)))",
        ),
    ),
}
