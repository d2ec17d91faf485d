//! How much of a device's memory a run takes, worked out from the declarations alone, before anything is loaded:
//!
//! ```text
//! weights + batch * (state of a window + rows of a pass) + tiles of the head + the device's own
//! ```
//!
//! An upper bound by intent: it counts every row that a layer's formula names as held at once, and half as much again for
//! what the allocator cannot reuse.

use perplexity_kernels::Precision;
use perplexity_kernels::backend::ActivationFormat;
pub use perplexity_kernels::backend::Residency;
use perplexity_kernels::precise::{OUTPUT_TILE, ROW_TILE, SCORE_ELEMENTS};
use perplexity_kv::options::KvOptions;

use crate::activations::Activations;
use crate::config::{FeedForwardConfig, LayerType, TextConfig};
use crate::layers::kv_cache::device_row_bytes;
use crate::parameters::{Parameter, parameters};
use crate::route::{Boundary, Route};
use crate::source::{SourceError, StoredParameter, TextSource};

/// What a device driver and libraries take for themselves: context, workspaces, compiled kernels.
const DEVICE_OWN: u64 = 1 << 30;
/// Logits in flight: a tile as it is multiplied, widened and reduced.
const HEAD_TILES: u64 = 3;

/// How a device stores results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceStorage {
    /// Bytes of a result observable in 16 bits.
    pub narrow: u64,
    /// Bytes of one tile of logits.
    pub head_tile: u64,
}

impl DeviceStorage {
    /// Cards that store bfloat16.
    pub const NARROW: Self = Self {
        narrow: 2,
        head_tile: 1 << 30,
    };
    /// Devices that store float32 only.
    pub const WIDE: Self = Self {
        narrow: 4,
        head_tile: 64 << 20,
    };
}

/// The windows of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowShape {
    /// Tokens that the longest window feeds.
    pub tokens: usize,
    /// Most tokens per pass and window.
    pub prefill_chunk: usize,
}

/// The terms of the sum, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Weights with every matrix expanded.
    pub dense: u64,
    /// Weights with matrices in codes, and the largest of them expanded.
    pub packed: u64,
    /// One window of a batch.
    pub window: u64,
    /// Whatever the batch.
    pub fixed: u64,
}

/// How a run uses the memory it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Form of the weights.
    pub residency: Residency,
    /// Windows per batch.
    pub batch: usize,
    /// Bytes of the weights in that form.
    pub weights: u64,
    /// Bytes of all.
    pub total: u64,
}

/// Not even the least form of a run fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{batch} windows need {total} bytes, {weights} of them for weights; {budget} may be taken")]
pub struct Shortfall {
    /// Windows per batch.
    pub batch: usize,
    /// Bytes of the smaller form of the weights.
    pub weights: u64,
    /// Bytes of all.
    pub total: u64,
    /// Bytes that may be taken.
    pub budget: u64,
}

/// Windows per batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    /// Exactly so many.
    Exactly(usize),
    /// As many as fit, at most so many.
    UpTo(usize),
}

impl Needs {
    /// What scoring `windows` with the model of `source` takes, inputs narrowed as `activations` say and the rows of its caches
    /// packed by `kv`.
    ///
    /// # Errors
    /// When the source does not say how a parameter is stored.
    pub fn of(
        source: &dyn TextSource,
        route: Route,
        storage: DeviceStorage,
        windows: WindowShape,
        activations: &Activations,
        kv: Option<&KvOptions>,
    ) -> Result<Self, SourceError> {
        let config = source.config();
        // Unrounded routes keep float32 rows and never round a weight.
        let unrounded = route.at(Boundary::Norm) == Precision::Full;
        let row = if unrounded { 4 } else { storage.narrow };
        let (mut dense, mut packed, mut largest, mut largest_code) = (0, 0, 0, 0);
        let mut embedding: Option<StoredParameter> = None;
        for parameter in parameters(config) {
            let stored = source.stored(&parameter.name)?;
            match parameter.role {
                "token_embedding" => embedding = Some(stored.clone()),
                // One matrix under two names.
                "output_head" if embedding.as_ref().is_some_and(|e| e.parts == stored.parts) => continue,
                _ => {}
            }
            let weight = Weight::of(&parameter, &stored, storage.narrow, source.artifact().is_some());
            packed += weight.packed;
            if activations.of(&parameter.name) == Some(ActivationFormat::Fp8) && weight.packed < weight.dense {
                // Codes in either form, expanded only where they cannot meet codes; row scales once more in float32.
                let scales = 4 * parameter.shape[0] as u64;
                (dense, packed) = (dense + weight.packed + scales, packed + scales);
                largest_code = largest_code.max(4 * stored.elements);
                continue;
            }
            dense += weight.dense;
            if weight.packed < weight.dense {
                largest = largest.max(stored.elements * row);
            }
        }
        if let (FeedForwardConfig::Moe(dims), true) = (&config.feed_forward, packed < dense) {
            // All experts of a layer are expanded at once.
            largest =
                largest.max(row * (3 * dims.num_experts * dims.moe_intermediate_size * config.hidden_size) as u64);
        }
        packed += largest.max(largest_code);
        dense += largest_code;
        if route.keeps_weights() {
            dense = packed;
        }
        if route.rounds_weights() {
            packed = dense;
        }
        let pass = windows.tokens.min(windows.prefill_chunk) as u64;
        let (tiles, wide_row) = match route.is_precise() {
            true => f64_values(config),
            false => (0, 0),
        };
        Ok(Self {
            dense,
            packed,
            // In f64 the host packs the rows.
            window: state(config, windows.tokens as u64, kv.filter(|_| !route.is_precise()))
                + pass * (pass_row(config, row) + wide_row) * 3 / 2,
            // Tiles come in many sizes, which the allocator keeps apart.
            fixed: DEVICE_OWN + HEAD_TILES * storage.head_tile + 3 * tiles,
        })
    }

