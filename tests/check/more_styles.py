"""Six more Transformers in the styles of tutorials, each with mistakes that `bug` plants. Written for these tests."""

import math

import torch
from torch import nn
from torch.nn import functional


def sinusoids(length, width, base=10000.0):
    angles = torch.outer(torch.arange(length).float(), base ** (-torch.arange(0, width, 2) / width))
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)


# 5. Pre-norm with fused queries, keys and values, -inf masks, GELU, learned positions, a tied output layer


class CausalOrNot(nn.Module):
    def __init__(self, n_embd, n_head, bug):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.bug = n_head, bug

    def forward(self, x, memory, hidden):
        batch, length, width = x.shape
        q = self.c_attn(x).chunk(3, dim=-1)[0]
        _, k, v = self.c_attn(memory).chunk(3, dim=-1)
        q, k, v = (each.view(batch, -1, self.n_head, width // self.n_head).transpose(1, 2) for each in (q, k, v))
        att = q @ k.transpose(-2, -1) * (1.0 if self.bug == "scale" else 1 / math.sqrt(k.size(-1)))
        y = att.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.c_proj((y if self.bug == "merge" else y.transpose(1, 2)).reshape(batch, length, width))


class GPTBlock(nn.Module):
    def __init__(self, n_embd, n_head, d_ff, decoder, bug):
        super().__init__()
        self.self_attn, self.ln_1 = CausalOrNot(n_embd, n_head, bug), nn.LayerNorm(n_embd)
        if decoder:
            self.cross_attn, self.ln_cross = CausalOrNot(n_embd, n_head, bug), nn.LayerNorm(n_embd)
        self.ln_ff = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, d_ff), nn.GELU(), nn.Linear(d_ff, n_embd))

    def forward(self, x, hidden, memory=None, memory_hidden=None):
        y = self.ln_1(x)
        x = x + self.self_attn(y, y, hidden)
        if memory is not None:
            x = x + self.cross_attn(self.ln_cross(x), memory, memory_hidden)
        return x + self.mlp(self.ln_ff(x))


class FusedTransformer(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, d_ff, bug=None):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.encoder, self.decoder = (
            nn.ModuleDict(
                {
                    "blocks": nn.ModuleList(GPTBlock(n_embd, n_head, d_ff, decoder, bug) for _ in range(n_layer)),
                    "ln_f": nn.LayerNorm(n_embd),
                }
            )
            for decoder in (False, True)
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.tok_emb.weight
        self.scale = n_embd**0.5

    def embed(self, ids):
        return self.tok_emb(ids) * self.scale + self.pos_emb(torch.arange(ids.size(1)))

    def forward(self, idx, targets):
        hidden = idx.eq(0)[:, None, None]
        future = torch.ones(targets.size(1), targets.size(1)).triu(1).bool()
        x, y = self.embed(idx), self.embed(targets)
        for block in self.encoder["blocks"]:
            x = block(x, hidden)
        x = self.encoder["ln_f"](x)
        for block in self.decoder["blocks"]:
            y = block(y, future, x, hidden)
        return self.lm_head(self.decoder["ln_f"](y))


# 6. A module for each head, no biases in attention, post-norm


class Head(nn.Module):
    def __init__(self, dim, size, bug):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, size, bias=False) for _ in range(3))
        self.bug = bug

    def forward(self, x, memory, visible):
        scores = self.query(x).bmm(self.key(memory).transpose(1, 2))
        scores = scores / (scores.size(-1) if self.bug == "length" else self.query.out_features) ** 0.5
        if self.bug == "width":
            scores = scores * (self.query.out_features / self.query.in_features) ** 0.5
        return scores.masked_fill(~visible, -1e9).softmax(1 if self.bug == "softmax" else 2).bmm(self.value(memory))


