//! Rows of the n-gram table, in wrapping 64-bit arithmetic. With ids `t`, `t[-1] = t[-2] = .. = eos` before a window:
//!
//! ```text
//! ctx[0] = t[p];   ctx[s] = t[p-s], or eos when any of t[p-s .. p-1] is eos
//! m_n    = xor_{k<n} ctx[k] * mult[k]                      for every order n in 2..=ngram_size
//! row[j] = m_n mod size[j] + offset[j]                     for the heads j of that order
//! mult[i] = 2 (mix64(seed + GAMMA (i+1)) mod half) + 1,    half = max(1, floor(floor((2^63-1) / V) / 2))
//! ```
//!
//! `size[j]` are the consecutive primes from `ngram_vocab_size_base` up, `offset[j]` their running sum. A token's own
//! end-of-text does not cut its own n-grams; it cuts those of the tokens after it.

use std::collections::VecDeque;

use crate::config::NgramConfig;

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64, its increment included.
pub fn mix64(value: u64) -> u64 {
    let v = value.wrapping_add(GAMMA);
    let v = (v ^ (v >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let v = (v ^ (v >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    v ^ (v >> 31)
}

/// The hash of one model, its constants computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramHash {
    multipliers: Vec<u64>,
    sizes: Vec<u64>,
    offsets: Vec<u64>,
    heads_per_order: usize,
    rows: u64,
    eos: u32,
}

/// The last `ngram_size - 1` tokens of a window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context(VecDeque<u32>);

impl NgramHash {
    /// The constants for `vocab_size` ids.
    pub fn new(config: &NgramConfig, vocab_size: usize) -> Self {
        let half = (i64::MAX as u64 / (vocab_size as u64).max(1) / 2).max(1);
        let multipliers = (1..=config.size as u64)
            .map(|i| 2 * (mix64(config.seed.wrapping_add(GAMMA.wrapping_mul(i))) % half) + 1)
            .collect();
        let sizes: Vec<u64> = (config.vocab_base..)
            .filter(|&number| is_prime(number))
            .take(config.heads())
            .collect();
        let mut total = 0;
        let offsets = sizes
            .iter()
            .map(|size| {
                total += size;
                total - size
            })
            .collect();
        Self {
            multipliers,
            sizes,
            offsets,
            heads_per_order: config.heads_per_order,
            rows: total.next_multiple_of(config.divisible_by),
            eos: config.eos_token_id,
        }
    }

    /// Rows of the table, padding included.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Rows looked up per token.
    pub fn heads(&self) -> usize {
        self.sizes.len()
    }

    /// Odd multipliers, one per context token.
    pub fn multipliers(&self) -> &[u64] {
        &self.multipliers
    }

    /// Rows of each head.
    pub fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// First row of each head.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// The context at a window's start: nothing but end-of-text.
    pub fn begin(&self) -> Context {
        Context(vec![self.eos; self.multipliers.len() - 1].into())
    }

    /// The rows of the next tokens of a window, [`NgramHash::heads`] per token; `context` moves past them. Every id is
    /// below the vocabulary that the hash was made for.
    pub fn rows_of(&self, context: &mut Context, ids: &[u32]) -> Vec<u64> {
        let mut rows = Vec::with_capacity(ids.len() * self.heads());
        for &id in ids {
            let mut mixed = u64::from(id).wrapping_mul(self.multipliers[0]);
            let mut cut = false;
            let orders = self.multipliers[1..].iter().zip(&context.0).enumerate();
            for (order, (multiplier, &token)) in orders {
                cut |= token == self.eos;
                let token = if cut { self.eos } else { token };
                mixed ^= u64::from(token).wrapping_mul(*multiplier);
                let heads = order * self.heads_per_order..(order + 1) * self.heads_per_order;
                rows.extend(heads.map(|head| mixed % self.sizes[head] + self.offsets[head]));
            }
            context.0.pop_back();
            context.0.push_front(id);
        }
        rows
    }
}

/// By trial division, up to a root of at most 65,536.
fn is_prime(number: u64) -> bool {
    number >= 2 && (2..).take_while(|d| d * d <= number).all(|d| !number.is_multiple_of(d))
}
