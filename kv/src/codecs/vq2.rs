//! `vq2`: 16 bits per word of 8 values, a pattern of magnitudes times signs of even parity, one FP16 scale per row.
//!
//! ```text
//! word code = pattern | signs of coordinates 0..6 << 9          coordinate 7 makes the number of set signs even
//! decode      y_j = S * (sign_j ? -P[pattern][j] : P[pattern][j])
//!
//! encode      sigma = sqrt(|y|^2 / 256),  A_j = |y_j| * (16 / sigma),  odd = parity of the signs of the word
//!             t_j = A_j P_j,  D = |P|^2 - 2 (t_0 + .. + t_7) + (odd ? 4 min_j t_j : 0)
//!             pattern = argmin D (smallest index);  odd: flip the sign of the first j that minimises t_j
//!             S = FP16(|y|^2 / <c, y>), so that <S c, y> = |y|^2
//! ```
//!
//! D is the squared distance up to the constant |A|^2; taking the wrong sign on coordinate j costs 4 t_j. One coordinate
//! of a pattern may be slightly negative: that is where the parity flip lands. The scale is not the one of least squared
//! error; it removes the shrinkage along the true row. Hadamard-256 basis for K and V.
//!
//! The 512 x 8 table holds INT8 levels in units of 1/16 of a unit-variance coordinate, sorted by squared norm and then
//! lexicographically; `examples/train_vq2_codebook.rs` is the training program.
//!
//! Recent keys are part of the format: a query reads the first 64 keys and those at most 768 positions before it from an
//! INT8 copy of the rotated row.

use crate::arith::{NAN_SCALE, sum_of_squares, unbiased_scale, word_dot};
use crate::basis::Basis;
use crate::codec::{CodecSpec, ExactCopy, HEAD_DIM, HostCodec, TensorCodec, Window};
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, decode_f16, split_entries};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use perplexity_kernels::numeric::f16_to_f32;

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[Variant {
    name: "vq2",
    recorded: "vq2",
    k: Side::Vq2(Vq2),
    v: Side::Vq2(Vq2),
}];

/// The exact window of `vq2` and `k4v2`.
pub const WINDOW: Window = Window {
    sinks: 64,
    recent: 768,
    copy: ExactCopy::Int8,
};

/// Values per word.
pub const WORD: usize = 8;
/// Patterns in the table.
pub const PATTERNS: usize = 512;
/// Table units per unit-variance coordinate.
pub const LEVEL_UNIT: f32 = 16.0;
const WORDS: usize = HEAD_DIM / WORD;

/// The table, pattern after pattern, as signed bytes.
pub static CODEBOOK: &[u8; PATTERNS * WORD] = include_bytes!("vq2_codebook.bin");

/// Level of one coordinate of a pattern.
const fn level(pattern: usize, j: usize) -> f32 {
    CODEBOOK_BYTES[pattern * WORD + j] as i8 as f32
}

const CODEBOOK_BYTES: &[u8; PATTERNS * WORD] = include_bytes!("vq2_codebook.bin");

/// Levels with the coordinate outermost, `[8][512]`: the 512 distances of a word advance in vector registers.
static LEVELS_BY_COORDINATE: [[f32; PATTERNS]; WORD] = {
    let mut table = [[0.0; PATTERNS]; WORD];
    let mut p = 0;
    while p < PATTERNS {
        let mut j = 0;
        while j < WORD {
            table[j][p] = level(p, j);
            j += 1;
        }
        p += 1;
    }
    table
};

/// Squared norm of each pattern.
static SQUARED_NORMS: [f32; PATTERNS] = {
    let mut norms = [0.0; PATTERNS];
    let mut p = 0;
    while p < PATTERNS {
        let mut j = 0;
        while j < WORD {
            norms[p] += level(p, j) * level(p, j);
            j += 1;
        }
        p += 1;
    }
    norms
};

/// Pattern-and-sign codes of 8 values, one FP16 scale per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vq2;

