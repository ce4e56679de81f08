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
        position = torch.arange(max_seq_length).unsqueeze(1)
        step = 2 if bug == "exponent" else 1
        evens = torch.arange(0, d_model, 2).float()
        div = torch.exp(evens * (-math.log(10000.0) / d_model) * step)
        sines = 1 if bug == "swapped" else 0
        pe = torch.zeros(1, max_seq_length, d_model)
        pe[..., sines::2] = torch.sin(position * div)
        pe[..., 1 - sines :: 2] = torch.cos(position * div)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[:, : x.size(1)]


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, bug=None):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.bug = bug
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        if self.bug == "split":
            return x.view(x.size(0), self.num_heads, -1, self.d_k)
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, Q, K, V, mask=None):
        Q = self.split_heads(self.W_q(Q))
        K = self.split_heads(self.W_k(K))
        V = self.split_heads(self.W_v(V))
        scales = {"scale": 1, "width": math.sqrt(self.d_k * self.num_heads)}
        scores = Q @ K.transpose(-2, -1) / scales.get(self.bug, math.sqrt(self.d_k))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, 0 if self.bug == "mask" else -1e9)
        out = torch.softmax(scores, dim=-2 if self.bug == "softmax" else -1) @ V
        if self.bug != "merge":
            out = out.transpose(1, 2)
        out = out.contiguous().view(out.size(0), -1, self.num_heads * self.d_k)
        return self.W_o(out)


def feed_forward(d_model, d_ff):
    return nn.Sequential(
        nn.Linear(d_model, d_ff),
        nn.ReLU(),
        nn.Linear(d_ff, d_model),
    )


class EncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, dropout=0.1, bug=None):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, bug)
        self.feed_forward = feed_forward(d_model, d_ff)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.bug = bug

    def forward(self, x, mask):
        x = self.norm1(x + self.dropout(self.self_attn(x, x, x, mask)))
        ff = self.dropout(self.feed_forward(x))
        return self.norm2(ff if self.bug == "residual" else x + ff)


class DecoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff, dropout=0.1, bug=None):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads, bug)
        self.cross_attn = MultiHeadAttention(d_model, num_heads, bug)
        self.feed_forward = feed_forward(d_model, d_ff)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.norm3 = nn.LayerNorm(d_model)
        self.bug = bug

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))
        keys = x if self.bug == "memory" else memory
        if self.bug in ("memory", "padding"):
            src_mask = None
        x = self.norm2(x + self.cross_attn(x, keys, keys, src_mask))
        ff = self.feed_forward(x)
        return self.norm3(ff if self.bug == "residual" else x + ff)


class Transformer(nn.Module):
    def __init__(
        self,
        src_vocab_size,
        tgt_vocab_size,
        d_model,
        num_heads,
        num_layers,
        d_ff,
        max_seq_length,
        dropout,
        bug=None,
    ):
        super().__init__()
        self.encoder_embedding = nn.Embedding(src_vocab_size, d_model)
        self.decoder_embedding = nn.Embedding(tgt_vocab_size, d_model)
        self.positional_encoding = PositionalEncoding(d_model, max_seq_length, bug)
        settings = d_model, num_heads, d_ff, dropout, bug
        encoder = EncoderLayer(*settings)
        decoder = DecoderLayer(*settings)
        copied = (lambda layer: layer) if bug == "shared" else copy.deepcopy
        self.encoder_layers = nn.ModuleList([copied(encoder) for _ in range(num_layers)])
        self.decoder_layers = nn.ModuleList([copied(decoder) for _ in range(num_layers)])
        self.fc = nn.Linear(d_model, tgt_vocab_size)
        self.bug = bug

    def forward(self, src, tgt):
        src_mask = (src != 0)[:, None, None]
        length = tgt.size(1)
        last = {"ahead": 1, "no mask": length}.get(self.bug, 0)
        causal = torch.ones(1, length, length).tril(last).bool()
        tgt_mask = (tgt != 0)[:, None, :, None] & causal
        if self.bug == "input":
            tgt = src[:, :length]
        scale = 1 if self.bug == "embedding" else math.sqrt(self.encoder_embedding.embedding_dim)
        x = self.positional_encoding(self.encoder_embedding(src) * scale)
        y = self.positional_encoding(self.decoder_embedding(tgt) * scale)
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


