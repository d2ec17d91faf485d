//! The JSON directory: the example that obeys every rule, then one offence per rule.

mod artifact_support;

use artifact_support::{SMALL_DIRECTORY, minified};
use perplexity_model::artifact::{ArtifactError, Binding, Directory, DirectoryError, Part, Proposal, parse_strict};
use perplexity_model::formats::FormatError;
use perplexity_model::source::ActivationPolicy;
use serde_json::{Value, json};

fn parse(text: &str) -> Result<Directory, DirectoryError> {
    Directory::parse(text.as_bytes(), "small.ninfer")
}

/// The example with one edit.
fn edited(edit: impl FnOnce(&mut Value)) -> Result<Directory, DirectoryError> {
    let mut value: Value = serde_json::from_str(SMALL_DIRECTORY).unwrap();
    edit(&mut value);
    parse(&value.to_string())
}

/// The fault that one edit causes.
fn fault(edit: impl FnOnce(&mut Value)) -> DirectoryError {
    edited(edit).unwrap_err()
}

macro_rules! assert_fault {
    ($edit:expr, $pattern:pat) => {{
        let error = fault($edit);
        assert!(matches!(error, $pattern), "{error:?}");
    }};
}

fn object<'a>(value: &'a mut Value, id: &str) -> &'a mut Value {
    value["objects"]
        .as_array_mut()
        .unwrap()
        .iter_mut()
        .find(|object| object["id"] == id)
        .unwrap()
}

#[test]
fn the_example_parses_and_every_size_and_offset_holds() {
    assert_eq!(minified().len(), 8449);
    let directory = parse(SMALL_DIRECTORY).unwrap();
    assert_eq!(directory.objects.len(), 28);
    assert_eq!(directory.bindings.len(), 31);
    assert_eq!(directory.uses.len(), 19);
    assert_eq!(directory.files[0].payload_bytes, 283_912);
    for object in &directory.objects {
        if object.elements().is_some() {
            object.encoding().unwrap();
        }
    }
    let text = &directory.components["text"];
    assert_eq!(text.config["hidden_size"], 128);
    assert_eq!(directory.objects[text.resources["tokenizer.json"]].id, "res.tok");
    let vz = directory
        .objects
        .iter()
        .position(|object| object.id == "L0.vz")
        .unwrap();
    assert_eq!(
        directory.bindings["text/layers/0/gdn/z"],
        Binding::Parts(vec![Part {
            object: vz,
            begin: 16_384,
            end: 32_768
        }])
    );
    assert_eq!(directory.uses[9].policy, Some(ActivationPolicy::AllowA4));
    assert_eq!(directory.uses[9].auxiliaries.len(), 1);
    assert_eq!(directory.metadata["name"], "toy-hybrid");
}

#[test]
fn writing_and_parsing_give_the_same_directory() {
    let directory = edited(|value| {
        value["components"]["text"]["proposal"] = json!({"domain": "indexed", "rows": 7});
        value["components"]["mtp"] = json!({"config": {}, "target": "text"});
        value["uses"][0].as_object_mut().unwrap().remove("activation_policy");
        object(value, "L0.gu")["divisors"] = json!(2);
    })
    .unwrap();
    assert_eq!(
        directory.components["text"].proposal,
        Some(Proposal::Indexed { rows: 7 })
    );
    assert_eq!(parse(&directory.to_json()).unwrap(), directory);
}

#[test]
fn absent_metadata_and_provenance_are_empty() {
    let directory = edited(|value| {
        value.as_object_mut().unwrap().remove("metadata");
        value.as_object_mut().unwrap().remove("provenance");
    })
    .unwrap();
    assert!(directory.metadata.is_empty() && directory.provenance.is_empty());
}

#[test]
fn json_must_be_strict() {
    for text in [
        &b""[..],
        b"{",
        b"[1] x",
        b"\xEF\xBB\xBF{}",
        b"[NaN]",
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e999]",
        b"[01]",
        b"[1,]",
        b"{'a':1}",
        b"[\"\xFF\"]",
        b"[\"\\ud800\"]",
        b"\xFF\xFE{\0}\0",
    ] {
        assert!(
            matches!(parse_strict(text), Err(DirectoryError::Json { .. })),
            "{text:?}"
        );
    }
    let deep = "[".repeat(100_000);
    assert!(matches!(
        parse_strict(deep.as_bytes()),
        Err(DirectoryError::Json { .. })
    ));
    assert_eq!(
        parse_strict(b" {\"a\": [1, -2, 0.5, null, true, \"\\u00e9\"]} \n").unwrap(),
        json!({"a": [1, -2, 0.5, null, true, "é"]})
    );
}

