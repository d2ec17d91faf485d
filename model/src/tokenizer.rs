//! Text to token ids, exactly as Hugging Face's byte-level BPE of this family makes them.
//!
//! The pipeline is fixed: NFC, split by [`SPLIT_PATTERN`], byte-level BPE. A tokenizer file that describes anything else
//! is refused, and what it leaves out means this pipeline. The whole text is encoded at once, without truncation, and no
//! token is added at either end, whatever the file's own post-processing says.
//!
//! Text that spells an added token such as `<|im_start|>` becomes that single token, as in Hugging Face
//! ([`AddedTokens::Match`]), or is read like any other text ([`AddedTokens::AsText`]).

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value, json};

use crate::source::{SourceError, TextSource};

/// The role of the vocabulary, merges and added tokens.
pub const TOKENIZER: &str = "tokenizer.json";
/// The role of the second list of added tokens.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// The role of the chat template.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// The role of the stop tokens.
pub const GENERATION_CONFIG: &str = "generation_config.json";

/// How text is cut before merging.
pub const SPLIT_PATTERN: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Largest id a vocabulary may use.
const LARGEST_ID: u64 = 1_000_000;

/// Longest run of white space that can be split. The regular expression engine keeps one entry per character of a run in
/// a stack of 1,000,000 and, once that overflows, would leave the rest of the text unsplit without a word.
const LONGEST_WHITE_SPACE: usize = 900_000;

/// What text that spells an added token means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AddedTokens {
    /// It is that token.
    #[default]
    Match,
    /// It is text like any other.
    AsText,
}

/// A tokenizer that cannot be built, or a text that cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A resource is absent.
    #[error("component text has no resource {role}")]
    MissingResource {
        /// Its role.
        role: &'static str,
    },
    /// A resource cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A resource is not JSON.
    #[error("{role} is not valid JSON: {reason}")]
    Json {
        /// Its role.
        role: &'static str,
        /// Why.
        reason: String,
    },
    /// A field of a resource is wrong.
    #[error("`{field}` of {role} is {found}: expected {expected}")]
    Field {
        /// The resource.
        role: &'static str,
        /// The field, as a path.
        field: String,
        /// Its JSON text, or "absent".
        found: String,
        /// What it has to hold.
        expected: String,
    },
    /// An id or a spelling occurs twice.
    #[error("{role} gives {what} twice")]
    Repeated {
        /// The resource.
        role: &'static str,
        /// The id or spelling.
        what: String,
    },
    /// The ids are not `0..n`.
    #[error("the {tokens} token ids do not run from 0 without a gap: the largest is {largest}")]
    Gap {
        /// How many ids there are.
        tokens: usize,
        /// The largest.
        largest: u64,
    },
    /// More ids than the model has rows.
    #[error("the tokenizer has {tokens} ids, but the model has {rows} rows")]
    MoreTokensThanRows {
        /// Ids.
        tokens: usize,
        /// Rows of the embedding.
        rows: usize,
    },
    /// A stop token that the tokenizer does not have.
    #[error("{GENERATION_CONFIG} stops at token {id}, but the tokenizer has {tokens} ids")]
    StopToken {
        /// The id.
        id: u64,
        /// Ids.
        tokens: usize,
    },
    /// The tokenizer library refuses the vocabulary.
    #[error("{TOKENIZER} cannot be used: {0}")]
    Build(String),
    /// The tokenizer library refuses the text.
    #[error("the text cannot be encoded: {0}")]
    Encode(String),
    /// A run of white space that the regular expression engine cannot split.
    #[error("{length} white-space characters in a row from byte {at} on: expected at most {LONGEST_WHITE_SPACE}")]
    WhiteSpace {
        /// Byte offset of the run.
        at: usize,
        /// Its length in characters.
        length: usize,
    },
}

/// The tokenizer of a text model.
pub struct TextTokenizer {
    tokenizer: tokenizers::Tokenizer,
    public_tokens: usize,
    added_tokens: AddedTokens,
}

