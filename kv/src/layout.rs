//! What a codec stores, counted in entries, and how entries become bytes.
//!
//! A codec describes one *block* (`block_tokens` consecutive rows of one KV head, one row for most codecs) as a list of
//! [`Plane`]s: `count` unsigned entries of `bits` bits. Encoding produces the entries; packing them is the same for
//! every codec:
//!
//! ```text
//! entry i of a plane occupies the bits [i*bits, (i+1)*bits) of that plane, least significant bit first
//! ```
//!
//! so two 4-bit entries share a byte with the even one in the low nibble and a 16-bit entry is little-endian. Bytes per
//! token are derived from the planes and are never written down by hand.

use std::ops::Range;

/// `count` unsigned entries of `bits` bits each, 1 to 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane {
    /// What the entries are, for listings: `"codes"`, `"scales"`.
    pub name: &'static str,
    /// Entries per block.
    pub count: usize,
    /// Bits per entry.
    pub bits: u32,
}

impl Plane {
    /// Shorthand for a plane.
    pub const fn new(name: &'static str, count: usize, bits: u32) -> Self {
        Self { name, count, bits }
    }

    /// Packed bytes of this plane per block.
    pub const fn bytes(&self) -> usize {
        (self.count * self.bits as usize).div_ceil(8)
    }
}

/// The planes of one block, in storage order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout(pub Vec<Plane>);

impl Layout {
    /// Entries per block, over all planes.
    pub fn entries(&self) -> usize {
        self.0.iter().map(|plane| plane.count).sum()
    }

    /// Packed bytes per block.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(Plane::bytes).sum()
    }

    /// Stored bits per block; equal to `8 * bytes` unless a plane ends inside a byte.
    pub fn bits(&self) -> usize {
        self.0.iter().map(|plane| plane.count * plane.bits as usize).sum()
    }

    /// Packs `entries` (plane after plane) into `bytes`.
    ///
    /// # Panics
    /// When a slice does not have the length of this layout: a programming error, never a property of the data.
    pub fn pack(&self, entries: &[u16], bytes: &mut [u8]) {
        self.check(entries.len(), bytes.len());
        for (plane, at, packed_at) in self.places() {
            pack_bits(&entries[at], plane.bits, &mut bytes[packed_at]);
        }
    }

    /// The inverse of [`Layout::pack`].
    ///
    /// # Panics
    /// As [`Layout::pack`].
    pub fn unpack(&self, bytes: &[u8], entries: &mut [u16]) {
        self.check(entries.len(), bytes.len());
        for (plane, at, packed_at) in self.places() {
            unpack_bits(&bytes[packed_at], plane.bits, &mut entries[at]);
        }
    }

    fn check(&self, entries: usize, bytes: usize) {
        assert_eq!(
            (entries, bytes),
            (self.entries(), self.bytes()),
            "entries and bytes of one block"
        );
    }

    /// Every plane with the ranges of its entries and of its bytes.
    fn places(&self) -> impl Iterator<Item = (&Plane, Range<usize>, Range<usize>)> {
        let (mut entries, mut bytes) = (0, 0);
        self.0.iter().map(move |plane| {
            let first = (entries, bytes);
            (entries, bytes) = (entries + plane.count, bytes + plane.bytes());
            (plane, first.0..entries, first.1..bytes)
        })
    }
}

fn pack_bits(entries: &[u16], bits: u32, bytes: &mut [u8]) {
    match bits {
        4 if entries.len().is_multiple_of(2) => {
            for (byte, pair) in bytes.iter_mut().zip(entries.chunks_exact(2)) {
                *byte = (pair[0] & 15) as u8 | (pair[1] << 4) as u8;
            }
        }
        8 => bytes
            .iter_mut()
            .zip(entries)
            .for_each(|(byte, &entry)| *byte = entry as u8),
        16 => bytes
            .chunks_exact_mut(2)
            .zip(entries)
            .for_each(|(pair, entry)| pair.copy_from_slice(&entry.to_le_bytes())),
        _ => pack_bits_reference(entries, bits, bytes),
    }
}

fn unpack_bits(bytes: &[u8], bits: u32, entries: &mut [u16]) {
    match bits {
        4 if entries.len().is_multiple_of(2) => {
            for (byte, pair) in bytes.iter().zip(entries.chunks_exact_mut(2)) {
                (pair[0], pair[1]) = (u16::from(byte & 15), u16::from(byte >> 4));
            }
        }
        8 => entries
            .iter_mut()
            .zip(bytes)
            .for_each(|(entry, &byte)| *entry = u16::from(byte)),
        16 => {
            let words = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
            entries.iter_mut().zip(words).for_each(|(entry, word)| *entry = word);
        }
        _ => unpack_bits_reference(bytes, bits, entries),
    }
}

/// Any width, one bit at a time: the definition the fast widths are compared with.
fn pack_bits_reference(entries: &[u16], bits: u32, bytes: &mut [u8]) {
    bytes.fill(0);
    for (i, &entry) in entries.iter().enumerate() {
        for bit in 0..bits as usize {
            let at = i * bits as usize + bit;
            bytes[at / 8] |= (((entry >> bit) & 1) as u8) << (at % 8);
        }
    }
}

/// The inverse of [`pack_bits_reference`].
fn unpack_bits_reference(bytes: &[u8], bits: u32, entries: &mut [u16]) {
    for (i, entry) in entries.iter_mut().enumerate() {
        *entry = (0..bits as usize).fold(0, |word, bit| {
            let at = i * bits as usize + bit;
            word | u16::from((bytes[at / 8] >> (at % 8)) & 1) << bit
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_even_nibble_is_low_and_words_are_little_endian() {
        let layout = Layout(vec![Plane::new("codes", 4, 4), Plane::new("scale", 1, 16)]);
        let mut bytes = [0; 4];
        layout.pack(&[0x4, 0xA, 0xD, 0xC, 0x1234], &mut bytes);
        assert_eq!(bytes, [0xA4, 0xCD, 0x34, 0x12]);
        assert_eq!((layout.bytes(), layout.bits()), (4, 32));
    }

    proptest! {
        #[test]
        fn packing_keeps_every_bit_at_every_width(words in proptest::collection::vec(any::<u16>(), 0..67), bits in 1u32..=16) {
            let entries: Vec<u16> = words.iter().map(|word| (u32::from(*word) & ((1 << bits) - 1)) as u16).collect();
            let layout = Layout(vec![Plane::new("codes", entries.len(), bits)]);
            let (mut fast, mut plain) = (vec![0xFF; layout.bytes()], vec![0xFF; layout.bytes()]);
            layout.pack(&entries, &mut fast);
            pack_bits_reference(&entries, bits, &mut plain);
            prop_assert_eq!(&fast, &plain);
            let (mut back, mut back_plain) = (vec![0xFFFF; entries.len()], vec![0xFFFF; entries.len()]);
            layout.unpack(&fast, &mut back);
            unpack_bits_reference(&fast, bits, &mut back_plain);
            prop_assert_eq!(&back, &entries);
            prop_assert_eq!(&back_plain, &entries);
        }
    }
}
