//! Produced reports against `docs/report.schema.json`, and the schema against `docs/report.md`.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::{ToyScorer, merge};
use perplexity_eval::corpus::{CorpusPlan, CorpusText};
use perplexity_eval::evaluate::{Options, SaveTopTokens, evaluate};
use perplexity_eval::report::{Build, Report, RunInfo, Settings};
use perplexity_eval::top_tokens::Provenance;
use perplexity_eval::windows::{Protocol, WindowKind};
use serde_json::{Value, json};

fn docs(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn schema() -> Value {
    serde_json::from_str(&docs("report.schema.json")).unwrap()
}

/// Every violation of `schema` by `value`, for the keywords that the schema uses; any other keyword is one too.
fn violations(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut violated = |what: String| found.push(format!("{at}: {what}"));
    let mut inner: Vec<(&Value, &Value, String)> = Vec::new();
    for (keyword, argument) in schema.as_object().expect("a schema is an object") {
        match keyword.as_str() {
            "description" | "title" | "$schema" | "$defs" => {}
            "$ref" => {
                let pointer = argument.as_str().unwrap().strip_prefix('#').unwrap();
                inner.push((root.pointer(pointer).expect("a definition"), value, at.to_owned()));
            }
            "anyOf" => {
                let fits = |s: &Value| violations(root, s, value, at).is_empty();
                if !argument.as_array().unwrap().iter().any(fits) {
                    // The first alternative is the one meant unless the value is null.
                    inner.push((&argument[0], value, at.to_owned()));
                }
            }
            "type" => {
                let types = argument.as_array().cloned().unwrap_or_else(|| vec![argument.clone()]);
                let has = |name: &Value| match name.as_str().unwrap() {
                    "null" => value.is_null(),
                    "boolean" => value.is_boolean(),
                    "string" => value.is_string(),
                    "integer" => value.is_u64() || value.is_i64(),
                    "number" => value.is_number(),
                    "array" => value.is_array(),
                    "object" => value.is_object(),
                    other => panic!("unknown type {other}"),
                };
                if !types.iter().any(has) {
                    violated(format!("{value} is not of type {argument}"));
                }
            }
            "const" if value != argument => violated(format!("{value} is not {argument}")),
            "enum" if !argument.as_array().unwrap().contains(value) => {
                violated(format!("{value} is not in {argument}"))
            }
            "minimum" if value.as_f64().is_some_and(|v| v < argument.as_f64().unwrap()) => {
                violated(format!("{value} is below {argument}"));
            }
            "minItems"
                if value
                    .as_array()
                    .is_some_and(|v| (v.len() as u64) < argument.as_u64().unwrap()) =>
            {
                violated("too few items".into());
            }
            "maxItems"
                if value
                    .as_array()
                    .is_some_and(|v| v.len() as u64 > argument.as_u64().unwrap()) =>
            {
                violated("too many items".into());
            }
            "const" | "enum" | "minimum" | "minItems" | "maxItems" => {}
            "items" => {
                let items = value.as_array().into_iter().flatten().enumerate();
                inner.extend(items.map(|(i, item)| (argument, item, format!("{at}[{i}]"))));
            }
            "required" => {
                for name in argument.as_array().unwrap() {
                    if value.is_object() && value.get(name.as_str().unwrap()).is_none() {
                        violated(format!("{name} is missing"));
                    }
                }
            }
            "properties" => {
                for (name, field) in value.as_object().into_iter().flatten() {
                    if let Some(schema) = argument.get(name) {
                        inner.push((schema, field, format!("{at}.{name}")));
                    }
                }
            }
            "additionalProperties" => {
                let known = |name: &str| schema.get("properties").is_some_and(|known| known.get(name).is_some());
                for (name, field) in value.as_object().into_iter().flatten().filter(|(name, _)| !known(name)) {
                    match argument {
                        Value::Bool(true) => {}
                        Value::Bool(false) => violated(format!("{name} is unknown")),
                        schema => inner.push((schema, field, format!("{at}.{name}"))),
                    }
                }
            }
            other => violated(format!("the schema uses the keyword {other}, which is not checked")),
        }
    }
    for (schema, value, at) in inner {
        found.extend(violations(root, schema, value, &at));
    }
    found
}

fn check(report: &Report) {
    let value: Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
    let schema = schema();
    assert_eq!(violations(&schema, &schema, &value, "$"), Vec::<String>::new());
}

fn plan(folder: &Path, kind: WindowKind) -> CorpusPlan {
    let path = folder.join("t.txt");
    std::fs::write(&path, "it was the best of times, it was the worst of times").unwrap();
    let encode = |text: &str| Ok::<_, String>(text.bytes().map(|b| u32::from(b) % 40).collect());
    CorpusText::from_text(&path)
        .unwrap()
        .plan(Protocol::new(kind, 16, 8).unwrap(), None, encode)
        .unwrap()
}

fn report(plan: &CorpusPlan, options: &Options) -> Report {
    let results = evaluate(plan, &mut ToyScorer::new(40, 3.0, 2), options, &mut ()).unwrap();
    let info = RunInfo {
        build: Build {
            commit: Some("abc".into()),
            features: vec!["flex".into()],
            ..Build::default()
        },
        settings: Settings {
            numeric_contract: [("rounding".to_owned(), "1".to_owned())].into(),
            options: [("expert_cache_mib".to_owned(), json!("auto"))].into(),
            kv_bytes_per_token: Some(1.5),
            ..Settings::default()
        },
        ..RunInfo::default()
    };
    Report::build(plan, &results, info)
}

#[test]
fn produced_reports_satisfy_the_schema() {
    let folder = tempfile::tempdir().unwrap();
    let sliding = plan(folder.path(), WindowKind::Sliding);
    check(&report(&sliding, &Options::default()));
    check(&report(&plan(folder.path(), WindowKind::Disjoint), &Options::default()));
    check(&report(
        &plan(folder.path(), WindowKind::LlamaChunks),
        &Options::default(),
    ));

    let path: PathBuf = folder.path().join("ref");
    let save = Options {
        save_top_tokens: Some(SaveTopTokens {
            path: path.clone(),
            per_position: 8,
        }),
        provenance: Some(Provenance {
            public_tokens: 40,
            ..Provenance::default()
        }),
        ..Options::default()
    };
    check(&report(&sliding, &save));
    let compare = Options {
        kl_reference: Some(path),
        ..Options::default()
    };
    let compared = report(&sliding, &compare);
    assert!(compared.kl_divergence.as_ref().unwrap().reference_provenance.is_some());
    check(&compared);
    let shard = |i: u32| {
        report(
            &sliding,
            &Options {
                shard: format!("{i}/2").parse().unwrap(),
                ..compare.clone()
            },
        )
    };
    check(&shard(0));
    check(&merge(vec![shard(0), shard(1)]).unwrap());
}

#[test]
fn violations_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let report = report(&plan(folder.path(), WindowKind::Sliding), &Options::default());
    let good: Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
    let schema = schema();
    let after = |change: fn(&mut Value)| {
        let mut value = good.clone();
        change(&mut value);
        violations(&schema, &schema, &value, "$")
    };
    assert_eq!(
        after(|v| v["schema_version"] = json!(5)),
        ["$.schema_version: 5 is not 6"]
    );
    assert_eq!(
        after(|v| v["overall"]["total_nll"] = Value::Null),
        ["$.overall.total_nll: null is not of type \"number\""]
    );
    assert_eq!(
        after(|v| v["streams"][0]["windows"][0]["extra"] = json!(1)),
        ["$.streams[0].windows[0]: extra is unknown"]
    );
    assert_eq!(
        after(|v| drop(v["timing"].as_object_mut().unwrap().remove("load_seconds"))),
        ["$.timing: \"load_seconds\" is missing"]
    );
    assert_eq!(after(|v| v["execution"]["windows"] = json!("other")).len(), 1);
    assert_eq!(
        after(|v| v["overall"]["perplexity_interval_95"] = json!([1.0])),
        ["$.overall.perplexity_interval_95: too few items"]
    );
    assert!(!after(|v| v["kl_divergence"] = json!({})).is_empty());
}

#[test]
fn the_document_names_every_field() {
    let schema = schema();
    let objects = schema["$defs"].as_object().unwrap().values().chain([&schema]);
    let fields: BTreeSet<&String> = objects
        .flat_map(|object| object["properties"].as_object().unwrap().keys())
        .collect();
    let document = docs("report.md");
    let missing: Vec<_> = fields
        .iter()
        .filter(|field| !document.contains(&format!("\n| `{field}` |")))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(fields.len() > 150);
}