class Heads(nn.Module):
    def __init__(self, dim, num_heads, bug):
        super().__init__()
        self.heads = nn.ModuleList(Head(dim, dim // num_heads, bug) for _ in range(num_heads))
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, *args):
        return self.out_proj(torch.cat([head(*args) for head in self.heads], dim=-1))


class HeadwiseLayer(nn.Module):
    def __init__(self, dim, num_heads, hidden, decoder, bug):
        super().__init__()
        kinds = ("self_attn", "cross_attn") if decoder else ("self_attn",)
        self.attention = nn.ModuleDict({kind: Heads(dim, num_heads, bug) for kind in kinds})
        self.norms = nn.ModuleDict({kind: nn.LayerNorm(dim) for kind in (*kinds, "ff")})
        self.ff1, self.ff2, self.bug = nn.Linear(dim, hidden), nn.Linear(hidden, dim), bug

    def forward(self, x, visible, memory=None, memory_visible=None):
        x = self.norms["self_attn"](x + self.attention["self_attn"](x, x, visible))
        if memory is not None:
            y = self.attention["cross_attn"](x, memory, memory_visible)
            x = self.norms["cross_attn"](y if self.bug == "residual" else x + y)
        return self.norms["ff"](x + self.ff2(self.ff1(x).relu()))


class HeadwiseTransformer(nn.Module):
    def __init__(self, src_vocab, trg_vocab, dim, num_heads, depth, hidden_ff, pad_idx=0, bug=None):
        super().__init__()
        self.src_embedding, self.trg_embedding = nn.Embedding(src_vocab, dim), nn.Embedding(trg_vocab, dim)
        self.encoder_layers, self.decoder_layers = (
            nn.ModuleList(HeadwiseLayer(dim, num_heads, hidden_ff, decoder, bug) for _ in range(depth))
            for decoder in (False, True)
        )
        self.projection, self.pad_idx, self.bug = nn.Linear(dim, trg_vocab), pad_idx, bug

    def embed(self, table, ids):
        base = 1000.0 if self.bug == "base" else 10000.0
        return table(ids) * table.embedding_dim**0.5 + sinusoids(ids.size(1), table.embedding_dim, base)

    def forward(self, source, target):
        visible = source.ne(self.pad_idx)[:, None]
        x, y = self.embed(self.src_embedding, source), self.embed(self.trg_embedding, target)
        for layer in self.encoder_layers:
            x = layer(x, visible)
        for layer in self.decoder_layers:
            y = layer(y, torch.ones(1, y.size(1), y.size(1)).tril().bool(), x, visible)
        return self.projection(y)


# 7. einsum, log-probabilities, epsilon 1e-12, dictionaries of weights


class EinsumAttention(nn.Module):
    def __init__(self, d_model, h, bug):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))
        self.h, self.bug = h, bug

    def forward(self, x, memory, keep):
        q, k, v = (
            linear(y).unflatten(-1, (self.h, -1)) for linear, y in ((self.wq, x), (self.wk, memory), (self.wv, memory))
        )
        if self.bug != "scale":
            q = q / q.size(-1) ** 0.5
        scores = torch.einsum("bihd,bjhd->bhij", q, k) + (1.0 - keep.float()) * -1e9
        weights = scores.softmax(2 if self.bug == "softmax" else 3)
        return self.wo(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


class EinsumSeq2Seq(nn.Module):
    def __init__(self, source_vocab_size, target_vocab_size, d_model, h, n_layers, d_ff, bug=None):
        super().__init__()

        def layer(decoder):
            parts = {"self_attention": EinsumAttention(d_model, h, bug), "norm1": nn.LayerNorm(d_model, eps=1e-12)}
            if decoder:
                parts |= {"source_attention": EinsumAttention(d_model, h, bug)}
                parts |= {"norm2": nn.LayerNorm(d_model, eps=1e-12)}
            parts |= {"ffn1": nn.Linear(d_model, d_ff), "ffn2": nn.Linear(d_ff, d_model)}
            return nn.ModuleDict(parts | {"norm3": nn.LayerNorm(d_model, eps=1e-12)})

        self.encoder_layers, self.decoder_layers = (
            nn.ModuleList(layer(decoder) for _ in range(n_layers)) for decoder in (False, True)
        )
        self.source_embedding = nn.Embedding(source_vocab_size, d_model)
        self.target_embedding = nn.Embedding(target_vocab_size, d_model)
        self.classifier, self.bug = nn.Linear(d_model, target_vocab_size), bug

    def embed(self, table, ids):
        return table(ids) * (1 if self.bug == "embedding" else table.embedding_dim**0.5) + sinusoids(
            ids.shape[1], table.embedding_dim
        )

    def run(self, layer, x, keep, memory=None, memory_keep=None):
        x = layer["norm1"](x + layer["self_attention"](x, x, keep))
        if memory is not None:
            x = layer["norm2"](x + layer["source_attention"](x, memory, memory_keep))
        hidden = layer["ffn1"](x)
        return layer["norm3"](x + layer["ffn2"](hidden if self.bug == "activation" else torch.relu(hidden)))

    def forward(self, source_ids, target_ids):
        keep = (source_ids != 0)[:, None, None]
        x, y = self.embed(self.source_embedding, source_ids), self.embed(self.target_embedding, target_ids)
        for layer in self.encoder_layers:
            x = self.run(layer, x, keep)
        for layer in self.decoder_layers:
            y = self.run(layer, y, torch.ones(y.shape[1], y.shape[1]).tril(), x, keep)
        return self.classifier(y).log_softmax(-1)


# 8. Sequence first throughout, additive masks as arguments, a normalisation of its own with gamma and beta


class GammaBeta(nn.Module):
    def __init__(self, width, eps=1e-12, bug=None):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps, self.bug = eps, bug

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return self.gamma * (x - (0 if self.bug == "mean" else mean)) / torch.sqrt(variance + self.eps) + self.beta


class SequenceFirstAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.q_linear, self.k_linear, self.v_linear, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x, memory, added):  # (T, B, D), (S, B, D)
        (length, batch, width), size = x.shape, x.shape[2] // self.heads
        q, k, v = (
            f(y).view(y.shape[0], batch * self.heads, size).transpose(0, 1)
            for f, y in ((self.q_linear, x), (self.k_linear, memory), (self.v_linear, memory))
        )
        scores = (q @ k.transpose(1, 2) / math.sqrt(size)).view(batch, self.heads, length, -1) + added
        out = scores.softmax(-1).view(batch * self.heads, length, -1) @ v
        return self.out(out.transpose(0, 1).reshape(length, batch, width))