#[test]
fn duplicate_members_are_refused_at_any_depth() {
    for (from, to, name) in [
        ("\"note\":", "\"note\":1,\"note\":", "note"),
        (
            "\"hidden_size\":",
            "\"hidden_size\":128,\"hidden_size\":",
            "hidden_size",
        ),
        (
            "\"mrope_section\":",
            "\"mrope_section\":1,\"mrope_section\":",
            "mrope_section",
        ),
        (
            "\"text/final_norm\":",
            "\"text/final_norm\":1,\"text/final_norm\":",
            "text/final_norm",
        ),
        ("\"files\":", "\"uses\":[],\"files\":", "uses"),
        ("\"name\":", "\"n\\u0061me\":1,\"name\":", "name"),
    ] {
        let text = minified().replacen(from, to, 1);
        assert_eq!(parse(&text), Err(DirectoryError::DuplicateMember { name: name.into() }));
    }
}

#[test]
fn integers_are_integer_tokens_in_range() {
    for token in [
        "1.0",
        "1e3",
        "-1",
        "-0",
        "\"1\"",
        "true",
        "null",
        "18446744073709551616",
        "[1]",
    ] {
        let text = minified().replacen("\"offset\":0,", &format!("\"offset\":{token},"), 1);
        assert!(matches!(parse(&text), Err(DirectoryError::Integer { .. })), "{token}");
        let text = minified().replacen("\"shape\":[320,128]", &format!("\"shape\":[320,{token}]"), 1);
        assert!(matches!(parse(&text), Err(DirectoryError::Integer { .. })), "{token}");
    }
    assert_fault!(
        |value| object(value, "emb")["bytes"] = json!(0),
        DirectoryError::Integer { least: 1, .. }
    );
    assert_fault!(
        |value| value["files"][0]["payload_bytes"] = json!(0),
        DirectoryError::Integer { least: 1, .. }
    );
}

#[test]
fn ids_are_non_empty_and_without_nul() {
    for id in [json!(""), json!("a\0b"), json!(1), json!(null)] {
        assert_fault!(
            |value| object(value, "emb")["id"] = id.clone(),
            DirectoryError::Id { .. }
        );
        assert_fault!(
            |value| object(value, "emb")["format"] = id.clone(),
            DirectoryError::Id { .. }
        );
        assert_fault!(
            |value| value["uses"][0]["input"] = id.clone(),
            DirectoryError::Id { .. }
        );
    }
    assert_fault!(
        |value| value["bindings"][""] = json!({"object": "emb"}),
        DirectoryError::Id { .. }
    );
    assert_fault!(
        |value| value["components"][""] = json!({"config": {}}),
        DirectoryError::Id { .. }
    );
    assert_fault!(
        |value| value["components"]["text"]["resources"][""] = json!("res.tok"),
        DirectoryError::Id { .. }
    );
}

#[test]
fn every_record_is_closed_and_complete() {
    let records: [(&str, &[&str]); 10] = [
        ("", &["components", "objects", "bindings", "uses", "files"]),
        ("/components/text", &["config"]),
        (
            "/objects/4",
            &["id", "kind", "shape", "format", "layout", "offset", "bytes"],
        ),
        ("/objects/0", &["id", "kind", "encoding", "offset", "bytes"]),
        ("/bindings/text~1layers~10~1gdn~1query/parts/0", &["object", "range"]),
        ("/uses/0", &["parameter", "input"]),
        (
            "/uses/8/auxiliaries/activation_input_divisor/parts/0",
            &["object", "range"],
        ),
        ("/files/0", &["path", "payload_bytes"]),
        ("/bindings/text~1final_norm", &[]),
        ("/bindings/text~1layers~10~1gdn~1query", &[]),
    ];
    for (pointer, members) in records {
        let add = |value: &mut Value| value.pointer_mut(pointer).unwrap()["extra"] = json!(1);
        match fault(add) {
            DirectoryError::UnknownMember { member, .. } => assert_eq!(member, "extra"),
            DirectoryError::BindingForm { .. } => assert!(members.is_empty()),
            error => panic!("{pointer}: {error:?}"),
        }
        for member in members {
            let remove = |value: &mut Value| {
                value
                    .pointer_mut(pointer)
                    .unwrap()
                    .as_object_mut()
                    .unwrap()
                    .remove(*member)
                    .unwrap();
            };
            match fault(remove) {
                DirectoryError::MissingMember { member: missing, .. } => assert_eq!(missing, *member),
                error => panic!("{pointer} {member}: {error:?}"),
            }
        }
    }
    // A proposal is closed too, and `divisors` exists for nvfp4 only.
    let proposal = |value: &mut Value| value["components"]["text"]["proposal"] = json!({"domain": "full", "x": 1});
    assert_fault!(proposal, DirectoryError::UnknownMember { .. });
    assert_fault!(
        |value| object(value, "emb")["divisors"] = json!(1),
        DirectoryError::UnknownMember { .. }
    );
    assert_fault!(
        |value| object(value, "L0.gu")["divisors"] = json!(0),
        DirectoryError::Integer { least: 1, .. }
    );
}

