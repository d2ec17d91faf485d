//! Entry files and continuation volumes: framing faults, round trips over many volume limits, damaged input.

mod artifact_support;

use artifact_support::{Folder, ID, Random, entry_bytes, minified, volume_bytes, write, write_small};
use perplexity_model::artifact::{
    Artifact, ArtifactError, Binding, Component, DirectoryError, Part, Use, Writer, WriterOptions,
};
use perplexity_model::formats::{EncodeMethod, Format, FormatError, decode, encode};
use perplexity_model::source::ActivationPolicy;
use serde_json::json;
use std::borrow::Cow;
use std::collections::BTreeMap;
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

/// A tensor of each encodable format with its values' encoding.
fn tensors() -> Vec<(&'static str, Format, Vec<u64>, Vec<u8>)> {
    let mut random = Random(7);
    let list: [(&str, Format, EncodeMethod, &[u64]); 9] = [
        ("bf16", Format::Bf16, EncodeMethod::CastDirect, &[7, 33]),
        ("fp32", Format::Fp32, EncodeMethod::CastDirect, &[]),
        ("q4", Format::Q4G64Fp16, EncodeMethod::GroupedAbsmax, &[37, 200]),
        ("q5", Format::Q5G64Fp16, EncodeMethod::GroupedMse, &[19, 130]),
        ("q6", Format::Q6G64Fp16, EncodeMethod::GroupedAbsmax, &[64, 128]),
        ("q8", Format::Q8G32Fp16, EncodeMethod::GroupedAbsmax, &[50, 97]),
        ("nvfp4", Format::Nvfp4, EncodeMethod::Nvfp4Absmax, &[256, 192]),
        ("nvfp4.mse", Format::Nvfp4, EncodeMethod::Nvfp4Mse, &[128, 64]),
        ("fp8", Format::Fp8E4m3fnRowBf16, EncodeMethod::Fp8RowMaxabs, &[33, 77]),
    ];
    list.into_iter()
        .map(|(id, format, method, shape)| {
            let values = random.values(shape.iter().product::<u64>() as usize);
            (
                id,
                format,
                shape.to_vec(),
                encode(format, method, shape, &values).unwrap(),
            )
        })
        .collect()
}

fn component(resources: BTreeMap<String, usize>) -> Component {
    Component {
        config: json!({"any": "thing"}),
        target: None,
        resources,
        proposal: None,
    }
}

/// A writer with `tensors()` declared and bound under their ids, and a resource.
fn declared(volume_limit: u64) -> (Writer, Vec<(usize, Vec<u8>)>) {
    let mut writer = Writer::new(WriterOptions {
        volume_limit,
        artifact_id: Some(ID),
    });
    let notes = "größe".as_bytes().to_vec();
    let resource = writer
        .declare_resource("resource/text/notes", notes.len() as u64)
        .unwrap();
    writer.set_component("text", component(BTreeMap::from([("notes".to_owned(), resource)])));
    writer.metadata_mut().insert("name".into(), json!("mödel"));
    let mut contents = vec![(resource, notes)];
    for (id, format, shape, bytes) in tensors() {
        let object = writer.declare_tensor(id, format, &shape, 1).unwrap();
        writer.bind(id, Binding::Whole { object });
        contents.push((object, bytes));
    }
    writer.add_use(Use {
        parameter: "q4".into(),
        input: "x".into(),
        policy: Some(ActivationPolicy::AllowA8),
        auxiliaries: BTreeMap::new(),
    });
    (writer, contents)
}

