//! The mixture of experts of Qwen3.8-Flash-Next: every row's `k` best routed experts and one shared expert,
//!
//! ```text
//! p = softmax(x router^T);  e_1, .., e_k = the k largest p, of equal ones the lower id first;  w_i = p_i / sum_j p_j
//! y = sum_i w_i expert_{e_i}(x) + sigmoid(x shared_score^T) shared(x)
//! expert(x) = (SiLU(x gate^T) * (x up^T)) down^T
//! ```
//!
//! summed in float32 in the order of the ranks. Gate, up, their product and the outputs exist at the boundaries, unlike in
//! the family's other mixtures. Rows are gathered expert by expert on the host, which skips experts that no row chose.

use std::collections::BTreeMap;

use burn::tensor::{Tensor, TensorData};
use perplexity_kernels::{EvaluatorBackend, Precision};
use rayon::prelude::*;

use super::Pass;
use super::loader::Loader;
use crate::config::{FeedForwardConfig, MoeConfig, TextConfig};
use crate::experts::arithmetic::silu;
use crate::experts::{CacheStatistics, ExpertBank, ExpertStore};
use crate::formats::nvfp4_expert::Projection;
use crate::route::Boundary;
use crate::scorer::ModelError;
use crate::source::SourceError;

/// Tokens whose routed outputs are held at a time: at a width of 2,560 and ten experts 400 MiB.
const TILE: usize = 4096;

/// One block's experts.
#[derive(Debug)]
pub struct ExpertMixture<B: EvaluatorBackend> {
    router: B::Weight,
    top_k: usize,
    experts: Experts<B>,
    shared_score: B::Weight,
    shared: Matrices<B>,
}

/// The routed experts.
#[allow(clippy::large_enum_variant, reason = "one per block")]
#[derive(Debug)]
pub enum Experts<B: EvaluatorBackend> {
    /// Decoded weights.
    Decoded(Vec<Matrices<B>>),
    /// Packed ones, multiplied exactly.
    Packed {
        /// Where they are.
        store: ExpertStore,
        /// Whether their activations are rounded to 4 bits.
        four_bit: bool,
    },
}

/// Gate and up `[inner, hidden]`, down `[hidden, inner]`.
#[derive(Debug)]
pub struct Matrices<B: EvaluatorBackend> {
    gate: B::Weight,
    up: B::Weight,
    down: B::Weight,
    inner: usize,
}

/// What rows chose: `top_k` ids and weights per row, best first.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Choice {
    /// Expert ids.
    pub ids: Vec<u32>,
    /// Their weights; a row's sum to 1.
    pub weights: Vec<f32>,
}

impl<B: EvaluatorBackend> Matrices<B> {
    /// Loads `gate`, `up` and `down`.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, hidden: usize, inner: usize) -> Result<Self, ModelError> {
        Ok(Self {
            gate: loader.matrix("gate", [inner, hidden])?,
            up: loader.matrix("up", [inner, hidden])?,
            down: loader.matrix("down", [hidden, inner])?,
            inner,
        })
    }

    /// Those of expert `expert` of a bank, decoded.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub fn unpacked(bank: &ExpertBank, expert: usize, loader: &Loader<'_, B>) -> Result<Self, ModelError> {
        let matrix = |projection| -> Result<_, ModelError> {
            let (rows, columns) = bank.geometry().matrix(projection);
            let values = bank.load(expert, projection).map_err(SourceError::from)?;
            Ok(loader.weight(values, [rows, columns]))
        };
        Ok(Self {
            gate: matrix(Projection::Gate)?,
            up: matrix(Projection::Up)?,
            down: matrix(Projection::Down)?,
            inner: bank.geometry().inner,
        })
    }

    /// The expert's outputs for `x` `[1, rows, hidden]`, every product and the activation rounded to `to`.
    fn forward(&self, x: Tensor<B, 3>, to: Precision) -> Vec<f32> {
        let device = x.device();
        let (gate, up) = (
            host(B::project(x.clone(), &self.gate, to)),
            host(B::project(x, &self.up, to)),
        );
        let product = gate.iter().zip(&up).map(|(g, u)| silu(*g) * u).collect();
        let product = B::round(tensor::<B>(product, self.inner, &device), to);
        host(B::project(product, &self.down, to))
    }
}

impl<B: EvaluatorBackend> ExpertMixture<B> {
    /// Loads the parameters under `moe/` but the routed experts, which are given.
    ///
    /// # Errors
    /// When the source cannot provide one.
    pub fn load(loader: &Loader<'_, B>, config: &TextConfig, experts: Experts<B>) -> Result<Self, ModelError> {
        let FeedForwardConfig::Moe(MoeConfig {
            num_experts,
            num_experts_per_tok,
            shared_expert_intermediate_size,
            ..
        }) = config.feed_forward
        else {
            return Err(ModelError::NotInThisBuild {
                what: "a dense feed-forward between hyper-connections",
            });
        };
        let hidden = config.hidden_size;
        Ok(Self {
            router: loader.matrix("router", [num_experts, hidden])?,
            top_k: num_experts_per_tok,
            experts,
            shared_score: loader.matrix("shared_score", [1, hidden])?,
            shared: Matrices::load(&loader.scope("shared"), hidden, shared_expert_intermediate_size)?,
        })
    }

