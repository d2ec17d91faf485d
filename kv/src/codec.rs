//! The interface of a codec: what one side (K or V) of the cache stores for a row.
//!
//! ```text
//! row [head_dim] --basis--> stored basis --encode--> entries --pack--> bytes
//! bytes --unpack--> entries --decode--> row in the stored basis
//! ```
//!
//! A codec says what it stores ([`CodecSpec`]) and how, either on host rows ([`HostCodec`], the bit-exact form) or in
//! burn tensor operations ([`TensorCodec`], which runs on every backend); the built-in codecs do both and are tested
//! for equality. Rotation, packing, accounting, paging, masking and softmax are not a codec's business.
//!
//! Rows enter as bf16 values widened to float32; K after its norm and rotary embedding, V as projected.
//!
//! Non-finite rows follow the formulas with one addition, so that a fault upstream cannot vanish in the cache: a NaN in
//! a scaled group makes the group's scale NaN, and the group decodes to NaN.

use crate::basis::Basis;
use crate::codecs::{bf16::Bf16, int8};
use crate::layout::Layout;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use perplexity_kernels::backend::RowFormat;
use rayon::prelude::*;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::sync::Arc;

/// Head dimension of the model family; its formats are defined for rows of this length.
pub const HEAD_DIM: usize = 256;

/// Which queries read which keys from an exact copy instead of the codes.
///
/// ```text
/// exact(j, q) = j < sinks  or  q < (floor(j / block) + 1) * block + recent        j <= q
/// ```
///
/// For block 1 the second term is `j >= q - recent`; for larger blocks it keeps a block exact until it is complete and
/// `recent` tokens old. Positions decide alone, so results do not depend on how a sequence is split into passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First tokens that stay exact for every query.
    pub sinks: usize,
    /// Tokens before the query that are read exactly, besides the query's own.
    pub recent: usize,
    /// How the exact copy is stored.
    pub copy: ExactCopy,
}

/// Form of an exact copy; it holds the row in the basis of the codec that it accompanies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExactCopy {
    /// The 16-bit row itself.
    Bf16,
    /// INT8 codes with an FP16 scale per 64 values.
    Int8,
}

impl ExactCopy {
    /// The copy as a host codec.
    pub fn host(self) -> Arc<dyn HostCodec> {
        match self {
            ExactCopy::Bf16 => Arc::new(Bf16),
            ExactCopy::Int8 => Arc::new(int8::IN_PLACE),
        }
    }

    /// The copy as a tensor codec.
    pub fn tensor<B: Backend>(self) -> Arc<dyn TensorCodec<B>> {
        match self {
            ExactCopy::Bf16 => Arc::new(Bf16),
            ExactCopy::Int8 => Arc::new(int8::IN_PLACE),
        }
    }
}

impl Window {
    /// Whether the query at position `query` reads key `key` exactly, for a codec of `block` tokens.
    pub fn exact(&self, key: usize, query: usize, block: usize) -> bool {
        key < self.sinks || query < (key / block + 1) * block + self.recent
    }

    /// The first key beyond the sinks that some query at `query` or later still reads exactly.
    pub fn first_recent(&self, query: usize, block: usize) -> usize {
        query.saturating_sub(self.recent) / block * block
    }
}

/// What one side of the cache stores, independent of how it is computed.
pub trait CodecSpec: Debug + Send + Sync {
    /// Basis of the stored rows. Queries are taken into the basis of K, the output out of the basis of V.
    fn basis(&self) -> Basis {
        Basis::Identity
    }

    /// Consecutive tokens of one head that are encoded together; an incomplete block is read exactly.
    fn block_tokens(&self) -> usize {
        1
    }

    /// Rows read from an exact copy. A codec with `block_tokens` above 1 must have one.
    fn window(&self) -> Option<Window> {
        None
    }

    /// Whether rows of `head_dim` values can be stored.
    fn supports(&self, head_dim: usize) -> bool {
        head_dim == HEAD_DIM
    }

    /// The format of the devices' kernels that is this codec bit for bit, if there is one.
    fn row_format(&self) -> Option<RowFormat> {
        None
    }

    /// The supported lengths of a row, in words for a message.
    fn head_dims(&self) -> String {
        HEAD_DIM.to_string()
    }

    /// Entries of one block of rows of `head_dim` values.
    fn layout(&self, head_dim: usize) -> Layout;
}

/// A codec on host rows: the definition of its bits.
pub trait HostCodec: CodecSpec {
    /// Encodes one block (`[block_tokens, head_dim]`, stored basis) into the entries of [`CodecSpec::layout`].
    fn encode(&self, rows: &[f32], entries: &mut [u16]);

    /// Decodes one block; every entry pattern decodes to something, whether or not `encode` produces it.
    fn decode(&self, entries: &[u16], rows: &mut [f32]);
}

/// A codec in burn tensor operations on float32 tensors.
pub trait TensorCodec<B: Backend>: CodecSpec {
    /// Encodes `[blocks * block_tokens, kv_heads, head_dim]` (stored basis) to entries `[blocks, kv_heads, entries]`,
    /// the planes of [`CodecSpec::layout`] one after another.
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int>;

    /// Decodes entries `[blocks, kv_heads, entries]` to rows `[blocks * block_tokens, kv_heads, head_dim]`.
    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3>;
}

