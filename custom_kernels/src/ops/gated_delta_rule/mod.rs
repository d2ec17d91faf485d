//! Gated delta rule. Value head `j` reads query and key head `j / Gv`, `Gv = Nv / Nk`; queries and keys are normalised
//! first, `x * rsqrt(sum(x^2) + 1e-6)`, and queries scaled by `1 / sqrt(Dk)`. Per value head, state `S` `[Dk, Dv]`:
//!
//! ```text
//! S = exp(g_t) S                     decay
//! u = beta_t (v_t - k_t^T S)         error against the decayed state
//! S = S + k_t u^T
//! o_t = q_t^T S
//! ```
//!
//! [`recurrent`] is that, step by step. [`chunked`] is equal over the reals: with `gamma_t = sum_{r<=t} g_r` inside a
//! chunk and `D[t,r] = exp(gamma_t - gamma_r)` for `r <= t`, else 0,
//!
//! ```text
//! A[t,r] = beta_t (k_t . k_r) D[t,r]              r < t
//! V'     = (I + A)^-1 (beta V - beta exp(gamma) K S)
//! o_t    = exp(gamma_t) q_t^T S + sum_{r<=t} (q_t . k_r) D[t,r] V'_r
//! S      = exp(gamma_n) S + sum_r exp(gamma_n - gamma_r) k_r V'_r^T
//! ```
//!
//! No exponential has a positive argument, so strong decay cannot overflow.

#[cfg(any(feature = "cuda", feature = "vulkan"))]
pub(crate) mod cube;
pub mod host;
pub mod precise;

use burn::tensor::Tensor;

use crate::backend::EvaluatorBackend;
use crate::ops::widen;
use crate::precision::Precision;

/// Tokens per chunk, as in the published kernels.
pub const CHUNK: usize = 64;

/// Inside the square root of the query and key norms; fixed, not the model's RMS epsilon.
pub const L2_EPSILON: f32 = 1e-6;

/// The head geometry of a Gated DeltaNet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeltaHeads {
    /// Query and key heads `Nk`.
    pub key_heads: usize,
    /// Value heads `Nv`, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Features per key head `Dk`.
    pub key_dim: usize,
    /// Features per value head `Dv`.
    pub value_dim: usize,
}

