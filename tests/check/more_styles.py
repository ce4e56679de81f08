"""Five more Transformers in the styles of tutorials, each with mistakes that `bug` plants. Written for these tests."""

import math

import torch
from torch import nn
from torch.nn import functional


def sinusoids(length, width, base=10000.0):
    frequencies = base ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)


def embedded(table, ids, base=10000.0):
    width = table.embedding_dim
    return table(ids) * width**0.5 + sinusoids(ids.shape[1], width, base)


def future(length):
    return torch.ones(length, length).triu(1).bool()


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def stacks(count, layer):
    """Layers of an encoder and of a decoder, each made by `layer(decoder)`."""
    return [nn.ModuleList(layer(decoder) for _ in range(count)) for decoder in (False, True)]


def states_of(encoder, decoder, x, y, padding, causal):
    for layer in encoder:
        x = layer(x, padding)
    for layer in decoder:
        y = layer(y, causal, x, padding)
    return y


# 5. Pre-norm with fused queries, keys and values, -inf masks, GELU, learned positions, a tied output layer


class CausalOrNot(nn.Module):
    def __init__(self, n_embd, n_head, bug):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head
        self.bug = bug

    def forward(self, x, memory, hidden):
        q, _, _ = self.c_attn(x).chunk(3, dim=-1)
        _, k, v = self.c_attn(memory).chunk(3, dim=-1)
        q, k, v = (split(each, self.n_head) for each in (q, k, v))
        scale = 1.0 if self.bug == "scale" else 1 / math.sqrt(k.size(-1))
        att = q @ k.transpose(-2, -1) * scale
        y = att.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        if self.bug != "merge":
            y = y.transpose(1, 2)
        return self.c_proj(y.reshape(x.shape))


class GPTBlock(nn.Module):
    def __init__(self, n_embd, n_head, d_ff, decoder, bug):
        super().__init__()
        self.self_attn = CausalOrNot(n_embd, n_head, bug)
        self.ln_1 = nn.LayerNorm(n_embd)
        if decoder:
            self.cross_attn = CausalOrNot(n_embd, n_head, bug)
            self.ln_cross = nn.LayerNorm(n_embd)
        self.ln_ff = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, d_ff),
            nn.GELU(),
            nn.Linear(d_ff, n_embd),
        )

    def forward(self, x, hidden, memory=None, memory_hidden=None):
        y = self.ln_1(x)
        x = x + self.self_attn(y, y, hidden)
        if memory is not None:
            x = x + self.cross_attn(self.ln_cross(x), memory, memory_hidden)
        return x + self.mlp(self.ln_ff(x))


class FusedTransformer(nn.Module):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, d_ff, bug=None):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, n_embd)
        self.pos_emb = nn.Embedding(block_size, n_embd)
        self.encoder, self.decoder = (
            nn.ModuleDict({"blocks": blocks, "ln_f": nn.LayerNorm(n_embd)})
            for blocks in stacks(
                n_layer, lambda decoder: GPTBlock(n_embd, n_head, d_ff, decoder, bug)
            )
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.tok_emb.weight
        self.scale = n_embd**0.5

    def embed(self, ids):
        positions = self.pos_emb(torch.arange(ids.size(1)))
        return self.tok_emb(ids) * self.scale + positions

    def forward(self, idx, targets):
        hidden = idx.eq(0)[:, None, None]
        causal = future(targets.size(1))
        x = self.embed(idx)
        for block in self.encoder["blocks"]:
            x = block(x, hidden)
        x = self.encoder["ln_f"](x)
        y = self.embed(targets)
        for block in self.decoder["blocks"]:
            y = block(y, causal, x, hidden)
        return self.lm_head(self.decoder["ln_f"](y))


# 6. A module for each head, no biases in attention, post-norm


class Head(nn.Module):
    def __init__(self, dim, size, bug):
        super().__init__()
        self.query = nn.Linear(dim, size, bias=False)
        self.key = nn.Linear(dim, size, bias=False)
        self.value = nn.Linear(dim, size, bias=False)
        self.bug = bug

    def forward(self, x, memory, visible):
        scores = self.query(x).bmm(self.key(memory).transpose(1, 2))
        widths = {"length": scores.size(-1), "width": self.query.in_features}
        scores = scores / widths.get(self.bug, self.query.out_features) ** 0.5
        weights = scores.masked_fill(~visible, -1e9).softmax(1 if self.bug == "softmax" else 2)
        return weights.bmm(self.value(memory))


class Heads(nn.Module):
    def __init__(self, dim, num_heads, bug):
        super().__init__()
        self.heads = nn.ModuleList(Head(dim, dim // num_heads, bug) for _ in range(num_heads))
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, *args):
        outputs = [head(*args) for head in self.heads]
        return self.out_proj(torch.cat(outputs, dim=-1))


class HeadwiseLayer(nn.Module):
    def __init__(self, dim, num_heads, hidden, decoder, bug):
        super().__init__()
        kinds = ("self_attn", "cross_attn") if decoder else ("self_attn",)
        self.attention = nn.ModuleDict({kind: Heads(dim, num_heads, bug) for kind in kinds})
        self.norms = nn.ModuleDict({kind: nn.LayerNorm(dim) for kind in (*kinds, "ff")})
        self.ff1 = nn.Linear(dim, hidden)
        self.ff2 = nn.Linear(hidden, dim)
        self.bug = bug

    def forward(self, x, visible, memory=None, memory_visible=None):
        x = self.norms["self_attn"](x + self.attention["self_attn"](x, x, visible))
        if memory is not None:
            y = self.attention["cross_attn"](x, memory, memory_visible)
            x = self.norms["cross_attn"](y if self.bug == "residual" else x + y)
        return self.norms["ff"](x + self.ff2(self.ff1(x).relu()))


class HeadwiseTransformer(nn.Module):
    def __init__(self, src_vocab, trg_vocab, dim, num_heads, depth, hidden_ff, pad_idx=0, bug=None):
        super().__init__()
        self.src_embedding = nn.Embedding(src_vocab, dim)
        self.trg_embedding = nn.Embedding(trg_vocab, dim)
        self.encoder_layers, self.decoder_layers = stacks(
            depth, lambda decoder: HeadwiseLayer(dim, num_heads, hidden_ff, decoder, bug)
        )
        self.projection = nn.Linear(dim, trg_vocab)
        self.pad_idx = pad_idx
        self.base = 1000.0 if bug == "base" else 10000.0

    def forward(self, source, target):
        visible = source.ne(self.pad_idx)[:, None]
        causal = ~future(target.size(1))
        x = embedded(self.src_embedding, source, self.base)
        y = embedded(self.trg_embedding, target, self.base)
        y = states_of(self.encoder_layers, self.decoder_layers, x, y, visible, causal)
        return self.projection(y)


# 7. Sequence first throughout, additive masks as arguments, a normalisation of its own with gamma and beta


class GammaBeta(nn.Module):
    def __init__(self, width, bug):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))
        self.eps = 1e-12
        self.bug = bug

    def forward(self, x):
        variance = x.var(-1, unbiased=False, keepdim=True)
        mean = 0 if self.bug == "mean" else x.mean(-1, keepdim=True)
        return self.gamma * (x - mean) / torch.sqrt(variance + self.eps) + self.beta


class SequenceFirstAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.q_linear = nn.Linear(width, width)
        self.k_linear = nn.Linear(width, width)
        self.v_linear = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def split(self, x):
        length, batch, width = x.shape
        return x.view(length, batch * self.heads, width // self.heads).transpose(0, 1)

    def forward(self, x, memory, added):  # (T, B, D), (S, B, D)
        length, batch, _ = x.shape
        q = self.split(self.q_linear(x))
        k = self.split(self.k_linear(memory))
        v = self.split(self.v_linear(memory))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.view(batch, self.heads, length, -1) + added
        out = scores.softmax(-1).flatten(0, 1) @ v
        return self.out(out.transpose(0, 1).reshape(x.shape))


class SequenceFirstLayer(nn.Module):
    def __init__(self, width, heads, ffn, decoder, bug):
        super().__init__()
        self.self_attn = SequenceFirstAttention(width, heads)
        self.norm_1 = GammaBeta(width, bug)
        if decoder:
            self.enc_attn = SequenceFirstAttention(width, heads)
            self.norm_2 = GammaBeta(width, bug)
        self.ff = nn.Sequential(
            nn.Linear(width, ffn),
            nn.ReLU(),
            nn.Linear(ffn, width),
        )
        self.norm_3 = GammaBeta(width, bug)
        self.bug = bug

    def forward(self, x, added, memory=None, memory_added=None):
        x = self.norm_1(x + self.self_attn(x, x, added))
        if memory is not None:
            if self.bug == "memory":
                memory = x
                memory_added = added
            x = self.norm_2(x + self.enc_attn(x, memory, memory_added))
        if self.bug == "outside":
            return x + self.norm_3(self.ff(x))
        return self.norm_3(x + self.ff(x))


class SequenceFirst(nn.Module):
    def __init__(self, n_src_vocab, n_trg_vocab, emb_dim, n_heads, n_blocks, ffn_hidden, bug=None):
        super().__init__()
        self.src_emb = nn.Embedding(n_src_vocab, emb_dim)
        self.trg_emb = nn.Embedding(n_trg_vocab, emb_dim)
        self.enc_blocks, self.dec_blocks = stacks(
            n_blocks, lambda decoder: SequenceFirstLayer(emb_dim, n_heads, ffn_hidden, decoder, bug)
        )
        self.linear = nn.Linear(emb_dim, n_trg_vocab)

    def forward(self, src, trg):  # (S, B), (T, B)
        hidden = (src.T == 0)[:, None, None]
        padding = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
        causal = torch.full((len(trg), len(trg)), -torch.inf).triu(1)
        x = embedded(self.src_emb, src.T).transpose(0, 1)
        y = embedded(self.trg_emb, trg.T).transpose(0, 1)
        y = states_of(self.enc_blocks, self.dec_blocks, x, y, padding, causal)
        return self.linear(y)


# 8. PyTorch's two stacks, pre-norm with final normalisations, batch first, learned positions


class StackedTransformer(nn.Module):
    def __init__(
        self, src_tokens, tgt_tokens, d_model, nhead, num_layers, dim_feedforward, max_len, bug=None
    ):
        super().__init__()
        settings = {
            "dim_feedforward": dim_feedforward,
            "dropout": 0.0,
            "batch_first": True,
            "norm_first": True,
        }
        layer = nn.TransformerEncoderLayer(d_model, nhead, **settings)
        self.encoder = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(d_model))
        layer = nn.TransformerDecoderLayer(d_model, nhead, **settings)
        self.decoder = nn.TransformerDecoder(layer, num_layers, nn.LayerNorm(d_model))
        self.src_embed = nn.Embedding(src_tokens, d_model)
        self.tgt_embed = nn.Embedding(tgt_tokens, d_model)
        self.positions = nn.Embedding(max_len, d_model)
        self.head = nn.Linear(d_model, tgt_tokens)
        self.scale = d_model**0.5
        self.bug = bug

    def embed(self, table, ids):
        return table(ids) * self.scale + self.positions(torch.arange(ids.shape[1]))

    def forward(self, src, tgt):
        length = tgt.shape[1]
        x = self.embed(self.src_embed, src)
        y = self.embed(self.tgt_embed, src[:, :length] if self.bug == "input" else tgt)
        future = torch.ones(length, length).triu(2 if self.bug == "ahead" else 1).bool()
        memory = self.encoder(x, src_key_padding_mask=src == 0)
        if self.bug == "embeddings":
            memory = x
        y = self.decoder(y, memory, tgt_mask=future, memory_key_padding_mask=src == 0)
        return self.head(y)


