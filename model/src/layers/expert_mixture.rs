//! The mixture of experts of Qwen3.8-Flash-Next: every row's `k` best routed experts and one shared expert,
//!
//! ```text
//! p = softmax(x router^T);  e_1, .., e_k = the k largest p, of equal ones the lower id first;  w_i = p_i / sum_j p_j
//! y = sum_i w_i expert_{e_i}(x) + sigmoid(x shared_score^T) shared(x)
//! expert(x) = (SiLU(x gate^T) * (x up^T)) down^T
//! ```
//!
//! summed in float32 in the order of the ranks. Gate, up, their product and the outputs exist at the boundaries, unlike in
//! the family's other mixtures. Rows are gathered expert by expert on the host, which skips experts that no row chose; a
//! device that multiplies packed experts has their outputs in one launch per product, and mixes them.
//!
//! The routes in f64 take products, activations and sums in f64 between the same boundaries. Hugging Face's steps are those
//! of [`mixture_of_experts::precise`]: weighted outputs and their sums bfloat16, in ascending id.
//!
//! [`mixture_of_experts::precise`]: perplexity_kernels::ops::mixture_of_experts::precise

use std::collections::BTreeMap;

use burn::tensor::activation;
use burn::tensor::{Element, Tensor, TensorData};
use perplexity_kernels::backend::Routing;
use perplexity_kernels::evaluation::{Arithmetic, Steps};
use perplexity_kernels::ops::{swiglu, widen};
use perplexity_kernels::{Evaluation, EvaluatorBackend, Precision};
use rayon::prelude::*;

use super::Pass;
use super::loader::Loader;
use crate::artifact::ArtifactError;
use crate::config::{FeedForwardConfig, MoeConfig, TextConfig};
use crate::experts::arithmetic::{IntegerExpert, silu};
use crate::experts::{CacheStatistics, DeviceExperts, ExpertBank, ExpertStore, Ready, Residency};
use crate::formats::nvfp4_expert::Projection;
use crate::route::Boundary;
use crate::scorer::ModelError;
use crate::source::SourceError;

/// Tokens whose routed outputs are held at a time: at a width of 2,560 and ten experts 400 MiB.
const TILE: usize = 4096;
/// The same where a device multiplies packed experts: 2.7 GiB with the integers of their rows.
const DEVICE_TILE: usize = 16_384;

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
    /// Weights of a checkpoint.
    Plain(Vec<Matrices<B>>),
    /// Packed ones, decoded.
    Decoded(ExpertStore<Matrices<B>>),
    /// Packed ones, multiplied exactly.
    Integer {
        /// Where they are.
        store: ExpertStore<IntegerExpert>,
        /// Whether their activations are rounded to 4 bits.
        four_bit: bool,
    },
    /// The same on a device.
    Device(DeviceExperts<B>),
}

/// Gate and up `[inner, hidden]`, down `[hidden, inner]`.
#[derive(Debug)]
pub struct Matrices<B: EvaluatorBackend> {
    gate: B::Weight,
    up: B::Weight,
    down: B::Weight,
    inner: usize,
    /// In float32, at most.
    bytes: u64,
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
            bytes: matrices_bytes(hidden, inner),
        })
    }

    /// The experts of a bank, decoded when they are needed; see [`ExpertStore::new`].
    ///
    /// # Errors
    /// As [`ExpertStore::new`].
    pub fn decoded(
        bank: ExpertBank,
        residency: Residency,
        cache_bytes: u64,
        loader: &Loader<'_, B>,
    ) -> Result<ExpertStore<Self>, ArtifactError> {
        let weight = loader.weights();
        ExpertStore::new(bank, residency, cache_bytes, move |bank, expert, record| {
            let matrix = |projection| -> Result<_, ArtifactError> {
                let (rows, columns) = bank.geometry().matrix(projection);
                Ok(weight(bank.decode(expert, record, projection)?, [rows, columns]))
            };
            let [gate, up, down] = Projection::ALL.map(matrix);
            Ok(Self {
                gate: gate?,
                up: up?,
                down: down?,
                inner: bank.geometry().inner,
                bytes: matrices_bytes(bank.geometry().hidden, bank.geometry().inner),
            })
        })
    }

    /// The expert's outputs for `x` `[1, rows, hidden]`: every product and the activation as `how` has them.
    fn forward(&self, x: Tensor<B, 3>, how: Evaluation) -> Tensor<B, 3> {
        let device = x.device();
        let (gate, up) = (how.project(x.clone(), &self.gate), how.project(x, &self.up));
        let product = match how.arithmetic {
            Arithmetic::Native if B::ON_DEVICE => B::round(activation::silu(widen(gate)) * widen(up), how.to),
            Arithmetic::Native => {
                let product = host(gate).into_iter().zip(host(up)).map(|(g, u)| silu(g) * u);
                B::round(tensor::<B>(product.collect(), self.inner, &device), how.to)
            }
            Arithmetic::Precise(steps) => {
                let [gate, up] = [gate, up].map(|x| host(x).into_iter().map(f64::from).collect::<Vec<_>>());
                tensor(
                    swiglu::precise::activate(&gate, &up, steps, how.to),
                    self.inner,
                    &device,
                )
            }
        };
        how.project(product, &self.down)
    }
}

