//! Import of quantised checkpoints: words bit for bit, packing, permissions, divisors, and what is encoded anew.

mod common;

use std::collections::BTreeMap;
use std::fs;

use common::data;
use perplexity_model::artifact::Artifact;
use perplexity_model::bindings::ArtifactSource;
use perplexity_model::checkpoint::CheckpointSource;
use perplexity_model::convert::{ConvertOptions, Recipe, Summary, convert};
use perplexity_model::formats::nvfp4::scale_position;
use perplexity_model::parameters::parameters;
use perplexity_model::source::{StoredPart, TextSource};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

struct Converted {
    _directory: tempfile::TempDir,
    original: CheckpointSource,
    artifact: ArtifactSource,
    summary: Summary,
    golden: Value,
}

impl Converted {
    fn new(checkpoint: &str, recipe: &str) -> Self {
        Self::with(
            checkpoint,
            ConvertOptions::new(Recipe::named(recipe).expect("a recipe")),
        )
    }

    fn with(checkpoint: &str, options: ConvertOptions) -> Self {
        let path = data("quantised").join(checkpoint);
        let directory = tempfile::tempdir().expect("a directory");
        let out = directory.path().join("model.ninfer");
        let summary = convert(&path, &out, &options, &mut |_| ()).expect("converts");
        Self {
            _directory: directory,
            original: CheckpointSource::open(&path).expect("opens"),
            artifact: ArtifactSource::open(&out).expect("opens"),
            summary,
            golden: serde_json::from_slice(&fs::read(path.join("golden.json")).expect("reads")).expect("JSON"),
        }
    }

    fn container(&self) -> &Artifact {
        self.artifact.artifact().expect("an artifact")
    }

    fn part(&self, name: &str) -> StoredPart {
        let mut parts = self.artifact.stored(name).expect(name).parts;
        assert_eq!(parts.len(), 1, "{name}");
        parts.remove(0)
    }

    fn format(&self, name: &str) -> &'static str {
        self.part(name).format
    }

    /// Parent shape and permission.
    fn place(&self, name: &str) -> (Vec<usize>, &'static str) {
        let policy = self.artifact.stored(name).expect(name).policy;
        (self.part(name).object_shape, policy.map_or("", |policy| policy.name()))
    }

    fn load(&self, name: &str) -> [Vec<f32>; 2] {
        let shape = parameters(self.original.config())
            .find(|parameter| parameter.name == name)
            .expect(name)
            .shape;
        [&self.original as &dyn TextSource, &self.artifact].map(|source| source.load(name, &shape).expect(name))
    }

    /// Code bytes and scale words of a parameter's rows, and its weight divisor, out of the parent's bytes.
    fn words(&self, name: &str) -> (Vec<u8>, Vec<u8>, Option<f32>) {
        let part = self.part(name);
        let container = self.container();
        let bytes = container
            .object_bytes(container.object(&part.object).expect("the parent"))
            .expect("reads");
        let (rows, columns) = (part.object_shape[0], part.object_shape[1]);
        let (begin, end) = part.range.expect("rows");
        let own = begin as usize / columns..end as usize / columns;
        let align = |length: usize| length.next_multiple_of(256);
        if part.format == "nvfp4" {
            let plane = &bytes[align(rows * columns / 2)..];
            let groups = columns / 16;
            let word = |row: usize, group: usize| plane[scale_position(columns, row, group)];
            let scales = own
                .clone()
                .flat_map(|row| (0..groups).map(move |group| word(row, group)));
            let divisor = bytes[bytes.len() - 4..].try_into().expect("four bytes");
            let codes = bytes[own.start * columns / 2..own.end * columns / 2].to_vec();
            (codes, scales.collect(), Some(f32::from_le_bytes(divisor)))
        } else {
            assert_eq!(part.format, "fp8_e4m3fn_row_bf16");
            let plane = &bytes[align(rows * columns)..];
            let scales = plane[2 * own.start..2 * own.end].to_vec();
            (bytes[own.start * columns..own.end * columns].to_vec(), scales, None)
        }
    }

    /// Asserts that `name` has the script's words, scales and activation divisor.
    fn assert_imported(&self, name: &str) {
        let expected = &self.golden[name];
        let (codes, scales, divisor) = self.words(name);
        assert_eq!(expected["codes_sha256"], sha256(&codes), "{name}");
        assert_eq!(expected["scales_sha256"], sha256(&scales), "{name}");
        let number = |member: &str| expected[member].as_f64().map(|number| number as f32);
        assert_eq!(
            divisor.map(f32::to_bits),
            number("weight_divisor").map(f32::to_bits),
            "{name}"
        );
        let stored = self.artifact.stored(name).expect(name);
        assert_eq!(
            stored.policy.expect("a projection").name(),
            expected["policy"],
            "{name}"
        );
        assert_eq!(
            stored.activation_divisor.map(f32::to_bits),
            number("activation_divisor").map(f32::to_bits),
            "{name}"
        );
    }

    fn note(&self, words: &str) {
        let notes = &self.summary.notes;
        assert!(
            notes.iter().any(|note| note.contains(words)),
            "{words:?} is not in {notes:#?}"
        );
    }
}