#[test]
fn what_is_written_is_read_back_under_any_volume_limit() {
    // 12 KiB leaves the entry 4 or 8 KiB of payload, so that most tensors cross files, some in a scale plane.
    for limit in [u64::MAX, 32_000_000_000, 100_000, 40_000, 16_384, 12_288] {
        let folder = Folder::new();
        let path = folder.join("model.ninfer");
        let (writer, contents) = declared(limit);
        let mut stream = writer.begin(&path).unwrap();
        assert!(folder.names().iter().all(|name| name.ends_with(".tmp")));
        // In pieces of awkward size, last object first.
        for (object, bytes) in contents.iter().rev() {
            for piece in bytes.chunks(1009) {
                stream.append(*object, piece).unwrap();
            }
        }
        let paths = stream.finish().unwrap();
        assert_eq!(paths[0], path);
        let artifact = Artifact::open(&path).unwrap();
        let names: Vec<String> = paths
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        assert_eq!(folder.names(), names);
        for (at, (path, file)) in paths.iter().zip(artifact.files()).enumerate() {
            assert!(std::fs::metadata(path).unwrap().len() <= limit);
            if at > 0 {
                assert_eq!(names[at], format!("model.ninfer.part-{at:04}"));
                assert_eq!(file.path.as_deref(), Some(names[at].as_str()));
            }
            if at + 1 < paths.len() {
                assert_eq!(file.payload_bytes % 4096, 0);
            }
        }
        assert_eq!(paths.len() > 1, limit <= 40_000, "{limit}");
        assert_eq!(artifact.artifact_id(), "a5".repeat(16));
        assert_eq!(artifact.name(), Some("mödel"));
        assert_eq!(*artifact.resource("text", "notes").unwrap(), *"größe".as_bytes());
        for (index, object) in artifact.objects().iter().enumerate() {
            assert_eq!(
                *artifact.object_bytes(object).unwrap(),
                contents[index].1,
                "{}",
                object.id
            );
            artifact.validate_object(index).unwrap();
        }
        for (id, format, shape, bytes) in tensors() {
            let mut expected = vec![0.0; shape.iter().product::<u64>() as usize];
            let range = 0..expected.len() as u64;
            decode(format, format.layout(), &shape, 1, &bytes, range, &mut expected).unwrap();
            assert_eq!(artifact.load(id).unwrap(), expected, "{id}");
        }
    }
}

#[test]
fn gaps_and_filler_are_zero() {
    let folder = Folder::new();
    let path = folder.join("model.ninfer");
    let (writer, contents) = declared(40_000);
    let mut stream = writer.begin(&path).unwrap();
    for (object, bytes) in &contents {
        stream.append(*object, bytes).unwrap();
    }
    let paths = stream.finish().unwrap();
    let artifact = Artifact::open(&path).unwrap();
    let payload = artifact.payload(0, artifact.payload_bytes()).unwrap();
    let mut end = 0;
    for object in artifact.objects() {
        assert!(payload[end..object.offset as usize].iter().all(|byte| *byte == 0));
        end = (object.offset + object.bytes) as usize;
    }
    assert_eq!(end, payload.len());
    for part in &paths[1..] {
        assert!(std::fs::read(part).unwrap()[32..4096].iter().all(|byte| *byte == 0));
    }
    let entry = std::fs::read(&path).unwrap();
    let json_bytes = u64::from_le_bytes(entry[8..16].try_into().unwrap()) as usize;
    assert_eq!((32 + json_bytes) % 4096, 0);
    assert!(entry[32..32 + json_bytes].trim_ascii_end().ends_with(b"}"));
}

#[test]
fn the_default_limit_splits_as_published_sets_do() {
    // Entry start 65,536 leaves 31,999,934,464 bytes; following files take 31,999,995,904. Nothing is written here, so
    // the limit is scaled down: the same arithmetic with 4096 bytes of directory.
    let folder = Folder::new();
    let mut writer = Writer::new(WriterOptions {
        volume_limit: 20_000,
        artifact_id: None,
    });
    writer.set_component("text", component(BTreeMap::new()));
    let object = writer.declare_tensor("w", Format::Bf16, &[20_000], 1).unwrap();
    writer.bind("w", Binding::Whole { object });
    let mut stream = writer.begin(folder.join("m")).unwrap();
    stream.append(object, &vec![1; 40_000]).unwrap();
    stream.finish().unwrap();
    let artifact = Artifact::open(folder.join("m")).unwrap();
    let sizes: Vec<u64> = artifact.files().iter().map(|file| file.payload_bytes).collect();
    // (20000 - 4096) / 4096 = 3 blocks of 4096 in every file.
    assert_eq!(sizes, [12_288, 12_288, 12_288, 40_000 - 3 * 12_288]);
}

#[test]
fn random_ids_differ() {
    let ids: Vec<String> = (0..3)
        .map(|_| {
            let folder = Folder::new();
            let mut writer = Writer::new(WriterOptions::default());
            writer.set_component("text", component(BTreeMap::new()));
            let object = writer.declare_tensor("w", Format::Bf16, &[1], 1).unwrap();
            let mut stream = writer.begin(folder.join("m.ninfer")).unwrap();
            stream.append(object, &[0, 0]).unwrap();
            stream.finish().unwrap();
            Artifact::open(folder.join("m.ninfer")).unwrap().artifact_id()
        })
        .collect();
    assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
    assert!(ids.iter().all(|id| id.len() == 32 && id.as_bytes()[12] == b'4'));
}

