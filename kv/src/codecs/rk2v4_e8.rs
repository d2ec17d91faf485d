//! `rk2v4-e8`: keys as a minimal vector of E8, a logarithmic radius and one axis correction per 8 values.
//!
//! ```text
//! per 64 values s = FP16(max|y| / 7); per block z of 8: byte 0 = root, byte 1 = radius << 4 | axis
//! n = |z|, rel = n / (s 2 sqrt 2),  rad = rel < 0.08 ? 0 : 1 + #{RB <= rel};  rad = 0: both bytes 0
//! u = z / n, root = minimal vector d with the largest <u, d>, axis = largest coordinate of u - <u, d> d, and its sign
//! decode: v = 4 * root, v[axis] += its sign, code = rne(v * RS[rad]), value = code * s
//! ```
//!
//! Roots 0..111 are pairs (i < j, lexicographic, four signs each) of entries +-4, roots 112..239 have entries +-2 with an
//! even number of minus signs; 240..255 decode to zero. `@b` and `@a2` rotate K with Hadamard-256, `@a` with Hadamard-64;
//! V as in the lineage's `rk8v4` (`@a2` has the V of `@a`).

use crate::arith::{absmax, butterfly_sum, f16_scale, rne};
use crate::basis::Basis;
use crate::codec::{CodecSpec, HostCodec, TensorCodec};
use crate::codecs::rk8v4;
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, decode_f16, encode_f16, lookup, split_entries};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use perplexity_kernels::numeric::f16_to_f32;

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "rk2v4-e8@b",
        recorded: "rotated-k2e8g64-v4g32",
        k: Side::E8Root(E8Root {
            basis: Basis::Hadamard256,
        }),
        v: rk8v4::VALUES_B,
    },
    Variant {
        name: "rk2v4-e8@a",
        recorded: "rk2v4-e8@a",
        k: Side::E8Root(E8Root {
            basis: Basis::Hadamard64,
        }),
        v: rk8v4::VALUES_A,
    },
    Variant {
        name: "rk2v4-e8@a2",
        recorded: "rk2v4-e8@a2",
        k: Side::E8Root(E8Root {
            basis: Basis::Hadamard256,
        }),
        v: rk8v4::VALUES_A,
    },
];

const GROUP: usize = 64;
const BLOCK: usize = 8;
/// First root of the half-integer kind, and the number of roots.
const HALF_ROOTS: u16 = 112;
const ROOTS: u16 = 240;
/// 1/sqrt(2): turns a root, of norm sqrt(2), into a unit vector.
const ROOT_TO_UNIT: f32 = std::f32::consts::FRAC_1_SQRT_2;
/// Smallest relative radius that is not zero.
const SMALLEST_RADIUS: f32 = 0.08;
/// Norm of a root in units of the group scale, as the encoder writes it.
#[allow(clippy::excessive_precision, reason = "the literal of the format")]
const ROOT_NORM: f32 = 2.828_427_1;
/// Keeps quotients finite for tiny blocks.
const EPSILON: f32 = 1e-8;
/// Radius of index k, `0.5 * 2^((k - 8)/3)`, as the format writes it.
const RADII: [f32; 16] = [
    0.0, 0.0992, 0.1250, 0.1575, 0.1984, 0.2500, 0.3150, 0.3969, 0.5000, 0.6300, 0.7937, 1.0000, 1.2599, 1.5874,
    2.0000, 2.5198,
];
/// Smallest relative radius of index k = 2..15, `2^((k - 8.5)/3)`.
#[allow(
    clippy::approx_constant,
    clippy::excessive_precision,
    reason = "the literals of the format"
)]
const RADIUS_BOUNDS: [f32; 14] = [
    0.222_724_7,
    0.280_615_5,
    0.353_553_4,
    0.445_449_4,
    0.561_231,
    0.707_106_8,
    0.890_898_7,
    1.122_462,
    1.414_213_6,
    1.781_797_4,
    2.244_924_1,
    2.828_427_1,
    3.563_594_9,
    4.489_848_2,
];

/// Root, radius and axis per 8 values, an FP16 scale per 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct E8Root {
    /// Basis of the stored rows.
    pub basis: Basis,
}

