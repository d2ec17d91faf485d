//! The operations of a pass: which, how often, with what operands.

use burn::tensor::{Int, Tensor};
use perplexity_kernels::backend::{CodedSides, DeltaHeads, HeadRequest, RotaryTable, RowCoding};
use perplexity_kernels::ops::rotary::frequencies;
use perplexity_kernels::{EvaluatorBackend, Precision};
use perplexity_kv::basis::Basis;
use perplexity_kv::options::KvOptions;
use perplexity_kv::registry::Side;

use super::{OperationTime, PassShape, median, random, size};
use crate::config::{AttentionConfig, DeltaNetConfig, FeedForwardConfig, LayerType, MoeConfig, TextConfig};
use crate::layers::kv_cache::{decoded_precision, packed_on_devices};
use crate::layers::loader::{LoadOptions, Loader};
use crate::layers::moe::Moe;
use crate::route::{Boundary, Route};
use crate::scorer::ModelError;
use crate::source::TextSource;

/// Bytes of a weight: bfloat16, whatever it is stored as.
const WEIGHT_BYTES: usize = 2;

/// Measures the operations of one pass.
pub(super) fn measure<B: EvaluatorBackend>(
    source: &dyn TextSource,
    route: Route,
    shape: PassShape,
    kv: Option<&KvOptions>,
    device: &B::Device,
) -> Result<Vec<OperationTime>, ModelError> {
    let config = source.config();
    if config.flash_next.is_some() {
        return Err(ModelError::NotInThisBuild {
            what: "measuring the operations of Qwen3.8-Flash-Next",
        });
    }
    let load = LoadOptions::default();
    let mut bench = Bench::<B> {
        loader: Loader::new(source, &load, device),
        config,
        to: route.at(Boundary::Residual),
        shape,
        device,
        times: Vec::new(),
    };
    let head = bench
        .loader
        .matrix("output_head", [config.vocab_size, config.hidden_size])?;
    bench.embedding(&head);
    bench.norms();
    let first = |kind| config.layer_types.iter().position(|layer| *layer == kind);
    if let (Some(layer), Some(dims)) = (first(LayerType::LinearAttention), &config.delta_net) {
        bench.delta_net(layer, dims)?;
    }
    if let (Some(layer), Some(dims)) = (first(LayerType::FullAttention), &config.attention) {
        bench.attention(layer, dims, kv)?;
    }
    match &config.feed_forward {
        FeedForwardConfig::Dense { intermediate_size } => bench.feed_forward("mlp", *intermediate_size)?,
        FeedForwardConfig::Moe(dims) => bench.experts(dims)?,
    }
    bench.head(&head);
    Ok(bench.times)
}

struct Bench<'a, B: EvaluatorBackend> {
    loader: Loader<'a, B>,
    config: &'a TextConfig,
    /// Precision of results.
    to: Precision,
    shape: PassShape,
    device: &'a B::Device,
    times: Vec<OperationTime>,
}