#[test]
fn words_of_a_mixed_checkpoint_are_copied_bit_for_bit() {
    let converted = Converted::new("nvfp4_compressed", "qwen3_8_27b_nvfp4");
    let mut imported = 0;
    for name in converted.golden.as_object().expect("an object").keys() {
        // Of four layers, all are below 56: the recipe wants NVFP4 where layer 3 of the source has FP8.
        if name.starts_with("text/layers/3/mlp/") {
            assert_eq!(converted.format(name), "nvfp4");
            assert_eq!(converted.place(name).1, "A16Only");
            continue;
        }
        converted.assert_imported(name);
        let [original, copied] = converted.load(name);
        assert_eq!(original, copied, "{name}");
        imported += 1;
    }
    // Three blocks of 4 + 1 + 3 projections, one of 4 + 1, and the head.
    assert_eq!(imported, 3 * 8 + 5 + 1);
    converted.note("30 matrices keep the words of the source");
    converted.note("3 quantised matrices were decoded and encoded anew, fp8_e4m3fn_row_bf16 as nvfp4");
    // The embedding is encoded, the control projections and norms are as they were.
    assert_eq!(converted.format("text/token_embedding"), "fp8_e4m3fn_row_bf16");
    assert_eq!(
        converted.place("text/layers/0/gdn/a_projection"),
        (vec![8, 128], "A16Only")
    );
    assert_eq!(converted.format("text/layers/0/gdn/a_projection"), "bf16");
    assert_eq!(converted.place("text/output_head"), (vec![512, 128], "AllowA8"));
    assert_eq!(
        converted.place("text/layers/3/attention/gate"),
        (vec![1536, 128], "AllowA8")
    );
    assert_eq!(converted.place("text/layers/0/gdn/z"), (vec![768, 128], "AllowA8"));
}

#[test]
fn imported_weights_share_a_parent_only_with_equal_divisors() {
    let converted = Converted::new("nvfp4_compressed", "qwen3_8_27b_nvfp4");
    let together = |layer: usize| {
        let object = |role: &str| converted.part(&format!("text/layers/{layer}/mlp/{role}")).object;
        object("gate") == object("up")
    };
    // Same weight divisor and activation divisor; other activation divisor; other weight divisor.
    assert_eq!([0, 1, 2].map(together), [true, false, false]);
    let divisor = |role: &str| {
        let stored = converted
            .artifact
            .stored(&format!("text/layers/1/mlp/{role}"))
            .expect("stored");
        stored.activation_divisor
    };
    assert_eq!(
        (divisor("gate"), divisor("up"), divisor("down")),
        (Some(96.25), Some(97.5), Some(211.0))
    );

    // Multipliers: qkv and z are alike in block 0 only; q and k come from one tensor.
    let converted = Converted::new("nvfp4_modelopt", "nvfp4");
    let rows = |name: &str| converted.place(name).0[0];
    assert_eq!(rows("text/layers/0/gdn/z"), 768);
    assert_eq!(
        ["query", "value", "z"].map(|role| rows(&format!("text/layers/1/gdn/{role}"))),
        [256, 256, 256]
    );
    assert_eq!(rows("text/layers/3/attention/gate"), 1536);
    converted.assert_imported("text/layers/3/attention/query");
    converted.assert_imported("text/layers/3/attention/gate");
    converted.assert_imported("text/layers/1/gdn/key");
}

#[test]
fn a_given_activation_divisor_replaces_the_sources() {
    let mut options = ConvertOptions::new(Recipe::named("qwen3_8_27b_nvfp4").expect("a recipe"));
    options.activation_divisors = BTreeMap::from([("text/layers/1/ffn_input".to_owned(), 64.0)]);
    let converted = Converted::with("nvfp4_compressed", options);
    for role in ["gate", "up"] {
        let stored = converted
            .artifact
            .stored(&format!("text/layers/1/mlp/{role}"))
            .expect("stored");
        assert_eq!(stored.activation_divisor, Some(64.0));
    }
    // With equal divisors they fit one parent.
    assert_eq!(converted.place("text/layers/1/mlp/up"), (vec![512, 128], "AllowA4"));
}

