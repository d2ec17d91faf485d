//! Packed K and V of one layer and one sequence, on the device: [`store`](crate::store) in burn tensor operations.
//!
//! Entries are packed into 32-bit words plane by plane: the `kv_heads * count` entries that a plane has per block are laid
//! out one after another, least significant bits first, each in the next power of two of its bits (a 3-bit entry takes 4, a
//! 6-bit entry 8), and padded to whole words. Rotation, packing and attention use no
//! operation that leaves the device.

use crate::codec::{TensorCodec, Window};
use crate::layout::Layout;
use crate::registry::KvPair;
use burn::tensor::{Bool, ElementConversion, Int, Tensor, activation::softmax, backend::Backend};
use std::sync::Arc;

/// Bits of a packed word.
const WORD_BITS: u32 = 32;

/// Packs entries `[blocks, kv_heads, entries]` into one word tensor `[blocks, words]` per plane.
pub fn pack<B: Backend>(layout: &Layout, entries: Tensor<B, 3, Int>) -> Vec<Tensor<B, 2, Int>> {
    let [blocks, heads, _] = entries.dims();
    let mut first = 0;
    let planes = layout.0.iter().map(|plane| {
        let per_word = (WORD_BITS / container(plane.bits)) as usize;
        let count = heads * plane.count;
        let words = count.div_ceil(per_word);
        let mut plane_entries: Tensor<B, 2, Int> =
            entries.clone().narrow(2, first, plane.count).reshape([blocks, count]);
        first += plane.count;
        if words * per_word > count {
            let padding = Tensor::zeros([blocks, words * per_word - count], &plane_entries.device());
            plane_entries = Tensor::cat(vec![plane_entries, padding], 1);
        }
        let lanes: Tensor<B, 3, Int> = plane_entries.reshape([blocks, words, per_word]);
        // The top lane may set the sign of a 32-bit word; a word is bits, not a number. Shifting by multiplication
        // would overflow there.
        (0..per_word)
            .map(|lane| {
                let shift: B::IntElem = (lane as u32 * container(plane.bits)).elem();
                lanes.clone().narrow(2, lane, 1).bitwise_left_shift_scalar(shift)
            })
            .reduce(|word, lane| word.bitwise_or(lane))
            .expect("at least one lane")
            .reshape([blocks, words])
    });
    planes.collect()
}

/// The inverse of [`pack`].
pub fn unpack<B: Backend>(layout: &Layout, words: &[Tensor<B, 2, Int>], kv_heads: usize) -> Tensor<B, 3, Int> {
    let planes = layout.0.iter().zip(words).map(|(plane, words)| {
        let [blocks, count_words] = words.dims();
        let bits = container(plane.bits);
        let per_word = WORD_BITS / bits;
        let mask: B::IntElem = ((1u32 << bits) - 1).elem();
        let lanes = (0..per_word).map(|lane| {
            // The shift may drag the sign along; the mask removes it.
            words
                .clone()
                .bitwise_right_shift_scalar((lane * bits).elem::<B::IntElem>())
                .bitwise_and_scalar(mask)
        });
        let lanes: Tensor<B, 3, Int> = Tensor::stack(lanes.collect(), 2);
        let entries: Tensor<B, 2, Int> = lanes.reshape([blocks, count_words * per_word as usize]);
        entries
            .narrow(1, 0, kv_heads * plane.count)
            .reshape([blocks, kv_heads, plane.count])
    });
    Tensor::cat(planes.collect(), 2)
}

/// Bits an entry occupies in a word: the next power of two, so that no entry straddles two words.
const fn container(bits: u32) -> u32 {
    bits.next_power_of_two()
}

/// Packed blocks, appended in parts.
#[derive(Debug)]
struct Packed<B: Backend> {
    codec: Arc<dyn TensorCodec<B>>,
    /// Per plane `[blocks, words]`; empty before the first block.
    words: Vec<Tensor<B, 2, Int>>,
}

impl<B: Backend> Packed<B> {
    fn new(codec: Arc<dyn TensorCodec<B>>) -> Self {
        Self {
            codec,
            words: Vec::new(),
        }
    }

    fn append(&mut self, rows: Tensor<B, 3>) {
        let head_dim = rows.dims()[2];
        let new = pack(&self.codec.layout(head_dim), self.codec.store(rows));
        self.words = if self.words.is_empty() {
            new
        } else {
            self.words
                .drain(..)
                .zip(new)
                .map(|(old, new)| Tensor::cat(vec![old, new], 0))
                .collect()
        };
    }

