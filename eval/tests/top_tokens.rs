//! Top-token references: the bytes of the format and every refusal.

use std::fs;
use std::path::PathBuf;

use perplexity_eval::corpus::CorpusPlan;
use perplexity_eval::fingerprint::fingerprint;
use perplexity_eval::top_tokens::{Header, Provenance, Reader, Record, TopTokenError, WindowKey, WindowName, Writer};
use perplexity_eval::windows::{Protocol, WindowKind};

const NAME: WindowName<'_> = WindowName {
    stream: "a.tx",
    window: 0,
};

fn header() -> Header {
    Header {
        top_k: 2,
        context: 6,
        stride: 2,
        corpus_id: "custom-a.tx".into(),
        mode: "custom".into(),
    }
}

fn key() -> WindowKey {
    WindowKey {
        stream: 0,
        target_begin: 1,
        target_end: 3,
        fingerprint: fingerprint(&[11, 22, 33]),
    }
}

fn record() -> Record {
    Record {
        logprobs: vec![-0.5, -1.25],
        top_ids: vec![22, 7, 33, 9],
        top_logprobs: vec![-0.5, -2.0, -1.25, -1.5],
    }
}

/// The worked file, written out by hand.
fn bytes() -> Vec<u8> {
    let hex = "4e494e46544f504b 01000000 02000000 06000000 02000000 \
        0b000000 637573746f6d2d612e7478 06000000 637573746f6d \
        00000000 0100000000000000 0300000000000000 c99696d8ea44e3c8 \
        000000bf 0000a0bf 16000000 07000000 21000000 09000000 \
        000000bf 000000c0 0000a0bf 0000c0bf ffffffff";
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// Checks a file that should hold the worked window alone.
fn check(reader: &mut Reader) -> Result<(), TopTokenError> {
    reader.check_windows([(key(), NAME)].into_iter())
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
    fn file(&self, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join("ref.bin");
        fs::write(&path, bytes).unwrap();
        path
    }
}

fn write(folder: &Folder, provenance: Option<Provenance>) -> PathBuf {
    let path = folder.0.path().join("ref.bin");
    let mut writer = Writer::create(&path, &header(), provenance).unwrap();
    let Record {
        logprobs,
        top_ids,
        top_logprobs,
    } = record();
    writer.write(&key(), &logprobs, &top_ids, &top_logprobs).unwrap();
    assert!(!path.exists());
    writer.finish().unwrap();
    path
}

#[test]
fn the_worked_example_is_written_and_read_byte_for_byte() {
    let folder = Folder::new();
    let path = write(&folder, None);
    assert_eq!(fs::read(&path).unwrap(), bytes());
    // 32 + |id| + |mode| + Σ(28 + P(4 + 8k)) + 4
    assert_eq!(bytes().len(), 32 + 11 + 6 + 28 + 2 * (4 + 16) + 4);
    let mut reader = Reader::open(&path).unwrap();
    assert_eq!((reader.header(), reader.provenance()), (&header(), None));
    check(&mut reader).unwrap();
    assert_eq!(reader.read(&key(), NAME, 100).unwrap(), record());
    assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), 1);
}

#[test]
fn the_trailer_follows_the_footer_and_changes_nothing_before_it() {
    let provenance = Provenance {
        public_tokens: 100,
        artifact: "demo".into(),
        ..Provenance::default()
    };
    let folder = Folder::new();
    let path = write(&folder, Some(provenance.clone()));
    assert!(fs::read(&path).unwrap().starts_with(&bytes()));
    let mut reader = Reader::open(&path).unwrap();
    assert_eq!(reader.provenance(), Some(&provenance));
    check(&mut reader).unwrap();
    assert_eq!(reader.read(&key(), NAME, 100).unwrap(), record());
}

#[test]
fn a_file_with_cut_or_appended_last_bytes_is_refused() {
    let folder = Folder::new();
    let whole = fs::read(write(&folder, Some(Provenance::default()))).unwrap();
    let refusal = |bytes: &[u8]| {
        let mut reader = Reader::open(&folder.file(bytes)).unwrap();
        check(&mut reader).expect_err("must be refused").to_string()
    };
    for length in bytes().len() + 1..whole.len() {
        let message = refusal(&whole[..length]);
        let after = length - bytes().len();
        assert!(
            message.contains(&format!("has {after} byte(s) after its footer")),
            "{message}"
        );
    }
    for tail in [&b"x"[..], b"xxxxTOPKINFO", &whole] {
        for good in [&bytes()[..], &whole] {
            let message = refusal(&[good, tail].concat());
            assert!(message.contains("byte(s) after its footer"), "{message}");
        }
    }
}

