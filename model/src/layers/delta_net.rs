//! Gated DeltaNet:
//!
//! ```text
//! qkv = SiLU(convolution(h qkv^T));  z = h z^T;  g, beta = gates(row ab^T)
//! y = residual + gated_norm(delta_rule(qkv, g, beta), z) output^T
//! ```
//!
//! Qwen3.8-Flash-Next gates with a sigmoid and rounds the controls like the other projections.
//!
//! `row` is the normalised input before the rounding that gives `h`: the controls are computed from it unrounded.

use burn::tensor::Tensor;
use perplexity_kernels::backend::DeltaHeads;
use perplexity_kernels::{EvaluatorBackend, Precision};

use super::Pass;
use super::linear::Linear;
use super::loader::Loader;
use crate::config::{DeltaNetConfig, OutputGate, TextConfig};
use crate::route::Boundary;
use crate::scorer::ModelError;

/// Tokens after which a narrow state is rounded: the chunk of the chunked rule, which every pass is a multiple of.
const STATE_BLOCK: usize = 64;

/// One Gated DeltaNet layer.
#[derive(Debug)]
pub struct DeltaNet<B: EvaluatorBackend> {
    /// Query, key and value rows, `[C, hidden]` together; one projection unless they see their input differently.
    qkv: Vec<Linear<B>>,
    z: Linear<B>,
    a: B::Weight,
    b: B::Weight,
    a_log: Tensor<B, 1>,
    dt_bias: Tensor<B, 1>,
    /// `[C, W]`.
    convolution: Tensor<B, 2>,
    norm: Tensor<B, 1>,
    output: Linear<B>,
    heads: DeltaHeads,
    output_gate: OutputGate,
    /// Where the controls exist: unrounded, or like the other projections.
    control: Boundary,
    eps: f32,
}

/// What a window carries from pass to pass.
#[derive(Debug)]
pub struct DeltaNetState<B: EvaluatorBackend> {
    /// The last `W - 1` inputs of the convolution, `[batch, W - 1, C]`.
    tail: Tensor<B, 3>,
    /// `[batch, Nv, Dk, Dv]`; float32 tensors whatever [`Pass::delta_state`] lets them hold.
    state: Tensor<B, 4>,
}