/// A codec written in tensor operations only, used on host rows through backend `B`.
///
/// Good for trying a codec out: every block is a tensor of its own, so this is slower than a host form by far.
#[derive(Debug)]
pub struct OnTensors<B, C> {
    codec: C,
    backend: PhantomData<fn() -> B>,
}

impl<B: Backend, C: TensorCodec<B>> OnTensors<B, C> {
    /// Wraps a codec.
    pub const fn new(codec: C) -> Self {
        Self {
            codec,
            backend: PhantomData,
        }
    }
}

impl<B: Backend, C: TensorCodec<B>> CodecSpec for OnTensors<B, C> {
    fn basis(&self) -> Basis {
        self.codec.basis()
    }
    fn block_tokens(&self) -> usize {
        self.codec.block_tokens()
    }
    fn window(&self) -> Option<Window> {
        self.codec.window()
    }
    fn supports(&self, head_dim: usize) -> bool {
        self.codec.supports(head_dim)
    }
    fn layout(&self, head_dim: usize) -> Layout {
        self.codec.layout(head_dim)
    }
}

impl<B: Backend, C: TensorCodec<B>> HostCodec for OnTensors<B, C> {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let shape = [self.block_tokens(), 1, rows.len() / self.block_tokens()];
        let rows = Tensor::<B, 3>::from_data(TensorData::new(rows.to_vec(), shape), &B::Device::default());
        let stored = self.codec.store(rows).into_data();
        entries
            .iter_mut()
            .zip(stored.iter::<i64>())
            .for_each(|(entry, word)| *entry = word as u16);
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let words: Vec<i32> = entries.iter().map(|word| i32::from(*word)).collect();
        let words = TensorData::new(words, [1, 1, entries.len()]).convert::<B::IntElem>();
        let loaded = self
            .codec
            .load(Tensor::from_data(words, &B::Device::default()))
            .into_data();
        rows.iter_mut()
            .zip(loaded.iter::<f32>())
            .for_each(|(value, loaded)| *value = loaded);
    }
}

/// Stored bits per value, scales included; an exact copy is not counted.
pub fn bits_per_value(codec: &dyn CodecSpec, head_dim: usize) -> f64 {
    8.0 * bytes_per_row(codec, head_dim) / head_dim as f64
}

/// Stored bytes per token and KV head of one side, scales included; an exact copy is not counted.
pub fn bytes_per_row(codec: &dyn CodecSpec, head_dim: usize) -> f64 {
    codec.layout(head_dim).bytes() as f64 / codec.block_tokens() as f64
}

/// Encodes complete blocks of rows `[tokens, kv_heads, head_dim]` in the stored basis to packed bytes
/// `[blocks, kv_heads, layout.bytes()]`.
///
/// # Panics
/// When `rows` is not a whole number of blocks.
pub fn encode_rows(codec: &dyn HostCodec, rows: &[f32], kv_heads: usize, head_dim: usize) -> Vec<u8> {
    let (layout, block) = (codec.layout(head_dim), codec.block_tokens());
    let block_values = block * kv_heads * head_dim;
    assert!(rows.len().is_multiple_of(block_values), "whole blocks of rows");
    let mut packed = vec![0; rows.len() / block_values * kv_heads * layout.bytes()];
    packed.par_chunks_exact_mut(layout.bytes()).enumerate().for_each_init(
        || (vec![0.0; block * head_dim], vec![0; layout.entries()]),
        |(gathered, entries), (index, bytes)| {
            let (b, head) = (index / kv_heads, index % kv_heads);
            for (t, row) in gathered.chunks_exact_mut(head_dim).enumerate() {
                let at = ((b * block + t) * kv_heads + head) * head_dim;
                row.copy_from_slice(&rows[at..at + head_dim]);
            }
            codec.encode(gathered, entries);
            layout.pack(entries, bytes);
        },
    );
    packed
}

/// The inverse of [`encode_rows`]: rows `[tokens, kv_heads, head_dim]` in the stored basis.
///
/// # Panics
/// When `packed` is not a whole number of blocks.
pub fn decode_rows(codec: &dyn HostCodec, packed: &[u8], kv_heads: usize, head_dim: usize) -> Vec<f32> {
    let (layout, block) = (codec.layout(head_dim), codec.block_tokens());
    let block_bytes = kv_heads * layout.bytes();
    assert!(packed.len().is_multiple_of(block_bytes), "whole packed blocks");
    let mut rows = vec![0.0; packed.len() / block_bytes * block * kv_heads * head_dim];
    rows.par_chunks_exact_mut(block * kv_heads * head_dim)
        .zip(packed.par_chunks_exact(block_bytes))
        .for_each_init(
            || (vec![0.0; block * head_dim], vec![0; layout.entries()]),
            |(decoded, entries), (rows, packed)| {
                for (head, bytes) in packed.chunks_exact(layout.bytes()).enumerate() {
                    layout.unpack(bytes, entries);
                    codec.decode(entries, decoded);
                    for (t, row) in decoded.chunks_exact(head_dim).enumerate() {
                        let at = (t * kv_heads + head) * head_dim;
                        rows[at..at + head_dim].copy_from_slice(row);
                    }
                }
            },
        );
    rows
}