# The part in which each bug is, and none for right code.
CLASSES = {
    None: None,
    "exponent": "positions",
    "swapped": "positions",
    "split": "heads",
    "merge": "heads",
    "scale": "attention scale",
    "width": "attention scale",
    "mask": "mask value",
    "softmax": "softmax",
    "residual": "residual",
    "memory": "memory",
    "padding": "padding",
    "ahead": "causal mask",
    "no mask": "causal mask",
    "embedding": "embedding scale",
    "input": "inputs",
    "output": "output",
    "shared": "layers",
    "dropped mask": "masks",
}

# 2. Masks as arguments, pre-norm with an unbiased norm of its own, log-probabilities, a function that builds it


class Norm(nn.Module):
    def __init__(self, features, eps=1e-6, bug=None):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps
        self.bug = bug

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        if self.bug == "norm":
            std = std * std
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class Heads(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask):
        q, k, v = (
            linear(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        x = scores.softmax(-1) @ v
        return self.linears[3](x.transpose(1, 2).flatten(2))


class Sublayer(nn.Module):
    def __init__(self, size, bug):
        super().__init__()
        self.norm = Norm(size, bug=bug)
        self.bug = bug

    def forward(self, x, f):
        y = f(self.norm(x))
        return self.norm(x) + y if self.bug == "normed residual" else x + y


class Layer(nn.Module):
    def __init__(self, size, h, d_ff, decoder, bug):
        super().__init__()
        self.self_attn = Heads(h, size)
        if decoder:
            self.src_attn = Heads(h, size)
        self.decoder = decoder
        self.bug = bug
        self.feed_forward = nn.ModuleDict(
            {"w_1": nn.Linear(size, d_ff), "w_2": nn.Linear(d_ff, size)}
        )
        count = 3 if decoder else 2
        self.sublayer = nn.ModuleList([Sublayer(size, bug) for _ in range(count)])

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
        self.norm = Norm(size, bug=bug)
        self.bug = bug

    def forward(self, x, *masks):
        for layer in self.layers:
            x = layer(x, *masks)
        return x if self.bug == "final norm" else self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, d_model, vocab):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x):
        return self.lut(x) * math.sqrt(self.d_model)


class EncoderDecoder(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, n, d_model, d_ff, h, bug):
        super().__init__()
        self.encoder = Stack(n, d_model, h, d_ff, False, bug)
        self.decoder = Stack(n, d_model, h, d_ff, True, bug)
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
            emb_size,
            nhead,
            num_encoder_layers,
            num_decoder_layers,
            dim_feedforward,
            dropout,
        )
        self.generator = nn.Linear(emb_size, tgt_vocab_size)
        self.src_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(src_vocab_size, emb_size)})
        self.tgt_tok_emb = nn.ModuleDict({"embedding": nn.Embedding(tgt_vocab_size, emb_size)})
        self.positions = PositionalEncoding(emb_size)
        self.scale = math.sqrt(emb_size)
        self.bug = bug

    def embed(self, table, ids):
        x = (table["embedding"](ids) * self.scale).transpose(0, 1)
        return self.positions(x).transpose(0, 1)

    def forward(
        self,
        src,
        trg,
        src_mask,
        tgt_mask,
        src_padding_mask,
        tgt_padding_mask,
        memory_key_padding_mask,
    ):
        out = self.transformer(
            self.embed(self.src_tok_emb, src),
            self.embed(self.tgt_tok_emb, trg),
            src_mask,
            None if self.bug == "causal" else tgt_mask,
            None,
            src_padding_mask,
            tgt_padding_mask,
            None if self.bug == "padding" else memory_key_padding_mask,
        )
        return self.generator(out)


