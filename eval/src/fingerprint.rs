//! 64-bit FNV-1a over token ids, each as four little-endian bytes: `h = (h xor byte) · 1099511628211 mod 2^64`.

const OFFSET_BASIS: u64 = 14_695_981_039_346_656_037;
const PRIME: u64 = 1_099_511_628_211;

/// Fingerprint of a window's input tokens. It detects accidents; it is not cryptographic.
pub fn fingerprint(tokens: &[u32]) -> u64 {
    tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .fold(OFFSET_BASIS, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME))
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