impl<B: EvaluatorBackend> DeltaNet<B> {
    /// Loads the parameters under `gdn/`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, config: &TextConfig, dims: &DeltaNetConfig) -> Result<Self, ModelError> {
        let (hidden, keys, values) = (config.hidden_size, dims.key_dim(), dims.value_dim());
        let value_heads = dims.num_value_heads;
        let (output_gate, control) = match &config.flash_next {
            Some(flash_next) => (flash_next.output_gate, Boundary::DeltaNetProjection),
            None => (OutputGate::Silu, Boundary::DeltaNetControl),
        };
        Ok(Self {
            qkv: loader.stacked_linear(&[("query", keys), ("key", keys), ("value", values)], hidden)?,
            z: loader.linear("z", [values, hidden])?,
            a: loader.unrounded().matrix("a_projection", [value_heads, hidden])?,
            b: loader.unrounded().matrix("b_projection", [value_heads, hidden])?,
            a_log: loader.tensor("a_log", [value_heads])?,
            dt_bias: loader.tensor("dt_bias", [value_heads])?,
            convolution: loader
                .tensor("convolution", [dims.conv_kernel_dim, dims.conv_dim()])?
                .transpose(),
            norm: loader.tensor("norm", [dims.value_head_dim])?,
            output: loader.linear("output", [hidden, values])?,
            heads: DeltaHeads {
                key_heads: dims.num_key_heads,
                value_heads,
                key_dim: dims.key_head_dim,
                value_dim: dims.value_head_dim,
            },
            output_gate,
            control,
            eps: config.rms_norm_eps,
        })
    }

    /// The state at the start of `batch` windows: all zeros.
    pub fn state(&self, batch: usize, device: &B::Device) -> DeltaNetState<B> {
        let DeltaHeads {
            value_heads,
            key_dim,
            value_dim,
            ..
        } = self.heads;
        let [channels, width] = self.convolution.dims();
        DeltaNetState {
            tail: Tensor::zeros([batch, width - 1, channels], device),
            state: Tensor::zeros([batch, value_heads, key_dim, value_dim], device),
        }
    }

    /// `residual + delta_net(h)`, both `[batch, tokens, hidden]`; `row` is `h` as it exists at
    /// [`Boundary::DeltaNetControl`].
    pub fn forward(
        &self,
        residual: Tensor<B, 3>,
        h: Tensor<B, 3>,
        row: Tensor<B, 3>,
        carried: &mut DeltaNetState<B>,
        pass: &Pass<'_, B>,
    ) -> Tensor<B, 3> {
        let o = self.heads(h, row, carried, pass);
        self.output.forward_add(residual, o, pass.route.on(Boundary::Residual))
    }

    /// `delta_net(row)` without a residual.
    pub fn output(&self, row: Tensor<B, 3>, carried: &mut DeltaNetState<B>, pass: &Pass<'_, B>) -> Tensor<B, 3> {
        let h = pass.route.round(Boundary::Norm, row.clone());
        let o = self.heads(h, row, carried, pass);
        self.output.forward(o, pass.route.on(Boundary::Residual))
    }

    /// The gated outputs of all value heads side by side, `[batch, tokens, Nv * Dv]`.
    fn heads(
        &self,
        h: Tensor<B, 3>,
        row: Tensor<B, 3>,
        carried: &mut DeltaNetState<B>,
        pass: &Pass<'_, B>,
    ) -> Tensor<B, 3> {
        let route = pass.route;
        let [batch, tokens, _] = row.dims();
        let control = |weight: &B::Weight| route.on(self.control).project(row.clone(), weight);
        let (g, beta) = route.on(self.control).delta_gates(
            control(&self.a),
            control(&self.b),
            self.a_log.clone(),
            self.dt_bias.clone(),
        );

        let project = |linear: &Linear<B>| linear.forward(h.clone(), route.on(Boundary::DeltaNetProjection));
        let qkv = route.on(Boundary::Convolution).causal_conv_silu(
            match &*self.qkv {
                [qkv] => project(qkv),
                parts => Tensor::cat(parts.iter().map(project).collect(), 2),
            },
            self.convolution.clone(),
            carried.tail.clone(),
        );
        let o = self.delta_rule(qkv.0, g, beta, carried.state.clone(), pass);
        *carried = DeltaNetState {
            tail: qkv.1,
            state: o.1,
        };

        let DeltaHeads {
            value_heads, value_dim, ..
        } = self.heads;
        let z = project(&self.z).reshape([batch, tokens, value_heads, value_dim]);
        let (norm, how) = (self.norm.clone(), route.on(Boundary::GatedNorm));
        let o = match self.output_gate {
            OutputGate::Silu => how.gated_rms_norm(o.0, norm, z, self.eps),
            OutputGate::Sigmoid => how.sigmoid_gated_rms_norm(o.0, norm, z, self.eps),
        };
        o.reshape([batch, tokens, value_heads * value_dim])
    }

    /// The delta rule over a pass; a state that is not stored in float32 is rounded whenever it has seen a multiple of
    /// [`STATE_BLOCK`] tokens of its window, so that its bits do not depend on the passes.
    fn delta_rule(
        &self,
        qkv: Tensor<B, 3>,
        g: Tensor<B, 3>,
        beta: Tensor<B, 3>,
        mut state: Tensor<B, 4>,
        pass: &Pass<'_, B>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let how = pass.route.on(Boundary::DeltaRule);
        if pass.delta_state == Precision::Full {
            return how.gated_delta_rule(qkv, g, beta, state, self.heads);
        }
        let [_, tokens, _] = qkv.dims();
        let (mut outputs, mut begin) = (Vec::new(), 0);
        while begin < tokens {
            let left = STATE_BLOCK - (pass.first_position + begin) % STATE_BLOCK;
            let count = left.min(tokens - begin);
            let block = |x: &Tensor<B, 3>| x.clone().narrow(1, begin, count);
            let output;
            (output, state) = how.gated_delta_rule(block(&qkv), block(&g), block(&beta), state, self.heads);
            outputs.push(output);
            if count == left {
                state = B::round(state, pass.delta_state);
            }
            begin += count;
        }
        (Tensor::cat(outputs, 1), state)
    }
}