impl TextTokenizer {
    /// Builds the tokenizer of `source`; all four resources are checked against one another and the model's rows.
    ///
    /// # Errors
    /// A missing or unfit resource, ids with gaps, more ids than rows, a stop token outside the ids.
    pub fn from_source(source: &dyn TextSource, added_tokens: AddedTokens) -> Result<Self, TokenizerError> {
        let need = |role| source.resource(role)?.ok_or(TokenizerError::MissingResource { role });
        let tokenizer = Self::new(&need(TOKENIZER)?, &need(TOKENIZER_CONFIG)?, added_tokens)?;
        let rows = source.config().vocab_size;
        if tokenizer.public_tokens > rows {
            return Err(TokenizerError::MoreTokensThanRows {
                tokens: tokenizer.public_tokens,
                rows,
            });
        }
        if let Some(generation) = source.resource(GENERATION_CONFIG)? {
            tokenizer.check_stop_tokens(&generation)?;
        }
        Ok(tokenizer)
    }

    /// Builds a tokenizer from the texts of `tokenizer.json` and `tokenizer_config.json`.
    ///
    /// # Errors
    /// Text that is not JSON, a pipeline other than this family's, repeated or missing ids.
    pub fn new(tokenizer: &[u8], config: &[u8], added_tokens: AddedTokens) -> Result<Self, TokenizerError> {
        let file = object(TOKENIZER, tokenizer)?;
        check_pipeline(&file)?;
        let model = check_model(&file)?;
        let added = added_token_list(&file, &object(TOKENIZER_CONFIG, config)?)?;
        let public_tokens = count_ids(model, &added)?;
        let tokenizer = build(model, &added, added_tokens)?;
        Ok(Self {
            tokenizer,
            public_tokens,
            added_tokens,
        })
    }

    /// Number of token ids, `0..n`; the model may have more rows.
    pub fn public_tokens(&self) -> usize {
        self.public_tokens
    }

    /// What text that spells an added token means here.
    pub fn added_tokens(&self) -> AddedTokens {
        self.added_tokens
    }

    /// Ids of the whole text.
    ///
    /// # Errors
    /// When the text holds a run of white space too long to split.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if let Some((at, length)) = longest_white_space(text).filter(|(_, length)| *length > LONGEST_WHITE_SPACE) {
            return Err(TokenizerError::WhiteSpace { at, length });
        }
        let encoding = self
            .tokenizer
            .encode_fast(text, false)
            .map_err(|error| TokenizerError::Encode(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text that `ids` spell; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// When the library cannot decode.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.tokenizer
            .decode(ids, false)
            .map_err(|error| TokenizerError::Encode(error.to_string()))
    }

    /// Checks that every `eos_token_id` of a generation configuration is a token.
    ///
    /// # Errors
    /// Text that is not JSON, an id of another type, an id outside the tokenizer.
    pub fn check_stop_tokens(&self, generation: &[u8]) -> Result<(), TokenizerError> {
        const FIELD: &str = "eos_token_id";
        let generation = object(GENERATION_CONFIG, generation)?;
        let ids = match generation.get(FIELD) {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Array(ids)) => ids.iter().collect(),
            Some(id) => vec![id],
        };
        for id in ids {
            let id = id
                .as_u64()
                .ok_or_else(|| field(GENERATION_CONFIG, FIELD, Some(id), "a token id or a list of them"))?;
            if id >= self.public_tokens as u64 {
                return Err(TokenizerError::StopToken {
                    id,
                    tokens: self.public_tokens,
                });
            }
        }
        Ok(())
    }
}

/// Start and length in characters of the longest run of white space that no line break ends: what a line break ends is
/// split without the stack.
fn longest_white_space(text: &str) -> Option<(usize, usize)> {
    let mut longest: Option<(usize, usize)> = None;
    let mut run = (0, 0);
    for (at, character) in text.char_indices().chain([(text.len(), 'x')]) {
        if matches!(character, '\r' | '\n') {
            run.1 = 0;
        } else if character.is_whitespace() {
            run = if run.1 == 0 { (at, 1) } else { (run.0, run.1 + 1) };
        } else {
            longest = longest.filter(|(_, length)| *length >= run.1).or(Some(run));
            run.1 = 0;
        }
    }
    longest
}

fn object(role: &'static str, text: &[u8]) -> Result<Map<String, Value>, TokenizerError> {
    match serde_json::from_slice(text) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(other) => Err(field(role, "", Some(&other), "an object")),
        Err(error) => Err(TokenizerError::Json {
            role,
            reason: error.to_string(),
        }),
    }
}

fn field(role: &'static str, path: &str, found: Option<&Value>, expected: &str) -> TokenizerError {
    TokenizerError::Field {
        role,
        field: path.into(),
        found: found.map_or_else(|| "absent".into(), crate::config::shorten),
        expected: expected.into(),
    }
}

