//! Writing artifacts and reading them back: volume limits, failures, parameters in parts, Uses.

mod artifact_support;

use artifact_support::{Folder, ID, Random, write};
use perplexity_model::artifact::{Artifact, ArtifactError, Binding, Component, Part, Use, Writer, WriterOptions};
use perplexity_model::formats::{EncodeMethod, Format, decode, encode};
use perplexity_model::source::ActivationPolicy;
use serde_json::json;
use std::collections::BTreeMap;

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

/// A model with one bf16 vector, written and opened.
fn written_vector(elements: u64, volume_limit: u64) -> (Folder, Artifact) {
    let folder = Folder::new();
    let mut writer = Writer::new(WriterOptions {
        volume_limit,
        artifact_id: None,
    });
    writer.set_component("text", component(BTreeMap::new()));
    let object = writer.declare_tensor("w", Format::Bf16, &[elements], 1).unwrap();
    writer.bind("w", Binding::Whole { object });
    let mut stream = writer.begin(folder.join("m")).unwrap();
    let words: Vec<u8> = (0..elements)
        .flat_map(|at| ((at % 0x7F80) as u16).to_le_bytes())
        .collect();
    stream.append(object, &words).unwrap();
    stream.finish().unwrap();
    let artifact = Artifact::open(folder.join("m")).unwrap();
    assert_eq!(*artifact.payload(0, 2 * elements).unwrap(), words);
    (folder, artifact)
}

#[test]
fn every_file_but_the_last_takes_whole_blocks() {
    let (_folder, artifact) = written_vector(20_000, 20_000);
    let sizes: Vec<u64> = artifact.files().iter().map(|file| file.payload_bytes).collect();
    // (20000 - 4096) / 4096 = 3 blocks of 4096 in every file.
    assert_eq!(sizes, [12_288, 12_288, 12_288, 40_000 - 3 * 12_288]);
}

#[test]
fn the_directory_grows_with_its_own_table_of_files() {
    // More than a hundred files need more than the 4064 bytes that a single-file table does.
    let (folder, artifact) = written_vector(2_000_000, 40_000);
    assert!(artifact.files().len() > 100);
    let entry = std::fs::read(folder.join("m")).unwrap();
    assert_eq!(entry[8..16], (8192u64 - 32).to_le_bytes());
    assert_eq!(entry.len() as u64, 8192 + artifact.files()[0].payload_bytes);
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
    type Row = (&'static str, Option<ActivationPolicy>, Vec<(&'static str, Binding)>);
    let uses: [Row; 12] = [
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
