//! Texts that other evaluators got wrong. The model's tokens are bytes, so every count is known.

use crate::common::{Dir, byte_model, number, window_nlls};

const EXACT: &str = "--route exact --log-level error";

fn text(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| b'a' + (i * i % 23) as u8).collect()
}

#[test]
fn short_texts_are_refused_in_words() {
    let dir = Dir::new();
    for (name, bytes, words) in [
        ("empty.txt", "", "is empty"),
        ("one.txt", "a", "has no token to predict"),
    ] {
        let run = dir.score(&byte_model(), &dir.file(name, bytes), "");
        assert_eq!((run.code, run.stdout.as_str()), (1, ""));
        assert!(run.stderr.contains(words), "{}", run.stderr);
    }
    assert_eq!(dir.files(), ["empty.txt", "one.txt"], "a refused text leaves no report");
}

#[test]
fn texts_around_the_window_score_every_token_but_the_first() {
    let dir = Dir::new();
    for (tokens, windows) in [(2, 1), (9, 1), (10, 1), (11, 2), (20, 3)] {
        let path = dir.file(&format!("{tokens}.txt"), text(tokens));
        let report = dir.report(&byte_model(), &path, &format!("--context 10 --stride 5 {EXACT}"));
        assert_eq!(number(&report, "/overall/scored_tokens"), (tokens - 1) as f64);
        assert_eq!(
            number(&report, "/denominators/windows"),
            f64::from(windows),
            "{tokens} tokens"
        );
        let total: f64 = window_nlls(&report).iter().sum();
        let mean = number(&report, "/overall/mean_nll");
        assert!(
            (mean - total / (tokens - 1) as f64).abs() < 1e-12,
            "mean over tokens, not over windows"
        );
        assert!((number(&report, "/overall/perplexity") - mean.exp()).abs() < 1e-9 * mean.exp());
    }
}

#[test]
fn disjoint_windows_drop_the_tail_and_state_what_was_not_scored() {
    let dir = Dir::new();
    let report = dir.report(
        &byte_model(),
        &dir.file("a.txt", text(25)),
        &format!("--context 10 --disjoint {EXACT}"),
    );
    assert_eq!(number(&report, "/overall/scored_tokens"), 18.0);
    assert_eq!(number(&report, "/streams/0/unscored_tokens"), 7.0);
    assert_eq!(report["execution"]["windows"], "disjoint");
    assert_eq!(number(&report, "/execution/stride_tokens"), 10.0);
}

#[test]
fn a_text_shorter_than_one_disjoint_window_is_refused() {
    let dir = Dir::new();
    let run = dir.score(&byte_model(), &dir.file("a.txt", text(9)), "--context 10 --disjoint");
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("shorter than 1 window(s) of 10"), "{}", run.stderr);
}

#[test]
fn bad_encodings_are_refused_with_the_offset() {
    let dir = Dir::new();
    let utf16: Vec<u8> = std::iter::once(0xfeff)
        .chain("text".encode_utf16())
        .flat_map(u16::to_le_bytes)
        .collect();
    for (name, bytes, words) in [
        ("lone-ff.txt", b"abc\xffdef".to_vec(), "byte 0xff at offset 3"),
        ("overlong.txt", b"ab\xc0\xafcd".to_vec(), "byte 0xc0 at offset 2"),
        ("truncated.txt", b"ab\xe6\xbc".to_vec(), "byte 0xe6 at offset 2"),
        ("utf16.txt", utf16, "is UTF-16 (little-endian)"),
        ("nul.txt", b"ab\0cd".to_vec(), "NUL byte at offset 2"),
    ] {
        let run = dir.score(&byte_model(), &dir.file(name, bytes), "");
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{name}");
        assert!(
            run.stderr.contains(words) && run.stderr.contains(name),
            "{}",
            run.stderr
        );
    }
}

#[test]
fn a_byte_order_mark_is_scored_and_said() {
    let dir = Dir::new();
    let path = dir.file("bom.txt", "\u{feff}abcdef");
    let run = dir.score(&byte_model(), &path, "--output out");
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(
        run.stderr.contains("warning: ") && run.stderr.contains("byte-order mark"),
        "{}",
        run.stderr
    );
    let report = crate::common::read_report(&dir.path("out"));
    // Three bytes of the mark, six letters.
    assert_eq!(number(&report, "/streams/0/input_tokens"), 9.0);
}

#[test]
fn line_endings_are_never_converted() {
    let dir = Dir::new();
    let count = |name: &str, text: &str| {
        let report = dir.report(&byte_model(), &dir.file(name, text), EXACT);
        (
            number(&report, "/streams/0/input_tokens"),
            report["streams"][0]["sha256"].clone(),
        )
    };
    let (lf, crlf) = (count("lf.txt", "one\ntwo\n"), count("crlf.txt", "one\r\ntwo\r\n"));
    assert_eq!((lf.0, crlf.0), (8.0, 10.0));
    assert_ne!(lf.1, crlf.1);
}

#[test]
fn nothing_survives_from_one_stream_to_the_next() {
    let dir = Dir::new();
    for (name, bytes) in [
        ("data/a.txt", text(40)),
        ("data/a2.txt", text(40)),
        ("data/b.txt", text(61)[21..].to_vec()),
    ] {
        dir.file(name, bytes);
    }
    let manifest = |order: [&str; 3]| {
        let stream = |id: &str, file: &str| format!(r#"{{"id":"{id}","domain":"{id}","path":"data/{file}.txt"}}"#);
        let streams = [stream("A", "a"), stream("B", "b"), stream("A2", "a2")].join(",");
        format!(r#"{{"corpus_id":"aba","streams":[{streams}],"modes":{{"quick":["A"],"full":{order:?}}}}}"#)
    };
    let score = |name: &str, order: [&str; 3], batch: &str| {
        let path = dir.file(&format!("{name}.json"), manifest(order));
        let out = dir.path(&format!("out-{name}"));
        let (model, out_arg) = (byte_model(), out.to_str().unwrap());
        let corpus = path.to_str().unwrap();
        let mut args = vec![
            model.to_str().unwrap(),
            "--corpus",
            corpus,
            "--output",
            out_arg,
            "--batch",
            batch,
        ];
        args.extend("--context 16 --stride 8 --log-level error".split(' '));
        let run = dir.run(args);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let report = crate::common::read_report(&out);
        let streams = report["streams"].as_array().unwrap();
        streams
            .iter()
            .map(|s| (s["id"].as_str().unwrap().to_owned(), s["total_nll"].to_string()))
            .collect::<Vec<_>>()
    };
    let first = score("aba", ["A", "B", "A2"], "1");
    assert_eq!(first[0].1, first[2].1, "the same text twice");
    assert_ne!(first[0].1, first[1].1, "the texts do differ");
    let mut second = score("baa", ["B", "A2", "A"], "1");
    second.sort();
    let mut sorted = first.clone();
    sorted.sort();
    assert_eq!(second, sorted, "the order of streams");
}
