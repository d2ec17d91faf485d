#!/usr/bin/env python3
"""Values of the tiny Qwen3.8-Flash-Next (`perplexity_model::flash_next_tiny`) from NumPy alone, in float64.

    python3 scripts/flash_next_tiny.py

Three ways of evaluating it, each one line: "ideal" without roundings, "16-bit" and "4-bit" with those of the deployed engine
and its two kinds of expert products. Shown are mean negative log-likelihood and perplexity of one window, root mean squares
of the streams behind each block, and logits of the first and the last position: the values that `model/tests/flash_next.rs`
holds. The engine's delta rule has its decay and its state in float32, operation by operation; in the last line they are in
float64, and only the logarithm of the decay is rounded, once, as in this program's route `reference`.
"""

import numpy as np

IDS = [90, 63, 14, 26, 91, 95, 65, 52, 57, 28, 59, 74, 37, 55, 22, 12, 11, 2, 7, 95, 95, 16, 56, 50]
VOCABULARY, HIDDEN, LAYERS, STREAMS, RANK = 96, 32, 4, 4, 8
WIDTH = STREAMS * HIDDEN
HEADS, KV_HEADS, HEAD, ROTARY, THETA = 4, 2, 16, 8, 1e4
INDEX_HEADS, RATIO, BLOCKS = 2, 4, 2
KEY_HEADS, VALUE_HEADS, STATE = 2, 4, 8
EXPERTS, CHOSEN, INNER = 8, 3, 16
END_OF_TEXT, ROWS = 95, 4064
MULTIPLIERS = [64343153921368269, 59473814669861233, 55314113489879299]
SIZES, OFFSETS = [1009, 1013, 1019, 1021], [0, 1009, 2022, 3041]
EPSILON, WORD = 1e-6, (1 << 64) - 1
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


def words(name, count):
    """`count` 64-bit words of `name`."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 & WORD
    for i in range(count):
        v = seed + i + 0x9E3779B97F4A7C15 & WORD
        v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9 & WORD
        v = (v ^ v >> 27) * 0x94D049BB133111EB & WORD
        yield v ^ v >> 31


def nearest(x, bits):
    """`x` to so many significant bits, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def f32(x):
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def e4m3(word):
    exponent, fraction = word >> 3 & 15, word & 7
    value = np.where(exponent == 0, fraction / 512, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.where(word & 128, -value, value)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON)


