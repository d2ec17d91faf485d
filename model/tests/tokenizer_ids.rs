//! Token ids against Hugging Face's, the checks of the resources, and texts that broke other programs.

mod common;

use std::fs;

use common::data;
use perplexity_model::source;
use perplexity_model::tokenizer::{AddedTokens, TextTokenizer, TokenizerError};
use serde_json::{Value, json};

fn resources(directory: &str) -> (Vec<u8>, Vec<u8>) {
    let read = |name: &str| fs::read(data(directory).join(name)).expect(name);
    (read("tokenizer.json"), read("tokenizer_config.json"))
}

fn tokenizer(directory: &str, added: AddedTokens) -> TextTokenizer {
    let (file, config) = resources(directory);
    TextTokenizer::new(&file, &config, added).expect("a valid tokenizer")
}

fn demo() -> TextTokenizer {
    tokenizer("demo_hf", AddedTokens::Match)
}

#[test]
fn ids_equal_hugging_face_on_the_golden_texts() {
    let tokenizer = demo();
    assert_eq!(tokenizer.public_tokens(), 8195);
    let golden: Value = serde_json::from_slice(&fs::read(data("golden/golden.json")).expect("reads")).expect("JSON");
    let streams = golden["streams"].as_array().expect("streams");
    assert_eq!(streams.len(), 4);
    for stream in streams {
        let file = stream["file"].as_str().expect("a name");
        let text = fs::read_to_string(data("golden").join(file)).expect("UTF-8");
        let ids = tokenizer.encode(&text).expect("encodes");
        assert_eq!(json!(ids.len()), stream["tokens"], "{file}");
        let first = stream["first_ids"].as_array().expect("ids");
        assert_eq!(&json!(ids[..first.len()]), &stream["first_ids"], "{file}");
        assert_eq!(tokenizer.decode(&ids).expect("decodes"), text, "{file}");
    }
}

#[test]
fn ids_equal_hugging_face_on_the_fixtures() {
    for fixture in ["fixtures/dense", "fixtures/moe"] {
        let source = source::open(&data(fixture)).expect("opens");
        let tokenizer = TextTokenizer::from_source(source.as_ref(), AddedTokens::Match).expect("builds");
        assert_eq!(tokenizer.public_tokens(), 507);
        let golden = fs::read(data(fixture).join("golden.safetensors")).expect("reads");
        let golden = safetensors::SafeTensors::deserialize(&golden).expect("valid");
        let expected = golden.tensor("input_ids").expect("ids");
        let expected: Vec<u32> = expected
            .data()
            .chunks_exact(expected.dtype().bitsize() / 8)
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let text = fs::read_to_string(data(fixture).join("text.txt")).expect("UTF-8");
        assert_eq!(expected.len(), 150);
        assert_eq!(tokenizer.encode(&text).expect("encodes"), expected, "{fixture}");
    }
}

#[test]
fn a_marker_in_the_text_is_one_token_or_text_by_choice() {
    let text = "before<|im_start|>user\n";
    let matched = demo().encode(text).expect("encodes");
    assert_eq!(matched.iter().filter(|id| **id == 8193).count(), 1);
    let plain = tokenizer("demo_hf", AddedTokens::AsText);
    let spelled = plain.encode(text).expect("encodes");
    assert!(
        spelled.iter().all(|id| *id < 8192) && spelled.len() > matched.len(),
        "{spelled:?}"
    );
    assert_eq!(plain.decode(&spelled).expect("decodes"), text);
    // The ids are the same set either way.
    assert_eq!(plain.public_tokens(), 8195);
    assert_eq!(plain.added_tokens(), AddedTokens::AsText);
}

