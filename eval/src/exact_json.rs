//! Reading JSON with every fraction as the nearest f64, so that a written report reads back as the same bits.
//!
//! The JSON library rounds the last bit of some fractions when reading. Here fractions outside strings are first quoted
//! behind a marker, and the marked strings are then parsed by the standard library, which rounds correctly.

use serde::de::DeserializeOwned;
use serde_json::{Number, Value};

/// Begins a quoted fraction. JSON text cannot contain it unescaped; a string that imitates it with an escape becomes a
/// number, which the fields of a string then refuse.
const MARKER: char = '\u{1}';
const QUOTED_MARKER: &str = "\"\\u0001";

/// Parses `text`.
///
/// # Errors
/// When it is not JSON, or not the JSON of a `T`.
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, serde_json::Error> {
    let mut value: Value = serde_json::from_str(&quote_fractions(text))?;
    unquote(&mut value);
    serde_json::from_value(value)
}

fn quote_fractions(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if rest.starts_with('"') {
            let end = string_end(rest);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        } else {
            let is_number = |c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.' | 'e' | 'E');
            let end = rest.find(|c| !is_number(c)).unwrap_or(rest.len());
            let (number, after) = rest.split_at(end);
            if number.contains(['.', 'e', 'E']) {
                out.push_str(QUOTED_MARKER);
                out.push_str(number);
                out.push('"');
            } else {
                out.push_str(number);
            }
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

/// End of the string that `text` begins with, its quotes included.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

fn unquote(value: &mut Value) {
    match value {
        Value::String(text) => {
            let number = text
                .strip_prefix(MARKER)
                .and_then(|digits| digits.parse().ok())
                .and_then(Number::from_f64);
            if let Some(number) = number {
                *value = Value::Number(number);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(unquote),
        Value::Object(fields) => fields.values_mut().for_each(unquote),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn strings_and_integers_are_left_alone() {
        let text = r#"{"a\"1.5": ["1.5", "\\", -1.5e-3, 18446744073709551615, -2, null, true], "b": {}}"#;
        let exact: Value = parse(text).unwrap();
        assert_eq!(exact, serde_json::from_str::<Value>(text).unwrap());
    }

    #[test]
    fn what_is_not_json_is_refused() {
        for text in ["", "{", "[1.5", "[1.2.3]x", "\"abc", "1e", "[--1]"] {
            assert!(parse::<f64>(text).is_err(), "{text}");
        }
        assert!(parse::<f64>("1e999").is_err());
    }

    proptest! {
        #[test]
        fn every_f64_reads_back_as_itself(bits in any::<u64>()) {
            let value = f64::from_bits(bits);
            prop_assume!(value.is_finite());
            let text = serde_json::to_string(&[value]).unwrap();
            let back: [f64; 1] = parse(&text).unwrap();
            prop_assert_eq!(back[0].to_bits(), bits);
        }
    }
}
