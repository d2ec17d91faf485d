//! `rk4v4-e8`: INT4 keys snapped to the E8 lattice and rounded again, in two lineages; `rk6v4-e8` the same with 6 bits.
//!
//! ```text
//! nearest_D8(z):  r = rne(z); if sum(r) is odd, move the coordinate with the largest |z - r| (lowest index on a tie)
//!                 to its other neighbour (upwards if it was exact)
//! nearest_E8(z):  a = nearest_D8(z), b = nearest_D8(z - 0.5) + 0.5;  b if |z - b|^2 < |z - a|^2, else a
//! per 64 values:  s = FP16(max|y| / M)            per 8: p = nearest_E8(y / s), code = clamp(rne(p))
//! decode:         code * s
//! ```
//!
//! No coset bit is stored: half-integer points, chosen by 47 % of Gaussian blocks, round back to even integers. The squared
//! error is therefore 2.3 times that of plain INT4 on the same grid; the format is here to be measured, not recommended.
//! K in the Hadamard-256 (`@b`) or Hadamard-64 (`@a`) basis, V as in the lineage's `rk8v4`.

use crate::arith::{absmax, butterfly_sum, code_factor, f16_scale, rne};
use crate::basis::Basis;
use crate::codec::{CodecSpec, HostCodec, TensorCodec};
use crate::codecs::rk8v4;
use crate::layout::{Layout, Plane};
use crate::registry::{Side, Variant};
use crate::tensor_ops::{self, code_factor as tensor_code_factor, decode_f16, encode_f16, split_entries};
use burn::tensor::{Int, Tensor, backend::Backend};
use perplexity_kernels::numeric::f16_to_f32;

/// The variants of this file.
pub const VARIANTS: &[Variant] = &[
    Variant {
        name: "rk4v4-e8@b",
        recorded: "rotated-k4e8g64-v4g32",
        k: Side::E8Snap(E8Snap {
            basis: Basis::Hadamard256,
            bits: 4,
            max: 7.0,
        }),
        v: rk8v4::VALUES_B,
    },
    Variant {
        name: "rk4v4-e8@a",
        recorded: "rk4v4-e8@a",
        k: Side::E8Snap(E8Snap {
            basis: Basis::Hadamard64,
            bits: 4,
            max: 7.0,
        }),
        v: rk8v4::VALUES_A,
    },
    Variant {
        name: "rk6v4-e8",
        recorded: "rk6v4-e8",
        k: Side::E8Snap(E8Snap {
            basis: Basis::Hadamard256,
            bits: 6,
            max: 31.0,
        }),
        v: rk8v4::VALUES_B,
    },
];

const GROUP: usize = 64;
const BLOCK: usize = 8;

/// Integer codes of rounded E8 points, an FP16 scale per 64 values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct E8Snap {
    /// Basis of the stored rows.
    pub basis: Basis,
    /// Bits of a code, two's complement; the whole range is used.
    pub bits: u32,
    /// The scale is `max|y| / max`.
    pub max: f32,
}

fn nearest_d8(z: &[f32; BLOCK]) -> [f32; BLOCK] {
    let mut r = z.map(rne);
    if r.iter().sum::<f32>() % 2.0 != 0.0 {
        let mut worst = (-1.0, 0);
        for j in 0..BLOCK {
            let distance = (z[j] - r[j]).abs();
            if distance > worst.0 {
                worst = (distance, j);
            }
        }
        r[worst.1] += if z[worst.1] - r[worst.1] >= 0.0 { 1.0 } else { -1.0 };
    }
    r
}

/// The point of E8 nearest to `z`; the integer coset on a tie.
pub fn nearest_e8(z: &[f32; BLOCK]) -> [f32; BLOCK] {
    let a = nearest_d8(z);
    let b = nearest_d8(&z.map(|value| value - 0.5)).map(|value| value + 0.5);
    let distance = |p: &[f32; BLOCK]| {
        butterfly_sum::<BLOCK>(std::array::from_fn(|j| {
            let difference = z[j] - p[j];
            difference * difference
        }))
    };
    if distance(&b) < distance(&a) { b } else { a }
}

impl CodecSpec for E8Snap {
    fn basis(&self) -> Basis {
        self.basis
    }
    fn layout(&self, head_dim: usize) -> Layout {
        Layout(vec![
            Plane::new("codes", head_dim, self.bits),
            Plane::new("scales", head_dim / GROUP, 16),
        ])
    }
}