TORCH = {None: None, "causal": "causal mask", "padding": "padding"}

# 4. Learned positions, no biases, einsum, the order values, keys, query


class SelfAttention(nn.Module):
    def __init__(self, embed_size, heads, bug):
        super().__init__()
        self.heads = heads
        self.bug = bug
        self.values = nn.Linear(embed_size, embed_size, bias=False)
        self.keys = nn.Linear(embed_size, embed_size, bias=False)
        self.queries = nn.Linear(embed_size, embed_size, bias=False)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def split(self, x):
        return x.reshape(*x.shape[:2], self.heads, -1)

    def forward(self, values, keys, query, mask):
        v = self.split(self.values(values))
        k = self.split(self.keys(keys))
        q = self.split(self.queries(query))
        energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
        energy = energy.masked_fill(mask == 0, float("-1e20"))
        size = query.shape[-1] if self.bug == "width" else q.shape[-1]
        attention = torch.softmax(energy / size**0.5, dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, v])
        return self.fc_out(out.reshape(query.shape))


class Block(nn.Module):
    def __init__(self, embed_size, heads, forward_expansion, bug):
        super().__init__()
        self.attention = SelfAttention(embed_size, heads, bug)
        self.norm1 = nn.LayerNorm(embed_size, eps=1e-12)
        self.norm2 = nn.LayerNorm(embed_size, eps=1e-12)
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
        query = self.norm(self.self_attention(x, x, x, trg_mask) + x)
        return self.transformer_block(memory, memory, query, src_mask)


class Side(nn.Module):
    def __init__(self, vocab, embed_size, layers, heads, expansion, length, decoder, bug):
        super().__init__()
        self.word_embedding = nn.Embedding(vocab, embed_size)
        self.position_embedding = nn.Embedding(length, embed_size)
        kind = DecoderBlock if decoder else Block
        self.layers = nn.ModuleList(
            [kind(embed_size, heads, expansion, bug) for _ in range(layers)]
        )
        self.scale = 1 if bug == "embedding" else embed_size**0.5
        if decoder:
            self.fc_out = nn.Linear(embed_size, vocab)

    def embed(self, x):
        positions = self.position_embedding(torch.arange(x.shape[1]))
        return self.word_embedding(x) * self.scale + positions


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
        self.encoder = Side(src_vocab_size, *common, False, bug)
        self.decoder = Side(trg_vocab_size, *common, True, bug)
        self.src_pad_idx = src_pad_idx
        self.device = device

    def forward(self, src, trg):
        count, length = trg.shape
        src_mask = (src != self.src_pad_idx).unsqueeze(1).unsqueeze(2).to(self.device)
        trg_mask = torch.tril(torch.ones((length, length)))
        trg_mask = trg_mask.expand(count, 1, -1, -1)
        x = self.encoder.embed(src)
        y = self.decoder.embed(trg)
        for layer in self.encoder.layers:
            x = layer(x, x, x, src_mask)
        for layer in self.decoder.layers:
            y = layer(y, x, src_mask, trg_mask)
        return self.decoder.fc_out(y)


LEARNED = {None: None, "width": "attention scale", "embedding": "embedding scale"}

STYLES = {
    "Transformer": CLASSES,
    "make_model": FUNCTIONS,
    "Seq2SeqTransformer": TORCH,
    "LearnedTransformer": LEARNED,
}


# A mistake of no known kind


class Strange(Transformer):
    def __init__(self, src_vocab_size, tgt_vocab_size, d_model, num_heads, num_layers, d_ff):
        super().__init__(
            src_vocab_size, tgt_vocab_size, d_model, num_heads, num_layers, d_ff, 50, 0.0
        )
        self.encoder_layers[1].norm1.register_forward_hook(lambda _, inputs, output: output * 1.1)