impl CodecSpec for Vq2 {
    fn basis(&self) -> Basis {
        Basis::Hadamard256
    }
    fn window(&self) -> Option<Window> {
        Some(WINDOW)
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![
            Plane::new("words", head_dim / WORD, 16),
            Plane::new("scale", 1, 16),
        ])
    }
}

/// Pattern of the smallest distance to magnitudes `a`, one pattern at a time: the definition.
pub fn nearest_pattern_reference(a: &[f32; WORD], odd: bool) -> usize {
    let mut best = (f32::INFINITY, 0);
    for (p, norm) in SQUARED_NORMS.iter().enumerate() {
        let mut dot = a[0] * level(p, 0);
        let mut smallest = dot;
        for (j, value) in a.iter().enumerate().skip(1) {
            let t = value * level(p, j);
            dot += t;
            smallest = smallest.min(t);
        }
        let mut distance = (-2.0f32).mul_add(dot, *norm);
        if odd {
            distance = 4.0f32.mul_add(smallest, distance);
        }
        if distance < best.0 {
            best = (distance, p);
        }
    }
    best.1
}

/// [`nearest_pattern_reference`] over lanes of patterns. Doubling and quadrupling are exact, so plain operations round
/// where the fused ones do.
pub fn nearest_pattern(a: &[f32; WORD], odd: bool) -> usize {
    const LANES: usize = 16;
    let four_if_odd = if odd { 4.0 } else { 0.0 };
    let mut best = [f32::INFINITY; LANES];
    let mut best_at = [0u32; LANES];
    for first in (0..PATTERNS).step_by(LANES) {
        let (mut dot, mut smallest) = ([0f32; LANES], [0f32; LANES]);
        for (j, value) in a.iter().enumerate() {
            let levels = &LEVELS_BY_COORDINATE[j][first..first + LANES];
            for l in 0..LANES {
                let t = value * levels[l];
                dot[l] = if j == 0 { t } else { dot[l] + t };
                smallest[l] = if j == 0 || t < smallest[l] { t } else { smallest[l] };
            }
        }
        let norms = &SQUARED_NORMS[first..first + LANES];
        for l in 0..LANES {
            let distance = (norms[l] - 2.0 * dot[l]) + four_if_odd * smallest[l];
            if distance < best[l] {
                (best[l], best_at[l]) = (distance, first as u32);
            }
        }
    }
    // Each lane holds its first minimum; the winner is the smallest distance, then the smallest index.
    let mut winner = (f32::INFINITY, 0);
    for l in 0..LANES {
        let at = best_at[l] as usize + l;
        if best[l] < winner.0 || (best[l] == winner.0 && best[l] < f32::INFINITY && at < winner.1) {
            winner = (best[l], at);
        }
    }
    winner.1
}

impl HostCodec for Vq2 {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (words, scale) = entries.split_at_mut(WORDS);
        let energy = sum_of_squares(rows);
        let sigma = (energy / HEAD_DIM as f32).sqrt();
        words.fill(0);
        if sigma == 0.0 || !sigma.is_finite() {
            scale[0] = if sigma == 0.0 { 0 } else { NAN_SCALE };
            return;
        }
        let unit = LEVEL_UNIT / sigma;
        let mut levels = [0f32; HEAD_DIM];
        for ((code, y), levels) in words
            .iter_mut()
            .zip(rows.chunks_exact(WORD))
            .zip(levels.chunks_exact_mut(WORD))
        {
            let a: [f32; WORD] = std::array::from_fn(|j| y[j].abs() * unit);
            let mut signs = y
                .iter()
                .enumerate()
                .fold(0u16, |signs, (j, value)| signs | u16::from(*value < 0.0) << j);
            let odd = signs.count_ones() % 2 == 1;
            let pattern = nearest_pattern(&a, odd);
            if odd {
                let mut flip = (f32::INFINITY, 0);
                for (j, value) in a.iter().enumerate() {
                    let t = value * level(pattern, j);
                    if t < flip.0 {
                        flip = (t, j);
                    }
                }
                signs ^= 1 << flip.1;
            }
            for (j, c) in levels.iter_mut().enumerate() {
                *c = if signs >> j & 1 == 1 {
                    -level(pattern, j)
                } else {
                    level(pattern, j)
                };
            }
            *code = pattern as u16 | (signs & 0x7F) << 9;
        }
        scale[0] = unbiased_scale(energy, word_dot(rows, &levels));
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (words, scale) = entries.split_at(WORDS);
        let scale = f16_to_f32(scale[0]);
        for (y, code) in rows.chunks_exact_mut(WORD).zip(words) {
            let (pattern, stored) = (usize::from(code & 511), code >> 9);
            let signs = stored | (stored.count_ones() as u16 & 1) << 7;
            for (j, value) in y.iter_mut().enumerate() {
                let c = if signs >> j & 1 == 1 {
                    -level(pattern, j)
                } else {
                    level(pattern, j)
                };
                *value = scale * c;
            }
        }
    }
}