impl HostCodec for E8Snap {
    fn encode(&self, rows: &[f32], entries: &mut [u16]) {
        let (codes, scales) = entries.split_at_mut(rows.len());
        let half = (1 << (self.bits - 1)) as f32;
        for ((y, codes), word) in rows.chunks_exact(GROUP).zip(codes.chunks_exact_mut(GROUP)).zip(scales) {
            let (stored, scale) = f16_scale(absmax(y) / self.max);
            *word = stored;
            let factor = code_factor(scale);
            if factor == 0.0 {
                codes.fill(0);
                continue;
            }
            for (codes, y) in codes.chunks_exact_mut(BLOCK).zip(y.chunks_exact(BLOCK)) {
                let point = nearest_e8(&std::array::from_fn(|j| y[j] * factor));
                for (code, coordinate) in codes.iter_mut().zip(point) {
                    let level = rne(coordinate).clamp(-half, half - 1.0) as i32;
                    *code = (level & ((1 << self.bits) - 1)) as u16;
                }
            }
        }
    }

    fn decode(&self, entries: &[u16], rows: &mut [f32]) {
        let (codes, scales) = entries.split_at(rows.len());
        let unused = 16 - self.bits;
        for ((y, codes), word) in rows.chunks_exact_mut(GROUP).zip(codes.chunks_exact(GROUP)).zip(scales) {
            let scale = f16_to_f32(*word);
            for (value, code) in y.iter_mut().zip(codes) {
                *value = f32::from((*code << unused) as i16 >> unused) * scale;
            }
        }
    }
}

/// [`nearest_d8`] on rows `[blocks, 8]`.
fn nearest_d8_tensor<B: Backend>(z: Tensor<B, 2>) -> Tensor<B, 2> {
    let r = tensor_ops::rne(z.clone());
    let odd = r.clone().sum_dim(1).int().remainder_scalar(2);
    let worst = tensor_ops::first_argmin(-(z.clone() - r.clone()).abs());
    let coordinates = Tensor::<B, 1, Int>::arange(0..BLOCK as i64, &z.device()).unsqueeze::<2>();
    let moved = (coordinates.equal(worst).int() * odd).float();
    let direction = (z - r.clone()).greater_equal_elem(0.0).float() * 2.0 - 1.0;
    r + moved * direction
}

impl<B: Backend> TensorCodec<B> for E8Snap {
    fn store(&self, rows: Tensor<B, 3>) -> Tensor<B, 3, Int> {
        let [tokens, heads, dim] = rows.dims();
        let groups = rows.reshape([tokens, heads, dim / GROUP, GROUP]);
        let scales = encode_f16(tensor_ops::absmax(groups.clone()) / self.max);
        let factor = tensor_code_factor(decode_f16(scales.clone())).unsqueeze_dim(3);
        let z: Tensor<B, 2> = tensor_ops::scaled(groups, factor).reshape([tokens * heads * dim / BLOCK, BLOCK]);
        let a = nearest_d8_tensor(z.clone());
        let b = nearest_d8_tensor(z.clone() - 0.5) + 0.5;
        let distance = |p: Tensor<B, 2>| {
            let difference = z.clone() - p;
            tensor_ops::butterfly_sum(difference.clone() * difference)
        };
        let shape = a.dims();
        let other = distance(b.clone()).lower(distance(a.clone())).expand(shape);
        let half = f64::from(1 << (self.bits - 1));
        let codes = tensor_ops::rne(a.mask_where(other, b)).clamp(-half, half - 1.0).int();
        let codes = codes.remainder_scalar(1 << self.bits).reshape([tokens, heads, dim]);
        Tensor::cat(vec![codes, scales], 2)
    }

    fn load(&self, entries: Tensor<B, 3, Int>) -> Tensor<B, 3> {
        let [tokens, heads, count] = entries.dims();
        let dim = count * GROUP / (GROUP + 1);
        let [codes, scales] = split_entries(entries, [dim, dim / GROUP]);
        let half = 1 << (self.bits - 1);
        let codes = (codes + half).remainder_scalar(2 * half) - half;
        let values = codes.float().reshape([tokens, heads, dim / GROUP, GROUP]);
        (values * decode_f16(scales).unsqueeze_dim(3)).reshape([tokens, heads, dim])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// E8 is the set of integer or of half-integer points with an even coordinate sum; 240 minimal vectors lie at
        /// distance sqrt(2), so a nearest point has no neighbour among them that is nearer.
        #[test]
        fn nearest_e8_is_a_lattice_point_with_no_nearer_neighbour(z in proptest::array::uniform8(-6f32..6.0)) {
            let p = nearest_e8(&z);
            let half = p[0].fract() != 0.0;
            prop_assert!(p.iter().all(|c| (c.fract() != 0.0) == half));
            prop_assert_eq!(p.iter().sum::<f32>() % 2.0, 0.0);
            let distance = |q: &[f32; 8]| (0..8).map(|j| f64::from(z[j] - q[j]).powi(2)).sum::<f64>();
            let own = distance(&p);
            for root in 0..240u16 {
                let v = crate::codecs::rk2v4_e8::root_quarters(root);
                let q: [f32; 8] = std::array::from_fn(|j| p[j] + f32::from(v[j]) / 4.0);
                prop_assert!(own <= distance(&q) + 1e-4);
            }
        }
    }
}
