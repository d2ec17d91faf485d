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
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::backend::DeltaHeads;

use super::Pass;
use super::loader::Loader;
use crate::config::{DeltaNetConfig, OutputGate, TextConfig};
use crate::route::Boundary;
use crate::scorer::ModelError;

/// One Gated DeltaNet layer.
#[derive(Debug)]
pub struct DeltaNet<B: EvaluatorBackend> {
    /// Query, key and value rows, `[C, hidden]`.
    qkv: B::Weight,
    z: B::Weight,
    a: B::Weight,
    b: B::Weight,
    a_log: Tensor<B, 1>,
    dt_bias: Tensor<B, 1>,
    /// `[C, W]`.
    convolution: Tensor<B, 2>,
    norm: Tensor<B, 1>,
    output: B::Weight,
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
    /// `[batch, Nv, Dk, Dv]`, float32.
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
            qkv: loader.stacked(&[("query", keys), ("key", keys), ("value", values)], hidden)?,
            z: loader.matrix("z", [values, hidden])?,
            a: loader.matrix("a_projection", [value_heads, hidden])?,
            b: loader.matrix("b_projection", [value_heads, hidden])?,
            a_log: loader.tensor("a_log", [value_heads])?,
            dt_bias: loader.tensor("dt_bias", [value_heads])?,
            convolution: loader
                .tensor("convolution", [dims.conv_kernel_dim, dims.conv_dim()])?
                .transpose(),
            norm: loader.tensor("norm", [dims.value_head_dim])?,
            output: loader.matrix("output", [hidden, values])?,
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

    /// `residual + delta_net(row)`, both `[batch, tokens, hidden]`; `row` as it exists at [`Boundary::DeltaNetControl`].
    pub fn forward(
        &self,
        residual: Tensor<B, 3>,
        row: Tensor<B, 3>,
        carried: &mut DeltaNetState<B>,
        pass: &Pass<'_, B>,
    ) -> Tensor<B, 3> {
        let o = self.heads(row, carried, pass);
        B::project_add(residual, o, &self.output, pass.route.at(Boundary::Residual))
    }

    /// `delta_net(row)` without a residual.
    pub fn output(&self, row: Tensor<B, 3>, carried: &mut DeltaNetState<B>, pass: &Pass<'_, B>) -> Tensor<B, 3> {
        let o = self.heads(row, carried, pass);
        B::project(o, &self.output, pass.route.at(Boundary::Residual))
    }

    /// The gated outputs of all value heads side by side, `[batch, tokens, Nv * Dv]`.
    fn heads(&self, row: Tensor<B, 3>, carried: &mut DeltaNetState<B>, pass: &Pass<'_, B>) -> Tensor<B, 3> {
        let route = pass.route;
        let [batch, tokens, _] = row.dims();
        let control = |weight: &B::Weight| B::project(row.clone(), weight, route.at(self.control));
        let (g, beta) = B::delta_gates(
            control(&self.a),
            control(&self.b),
            self.a_log.clone(),
            self.dt_bias.clone(),
        );

        let h = route.round(Boundary::Norm, row);
        let project = |weight: &B::Weight| B::project(h.clone(), weight, route.at(Boundary::DeltaNetProjection));
        let qkv = B::causal_conv_silu(
            project(&self.qkv),
            self.convolution.clone(),
            carried.tail.clone(),
            route.at(Boundary::Convolution),
        );
        let o = B::gated_delta_rule(
            qkv.0,
            g,
            beta,
            carried.state.clone(),
            self.heads,
            route.at(Boundary::DeltaRule),
        );
        *carried = DeltaNetState {
            tail: qkv.1,
            state: o.1,
        };

        let DeltaHeads {
            value_heads, value_dim, ..
        } = self.heads;
        let z = project(&self.z).reshape([batch, tokens, value_heads, value_dim]);
        let (norm, to) = (self.norm.clone(), route.at(Boundary::GatedNorm));
        let o = match self.output_gate {
            OutputGate::Silu => B::gated_rms_norm(o.0, norm, z, self.eps, to),
            OutputGate::Sigmoid => B::sigmoid_gated_rms_norm(o.0, norm, z, self.eps, to),
        };
        o.reshape([batch, tokens, value_heads * value_dim])
    }
}