    /// Drops the oldest blocks.
    fn drop_first(&mut self, blocks: usize) {
        if blocks == 0 {
            return;
        }
        let kept = self.blocks() - blocks;
        self.words = if kept == 0 {
            Vec::new()
        } else {
            self.words
                .drain(..)
                .map(|words| words.narrow(0, blocks, kept))
                .collect()
        };
    }

    fn blocks(&self) -> usize {
        self.words.first().map_or(0, |words| words.dims()[0])
    }

    /// Decoded rows `[tokens, kv_heads, head_dim]`; `None` when there are none.
    fn rows(&self, kv_heads: usize, head_dim: usize) -> Option<Tensor<B, 3>> {
        (!self.words.is_empty()).then(|| {
            self.codec
                .load(unpack(&self.codec.layout(head_dim), &self.words, kv_heads))
        })
    }
}

/// One side (K or V) of a layer's cache.
#[derive(Debug)]
pub struct TensorSide<B: Backend> {
    codes: Packed<B>,
    window: Option<Window>,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    /// Rows of the incomplete block in the stored basis.
    pending: Option<Tensor<B, 3>>,
    sinks: Option<Packed<B>>,
    recent: Option<Packed<B>>,
    recent_from: usize,
}

impl<B: Backend> TensorSide<B> {
    /// An empty cache; `window` as in [`SideStore::new`](crate::store::SideStore::new).
    pub fn new(codec: Arc<dyn TensorCodec<B>>, window: bool, kv_heads: usize, head_dim: usize) -> Self {
        let keep = window || codec.block_tokens() > 1;
        let window = codec.window().filter(|_| keep);
        let copy = || window.map(|window| Packed::new(window.copy.tensor::<B>()));
        Self {
            kv_heads,
            head_dim,
            tokens: 0,
            pending: None,
            sinks: copy(),
            recent: copy(),
            recent_from: window.map_or(0, |window| window.sinks),
            window,
            codes: Packed::new(codec),
        }
    }

    /// Tokens appended so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Appends rows `[tokens, kv_heads, head_dim]` of a pass, float32 in the model's basis.
    pub fn append(&mut self, rows: Tensor<B, 3>) {
        let appended = rows.dims()[0];
        if appended == 0 {
            return;
        }
        let rows = self.codes.codec.basis().forward_tensor(rows);
        let block = self.codes.codec.block_tokens();
        if let (Some(window), Some(sinks), Some(recent)) = (self.window, &mut self.sinks, &mut self.recent) {
            let to_sinks = window.sinks.saturating_sub(self.tokens).min(appended);
            if to_sinks > 0 {
                sinks.append(rows.clone().narrow(0, 0, to_sinks));
            }
            // Drop what no query of this pass or a later one reads exactly.
            let stale = window
                .first_recent(self.tokens, block)
                .saturating_sub(self.recent_from)
                .min(recent.blocks());
            recent.drop_first(stale);
            self.recent_from += stale;
            if appended > to_sinks {
                recent.append(rows.clone().narrow(0, to_sinks, appended - to_sinks));
            }
        }
        let waiting = match self.pending.take() {
            Some(pending) => Tensor::cat(vec![pending, rows], 0),
            None => rows,
        };
        let held = waiting.dims()[0];
        let complete = held / block * block;
        if complete > 0 {
            self.codes.append(waiting.clone().narrow(0, 0, complete));
        }
        self.pending = (held > complete).then(|| waiting.narrow(0, complete, held - complete));
        self.tokens += appended;
    }

    /// Decoded codes `[tokens, kv_heads, head_dim]` in the stored basis, zeros for an incomplete block; and the exact
    /// copies of a windowed codec, zeros where no query of the last pass reads one.
    pub fn read(&self) -> (Tensor<B, 3>, Option<Tensor<B, 3>>) {
        let device = self.codes.words.first().map(Tensor::device).unwrap_or_default();
        let zeros = |tokens| Tensor::zeros([tokens, self.kv_heads, self.head_dim], &device);
        let rows = |packed: &Packed<B>| packed.rows(self.kv_heads, self.head_dim);
        let pad = |parts: Vec<Option<Tensor<B, 3>>>| Tensor::cat(parts.into_iter().flatten().collect(), 0);
        let coded_tokens = self.tokens - self.pending.as_ref().map_or(0, |pending| pending.dims()[0]);
        let incomplete = (self.tokens > coded_tokens).then(|| zeros(self.tokens - coded_tokens));
        let coded = pad(vec![rows(&self.codes), incomplete]);
        let exact = self.sinks.as_ref().zip(self.recent.as_ref()).map(|(sinks, recent)| {
            let gap = self.tokens - sinks.blocks() - recent.blocks();
            pad(vec![rows(sinks), (gap > 0).then(|| zeros(gap)), rows(recent)])
        });
        (coded, exact)
    }
}

