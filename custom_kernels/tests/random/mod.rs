//! Random data, the same in every run.

/// A xorshift generator; its state, which is not 0.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// `count` values in `[-scale, scale)` with up to 24 bits.
    pub(crate) fn values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        let mut next = || {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            ((self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
        };
        (0..count).map(|_| next()).collect()
    }
}