/// Coordinates of a root times 4; zeros from 240 up.
pub fn root_quarters(root: u16) -> [i8; BLOCK] {
    let mut v = [0; BLOCK];
    if root < HALF_ROOTS {
        let (i, j) = PAIRS[usize::from(root / 4)];
        v[i] = if root & 2 != 0 { 4 } else { -4 };
        v[j] = if root & 1 != 0 { 4 } else { -4 };
    } else if root < ROOTS {
        let plus = root - HALF_ROOTS;
        let minus_count = 7 - plus.count_ones();
        for (j, entry) in v.iter_mut().enumerate() {
            let positive = if j < 7 {
                plus >> j & 1 == 1
            } else {
                minus_count.is_multiple_of(2)
            };
            *entry = if positive { 2 } else { -2 };
        }
    }
    v
}

/// The 28 coordinate pairs in lexicographic order.
const PAIRS: [(usize, usize); 28] = {
    let mut pairs = [(0, 0); 28];
    let (mut at, mut i) = (0, 0);
    while i < BLOCK {
        let mut j = i + 1;
        while j < BLOCK {
            pairs[at] = (i, j);
            at += 1;
            j += 1;
        }
        i += 1;
    }
    pairs
};

/// Root and axis of a block direction `u`.
fn root_and_axis(u: &[f32; BLOCK]) -> (u16, u16) {
    let magnitude = u.map(f32::abs);
    let mut first = 0;
    for j in 1..BLOCK {
        if magnitude[j] > magnitude[first] {
            first = j;
        }
    }
    let mut second = usize::from(first == 0);
    for j in 0..BLOCK {
        if j != first && magnitude[j] > magnitude[second] {
            second = j;
        }
    }
    let pair_score = magnitude[first] + magnitude[second];
    let (i, j) = (first.min(second), first.max(second));
    let sign_bit = |k: usize| u16::from(u[k] >= 0.0);

    let mut plus: [bool; BLOCK] = u.map(|value| value >= 0.0);
    let mut half_score = 0.5 * butterfly_sum(magnitude);
    if plus.iter().filter(|plus| !**plus).count() % 2 == 1 {
        let mut smallest = 0;
        for j in 1..BLOCK {
            if magnitude[j] < magnitude[smallest] {
                smallest = j;
            }
        }
        plus[smallest] = !plus[smallest];
        half_score -= magnitude[smallest];
    }
    let root = if pair_score >= half_score {
        ((i * (15 - i) / 2 + (j - i - 1)) * 4) as u16 + 2 * sign_bit(i) + sign_bit(j)
    } else {
        HALF_ROOTS + (0..7).map(|j| u16::from(plus[j]) << j).sum::<u16>()
    };

    let d = root_quarters(root).map(|quarter| f32::from(quarter) * 0.25 * ROOT_TO_UNIT);
    let along = butterfly_sum::<BLOCK>(std::array::from_fn(|j| u[j] * d[j]));
    let residual: [f32; BLOCK] = std::array::from_fn(|j| u[j] - along * d[j]);
    let mut axis = 0;
    for j in 1..BLOCK {
        if residual[j].abs() > residual[axis].abs() {
            axis = j;
        }
    }
    (root, axis as u16 * 2 + u16::from(residual[axis] < 0.0))
}

impl CodecSpec for E8Root {
    fn basis(&self) -> Basis {
        self.basis
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![
            Plane::new("root, radius-axis pairs", head_dim / 4, 8),
            Plane::new("scales", head_dim / GROUP, 16),
        ])
    }
}