#[test]
fn nothing_is_left_behind_unless_everything_is_written() {
    let folder = Folder::new();
    let path = folder.join("model.ninfer");
    // Dropped early.
    let (writer, contents) = declared(12_288);
    let mut stream = writer.begin(&path).unwrap();
    stream.append(contents[3].0, &contents[3].1).unwrap();
    drop(stream);
    assert_eq!(folder.names(), Vec::<String>::new());
    // Finished with an object one byte short.
    let (writer, contents) = declared(12_288);
    let mut stream = writer.begin(&path).unwrap();
    for (object, bytes) in &contents {
        stream
            .append(*object, if *object == 4 { &bytes[1..] } else { bytes })
            .unwrap();
    }
    let error = stream.finish().unwrap_err();
    assert!(
        matches!(&error, ArtifactError::Written { object, .. } if object == "q5"),
        "{error}"
    );
    assert_eq!(folder.names(), Vec::<String>::new());
    // One byte too many, or an object that does not exist.
    let (writer, contents) = declared(u64::MAX);
    let mut stream = writer.begin(&path).unwrap();
    stream.append(contents[1].0, &contents[1].1).unwrap();
    assert!(matches!(
        stream.append(contents[1].0, &[0]),
        Err(ArtifactError::Written { .. })
    ));
    assert!(matches!(stream.append(99, &[0]), Err(ArtifactError::Written { .. })));
    drop(stream);
    assert_eq!(folder.names(), Vec::<String>::new());
}

#[test]
fn existing_files_are_not_overwritten() {
    for taken in ["model.ninfer", "model.ninfer.part-0002"] {
        let folder = Folder::new();
        write(&folder.join(taken), b"precious");
        let error = declared(12_288).0.begin(folder.join("model.ninfer")).unwrap_err();
        assert!(matches!(error, ArtifactError::Exists { .. }), "{error}");
        assert_eq!(folder.names(), [taken]);
        // A file that appears while writing is kept too.
        let folder = Folder::new();
        let (writer, contents) = declared(12_288);
        let mut stream = writer.begin(folder.join("model.ninfer")).unwrap();
        for (object, bytes) in &contents {
            stream.append(*object, bytes).unwrap();
        }
        write(&folder.join(taken), b"precious");
        assert!(matches!(stream.finish(), Err(ArtifactError::Exists { .. })));
        assert_eq!(folder.names(), [taken]);
        assert_eq!(std::fs::read(folder.join(taken)).unwrap(), b"precious");
    }
}

#[test]
fn a_directory_that_readers_would_refuse_is_not_written() {
    let folder = Folder::new();
    let path = folder.join("m.ninfer");
    let base = || {
        let mut writer = Writer::new(WriterOptions::default());
        writer.set_component("text", component(BTreeMap::new()));
        writer.declare_tensor("w", Format::Bf16, &[4], 1).unwrap();
        writer
    };
    let mut twice = base();
    twice.declare_tensor("w", Format::Bf16, &[4], 1).unwrap();
    let mut range = base();
    range.bind(
        "p",
        Binding::Parts(vec![Part {
            object: 0,
            begin: 0,
            end: 5,
        }]),
    );
    let mut nowhere = base();
    nowhere.bind("p", Binding::Whole { object: 9 });
    let no_text = {
        let mut writer = Writer::new(WriterOptions::default());
        writer.declare_tensor("w", Format::Bf16, &[4], 1).unwrap();
        writer
    };
    for writer in [twice, range, nowhere, no_text, Writer::new(WriterOptions::default())] {
        let error = writer.begin(&path).unwrap_err();
        assert!(matches!(error, ArtifactError::Directory { .. }), "{error}");
        assert_eq!(folder.names(), Vec::<String>::new());
    }
    let mut small = base();
    assert!(small.declare_tensor("n", Format::Nvfp4, &[100, 64], 1).is_err());
    assert!(small.declare_resource("r", 0).is_err());
    let (writer, _) = declared(8191);
    assert!(matches!(writer.begin(&path), Err(ArtifactError::VolumeLimit { .. })));
}