#[test]
fn an_interrupted_writer_leaves_nothing() {
    let folder = Folder::new();
    drop(Writer::create(&folder.0.path().join("ref.bin"), &header(), None).unwrap());
    assert_eq!(fs::read_dir(folder.0.path()).unwrap().count(), 0);
}

#[test]
fn every_truncation_is_refused_as_such() {
    let folder = Folder::new();
    let whole = bytes();
    for length in 16..whole.len() {
        let path = folder.file(&whole[..length]);
        let read = || {
            let mut reader = Reader::open(&path)?;
            reader.read(&key(), NAME, 100)?;
            // A file that ends within its footer still reads: the check of the whole is what notices.
            match length < whole.len() - 4 {
                true => Ok(()),
                false => check(&mut Reader::open(&path)?),
            }
        };
        let error = read().expect_err("truncated");
        assert!(matches!(error, TopTokenError::Truncated { .. }), "{length}: {error}");
        let checked = || check(&mut Reader::open(&path)?);
        assert!(matches!(checked(), Err(TopTokenError::Truncated { .. })), "{length}");
    }
}

fn open_error(bytes: &[u8]) -> String {
    Reader::open(&Folder::new().file(bytes))
        .expect_err("must be refused")
        .to_string()
}

fn patched(offset: usize, patch: &[u8]) -> Vec<u8> {
    let mut bytes = bytes();
    bytes[offset..offset + patch.len()].copy_from_slice(patch);
    bytes
}

