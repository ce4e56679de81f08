"""Transformers in the styles of tutorials, each with mistakes that `bug` plants. Written for these tests."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional

# 1. Batch first, masks made inside, post-norm, one class per part


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_seq_length=50, bug=None):
        super().__init__()
        pe, position = torch.zeros(max_seq_length, d_model), torch.arange(max_seq_length).unsqueeze(1)
        step = 2 if bug == "exponent" else 1
        div = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model) * step)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div), torch.cos(position * div)
        if bug == "swapped":
            pe[:, 1::2], pe[:, 0::2] = torch.sin(position * div), torch.cos(position * div)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, bug=None):
        super().__init__()
        self.num_heads, self.d_k, self.bug = num_heads, d_model // num_heads, bug
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split_heads(self, x):
        if self.bug == "split":
            return x.view(x.size(0), self.num_heads, -1, self.d_k)
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, Q, K, V, mask=None):
        Q, K, V = self.split_heads(self.W_q(Q)), self.split_heads(self.W_k(K)), self.split_heads(self.W_v(V))
        scale = {"scale": 1, "width": math.sqrt(self.d_k * self.num_heads)}.get(self.bug, math.sqrt(self.d_k))
        scores = Q @ K.transpose(-2, -1) / scale
        if mask is not None:
            scores = scores.masked_fill(mask == 0, 0 if self.bug == "mask" else -1e9)
        out = torch.softmax(scores, dim=-2 if self.bug == "softmax" else -1) @ V
        if self.bug != "merge":
            out = out.transpose(1, 2)
        return self.W_o(out.contiguous().view(out.size(0), -1, self.num_heads * self.d_k))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, dropout=0.1, bug=None):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, bug)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2, self.bug = nn.LayerNorm(d_model), nn.LayerNorm(d_model), bug
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        x = self.norm1(x + self.dropout(self.self_attn(x, x, x, mask)))
        ff = self.dropout(self.feed_forward(x))
        return self.norm2(ff if self.bug == "residual" else x + ff)


class DecoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, dropout=0.1, bug=None):
        super().__init__()
        self.self_attn, self.cross_attn = (MultiHeadAttention(d_model, num_heads, bug) for _ in range(2))
        self.feed_forward = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.bug = bug

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))
        keys = x if self.bug == "memory" else memory
        x = self.norm2(x + self.cross_attn(x, keys, keys, None if self.bug in ("memory", "padding") else src_mask))
        ff = self.feed_forward(x)
        return self.norm3(ff if self.bug == "residual" else x + ff)


class Transformer(nn.Module):
    def __init__(
        self, src_vocab_size, tgt_vocab_size, d_model, num_heads, num_layers, d_ff, max_seq_length, dropout, bug=None
    ):
        super().__init__()
        self.encoder_embedding = nn.Embedding(src_vocab_size, d_model)
        self.decoder_embedding = nn.Embedding(tgt_vocab_size, d_model)
        self.positional_encoding = PositionalEncoding(d_model, max_seq_length, bug)
        settings = d_model, num_heads, d_ff, dropout, bug
        encoder, decoder = EncoderLayer(*settings), DecoderLayer(*settings)
        copied = (lambda layer: layer) if bug == "shared" else copy.deepcopy
        self.encoder_layers = nn.ModuleList([copied(encoder) for _ in range(num_layers)])
        self.decoder_layers = nn.ModuleList([copied(decoder) for _ in range(num_layers)])
        self.fc, self.bug = nn.Linear(d_model, tgt_vocab_size), bug

    def forward(self, src, tgt):
        src_mask = (src != 0)[:, None, None]
        length = tgt.size(1)
        ahead = {"ahead": torch.tril(torch.ones(1, length, length), diagonal=1), "no mask": torch.ones(1, 1, 1)}
        tgt_mask = (tgt != 0)[:, None, :, None] & ahead.get(self.bug, torch.ones(1, length, length).tril()).bool()
        scale = 1 if self.bug == "embedding" else math.sqrt(self.encoder_embedding.embedding_dim)
        x = self.positional_encoding(self.encoder_embedding(src) * scale)
        y = self.positional_encoding(self.decoder_embedding(src[:, :length] if self.bug == "input" else tgt) * scale)
        if self.bug == "dropout":
            x = functional.dropout(x)
        if self.bug == "dropped mask":
            src_mask = self.encoder_layers[0].dropout(src_mask.float())
        for layer in self.encoder_layers:
            x = layer(x, src_mask)
        for layer in self.decoder_layers:
            y = layer(y, x, src_mask, tgt_mask)
        logits = self.fc(y)
        return logits.softmax(-1) if self.bug == "output" else logits


def by_bug(places: dict[str, list[str]]) -> dict[str | None, str | None]:
    """The part in which each bug is, and none for right code."""
    return {None: None} | {bug: place for place, bugs in places.items() for bug in bugs}


CLASSES = by_bug(
    {
        "positions": ["exponent", "swapped"],
        "heads": ["split", "merge"],
        "attention scale": ["scale", "width"],
        "mask value": ["mask"],
        "softmax": ["softmax"],
        "residual": ["residual"],
        "memory": ["memory"],
        "padding": ["padding"],
        "causal mask": ["ahead", "no mask"],
        "embedding scale": ["embedding"],
        "inputs": ["input"],
        "output": ["output"],
        "layers": ["shared"],
        "masks": ["dropped mask"],
    }
)

# 2. Masks as arguments, pre-norm with an unbiased norm of its own, log-probabilities, a function that builds it


class Norm(nn.Module):
    def __init__(self, features, eps=1e-6, bug=None):
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps, self.bug = eps, bug

    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        if self.bug == "norm":
            std = std * std
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class Heads(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.linears = h, nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask):
        n, d = query.size(0), query.size(-1)
        q, k, v = (
            linear(x).view(n, -1, self.h, d // self.h).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = (q @ k.transpose(-2, -1) / math.sqrt(d // self.h)).masked_fill(mask.unsqueeze(1) == 0, -1e9)
        return self.linears[3]((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, -1, d))


class Sublayer(nn.Module):
    def __init__(self, size, bug):
        super().__init__()
        self.norm, self.bug = Norm(size, bug=bug), bug

    def forward(self, x, f):
        return (self.norm(x) if self.bug == "normed residual" else x) + f(self.norm(x))


class Layer(nn.Module):
    def __init__(self, size, h, d_ff, decoder, bug):
        super().__init__()
        self.self_attn, self.decoder, self.bug = Heads(h, size), decoder, bug
        if decoder:
            self.src_attn = Heads(h, size)
        self.feed_forward = nn.ModuleDict({"w_1": nn.Linear(size, d_ff), "w_2": nn.Linear(d_ff, size)})
        self.sublayer = nn.ModuleList([Sublayer(size, bug) for _ in range(3 if decoder else 2)])

    def feed(self, x):
        hidden = self.feed_forward["w_1"](x)
        return self.feed_forward["w_2"](hidden if self.bug == "activation" else hidden.relu())

    def forward(self, x, mask, memory=None, src_mask=None):
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, mask))
        if self.decoder:
            x = self.sublayer[1](x, lambda y: self.src_attn(y, memory, memory, src_mask))
        return self.sublayer[-1](x, self.feed)


class Stack(nn.Module):
    def __init__(self, n, size, h, d_ff, decoder, bug):
        super().__init__()
        self.layers = nn.ModuleList([Layer(size, h, d_ff, decoder, bug) for _ in range(n)])
        self.norm, self.bug = Norm(size, bug=bug), bug

    def forward(self, x, *masks):
        for layer in self.layers:
            x = layer(x, *masks)
        return x if self.bug == "final norm" else self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, d_model, vocab):
        super().__init__()
        self.lut, self.d_model = nn.Embedding(vocab, d_model), d_model

    def forward(self, x):
        return self.lut(x) * math.sqrt(self.d_model)


class EncoderDecoder(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, n, d_model, d_ff, h, bug):
        super().__init__()
        self.encoder, self.decoder = (Stack(n, d_model, h, d_ff, decoder, bug) for decoder in (False, True))
        self.src_embed = nn.Sequential(Embeddings(d_model, src_vocab), PositionalEncoding(d_model))
        self.tgt_embed = nn.Sequential(Embeddings(d_model, tgt_vocab), PositionalEncoding(d_model))
        self.generator = nn.ModuleDict({"proj": nn.Linear(d_model, tgt_vocab)})
        self.bug = bug

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory = self.encoder(self.src_embed(src), src_mask)
        hidden = self.decoder(self.tgt_embed(tgt), tgt_mask, memory, src_mask)
        return self.generator["proj"](hidden).log_softmax(1 if self.bug == "output" else -1)


def make_model(src_vocab, tgt_vocab, N=6, d_model=512, d_ff=2048, h=8, dropout=0.1, bug=None):
    return EncoderDecoder(src_vocab, tgt_vocab, N, d_model, d_ff, h, bug)


FUNCTIONS = {
    None: None,
    "norm": "norm",
    "normed residual": "residual",
    "activation": "activation",
    "final norm": "final norm",
    "output": "output",
}

# 3. nn.Transformer, sequence first


class Seq2SeqTransformer(nn.Module):
    def __init__(
        self,
        num_encoder_layers,
        num_decoder_layers,
        emb_size,
        nhead,
        src_vocab_size,
        tgt_vocab_size,
        dim_feedforward=512,
        dropout=0.1,
        bug=None,
    ):
        super().__init__()
        self.transformer = nn.Transformer(
            emb_size, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout
        )
        self.generator = nn.Linear(emb_size, tgt_vocab_size)
        self.src_tok_emb, self.tgt_tok_emb = (
            nn.ModuleDict({"embedding": nn.Embedding(size, emb_size)}) for size in (src_vocab_size, tgt_vocab_size)
        )
        self.positions, self.scale, self.bug = PositionalEncoding(emb_size), math.sqrt(emb_size), bug

    def embed(self, table, ids):
        return self.positions((table["embedding"](ids) * self.scale).transpose(0, 1)).transpose(0, 1)

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, memory_key_padding_mask):
        x, y = self.embed(self.src_tok_emb, src), self.embed(self.tgt_tok_emb, trg)
        if self.bug == "causal":
            tgt_mask = None
        memory = None if self.bug == "padding" else memory_key_padding_mask
        out = self.transformer(x, y, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, memory)
        return self.generator(out)


TORCH = {None: None, "causal": "causal mask", "padding": "padding"}

# 4. Learned positions, no biases, einsum, the order values, keys, query


class SelfAttention(nn.Module):
    def __init__(self, embed_size, heads, bug):
        super().__init__()
        self.heads, self.bug = heads, bug
        self.values, self.keys, self.queries = (nn.Linear(embed_size, embed_size, bias=False) for _ in range(3))
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask):
        n, width = query.shape[0], query.shape[-1]
        v, k, q = (
            f(x).reshape(n, x.shape[1], self.heads, -1)
            for f, x in ((self.values, values), (self.keys, keys), (self.queries, query))
        )
        energy = torch.einsum("nqhd,nkhd->nhqk", [q, k]).masked_fill(mask == 0, float("-1e20"))
        size = width if self.bug == "width" else width // self.heads
        attention = torch.softmax(energy / size**0.5, dim=3)
        return self.fc_out(torch.einsum("nhql,nlhd->nqhd", [attention, v]).reshape(n, -1, width))


class Block(nn.Module):
    def __init__(self, embed_size, heads, forward_expansion, bug):
        super().__init__()
        self.attention = SelfAttention(embed_size, heads, bug)
        self.norm1, self.norm2 = nn.LayerNorm(embed_size, eps=1e-12), nn.LayerNorm(embed_size, eps=1e-12)
        self.feed_forward = nn.Sequential(
            nn.Linear(embed_size, forward_expansion * embed_size),
            nn.GELU(),
            nn.Linear(forward_expansion * embed_size, embed_size),
        )

    def forward(self, value, key, query, mask):
        x = self.norm1(self.attention(value, key, query, mask) + query)
        return self.norm2(self.feed_forward(x) + x)


class DecoderBlock(nn.Module):
    def __init__(self, embed_size, heads, forward_expansion, bug):
        super().__init__()
        self.norm = nn.LayerNorm(embed_size, eps=1e-12)
        self.self_attention = SelfAttention(embed_size, heads, bug)
        self.transformer_block = Block(embed_size, heads, forward_expansion, bug)

    def forward(self, x, memory, src_mask, trg_mask):
        return self.transformer_block(memory, memory, self.norm(self.self_attention(x, x, x, trg_mask) + x), src_mask)


class Side(nn.Module):
    def __init__(self, vocab, embed_size, layers, heads, expansion, length, decoder, bug):
        super().__init__()
        self.word_embedding, self.position_embedding = (
            nn.Embedding(vocab, embed_size),
            nn.Embedding(length, embed_size),
        )
        kind = DecoderBlock if decoder else Block
        self.layers = nn.ModuleList([kind(embed_size, heads, expansion, bug) for _ in range(layers)])
        self.scale = 1 if bug == "embedding" else embed_size**0.5
        if decoder:
            self.fc_out = nn.Linear(embed_size, vocab)

    def embed(self, x):
        return self.word_embedding(x) * self.scale + self.position_embedding(torch.arange(x.shape[1]))


class LearnedTransformer(nn.Module):
    def __init__(
        self,
        src_vocab_size,
        trg_vocab_size,
        src_pad_idx,
        trg_pad_idx,
        embed_size=256,
        num_layers=6,
        forward_expansion=4,
        heads=8,
        dropout=0,
        device="cuda",
        max_length=100,
        bug=None,
    ):
        super().__init__()
        common = embed_size, num_layers, heads, forward_expansion, max_length
        self.encoder, self.decoder = (
            Side(src_vocab_size, *common, False, bug),
            Side(trg_vocab_size, *common, True, bug),
        )
        self.src_pad_idx, self.device = src_pad_idx, device

    def forward(self, src, trg):
        src_mask = (src != self.src_pad_idx).unsqueeze(1).unsqueeze(2).to(self.device)
        trg_mask = torch.tril(torch.ones((trg.shape[1], trg.shape[1]))).expand(trg.shape[0], 1, -1, -1)
        x, y = self.encoder.embed(src), self.decoder.embed(trg)
        for layer in self.encoder.layers:
            x = layer(x, x, x, src_mask)
        for layer in self.decoder.layers:
            y = layer(y, x, src_mask, trg_mask)
        return self.decoder.fc_out(y)


LEARNED = {None: None, "width": "attention scale", "embedding": "embedding scale"}

STYLES = {"Transformer": CLASSES, "make_model": FUNCTIONS, "Seq2SeqTransformer": TORCH, "LearnedTransformer": LEARNED}


# A mistake of no known kind


class Strange(Transformer):
    def __init__(self, src_vocab_size, tgt_vocab_size, d_model, num_heads, num_layers, d_ff):
        super().__init__(src_vocab_size, tgt_vocab_size, d_model, num_heads, num_layers, d_ff, 50, 0.0)
        self.encoder_layers[1].norm1.register_forward_hook(lambda _, inputs, output: output * 1.1)