#[test]
fn the_nvidia_mix_imports_modelopt_weights_and_encodes_the_head_anew() {
    let converted = Converted::new("nvfp4_modelopt", "qwen3_8_27b_nvfp4_nvidia");
    for layer in 0..4 {
        for role in ["gate", "up", "down"] {
            let name = format!("text/layers/{layer}/mlp/{role}");
            converted.assert_imported(&name);
            // f32(1 / m) is off by half a unit in the last place at most, and so is the quotient.
            let [original, copied] = converted.load(&name);
            for (exact, stored) in original.iter().zip(&copied) {
                assert!(
                    (exact - stored).abs() <= exact.abs() * 2.0 * f32::EPSILON,
                    "{name}: {exact} {stored}"
                );
            }
        }
    }
    converted.assert_imported("text/layers/3/attention/output");
    assert_eq!(converted.format("text/output_head"), "fp8_e4m3fn_row_bf16");
    assert_eq!(converted.place("text/output_head").1, "AllowA8");
    assert_eq!(converted.format("text/layers/3/attention/query"), "fp8_e4m3fn_row_bf16");
    assert_eq!(converted.place("text/layers/3/attention/query").1, "A16Only");
    // 3 blocks of q, k, v, z and output, one of q, k, gate and v, and the head.
    converted.note("20 quantised matrices were decoded and encoded anew, nvfp4_mul as fp8_e4m3fn_row_bf16");
    converted.note("13 matrices keep the words of the source");
}

#[test]
fn the_orcarouter_mix_encodes_the_head_with_sixteen_bit_activations() {
    let converted = Converted::new("fp8_row", "qwen3_8_27b_nvfp4_orcarouter");
    assert_eq!(converted.place("text/output_head"), (vec![512, 128], "A16Only"));
    for name in [
        "text/layers/3/attention/query",
        "text/layers/3/attention/gate",
        "text/layers/3/attention/output",
        "text/layers/0/gdn/key",
        "text/layers/2/gdn/z",
    ] {
        converted.assert_imported(name);
        // Row scales are rounded to bf16 once, which has 8 significant bits.
        let [original, copied] = converted.load(name);
        for (exact, stored) in original.iter().zip(&copied) {
            assert!(
                (exact - stored).abs() <= exact.abs() / 256.0,
                "{name}: {exact} {stored}"
            );
        }
    }
    assert_eq!(converted.place("text/layers/3/mlp/up").1, "A16Only");
}

#[test]
fn a_scale_of_the_tensor_is_repeated_for_every_row() {
    let converted = Converted::new("fp8_row", "fp8");
    converted.assert_imported("text/layers/1/mlp/down");
    let (_, scales, _) = converted.words("text/layers/1/mlp/down");
    assert_eq!(scales.len(), 2 * 128);
    assert!(scales.chunks_exact(2).all(|word| word == &scales[..2]));
}

#[test]
fn the_older_nvfp4_mix_imports_what_it_wants_in_nvfp4() {
    let converted = Converted::new("nvfp4_modelopt", "qwen3_6_27b_nvfp4");
    for name in ["gdn/query", "gdn/value", "gdn/z", "gdn/output", "mlp/gate", "mlp/down"] {
        converted.assert_imported(&format!("text/layers/1/{name}"));
    }
    for (name, format) in [
        ("text/token_embedding", "q8_g32_fp16"),
        ("text/output_head", "q8_g32_fp16"),
        ("text/layers/3/attention/query", "bf16"),
        ("text/layers/3/attention/output", "bf16"),
    ] {
        assert_eq!(converted.format(name), format, "{name}");
        assert!(matches!(converted.place(name).1, "A16Only" | ""), "{name}");
    }
    // Separate control projections.
    assert_eq!(converted.place("text/layers/0/gdn/a_projection").0, [4, 128]);
    converted.note("decoded and encoded anew, nvfp4_mul as bf16");
}

#[test]
fn blocks_of_fp8_are_encoded_anew_with_a_note() {
    let converted = Converted::new("fp8_block", "fp8");
    converted.note("encoded anew, fp8_e4m3fn_block128_f32 as fp8_e4m3fn_row_bf16");
    converted.note("encoded anew, fp8_e4m3fn_block128_bf16 as fp8_e4m3fn_row_bf16");
    let [original, encoded] = converted.load("text/layers/3/attention/gate");
    let (mut error, mut power) = (0.0, 0.0);
    for (exact, stored) in original.iter().zip(&encoded) {
        error += f64::from(exact - stored).powi(2);
        power += f64::from(*exact).powi(2);
    }
    assert!(error > 0.0 && (error / power).sqrt() < 0.035, "{error} of {power}");
}

#[test]
fn provenance_has_the_hash_of_every_file() {
    let converted = Converted::new("fp8_row", "fp8");
    let bytes = fs::read(data("quantised/fp8_row/model.safetensors")).expect("reads");
    let file = &converted.container().provenance()["source"]["files"][0];
    assert_eq!(file["sha256"], sha256(&bytes));
    assert_eq!(file["bytes"], bytes.len());
}