#[test]
fn headers_that_cannot_be_are_refused() {
    let cases: [(Vec<u8>, &str); 9] = [
        (
            patched(8, &2u32.to_le_bytes()),
            "is a top-token reference of version 2; this program reads version 1",
        ),
        (patched(12, &0u32.to_le_bytes()), "top_k is 0, the limit is 64"),
        (patched(12, &65u32.to_le_bytes()), "top_k is 65, the limit is 64"),
        (
            patched(12, &[4, 3, 2, 1]),
            "the other NINFTOPK layout, with a byte-order marker",
        ),
        (
            patched(24, &4097u32.to_le_bytes()),
            "corpus id is 4097, the limit is 4096",
        ),
        (patched(28, &[0xff]), "its corpus id is not UTF-8"),
        (patched(0, b"NINFKL01"), "it is a NINFKL01 record"),
        (patched(0, b"_logits_"), "it is a llama.cpp logit base"),
        (b"x".to_vec(), "it is of an unknown kind"),
    ];
    for (bytes, expected) in cases {
        let message = open_error(&bytes);
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
    let message = Reader::open(&Folder::new().0.path().join("gone"))
        .unwrap_err()
        .to_string();
    assert!(message.contains("gone: "), "{message}");
}

#[test]
fn both_recorded_widths_are_read() {
    for top_k in [32u32, 64] {
        let folder = Folder::new();
        let path = folder.0.path().join("ref.bin");
        let mut writer = Writer::create(&path, &Header { top_k, ..header() }, None).unwrap();
        let ids: Vec<u32> = (0..top_k * 2).map(|i| i % top_k).collect();
        let values = vec![-6.0; ids.len()];
        writer.write(&key(), &[-0.5, -1.25], &ids, &values).unwrap();
        writer.finish().unwrap();
        let record = Reader::open(&path).unwrap().read(&key(), NAME, 100).unwrap();
        assert_eq!((record.top_ids, record.top_logprobs), (ids, values));
    }
    let folder = Folder::new();
    for top_k in [0, 65] {
        assert!(Writer::create(&folder.0.path().join("x"), &Header { top_k, ..header() }, None).is_err());
    }
}

fn read_error(bytes: &[u8], expected: WindowKey, public_tokens: usize) -> String {
    let path = Folder::new();
    let path = path.file(bytes);
    Reader::open(&path)
        .unwrap()
        .read(&expected, NAME, public_tokens)
        .expect_err("must be refused")
        .to_string()
}

#[test]
fn records_of_other_windows_are_refused() {
    let cases = [
        (WindowKey { stream: 1, ..key() }, "stream 0, expected 1"),
        (
            WindowKey {
                target_begin: 2,
                ..key()
            },
            "target begin 1, expected 2",
        ),
        (WindowKey { target_end: 4, ..key() }, "target end 3, expected 4"),
        (
            WindowKey {
                fingerprint: 1,
                ..key()
            },
            "fingerprint c8e344ead89696c9, expected 0000000000000001",
        ),
    ];
    for (expected, difference) in cases {
        let message = read_error(&bytes(), expected, 100);
        let text = format!("window 0 of stream `a.tx` was recorded over different tokens ({difference})");
        assert!(message.contains(&text), "{message}");
    }
    // 49 bytes of header, then the record: stream, target_begin, target_end.
    let message = read_error(&patched(57, &1u64.to_le_bytes())[..], key(), 100);
    assert!(message.contains("invalid target range"), "{message}");
    let message = read_error(&patched(61, &u64::MAX.to_le_bytes()), key(), 100);
    assert!(message.contains("invalid target range"), "{message}");
    let message = read_error(&patched(49, &u32::MAX.to_le_bytes()), key(), 100);
    assert!(message.contains("holds fewer windows than this run: it ends before window 0 of stream `a.tx`"));
}

#[test]
fn values_that_cannot_be_are_refused() {
    let targets = 49 + 28;
    let message = read_error(&patched(targets + 4, &f32::NAN.to_le_bytes()), key(), 100);
    assert!(
        message.contains("position 1: NaN is not a log-probability"),
        "{message}"
    );
    let message = read_error(&bytes(), key(), 33);
    assert!(
        message.contains("position 1: token 33 is outside this model's 33 public tokens"),
        "{message}"
    );
    let message = read_error(&patched(targets + 8, &(-1i32).to_le_bytes()), key(), 100);
    assert!(message.contains("position 0: token -1 is outside"), "{message}");
    let message = read_error(&patched(targets + 28, &(-0.25f32).to_le_bytes()), key(), 100);
    assert!(
        message.contains("position 0: the tokens' probabilities add up to 1.38"),
        "{message}"
    );
}

#[test]
fn more_windows_than_this_run_are_refused() {
    let folder = Folder::new();
    let path = folder.file(&bytes());
    let mut reader = Reader::open(&path).unwrap();
    let message = reader.check_windows(std::iter::empty()).unwrap_err().to_string();
    assert!(message.contains("holds more windows than this run"), "{message}");
}

#[test]
fn another_protocol_or_vocabulary_is_refused() {
    let plan = |kind, context, stride| {
        let protocol = Protocol::new(kind, context, stride).unwrap();
        let tokens: Vec<u32> = (0..20).collect();
        CorpusPlan::from_tokens("custom-a.tx", protocol, [("a.tx".into(), "custom".into(), tokens)]).unwrap()
    };
    let folder = Folder::new();
    let reader = Reader::open(&folder.file(&bytes())).unwrap();
    assert!(reader.check_run(&plan(WindowKind::Sliding, 6, 2), 100).is_ok());
    let cases = [
        (WindowKind::Sliding, 8, 2, "context 8, stride 2"),
        (WindowKind::Sliding, 6, 3, "context 6, stride 3"),
        (WindowKind::Disjoint, 6, 2, "context 6, stride 6"),
    ];
    for (kind, context, stride, expected) in cases {
        let message = reader
            .check_run(&plan(kind, context, stride), 100)
            .unwrap_err()
            .to_string();
        let recorded = "was recorded for corpus `custom-a.tx`, mode `custom`, context 6, stride 2, this run has";
        assert!(message.contains(recorded) && message.contains(expected), "{message}");
    }
    for (id, mode) in [("other", "custom"), ("custom-a.tx", "full")] {
        let other = CorpusPlan {
            id: id.into(),
            mode: mode.into(),
            ..plan(WindowKind::Sliding, 6, 2)
        };
        assert!(matches!(
            reader.check_run(&other, 100),
            Err(TopTokenError::Protocol { .. })
        ));
    }
    assert!(matches!(
        reader.check_run(&plan(WindowKind::Sliding, 6, 2), 1),
        Err(TopTokenError::Vocabulary { .. })
    ));
    let provenance = Provenance {
        public_tokens: 100,
        ..Provenance::default()
    };
    let folder = Folder::new();
    let reader = Reader::open(&write(&folder, Some(provenance))).unwrap();
    let message = reader
        .check_run(&plan(WindowKind::Sliding, 6, 2), 99)
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("was recorded over 100 tokens of vocabulary, this model has 99"),
        "{message}"
    );
    assert!(message.contains("or runs with the same --softmax-rows"), "{message}");
}