/// Rows whose 32 x 512 distances are held at once: 64 KiB of float32 per row and operand.
const TENSOR_ROWS: usize = 128;

impl<B: Backend> TensorCodec<B> for Vq2 {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let rows = rows.reshape([tokens * heads, dim]);
        let parts: Vec<_> = rows.split(TENSOR_ROWS, 0).into_iter().map(store_rows).collect();
        Tensor::cat(parts, 0).reshape([tokens, heads, WORDS + 1])
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, _] = entries.dims();
        let [codes, scale] = split_entries(entries, [WORDS, 1]);
        let levels = pattern_levels(codes.clone().remainder_scalar(512));
        let signs = signs_of(codes / 512);
        (levels * signs).reshape([tokens, heads, HEAD_DIM]) * decode_f16(scale)
    }
}

/// Levels `[tokens, heads, words, 8]` of patterns `[tokens, heads, words]`.
fn pattern_levels<B: Backend>(patterns: Tensor<B, 3, Int>) -> Tensor<B, 4> {
    let [tokens, heads, words] = patterns.dims();
    let table: Vec<f32> = (0..PATTERNS * WORD).map(|i| level(i / WORD, i % WORD)).collect();
    let table = Tensor::<B, 2>::from_data(TensorData::new(table, [PATTERNS, WORD]), &patterns.device());
    table
        .select(0, patterns.reshape([tokens * heads * words]))
        .reshape([tokens, heads, words, WORD])
}

/// +1 or -1 `[tokens, heads, words, 8]` from the seven stored bits `[tokens, heads, words]`.
fn signs_of<B: Backend>(stored: Tensor<B, 3, Int>) -> Tensor<B, 4> {
    let bits: Vec<Tensor<B, 3>> = (0..7)
        .map(|j| (stored.clone() / (1i64 << j)).remainder_scalar(2).float() * -2.0 + 1.0)
        .collect();
    let last = bits.iter().cloned().reduce(|a, b| a * b).expect("seven bits");
    Tensor::stack(bits.into_iter().chain([last]).collect(), 3)
}

