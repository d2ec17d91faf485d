//! Reading a text: whole file in binary, strict UTF-8, no NUL, nothing converted, normalised or stripped.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::files::read_regular;

/// Why a text is refused.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// The text file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file has no bytes.
    #[error("{path} is empty: there is nothing to score", path = path.display())]
    Empty {
        /// The text file.
        path: PathBuf,
    },
    /// The file starts with the byte-order mark of another encoding.
    #[error("{path} is {encoding}, not UTF-8: it starts with that encoding's byte-order mark; convert it to UTF-8", path = path.display())]
    OtherEncoding {
        /// The text file.
        path: PathBuf,
        /// Name of the encoding.
        encoding: &'static str,
    },
    /// A byte sequence is not UTF-8.
    #[error("{path} is not valid UTF-8: byte 0x{byte:02x} at offset {offset}", path = path.display())]
    Utf8 {
        /// The text file.
        path: PathBuf,
        /// Offset of the first byte of the bad sequence.
        offset: usize,
        /// That byte.
        byte: u8,
    },
    /// A NUL byte, which no text contains.
    #[error("{path} has a NUL byte at offset {offset}; it is binary or UTF-16 without a byte-order mark", path = path.display())]
    Nul {
        /// The text file.
        path: PathBuf,
        /// Offset of the first NUL.
        offset: usize,
    },
    /// The length differs from the manifest's.
    #[error("stream `{id}`: {path} has {found} bytes, the manifest states {expected}", path = path.display())]
    Length {
        /// The stream.
        id: String,
        /// The text file.
        path: PathBuf,
        /// Bytes in the file.
        found: u64,
        /// Bytes in the manifest.
        expected: u64,
    },
    /// The hash differs from the manifest's.
    #[error(
        "stream `{id}`: {path} has SHA-256 {found}, the manifest states {expected}; \
         check the corpus out without line-ending conversion",
        path = path.display()
    )]
    Hash {
        /// The stream.
        id: String,
        /// The text file.
        path: PathBuf,
        /// Hash of the file.
        found: String,
        /// Hash in the manifest.
        expected: String,
    },
}

/// A validated text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// The text, byte for byte.
    pub text: String,
    /// SHA-256 of the bytes in lower-case hexadecimal.
    pub sha256: String,
    /// Runs of non-whitespace characters.
    pub words: u64,
    /// Whether the text begins with U+FEFF, which is kept and tokenised.
    pub byte_order_mark: bool,
}