    fn weights(&self, residency: Residency) -> u64 {
        match residency {
            Residency::Dense => self.dense,
            Residency::Packed | Residency::EightBit => self.packed,
        }
    }

    /// Bytes of all with `batch` windows.
    pub fn total(&self, residency: Residency, batch: usize) -> u64 {
        self.weights(residency) + self.fixed + batch as u64 * self.window
    }

    /// Expanded weights where they leave room for the batch, else codes; then as many windows as fit.
    ///
    /// # Errors
    /// When neither leaves room for the batch, or for one window.
    pub fn plan(&self, budget: Option<u64>, batch: Batch) -> Result<Plan, Shortfall> {
        let budget = budget.unwrap_or(u64::MAX);
        let (least, most) = match batch {
            Batch::Exactly(n) => (n, n),
            Batch::UpTo(n) => (1, n.max(1)),
        };
        let fits = |residency| self.total(residency, least) <= budget;
        let Some(residency) = [Residency::Dense, Residency::Packed].into_iter().find(|r| fits(*r)) else {
            let smaller = if self.packed < self.dense {
                Residency::Packed
            } else {
                Residency::Dense
            };
            return Err(Shortfall {
                batch: least,
                weights: self.weights(smaller),
                total: self.total(smaller, least),
                budget,
            });
        };
        let room = (budget - self.total(residency, 0)) / self.window.max(1);
        let batch = usize::try_from(room).unwrap_or(most).clamp(least, most);
        Ok(Plan {
            residency,
            batch,
            weights: self.weights(residency),
            total: self.total(residency, batch),
        })
    }
}

/// Bytes of one parameter in either form.
struct Weight {
    dense: u64,
    packed: u64,
}

impl Weight {
    /// `codes`: whether the source hands out stored codes.
    fn of(parameter: &Parameter, stored: &StoredParameter, narrow: u64, codes: bool) -> Self {
        let all = |formats: &[&str]| stored.parts.iter().all(|part| formats.contains(&part.format));
        // Vectors and what no kernel expands are float32 on the device.
        if parameter.shape.len() != 2 || !(all(&["bf16"]) || codes && all(PACKED)) {
            let bytes = 4 * stored.elements;
            return Self {
                dense: bytes,
                packed: bytes,
            };
        }
        let dense = narrow * stored.elements;
        let packed = if all(&["bf16"]) {
            dense
        } else {
            stored.parts.iter().map(|part| part.bytes).sum()
        };
        Self { dense, packed }
    }
}

/// Formats that devices keep in codes.
const PACKED: &[&str] = &[
    "q4_g64_fp16",
    "q5_g64_fp16",
    "q6_g64_fp16",
    "q8_g32_fp16",
    "nvfp4",
    "fp8_e4m3fn_row_bf16",
    "fp8_e4m3fn_block128_f32",
];

