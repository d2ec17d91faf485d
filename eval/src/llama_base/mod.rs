//! llama.cpp logit bases: the log-probabilities of every token at every scored position, in 16 bits.
//!
//! `_logits_`, u32 context, i32 vocabulary, i32 chunks, i32 tokens `[chunks, context]`, then per scored position
//! `2·⌈V/2⌉ + 4` words of 16 bits: f32 scale, f32 min_log_prob, u16 codes. For a row `l`:
//!
//! ```text
//! lo = max(min l, max l - 16), scale = (max l - lo) / 65535
//! min_log_prob = lo - max l - ln Σ exp(l - max l)
//! code = round-half-even((l - lo) / scale), 0 for l <= lo       log p = min_log_prob + scale · code
//! ```
//!
//! The window of 16 nats loses the tail and the codes have steps of up to 2.4e-4 nats, so a model compared with its own
//! base does not give exactly 0. Each chunk is scored at `[context/2 + 1, context)`.

mod error;

use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

use crate::aggregate::LOGPROB_ROUNDING;
use crate::divergence::BASE_FLOOR;
use crate::files::{PARTIAL, PendingFile, open_regular};
use crate::foreign::{FileKind, describe, identify};

pub use error::LlamaBaseError;

const MAGIC: &[u8; 8] = b"_logits_";
/// Magic and three words.
const FIXED_HEADER: u64 = 20;
/// Nats below the most probable token that the codes reach.
const RANGE: f32 = 16.0;
const MAX_CODE: f32 = 65535.0;

/// Sizes of a base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Tokens per chunk, at least 4.
    pub context: u32,
    /// Values per row.
    pub vocabulary: u32,
    /// Chunks.
    pub chunks: u32,
}

impl Shape {
    /// Scored positions of all chunks.
    pub fn rows(&self) -> u64 {
        let context = u64::from(self.context);
        context.saturating_sub(1 + context / 2) * u64::from(self.chunks)
    }

    /// 16-bit words of a row.
    fn row_words(&self) -> u64 {
        2 * u64::from(self.vocabulary).div_ceil(2) + 4
    }

    fn tokens(&self) -> u64 {
        u64::from(self.context) * u64::from(self.chunks)
    }

    /// Length of the file; `None` beyond 64 bits.
    pub fn file_len(&self) -> Option<u64> {
        let rows = self.rows().checked_mul(self.row_words())?.checked_mul(2)?;
        self.tokens()
            .checked_mul(4)?
            .checked_add(FIXED_HEADER)?
            .checked_add(rows)
    }

    fn check(&self, path: &Path) -> Result<(), LlamaBaseError> {
        let fields = [
            ("context", self.context, 4),
            ("vocabulary", self.vocabulary, 1),
            ("chunks", self.chunks, 1),
        ];
        for (field, value, least) in fields {
            if value < least || i32::try_from(value).is_err() {
                return Err(LlamaBaseError::Header {
                    path: path.to_owned(),
                    field,
                    value: i64::from(value as i32),
                });
            }
        }
        Ok(())
    }
}

/// Encodes a row of `values` into `words`, padded with code 0 to `vocabulary`.
fn encode(values: &[f32], vocabulary: usize, words: &mut Vec<u16>) {
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let min = values.iter().copied().fold(f32::INFINITY, f32::min);
    let lo = min.max(max - RANGE);
    let scale = (max - lo) / MAX_CODE;
    let sum: f64 = values.iter().map(|&v| f64::from(v - max).exp()).sum();
    let min_log_prob = (f64::from(lo) - f64::from(max) - sum.ln()) as f32;
    words.clear();
    for float in [scale, min_log_prob] {
        let bits = float.to_bits();
        words.extend([bits as u16, (bits >> 16) as u16]);
    }
    // A flat row has no scale; all its codes are 0.
    words.extend(values.iter().map(|&v| {
        if v > lo {
            ((v - lo) / scale).round_ties_even() as u16
        } else {
            0
        }
    }));
    words.resize(4 + 2 * vocabulary.div_ceil(2), 0);
}

/// Whether these are log-probabilities. Codes at their floor stand for less than they say and are not added up; the others
/// miss at most what lies there, 3 % with a quarter of a million tokens.
fn is_distribution(row: &[f32]) -> bool {
    let told = row.iter().filter(|&&value| value > BASE_FLOOR);
    let mass: f64 = told.map(|&value| f64::from(value).exp()).sum();
    row.iter().all(|value| value.is_finite() && *value <= LOGPROB_ROUNDING) && (0.9..1.1).contains(&mass)
}