class Tiny:
    def __init__(self):
        self.weights = {}

    def weight(self, name, shape, scale, base=0.0):
        if name not in self.weights:
            t = np.array([((word >> 40) - 2**23) / 2**23 for word in words(name, int(np.prod(shape)))])
            self.weights[name] = nearest(f32(base + scale * t), 8).reshape(shape)
        return self.weights[name]

    def expert(self, layer, number):
        """Values without their multiplier, the multiplier, and the scale of 4-bit inputs, of gate, up and down."""
        name = f"text/layers/{layer}/moe/experts/{number}"
        if name not in self.weights:
            self.weights[name] = []
            shapes = [("gate", INNER, HIDDEN, 2e-3), ("up", INNER, HIDDEN, 2e-3), ("down", HIDDEN, INNER, 1e-3)]
            for i, (kind, rows, columns, scale) in enumerate(shapes):
                codes = np.array([E2M1[word & 15] for word in words(f"{name}/{kind}/codes", rows * columns)])
                scales = np.array([0x30 + word % 16 for word in words(f"{name}/{kind}/scales", rows * columns // 16)])
                values = codes.reshape(rows, columns) * np.repeat(e4m3(scales).reshape(rows, -1), 16, 1)
                multiplier, scale = f32(0.05 + 0.01 * ((number + i) % 3)), f32(scale * (1 + 0.25 * (number % 4)))
                self.weights[name].append((values, multiplier, scale))
        return self.weights[name]

    def table(self):
        if "table" not in self.weights:
            codes = [word & 128 | (word >> 8) % 0x50 for word in words("ngram/table", ROWS * 12)]
            self.weights["table"] = e4m3(np.array(codes)).reshape(ROWS, 12)
        return self.weights["table"]


class Run:
    """One evaluation; `way` is "ideal", "16-bit" or "4-bit"."""

    def __init__(self, tiny, way, f64_delta=False):
        self.tiny, self.way, self.f64_delta = tiny, way, f64_delta

    def bf16(self, x):
        return x if self.way == "ideal" else nearest(x, 8)

    def f32(self, x):
        return x if self.way == "ideal" else f32(x)

    def project(self, x, name, rows, scale):
        return self.bf16(x @ self.tiny.weight(name, (rows, x.shape[-1]), scale).T)

    def read(self, name, streams, inject=True):
        weight = self.tiny.weight(f"{name}/norm", (STREAMS, HIDDEN), 0.2)
        normal = self.bf16(norm(streams.reshape(-1, STREAMS, HIDDEN)) * (1 + weight))
        flat = normal.reshape(-1, WIDTH)
        m = self.bf16(silu(self.project(flat, f"{name}/down", RANK, 0.5) / STREAMS))
        u = self.project(m, f"{name}/up", WIDTH, 0.7).reshape(normal.shape)
        x = self.bf16((sigmoid(u) * normal).mean(1))
        if not inject:
            return x, None
        return x, self.f32(2 * sigmoid(self.project(flat, f"{name}/inject", STREAMS, 0.3) / STREAMS))

    def write(self, streams, y, weights):
        return self.bf16(streams + (weights[:, :, None] * y[:, None, :]).reshape(streams.shape))

    def delta_net(self, x, name):
        tokens, keys, values = len(x), KEY_HEADS * STATE, VALUE_HEADS * STATE
        parts = [("query", keys), ("key", keys), ("value", values)]
        qkv = np.concatenate([self.project(x, f"{name}/{part}", rows, 0.25) for part, rows in parts], 1)
        z = self.project(x, f"{name}/z", values, 0.25)
        a, b = (self.project(x, f"{name}/{part}_projection", VALUE_HEADS, 0.25) for part in "ab")
        taps = self.tiny.weight(f"{name}/convolution", (4, qkv.shape[1]), 0.5)
        padded = np.concatenate([np.zeros((3, qkv.shape[1])), qkv])
        c = self.bf16(silu(sum(taps[j] * padded[j : j + tokens] for j in range(4))))
        q, k, v = (part.reshape(tokens, -1, STATE) for part in np.split(c, [keys, 2 * keys], 1))
        q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + EPSILON) for part in (q, k))
        q = q / np.sqrt(STATE)
        a_log, bias = (self.tiny.weight(f"{name}/{part}", (VALUE_HEADS,), 1.0) for part in ("a_log", "dt_bias"))
        step = (lambda x: x) if self.f64_delta else self.f32
        decay = np.exp(self.f32(-step(np.exp(a_log)) * step(np.log1p(np.exp(step(a + bias))))))
        decay, beta = step(decay), self.f32(sigmoid(b))
        out = np.zeros((tokens, VALUE_HEADS, STATE))
        for head in range(VALUE_HEADS):
            state, of = np.zeros((STATE, STATE)), head * KEY_HEADS // VALUE_HEADS
            for t in range(tokens):
                state = decay[t, head] * state
                state = step(state + np.outer(k[t, of], beta[t, head] * (v[t, head] - state.T @ k[t, of])))
                out[t, head] = state.T @ q[t, of]
        gated = norm(self.bf16(out)) * self.tiny.weight(f"{name}/norm", (STATE,), 0.2, 1.0)
        gated = self.bf16(gated * sigmoid(z.reshape(out.shape)))
        return self.project(gated.reshape(tokens, values), f"{name}/output", HIDDEN, 0.25)

    def rotated(self, x, positions):
        half = ROTARY // 2
        angles = positions[:, None] * THETA ** (-2 * np.arange(half) / ROTARY)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:ROTARY]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., ROTARY:]], -1)

    def attention(self, x, name):
        tokens, positions = len(x), np.arange(len(x))

        def heads(part, count):
            return self.project(x, f"{name}/{part}", count * HEAD, 0.25).reshape(tokens, count, HEAD)

        def normal(x, part):
            return norm(x) * (1 + self.tiny.weight(f"{name}/{part}_norm", (HEAD,), 0.2))

        q, k = (
            self.bf16(self.rotated(self.bf16(normal(heads(part, count), part)), positions))
            for part, count in (("query", HEADS), ("key", KV_HEADS))
        )
        v, gate = heads("value", KV_HEADS), heads("gate", HEADS)
        index_q = self.bf16(self.rotated(normal(heads("index_query", INDEX_HEADS), "index_query"), positions))
        index_k, count = heads("index_key", 1), tokens // RATIO
        pooled = self.bf16(index_k[: count * RATIO].reshape(count, RATIO, HEAD).mean(1))
        pooled = self.bf16(self.rotated(normal(pooled, "index_key")[:, None], RATIO * np.arange(count))[:, 0])
        out = np.zeros((tokens, HEADS, HEAD))
        for t in range(tokens):
            complete = (t + 1) // RATIO
            scores = [np.maximum(index_q[t] @ pooled[block], 0).sum() for block in range(complete)]
            chosen = sorted(sorted(range(complete), key=lambda block: (-scores[block], block))[:BLOCKS])
            seen = [RATIO * block + i for block in chosen for i in range(RATIO)] + list(range(RATIO * complete, t + 1))
            for head in range(HEADS):
                of = head * KV_HEADS // HEADS
                score = k[seen, of] @ q[t, head] / np.sqrt(HEAD)
                weight = np.exp(score - score.max())
                out[t, head] = weight / weight.sum() @ v[seen, of]
        gated = self.bf16(self.bf16(out) * sigmoid(gate)).reshape(tokens, HEADS * HEAD)
        return self.project(gated, f"{name}/output", HIDDEN, 0.25)

    def ngrams(self, streams):
        name, tokens, rows = "text/layers/1/ple", len(IDS), []
        for p in range(tokens):
            context = [IDS[p]]
            for back in (1, 2):
                cut = p < back or END_OF_TEXT in IDS[p - back : p]
                context.append(END_OF_TEXT if cut else IDS[p - back])
            for head in range(4):
                mixed = 0
                for i in range(2 + head // 2):
                    mixed ^= context[i] * MULTIPLIERS[i]
                rows.append(mixed % SIZES[head] + OFFSETS[head])
        e = self.bf16(self.tiny.table()[rows] * 0.125).reshape(tokens, 48)
        key = self.project(e, f"{name}/key_projection", WIDTH, 0.25).reshape(tokens, STREAMS, HIDDEN)
        value = self.project(e, f"{name}/value_projection", HIDDEN, 0.25)

        def normal(x, part):
            return norm(x) * (1 + self.tiny.weight(f"{name}/{part}_norm", (STREAMS, HIDDEN), 0.2))

        a = (normal(key, "key") * normal(streams.reshape(key.shape), "query")).sum(-1) / np.sqrt(HIDDEN)
        a = np.sign(a) * np.sqrt(np.maximum(np.abs(a), 1e-6))
        gated = self.bf16(sigmoid(a)[..., None] * value[:, None])
        inputs = np.concatenate([np.zeros((9, WIDTH)), self.bf16(normal(gated, "conv")).reshape(tokens, WIDTH)])
        taps = self.tiny.weight(f"{name}/convolution", (4, WIDTH), 0.3)
        convolved = sum(taps[j] * inputs[3 * j : 3 * j + tokens] for j in range(4))
        return self.bf16(streams + gated.reshape(tokens, WIDTH) + silu(convolved))

    def four_bits(self, rows, g):
        """E2M1 codes times their E4M3FN scales, in blocks of 16."""
        blocks = rows.reshape(len(rows), -1, 16)
        largest = f32(np.abs(blocks).max(-1) / f32(6 * g))
        scale = np.where(largest < 2.0**-6, np.round(largest * 512) / 512, np.minimum(nearest(largest, 4), 448))
        scale = scale[..., None]
        v = f32(blocks / f32(np.where(scale == 0, 1, scale) * g))
        size = np.abs(v)
        code = sum((size > bound).astype(int) for bound in (0.25, 1.25, 2.5, 5))
        code = code + sum((size >= bound).astype(int) for bound in (0.75, 1.75, 3.5))
        return np.where(scale == 0, 0, np.copysign(E2M1[code], v) * scale).reshape(rows.shape)

    def product(self, rows, matrix):
        values, multiplier, g = matrix
        if self.way == "ideal":
            return rows @ (values * multiplier).T
        if self.way == "16-bit":
            return nearest(f32(f32(rows @ values.T) * multiplier), 8)
        return nearest(f32(f32(self.four_bits(rows, g) @ values.T) * f32(multiplier * g)), 8)

    def experts(self, x, layer):
        name = f"text/layers/{layer}/moe"
        logits = self.f32(x @ self.tiny.weight(f"{name}/router", (EXPERTS, HIDDEN), 0.3).T)
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :CHOSEN]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p = np.take_along_axis(self.f32(p / p.sum(1, keepdims=True)), ids, 1)
        outputs = np.zeros((len(x), CHOSEN, HIDDEN))
        for number in range(EXPERTS):
            gate, up, down = self.tiny.expert(layer, number)
            places = np.nonzero(ids == number)
            if len(places[0]):
                rows = x[places[0]]
                hidden = self.bf16(silu(self.product(rows, gate)) * self.product(rows, up))
                outputs[places] = self.product(hidden, down)
        share = sigmoid(x @ self.tiny.weight(f"{name}/shared_score", (1, HIDDEN), 0.2).T)
        gate, up = (self.project(x, f"{name}/shared/{part}", INNER, 0.25) for part in ("gate", "up"))
        shared = self.project(self.bf16(silu(gate) * up), f"{name}/shared/down", HIDDEN, 0.25)
        return self.bf16(((p / p.sum(1, keepdims=True))[..., None] * outputs).sum(1) + share * shared)

    def show(self, title):
        embedding = self.tiny.weight("text/token_embedding", (VOCABULARY, HIDDEN), 1.0)
        streams, sizes = np.tile(embedding[IDS], (1, STREAMS)), []
        for layer in range(LAYERS):
            name = f"text/layers/{layer}"
            if layer == 1:
                streams = self.ngrams(streams)
            x, weights = self.read(f"{name}/attn_hc", streams)
            y = self.attention(x, f"{name}/attention") if layer == 3 else self.delta_net(x, f"{name}/gdn")
            streams = self.write(streams, y, weights)
            x, weights = self.read(f"{name}/mlp_hc", streams)
            streams = self.write(streams, self.experts(x, layer), weights)
            sizes.append(np.sqrt((streams**2).mean()))
        hidden, _ = self.read("text/final_mixer", streams, inject=False)
        logits = hidden @ self.tiny.weight("text/output_head", (VOCABULARY, HIDDEN), 0.3).T
        shifted = logits - logits.max(1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        nll = -logprobs[np.arange(len(IDS) - 1), IDS[1:]].mean()
        digits = lambda values: " ".join(f"{value:.5f}" for value in values)
        print(f"{title:16} {nll:.7f} {np.exp(nll):.5f} | {digits(sizes)} | {digits(logits[0, :4])} | {digits(logits[-1, :4])}")


if __name__ == "__main__":
    tiny = Tiny()
    for way in ("ideal", "16-bit", "4-bit"):
        Run(tiny, way).show(way)
    Run(tiny, "4-bit", f64_delta=True).show("4-bit, f64 delta")
