//! The orthonormal transform a row goes through before it is stored.
//!
//! ```text
//! H_n[r][c] = (-1)^popcount(r & c) / sqrt(n)          natural (Sylvester) order, H_n H_n = I
//! ```
//!
//! evaluated as log2(n) butterfly stages with ascending strides, each add or subtract one rounded float32 operation, and
//! one exact-by-power-of-four scaling at the end, so that codes are reproducible bit for bit. Because the transform is
//! orthonormal, `q.k = (Hq).(Hk)`: queries take the basis of K, and the attention output leaves the basis of V once.

use std::ops::{Add, Sub};

use burn::tensor::{Tensor, TensorData, backend::Backend};
use perplexity_kernels::{EvaluatorBackend, Precision, ops};

/// Basis in which one side of the cache is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Basis {
    /// As the model computes it.
    Identity,
    /// Hadamard over each block of 64 dimensions on its own.
    Hadamard64,
    /// Hadamard over blocks of 256 dimensions, the whole row at head dimension 256.
    Hadamard256,
    /// `H_n (s * x)` over the whole row (a power of two) with random signs `s` drawn from the seed.
    SignedHadamard {
        /// Seed of the sign vector.
        seed: u64,
    },
}

impl Basis {
    /// Whether rows of `head_dim` values can be transformed.
    pub fn supports(self, head_dim: usize) -> bool {
        match self.block(head_dim) {
            None => true,
            Some(n) => n.is_power_of_two() && head_dim.is_multiple_of(n),
        }
    }

    /// Takes `rows` (whole rows of `head_dim` values) into this basis.
    pub fn forward(self, rows: &mut [f32], head_dim: usize) {
        let Some(n) = self.block(head_dim) else { return };
        if let Basis::SignedHadamard { seed } = self {
            let signs = random_signs(seed, head_dim);
            rows.chunks_exact_mut(head_dim).for_each(|row| apply_signs(row, &signs));
        }
        rows.chunks_exact_mut(n).for_each(hadamard);
    }

    /// Takes `rows` back to the model's basis.
    pub fn inverse(self, rows: &mut [f32], head_dim: usize) {
        let Some(n) = self.block(head_dim) else { return };
        rows.chunks_exact_mut(n).for_each(hadamard);
        if let Basis::SignedHadamard { seed } = self {
            let signs = random_signs(seed, head_dim);
            rows.chunks_exact_mut(head_dim).for_each(|row| apply_signs(row, &signs));
        }
    }

    /// [`Basis::forward`] on the last dimension of a tensor, the same operations in the same order.
    pub fn forward_tensor<B: Backend, const D: usize>(self, rows: Tensor<B, D>) -> Tensor<B, D> {
        let Some(n) = self.block(rows.dims()[D - 1]) else {
            return rows;
        };
        ops::hadamard::reference(self.signed(rows), n)
    }

    /// [`Basis::inverse`] on the last dimension of a tensor.
    pub fn inverse_tensor<B: Backend, const D: usize>(self, rows: Tensor<B, D>) -> Tensor<B, D> {
        let Some(n) = self.block(rows.dims()[D - 1]) else {
            return rows;
        };
        self.signed(ops::hadamard::reference(rows, n))
    }

    /// [`Basis::forward`] on the last dimension of a tensor by the backend's own operation, rounded once.
    pub fn forward_on<B: EvaluatorBackend, const D: usize>(self, x: Tensor<B, D>, to: Precision) -> Tensor<B, D> {
        let Some(n) = self.block(x.dims()[D - 1]) else {
            return B::round(x, to);
        };
        // Signs change no rounding, in whatever type the rows come.
        B::hadamard(self.signed(x), n, to)
    }

    /// [`Basis::inverse`] on the last dimension of a tensor by the backend's own operation, rounded once.
    pub fn inverse_on<B: EvaluatorBackend, const D: usize>(self, x: Tensor<B, D>, to: Precision) -> Tensor<B, D> {
        let rows = match self.block(x.dims()[D - 1]) {
            None => x,
            // Signs change no rounding.
            Some(n) => self.signed(B::hadamard(x, n, to)),
        };
        B::round(rows, to)
    }

    /// [`Basis::forward`] in f64.
    pub fn forward_f64(self, rows: &mut [f64], head_dim: usize) {
        let Some(n) = self.block(head_dim) else { return };
        self.apply_signs_f64(rows, head_dim);
        rows.chunks_exact_mut(n).for_each(hadamard_f64);
    }

    /// [`Basis::inverse`] in f64.
    pub fn inverse_f64(self, rows: &mut [f64], head_dim: usize) {
        let Some(n) = self.block(head_dim) else { return };
        rows.chunks_exact_mut(n).for_each(hadamard_f64);
        self.apply_signs_f64(rows, head_dim);
    }