#[test]
fn parameters_may_span_parents_of_different_formats_and_start_in_mid_row() {
    let folder = Folder::new();
    let path = folder.join("model.ninfer");
    let (mut writer, contents) = declared(12_288);
    let parts = |list: &[(usize, u64, u64)]| {
        Binding::Parts(
            list.iter()
                .map(|&(object, begin, end)| Part { object, begin, end })
                .collect(),
        )
    };
    // Objects: 0 resource, 1 bf16, 2 fp32, 3 q4 [37,200], 4 q5 [19,130], 5 q6, 6 q8, 7 nvfp4 [256,192], 8, 9 fp8 [33,77].
    let list = [
        (3, 1234, 1777),
        (1, 5, 40),
        (4, 129, 391),
        (5, 1, 8192),
        (6, 96, 98),
        (7, 1003, 25_001),
        (9, 76, 155),
    ];
    writer.bind("mixed", parts(&list));
    let mut stream = writer.begin(&path).unwrap();
    for (object, bytes) in &contents {
        stream.append(*object, bytes).unwrap();
    }
    stream.finish().unwrap();
    let artifact = Artifact::open(&path).unwrap();
    let ids = ["", "bf16", "fp32", "q4", "q5", "q6", "q8", "nvfp4", "nvfp4.mse", "fp8"];
    let expected: Vec<f32> = list
        .iter()
        .flat_map(|&(object, begin, end)| artifact.load(ids[object]).unwrap()[begin as usize..end as usize].to_vec())
        .collect();
    assert_eq!(artifact.load("mixed").unwrap(), expected);
    let mut out = vec![0.0; expected.len()];
    artifact.load_into("mixed", &mut out).unwrap();
    assert_eq!(out, expected);
    out.pop();
    assert!(matches!(
        artifact.load_into("mixed", &mut out),
        Err(ArtifactError::OutputLength { .. })
    ));
    let stored = artifact.stored_parts("mixed").unwrap();
    assert_eq!(stored.len(), list.len());
    assert_eq!(
        (stored[1].encoding.format, stored[1].begin, stored[1].end),
        (Format::Bf16, 5, 40)
    );
    // Shape and format of a parameter.
    let elements = expected.len() as u64;
    artifact.check_parameter("mixed", &[elements], None).unwrap();
    let error = artifact
        .check_parameter("mixed", &[elements], Some(Format::Bf16))
        .unwrap_err();
    assert!(matches!(error, ArtifactError::ParameterFormat { .. }), "{error}");
    assert!(matches!(
        artifact.check_parameter("mixed", &[elements + 1], None),
        Err(ArtifactError::ParameterShape { .. })
    ));
    artifact
        .check_parameter("q4", &[37, 200], Some(Format::Q4G64Fp16))
        .unwrap();
    for shape in [&[7400][..], &[1, 37, 200], &[200, 37]] {
        let error = artifact.check_parameter("q4", shape, None).unwrap_err();
        assert!(matches!(error, ArtifactError::ParameterShape { .. }), "{error}");
    }
}