/// K and V of one layer.
#[derive(Debug)]
pub struct TensorStore<B: Backend> {
    /// Keys.
    pub k: TensorSide<B>,
    /// Values.
    pub v: TensorSide<B>,
}

impl<B: Backend> TensorStore<B> {
    /// An empty cache of a pair.
    pub fn new(pair: &KvPair, window: bool, kv_heads: usize, head_dim: usize) -> Self {
        let side = |codec| TensorSide::new(codec, window, kv_heads, head_dim);
        Self {
            k: side(pair.k.tensor::<B>()),
            v: side(pair.v.tensor::<B>()),
        }
    }

    /// Attention at the format level of float32 queries `[tokens, heads, head_dim]` (model basis) at positions
    /// `first_position..`, scores in full: the tensor form of [`attend`](crate::attention::attend).
    pub fn attend(&self, q: Tensor<B, 3>, first_position: usize) -> Tensor<B, 3> {
        let [tokens, heads, head_dim] = q.dims();
        let visible = first_position + tokens;
        let q = self.k.codes.codec.basis().forward_tensor(q).swap_dims(0, 1);
        let group = heads / self.k.kv_heads;
        // `[visible, kv_heads, head_dim]` to `[heads, visible, head_dim]`, each KV head read by its group.
        let spread = |rows: Tensor<B, 3>| -> Tensor<B, 3> {
            let kv_heads = rows.dims()[1];
            let rows: Tensor<B, 4> = rows.narrow(0, 0, visible).swap_dims(0, 1).unsqueeze_dim(1);
            rows.expand([kv_heads, group, visible, head_dim])
                .reshape([heads, visible, head_dim])
        };
        let scores_of =
            |rows: Tensor<B, 3>| q.clone().matmul(spread(rows).swap_dims(1, 2)) * (1.0 / (head_dim as f64).sqrt());
        let shape = [heads, tokens, visible];
        let (k, exact_k) = self.k.read();
        let mut scores = scores_of(k);
        if let Some(exact) = exact_k {
            scores = scores.mask_where(self.reads_exactly(&self.k, shape, first_position), scores_of(exact));
        }
        let weights = softmax(
            scores.mask_fill(self.future(shape, first_position), f32::NEG_INFINITY),
            2,
        );
        let (v, exact_v) = self.v.read();
        let out = match exact_v {
            None => weights.matmul(spread(v)),
            Some(exact) => {
                let from_copy = self.reads_exactly(&self.v, shape, first_position);
                let copied = weights.clone().mask_fill(from_copy.clone().bool_not(), 0.0);
                weights.mask_fill(from_copy, 0.0).matmul(spread(v)) + copied.matmul(spread(exact))
            }
        };
        self.v.codes.codec.basis().inverse_tensor(out.swap_dims(0, 1))
    }

    /// Positions of keys and queries of scores `[heads, tokens, visible]`.
    fn positions(&self, shape: [usize; 3], first_position: usize) -> (Tensor<B, 3, Int>, Tensor<B, 3, Int>) {
        let [_, tokens, visible] = shape;
        let device = self.k.codes.words.first().map(Tensor::device).unwrap_or_default();
        let keys = Tensor::<B, 1, Int>::arange(0..visible as i64, &device)
            .reshape([1, 1, visible])
            .expand(shape);
        let first = first_position as i64;
        let queries = Tensor::<B, 1, Int>::arange(first..first + tokens as i64, &device);
        (keys, queries.reshape([1, tokens, 1]).expand(shape))
    }

    fn future(&self, shape: [usize; 3], first_position: usize) -> Tensor<B, 3, Bool> {
        let (keys, queries) = self.positions(shape, first_position);
        keys.greater(queries)
    }

    /// [`Window::exact`] for every query and key.
    fn reads_exactly(&self, side: &TensorSide<B>, shape: [usize; 3], first_position: usize) -> Tensor<B, 3, Bool> {
        let (keys, queries) = self.positions(shape, first_position);
        let window = side.window.expect("exact copies come with a window");
        let block = side.codes.codec.block_tokens() as i64;
        let sink = keys.clone().lower_elem(window.sinks as i64);
        sink.bool_or(queries.lower((keys / block + 1) * block + window.recent as i64))
    }
}
