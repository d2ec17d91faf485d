//! 64-bit FNV-1a: `h = (h xor byte) · 1099511628211 mod 2^64`. It detects accidents; it is not cryptographic.

const OFFSET_BASIS: u64 = 14_695_981_039_346_656_037;
const PRIME: u64 = 1_099_511_628_211;

/// A running hash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fnv(u64);

impl Fnv {
    pub(crate) fn new() -> Self {
        Self(OFFSET_BASIS)
    }

    pub(crate) fn bytes(self, bytes: &[u8]) -> Self {
        Self(
            bytes
                .iter()
                .fold(self.0, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME)),
        )
    }

    /// Each word as four little-endian bytes.
    pub(crate) fn words(self, words: &[u32]) -> Self {
        words.iter().fold(self, |hash, word| hash.bytes(&word.to_le_bytes()))
    }

    pub(crate) fn count(self, count: usize) -> Self {
        self.bytes(&(count as u64).to_le_bytes())
    }

    pub(crate) fn finish(self) -> u64 {
        self.0
    }
}

/// Fingerprint of a window's input tokens, each as four little-endian bytes.
pub fn fingerprint(tokens: &[u32]) -> u64 {
    Fnv::new().words(tokens).finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_fingerprints() {
        let run = |begin| (begin..begin + 6).collect::<Vec<u32>>();
        assert_eq!(fingerprint(&[]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fingerprint(&[0]), 0x4d25_767f_9dce_13f5);
        assert_eq!(fingerprint(&[1, 2, 3]), 0xfd1f_0f43_81eb_0395);
        assert_eq!(fingerprint(&[11, 22, 33]), 0xc8e3_44ea_d896_96c9);
        assert_eq!(fingerprint(&run(101)), 0x6b0f_9c44_0943_2cca);
        assert_eq!(fingerprint(&run(103)), 0x28c0_ad2d_5a75_f5ee);
        assert_eq!(fingerprint(&run(105)), 0xac20_a694_9f0e_d482);
    }
}