#[test]
fn values_have_their_types() {
    for pointer in [
        "/objects",
        "/uses",
        "/files",
        "/objects/4/shape",
        "/bindings/text~1layers~10~1gdn~1query/parts",
    ] {
        let edit = |value: &mut Value| *value.pointer_mut(pointer).unwrap() = json!({});
        assert_fault!(
            edit,
            DirectoryError::Type {
                expected: "an array",
                ..
            }
        );
    }
    for pointer in [
        "/components",
        "/bindings",
        "/components/text",
        "/components/text/config",
        "/components/text/resources",
        "/objects/4",
        "/uses/0",
        "/files/0",
        "/bindings/text~1final_norm",
        "/uses/8/auxiliaries",
    ] {
        let edit = |value: &mut Value| *value.pointer_mut(pointer).unwrap() = json!([]);
        assert_fault!(
            edit,
            DirectoryError::Type {
                expected: "an object",
                ..
            }
        );
    }
    assert_fault!(
        |value| value["uses"][0]["activation_policy"] = json!(1),
        DirectoryError::Type { .. }
    );
    assert!(matches!(parse("[]"), Err(DirectoryError::Type { .. })));
}

#[test]
fn file_tables() {
    assert_fault!(|value| value["files"] = json!([]), DirectoryError::NoFiles);
    assert_fault!(
        |value| value["files"][0]["path"] = json!("x"),
        DirectoryError::EntryPath
    );
    let with = |names: Vec<&str>| {
        edited(move |value| {
            let files = value["files"].as_array_mut().unwrap();
            files.extend(names.iter().map(|name| json!({"path": name, "payload_bytes": 1})));
        })
    };
    with(vec!["a", "..a", "small.ninfer.part-0001"]).unwrap();
    for names in [
        vec!["."],
        vec![".."],
        vec!["a/b"],
        vec!["a\\b"],
        vec!["a", "a"],
        vec!["small.ninfer"],
    ] {
        assert!(matches!(with(names), Err(DirectoryError::VolumeName { .. })));
    }
    assert!(matches!(with(vec![""]), Err(DirectoryError::Id { .. })));
    assert_fault!(
        |value| value["files"] = json!([{"path": null, "payload_bytes": u64::MAX}, {"path": "a", "payload_bytes": 1}]),
        DirectoryError::Overflow { .. }
    );
}

#[test]
fn objects_are_sorted_disjoint_and_inside_the_payload() {
    assert_fault!(|value| value["objects"] = json!([]), DirectoryError::NoObjects);
    assert_fault!(
        |value| object(value, "emb")["kind"] = json!("table"),
        DirectoryError::Kind { .. }
    );
    assert_fault!(
        |value| object(value, "head")["id"] = json!("emb"),
        DirectoryError::DuplicateObject { .. }
    );
    assert_fault!(
        |value| object(value, "res.tok")["id"] = json!("emb"),
        DirectoryError::DuplicateObject { .. }
    );
    let swap = |value: &mut Value| value["objects"].as_array_mut().unwrap().swap(5, 6);
    assert_fault!(swap, DirectoryError::Placement { .. });
    assert_fault!(
        |value| object(value, "res.chat")["offset"] = json!(44_181),
        DirectoryError::Placement { .. }
    );
    edited(|value| object(value, "res.gen")["bytes"] = json!(44_800 - 44_694)).unwrap();
    let overlap = |value: &mut Value| object(value, "res.gen")["bytes"] = json!(44_801 - 44_694);
    assert_fault!(overlap, DirectoryError::Placement { .. });
    assert_fault!(
        |value| object(value, "div")["bytes"] = json!(9),
        DirectoryError::Placement { .. }
    );
    assert_fault!(
        |value| object(value, "div")["offset"] = json!(u64::MAX),
        DirectoryError::Overflow { .. }
    );
    // Unreferenced tail bytes mean nothing.
    edited(|value| value["files"][0]["payload_bytes"] = json!(283_913)).unwrap();
}