class SequenceFirstLayer(nn.Module):
    def __init__(self, width, heads, ffn, decoder, bug):
        super().__init__()
        self.self_attn, self.norm_1 = SequenceFirstAttention(width, heads), GammaBeta(width, bug=bug)
        if decoder:
            self.enc_attn, self.norm_2 = SequenceFirstAttention(width, heads), GammaBeta(width, bug=bug)
        self.ff = nn.Sequential(nn.Linear(width, ffn), nn.ReLU(), nn.Linear(ffn, width))
        self.norm_3, self.bug = GammaBeta(width, bug=bug), bug

    def forward(self, x, added, memory=None, memory_added=None):
        x = self.norm_1(x + self.self_attn(x, x, added))
        if memory is not None:
            x = self.norm_2(
                x
                + self.enc_attn(
                    x, x if self.bug == "memory" else memory, added if self.bug == "memory" else memory_added
                )
            )
        return x + self.norm_3(self.ff(x)) if self.bug == "outside" else self.norm_3(x + self.ff(x))


class SequenceFirst(nn.Module):
    def __init__(self, n_src_vocab, n_trg_vocab, emb_dim, n_heads, n_blocks, ffn_hidden, bug=None):
        super().__init__()
        self.src_emb, self.trg_emb = nn.Embedding(n_src_vocab, emb_dim), nn.Embedding(n_trg_vocab, emb_dim)
        self.enc_blocks, self.dec_blocks = (
            nn.ModuleList(SequenceFirstLayer(emb_dim, n_heads, ffn_hidden, decoder, bug) for _ in range(n_blocks))
            for decoder in (False, True)
        )
        self.linear = nn.Linear(emb_dim, n_trg_vocab)

    def embed(self, table, ids):
        return table(ids) * table.embedding_dim**0.5 + sinusoids(ids.shape[0], table.embedding_dim)[:, None]

    def forward(self, src, trg):  # (S, B), (T, B)
        padding = torch.zeros(src.T.shape).masked_fill(src.T == 0, -torch.inf)[:, None, None]
        causal = torch.full((trg.shape[0], trg.shape[0]), -torch.inf).triu(1)
        x, y = self.embed(self.src_emb, src), self.embed(self.trg_emb, trg)
        for block in self.enc_blocks:
            x = block(x, padding)
        for block in self.dec_blocks:
            y = block(y, causal, x, padding)
        return self.linear(y)


# 9. PyTorch's two stacks, pre-norm with final normalisations, batch first, learned positions