impl<B: EvaluatorBackend> Bench<'_, B> {
    fn time(&mut self, name: &'static str, calls: usize, flops: usize, bytes: usize, run: impl FnMut()) {
        let seconds = median::<B>(self.device, run);
        self.times.push(OperationTime {
            name,
            calls,
            seconds,
            flops: flops as f64,
            bytes: bytes as f64,
        });
    }

    /// Random activations `[batch, tokens, width]`.
    fn rows(&self, width: usize) -> Tensor<B, 3> {
        random([self.shape.batch, self.shape.tokens, width], self.to, self.device)
    }

    /// Random heads `[batch, tokens, heads, width]`.
    fn heads(&self, heads: usize, width: usize) -> Tensor<B, 4> {
        random(
            [self.shape.batch, self.shape.tokens, heads, width],
            self.to,
            self.device,
        )
    }

    fn ones(&self, width: usize) -> Tensor<B, 1> {
        Tensor::ones([width], self.device)
    }

    fn layers(&self, kind: LayerType) -> usize {
        self.config.layer_types.iter().filter(|layer| **layer == kind).count()
    }

    /// `x W^T` for a weight `[out, in]`.
    fn product(&mut self, name: &'static str, calls: usize, weight: &B::Weight, [out, width]: [usize; 2]) {
        let (x, to) = (self.rows(width), self.to);
        let rows = self.shape.rows();
        let bytes = size(&x) / width * (width + out) + WEIGHT_BYTES * out * width;
        self.time(name, calls, 2 * rows * out * width, bytes, || {
            drop(B::project(x.clone(), weight, to));
        });
    }

    /// `residual + x W^T`.
    fn product_add(&mut self, name: &'static str, calls: usize, weight: &B::Weight, [out, width]: [usize; 2]) {
        let (x, residual, to) = (self.rows(width), self.rows(out), self.to);
        let rows = self.shape.rows();
        let bytes = size(&x) + 2 * size(&residual) + WEIGHT_BYTES * out * width;
        self.time(name, calls, 2 * rows * out * width, bytes, || {
            drop(B::project_add(residual.clone(), x.clone(), weight, to));
        });
    }

    fn embedding(&mut self, table: &B::Weight) {
        let ids: Vec<u32> = (0..self.shape.rows())
            .map(|at| ((at * 2_654_435_761) % self.config.vocab_size) as u32)
            .collect();
        let (batch, to) = (self.shape.batch, self.to);
        let bytes = 2 * size(&self.rows(self.config.hidden_size));
        self.time("embedding", 1, 0, bytes, || {
            drop(B::embed_tokens(table, &ids, batch, to));
        });
    }

    fn norms(&mut self) {
        let (x, weight) = (self.rows(self.config.hidden_size), self.ones(self.config.hidden_size));
        let (eps, to, calls) = (self.config.rms_norm_eps, self.to, 2 * self.config.layer_types.len());
        self.time("norm", calls, 0, 2 * size(&x), || {
            drop(B::offset_rms_norm(x.clone(), weight.clone(), eps, to));
        });
    }

    fn delta_net(&mut self, layer: usize, dims: &DeltaNetConfig) -> Result<(), ModelError> {
        let loader = self.loader.scope(&format!("layers/{layer}")).scope("gdn");
        let (hidden, keys, values) = (self.config.hidden_size, dims.key_dim(), dims.value_dim());
        let (channels, calls) = (dims.conv_dim(), self.layers(LayerType::LinearAttention));
        let (to, device) = (self.to, self.device);
        let PassShape { batch, tokens, .. } = self.shape;

        let qkv = loader.stacked(&[("query", keys), ("key", keys), ("value", values)], hidden)?;
        self.product("delta net: query, key, value", calls, &qkv, [channels, hidden]);
        let z = loader.matrix("z", [values, hidden])?;
        self.product("delta net: z", calls, &z, [values, hidden]);
        let a = loader.matrix("a_projection", [dims.num_value_heads, hidden])?;
        self.product("delta net: a, b", 2 * calls, &a, [dims.num_value_heads, hidden]);

        let x = self.rows(channels);
        let convolution = loader
            .tensor("convolution", [dims.conv_kernel_dim, channels])?
            .transpose();
        let tail = Tensor::<B, 3>::zeros([batch, dims.conv_kernel_dim - 1, channels], device);
        self.time("delta net: convolution", calls, 0, 2 * size(&x), || {
            drop(B::causal_conv_silu(x.clone(), convolution.clone(), tail.clone(), to));
        });

        let control = random::<B, 3>([batch, tokens, dims.num_value_heads], Precision::Full, device);
        let (a_log, dt_bias) = (
            loader.tensor("a_log", [dims.num_value_heads])?,
            loader.tensor("dt_bias", [dims.num_value_heads])?,
        );
        let gates = || B::delta_gates(control.clone(), control.clone(), a_log.clone(), dt_bias.clone());
        let (g, beta) = gates();
        self.time("delta net: gates", calls, 0, 4 * size(&control), || drop(gates()));

        let heads = DeltaHeads {
            key_heads: dims.num_key_heads,
            value_heads: dims.num_value_heads,
            key_dim: dims.key_head_dim,
            value_dim: dims.value_head_dim,
        };
        let state_shape = [batch, heads.value_heads, heads.key_dim, heads.value_dim];
        let state = Tensor::<B, 4>::zeros(state_shape, device);
        // Per token and value head: decay, S^T k, the outer product and S^T q over a [Dk, Dv] state.
        let flops = 7 * self.shape.rows() * values * heads.key_dim;
        let bytes = size(&x) / channels * (channels + values) + 2 * size(&control) + 2 * size(&state);
        self.time("delta net: delta rule", calls, flops, bytes, || {
            let operands = (x.clone(), g.clone(), beta.clone(), state.clone());
            drop(B::gated_delta_rule(
                operands.0, operands.1, operands.2, operands.3, heads, to,
            ));
        });

        let (o, weight) = (
            self.heads(heads.value_heads, heads.value_dim),
            loader.tensor("norm", [heads.value_dim])?,
        );
        let eps = self.config.rms_norm_eps;
        self.time("delta net: gated norm", calls, 0, 3 * size(&o), || {
            drop(B::gated_rms_norm(o.clone(), weight.clone(), o.clone(), eps, to));
        });
        let output = loader.matrix("output", [hidden, values])?;
        self.product_add("delta net: output", calls, &output, [hidden, values]);
        Ok(())
    }

    fn attention(&mut self, layer: usize, dims: &AttentionConfig, kv: Option<&KvOptions>) -> Result<(), ModelError> {
        let loader = self.loader.scope(&format!("layers/{layer}")).scope("attention");
        let &AttentionConfig {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = dims;
        let hidden = self.config.hidden_size;
        let (queries, keys) = (num_heads * head_dim, num_kv_heads * head_dim);
        let (to, device, calls) = (self.to, self.device, self.layers(LayerType::FullAttention));
        let PassShape { tokens, before, .. } = self.shape;

        let query = loader.matrix("query", [queries, hidden])?;
        self.product("attention: query, gate", 2 * calls, &query, [queries, hidden]);
        let key = loader.matrix("key", [keys, hidden])?;
        self.product("attention: key, value", 2 * calls, &key, [keys, hidden]);

        let (q, k) = (self.heads(num_heads, head_dim), self.heads(num_kv_heads, head_dim));
        let (weight, eps) = (self.ones(head_dim), self.config.rms_norm_eps);
        self.time(
            "attention: query, key norm",
            calls,
            0,
            2 * (size(&q) + size(&k)),
            || {
                drop(B::offset_rms_norm(q.clone(), weight.clone(), eps, to));
                drop(B::offset_rms_norm(k.clone(), weight.clone(), eps, to));
            },
        );
        let inverse = frequencies(f64::from(dims.rope_theta), dims.rotary_dim());
        let table = RotaryTable::<B>::new(&inverse, 1.0, before + tokens, device);
        self.time("attention: rotary", calls, 0, 2 * (size(&q) + size(&k)), || {
            drop(B::rotary(q.clone(), &table, before, to));
            drop(B::rotary(k.clone(), &table, before, to));
        });

        match kv.filter(|_| B::ON_DEVICE).and_then(|kv| packed_on_devices(kv, layer)) {
            Some(sides) => self.packed_cache(q, k, sides, calls),
            None => self.plain_cache(q, k, calls),
        }
        let o = self.rows(queries);
        self.time("attention: output gate", calls, 0, 3 * size(&o), || {
            drop(B::sigmoid_gate(o.clone(), o.clone(), to));
        });
        let output = loader.matrix("output", [hidden, queries])?;
        self.product_add("attention: output", calls, &output, [hidden, queries]);
        Ok(())
    }

    /// Products of queries with keys and of weights with values: a query at position `p` sees `p + 1` keys.
    fn attention_flops(&self, queries: usize) -> usize {
        let PassShape { batch, tokens, before } = self.shape;
        4 * batch * (tokens * before + tokens * (tokens + 1) / 2) * queries
    }

    /// A cache of rows as given and attention over it, for queries `q` and the pass's own keys `k`, values too.
    fn plain_cache(&mut self, q: Tensor<B, 4>, k: Tensor<B, 4>, calls: usize) {
        let (to, device, PassShape { batch, tokens, before }) = (self.to, self.device, self.shape);
        let ([_, _, heads, head_dim], kv_heads) = (q.dims(), k.dims()[2]);
        let cache = || random::<B, 4>([batch, kv_heads, before + tokens, head_dim], to, device);
        let (mut written, values) = (cache(), cache());
        self.time("attention: cache write", 2 * calls, 0, 2 * size(&k), || {
            // The cache is handed over and back, as a layer does, so that it is written in place.
            let held = std::mem::replace(&mut written, Tensor::zeros([1, 1, 1, 1], device));
            written = B::append_rows(held, k.clone(), before);
        });
        let (flops, bytes) = (self.attention_flops(heads * head_dim), 2 * (size(&q) + size(&values)));
        self.time("attention", calls, flops, bytes, || {
            let operands = (q.clone(), written.clone(), values.clone());
            drop(B::causal_attention(operands.0, operands.1, operands.2, before, to));
        });
    }

    /// As [`Self::plain_cache`] for a cache in codes of the formats of `sides`.
    fn packed_cache(&mut self, q: Tensor<B, 4>, k: Tensor<B, 4>, sides: [(Side, RowCoding); 2], calls: usize) {
        let (to, device, PassShape { batch, tokens, before }) = (self.to, self.device, self.shape);
        let ([_, _, heads, head_dim], kv_heads) = (q.dims(), k.dims()[2]);
        let precision = decoded_precision(to);
        let on_device = "a device of its own codes rows";
        let append = |words: Tensor<B, 4, Int>, rows: Tensor<B, 4>, at, coding| {
            B::append_coded(words, rows, at, coding).expect(on_device)
        };
        let [mut keys, mut values] = sides.map(|(_, coding)| {
            let rows = random::<B, 4>([batch, before + tokens, kv_heads, head_dim], to, device);
            let shape = [batch, kv_heads, before + tokens, coding.format.words()];
            Some(append(Tensor::zeros(shape, device), rows, 0, coding))
        });
        let row_bytes: usize = sides
            .map(|(_, coding)| coding.format.words() * size_of::<u32>())
            .iter()
            .sum();
        let written = 2 * size(&k) + batch * kv_heads * tokens * row_bytes;
        self.time("attention: cache write", calls, 0, written, || {
            for (side, (_, coding)) in [&mut keys, &mut values].into_iter().zip(sides) {
                *side = side.take().map(|words| append(words, k.clone(), before, coding));
            }
        });
        let (keys, values) = keys.zip(values).expect(on_device);
        let [key_basis, value_basis] = sides.map(|(side, _)| side.spec().basis());
        let turned = key_basis.forward_on(q.clone(), precision);
        self.time("attention: query basis", calls, 0, size(&q) + size(&turned), || {
            drop(key_basis.forward_on(q.clone(), precision));
        });
        let formats = CodedSides {
            keys: sides[0].1.format,
            values: sides[1].1.format,
            precision,
        };
        let attend = || {
            let operands = (turned.clone(), keys.clone(), values.clone());
            B::coded_attention(operands.0, operands.1, operands.2, formats, before, to).expect(on_device)
        };
        let o = attend();
        let bytes = size(&turned) + size(&o) + batch * kv_heads * (before + tokens) * row_bytes;
        self.time(
            "attention",
            calls,
            self.attention_flops(heads * head_dim),
            bytes,
            || drop(attend()),
        );
        if value_basis != Basis::Identity {
            self.time("attention: output basis", calls, 0, 2 * size(&o), || {
                drop(value_basis.inverse_on(o.clone(), to));
            });
        }
    }

    /// Router, routed experts and the shared one, in one operation.
    fn experts(&mut self, dims: &MoeConfig) -> Result<(), ModelError> {
        let loader = self.loader.scope("layers/0").scope("moe");
        let (hidden, to) = (self.config.hidden_size, self.to);
        let (rows, calls) = (self.shape.rows(), self.config.layer_types.len());
        let weights = Moe::load(&loader, hidden, dims)?.0;
        let (x, residual) = (self.rows(hidden), self.rows(hidden));
        // Every row meets the router, three matrices of each of its experts and of the shared one, and its score; every
        // expert that any row chose is read once.
        let (routed, shared) = (
            3 * dims.moe_intermediate_size * hidden,
            3 * dims.shared_expert_intermediate_size * hidden,
        );
        let once = (dims.num_experts + 1) * hidden + shared;
        let read = dims.num_experts.min(rows * dims.num_experts_per_tok);
        let flops = 2 * rows * (once + dims.num_experts_per_tok * routed);
        let bytes = 3 * size(&x) + WEIGHT_BYTES * (once + read * routed);
        self.time("mixture of experts", calls, flops, bytes, || {
            drop(B::mixture_of_experts(residual.clone(), x.clone(), &weights, to));
        });
        Ok(())
    }

    fn feed_forward(&mut self, scope: &str, inner: usize) -> Result<(), ModelError> {
        let loader = self.loader.scope("layers/0").scope(scope);
        let (hidden, to, calls) = (self.config.hidden_size, self.to, self.config.layer_types.len());
        let (gate, up) = (
            loader.matrix("gate", [inner, hidden])?,
            loader.matrix("up", [inner, hidden])?,
        );
        let x = self.rows(hidden);
        let bytes = size(&x) / hidden * (hidden + inner) + 2 * WEIGHT_BYTES * inner * hidden;
        self.time(
            "feed-forward: gate, up",
            calls,
            4 * self.shape.rows() * inner * hidden,
            bytes,
            || {
                drop(B::swiglu(x.clone(), &gate, &up, to));
            },
        );
        let down = loader.matrix("down", [hidden, inner])?;
        self.product_add("feed-forward: down", calls, &down, [hidden, inner]);
        Ok(())
    }

    /// The head over all rows of the pass, as when every position is scored.
    fn head(&mut self, head: &B::Weight) {
        let (hidden, rows, vocabulary) = (self.config.hidden_size, self.shape.rows(), self.config.vocab_size);
        let x = self.rows(hidden).reshape([rows as i32, -1]);
        let targets = vec![0; rows];
        let ask = HeadRequest {
            public_rows: vocabulary,
            targets: &targets,
            top_k: 0,
            candidates_per_row: 0,
            candidates: &[],
        };
        let to = self.to;
        let bytes = size(&x) + WEIGHT_BYTES * vocabulary * hidden;
        self.time("head", 1, 2 * rows * vocabulary * hidden, bytes, || {
            drop(B::score_head(x.clone(), head, &ask, to));
        });
    }
}
