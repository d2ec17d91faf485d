//! Packed K and V of one layer and one sequence, on the host.
//!
//! ```text
//! append(k, v)  rows [tokens, kv_heads, head_dim] of a pass: rotate, encode, pack
//! read()        every row so far, decoded, in the stored basis
//! ```
//!
//! A pass appends before it reads, so a token sees its own row as the codec stores it; there is no fresh 16-bit path.
//! Codecs with a window hold an exact copy of the rows that a later query can still read exactly, and [`ReadRows`] says
//! which copy a (key, query) pair reads.

use crate::codec::{HostCodec, Window, decode_rows, encode_rows};
use crate::registry::KvPair;
use std::sync::Arc;

/// One side (K or V) of a layer's cache.
#[derive(Debug)]
pub struct SideStore {
    codec: Arc<dyn HostCodec>,
    window: Option<(Window, Arc<dyn HostCodec>)>,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    /// Complete blocks `[blocks, kv_heads, bytes]`.
    packed: Vec<u8>,
    /// Rows of the incomplete block in the stored basis, waiting for the rest of it.
    pending: Vec<f32>,
    /// Exact copies of the first `window.sinks` tokens.
    sinks: Vec<u8>,
    /// Exact copies of the tokens from `recent_from` (at least `window.sinks`) on.
    recent: Vec<u8>,
    recent_from: usize,
}

/// Decoded rows of one side, in the basis of its codec.
#[derive(Debug)]
pub struct ReadRows {
    /// Decoded codes `[tokens, kv_heads, head_dim]`; zeros for an incomplete block, which is always read exactly.
    pub coded: Vec<f32>,
    /// Exact copies for codecs that have them.
    pub exact: Option<ExactRows>,
}

/// Exact copies `[tokens, kv_heads, head_dim]`, zeros where no query of this or a later pass reads one.
#[derive(Debug)]
pub struct ExactRows {
    /// The rows.
    pub rows: Vec<f32>,
    /// The rule.
    pub window: Window,
    /// Block length of the codec.
    pub block: usize,
}

impl ExactRows {
    /// Whether the query at `query` reads key `key` from the exact copy.
    pub fn reads(&self, key: usize, query: usize) -> bool {
        self.window.exact(key, query, self.block)
    }
}

impl SideStore {
    /// An empty cache; `window` off makes every query read codes (a codec of several tokens per block keeps its own).
    pub fn new(codec: Arc<dyn HostCodec>, window: bool, kv_heads: usize, head_dim: usize) -> Self {
        let keep = window || codec.block_tokens() > 1;
        let window = codec.window().filter(|_| keep).map(|rule| (rule, rule.copy.host()));
        let recent_from = window.as_ref().map_or(0, |(window, _)| window.sinks);
        let (packed, pending, sinks, recent) = Default::default();
        Self {
            codec,
            window,
            kv_heads,
            head_dim,
            tokens: 0,
            packed,
            pending,
            sinks,
            recent,
            recent_from,
        }
    }

    /// What is stored.
    pub fn codec(&self) -> &dyn HostCodec {
        &*self.codec
    }

    /// Tokens appended so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// KV heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Values per row.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Packed codes of the complete blocks, `[blocks, kv_heads, bytes]`.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// Whether some pairs of key and query are read from an exact copy.
    pub fn has_window(&self) -> bool {
        self.window.is_some()
    }

    /// Bytes held: packed codes, and exact copies (which are all that an incomplete block has).
    pub fn bytes(&self) -> (usize, usize) {
        (self.packed.len(), self.sinks.len() + self.recent.len())
    }

    /// Appends rows `[tokens, kv_heads, head_dim]` of a pass, in the model's basis.
    ///
    /// # Panics
    /// When `rows` is not a whole number of tokens.
    pub fn append(&mut self, rows: &[f32]) {
        let token_values = self.kv_heads * self.head_dim;
        assert!(rows.len().is_multiple_of(token_values), "rows of whole tokens");
        if rows.is_empty() {
            return;
        }
        let mut rows = rows.to_vec();
        self.codec.basis().forward(&mut rows, self.head_dim);
        let block = self.codec.block_tokens();
        let appended = rows.len() / token_values;
        if let Some((window, copy)) = &self.window {
            let copies = encode_rows(&**copy, &rows, self.kv_heads, self.head_dim);
            let token_bytes = copies.len() / appended;
            let to_sinks = window.sinks.saturating_sub(self.tokens).min(appended) * token_bytes;
            self.sinks.extend_from_slice(&copies[..to_sinks]);
            // Drop what no query of this pass or a later one reads exactly.
            let stale = window.first_recent(self.tokens, block).saturating_sub(self.recent_from);
            let stale = stale.min(self.recent.len() / token_bytes);
            self.recent.drain(..stale * token_bytes);
            self.recent_from += stale;
            self.recent.extend_from_slice(&copies[to_sinks..]);
        }
        self.pending.extend_from_slice(&rows);
        let complete = self.pending.len() / (block * token_values) * block * token_values;
        self.packed.extend(encode_rows(
            &*self.codec,
            &self.pending[..complete],
            self.kv_heads,
            self.head_dim,
        ));
        self.pending.drain(..complete);
        self.tokens += appended;
    }

    /// Decodes every row.
    pub fn read(&self) -> ReadRows {
        let token_values = self.kv_heads * self.head_dim;
        let mut coded = decode_rows(&*self.codec, &self.packed, self.kv_heads, self.head_dim);
        coded.resize(self.tokens * token_values, 0.0);
        let exact = self.window.as_ref().map(|(window, copy)| {
            let mut rows = vec![0.0; self.tokens * token_values];
            let sinks = decode_rows(&**copy, &self.sinks, self.kv_heads, self.head_dim);
            rows[..sinks.len()].copy_from_slice(&sinks);
            let recent = decode_rows(&**copy, &self.recent, self.kv_heads, self.head_dim);
            let at = rows.len() - recent.len();
            rows[at..].copy_from_slice(&recent);
            ExactRows {
                rows,
                window: *window,
                block: self.codec.block_tokens(),
            }
        });
        ReadRows { coded, exact }
    }
}

/// K and V of one layer.
#[derive(Debug)]
pub struct LayerStore {
    /// Keys.
    pub k: SideStore,
    /// Values.
    pub v: SideStore,
}

impl LayerStore {
    /// An empty cache of a built-in pair.
    pub fn new(pair: &KvPair, window: bool, kv_heads: usize, head_dim: usize) -> Self {
        Self::with_codecs(pair.k.host(), pair.v.host(), window, kv_heads, head_dim)
    }

    /// An empty cache of any two codecs.
    pub fn with_codecs(
        k: Arc<dyn HostCodec>,
        v: Arc<dyn HostCodec>,
        window: bool,
        kv_heads: usize,
        head_dim: usize,
    ) -> Self {
        Self {
            k: SideStore::new(k, window, kv_heads, head_dim),
            v: SideStore::new(v, window, kv_heads, head_dim),
        }
    }

    /// Takes query rows into the basis of the keys.
    pub fn query_basis(&self, queries: &mut [f32]) {
        self.k.codec.basis().forward(queries, self.k.head_dim);
    }

    /// Takes attention output rows out of the basis of the values.
    pub fn output_basis(&self, outputs: &mut [f32]) {
        self.v.codec.basis().inverse(outputs, self.v.head_dim);
    }
}