/// Bytes that a window of `tokens` carries from pass to pass: keys and values packed, or in float32, as they begin, those of
/// one layer as decoded, the delta rule's states and the convolutions' tails.
fn state(config: &TextConfig, tokens: u64, kv: Option<&KvOptions>) -> u64 {
    let layers = |kind| config.layer_types.iter().filter(|layer| **layer == kind).count() as u64;
    let attention = config.attention.as_ref().map_or(0, |dims| {
        let held = config.attention_layers().into_iter();
        let held: usize = held.map(|layer| device_row_bytes(kv, layer, dims.head_dim)).sum();
        let decoded = kv.map_or(0, |_| device_row_bytes(None, 0, dims.head_dim));
        (dims.num_kv_heads * (held + decoded)) as u64 * tokens
    });
    let delta = config.delta_net.as_ref().map_or(0, |dims| {
        let state = dims.num_value_heads * dims.key_head_dim * dims.value_head_dim;
        let tail = (dims.conv_kernel_dim - 1) * dims.conv_dim();
        // The next state of a layer is made beside the last one.
        (layers(LayerType::LinearAttention) + 1) * 4 * (state + tail) as u64
    });
    attention + delta
}

/// Bytes per token of the widest layer of a pass, rows of `row` bytes per element.
fn pass_row(config: &TextConfig, row: u64) -> u64 {
    let hidden = config.hidden_size as u64;
    let attention = config.attention.as_ref().map_or(0, |dims| {
        row * (5 * dims.num_heads * dims.head_dim + 4 * dims.num_kv_heads * dims.head_dim) as u64
    });
    let delta = config.delta_net.as_ref().map_or(0, |dims| {
        row * (2 * dims.conv_dim() + 4 * dims.value_dim()) as u64 + 4 * hidden
    });
    let inner = match &config.feed_forward {
        FeedForwardConfig::Dense { intermediate_size } => *intermediate_size,
        FeedForwardConfig::Moe(dims) => {
            dims.num_experts_per_tok * (dims.moe_intermediate_size + config.hidden_size)
                + dims.shared_expert_intermediate_size
        }
    };
    3 * row * hidden + attention.max(delta).max(row * 3 * inner as u64)
}

/// Bytes in f64 of a route that is evaluated so: of the tiles of products and attention, and per token of a pass.
fn f64_values(config: &TextConfig) -> (u64, u64) {
    let inner = match &config.feed_forward {
        FeedForwardConfig::Dense { intermediate_size } => *intermediate_size,
        // Rows gathered for an expert, its outputs and their sum beside the rows themselves.
        FeedForwardConfig::Moe(dims) => {
            4 * config.hidden_size + dims.moe_intermediate_size + dims.shared_expert_intermediate_size
        }
    };
    let (attention, cache) = config.attention.as_ref().map_or((0, 0), |dims| {
        (dims.num_heads * dims.head_dim, 2 * dims.num_kv_heads * dims.head_dim)
    });
    let (delta, units) = (config.delta_net.as_ref()).map_or((0, 0), |dims| (dims.value_dim(), 2 * dims.key_dim()));
    let widest = inner.max(attention).max(delta).max(config.hidden_size);
    let tiles = (ROW_TILE + OUTPUT_TILE) * widest + 2 * ROW_TILE * OUTPUT_TILE + SCORE_ELEMENTS;
    (8 * tiles as u64, 8 * cache.max(units) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs {
        dense: 54,
        packed: 22,
        window: 4,
        fixed: 6,
    };

    #[test]
    fn the_batch_is_what_the_budget_leaves_room_for() {
        let plan = |budget, batch| {
            NEEDS
                .plan(budget, batch)
                .map(|plan| (plan.residency, plan.batch, plan.total))
        };
        assert_eq!(plan(None, Batch::UpTo(4)), Ok((Residency::Dense, 4, 76)));
        assert_eq!(plan(Some(71), Batch::UpTo(4)), Ok((Residency::Dense, 2, 68)));
        assert_eq!(plan(Some(64), Batch::UpTo(4)), Ok((Residency::Dense, 1, 64)));
        assert_eq!(plan(Some(63), Batch::UpTo(4)), Ok((Residency::Packed, 4, 44)));
        assert_eq!(plan(Some(67), Batch::Exactly(2)), Ok((Residency::Packed, 2, 36)));
        assert_eq!(plan(Some(32), Batch::UpTo(4)), Ok((Residency::Packed, 1, 32)));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_sum() {
        let refused = Shortfall {
            batch: 1,
            weights: 22,
            total: 32,
            budget: 31,
        };
        assert_eq!(NEEDS.plan(Some(31), Batch::UpTo(4)), Err(refused));
        let refused = NEEDS.plan(Some(40), Batch::Exactly(4)).unwrap_err();
        assert_eq!((refused.batch, refused.total), (4, 44));
    }
}
