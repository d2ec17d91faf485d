//! Sparse mixture of experts, `y = residual + sum_e w_e expert_e(h) + sigmoid(h shared_score^T) shared(h)` over the experts
//! that each token's router chooses.

use burn::tensor::Tensor;
use perplexity_kernels::EvaluatorBackend;
use perplexity_kernels::ops::mixture_of_experts::Mixture;

use super::Pass;
use super::loader::Loader;
use crate::config::MoeConfig;
use crate::route::Boundary;
use crate::scorer::ModelError;

/// The mixture of one block.
#[derive(Debug)]
pub struct Moe<B: EvaluatorBackend>(pub(crate) Mixture<B>);

impl<B: EvaluatorBackend> Moe<B> {
    /// Loads the parameters under `moe/`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, hidden: usize, dims: &MoeConfig) -> Result<Self, ModelError> {
        let (experts, shared) = (loader.scope("experts"), loader.scope("shared"));
        let inner = dims.shared_expert_intermediate_size;
        Ok(Self(Mixture {
            router: loader.matrix("router", [dims.num_experts, hidden])?,
            top_k: dims.num_experts_per_tok,
            experts: experts.experts(dims.num_experts, hidden, dims.moe_intermediate_size)?,
            shared_gate: shared.matrix("gate", [inner, hidden])?,
            shared_up: shared.matrix("up", [inner, hidden])?,
            shared_down: shared.matrix("down", [hidden, inner])?,
            shared_score: loader.matrix("shared_score", [1, hidden])?,
        }))
    }

    /// `residual + moe(h)`, both `[batch, tokens, hidden]`.
    pub fn forward(&self, residual: Tensor<B, 3>, h: Tensor<B, 3>, pass: &Pass<'_, B>) -> Tensor<B, 3> {
        let (y, routing) = pass
            .route
            .on(Boundary::Residual)
            .mixture_of_experts(residual, h, &self.0);
        if let Some(kept) = pass.routing {
            kept.borrow_mut().push(routing);
        }
        y
    }
}