impl HostCodec for E8Root {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, scales) = entries.split_at_mut(rows.len() / 4);
        for ((y, codes), word) in rows
            .chunks_exact(GROUP)
            .zip(codes.chunks_exact_mut(GROUP / 4))
            .zip(scales)
        {
            let (stored, scale) = f16_scale(absmax(y) / 7.0);
            *word = stored;
            for (pair, z) in codes.chunks_exact_mut(2).zip(y.chunks_exact(BLOCK)) {
                let norm = butterfly_sum::<BLOCK>(std::array::from_fn(|j| z[j] * z[j])).sqrt();
                let relative = norm / (scale * ROOT_NORM + EPSILON);
                // A NaN (non-finite scale) is no radius either: the scale alone makes the block decode to NaN.
                if !scale.is_finite() || !norm.is_finite() || relative < SMALLEST_RADIUS {
                    pair.fill(0);
                    continue;
                }
                let radius = 1 + RADIUS_BOUNDS
                    .iter()
                    .map(|bound| u16::from(*bound <= relative))
                    .sum::<u16>();
                let factor = 1.0 / (norm + EPSILON);
                let (root, axis) = root_and_axis(&std::array::from_fn(|j| z[j] * factor));
                pair.copy_from_slice(&[root, radius << 4 | axis]);
            }
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, scales) = entries.split_at(rows.len() / 4);
        for ((y, codes), word) in rows
            .chunks_exact_mut(GROUP)
            .zip(codes.chunks_exact(GROUP / 4))
            .zip(scales)
        {
            let scale = f16_to_f32(*word);
            for (y, pair) in y.chunks_exact_mut(BLOCK).zip(codes.chunks_exact(2)) {
                let (root, radius, axis) = (pair[0], usize::from(pair[1] >> 4), pair[1] & 15);
                let mut v = root_quarters(root);
                if root < ROOTS {
                    v[usize::from(axis >> 1)] += if axis & 1 == 1 { -1 } else { 1 };
                }
                for (value, quarter) in y.iter_mut().zip(v) {
                    *value = rne(f32::from(quarter) * RADII[radius]) * scale;
                }
            }
        }
    }
}

impl<B: Backend> TensorCodec<B> for E8Root {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let blocks = tokens * heads * dim / BLOCK;
        let groups = rows.reshape([tokens, heads, dim / GROUP, GROUP]);
        let scales = encode_f16(tensor_ops::absmax(groups.clone()) / 7.0);
        let scale =
            decode_f16(scales.clone())
                .unsqueeze_dim::<4>(3)
                .expand([tokens, heads, dim / GROUP, GROUP / BLOCK]);
        let scale: Tensor<B, 2> = scale.reshape([blocks, 1]);
        let z: Tensor<B, 2> = groups.reshape([blocks, BLOCK]);
        let norm = tensor_ops::butterfly_sum(z.clone() * z.clone()).sqrt();
        let relative = norm.clone() / (scale.clone() * ROOT_NORM + EPSILON);
        let usable = scale.is_finite().bool_and(norm.clone().is_finite());
        let usable = usable.bool_and(relative.clone().greater_equal_elem(SMALLEST_RADIUS));
        let radius = tensor_ops::count_at_least(relative, &RADIUS_BOUNDS) + 1;
        let u = tensor_ops::scaled(
            z,
            tensor_ops::reciprocal(norm + EPSILON).mask_fill(usable.clone().bool_not(), 0.0),
        );

        // The two largest magnitudes, the smallest one, and the scores of both kinds of root.
        let magnitude = u.clone().abs();
        let coordinates = Tensor::<B, 1, Int>::arange(0..BLOCK as i64, &u.device()).unsqueeze::<2>();
        let at = |index: Tensor<B, 2, Int>| coordinates.clone().equal(index);
        let pick = |x: Tensor<B, 2>, index: Tensor<B, 2, Int>| x.gather(1, index);
        let first = tensor_ops::first_argmin(-magnitude.clone());
        let second = tensor_ops::first_argmin(-magnitude.clone().mask_fill(at(first.clone()), -1.0));
        let pair_score = pick(magnitude.clone(), first.clone()) + pick(magnitude.clone(), second.clone());
        let i = first.clone().min_pair(second.clone());
        let j = first.max_pair(second);
        let plus = u.clone().greater_equal_elem(0.0).int();
        let plus_at = |index: Tensor<B, 2, Int>| plus.clone().gather(1, index);
        let pair_index = i.clone() * (-i.clone() + 15) / 2 + j.clone() - i.clone() - 1;
        let pair_root = pair_index * 4 + plus_at(i) * 2 + plus_at(j);