#[test]
fn uses_give_policy_and_activation_divisor() {
    let folder = Folder::new();
    let path = folder.join("m.ninfer");
    let mut writer = Writer::new(WriterOptions::default());
    writer.set_component("text", component(BTreeMap::new()));
    let weight = writer.declare_tensor("w", Format::Bf16, &[2], 1).unwrap();
    let divisors = writer.declare_tensor("d", Format::Fp32, &[5], 1).unwrap();
    let scalar = writer.declare_tensor("s", Format::Fp32, &[], 1).unwrap();
    writer.bind("w", Binding::Whole { object: weight });
    let part = |begin, end| {
        Binding::Parts(vec![Part {
            object: divisors,
            begin,
            end,
        }])
    };
    let two = Binding::Parts(vec![
        Part {
            object: divisors,
            begin: 0,
            end: 1,
        },
        Part {
            object: scalar,
            begin: 0,
            end: 1,
        },
    ]);
    let uses: [(&str, Option<ActivationPolicy>, Vec<(&str, Binding)>); 12] = [
        ("plain", Some(ActivationPolicy::AllowA8), vec![]),
        (
            "good",
            Some(ActivationPolicy::AllowA4),
            vec![("activation_input_divisor", part(0, 1))],
        ),
        (
            "scalar",
            Some(ActivationPolicy::A16Only),
            vec![("activation_input_divisor", Binding::Whole { object: scalar })],
        ),
        ("silent", None, vec![]),
        (
            "role",
            Some(ActivationPolicy::AllowA4),
            vec![("hadamard_signs", Binding::Whole { object: weight })],
        ),
        (
            "zero",
            Some(ActivationPolicy::AllowA4),
            vec![("activation_input_divisor", part(1, 2))],
        ),
        (
            "negative",
            Some(ActivationPolicy::AllowA4),
            vec![("activation_input_divisor", part(2, 3))],
        ),
        (
            "nan",
            Some(ActivationPolicy::AllowA4),
            vec![("activation_input_divisor", part(3, 4))],
        ),
        (
            "infinite",
            Some(ActivationPolicy::AllowA4),
            vec![("activation_input_divisor", part(4, 5))],
        ),
        (
            "long",
            Some(ActivationPolicy::AllowA4),
            vec![("activation_input_divisor", part(0, 2))],
        ),
        (
            "two",
            Some(ActivationPolicy::AllowA4),
            vec![("activation_input_divisor", two)],
        ),
        (
            "bf16",
            Some(ActivationPolicy::AllowA4),
            vec![(
                "activation_input_divisor",
                Binding::Parts(vec![Part {
                    object: weight,
                    begin: 0,
                    end: 1,
                }]),
            )],
        ),
    ];
    for (input, policy, auxiliaries) in uses {
        let auxiliaries = auxiliaries
            .into_iter()
            .map(|(role, binding)| (role.to_owned(), binding))
            .collect();
        writer.add_use(Use {
            parameter: "w".into(),
            input: input.into(),
            policy,
            auxiliaries,
        });
    }
    let mut stream = writer.begin(&path).unwrap();
    stream.append(weight, &[0x80, 0x3F, 0x80, 0x3F]).unwrap();
    let values = [896.0, 0.0, -1.0, f32::NAN, f32::INFINITY];
    stream.append(divisors, &values.map(f32::to_le_bytes).concat()).unwrap();
    stream.append(scalar, &2.5f32.to_le_bytes()).unwrap();
    stream.finish().unwrap();
    let artifact = Artifact::open(&path).unwrap();
    let activation = |input: &str| artifact.activation("w", input);
    assert_eq!(activation("plain").unwrap(), (ActivationPolicy::AllowA8, None));
    assert_eq!(activation("good").unwrap(), (ActivationPolicy::AllowA4, Some(896.0)));
    assert_eq!(activation("scalar").unwrap(), (ActivationPolicy::A16Only, Some(2.5)));
    assert!(matches!(activation("other"), Err(ArtifactError::MissingUse { .. })));
    assert!(matches!(activation("silent"), Err(ArtifactError::MissingPolicy { .. })));
    assert!(matches!(activation("role"), Err(ArtifactError::AuxiliaryRole { .. })));
    for input in ["zero", "negative", "nan", "infinite", "long", "two", "bf16"] {
        let error = activation(input).unwrap_err();
        assert!(
            matches!(error, ArtifactError::ActivationDivisor { .. }),
            "{input}: {error}"
        );
        assert!(error.to_string().contains(&format!("`w`@`{input}`")));
    }
}

#[test]
fn a_divisor_per_row_block_survives_the_file() {
    let folder = Folder::new();
    let path = folder.join("m.ninfer");
    let mut writer = Writer::new(WriterOptions::default());
    writer.set_component("text", component(BTreeMap::new()));
    let object = writer.declare_tensor("w", Format::Nvfp4, &[256, 64], 2).unwrap();
    writer.bind(
        "second",
        Binding::Parts(vec![Part {
            object,
            begin: 128 * 64,
            end: 128 * 64 + 2,
        }]),
    );
    let mut codes = vec![0; 256 * 32];
    codes[128 * 32] = 0xA7;
    let bytes = perplexity_model::formats::nvfp4::pack(&[256, 64], &codes, &vec![0x38; 256 * 4], &[1.0, 4.0]).unwrap();
    let mut stream = writer.begin(&path).unwrap();
    stream.append(object, &bytes).unwrap();
    stream.finish().unwrap();
    let artifact = Artifact::open(&path).unwrap();
    assert_eq!(artifact.stored_parts("second").unwrap()[0].encoding.divisors, 2);
    assert_eq!(artifact.load("second").unwrap(), [1.5, -0.25]);
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