# 9. scaled_dot_product_attention, fused keys and values, no biases at all


class FlashAttention(nn.Module):
    def __init__(self, width, heads, bug):
        super().__init__()
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(width, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width, bias=False)
        self.heads = heads
        self.bug = bug

    def forward(self, x, memory, mask):
        k, v = self.to_kv(memory).chunk(2, -1)
        q, k, v = (split(each, self.heads) for each in (self.to_q(x), k, v))
        if self.bug == "inverted":  # True means "take part": the opposite of nn.Transformer's
            mask = ~mask
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.transpose(1, 2).flatten(2)
        return out if self.bug == "not projected" else self.to_out(out)


class FlashLayer(nn.Module):
    def __init__(self, width, heads, ffn, decoder, bug):
        super().__init__()
        self.self_attn = FlashAttention(width, heads, None if bug == "inverted" else bug)
        self.norm_self = nn.LayerNorm(width, bias=False)
        if decoder:
            self.cross_attn = FlashAttention(width, heads, bug)
            self.norm_cross = nn.LayerNorm(width, bias=False)
        self.fc1 = nn.Linear(width, ffn, bias=False)
        self.fc2 = nn.Linear(ffn, width, bias=False)
        self.norm_ffn = nn.LayerNorm(width, bias=False)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.norm_self(x + self.self_attn(x, x, mask))
        if memory is not None:
            x = self.norm_cross(x + self.cross_attn(x, memory, memory_mask))
        return self.norm_ffn(x + self.fc2(self.fc1(x).relu()))


class FlashTransformer(nn.Module):
    def __init__(
        self,
        vocab_src,
        vocab_tgt,
        hidden_size,
        num_attention_heads,
        num_hidden_layers,
        intermediate_size,
        bug=None,
    ):
        super().__init__()
        sizes = hidden_size, num_attention_heads, intermediate_size
        encoder, decoder = stacks(
            num_hidden_layers, lambda decoder: FlashLayer(*sizes, decoder, bug)
        )
        self.encoder = nn.ModuleDict(
            {"embedding": nn.Embedding(vocab_src, hidden_size), "layers": encoder}
        )
        self.decoder = nn.ModuleDict(
            {"embedding": nn.Embedding(vocab_tgt, hidden_size), "layers": decoder}
        )
        self.unembed = nn.Linear(hidden_size, vocab_tgt, bias=False)

    def forward(self, input_ids, decoder_input_ids):
        mask = input_ids.ne(0)[:, None, None]
        causal = ~future(decoder_input_ids.shape[1])
        x = embedded(self.encoder["embedding"], input_ids)
        y = embedded(self.decoder["embedding"], decoder_input_ids)
        y = states_of(self.encoder["layers"], self.decoder["layers"], x, y, mask, causal)
        return self.unembed(y)


STYLES = {
    "FusedTransformer": {
        None: None,
        "merge": "heads",
        "scale": "attention scale",
    },
    "HeadwiseTransformer": {
        None: None,
        "width": "attention scale",
        "softmax": "softmax",
        "residual": "residual",
        "base": "positions",
        "length": "attention scale",
    },
    "SequenceFirst": {
        None: None,
        "mean": "norm",
        "memory": "memory",
        "outside": "residual",
    },
    "StackedTransformer": {
        None: None,
        "ahead": "causal mask",
        "input": "inputs",
        "embeddings": "memory",
    },
    "FlashTransformer": {
        None: None,
        "inverted": "padding",
        "not projected": "attention output",
    },
}