        let odd = plus.clone().sum_dim(1).remainder_scalar(2);
        let smallest = tensor_ops::first_argmin(magnitude.clone());
        let half_score = tensor_ops::butterfly_sum(magnitude.clone()) * 0.5
            - pick(magnitude, smallest.clone()) * odd.clone().float();
        let flipped = (plus.clone() + at(smallest).int() * odd).remainder_scalar(2);
        let weights = Tensor::<B, 1, Int>::from_ints([1, 2, 4, 8, 16, 32, 64, 0], &u.device()).unsqueeze::<2>();
        let half_root = (flipped * weights).sum_dim(1) + i64::from(HALF_ROOTS);
        let root = half_root.mask_where(pair_score.greater_equal(half_score), pair_root);

        let d = roots::<B>(root.clone()) * 0.25 * ROOT_TO_UNIT;
        let along = tensor_ops::butterfly_sum(u.clone() * d.clone());
        let residual = u - d * along;
        let axis = tensor_ops::first_argmin(-residual.clone().abs());
        let axis = axis.clone() * 2 + pick(residual, axis).lower_elem(0.0).int();
        let pairs = Tensor::cat(vec![root, radius * 16 + axis], 1) * usable.int();
        Tensor::cat(vec![pairs.reshape([tokens, heads, dim / 4]), scales], 2)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, count] = entries.dims();
        let dim = count * GROUP / (GROUP / 4 + 1);
        let [pairs, scales] = split_entries(entries, [dim / 4, dim / GROUP]);
        let blocks = tokens * heads * dim / BLOCK;
        let pairs: Tensor<B, 2, Int> = pairs.reshape([blocks, 2]);
        let root = pairs.clone().narrow(1, 0, 1);
        let second = pairs.narrow(1, 1, 1);
        let axis = second.clone().remainder_scalar(16);
        let coordinates = Tensor::<B, 1, Int>::arange(0..BLOCK as i64, &root.device()).unsqueeze::<2>();
        let correction = coordinates.equal(axis.clone() / 2).int() * (axis.remainder_scalar(2) * -2 + 1);
        let correction = correction * root.clone().lower_elem(i64::from(ROOTS)).int();
        let v = roots::<B>(root) + correction.float();
        let codes = tensor_ops::rne(v * lookup(second / 16, &RADII));
        let groups = codes.reshape([tokens, heads, dim / GROUP, GROUP]);
        (groups * decode_f16(scales).unsqueeze_dim(3)).reshape([tokens, heads, dim])
    }
}

/// Four times the coordinates `[blocks, 8]` of roots `[blocks, 1]`.
fn roots<B: Backend>(root: Tensor<B, 2, Int>) -> Tensor<B, 2> {
    let [blocks, _] = root.dims();
    let table: Vec<f32> = (0..256).flat_map(root_quarters).map(f32::from).collect();
    let table = Tensor::<B, 2>::from_data(TensorData::new(table, [256, BLOCK]), &root.device());
    table.select(0, root.reshape([blocks]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_roots_are_the_240_minimal_vectors_of_e8() {
        let roots: std::collections::BTreeSet<[i8; 8]> = (0..ROOTS).map(root_quarters).collect();
        assert_eq!(roots.len(), 240);
        for root in &roots {
            assert_eq!(
                root.iter().map(|c| i32::from(*c).pow(2)).sum::<i32>(),
                32,
                "norm 4 sqrt 2"
            );
            assert_eq!(
                root.iter().map(|c| i32::from(*c)).sum::<i32>() % 8,
                0,
                "even coordinate sum"
            );
        }
        assert!((ROOTS..256).all(|root| root_quarters(root) == [0; 8]));
    }

    #[test]
    fn radius_tables_are_geometric() {
        for (k, radius) in RADII.into_iter().enumerate().skip(1) {
            assert!((f64::from(radius) - 0.5 * 2f64.powf((k as f64 - 8.0) / 3.0)).abs() < 5.1e-5);
        }
        for (k, bound) in (2..16).zip(RADIUS_BOUNDS) {
            assert!((f64::from(bound) / 2f64.powf((f64::from(k) - 8.5) / 3.0) - 1.0).abs() < 3e-7);
        }
    }
}