class StackedTransformer(nn.Module):
    def __init__(self, src_tokens, tgt_tokens, d_model, nhead, num_layers, dim_feedforward, max_len, bug=None):
        super().__init__()
        settings = {"dim_feedforward": dim_feedforward, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d_model, nhead, **settings), num_layers, nn.LayerNorm(d_model)
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(d_model, nhead, **settings), num_layers, nn.LayerNorm(d_model)
        )
        self.src_embed, self.tgt_embed = nn.Embedding(src_tokens, d_model), nn.Embedding(tgt_tokens, d_model)
        self.positions = nn.Embedding(max_len, d_model)
        self.head, self.scale, self.bug = nn.Linear(d_model, tgt_tokens), d_model**0.5, bug

    def forward(self, src, tgt):
        read = src[:, : tgt.shape[1]] if self.bug == "input" else tgt
        x, y = (
            table(ids) * self.scale + self.positions(torch.arange(ids.shape[1]))
            for table, ids in ((self.src_embed, src), (self.tgt_embed, read))
        )
        future = torch.ones(tgt.shape[1], tgt.shape[1]).triu(2 if self.bug == "ahead" else 1).bool()
        memory = self.encoder(x, src_key_padding_mask=src == 0)
        if self.bug == "embeddings":
            memory = x
        return self.head(self.decoder(y, memory, tgt_mask=future, memory_key_padding_mask=src == 0))


# 10. scaled_dot_product_attention, fused keys and values, no biases at all


class FlashAttention(nn.Module):
    def __init__(self, width, heads, bug):
        super().__init__()
        self.to_q, self.to_kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.to_out, self.heads, self.bug = nn.Linear(width, width, bias=False), heads, bug

    def forward(self, x, memory, mask):
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.to_q(x), *self.to_kv(memory).chunk(2, -1))
        )
        # True means "take part": the opposite of nn.Transformer's
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=~mask if self.bug == "inverted" else mask)
        out = out.transpose(1, 2).flatten(2)
        return out if self.bug == "not projected" else self.to_out(out)


class FlashLayer(nn.Module):
    def __init__(self, width, heads, ffn, decoder, bug):
        super().__init__()
        self.self_attn, self.norm_self = FlashAttention(width, heads, None), nn.LayerNorm(width, bias=False)
        if bug == "not projected":
            self.self_attn.bug = bug
        if decoder:
            self.cross_attn, self.norm_cross = FlashAttention(width, heads, bug), nn.LayerNorm(width, bias=False)
        self.fc1, self.fc2 = nn.Linear(width, ffn, bias=False), nn.Linear(ffn, width, bias=False)
        self.norm_ffn = nn.LayerNorm(width, bias=False)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.norm_self(x + self.self_attn(x, x, mask))
        if memory is not None:
            x = self.norm_cross(x + self.cross_attn(x, memory, memory_mask))
        return self.norm_ffn(x + self.fc2(self.fc1(x).relu()))


class FlashTransformer(nn.Module):
    def __init__(
        self, vocab_src, vocab_tgt, hidden_size, num_attention_heads, num_hidden_layers, intermediate_size, bug=None
    ):
        super().__init__()
        layer = hidden_size, num_attention_heads, intermediate_size
        self.encoder = nn.ModuleDict({"embedding": nn.Embedding(vocab_src, hidden_size)})
        self.decoder = nn.ModuleDict({"embedding": nn.Embedding(vocab_tgt, hidden_size)})
        self.encoder["layers"] = nn.ModuleList(FlashLayer(*layer, False, bug) for _ in range(num_hidden_layers))
        self.decoder["layers"] = nn.ModuleList(FlashLayer(*layer, True, bug) for _ in range(num_hidden_layers))
        self.unembed = nn.Linear(hidden_size, vocab_tgt, bias=False)

    def embed(self, stack, ids):
        table = stack["embedding"]
        return table(ids) * math.sqrt(table.embedding_dim) + sinusoids(ids.shape[1], table.embedding_dim)

    def forward(self, input_ids, decoder_input_ids):
        mask = input_ids.ne(0)[:, None, None]
        x, y = self.embed(self.encoder, input_ids), self.embed(self.decoder, decoder_input_ids)
        for layer in self.encoder["layers"]:
            x = layer(x, mask)
        for layer in self.decoder["layers"]:
            y = layer(y, torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).tril(), x, mask)
        return self.unembed(y)


STYLES = {
    "FusedTransformer": {None: None, "merge": "heads", "scale": "attention scale"},
    "HeadwiseTransformer": {
        None: None,
        "width": "attention scale",
        "softmax": "softmax",
        "residual": "residual",
        "base": "positions",
        "length": "attention scale",
    },
    "EinsumSeq2Seq": {
        None: None,
        "scale": "attention scale",
        "softmax": "softmax",
        "embedding": "embedding scale",
        "activation": "activation",
    },
    "SequenceFirst": {None: None, "mean": "norm", "memory": "memory", "outside": "residual"},
    "StackedTransformer": {None: None, "ahead": "causal mask", "input": "inputs", "embeddings": "memory"},
    "FlashTransformer": {None: None, "inverted": "padding", "not projected": "attention output"},
}