/// Entries `[rows, 33]` of rows `[rows, 256]`.
fn store_rows<B: Backend>(rows: Tensor<B, 2>) -> Tensor<B, 2, Int> {
    let [count, _] = rows.dims();
    let device = rows.device();
    let energy = tensor_ops::sum_of_squares(rows.clone());
    let sigma = (energy.clone() / HEAD_DIM as f32).sqrt();
    let finite = energy.clone().is_finite();
    let usable = sigma.clone().greater_elem(0.0).bool_and(finite.clone());
    let unit = (tensor_ops::reciprocal(sigma) * LEVEL_UNIT).mask_fill(usable.clone().bool_not(), 0.0);
    let words = count * WORDS;
    let y: Tensor<B, 2> = rows.clone().reshape([words, WORD]);
    // LEVEL_UNIT is a power of two, so (1 / sigma) * 16 is 16 / sigma to the last bit.
    let a = tensor_ops::scaled(rows.clone().abs(), unit).reshape([words, WORD]);
    let negative = y.clone().lower_elem(0.0).int();
    let odd = negative.clone().sum_dim(1).remainder_scalar(2);

    let (mut dot, mut smallest): (Option<Tensor<B, 2>>, Option<Tensor<B, 2>>) = (None, None);
    for (j, levels) in LEVELS_BY_COORDINATE.iter().enumerate() {
        let levels = TensorData::new(levels.to_vec(), [1, PATTERNS]);
        let t = a.clone().narrow(1, j, 1) * Tensor::<B, 2>::from_data(levels, &device);
        smallest = Some(match smallest {
            None => t.clone(),
            Some(least) => least.min_pair(t.clone()),
        });
        dot = Some(match dot {
            None => t,
            Some(sum) => sum + t,
        });
    }
    let norms = Tensor::<B, 2>::from_data(TensorData::new(SQUARED_NORMS.to_vec(), [1, PATTERNS]), &device);
    let distance = (norms - dot.expect("eight coordinates") * 2.0)
        + smallest.expect("eight coordinates") * (odd.clone().float() * 4.0);
    let pattern = tensor_ops::first_argmin(distance);

    let levels = pattern_levels(pattern.clone().reshape([count, 1, WORDS])).reshape([words, WORD]);
    let flip_at = tensor_ops::first_argmin(a * levels.clone());
    let coordinates = Tensor::<B, 1, Int>::arange(0..WORD as i64, &device).unsqueeze::<2>();
    let flips = coordinates.equal(flip_at).int() * odd;
    let signs = (negative + flips).remainder_scalar(2);
    let c = levels * (signs.clone().float() * -2.0 + 1.0);
    let weights = Tensor::<B, 1, Int>::from_ints([1, 2, 4, 8, 16, 32, 64, 0], &device).unsqueeze::<2>();
    let code = (pattern + (signs * weights).sum_dim(1) * 512).reshape([count, WORDS]);

    let projection = tensor_ops::word_dot(rows, c.reshape([count, HEAD_DIM]));
    let scale = tensor_ops::unbiased_scale(energy, projection);
    let code = code * usable.clone().int();
    let scale = (scale * usable.int()).mask_fill(finite.bool_not(), i64::from(NAN_SCALE));
    Tensor::cat(vec![code, scale], 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_table_is_sorted_by_norm_and_begins_with_known_rows() {
        assert_eq!(CODEBOOK[..8], [8, 4, 5, 5, 5, 4, 6, 5]);
        let key = |p: usize| {
            (
                SQUARED_NORMS[p] as i32,
                std::array::from_fn::<i32, WORD, _>(|j| level(p, j) as i32),
            )
        };
        assert!((1..PATTERNS).all(|p| key(p - 1) < key(p)));
        assert_eq!((SQUARED_NORMS[0], SQUARED_NORMS[PATTERNS - 1]), (232.0, 3857.0));
        let levels: Vec<i32> = CODEBOOK.iter().map(|byte| i32::from(*byte as i8)).collect();
        assert_eq!((levels.iter().min(), levels.iter().max()), (Some(&-15), Some(&53)));
    }

    proptest! {
        #[test]
        fn the_vector_search_equals_the_definition(a in proptest::array::uniform8(0f32..60.0), odd in any::<bool>()) {
            prop_assert_eq!(nearest_pattern(&a, odd), nearest_pattern_reference(&a, odd));
        }

        #[test]
        fn ties_go_to_the_smallest_pattern(a in proptest::array::uniform8(0u8..4), odd in any::<bool>()) {
            let a = a.map(f32::from);
            prop_assert_eq!(nearest_pattern(&a, odd), nearest_pattern_reference(&a, odd));
        }
    }
}