#[test]
fn shapes_have_at_most_16_positive_extents() {
    for shape in [json!(vec![1; 17]), json!([2, 0]), json!([u64::MAX, 2])] {
        assert_fault!(
            |value| object(value, "emb")["shape"] = shape.clone(),
            DirectoryError::Shape { .. }
        );
    }
    let scalar = edited(|value| object(value, "L0.norm1")["shape"] = json!([])).unwrap();
    assert_eq!(scalar.objects[5].elements(), Some(1));
}

#[test]
fn unknown_names_are_kept_until_the_encoding_is_needed() {
    let directory = edited(|value| {
        object(value, "emb")["format"] = json!("t2_g128_fp16");
        object(value, "head")["layout"] = json!("ternary_row_k128_v1");
        object(value, "res.tok")["encoding"] = json!("zstd");
        object(value, "L0.qk")["layout"] = json!("row_scale_v1");
        object(value, "L0.vz")["bytes"] = json!(21_503);
        object(value, "L0.ab")["offset"] = json!(119_039);
        object(value, "L0.down")["shape"] = json!([127, 128]);
    })
    .unwrap();
    let encoding = |id: &str| {
        directory
            .objects
            .iter()
            .find(|object| object.id == id)
            .unwrap()
            .encoding()
    };
    let source = |id: &str| match encoding(id) {
        Err(ArtifactError::Object { object, source }) => {
            assert_eq!(object, id);
            source
        }
        other => panic!("{other:?}"),
    };
    assert!(matches!(source("emb"), FormatError::UnknownFormat { .. }));
    assert!(matches!(source("head"), FormatError::UnknownLayout { .. }));
    assert!(matches!(source("L0.qk"), FormatError::LayoutMismatch { .. }));
    assert_eq!(
        source("L0.vz"),
        FormatError::Size {
            expected: 21_504,
            actual: 21_503
        }
    );
    assert_eq!(
        source("L0.ab"),
        FormatError::Alignment {
            offset: 119_039,
            alignment: 256
        }
    );
    assert!(matches!(source("L0.down"), FormatError::Shape { .. }));
    assert!(matches!(encoding("res.tok"), Err(ArtifactError::NotATensor { .. })));
    encoding("L0.gu").unwrap();
}

#[test]
fn components_and_proposals() {
    let rename = |value: &mut Value| {
        let text = value["components"].as_object_mut().unwrap().remove("text").unwrap();
        value["components"]["vision"] = text;
    };
    assert_fault!(rename, DirectoryError::NoText);
    let target = |value: &mut Value| value["components"]["mtp"] = json!({"config": {}, "target": "speech"});
    assert_fault!(target, DirectoryError::Target { .. });
    edited(|value| value["components"]["anything"] = json!({"config": {"a": [1]}, "target": "text"})).unwrap();
    let resource =
        |id: &'static str| move |value: &mut Value| value["components"]["text"]["resources"]["x"] = json!(id);
    assert_fault!(resource("none"), DirectoryError::UnknownObject { .. });
    assert_fault!(
        resource("emb"),
        DirectoryError::WrongKind {
            expected: "resource",
            ..
        }
    );
    let proposal =
        |proposal: Value| edited(move |value| value["components"]["text"]["proposal"] = proposal).map(|_| ());
    assert_eq!(proposal(json!({"domain": "full"})), Ok(()));
    assert_eq!(proposal(json!({"domain": "indexed", "rows": 1})), Ok(()));
    for wrong in [
        json!({"domain": "full", "rows": 1}),
        json!({"domain": "indexed"}),
        json!({"domain": "some"}),
    ] {
        assert!(matches!(proposal(wrong), Err(DirectoryError::Proposal { .. })));
    }
    assert!(matches!(
        proposal(json!({"domain": "indexed", "rows": 0})),
        Err(DirectoryError::Integer { .. })
    ));
    let misplaced =
        |value: &mut Value| value["components"]["mtp"] = json!({"config": {}, "proposal": {"domain": "full"}});
    assert_fault!(misplaced, DirectoryError::Proposal { .. });
}