/// What the file describes has to be the fixed pipeline; what it does not describe is.
fn check_pipeline(file: &Map<String, Value>) -> Result<(), TokenizerError> {
    let given = |name: &str| file.get(name).filter(|value| !value.is_null());
    let wrong = |path: &str, found: &Value, expected: &str| Err(field(TOKENIZER, path, Some(found), expected));
    if let Some(normalizer) = given("normalizer")
        && normalizer["type"] != "NFC"
    {
        return wrong("normalizer", normalizer, "type NFC");
    }
    if let Some(pre_tokenizer) = given("pre_tokenizer") {
        let steps = match pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice) {
            Some([split, bytes]) if pre_tokenizer["type"] == "Sequence" => (split, bytes),
            _ => return wrong("pre_tokenizer", pre_tokenizer, "a Sequence of Split and ByteLevel"),
        };
        let (split, bytes) = steps;
        let isolated = split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
        if !isolated || split["pattern"]["Regex"] != SPLIT_PATTERN {
            return wrong(
                "pre_tokenizer.pretokenizers[0]",
                split,
                "an isolated Split by this family's pattern",
            );
        }
        if bytes["type"] != "ByteLevel" || bytes["add_prefix_space"] != false || bytes["use_regex"] != false {
            return wrong(
                "pre_tokenizer.pretokenizers[1]",
                bytes,
                "ByteLevel without prefix space and regex",
            );
        }
    }
    for name in ["decoder", "post_processor"] {
        if let Some(step) = given(name)
            && step["type"] != "ByteLevel"
        {
            return wrong(name, step, "type ByteLevel");
        }
    }
    Ok(())
}

fn check_model(file: &Map<String, Value>) -> Result<&Map<String, Value>, TokenizerError> {
    let bad = |path: &str, found: Option<&Value>, expected: &str| field(TOKENIZER, path, found, expected);
    let model = file
        .get("model")
        .and_then(Value::as_object)
        .ok_or_else(|| bad("model", file.get("model"), "an object"))?;
    if model.get("type").and_then(Value::as_str) != Some("BPE") {
        return Err(bad("model.type", model.get("type"), "\"BPE\""));
    }
    for (name, neutral) in [
        ("dropout", json!(0.0)),
        ("continuing_subword_prefix", json!("")),
        ("end_of_word_suffix", json!("")),
        ("ignore_merges", json!(false)),
    ] {
        match model.get(name) {
            None | Some(Value::Null) => {}
            Some(value) if *value == neutral || (name == "dropout" && value.as_f64() == Some(0.0)) => {}
            other => return Err(bad(&format!("model.{name}"), other, &format!("null or {neutral}"))),
        }
    }
    let vocab = model
        .get("vocab")
        .and_then(Value::as_object)
        .filter(|vocab| !vocab.is_empty());
    let vocab = vocab.ok_or_else(|| bad("model.vocab", model.get("vocab"), "a non-empty object"))?;
    for (token, id) in vocab {
        if id.as_u64().is_none_or(|id| id > LARGEST_ID) {
            return Err(bad(
                &format!("model.vocab[{token:?}]"),
                Some(id),
                "an integer from 0 to 1000000",
            ));
        }
    }
    Ok(model)
}

/// One added token: its spelling, and whether it is special.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Added {
    content: String,
    special: bool,
}