#[test]
fn nothing_is_added_at_either_end() {
    let (file, config) = resources("demo_hf");
    let mut with_bos: Value = serde_json::from_slice(&file).expect("JSON");
    with_bos["post_processor"] = json!({
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [], "special_tokens": {}
    });
    let text = serde_json::to_vec(&with_bos).expect("JSON");
    let error = TextTokenizer::new(&text, &config, AddedTokens::Match)
        .err()
        .expect("a step that adds tokens");
    assert!(error.to_string().contains("post_processor"), "{error}");
    with_bos["post_processor"] = json!({"type": "ByteLevel", "trim_offsets": false});
    let text = serde_json::to_vec(&with_bos).expect("JSON");
    let tokenizer = TextTokenizer::new(&text, &config, AddedTokens::Match).expect("valid");
    assert_eq!(
        tokenizer.encode("the").expect("encodes"),
        demo().encode("the").expect("encodes")
    );
    assert_eq!(tokenizer.encode("").expect("encodes"), Vec::<u32>::new());
}

#[test]
fn line_endings_change_the_tokens() {
    let tokenizer = demo();
    let [lf, crlf] =
        ["one\ntwo\nthree\n", "one\r\ntwo\r\nthree\r\n"].map(|text| tokenizer.encode(text).expect("encodes"));
    assert!(crlf.len() > lf.len(), "{lf:?} {crlf:?}");
}

#[test]
fn nul_bytes_byte_order_marks_and_replacement_characters_round_trip() {
    let tokenizer = demo();
    for text in ["a\0b", "\u{feff}text", "\u{fffd}", "\u{10ffff}"] {
        let ids = tokenizer.encode(text).expect("encodes");
        assert_eq!(tokenizer.decode(&ids).expect("decodes"), text);
    }
    // NFC: e + combining acute is é.
    assert_eq!(
        tokenizer.encode("e\u{301}").expect("encodes"),
        tokenizer.encode("\u{e9}").expect("encodes")
    );
}

/// 1 MiB without a line break, of several kinds; a quadratic step would take hours, not seconds.
#[test]
fn a_long_line_without_a_break_is_encoded_whole() {
    let tokenizer = demo();
    const LENGTH: usize = 1 << 20;
    let prose = fs::read_to_string(data("golden/english_reference-00.txt"))
        .expect("UTF-8")
        .replace(['\r', '\n'], " ");
    for (kind, text) in [
        ("one letter", "a".repeat(LENGTH)),
        ("two letters", "ab".repeat(LENGTH / 2)),
        ("digits", "1234567".repeat(LENGTH / 7)),
        ("punctuation", "=-".repeat(LENGTH / 2)),
        ("ideographs", "\u{5c71}\u{6c34}".repeat(LENGTH / 6)),
        ("combining marks", format!("e{}", "\u{301}".repeat(LENGTH / 2))),
        ("prose", prose.repeat(LENGTH / prose.len() + 1)),
        ("spaces", " ".repeat(LENGTH / 2)),
        ("spaces and newlines", " \n".repeat(LENGTH / 4)),
    ] {
        let ids = tokenizer.encode(&text).expect(kind);
        let decoded = tokenizer.decode(&ids).expect(kind);
        // NFC composes the first mark only.
        let expected = text.replacen("e\u{301}", "\u{e9}", 1);
        assert!(
            decoded == expected,
            "{kind}: {} bytes of {}",
            decoded.len(),
            expected.len()
        );
    }
}

#[test]
fn white_space_that_the_splitter_would_drop_is_refused() {
    let tokenizer = demo();
    let text = format!("word{}word", " ".repeat(1 << 20));
    let error = tokenizer.encode(&text).expect_err("too long");
    assert!(
        matches!(
            error,
            TokenizerError::WhiteSpace {
                at: 4,
                length: 1_048_576
            }
        ),
        "{error}"
    );
}

#[test]
fn a_run_of_white_space_is_split_before_its_last_character() {
    // The rule: of white space before a word, all but the last character is one piece.
    let tokenizer = demo();
    for length in [2usize, 3, 1000, 200_000] {
        let whole = tokenizer.encode(&format!("a{}b", " ".repeat(length))).expect("encodes");
        let pieces: Vec<u32> = ["a", &" ".repeat(length - 1), " b"]
            .iter()
            .flat_map(|piece| tokenizer.encode(piece).expect("encodes"))
            .collect();
        assert_eq!(whole, pieces, "{length} spaces");
    }
}