/// Decodes the first `into.len()` values of a row.
fn decode(words: &[u16], into: &mut [f32]) {
    let float = |at: usize| f32::from_bits(u32::from(words[at]) | u32::from(words[at + 1]) << 16);
    let (scale, min_log_prob) = (float(0), float(2));
    for (value, &code) in into.iter_mut().zip(&words[4..]) {
        *value = min_log_prob + scale * f32::from(code);
    }
}

/// Writes a base row by row.
#[derive(Debug)]
pub struct Writer {
    file: PendingFile,
    path: PathBuf,
    shape: Shape,
    rows: u64,
    words: Vec<u16>,
    bytes: Vec<u8>,
}

impl Writer {
    /// Creates `path.partial` and writes the header; `tokens` are those of all chunks.
    ///
    /// # Errors
    /// When the target exists, a size is out of range, or the file cannot be created.
    pub fn create(path: &Path, shape: Shape, tokens: &[u32]) -> Result<Self, LlamaBaseError> {
        shape.check(path)?;
        if path.exists() {
            return Err(LlamaBaseError::Exists { path: path.to_owned() });
        }
        if tokens.len() as u64 != shape.tokens() {
            let (recorded, run) = (shape.tokens(), tokens.len() as u64);
            return Err(LlamaBaseError::Mismatch {
                path: path.to_owned(),
                field: "tokens",
                recorded,
                run,
            });
        }
        let io = |source| LlamaBaseError::Io {
            path: path.to_owned(),
            source,
        };
        let mut file = PendingFile::create(path, PARTIAL).map_err(io)?;
        let mut bytes = MAGIC.to_vec();
        for word in [shape.context, shape.vocabulary, shape.chunks].iter().chain(tokens) {
            bytes.extend(word.to_le_bytes());
        }
        file.write_all(&bytes).map_err(io)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            shape,
            rows: 0,
            words: Vec::new(),
            bytes: Vec::new(),
        })
    }

    /// Appends a row of log-probabilities or logits; rows shorter than the vocabulary are padded with code 0.
    ///
    /// # Errors
    /// When the row is too long or the file cannot be written.
    pub fn write_row(&mut self, row: &[f32]) -> Result<(), LlamaBaseError> {
        let vocabulary = self.shape.vocabulary;
        if row.is_empty() || row.len() > vocabulary as usize {
            let (recorded, run) = (u64::from(vocabulary), row.len() as u64);
            return Err(LlamaBaseError::Mismatch {
                path: self.path.clone(),
                field: "row width",
                recorded,
                run,
            });
        }
        if row.iter().any(|v| !v.is_finite()) {
            return Err(LlamaBaseError::Value {
                path: self.path.clone(),
                row: self.rows,
            });
        }
        encode(row, vocabulary as usize, &mut self.words);
        self.bytes.clear();
        self.bytes.extend(self.words.iter().flat_map(|word| word.to_le_bytes()));
        self.rows += 1;
        self.file.write_all(&self.bytes).map_err(|source| LlamaBaseError::Io {
            path: self.path.clone(),
            source,
        })
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// When rows are missing or the file cannot be written; nothing is left behind then.
    pub fn finish(self) -> Result<(), LlamaBaseError> {
        if self.rows != self.shape.rows() {
            let (found, expected) = (self.rows, self.shape.rows());
            return Err(LlamaBaseError::Rows {
                path: self.path,
                found,
                expected,
            });
        }
        self.file.commit().map_err(|source| LlamaBaseError::Io {
            path: self.path,
            source,
        })
    }
}

/// Reads a base row by row.
#[derive(Debug)]
pub struct Reader {
    file: BufReader<File>,
    path: PathBuf,
    shape: Shape,
    row: u64,
    words: Vec<u16>,
    bytes: Vec<u8>,
}