impl DeltaHeads {
    /// Channels of query, key and value together, `2 Nk Dk + Nv Dv`.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// The rule token by token; the truth the other forms are held against.
pub fn recurrent<B: EvaluatorBackend>(
    qkv: Tensor<B, 3>,
    g: Tensor<B, 3>,
    beta: Tensor<B, 3>,
    state: Tensor<B, 4>,
    heads: DeltaHeads,
    to: Precision,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let tokens = qkv.dims()[1];
    let Split { q, k, v } = split(qkv, heads);
    let (g, beta) = (per_head(g), per_head(beta));
    let mut state = widen(state);
    let mut outputs = Vec::with_capacity(tokens);
    for t in 0..tokens {
        let row = |x: &Tensor<B, 4>| x.clone().narrow(2, t, 1);
        let (q, k, v) = (row(&q), row(&k), row(&v));
        state = state * row(&g).exp();
        let u = row(&beta) * (v - k.clone().matmul(state.clone()));
        state = state + k.swap_dims(2, 3).matmul(u);
        outputs.push(q.matmul(state.clone()));
    }
    (B::round(Tensor::cat(outputs, 2).swap_dims(1, 2), to), state)
}

/// The rule in chunks of [`CHUNK`] tokens counted from the start of the pass.
pub fn chunked<B: EvaluatorBackend>(
    qkv: Tensor<B, 3>,
    g: Tensor<B, 3>,
    beta: Tensor<B, 3>,
    state: Tensor<B, 4>,
    heads: DeltaHeads,
    to: Precision,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let tokens = qkv.dims()[1];
    let Split { q, k, v } = split(qkv, heads);
    let (g, beta) = (per_head(g), per_head(beta));
    let mut state = widen(state);
    let mut outputs = Vec::with_capacity(tokens.div_ceil(CHUNK));
    for start in (0..tokens).step_by(CHUNK) {
        let rows = |x: &Tensor<B, 4>| x.clone().narrow(2, start, CHUNK.min(tokens - start));
        let (output, next) = chunk(rows(&q), rows(&k), rows(&v), rows(&g), rows(&beta), state);
        outputs.push(output);
        state = next;
    }
    (B::round(Tensor::cat(outputs, 2).swap_dims(1, 2), to), state)
}

/// One chunk: `q`, `k` `[batch, heads, n, Dk]`, `v` `[batch, heads, n, Dv]`, `g`, `beta` `[batch, heads, n, 1]`.
fn chunk<B: EvaluatorBackend>(
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    g: Tensor<B, 4>,
    beta: Tensor<B, 4>,
    state: Tensor<B, 4>,
) -> (Tensor<B, 4>, Tensor<B, 4>) {
    let n = q.dims()[2];
    let gamma = g.cumsum(2);
    let decay = lower_decay(gamma.clone());
    let strict = k.clone().matmul(k.clone().swap_dims(2, 3)) * decay.clone() * beta.clone();
    let from_state = gamma.clone().exp();

    // Forward substitution: row t needs the rows before it, which is all that `A` holds below the diagonal.
    let rhs = beta.clone() * (v - from_state.clone() * k.clone().matmul(state.clone()));
    let mut solved = rhs.clone().narrow(2, 0, 1);
    for t in 1..n {
        let weights = strict.clone().narrow(2, t, 1).narrow(3, 0, t);
        let row = rhs.clone().narrow(2, t, 1) - weights.matmul(solved.clone());
        solved = Tensor::cat(vec![solved, row], 2);
    }

    let scores = q.clone().matmul(k.clone().swap_dims(2, 3)) * decay;
    let output = from_state * q.matmul(state.clone()) + scores.matmul(solved.clone());

    let last = gamma.clone().narrow(2, n - 1, 1);
    let carried = k * (last.clone() - gamma).exp();
    let next = state * last.exp() + carried.swap_dims(2, 3).matmul(solved);
    (output, next)
}

/// `exp(gamma_t - gamma_r)` for `r <= t`, 0 above the diagonal; `gamma` `[batch, heads, n, 1]`.
fn lower_decay<B: EvaluatorBackend>(gamma: Tensor<B, 4>) -> Tensor<B, 4> {
    let [batch, heads, n, _] = gamma.dims();
    let square = [batch, heads, n, n];
    let difference = gamma.clone().expand(square) - gamma.swap_dims(2, 3).expand(square);
    let rows = Tensor::<B, 1, burn::tensor::Int>::arange(0..n as i64, &difference.device());
    let above = rows
        .clone()
        .reshape([1, 1, 1, n])
        .expand(square)
        .greater(rows.reshape([1, 1, n, 1]).expand(square));
    difference.mask_fill(above, f32::NEG_INFINITY).exp()
}

struct Split<B: EvaluatorBackend> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
}

/// Queries and keys normalised and repeated for their value heads, values as they are: `[batch, Nv, tokens, dim]` each.
fn split<B: EvaluatorBackend>(qkv: Tensor<B, 3>, heads: DeltaHeads) -> Split<B> {
    let [batch, tokens, _] = qkv.dims();
    let DeltaHeads {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
    } = heads;
    let width = key_heads * key_dim;
    let qkv = widen(qkv);
    let normalised = |start: usize| {
        let x = qkv
            .clone()
            .narrow(2, start, width)
            .reshape([batch, tokens, key_heads, key_dim]);
        let sum = (x.clone() * x.clone()).sum_dim(3);
        (x / (sum + L2_EPSILON).sqrt())
            .reshape([batch, tokens, key_heads, 1, key_dim])
            .expand([batch, tokens, key_heads, value_heads / key_heads, key_dim])
            .reshape([batch, tokens, value_heads, key_dim])
            .swap_dims(1, 2)
    };
    let scale = 1.0 / (key_dim as f64).sqrt();
    let v = qkv.clone().narrow(2, 2 * width, value_heads * value_dim);
    Split {
        q: normalised(0) * scale,
        k: normalised(width),
        v: v.reshape([batch, tokens, value_heads, value_dim]).swap_dims(1, 2),
    }
}

/// `[batch, tokens, heads]` as `[batch, heads, tokens, 1]`.
fn per_head<B: EvaluatorBackend>(x: Tensor<B, 3>) -> Tensor<B, 4> {
    widen(x).swap_dims(1, 2).unsqueeze_dim(3)
}