    /// How often packed experts were ready; nothing for decoded ones.
    pub fn cache_statistics(&self) -> CacheStatistics {
        match &self.experts {
            Experts::Decoded(_) => CacheStatistics::default(),
            Experts::Packed { store, .. } => store.statistics(),
        }
    }

    /// `mixture(x)`, both `[batch, tokens, hidden]`; `observe` sees what every row chose.
    ///
    /// # Errors
    /// When a packed expert cannot be read.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        pass: &Pass<'_, B>,
        observe: &mut dyn FnMut(&Choice),
    ) -> Result<Tensor<B, 3>, ModelError> {
        let ([batch, tokens, hidden], device) = (x.dims(), x.device());
        let to = pass.route.at(Boundary::FeedForward);
        let choice = self.choose(x.clone());
        observe(&choice);
        let shares = host(B::project(x.clone(), &self.shared_score, Precision::Full));
        let shared = self.shared.forward(x.clone().reshape([1, batch * tokens, hidden]), to);
        let x = host(x);
        let mut y = vec![0.0; x.len()];
        for first in (0..batch * tokens).step_by(TILE) {
            let count = TILE.min(batch * tokens - first);
            let (rows, chosen) = (first * hidden..(first + count) * hidden, first * self.top_k);
            let choice = Choice {
                ids: choice.ids[chosen..][..count * self.top_k].to_vec(),
                weights: choice.weights[chosen..][..count * self.top_k].to_vec(),
            };
            let routed = self.routed(&x[rows.clone()], &choice, hidden, to, &device)?;
            y[rows.clone()]
                .par_chunks_mut(hidden)
                .zip(routed.par_chunks(self.top_k * hidden))
                .zip(choice.weights.par_chunks(self.top_k))
                .zip(shared[rows].par_chunks(hidden).zip(&shares[first..first + count]))
                .for_each(|(((y, routed), weights), (shared, share))| {
                    for (output, weight) in routed.chunks_exact(hidden).zip(weights) {
                        y.iter_mut().zip(output).for_each(|(y, output)| *y += weight * output);
                    }
                    let share = 1.0 / (1.0 + (-share).exp());
                    y.iter_mut().zip(shared).for_each(|(y, shared)| *y += share * shared);
                });
        }
        let y = tensor::<B>(y, hidden, &device).reshape([batch, tokens, hidden]);
        Ok(B::round(y, pass.route.at(Boundary::Residual)))
    }

    fn choose(&self, x: Tensor<B, 3>) -> Choice {
        let routing = B::route_experts(x, &self.router, self.top_k);
        Choice {
            ids: routing.experts.into_data().iter::<u32>().collect(),
            weights: routing.weights.into_data().iter::<f32>().collect(),
        }
    }

    /// The outputs `[rows, top_k, hidden]` of the experts that the rows `x` chose.
    fn routed(
        &self,
        x: &[f32],
        choice: &Choice,
        hidden: usize,
        to: Precision,
        device: &B::Device,
    ) -> Result<Vec<f32>, ModelError> {
        // Places in `[rows, top_k]` by expert, in ascending id.
        let mut places: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (place, id) in choice.ids.iter().enumerate() {
            places.entry(*id as usize).or_default().push(place);
        }
        let places: Vec<(usize, Vec<usize>)> = places.into_iter().collect();
        let gather = |places: &[usize]| -> Vec<f32> {
            let rows = places.iter().map(|place| place / self.top_k);
            rows.flat_map(|row| &x[row * hidden..(row + 1) * hidden])
                .copied()
                .collect()
        };
        let mut routed = vec![0.0; x.len() * self.top_k];
        let mut scatter = |places: &[usize], outputs: Vec<f32>| {
            for (place, output) in places.iter().zip(outputs.chunks_exact(hidden)) {
                routed[place * hidden..(place + 1) * hidden].copy_from_slice(output);
            }
        };
        match &self.experts {
            Experts::Decoded(experts) => {
                for (expert, places) in &places {
                    let rows = tensor::<B>(gather(places), hidden, device);
                    scatter(places, experts[*expert].forward(rows, to));
                }
            }
            Experts::Packed { store, four_bit } => {
                let get = |index: usize| -> Result<_, ModelError> {
                    let expert = places.get(index).map(|(expert, _)| store.get(*expert));
                    Ok(expert.transpose().map_err(SourceError::from)?)
                };
                let mut current = get(0)?;
                for (index, (id, places)) in places.iter().enumerate() {
                    let rows = gather(places);
                    let scales = four_bit.then(|| store.bank().input_scales(*id)).flatten();
                    // The next expert is read while this one is multiplied.
                    let (outputs, next) = rayon::join(
                        || current.as_ref().map(|expert| expert.forward(&rows, scales)),
                        || get(index + 1),
                    );
                    scatter(places, outputs.unwrap_or_default());
                    current = next?;
                }
            }
        }
        Ok(routed)
    }
}

/// Rows of `width` as `[1, rows, width]`.
fn tensor<B: EvaluatorBackend>(values: Vec<f32>, width: usize, device: &B::Device) -> Tensor<B, 3> {
    let rows = values.len() / width;
    Tensor::from_data(TensorData::new(values, [1, rows, width]), device)
}

/// Values in C order, widened to float32.
fn host<B: EvaluatorBackend>(x: Tensor<B, 3>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}
