//! A tokenizer made as large as a published one.

use serde_json::{Map, Value};

use crate::convert::{self, ConvertError};
use crate::source::TextSource;
use crate::tokenizer::{AddedTokens, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, TextTokenizer, TokenizerError};

/// The resources of `source`, its tokenizer grown to `ids` ids: entries that no merge leads to follow the vocabulary, and
/// the added tokens, which stand behind it, move to the end.
///
/// # Errors
/// When the tokenizer cannot be used, or has more ids.
pub(super) fn padded(
    source: &dyn TextSource,
    ids: usize,
    notes: &mut Vec<String>,
) -> Result<Vec<(&'static str, Vec<u8>)>, ConvertError> {
    let known = TextTokenizer::from_source(source, AddedTokens::Match)?.public_tokens();
    if known > ids {
        return Err(TokenizerError::MoreTokensThanRows {
            tokens: known,
            rows: ids,
        }
        .into());
    }
    let mut resources = convert::resources(source, notes)?;
    let mut vocabulary = known;
    // The tokenizer comes first, and says where its vocabulary ends.
    for (role, bytes) in &mut resources {
        let role = *role;
        let parse = |bytes: &[u8]| -> Result<Value, TokenizerError> {
            serde_json::from_slice(bytes).map_err(|error| TokenizerError::Json {
                role,
                reason: error.to_string(),
            })
        };
        let moved = |id: u64| {
            if id < vocabulary as u64 {
                id
            } else {
                id + (ids - known) as u64
            }
        };
        let mut file = match role {
            TOKENIZER | TOKENIZER_CONFIG | GENERATION_CONFIG => parse(bytes)?,
            _ => continue,
        };
        match role {
            TOKENIZER => vocabulary = grow(&mut file, ids - known),
            TOKENIZER_CONFIG => move_keys(&mut file["added_tokens_decoder"], moved),
            _ => move_ids(&mut file["eos_token_id"], moved),
        }
        *bytes = file.to_string().into_bytes();
    }
    Ok(resources)
}

/// Puts `more` unused entries behind the vocabulary of `tokenizer.json`; returns how many it had.
fn grow(file: &mut Value, more: usize) -> usize {
    let Some(vocab) = file["model"]["vocab"].as_object_mut() else {
        return 0;
    };
    let known = vocab.len();
    vocab.extend((known..known + more).map(|id| (format!("<|unused_{id}|>"), id.into())));
    for token in file["added_tokens"].as_array_mut().into_iter().flatten() {
        move_ids(
            &mut token["id"],
            |id| if id < known as u64 { id } else { id + more as u64 },
        );
    }
    known
}

/// Moves an id, or the ids of a list.
fn move_ids(value: &mut Value, moved: impl Fn(u64) -> u64 + Copy) {
    match value {
        Value::Array(ids) => ids.iter_mut().for_each(|id| move_ids(id, moved)),
        other => {
            if let Some(id) = other.as_u64() {
                *other = moved(id).into();
            }
        }
    }
}

/// Moves the ids that are the keys of an object.
fn move_keys(value: &mut Value, moved: impl Fn(u64) -> u64) {
    if let Value::Object(members) = value {
        let of_key = |(key, member): (String, Value)| match key.parse() {
            Ok(id) => (moved(id).to_string(), member),
            Err(_) => (key, member),
        };
        *members = std::mem::take(members).into_iter().map(of_key).collect::<Map<_, _>>();
    }
}