impl<B: EvaluatorBackend> Ready for Matrices<B> {
    fn bytes(&self) -> u64 {
        self.bytes
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
            Experts::Plain(_) => CacheStatistics::default(),
            Experts::Decoded(store) => store.statistics(),
            Experts::Integer { store, .. } => store.statistics(),
            Experts::Device(experts) => experts.statistics(),
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
        let (how, routing) = (pass.route.on(Boundary::FeedForward), pass.route.on(Boundary::Routing));
        let routed = routing.route_experts(x.clone(), &self.router, self.top_k);
        let choice = Choice::of(&routed);
        observe(&choice);
        let scores = routing.project(x.clone(), &self.shared_score);
        let shared = self.shared.forward(x.clone().reshape([1, batch * tokens, hidden]), how);
        let residual = pass.route.on(Boundary::Residual);
        if let (Experts::Device(experts), Arithmetic::Native) = (&self.experts, residual.arithmetic) {
            let x = x.reshape([batch * tokens, hidden]);
            let (shared, scores) = (
                shared.reshape([batch * tokens, hidden]),
                scores.reshape([batch * tokens, 1]),
            );
            let tile = |first: usize| -> Result<_, ModelError> {
                let count = DEVICE_TILE.min(batch * tokens - first);
                let rows = |x: &Tensor<B, 2>| x.clone().narrow(0, first, count);
                let ids = &choice.ids[first * self.top_k..(first + count) * self.top_k];
                let outputs = experts.outputs(&rows(&x), ids, self.top_k).map_err(SourceError::from)?;
                let (shared, scores) = (rows(&shared).unsqueeze(), rows(&scores).unsqueeze());
                Ok(B::combine_experts(
                    outputs,
                    rows(&routed.weights),
                    shared,
                    scores,
                    residual.to,
                ))
            };
            let tiles: Vec<Tensor<B, 3>> = (0..batch * tokens)
                .step_by(DEVICE_TILE)
                .map(tile)
                .collect::<Result<_, _>>()?;
            return Ok(Tensor::cat(tiles, 1).reshape([batch, tokens, hidden]));
        }
        let (shares, shared) = (host(scores), host(shared));
        let x = host(x);
        let mut y = vec![0.0; x.len()];
        for first in (0..batch * tokens).step_by(TILE) {
            let count = TILE.min(batch * tokens - first);
            let (rows, chosen) = (first * hidden..(first + count) * hidden, first * self.top_k);
            let choice = Choice {
                ids: choice.ids[chosen..][..count * self.top_k].to_vec(),
                weights: choice.weights[chosen..][..count * self.top_k].to_vec(),
            };
            let routed = self.routed(&x[rows.clone()], &choice, hidden, how, &device)?;
            let chosen = choice
                .ids
                .par_chunks(self.top_k)
                .zip(choice.weights.par_chunks(self.top_k));
            y[rows.clone()]
                .par_chunks_mut(hidden)
                .zip(routed.par_chunks(self.top_k * hidden).zip(chosen))
                .zip(shared[rows].par_chunks(hidden).zip(&shares[first..first + count]))
                .for_each(|((y, (routed, chosen)), (shared, share))| match residual.arithmetic {
                    Arithmetic::Native => sum(y, routed, chosen.1, shared, *share),
                    Arithmetic::Precise(steps) => precise_sum(y, routed, chosen, shared, *share, steps, residual),
                });
        }
        let y = tensor::<B>(y, hidden, &device).reshape([batch, tokens, hidden]);
        Ok(B::round(y, residual.to))
    }

