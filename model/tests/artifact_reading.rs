//! Reading entry files and continuation volumes: framing faults, lazily opened volumes, damaged input.

mod artifact_support;

use artifact_support::{Folder, ID, Random, entry_bytes, minified, volume_bytes, write, write_small};
use perplexity_model::artifact::{Artifact, ArtifactError, DirectoryError};
use perplexity_model::formats::FormatError;
use std::borrow::Cow;
use std::path::Path;

fn open_error(path: &Path) -> ArtifactError {
    match Artifact::open(path) {
        Ok(_) => panic!("{} opened", path.display()),
        Err(error) => error,
    }
}

#[test]
fn the_example_file_has_the_stated_lengths_and_opens() {
    let folder = Folder::new();
    let path = write_small(&folder);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 296_200);
    let artifact = Artifact::open(&path).unwrap();
    assert_eq!(artifact.artifact_id(), "a5".repeat(16));
    assert_eq!(artifact.name(), Some("toy-hybrid"));
    assert_eq!(artifact.payload_bytes(), 283_912);
    assert_eq!(artifact.load("text/final_norm").unwrap(), [0.0; 128]);
    assert_eq!(artifact.elements("text/layers/0/gdn/z").unwrap(), 16_384);
    assert_eq!(artifact.resource("text", "tokenizer.json").unwrap().len(), 41_872);
    assert!(matches!(
        artifact.resource("text", "vocab.txt"),
        Err(ArtifactError::MissingResource { .. })
    ));
    assert!(matches!(
        artifact.load("text/none"),
        Err(ArtifactError::UnknownParameter { .. })
    ));
    // An all-zero nvfp4 tensor has divisor 0.
    let error = artifact.load("text/layers/0/mlp/down").unwrap_err();
    assert!(
        matches!(
            error,
            ArtifactError::Object {
                source: FormatError::Divisor { .. },
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn the_extension_means_nothing() {
    let folder = Folder::new();
    let other = folder.join("model.infernix");
    std::fs::rename(write_small(&folder), &other).unwrap();
    Artifact::open(&other).unwrap();
}

#[test]
fn framing_faults_have_their_own_errors() {
    let folder = Folder::new();
    let path = write_small(&folder);
    let good = std::fs::read(&path).unwrap();
    let with = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        edit(&mut bytes);
        write(&path, &bytes);
        open_error(&path)
    };
    for length in [0, 1, 31] {
        let error = with(&|bytes| bytes.truncate(length));
        assert!(matches!(error, ArtifactError::TooShort { .. }), "{error}");
    }
    assert!(matches!(
        with(&|bytes| bytes[0] = b'M'),
        ArtifactError::NotAnEntry { .. }
    ));
    assert!(matches!(with(&|bytes| bytes[7] = 4), ArtifactError::NotAnEntry { .. }));
    assert!(matches!(with(&|bytes| bytes[7] = 2), ArtifactError::Version2 { .. }));
    let length = |length: u64| with(&move |bytes| bytes[8..16].copy_from_slice(&length.to_le_bytes()));
    for wrong in [0, 296_169, u64::MAX] {
        assert!(matches!(
            length(wrong),
            ArtifactError::DirectoryLength { available: 296_168, .. }
        ));
    }
    // Directory text cut off, then followed by filler of the file.
    let error = length(100);
    assert!(
        matches!(
            error,
            ArtifactError::Directory {
                source: DirectoryError::Json { .. },
                ..
            }
        ),
        "{error}"
    );
    assert!(matches!(
        with(&|bytes| bytes.push(0)),
        ArtifactError::EntryLength {
            actual: 296_201,
            expected: 296_200,
            ..
        }
    ));
    let error = with(&|bytes| bytes.truncate(bytes.len() - 1));
    assert!(
        matches!(error, ArtifactError::EntryLength { actual: 296_199, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("small.ninfer"));
    let error = open_error(&folder.join("absent.ninfer"));
    assert!(matches!(error, ArtifactError::Io { .. }) && error.to_string().contains("absent.ninfer"));
    assert!(Artifact::open(folder.join("")).is_err());
}

/// The example split in three files of 100,000 + 100,000 + rest bytes.
fn write_split(folder: &Folder, payload: &[u8]) -> std::path::PathBuf {
    let files = r#""files":[{"path":null,"payload_bytes":100000},{"path":"b.ninfer","payload_bytes":100000},{"path":"c","payload_bytes":83912}]"#;
    let json = minified().replace(r#""files":[{"path":null,"payload_bytes":283912}]"#, files);
    let path = folder.join("a.ninfer");
    write(&path, &entry_bytes(&json, json.len(), &payload[..100_000]));
    write(
        &folder.join("b.ninfer"),
        &volume_bytes(1, ID, &payload[100_000..200_000]),
    );
    write(&folder.join("c"), &volume_bytes(2, ID, &payload[200_000..]));
    path
}

#[test]
fn objects_are_joined_across_recorded_volume_names() {
    let folder = Folder::new();
    let payload: Vec<u8> = (0..283_912u32).map(|at| (at * 7 + at / 256) as u8).collect();
    let artifact = Artifact::open(write_split(&folder, &payload)).unwrap();
    for object in artifact.objects() {
        let range = object.offset as usize..(object.offset + object.bytes) as usize;
        let bytes = artifact.object_bytes(object).unwrap();
        assert_eq!(*bytes, payload[range.clone()], "{}", object.id);
        let crosses = [100_000, 200_000]
            .iter()
            .any(|boundary| range.start < *boundary && *boundary < range.end);
        assert_eq!(matches!(bytes, Cow::Owned(_)), crosses, "{}", object.id);
    }
    assert_eq!(*artifact.payload(0, 283_912).unwrap(), payload);
    assert_eq!(*artifact.payload(99_999, 2).unwrap(), payload[99_999..100_001]);
    assert_eq!(artifact.payload(283_912, 0).unwrap().len(), 0);
    for (offset, bytes) in [(283_912, 1), (283_913, 0), (0, 283_913), (1, u64::MAX)] {
        assert!(matches!(
            artifact.payload(offset, bytes),
            Err(ArtifactError::PayloadRange { .. })
        ));
    }
}

#[test]
fn a_missing_volume_matters_only_when_it_is_needed() {
    let folder = Folder::new();
    let path = write_split(&folder, &vec![0; 283_912]);
    std::fs::remove_file(folder.join("c")).unwrap();
    let artifact = Artifact::open(&path).unwrap();
    artifact.load("text/token_embedding").unwrap();
    artifact.load("text/layers/0/gdn/z").unwrap(); // crosses into the second file
    for parameter in ["text/final_norm", "text/layers/1/attention/query"] {
        let error = artifact.load(parameter).unwrap_err();
        assert!(
            matches!(error, ArtifactError::MissingVolume { .. }) && error.to_string().contains("/c"),
            "{error}"
        );
    }
    // It may turn up later.
    write(&folder.join("c"), &volume_bytes(2, ID, &vec![0; 83_912]));
    artifact.load("text/final_norm").unwrap();
}

#[test]
fn volumes_of_another_set_position_or_length_are_refused() {
    let folder = Folder::new();
    let path = write_split(&folder, &vec![0; 283_912]);
    let mut other_id = ID;
    other_id[15] ^= 1;
    let body = vec![0; 83_912];
    let mut wrong_magic = volume_bytes(2, ID, &body);
    wrong_magic[7] = 2;
    let entry = std::fs::read(&path).unwrap();
    for bytes in [
        volume_bytes(2, other_id, &body),
        volume_bytes(1, ID, &body),
        wrong_magic,
        entry,
    ] {
        write(&folder.join("c"), &bytes);
        let error = Artifact::open(&path).unwrap().load("text/final_norm").unwrap_err();
        assert!(
            matches!(error, ArtifactError::ForeignVolume { index: 2, .. }),
            "{error}"
        );
    }
    for length in [0, 31, 4096, 83_911, 83_913] {
        let mut bytes = volume_bytes(2, ID, &vec![0; 90_000]);
        bytes.truncate(if length < 4096 { length } else { 4096 + length });
        write(&folder.join("c"), &bytes);
        let error = Artifact::open(&path).unwrap().load("text/final_norm").unwrap_err();
        assert!(
            matches!(error, ArtifactError::VolumeLength { expected: 88_008, .. }),
            "{error}"
        );
    }
}

/// Opens a file and reads all it offers; only the absence of a panic matters.
fn exercise(path: &Path) {
    if let Ok(artifact) = Artifact::open(path) {
        let parameters: Vec<String> = artifact.bindings().keys().cloned().collect();
        for parameter in parameters {
            // A mutated directory may claim more elements than memory holds; encodings bound what is decoded.
            if artifact.elements(&parameter).is_ok_and(|elements| elements < 1 << 20) {
                let _ = artifact.load(&parameter);
            }
            for item in artifact.uses_of(&parameter) {
                let _ = artifact.activation(&item.parameter, &item.input);
            }
        }
        for index in 0..artifact.objects().len() {
            let _ = artifact.validate_object(index);
        }
        let _ = artifact.resource("text", "tokenizer.json");
    }
}

#[test]
fn damaged_files_never_panic() {
    let folder = Folder::new();
    let path = write_small(&folder);
    let good = std::fs::read(&path).unwrap();
    let other = folder.join("damaged.ninfer");
    let mut random = Random(42);
    for round in 0..400 {
        let mut bytes = good.clone();
        // Header and directory matter most; some rounds hit the payload.
        let range = if round % 4 == 0 { bytes.len() } else { 32 + 8449 };
        for _ in 0..1 + random.below(4) {
            let at = random.below(range);
            match random.below(4) {
                0 => bytes[at] ^= 1 << random.below(8),
                1 => bytes[at] = random.next() as u8,
                2 => bytes[at] = b"0123456789\"{}[],:"[random.below(17)],
                _ => bytes.swap(at, random.below(range)),
            }
        }
        if round % 10 == 0 {
            bytes.truncate(random.below(good.len()));
        }
        write(&other, &bytes);
        exercise(&other);
    }
}

#[test]
fn random_bytes_never_panic() {
    let folder = Folder::new();
    let path = folder.join("random.ninfer");
    let mut random = Random(1);
    for _ in 0..200 {
        let mut bytes: Vec<u8> = (0..random.below(300)).map(|_| random.next() as u8).collect();
        if bytes.len() >= 16 && random.below(2) == 0 {
            bytes[..8].copy_from_slice(b"NINFER\x00\x03");
            let length = random.below(bytes.len()) as u64;
            bytes[8..16].copy_from_slice(&length.to_le_bytes());
        }
        write(&path, &bytes);
        exercise(&path);
    }
}