    fn apply_signs_f64(self, rows: &mut [f64], head_dim: usize) {
        let Basis::SignedHadamard { seed } = self else { return };
        let signs = random_signs(seed, head_dim);
        for row in rows.chunks_exact_mut(head_dim) {
            row.iter_mut()
                .zip(&signs)
                .for_each(|(value, sign)| *value *= f64::from(*sign));
        }
    }

    /// Features that are transformed together; `None` for the identity.
    pub(crate) fn block(self, head_dim: usize) -> Option<usize> {
        match self {
            Basis::Identity => None,
            Basis::Hadamard64 => Some(64),
            Basis::Hadamard256 => Some(256),
            Basis::SignedHadamard { .. } => Some(head_dim),
        }
    }

    fn signed<B: Backend, const D: usize>(self, rows: Tensor<B, D>) -> Tensor<B, D> {
        let Basis::SignedHadamard { seed } = self else {
            return rows;
        };
        let head_dim = rows.dims()[D - 1];
        let mut shape = [1; D];
        shape[D - 1] = head_dim;
        let signs = TensorData::new(random_signs(seed, head_dim), shape);
        let signs = Tensor::<B, D>::from_data(signs, (&rows.device(), rows.dtype()));
        rows * signs
    }
}

/// `H_n x` in place, n = `x.len()`, a power of two.
pub fn hadamard(x: &mut [f32]) {
    butterflies(x);
    let scale = 1.0 / (x.len() as f32).sqrt();
    x.iter_mut().for_each(|value| *value *= scale);
}

fn hadamard_f64(x: &mut [f64]) {
    butterflies(x);
    let scale = 1.0 / (x.len() as f64).sqrt();
    x.iter_mut().for_each(|value| *value *= scale);
}

/// `sqrt(n) H_n x`.
fn butterflies<T: Copy + Add<Output = T> + Sub<Output = T>>(x: &mut [T]) {
    let n = x.len();
    debug_assert!(n.is_power_of_two());
    let mut stride = 1;
    while stride < n {
        for block in x.chunks_exact_mut(2 * stride) {
            let (low, high) = block.split_at_mut(stride);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
}

fn apply_signs(row: &mut [f32], signs: &[f32]) {
    row.iter_mut().zip(signs).for_each(|(value, sign)| *value *= sign);
}

/// `n` signs from SplitMix64 (Steele, Lea and Flood, 2014): the top bit of each output, 1 = negative.
fn random_signs(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            if (z ^ (z >> 31)) >> 63 == 1 { -1.0 } else { 1.0 }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hadamard_is_the_sylvester_matrix() {
        for n in [64usize, 256] {
            for column in [0, 1, 5, n - 1] {
                let mut x = vec![0.0; n];
                x[column] = (n as f32).sqrt();
                hadamard(&mut x);
                for (row, value) in x.iter().enumerate() {
                    let expected = if (row & column).count_ones() % 2 == 0 {
                        1.0
                    } else {
                        -1.0
                    };
                    assert_eq!(*value, expected, "H_{n}[{row}][{column}]");
                }
            }
        }
    }

    #[test]
    fn every_basis_is_undone_by_its_inverse() {
        // Small integers: all sums are exact, so equality is exact.
        let row: Vec<f32> = (0..512).map(|i| ((i * 37 + 11) % 64) as f32 - 31.0).collect();
        for basis in [
            Basis::Identity,
            Basis::Hadamard64,
            Basis::Hadamard256,
            Basis::SignedHadamard { seed: 7 },
        ] {
            let mut rows = row.clone();
            basis.forward(&mut rows, 256);
            assert_eq!(rows == row, basis == Basis::Identity);
            let mut wide: Vec<f64> = row.iter().copied().map(f64::from).collect();
            basis.forward_f64(&mut wide, 256);
            assert!(wide.iter().zip(&rows).all(|(wide, x)| *wide as f32 == *x), "{basis:?}");
            basis.inverse(&mut rows, 256);
            assert_eq!(rows, row, "{basis:?}");
            basis.inverse_f64(&mut wide, 256);
            assert!(wide.iter().zip(&row).all(|(wide, x)| *wide as f32 == *x), "{basis:?}");
        }
    }

    #[test]
    fn head_dims_that_a_basis_cannot_cover_are_known() {
        assert!(Basis::Identity.supports(24));
        assert!(!Basis::Hadamard256.supports(128));
        assert!(Basis::Hadamard64.supports(128));
        assert!(!Basis::SignedHadamard { seed: 1 }.supports(96));
    }
}