impl Reader {
    /// Opens a base and checks its header against its length.
    ///
    /// # Errors
    /// When the file cannot be read, is no base, or is incomplete.
    pub fn open(path: &Path) -> Result<Self, LlamaBaseError> {
        let io = |source| LlamaBaseError::Io {
            path: path.to_owned(),
            source,
        };
        let file = open_regular(path).map_err(io)?;
        let found = file.metadata().map_err(io)?.len();
        let mut file = BufReader::new(file);
        let mut header = Vec::new();
        (&mut file).take(FIXED_HEADER).read_to_end(&mut header).map_err(io)?;
        if identify(&header) != Some(FileKind::LlamaBase) {
            return Err(LlamaBaseError::Kind {
                path: path.to_owned(),
                found: describe(&header),
            });
        }
        let words: Vec<u32> = header[MAGIC.len()..]
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&word| u32::from_le_bytes(word))
            .collect();
        let [context, vocabulary, chunks] = words[..] else {
            return Err(LlamaBaseError::Length {
                path: path.to_owned(),
                found,
                expected: FIXED_HEADER,
            });
        };
        let shape = Shape {
            context,
            vocabulary,
            chunks,
        };
        shape.check(path)?;
        let expected = shape.file_len().unwrap_or(u64::MAX);
        if found != expected {
            return Err(LlamaBaseError::Length {
                path: path.to_owned(),
                found,
                expected,
            });
        }
        let words = vec![0; shape.row_words() as usize];
        let bytes = vec![0; words.len() * 2];
        Ok(Self {
            file,
            path: path.to_owned(),
            shape,
            row: 0,
            words,
            bytes,
        })
    }

    /// Sizes of the base.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Reads the tokens and compares sizes and tokens with this run; to be called once, before the first row.
    ///
    /// # Errors
    /// When anything differs, or the file's rows are narrower than `public_tokens`.
    pub fn check_run(&mut self, context: usize, public_tokens: usize, tokens: &[u32]) -> Result<(), LlamaBaseError> {
        let mismatch = |field, recorded, run| {
            Err(LlamaBaseError::Mismatch {
                path: self.path.clone(),
                field,
                recorded,
                run,
            })
        };
        let Shape { vocabulary, chunks, .. } = self.shape;
        if u64::from(self.shape.context) != context as u64 {
            return mismatch("context", self.shape.context.into(), context as u64);
        }
        if self.shape.tokens() != tokens.len() as u64 {
            return mismatch("number of chunks", chunks.into(), (tokens.len() / context) as u64);
        }
        if (vocabulary as usize) < public_tokens {
            return mismatch("vocabulary", vocabulary.into(), public_tokens as u64);
        }
        for (index, &run) in tokens.iter().enumerate() {
            let mut word = [0; 4];
            self.file.read_exact(&mut word).map_err(|source| LlamaBaseError::Io {
                path: self.path.clone(),
                source,
            })?;
            let recorded = i32::from_le_bytes(word);
            if i64::from(recorded) != i64::from(run) {
                return Err(LlamaBaseError::Token {
                    path: self.path.clone(),
                    index,
                    recorded,
                    run,
                });
            }
        }
        Ok(())
    }

    /// Decodes the next row's first `into.len()` log-probabilities.
    ///
    /// # Errors
    /// When the file cannot be read, or the row is no distribution.
    pub fn read_row(&mut self, into: &mut [f32]) -> Result<(), LlamaBaseError> {
        self.file
            .read_exact(&mut self.bytes)
            .map_err(|source| LlamaBaseError::Io {
                path: self.path.clone(),
                source,
            })?;
        let (pairs, _) = self.bytes.as_chunks::<2>();
        self.words
            .iter_mut()
            .zip(pairs)
            .for_each(|(word, &pair)| *word = u16::from_le_bytes(pair));
        decode(&self.words, into);
        if !is_distribution(into) {
            return Err(LlamaBaseError::Value {
                path: self.path.clone(),
                row: self.row,
            });
        }
        self.row += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape {
        context: 4,
        vocabulary: 3,
        chunks: 2,
    };
    const TOKENS: [u32; 8] = [0, 1, 2, 0, 1, 2, 0, 1];

    fn logs(probabilities: [f32; 3]) -> [f32; 3] {
        probabilities.map(f32::ln)
    }

    #[test]
    fn only_log_probabilities_that_add_up_are_a_distribution() {
        assert!(is_distribution(&logs([0.5, 0.3, 0.2])));
        // What lies at the floor of the codes counts for nothing.
        assert!(is_distribution(&[0.6f32.ln(), 0.4f32.ln(), -16.0]));
        for row in [
            logs([0.5, 0.3, 0.05]),
            logs([0.7, 0.6, 0.1]),
            [5.0, -1.0, -1.0],
            [0.0, f32::NAN, -20.0],
        ] {
            assert!(!is_distribution(&row), "{row:?}");
        }
    }

    #[test]
    fn a_row_by_hand() {
        // Logits 0, -8, -20: lo = max(-20, -16) = -16, scale = 16/65535, codes 65535, 32767.5 rounded to even, 0.
        let mut words = Vec::new();
        encode(&[0.0, -8.0, -20.0], 3, &mut words);
        let scale = (16.0f32 / 65535.0).to_bits();
        let sum = (1.0 + (-8f64).exp() + (-20f64).exp()).ln();
        let least = ((-16.0 - sum) as f32).to_bits();
        let expected = [
            scale as u16,
            (scale >> 16) as u16,
            least as u16,
            (least >> 16) as u16,
            65535,
            32768,
            0,
            0,
        ];
        assert_eq!(words, expected);
        let mut decoded = [0.0; 3];
        decode(&words, &mut decoded);
        assert!((f64::from(decoded[0]) + sum).abs() < 2e-6 && (decoded[1] + 8.0).abs() < 4e-4);
        assert!((decoded[2] + 16.0).abs() < 4e-4, "the tail is cut at 16 nats");
    }

    #[test]
    fn sizes_follow_the_format() {
        assert_eq!((SHAPE.rows(), SHAPE.row_words()), (2, 8));
        assert_eq!(SHAPE.file_len(), Some(20 + 32 + 2 * 16));
        // 496,648 bytes per position for a vocabulary of 248,320.
        assert_eq!(
            Shape {
                vocabulary: 248_320,
                ..SHAPE
            }
            .row_words()
                * 2,
            496_648
        );
        let large = Shape {
            context: 16_384,
            vocabulary: 248_320,
            chunks: 1000,
        };
        assert_eq!(large.rows(), 8_191_000);
        assert_eq!(large.file_len(), Some(20 + 16_384_000 * 4 + 8_191_000 * 496_648));
    }

    #[test]
    fn files_are_written_whole_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("base");
        let rows = [logs([0.5, 0.25, 0.25]), logs([0.125, 0.75, 0.125])];
        let mut writer = Writer::create(&path, SHAPE, &TOKENS).unwrap();
        writer.write_row(&rows[0]).unwrap();
        assert!(matches!(
            writer.write_row(&[0.0; 4]),
            Err(LlamaBaseError::Mismatch { field: "row width", .. })
        ));
        writer.write_row(&rows[1]).unwrap();
        writer.finish().unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 84);
        assert!(matches!(
            Writer::create(&path, SHAPE, &TOKENS),
            Err(LlamaBaseError::Exists { .. })
        ));
        let mut reader = Reader::open(&path).unwrap();
        assert_eq!(reader.shape(), SHAPE);
        reader.check_run(4, 3, &TOKENS).unwrap();
        for expected in rows {
            let mut row = [0.0; 3];
            reader.read_row(&mut row).unwrap();
            row.iter()
                .zip(expected)
                .for_each(|(a, b)| assert!((a - b).abs() < 3e-5, "{a} {b}"));
        }
    }

    #[test]
    fn missing_rows_leave_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("base");
        let writer = Writer::create(&path, SHAPE, &TOKENS).unwrap();
        assert!(matches!(
            writer.finish(),
            Err(LlamaBaseError::Rows {
                found: 0,
                expected: 2,
                ..
            })
        ));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn other_runs_and_other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("base");
        let mut writer = Writer::create(&path, SHAPE, &TOKENS).unwrap();
        (0..2).for_each(|_| writer.write_row(&logs([0.5, 0.25, 0.25])).unwrap());
        writer.finish().unwrap();
        let refusal = |context, public, tokens: &[u32]| {
            Reader::open(&path)
                .unwrap()
                .check_run(context, public, tokens)
                .unwrap_err()
                .to_string()
        };
        assert!(refusal(8, 3, &TOKENS).contains("written for context 4, this run has 8"));
        assert!(refusal(4, 3, &TOKENS[..4]).contains("written for number of chunks 2, this run has 1"));
        assert!(refusal(4, 5, &TOKENS).contains("written for vocabulary 3, this run has 5"));
        let other = [0, 1, 2, 0, 1, 2, 0, 2];
        assert!(refusal(4, 3, &other).contains("token 7 is 1, this run has 2"));

        let whole = std::fs::read(&path).unwrap();
        let open = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            Reader::open(&path).unwrap_err().to_string()
        };
        for length in 8..whole.len() {
            assert!(open(&whole[..length]).contains("its header implies"), "{length}");
        }
        assert!(open(&[&whole[..], b"x"].concat()).contains("its header implies"));
        assert!(open(b"NINFTOPK\x01\0\0\0\x20\0\0\0").contains("it is a top-token reference"));
        let mut huge = whole.clone();
        huge[8..20].fill(0x7f);
        assert!(open(&huge).contains("its header implies"));
        huge[12..16].fill(0xff);
        assert!(open(&huge).contains("vocabulary is -1, which no logit base has"));
    }

    proptest! {
        #[test]
        fn codes_are_within_half_a_step(row in prop::collection::vec(-15.0f32..0.0, 1..40), pad in 0usize..3) {
            let mut words = Vec::new();
            encode(&row, row.len() + pad, &mut words);
            prop_assert_eq!(words.len() % 2, 0);
            let mut decoded = vec![0.0; row.len()];
            decode(&words, &mut decoded);
            let sum = row.iter().map(|&v| f64::from(v).exp()).sum::<f64>().ln();
            for (&value, &back) in row.iter().zip(&decoded) {
                let error = (f64::from(value) - sum - f64::from(back)).abs();
                prop_assert!(error < 15.0 / 65535.0 / 2.0 + 4e-6, "{}", error);
            }
        }
    }
}
