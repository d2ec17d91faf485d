//! `bench`: what it reports, and that its counts are those of the formulas. Times are never judged.

use serde_json::Value;

use crate::common::{Dir, demo_artifact, number};

#[test]
fn operations_and_speeds_are_reported() {
    let dir = Dir::new();
    let demo = demo_artifact();
    let run = dir.run([
        "bench",
        demo.to_str().unwrap(),
        "--context",
        "200,64",
        "--batch",
        "1,2",
        "--kv-dtype",
        "bf16",
        "--kv-dtype",
        "k=int8,v=nvfp4",
        "--prefill-chunk",
        "128",
        "--runs",
        "1",
        "--json",
    ]);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let json: Value = serde_json::from_str(&run.stdout).unwrap();
    // The last pass of 199 fed tokens in passes of 128.
    assert_eq!(
        json["pass"],
        serde_json::json!({"windows": 1, "tokens": 71, "tokens_before": 128})
    );
    for ceiling in ["copy_bytes_per_second", "product_flops_per_second"] {
        assert!(number(&json, &format!("/ceilings/{ceiling}")) > 0.0);
    }
    let operations = json["operations"].as_array().unwrap();
    let operation = |name: &str| {
        operations
            .iter()
            .find(|operation| operation["name"] == name)
            .expect(name)
    };
    for (name, calls, flops) in [
        // 71 rows: 2 * rows * out * in.
        ("head", 1, 2 * 71 * 8320 * 256),
        ("feed-forward: down", 8, 2 * 71 * 256 * 512),
        ("attention: query, gate", 4, 2 * 71 * 512 * 256),
        // Keys that 71 queries behind 128 tokens see, two products over 2 heads of 256.
        ("attention", 2, 4 * (71 * 128 + 71 * 72 / 2) * 512),
        // Two value heads of 128 x 128 state, seven operations per element and token.
        ("delta net: delta rule", 6, 7 * 71 * 256 * 128),
        ("norm", 16, 0),
    ] {
        let found = operation(name);
        assert_eq!(found["calls"], calls, "{name}");
        assert_eq!(found["flops"], flops as f64, "{name}");
        assert!(
            number(found, "/seconds") > 0.0 && number(found, "/bytes") > 0.0,
            "{name}"
        );
    }
    assert_eq!(json["activations"], "16 bits");
    let speeds = json["speeds"].as_array().unwrap();
    let runs: Vec<_> = speeds
        .iter()
        .map(|speed| {
            (
                speed["kv_dtype"].as_str().unwrap(),
                number(speed, "/context"),
                number(speed, "/batch"),
            )
        })
        .collect();
    let mixed = "k=int8-g64,v=nvfp4";
    let shapes = [(200.0, 1.0), (200.0, 2.0), (64.0, 1.0), (64.0, 2.0)];
    let expected: Vec<_> = ["bf16", mixed]
        .iter()
        .flat_map(|kv| shapes.map(|(context, batch)| (*kv, context, batch)))
        .collect();
    assert_eq!(runs, expected);
    for speed in speeds {
        let seconds = number(speed, "/seconds");
        let tokens = |field: &str| (number(speed, field) * seconds).round();
        let (context, batch) = (number(speed, "/context"), number(speed, "/batch"));
        assert_eq!(tokens("/prefilled_tokens_per_second"), batch * (context - 1.0));
        assert_eq!(tokens("/scored_tokens_per_second"), batch * context / 2.0);
    }
}

#[test]
fn a_table_is_the_default_and_impossible_shapes_are_refused() {
    let dir = Dir::new();
    let demo = demo_artifact();
    let bench = |options: &str| {
        dir.run(
            ["bench", demo.to_str().unwrap()]
                .into_iter()
                .chain(options.split_whitespace()),
        )
    };
    let run = bench("--context 32 --runs 1");
    assert_eq!(run.code, 0, "{}", run.stderr);
    for words in ["ceilings: copy", "delta net: delta rule", "prefilled/s"] {
        assert!(run.stdout.contains(words), "{}", run.stdout);
    }
    for (options, expected) in [
        ("--context 1", "--context 1 is out of range: at least 2"),
        ("--batch 4,0", "--batch 0 is out of range: at least 1"),
        ("--runs 0", "--runs 0 is out of range"),
        (
            "--context 65536",
            "--context 65536 is out of range: at most the model's 32768 positions",
        ),
        ("--kv-dtype int7", "unknown KV codec `int7`"),
        ("--kv-dtype bf16;0=int8", "names layer 0, which has no KV cache"),
        ("--prefill-chunk 100", "a multiple of 128"),
        (
            "--memory-budget 1GiB --device flex",
            "--memory-budget needs --device cuda:N or vulkan:0",
        ),
        ("--device tpu:0", "ndarray, flex, cuda:N, vulkan:N or auto"),
    ] {
        let run = bench(options);
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{options}: {}", run.stderr);
        assert!(run.stderr.contains(expected), "{options}: {}", run.stderr);
    }
}