    /// The outputs `[rows, top_k, hidden]` of the experts that the rows `x` chose.
    fn routed(
        &self,
        x: &[f32],
        choice: &Choice,
        hidden: usize,
        how: Evaluation,
        device: &B::Device,
    ) -> Result<Vec<f32>, ModelError> {
        // Places in `[rows, top_k]` by expert, in ascending id.
        let mut places: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (place, id) in choice.ids.iter().enumerate() {
            places.entry(*id as usize).or_default().push(place);
        }
        let (experts, places): (Vec<usize>, Vec<Vec<usize>>) = places.into_iter().unzip();
        let gather = |at: usize| -> Vec<f32> {
            let rows = places[at].iter().map(|place| place / self.top_k);
            rows.flat_map(|row| &x[row * hidden..(row + 1) * hidden])
                .copied()
                .collect()
        };
        let mut routed = vec![0.0; x.len() * self.top_k];
        let mut scatter = |at: usize, outputs: Vec<f32>| {
            for (place, output) in places[at].iter().zip(outputs.chunks_exact(hidden)) {
                routed[place * hidden..(place + 1) * hidden].copy_from_slice(output);
            }
        };
        let multiply = |at: usize, expert: &Matrices<B>| host(expert.forward(tensor(gather(at), hidden, device), how));
        match &self.experts {
            Experts::Plain(all) => {
                (experts.iter().enumerate()).for_each(|(at, expert)| scatter(at, multiply(at, &all[*expert])))
            }
            Experts::Decoded(store) => store.each(&experts, multiply, scatter).map_err(SourceError::from)?,
            Experts::Integer { store, four_bit } => {
                let multiply = |at: usize, expert: &IntegerExpert| {
                    let scales = four_bit.then(|| store.bank().input_scales(experts[at])).flatten();
                    expert.forward(&gather(at), scales)
                };
                store.each(&experts, multiply, scatter).map_err(SourceError::from)?;
            }
            Experts::Device(experts) => {
                let x = B::round(tensor::<B>(x.to_vec(), hidden, device).squeeze_dim(0), Precision::Bf16);
                return Ok(host(
                    experts
                        .outputs(&x, &choice.ids, self.top_k)
                        .map_err(SourceError::from)?,
                ));
            }
        }
        Ok(routed)
    }
}

impl Choice {
    fn of<B: EvaluatorBackend>(routing: &Routing<B>) -> Self {
        Self {
            ids: vec(routing.experts.to_data()),
            weights: vec(routing.weights.to_data()),
        }
    }
}

/// `y` of one row in float32: `routed` `[top_k, hidden]` by weight, in the order of the ranks, then the shared expert.
fn sum(y: &mut [f32], routed: &[f32], weights: &[f32], shared: &[f32], share: f32) {
    for (output, weight) in routed.chunks_exact(y.len()).zip(weights) {
        y.iter_mut().zip(output).for_each(|(y, output)| *y += weight * output);
    }
    let share = 1.0 / (1.0 + (-share).exp());
    y.iter_mut().zip(shared).for_each(|(y, shared)| *y += share * shared);
}

/// The same in f64; stepwise the outputs are added in ascending id.
fn precise_sum(
    y: &mut [f32],
    routed: &[f32],
    (ids, weights): (&[u32], &[f32]),
    shared: &[f32],
    share: f32,
    steps: Steps,
    how: Evaluation,
) {
    let hidden = y.len();
    let rounded = |x: f64| match steps {
        Steps::Once => x,
        Steps::Each => how.to.nearest(x).into(),
    };
    let mut order: Vec<usize> = (0..ids.len()).collect();
    if steps == Steps::Each {
        order.sort_unstable_by_key(|rank| ids[*rank]);
    }
    let share = rounded(1.0 / (1.0 + (-f64::from(share)).exp()));
    for (at, (y, shared)) in y.iter_mut().zip(shared).enumerate() {
        let product = |rank: &usize| rounded(f64::from(weights[*rank]) * f64::from(routed[rank * hidden + at]));
        let routed = order.iter().map(product).fold(0.0, |sum, x| rounded(sum + x));
        *y = how.to.nearest(routed + rounded(share * f64::from(*shared)));
    }
}

/// Bytes of the three matrices in float32.
fn matrices_bytes(hidden: usize, inner: usize) -> u64 {
    (3 * size_of::<f32>() * hidden * inner) as u64
}

/// Rows of `width` as `[1, rows, width]`.
fn tensor<B: EvaluatorBackend>(values: Vec<f32>, width: usize, device: &B::Device) -> Tensor<B, 3> {
    let rows = values.len() / width;
    Tensor::from_data(TensorData::new(values, [1, rows, width]), device)
}

/// Values in C order, widened to float32.
fn host<B: EvaluatorBackend>(x: Tensor<B, 3>) -> Vec<f32> {
    vec(x.into_data())
}

fn vec<E: Element>(data: TensorData) -> Vec<E> {
    data.convert::<E>().into_vec().expect("converted just now")
}