/// The tokens of both lists, by id; what one id is called twice has to be identical.
fn added_token_list(
    file: &Map<String, Value>,
    config: &Map<String, Value>,
) -> Result<BTreeMap<u64, Added>, TokenizerError> {
    const LIST: &str = "added_tokens";
    const DECODER: &str = "added_tokens_decoder";
    let mut tokens = BTreeMap::new();
    let list = file.get(LIST).and_then(Value::as_array);
    for (index, entry) in list
        .ok_or_else(|| field(TOKENIZER, LIST, file.get(LIST), "an array"))?
        .iter()
        .enumerate()
    {
        let path = format!("{LIST}[{index}]");
        let id = entry["id"].as_u64().filter(|id| *id <= LARGEST_ID);
        let id = id.ok_or_else(|| {
            field(
                TOKENIZER,
                &format!("{path}.id"),
                entry.get("id"),
                "an integer from 0 to 1000000",
            )
        })?;
        if tokens.insert(id, added(TOKENIZER, &path, entry)?).is_some() {
            return Err(TokenizerError::Repeated {
                role: TOKENIZER,
                what: format!("id {id}"),
            });
        }
    }
    let decoder = config.get(DECODER).and_then(Value::as_object);
    let decoder = decoder.ok_or_else(|| field(TOKENIZER_CONFIG, DECODER, config.get(DECODER), "an object"))?;
    for (key, entry) in decoder {
        let path = format!("{DECODER}.{key}");
        let id = key
            .parse()
            .ok()
            .filter(|id: &u64| id.to_string() == *key && *id <= LARGEST_ID);
        let id = id.ok_or_else(|| field(TOKENIZER_CONFIG, &path, Some(&json!(key)), "a plain decimal id as key"))?;
        let token = added(TOKENIZER_CONFIG, &path, entry)?;
        match tokens.get(&id) {
            Some(known) if *known == token => {}
            Some(known) => {
                let expected = format!(
                    "the token of {TOKENIZER}, {:?}, special {}",
                    known.content, known.special
                );
                return Err(field(TOKENIZER_CONFIG, &path, Some(entry), &expected));
            }
            None => drop(tokens.insert(id, token)),
        }
    }
    Ok(tokens)
}

fn added(role: &'static str, path: &str, entry: &Value) -> Result<Added, TokenizerError> {
    let content = entry["content"].as_str().filter(|content| !content.is_empty());
    let content = content.ok_or_else(|| {
        field(
            role,
            &format!("{path}.content"),
            entry.get("content"),
            "a non-empty string",
        )
    })?;
    for name in ["single_word", "lstrip", "rstrip", "normalized"] {
        if entry[name] != false {
            return Err(field(role, &format!("{path}.{name}"), entry.get(name), "false"));
        }
    }
    let special = entry["special"].as_bool();
    let special =
        special.ok_or_else(|| field(role, &format!("{path}.special"), entry.get("special"), "true or false"))?;
    Ok(Added {
        content: content.into(),
        special,
    })
}

/// Number of ids, after checking that they are `0..n` and that no id or spelling is used twice.
fn count_ids(model: &Map<String, Value>, added: &BTreeMap<u64, Added>) -> Result<usize, TokenizerError> {
    let vocab = model["vocab"].as_object().into_iter().flatten();
    let vocab = vocab.map(|(token, id)| (token.as_str(), id.as_u64().unwrap_or(u64::MAX)));
    let mut ids = HashSet::new();
    let mut spellings = HashSet::new();
    for (spelling, id) in vocab.chain(added.iter().map(|(id, token)| (token.content.as_str(), *id))) {
        let repeated = |what| Err(TokenizerError::Repeated { role: TOKENIZER, what });
        if !ids.insert(id) {
            return repeated(format!("id {id}"));
        }
        if !spellings.insert(spelling) {
            return repeated(format!("the token {spelling:?}"));
        }
    }
    let largest = ids.iter().copied().max().unwrap_or(0);
    if largest + 1 != ids.len() as u64 {
        return Err(TokenizerError::Gap {
            tokens: ids.len(),
            largest,
        });
    }
    Ok(ids.len())
}

fn build(
    model: &Map<String, Value>,
    added: &BTreeMap<u64, Added>,
    mode: AddedTokens,
) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let added_tokens: Vec<Value> = match mode {
        AddedTokens::AsText => Vec::new(),
        AddedTokens::Match => added
            .iter()
            .map(|(id, token)| {
                json!({
                    "id": id, "content": token.content, "special": token.special, "single_word": false,
                    "lstrip": false, "rstrip": false, "normalized": false
                })
            })
            .collect(),
    };
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added_tokens,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": model,
    });
    let refused = |reason: &dyn std::fmt::Display| TokenizerError::Build(reason.to_string());
    let text = serde_json::to_vec(&file).map_err(|error| refused(&error))?;
    let tokenizer = tokenizers::Tokenizer::from_bytes(text).map_err(|error| refused(&error))?;
    // The library numbers added tokens itself; it must arrive at the ids of the file.
    if mode == AddedTokens::Match {
        for (id, token) in added {
            let numbered = tokenizer.token_to_id(&token.content);
            if numbered.map(u64::from) != Some(*id) {
                return Err(refused(&format!(
                    "token {:?} has id {id}, but is numbered {numbered:?}",
                    token.content
                )));
            }
        }
    }
    Ok(tokenizer)
}