impl Text {
    /// Reads and validates a file.
    ///
    /// # Errors
    /// When the file is no regular file, cannot be read, is empty, or is not UTF-8 without NUL.
    pub fn read(path: &Path) -> Result<Self, TextError> {
        let bytes = read_regular(path).map_err(|source| TextError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::validate(bytes, path)
    }

    /// Validates bytes; `path` is for messages only.
    ///
    /// # Errors
    /// When there are none, or they are not UTF-8 without NUL.
    pub fn validate(bytes: Vec<u8>, path: &Path) -> Result<Self, TextError> {
        let path = || path.to_owned();
        if bytes.is_empty() {
            return Err(TextError::Empty { path: path() });
        }
        if let Some(encoding) = foreign_mark(&bytes) {
            return Err(TextError::OtherEncoding { path: path(), encoding });
        }
        let sha256 = hex(&Sha256::digest(&bytes));
        let text = String::from_utf8(bytes).map_err(|error| {
            let offset = error.utf8_error().valid_up_to();
            TextError::Utf8 {
                path: path(),
                offset,
                byte: error.as_bytes()[offset],
            }
        })?;
        if let Some(offset) = text.bytes().position(|b| b == 0) {
            return Err(TextError::Nul { path: path(), offset });
        }
        let words = text.split_whitespace().count() as u64;
        let byte_order_mark = text.starts_with('\u{feff}');
        Ok(Self {
            text,
            sha256,
            words,
            byte_order_mark,
        })
    }

    /// Compares length and hash with what a manifest states.
    ///
    /// # Errors
    /// On the first difference.
    pub fn verify(&self, id: &str, path: &Path, bytes: Option<u64>, sha256: Option<&str>) -> Result<(), TextError> {
        let found = self.text.len() as u64;
        if let Some(expected) = bytes.filter(|&expected| expected != found) {
            return Err(TextError::Length {
                id: id.into(),
                path: path.to_owned(),
                found,
                expected,
            });
        }
        if let Some(expected) = sha256.filter(|&expected| expected != self.sha256) {
            return Err(TextError::Hash {
                id: id.into(),
                path: path.to_owned(),
                found: self.sha256.clone(),
                expected: expected.into(),
            });
        }
        Ok(())
    }
}

/// The UTF-32 marks come first: UTF-32 LE begins with the UTF-16 LE mark.
fn foreign_mark(bytes: &[u8]) -> Option<&'static str> {
    match bytes {
        [0xff, 0xfe, 0, 0, ..] => Some("UTF-32 (little-endian)"),
        [0, 0, 0xfe, 0xff, ..] => Some("UTF-32 (big-endian)"),
        [0xff, 0xfe, ..] => Some("UTF-16 (little-endian)"),
        [0xfe, 0xff, ..] => Some("UTF-16 (big-endian)"),
        _ => None,
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validate(bytes: &[u8]) -> Result<Text, TextError> {
        Text::validate(bytes.to_vec(), Path::new("t.txt"))
    }

    #[test]
    fn bad_bytes_are_refused_with_their_offset() {
        let cases: [(&[u8], &str); 12] = [
            (b"ab\xffcd", "byte 0xff at offset 2"),
            (b"a\xc0\xaf", "byte 0xc0 at offset 1"),          // overlong '/'
            (b"a\xe0\x80\xaf", "byte 0xe0 at offset 1"),      // overlong, three bytes
            (b"\xed\xa0\x80", "byte 0xed at offset 0"),       // surrogate
            (b"ab\xf4\x90\x80\x80", "byte 0xf4 at offset 2"), // above U+10FFFF
            (b"\xf5\x80\x80\x80", "byte 0xf5 at offset 0"),
            (b"abc\xe4\xb8", "byte 0xe4 at offset 3"), // truncated
            (b"a\0b", "NUL byte at offset 1"),
            (b"\xff\xfea\0", "UTF-16 (little-endian)"),
            (b"\xfe\xff\0a", "UTF-16 (big-endian)"),
            (b"\xff\xfe\0\0", "UTF-32 (little-endian)"),
            (b"", "t.txt is empty"),
        ];
        for (bytes, expected) in cases {
            let message = validate(bytes).expect_err("must be refused").to_string();
            assert!(message.contains(expected), "{message:?} should contain {expected:?}");
        }
    }

    #[test]
    fn nothing_is_converted() {
        let text = validate("\u{feff}a\r\nb  c".as_bytes()).unwrap();
        assert_eq!(text.text, "\u{feff}a\r\nb  c");
        assert!(text.byte_order_mark);
        assert_eq!(text.words, 3);
        // The SHA-256 of "abc" is the first test vector of FIPS 180.
        let abc = validate(b"abc").unwrap();
        assert_eq!(
            abc.sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert!(!abc.byte_order_mark);
    }

    #[test]
    fn stated_length_and_hash_are_verified() {
        let text = validate(b"abc").unwrap();
        let path = Path::new("t.txt");
        assert!(text.verify("s", path, Some(3), Some(&text.sha256)).is_ok());
        let message = text.verify("s", path, Some(4), None).unwrap_err().to_string();
        assert_eq!(message, "stream `s`: t.txt has 3 bytes, the manifest states 4");
        let message = text.verify("s", path, None, Some("00")).unwrap_err().to_string();
        assert!(message.starts_with("stream `s`: t.txt has SHA-256 ba78"), "{message}");
    }
}
