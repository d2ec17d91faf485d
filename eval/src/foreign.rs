//! Which kind of file this is, by content: several tools write reference files, two of them under one magic.

/// A recognised file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// Top tokens per window, `NINFTOPK` version 1: the format read and written here.
    TopTokens,
    /// `NINFTOPK` version 1 followed by a byte-order marker: three planes over all targets.
    TopKPlanes,
    /// `NINFKL01`: top tokens per stream with a digest of the ids.
    StreamTopK,
    /// `PPLHIDDN`: final hidden states per window.
    Hidden,
    /// `_logits_`: full rows in 16-bit codes, as `llama-perplexity --kl-divergence-base` writes them.
    LlamaBase,
    /// A GGUF model.
    Gguf,
    /// A zip archive, such as a NumPy `.npz`.
    Zip,
    /// JSON text, such as a report or a tokens file.
    Json,
}

impl FileKind {
    /// What to tell a user who named this file.
    pub fn description(self) -> &'static str {
        match self {
            Self::TopTokens => {
                "a top-token reference (NINFTOPK, one record per window); give it with --kl-reference instead"
            }
            Self::TopKPlanes => {
                "the other NINFTOPK layout, with a byte-order marker and one plane per quantity; its divergence has the \
                 opposite direction and its tokens carry no fingerprint"
            }
            Self::StreamTopK => "a NINFKL01 record (top tokens per stream)",
            Self::Hidden => "a hidden-state reference; give it with --kl-hidden instead",
            Self::LlamaBase => "a llama.cpp logit base (_logits_); give it with --kl-base instead",
            Self::Gguf => "a GGUF model",
            Self::Zip => "a zip archive",
            Self::Json => "JSON text, such as a report or a tokens file",
        }
    }
}

/// Bytes [`identify`] wants to see.
pub const PREFIX_LEN: usize = 16;

/// Recognises a file by its first [`PREFIX_LEN`] bytes, or fewer when it is shorter.
pub fn identify(prefix: &[u8]) -> Option<FileKind> {
    /// 01020304h in little-endian order.
    const BYTE_ORDER_MARKER: &[u8] = &[4, 3, 2, 1];
    match prefix {
        _ if prefix.starts_with(b"NINFTOPK") => match prefix.get(12..16) {
            Some(BYTE_ORDER_MARKER) => Some(FileKind::TopKPlanes),
            _ => Some(FileKind::TopTokens),
        },
        _ if prefix.starts_with(b"NINFKL01") => Some(FileKind::StreamTopK),
        _ if prefix.starts_with(b"PPLHIDDN") => Some(FileKind::Hidden),
        _ if prefix.starts_with(b"_logits_") => Some(FileKind::LlamaBase),
        _ if prefix.starts_with(b"GGUF") => Some(FileKind::Gguf),
        _ if prefix.starts_with(b"PK\x03\x04") => Some(FileKind::Zip),
        _ if prefix.trim_ascii_start().first() == Some(&b'{') => Some(FileKind::Json),
        _ => None,
    }
}

/// `what it is`, for a message about a file that is something else.
pub(crate) fn describe(prefix: &[u8]) -> &'static str {
    identify(prefix).map_or("of an unknown kind", FileKind::description)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart_by_content() {
        let cases: [(&[u8], Option<FileKind>); 10] = [
            (b"NINFTOPK\x01\0\0\0\x20\0\0\0", Some(FileKind::TopTokens)),
            (b"NINFTOPK\x01\0\0\0\x04\x03\x02\x01", Some(FileKind::TopKPlanes)),
            (b"NINFKL01\x3c\0\0\0", Some(FileKind::StreamTopK)),
            (b"PPLHIDDN\x01\0\0\0", Some(FileKind::Hidden)),
            (b"_logits_\0\x02\0\0", Some(FileKind::LlamaBase)),
            (b"GGUF\x03\0\0\0", Some(FileKind::Gguf)),
            (b"PK\x03\x04", Some(FileKind::Zip)),
            (b" \n{\"schema", Some(FileKind::Json)),
            (b"", None),
            (b"hello", None),
        ];
        for (prefix, expected) in cases {
            assert_eq!(identify(prefix), expected);
        }
    }
}