/// The error after changing the demo's resources.
fn error_after(change: impl FnOnce(&mut Value, &mut Value)) -> TokenizerError {
    let (file, config) = resources("demo_hf");
    let mut file = serde_json::from_slice(&file).expect("JSON");
    let mut config = serde_json::from_slice(&config).expect("JSON");
    change(&mut file, &mut config);
    let bytes = |value: &Value| serde_json::to_vec(value).expect("JSON");
    match TextTokenizer::new(&bytes(&file), &bytes(&config), AddedTokens::Match) {
        Ok(_) => panic!("the change is a fault"),
        Err(error) => error,
    }
}

#[test]
fn another_pipeline_is_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 14] = [
        ("normalizer", |file| file["normalizer"] = json!({"type": "NFKC"})),
        ("pre_tokenizer", |file| {
            file["pre_tokenizer"] = json!({"type": "Whitespace"})
        }),
        ("pretokenizers[0]", |file| {
            file["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("Removed")
        }),
        ("pretokenizers[0]", |file| {
            file["pre_tokenizer"]["pretokenizers"][0]["invert"] = json!(true)
        }),
        ("pretokenizers[0]", |file| {
            file["pre_tokenizer"]["pretokenizers"][0]["pattern"] = json!({"Regex": "\\s+"})
        }),
        ("pretokenizers[1]", |file| {
            file["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = json!(true)
        }),
        ("pretokenizers[1]", |file| {
            file["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = json!(true)
        }),
        ("decoder", |file| file["decoder"] = json!({"type": "WordPiece"})),
        ("model.type", |file| file["model"]["type"] = json!("Unigram")),
        ("model.dropout", |file| file["model"]["dropout"] = json!(0.1)),
        ("model.ignore_merges", |file| {
            file["model"]["ignore_merges"] = json!(true)
        }),
        ("model.end_of_word_suffix", |file| {
            file["model"]["end_of_word_suffix"] = json!("</w>")
        }),
        ("model.vocab", |file| file["model"]["vocab"] = json!({})),
        ("added_tokens", |file| file["added_tokens"] = Value::Null),
    ];
    for (named, change) in cases {
        let error = error_after(|file, _| change(file));
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}

#[test]
fn what_the_file_leaves_out_means_the_same_pipeline() {
    let (file, config) = resources("demo_hf");
    let mut file: Value = serde_json::from_slice(&file).expect("JSON");
    for name in [
        "normalizer",
        "pre_tokenizer",
        "decoder",
        "post_processor",
        "truncation",
        "padding",
    ] {
        file.as_object_mut().expect("an object").shift_remove(name);
    }
    let bare =
        TextTokenizer::new(&serde_json::to_vec(&file).expect("JSON"), &config, AddedTokens::Match).expect("valid");
    let text = "Don't stop  the e\u{301}1234 presses!\r\n\r\n  now";
    assert_eq!(
        bare.encode(text).expect("encodes"),
        demo().encode(text).expect("encodes")
    );
}

#[test]
fn added_tokens_are_checked_in_both_lists() {
    type Change = fn(&mut Value, &mut Value);
    let cases: [(&str, Change); 11] = [
        ("added_tokens[0].lstrip", |file, _| {
            file["added_tokens"][0]["lstrip"] = json!(true)
        }),
        ("added_tokens[0].normalized", |file, _| {
            file["added_tokens"][0]["normalized"] = json!(true)
        }),
        ("added_tokens[1].content", |file, _| {
            file["added_tokens"][1]["content"] = json!("")
        }),
        ("added_tokens[1].special", |file, _| {
            file["added_tokens"][1]["special"] = json!("yes")
        }),
        ("added_tokens[2].id", |file, _| {
            file["added_tokens"][2]["id"] = json!(1_000_001)
        }),
        ("id 8193", |file, _| file["added_tokens"][2]["id"] = json!(8193)),
        ("id 17", |file, config| {
            file["added_tokens"][0]["id"] = json!(17);
            config["added_tokens_decoder"] = json!({});
        }),
        ("<|im_end|>", |file, config| {
            file["added_tokens"][1]["content"] = json!("<|im_end|>");
            config["added_tokens_decoder"] = json!({});
        }),
        ("added_tokens_decoder", |_, config| {
            config["added_tokens_decoder"] = json!([])
        }),
        ("added_tokens_decoder.08192", |_, config| {
            let entry = config["added_tokens_decoder"]["8192"].clone();
            config["added_tokens_decoder"]["08192"] = entry;
        }),
        ("added_tokens_decoder.8193", |_, config| {
            config["added_tokens_decoder"]["8193"]["special"] = json!(false);
        }),
    ];
    for (named, change) in cases {
        let error = error_after(change);
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}

#[test]
fn a_token_of_the_second_list_alone_counts_and_matches() {
    let (file, config) = resources("demo_hf");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    let mut entry = config["added_tokens_decoder"]["8192"].clone();
    entry["content"] = json!("<think>");
    entry["special"] = json!(false);
    config["added_tokens_decoder"]["8195"] = entry;
    let config = serde_json::to_vec(&config).expect("JSON");
    let tokenizer = TextTokenizer::new(&file, &config, AddedTokens::Match).expect("valid");
    assert_eq!(tokenizer.public_tokens(), 8196);
    assert_eq!(tokenizer.encode("<think>").expect("encodes"), [8195]);
    // Also a token that is not special is text when text is asked for.
    let plain = TextTokenizer::new(&file, &config, AddedTokens::AsText).expect("valid");
    assert!(plain.encode("<think>").expect("encodes").len() > 1);
}

#[test]
fn ids_with_a_gap_are_refused() {
    let error = error_after(|file, config| {
        file["added_tokens"][2]["id"] = json!(8200);
        config["added_tokens_decoder"] = json!({});
    });
    assert!(
        matches!(
            error,
            TokenizerError::Gap {
                tokens: 8195,
                largest: 8200
            }
        ),
        "{error}"
    );
}

#[test]
fn more_ids_than_rows_and_foreign_stop_tokens_are_refused() {
    let tokenizer = demo();
    tokenizer
        .check_stop_tokens(br#"{"eos_token_id": [8194, 8192]}"#)
        .expect("both exist");
    tokenizer.check_stop_tokens(br#"{"eos_token_id": null}"#).expect("none");
    let error = tokenizer
        .check_stop_tokens(br#"{"eos_token_id": 8195}"#)
        .expect_err("no such token");
    assert!(
        matches!(error, TokenizerError::StopToken { id: 8195, tokens: 8195 }),
        "{error}"
    );
    let error = tokenizer
        .check_stop_tokens(br#"{"eos_token_id": [1.5]}"#)
        .expect_err("not an id");
    assert!(error.to_string().contains("eos_token_id"), "{error}");

    let tiny = common::Tiny::dense();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let source = source::open(tiny.path()).expect("opens");
        let error = TextTokenizer::from_source(source.as_ref(), AddedTokens::Match)
            .err()
            .expect("absent");
        assert!(
            matches!(error, TokenizerError::MissingResource { role } if role == name),
            "{error}"
        );
        fs::copy(data("demo_hf").join(name), tiny.path().join(name)).expect("copies");
    }
    let source = source::open(tiny.path()).expect("opens");
    let error = TextTokenizer::from_source(source.as_ref(), AddedTokens::Match)
        .err()
        .expect("16 rows");
    assert!(
        matches!(error, TokenizerError::MoreTokensThanRows { tokens: 8195, rows: 16 }),
        "{error}"
    );
}

#[test]
fn resources_that_are_not_json_are_named() {
    let (file, config) = resources("demo_hf");
    let error = TextTokenizer::new(&file[..100], &config, AddedTokens::Match)
        .err()
        .expect("cut");
    assert!(error.to_string().contains("tokenizer.json"), "{error}");
    let error = TextTokenizer::new(&file, b"[]", AddedTokens::Match)
        .err()
        .expect("an array");
    assert!(error.to_string().contains("tokenizer_config.json"), "{error}");
}