#[test]
fn bindings_refer_to_ranges_of_tensors() {
    let with = |binding: Value| edited(move |value| value["bindings"]["text/extra"] = binding).map(|_| ());
    assert_eq!(with(json!({"object": "emb"})), Ok(()));
    let range = |range: Value| with(json!({"parts": [{"object": "L0.norm1", "range": range}]}));
    assert_eq!(range(json!([0, 128])), Ok(()));
    assert_eq!(range(json!([127, 128])), Ok(()));
    for wrong in [
        json!([0, 0]),
        json!([5, 5]),
        json!([5, 4]),
        json!([0, 129]),
        json!([128, 129]),
    ] {
        assert!(matches!(
            range(wrong),
            Err(DirectoryError::PartRange { elements: 128, .. })
        ));
    }
    for wrong in [json!([]), json!([0]), json!([0, 1, 2])] {
        assert!(matches!(range(wrong), Err(DirectoryError::Type { .. })));
    }
    assert!(matches!(range(json!([0.0, 1])), Err(DirectoryError::Integer { .. })));
    for wrong in [
        json!({}),
        json!({"parts": []}),
        json!({"object": "emb", "parts": []}),
        json!({"objects": "emb"}),
    ] {
        assert!(matches!(with(wrong), Err(DirectoryError::BindingForm { .. })));
    }
    assert!(matches!(
        with(json!({"object": "none"})),
        Err(DirectoryError::UnknownObject { .. })
    ));
    assert!(matches!(
        with(json!({"object": "res.tok"})),
        Err(DirectoryError::WrongKind { expected: "tensor", .. })
    ));
}

#[test]
fn uses_name_bound_parameters_once_per_input() {
    let with =
        |use_record: Value| edited(move |value| value["uses"].as_array_mut().unwrap().push(use_record)).map(|_| ());
    assert_eq!(
        with(json!({"parameter": "text/output_head", "input": "mtp/final_hidden"})),
        Ok(())
    );
    let unbound = with(json!({"parameter": "text/none", "input": "x"}));
    assert!(matches!(unbound, Err(DirectoryError::UnboundUse { .. })));
    let twice = with(json!({"parameter": "text/output_head", "input": "text/final_hidden"}));
    assert!(matches!(twice, Err(DirectoryError::DuplicateUse { .. })));
    let policy = with(json!({"parameter": "text/output_head", "input": "x", "activation_policy": "a16only"}));
    assert!(matches!(policy, Err(DirectoryError::Policy { .. })));
    let auxiliary =
        with(json!({"parameter": "text/output_head", "input": "x", "auxiliaries": {"r": {"object": "no"}}}));
    assert!(matches!(auxiliary, Err(DirectoryError::UnknownObject { .. })));
}

#[test]
fn metadata_and_provenance_are_objects_and_the_name_an_id() {
    for member in ["metadata", "provenance"] {
        for wrong in [json!(null), json!([]), json!("x")] {
            assert_eq!(
                fault(|value| value[member] = wrong.clone()),
                DirectoryError::OpenRecord {
                    member: if member == "metadata" { "metadata" } else { "provenance" }
                }
            );
        }
    }
    for wrong in [json!(""), json!(1), json!("a\0")] {
        assert_eq!(
            fault(|value| value["metadata"]["name"] = wrong.clone()),
            DirectoryError::ModelName
        );
    }
    edited(|value| value["metadata"]["other"] = json!([{"name": 1}])).unwrap();
}

#[test]
fn a_directory_of_many_experts_parses() {
    let experts = 10_240;
    let directory = edited(|value| {
        for expert in 0..experts {
            for matrix in ["gate", "up", "down"] {
                let name = format!("text/layers/0/moe/experts/{expert}/{matrix}");
                value["bindings"][&name] = json!({"parts": [{"object": "emb", "range": [expert, expert + 1]}]});
                value["uses"].as_array_mut().unwrap().push(json!({
                    "parameter": name, "input": "text/layers/0/ffn_input", "activation_policy": "A16Only"
                }));
            }
        }
    })
    .unwrap();
    assert_eq!(directory.bindings.len(), 31 + 3 * experts);
    assert_eq!(directory.uses.len(), 19 + 3 * experts);
}
